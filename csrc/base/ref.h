#pragma once

#include <memory>
#include <utility>

namespace deplo {

/// A shared, immutable node. Passes build new nodes; they never write through a Ref.
template <class T>
using Ref = std::shared_ptr<const T>;

/// Joins lambdas into one visitor for std::visit.
template <class... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

}  // namespace deplo
