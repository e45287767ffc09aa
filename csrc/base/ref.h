#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace deplo {

/// A shared, immutable node. Passes build new nodes; they never write through a Ref.
template <class T>
using Ref = std::shared_ptr<const T>;

/// A list of nodes: equal where the nodes are equal, wherever they lie.
template <class T>
struct Refs : std::vector<Ref<T>> {
  using std::vector<Ref<T>>::vector;
  Refs(std::vector<Ref<T>> nodes) : std::vector<Ref<T>>(std::move(nodes)) {}  // NOLINT(google-explicit-constructor)
  bool operator==(const Refs& other) const {
    return std::equal(this->begin(), this->end(), other.begin(), other.end(), [](const Ref<T>& a, const Ref<T>& b) { return a == b || *a == *b; });
  }
};

/// Joins lambdas into one visitor for std::visit.
template <class... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

}  // namespace deplo
