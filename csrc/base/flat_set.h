#pragma once

#include <algorithm>
#include <utility>
#include <vector>

namespace deplo {

/// A set of few elements in one stretch of memory, in ascending order: cheaper to make, to copy and to go through than a tree.
template <class T>
class FlatSet {
 public:
  using const_iterator = std::vector<T>::const_iterator;

  FlatSet() = default;
  template <class It>
  FlatSet(It first, It last) {
    insert(first, last);
  }

  /// Where the element is, and whether it is new.
  std::pair<const_iterator, bool> insert(const T& value) {
    auto it = std::lower_bound(items_.begin(), items_.end(), value);
    if (it != items_.end() && *it == value) return {it, false};
    return {items_.insert(it, value), true};
  }
  template <class It>
  void insert(It first, It last) {
    for (; first != last; ++first) insert(*first);
  }
  /// How many elements that were.
  size_t erase(const T& value) {
    auto it = std::lower_bound(items_.begin(), items_.end(), value);
    if (it == items_.end() || !(*it == value)) return 0;
    items_.erase(it);
    return 1;
  }
  size_t count(const T& value) const { return std::binary_search(items_.begin(), items_.end(), value) ? 1 : 0; }
  void clear() { items_.clear(); }
  const_iterator begin() const { return items_.begin(); }
  const_iterator end() const { return items_.end(); }
  size_t size() const { return items_.size(); }
  bool empty() const { return items_.empty(); }

 private:
  std::vector<T> items_;
};

}  // namespace deplo
