#include "target/cpu/schedule/scans.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "loop_ir/build.h"
#include "loop_ir/places.h"
#include "loop_ir/rewrite.h"
#include "scalar/functions.h"
#include "target/cpu/schedule/nest_converter.h"

namespace deplo::loop_to_tile {

using namespace loop_ir;

namespace {

/// Whether a straight statement takes many instructions: what rounds to 16 bits, and functions other than those that processors have.
bool takes_long(const Stmt& stmt) {
  const auto* let = std::get_if<Let>(&stmt.node);
  if (!let) return false;
  if (let->fn == Fn::cast) return is_float(let->dtype) && size_of(let->dtype) < 4;
  const Signature of = info(let->fn).signature;
  if (of == Signature::predicate || info(let->fn).arity != 1) return false;
  return !std::set{Fn::neg, Fn::abs, Fn::sqrt, Fn::bit_not, Fn::bitcast, Fn::floor, Fn::ceil, Fn::trunc, Fn::round}.count(let->fn);
}

bool computes(const Block& block) {
  return std::any_of(block.begin(), block.end(), [](const auto& stmt) { return takes_long(*stmt); });
}

std::map<std::string, DType> values_of(const Block& block) {
  std::map<std::string, DType> values;
  for (const auto& stmt : block) {
    if (const auto* let = std::get_if<Let>(&stmt->node)) values[let->name] = let->dtype;
    if (const auto* load = std::get_if<Load>(&stmt->node)) values[load->name] = load->dtype;
  }
  return values;
}

/// Whether straight statements read one of the values.
bool uses_any(const Block& block, const std::map<std::string, DType>& values) {
  std::set<std::string> used;
  for (const auto& stmt : block) collect_uses(*stmt, used);
  return std::any_of(values.begin(), values.end(), [&](const auto& value) { return used.count(value.first) > 0; });
}

/// Whether one iteration may read what an earlier one stored.
bool reads_what_it_stores(const Scan& scan) {
  const auto loads = [&](const std::string& buffer) {
    return std::any_of(scan.body.begin(), scan.body.end(), [&](const auto& stmt) {
      const auto* load = std::get_if<Load>(&stmt->node);
      return load && load->buffer == buffer;
    });
  };
  return std::any_of(scan.then.begin(), scan.then.end(), [&](const auto& stmt) {
    const auto* store = std::get_if<Store>(&stmt->node);
    return store && loads(store->buffer);
  });
}

/// The scan in its parts.
Block apart(const Scan& scan, Names& names) {
  const std::map<std::string, DType> values = values_of(scan.body);
  // What follows may see what came before: then all of it stays.
  const bool prepares = computes(scan.body) && !uses_any(scan.then, values) &&
                        std::all_of(scan.operands.begin(), scan.operands.end(), [&](const auto& name) { return values.count(name) > 0; });
  const bool finishes = computes(scan.then) && !uses_any(scan.then, values);
  if ((!prepares && !finishes) || reads_what_it_stores(scan)) return {make_stmt(scan)};
  if (!NestConverter::is_straight(scan.body) || !NestConverter::is_straight(scan.then)) return {make_stmt(scan)};
  Block out;
  Scan inner = scan;
  const Expr here = Expr::symbol(scan.axis.name);
  const auto loop_over = [&](const Block& body, const std::string& axis) {
    Renaming renaming;
    renaming.value(scan.axis.name, axis);
    out.push_back(make_for({axis, scan.axis.extent}, copy_block(body, renaming, nullptr)));
  };
  if (prepares) {
    Block before = scan.body;
    inner.body.clear();
    for (std::string& operand : inner.operands) {
      const DType dtype = values.at(operand);
      const std::string row = names.fresh("t0");
      out.push_back(make_stmt(Local{row, dtype, {scan.axis.extent}}));
      before.push_back(make_stmt(Store{row, {here}, operand, {}, Combiner::set}));
      operand = names.fresh("v0");
      inner.body.push_back(make_stmt(Load{operand, dtype, row, {here}, {}, zero_of(dtype)}));
    }
    loop_over(before, names.fresh("i0"));
  }
  if (!finishes) {
    out.push_back(make_stmt(std::move(inner)));
    return out;
  }
  inner.then.clear();
  Block after;
  Renaming renaming;
  for (size_t k = 0; k < scan.results.size(); ++k) {
    const std::string row = names.fresh("t0");
    out.push_back(make_stmt(Local{row, scan.dtypes[k], {scan.axis.extent}}));
    inner.then.push_back(make_stmt(Store{row, {here}, scan.results[k], {}, Combiner::set}));
    const std::string again = names.fresh("v0");
    after.push_back(make_stmt(Load{again, scan.dtypes[k], row, {here}, {}, zero_of(scan.dtypes[k])}));
    renaming.value(scan.results[k], again);
  }
  for (auto& stmt : copy_block(scan.then, renaming, nullptr)) after.push_back(std::move(stmt));
  out.push_back(make_stmt(std::move(inner)));
  loop_over(after, names.fresh("i0"));
  return out;
}

}  // namespace

Kernel take_out_of_scans(const Kernel& kernel) {
  Kernel out = kernel;
  Names names;
  names.reserve(kernel);
  const Nest nest = peel(kernel.body);
  Block body;
  for (const auto& stmt : nest.body) {
    const auto* scan = std::get_if<Scan>(&stmt->node);
    for (auto& part : scan ? apart(*scan, names) : Block{stmt}) body.push_back(std::move(part));
  }
  if (body.size() != nest.body.size()) out.body = make_nest(nest.axes, std::move(body));
  return out;
}

}  // namespace deplo::loop_to_tile
