#include "loop_ir/verify.h"

#include <algorithm>
#include <unordered_set>

#include "base/error.h"
#include "base/require.h"
#include "loop_ir/structure.h"
#include "loop_ir/text.h"

namespace deplo::loop_ir {
namespace {

class Verifier : StatementVerifier {
 public:
  explicit Verifier(const Kernel& kernel) : StatementVerifier("loop @" + kernel.name, kernel.params, kernel.symbols), kernel_(kernel) {}

  void run() {
    block(kernel_.body, parameters());
    check_stored();
  }

 private:
  using StatementVerifier::statement;

  void block(const Block& body, Visible names) {
    for (const auto& stmt : body) statement(*stmt, names);
  }

  void statement(const Stmt& stmt, Visible& names) {
    located(stmt.location, [&] { std::visit([&](const auto& s) { statement(s, names); }, stmt.node); });
  }

  void define_axis(Visible& names, const Axis& axis) const {
    expression(names, axis.extent, "extent of " + axis.name);
    DEPLO_REQUIRE(!axis.extent.is_constant() || axis.extent.value() >= 0, fmt::format("the extent of {} is {}", axis.name, axis.extent.value()));
    StatementVerifier::define_axis(names, axis.name, 0, axis.extent);
  }

  void statement(const Load& s, Visible& names) {
    DEPLO_REQUIRE(s.fill.dtype == s.dtype, s.name + ": the fill of a load has its buffer's dtype");
    StatementVerifier::statement(s, names);
  }

  void statement(const Store& s, Visible& names) {
    DEPLO_REQUIRE(!s.atomic, fmt::format("store to {}: it is atomic, which is for Tile IR alone", s.buffer));
    StatementVerifier::statement(s, names);
  }

  void statement(const For& s, Visible& names) {
    Visible inner = names;
    // Schedules cut and merge the axes of loops, each by itself; the last chunk of a reduction may be shorter.
    for (const std::string& name : symbols_of(s.extent))
      DEPLO_REQUIRE(is_size(name), fmt::format("the extent of {} uses {}, which is not a size", s.axis, name));
    define_axis(inner, {s.axis, s.extent});
    block(s.body, std::move(inner));
  }

  /// The names at the end of a body that defines what is combined.
  Visible reduced(const std::vector<Axis>& axes, const Block& body, const Visible& names) {
    DEPLO_REQUIRE(!axes.empty(), "a reduction has no axis");
    Visible inner = names;
    for (const Axis& axis : axes) define_axis(inner, axis);
    for (const auto& stmt : body) statement(*stmt, inner);
    return inner;
  }

  void statement(const Reduce& s, Visible& names) {
    combination(s.results, s.dtypes, s.combiner, s.operands, reduced(s.axes, s.body, names));
    for (size_t k = 0; k < s.results.size(); ++k) define(names, s.results[k], s.dtypes[k]);
  }

  void statement(const Scan& s, Visible& names) {
    Visible inner = reduced({s.axis}, s.body, names);
    combination(s.results, s.dtypes, s.combiner, s.operands, inner);
    for (size_t k = 0; k < s.results.size(); ++k) define(inner, s.results[k], s.dtypes[k]);
    block(s.then, std::move(inner));
  }

  void statement(const Local& s, Visible& names) { define_buffer(names, s.name, {s.dtype, &s.shape, true}); }

  const Kernel& kernel_;
};

}  // namespace

void verify(const Kernel& kernel) {
  located(kernel.location, [&] { Verifier(kernel).run(); });
}

namespace {

/// Everything that a kernel's correctness follows from: not its name, nor those of its parameters.
std::string key_of(const Kernel& kernel) {
  std::vector<std::string> buffers;
  for (const Param& p : kernel.params) buffers.push_back(p.name);
  const size_t params = buffers.size();
  Structure key;
  key.add(structure_of(kernel.body, buffers));
  for (size_t k = 0; k < params; ++k) {
    const Param& p = kernel.params[k];
    key.add(static_cast<size_t>(std::find(buffers.begin(), buffers.end(), p.name) - buffers.begin()));
    key.add(static_cast<char>(p.kind));
    key.add(static_cast<char>(p.dtype));
    key.add(p.shape);
    key.add(p.strides);
  }
  for (const auto& [name, range] : kernel.symbols) {
    key.add(name);
    for (const auto& bound : {range.lo, range.hi}) key.add(bound ? std::vector<Expr>{*bound} : std::vector<Expr>());
  }
  return key.take();
}

}  // namespace

void verify(const Module& module) {
  std::unordered_set<std::string> correct;  // equal layers have equal kernels
  verify_module(module, [&](const Kernel& kernel) {
    if (correct.insert(key_of(kernel)).second) verify(kernel);
  });
}

}  // namespace deplo::loop_ir
