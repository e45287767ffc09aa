#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "loop_ir/build.h"
#include "loop_ir/params.h"
#include "loop_ir/places.h"
#include "loop_ir/rewrite.h"

namespace deplo::loop_ir {
namespace {

std::set<std::string> names_read(const Block& block) {
  std::set<std::string> names;
  for_each_expr(block, [&](const Expr& e) { collect_symbols(e, names); });
  visit(block, [&](const Stmt& s, const auto&) {
    collect_uses(s, names);
    if (const auto* reduce = std::get_if<Reduce>(&s.node)) names.insert(reduce->operands.begin(), reduce->operands.end());
    if (const auto* scan = std::get_if<Scan>(&s.node)) names.insert(scan->operands.begin(), scan->operands.end());
  });
  return names;
}

/// The truths under which, and only under which, the straight-line statements of one block read a value.
class Truths {
 public:
  Truths(const Block& block, const std::set<std::string>& results) {
    for (const std::string& name : results) read(name, {}, {});
    for (const auto& stmt : block)
      if (const auto* let = std::get_if<Let>(&stmt->node)) lets_[let->name] = let;
    for (size_t at = block.size(); at-- > 0;) {
      if (const auto* let = std::get_if<Let>(&block[at]->node))
        add(*let);
      else
        others(block[at]);
    }
  }

  /// Whether nobody sees what the choice gives where its truth does not hold.
  bool is_settled(const Let& choice, const std::string& kept) const {
    const auto it = read_.find(choice.name);
    if (it == read_.end()) return false;
    const std::set<std::string>& under = is_divisor(kept) ? it->second.as_divisor : it->second.as_any;
    return under.count(choice.operands[0]) > 0;
  }

 private:
  struct Reads {
    std::set<std::string> as_any;
    std::set<std::string> as_divisor;  ///< of a value by which integers may be divided
  };

  /// Whether integers may be divided by it: neither 0 nor -1, with which the least number overflows.
  bool is_divisor(const std::string& name) const {
    const auto it = lets_.find(name);
    return it != lets_.end() && it->second->fn == Fn::constant && !is_float(it->second->dtype) && it->second->literal.i != 0 &&
           it->second->literal.i != -1;
  }

  void add(const Let& s) {
    if (s.fn == Fn::index) {
      std::set<std::string> names;
      collect_symbols(s.index, names);
      for (const std::string& name : names) read(name, {}, {});
    }
    const auto it = read_.find(s.name);
    const std::set<std::string> under = it == read_.end() ? std::set<std::string>{} : it->second.as_any;
    for (size_t k = 0; k < s.operands.size(); ++k) {
      std::set<std::string> here = under;
      if (s.fn == Fn::where && k == 1) here.insert(s.operands[0]);
      if (!divides_integers(s))
        read(s.operands[k], here, here);
      else if (k == 0)
        read(s.operands[k], is_divisor(s.operands[1]) ? here : std::set<std::string>{}, {});
      else
        read(s.operands[k], {}, here);
    }
  }

  void others(const Ref<Stmt>& stmt) {
    for (const std::string& name : names_read({stmt})) read(name, {}, {});
  }

  void read(const std::string& name, const std::set<std::string>& any, const std::set<std::string>& divisor) {
    auto [it, first] = read_.try_emplace(name, Reads{any, divisor});
    if (first) return;
    auto both = [](std::set<std::string>& a, const std::set<std::string>& b) { std::erase_if(a, [&](const auto& x) { return b.count(x) == 0; }); };
    both(it->second.as_any, any);
    both(it->second.as_divisor, divisor);
  }

  std::unordered_map<std::string, const Let*> lets_;
  std::map<std::string, Reads> read_;
};

}  // namespace

Block settle_choices(const Block& block, const std::set<std::string>& results) {
  std::optional<Truths> truths;
  std::unordered_map<std::string, std::string> renamed;
  Block out;
  const auto keep_or_put = [&](const Ref<Stmt>& stmt, bool keep, auto made) {
    if (keep)
      out.push_back(stmt);
    else
      out.push_back(make_stmt(std::move(made)));
  };
  for (const auto& stmt : block) {
    if (const auto* let = std::get_if<Let>(&stmt->node)) {
      Let s = *let;
      for (std::string& operand : s.operands)
        if (auto it = renamed.find(operand); it != renamed.end()) operand = it->second;
      if (s.fn == Fn::where) {
        if (!truths) truths.emplace(block, results);
        if (truths->is_settled(*let, s.operands[1])) {
          renamed[s.name] = s.operands[1];
          continue;
        }
      }
      const bool same = s.operands == let->operands;
      keep_or_put(stmt, same, std::move(s));
    } else if (const auto* loop = std::get_if<For>(&stmt->node)) {
      Block body = settle_choices(loop->body, {});
      const bool same = body == loop->body;
      keep_or_put(stmt, same, For{loop->axis, loop->extent, std::move(body)});
    } else if (const auto* reduce = std::get_if<Reduce>(&stmt->node)) {
      Reduce copy = *reduce;
      copy.body = settle_choices(reduce->body, {reduce->operands.begin(), reduce->operands.end()});
      const bool same = copy.body == reduce->body;
      keep_or_put(stmt, same, std::move(copy));
    } else if (const auto* scan = std::get_if<Scan>(&stmt->node)) {
      Scan copy = *scan;
      std::set<std::string> read = names_read(scan->then);
      read.insert(scan->operands.begin(), scan->operands.end());
      copy.body = settle_choices(scan->body, read);
      copy.then = settle_choices(scan->then, {});
      const bool same = copy.body == scan->body && copy.then == scan->then;
      keep_or_put(stmt, same, std::move(copy));
    } else {
      out.push_back(stmt);
    }
  }
  return out;
}

}  // namespace deplo::loop_ir
