#pragma once

#include <string>
#include <vector>

#include "loop_ir/ir.h"

namespace deplo::loop_ir {

/// The points at which a condition that is linear in the axis turns: it holds (or does not) from there on.
std::vector<Expr> turns_of(const Cond& cond, const std::string& axis);

/// Adds a point between 0 and the extent to points in increasing order, if it is known where among them it lies.
void insert_turn(Expr point, Expr extent, std::vector<Expr>& points, const Ranges& symbols);

/// The points between 0 and the axis' extent at which a guard of the body's loads or stores turns that asks for this axis and sizes alone,
/// `of_places` also a minimum or maximum in a place or index value; in increasing order, as far as that is known.
std::vector<Expr> turning_points(const Block& body, const Axis& axis, const Ranges& symbols, bool of_places = false);

/// The minima and maxima within e that use the axis.
std::vector<Expr> choices_in(Expr e, const std::string& axis);

}  // namespace deplo::loop_ir
