#pragma once

#include <set>
#include <string>
#include <vector>

#include "loop_ir/ir.h"

namespace deplo::loop_ir {

/// Whether an axis is too short for lanes of its own: memory along it goes on in the next row, where they go on, too.
inline bool is_short(const Axis& axis) { return axis.extent.is_constant() && axis.extent.value() <= 4; }

/// How many loads and stores name the buffer.
int64_t count_uses(const Block& block, const std::string& buffer);

/// The value that a let or a load defines; "" of other statements.
std::string name_of(const Stmt& stmt);

/// Whether it divides integers, which stops the process where the divisor is 0, or -1 under the least number.
bool divides_integers(const Let& let);

/// Whether it is a let or a load.
bool is_straight(const Stmt& stmt);

/// Adds the values and the symbols that a let, a load or a store itself takes.
void collect_uses(const Stmt& stmt, std::set<std::string>& into);

/// The statements of a pool, in order, that these values need.
Block statements_for(const Block& pool, std::set<std::string> names);

/// Whether each index is one of the axes, and all of them occur: every iteration has a place of its own.
bool one_place_each(const std::vector<Expr>& index, const std::vector<Axis>& axes);

/// The store by which `next` may take the place of `old` from this loop on: each element of `old` is read there only just before the one of `next`
/// at the same coordinates is stored, once and without a guard; those of `next` may be more, in front. Null if there is none.
const Store* takes_place(const Ref<Stmt>& loop, const Local& old, const std::string& next);

}  // namespace deplo::loop_ir
