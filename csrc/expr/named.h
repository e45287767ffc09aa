#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "expr/expr.h"

namespace deplo {

/// Numbers for names, from 0 on. A text of an IR that stays as it is for as long as this lives is looked up once, and known by its address from
/// then on: interpreters ask for each at every point.
class NameNumbers {
 public:
  size_t of(const std::string& name) {
    const auto address = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(&name));
    Known& known = known_[address * 0x9e3779b97f4a7c15 >> 54];
    if (known.name != &name) known = {&name, of_text(name)};
    return known.number;
  }
  /// Of a text that may be gone soon.
  size_t of_text(const std::string& name) { return numbers_.try_emplace(name, numbers_.size()).first->second; }

 private:
  struct Known {
    const std::string* name = nullptr;
    size_t number = 0;
  };
  std::array<Known, 1024> known_{};
  std::unordered_map<std::string, size_t> numbers_;
};

/// What names stand for.
template <class T>
class Named {
 public:
  explicit Named(NameNumbers& names) : names_(&names) {}

  T& operator[](const std::string& name) {
    std::optional<T>& place = place_of(names_->of(name));
    if (!place) place.emplace();
    return *place;
  }
  /// Throws InternalError naming what stands for nothing.
  const T& at(const std::string& name) const {
    const size_t number = names_->of(name);
    DEPLO_ASSERT(number < values_.size() && values_[number], "no value for {}", name);
    return *values_[number];
  }
  T& at(const std::string& name) { return const_cast<T&>(std::as_const(*this).at(name)); }
  bool holds(const std::string& name) const {
    const size_t number = names_->of(name);
    return number < values_.size() && values_[number];
  }
  /// The name may be gone soon.
  void set_text(const std::string& name, T value) { place_of(names_->of_text(name)) = std::move(value); }
  /// f(value) for each.
  template <class F>
  void for_each(const F& f) {
    for (std::optional<T>& value : values_)
      if (value) f(*value);
  }

 private:
  std::optional<T>& place_of(size_t number) {
    if (number >= values_.size()) values_.resize(number + 1);
    return values_[number];
  }

  NameNumbers* names_;
  std::vector<std::optional<T>> values_;
};

using NamedIntegers = Named<int64_t>;

/// Throws InternalError naming a symbol that has no value.
int64_t evaluate(Expr e, const NamedIntegers& values);
bool evaluate(const Cond& cond, const NamedIntegers& values);

}  // namespace deplo
