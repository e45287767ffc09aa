#include "target/cuda/schedule/scan_readers.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "loop_ir/build.h"
#include "loop_ir/rewrite.h"
#include "lower/loop_to_tile/convert.h"

namespace deplo::loop_to_tile {

using namespace loop_ir;

namespace {

/// How often a buffer is loaded or stored.
int64_t accesses_of(const Block& body, const std::string& buffer) {
  int64_t count = 0;
  loop_to_tile::visit_all(body, [&](const Stmt& stmt) {
    const auto* load = std::get_if<Load>(&stmt.node);
    const auto* store = std::get_if<Store>(&stmt.node);
    count += (load && load->buffer == buffer) || (store && store->buffer == buffer);
  });
  return count;
}

bool is_row(const Block& body, const std::string& buffer) {
  return std::any_of(body.begin(), body.end(), [&](const auto& stmt) {
    const auto* local = std::get_if<Local>(&stmt->node);
    return local && local->name == buffer && local->shape.size() == 1;
  });
}

/// The values that `then` puts into rows, at the scan's index, which have one reader.
std::map<std::string, std::string> rows_of(const Scan& scan, const Block& body) {
  std::map<std::string, std::string> rows;
  for (const auto& stmt : scan.then) {
    const auto* store = std::get_if<Store>(&stmt->node);
    if (!store || store->combiner != Combiner::set || !store->guard.empty() || !is_row(body, store->buffer)) continue;
    if (store->index[0] == sym(scan.axis.name) && accesses_of(body, store->buffer) == 2) rows[store->buffer] = store->value;
  }
  return rows;
}

struct Joined {
  Scan scan;
  std::set<std::string> rows;  ///< that are no more
};

/// The scan with the loop's body behind its own, if that is possible.
std::optional<Joined> joined_scan(const Scan& scan, const For& reader, const Kernel& kernel, const Block& body) {
  const std::map<std::string, std::string> rows = rows_of(scan, body);
  if (rows.empty() || reader.extent != scan.axis.extent) return std::nullopt;
  std::set<std::string> stored;
  loop_to_tile::visit_all(body, [&](const Stmt& stmt) {
    if (const auto* store = std::get_if<Store>(&stmt.node)) stored.insert(store->buffer);
  });
  const Expr last = scan.axis.extent - 1;
  std::optional<Expr> place;
  Renaming renaming;
  Joined out{scan, {}};
  Block rest;
  for (const auto& stmt : reader.body) {
    const auto* load = std::get_if<Load>(&stmt->node);
    const auto* store = std::get_if<Store>(&stmt->node);
    if (!load && !store && !std::holds_alternative<Let>(stmt->node)) return std::nullopt;
    // What the scan reads is to be as it was.
    if (store && accesses_of(scan.body, store->buffer) + accesses_of(scan.then, store->buffer) > 0) return std::nullopt;
    const auto row = load ? rows.find(load->buffer) : rows.end();
    if (row == rows.end()) {
      if (load && stored.count(load->buffer) > 0) return std::nullopt;
      rest.push_back(stmt);
      continue;
    }
    const bool forwards = load->index[0] == sym(reader.axis);
    if (!load->guard.empty() || (!forwards && load->index[0] != last - sym(reader.axis))) return std::nullopt;
    const Expr at = forwards ? sym(scan.axis.name) : last - sym(scan.axis.name);
    if (place && *place != at) return std::nullopt;
    place = at;
    renaming.value(load->name, row->second);
    out.rows.insert(row->first);
  }
  if (!place) return std::nullopt;
  renaming.exprs[reader.axis] = *place;
  Names names;
  names.reserve(kernel);
  std::erase_if(out.scan.then, [&](const auto& stmt) {
    const auto* store = std::get_if<Store>(&stmt->node);
    return store && out.rows.count(store->buffer) > 0;
  });
  for (auto& stmt : copy_block(rest, renaming, &names)) out.scan.then.push_back(std::move(stmt));
  return out;
}

}  // namespace

Kernel join_scan_readers(const Kernel& kernel) {
  Nest nest = peel(kernel.body);
  for (size_t k = 0; k + 1 < nest.body.size(); ++k) {
    const auto* scan = std::get_if<Scan>(&nest.body[k]->node);
    size_t next = k + 1;  // behind what does not depend on results, which nothing but `then` sees
    while (next + 1 < nest.body.size() && std::holds_alternative<Let>(nest.body[next]->node)) ++next;
    const auto* reader = std::get_if<For>(&nest.body[next]->node);
    auto both = scan && reader ? joined_scan(*scan, *reader, kernel, nest.body) : std::nullopt;
    if (!both) continue;
    nest.body[next] = std::make_shared<Stmt>(Stmt{std::move(both->scan)});
    nest.body.erase(nest.body.begin() + static_cast<std::ptrdiff_t>(k));
    std::erase_if(nest.body, [&](const auto& stmt) {
      const auto* local = std::get_if<Local>(&stmt->node);
      return local && both->rows.count(local->name) > 0;
    });
    Kernel out = kernel;
    out.body = make_nest(nest.axes, nest.body);
    return join_scan_readers(out);
  }
  return kernel;
}

bool is_product_of_doubles(const Stmt& stmt) {
  const auto* scan = std::get_if<Scan>(&stmt.node);
  if (!scan || scan->combiner != Combiner::prod || scan->dtypes[0] != DType::f64) return false;
  const auto dtype_of = [&](const std::string& name) {
    for (const auto& s : scan->body) {
      if (const auto* load = std::get_if<Load>(&s->node); load && load->name == name) return load->dtype;
      if (const auto* let = std::get_if<Let>(&s->node); let && let->name == name) return let->dtype;
    }
    return DType::f64;
  };
  return std::none_of(scan->body.begin(), scan->body.end(), [&](const auto& s) {
    const auto* let = std::get_if<Let>(&s->node);
    return let && let->name == scan->operands[0] && let->fn == Fn::cast && dtype_of(let->operands[0]) != DType::f64;
  });
}

}  // namespace deplo::loop_to_tile
