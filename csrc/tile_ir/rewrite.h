#pragma once

#include <memory>
#include <utility>

#include "tile_ir/ir.h"

namespace deplo::tile_ir {

inline Ref<Stmt> make_stmt(decltype(Stmt::node) node) { return std::make_shared<Stmt>(Stmt{std::move(node)}); }

/// Calls f(stmt) on every statement, outer before inner.
template <class F>
void visit_all(const Block& block, const F& f) {
  for (const auto& stmt : block) {
    f(*stmt);
    std::visit(Overloaded{[&](const For& s) { visit_all(s.body, f); }, [&](const Reduce& s) { visit_all(s.body, f); },
                          [&](const Scan& s) {
                            visit_all(s.body, f);
                            visit_all(s.then, f);
                          },
                          [&](const If& s) { visit_all(s.body, f); }, [](const auto&) {}},
               stmt->node);
  }
}

/// Rebuilds `block` bottom-up through f, which maps a statement to the block that replaces it. What did not change stays the same object.
template <class F>
Block rewrite(const Block& block, const F& f) {
  Block out;
  for (const auto& stmt : block) {
    Ref<Stmt> rebuilt = stmt;
    std::visit(Overloaded{[&]<class Nest>(const Nest& s)
                            requires requires { s.body; }
                          {
                            Nest copy = s;
                            copy.body = rewrite(s.body, f);
                            bool changed = copy.body != s.body;
                            if constexpr (requires { s.then; }) {
                              copy.then = rewrite(s.then, f);
                              changed = changed || copy.then != s.then;
                            }
                            if (changed) rebuilt = make_stmt(std::move(copy));
                          },
                          [](const auto&) {}},
                          stmt->node);
    for (auto& replacement : f(rebuilt)) out.push_back(std::move(replacement));
  }
  return out;
}

}  // namespace deplo::tile_ir
