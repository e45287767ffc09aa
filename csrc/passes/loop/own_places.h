#pragma once

#include <string>

#include "passes/loop/share_axes.h"

namespace deplo {

/// Every iteration of the outer loops has a place of its own in the buffer, and touches no other.
bool has_own_places(const NestGroup& nest, const std::string& buffer);

/// All loads and stores of the buffer name the same place.
bool touches_one_place(const NestGroup& nest, const std::string& buffer);

/// Each element of the buffer is stored, once, by the iteration whose place it is: no guard, no combining store.
bool replaces_all(const NestGroup& nest, const std::string& buffer, const std::vector<Expr>& shape, const Ranges& symbols);

}  // namespace deplo
