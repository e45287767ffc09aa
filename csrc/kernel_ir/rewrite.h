#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "kernel_ir/ir.h"

namespace deplo::kernel_ir {

inline Ref<Stmt> make_stmt(decltype(Stmt::node) node) { return std::make_shared<Stmt>(Stmt{std::move(node)}); }

/// Calls f(stmt) on every statement, outer before inner.
template <class F>
void visit_all(const Block& block, const F& f) {
  for (const auto& stmt : block) {
    f(*stmt);
    if (const auto* loop = std::get_if<For>(&stmt->node)) visit_all(loop->body, f);
    if (const auto* branch = std::get_if<If>(&stmt->node)) {
      visit_all(branch->then, f);
      visit_all(branch->otherwise, f);
    }
  }
}

/// Rebuilds `block` bottom-up through f, which maps a statement to the block that replaces it. What did not change stays the same object.
template <class F>
Block rewrite(const Block& block, const F& f) {
  Block out;
  for (const auto& stmt : block) {
    Ref<Stmt> rebuilt = stmt;
    if (const auto* loop = std::get_if<For>(&stmt->node)) {
      Block body = rewrite(loop->body, f);
      if (body != loop->body) {
        For copy = *loop;
        copy.body = std::move(body);
        rebuilt = make_stmt(std::move(copy));
      }
    } else if (const auto* branch = std::get_if<If>(&stmt->node)) {
      Block then = rewrite(branch->then, f);
      Block otherwise = rewrite(branch->otherwise, f);
      if (then != branch->then || otherwise != branch->otherwise)
        rebuilt = make_stmt(If{branch->guard, branch->condition, std::move(then), std::move(otherwise)});
    }
    for (auto& replacement : f(rebuilt)) out.push_back(std::move(replacement));
  }
  return out;
}

/// The module with the body of each kernel mapped through f; what did not change stays the same object.
template <class F>
Module with_bodies(Module module, const F& f) {
  for (auto& kernel : module.kernels) {
    Block body = f(*kernel);
    if (body == kernel->body) continue;
    auto rebuilt = std::make_shared<Kernel>(*kernel);
    rebuilt->body = std::move(body);
    kernel = std::move(rebuilt);
  }
  return module;
}

/// The name that a statement defines as a value; empty for a var and for statements without a value.
std::string defined_value(const Stmt& stmt);

/// Names and index expressions that one statement reads, without its nested blocks. Each callback maps what it is given to what shall stand in its
/// place; the statement is returned unchanged (the same object) if nothing differs.
struct Uses {
  std::function<std::string(const std::string&)> value;  ///< operands, masks, gathers; never buffers or definitions
  std::function<Expr(Expr)> index;
};
Ref<Stmt> map_uses(const Ref<Stmt>& stmt, const Uses& uses);

}  // namespace deplo::kernel_ir
