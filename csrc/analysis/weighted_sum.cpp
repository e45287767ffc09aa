#include "analysis/weighted_sum.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/text.h"
#include "loop_ir/places.h"
#include "loop_ir/rewrite.h"

namespace deplo::analysis {
namespace {

using loop_ir::Axis;
using loop_ir::Block;
using loop_ir::For;
using loop_ir::Let;
using loop_ir::Load;
using loop_ir::Reduce;
using loop_ir::Stmt;
using loop_ir::Store;

/// The body's statements but for its last one, which stores at [axis] of a local; null if the body is not so.
const Store* stored_at(const Block& body, const std::string& axis) {
  const auto* store = body.empty() ? nullptr : std::get_if<Store>(&body.back()->node);
  const bool there =
      store && store->guard.empty() && store->combiner == Combiner::set && store->index.size() == 1 && store->index[0] == Expr::symbol(axis);
  return there ? store : nullptr;
}

bool loads_at(const Load& load, const std::string& buffer, const std::string& axis) {
  return load.buffer == buffer && load.index.size() == 1 && load.index[0] == Expr::symbol(axis);
}

/// Definitions by name.
using Definitions = std::map<std::string, const Stmt*>;
void collect_definitions(const Block& block, Definitions& into) {
  for (const auto& stmt : block) {
    if (const auto* let = std::get_if<Let>(&stmt->node)) into[let->name] = stmt.get();
    if (const auto* load = std::get_if<Load>(&stmt->node)) into[load->name] = stmt.get();
  }
}

/// Whether two bodies, each over an axis of its own, compute the same value. Names that neither defines are the same if equal.
bool same_value(const Definitions& a, const std::string& of_a, const Definitions& b, const std::string& of_b, const Substitution& to_b) {
  auto in_a = a.find(of_a);
  auto in_b = b.find(of_b);
  if (in_a == a.end() || in_b == b.end()) return in_a == a.end() && in_b == b.end() && of_a == of_b;
  auto same_index = [&](const std::vector<Expr>& x, const std::vector<Expr>& y) {
    return std::equal(x.begin(), x.end(), y.begin(), y.end(), [&](Expr p, Expr q) { return substitute(p, to_b) == q; });
  };
  if (const auto* x = std::get_if<Let>(&in_a->second->node)) {
    const auto* y = std::get_if<Let>(&in_b->second->node);
    if (!y || x->fn != y->fn || x->dtype != y->dtype || !(x->literal == y->literal) || substitute(x->index, to_b) != y->index) return false;
    return std::equal(x->operands.begin(), x->operands.end(), y->operands.begin(), y->operands.end(),
                      [&](const std::string& p, const std::string& q) { return same_value(a, p, b, q, to_b); });
  }
  const auto& x = std::get<Load>(in_a->second->node);
  const auto* y = std::get_if<Load>(&in_b->second->node);
  if (!y || x.buffer != y->buffer || x.dtype != y->dtype || !same_index(x.index, y->index) || x.guard.size() != y->guard.size()) return false;
  for (size_t i = 0; i < x.guard.size(); ++i)
    if (!(substitute(x.guard[i], to_b) == y->guard[i])) return false;
  return x.guard.empty() || x.fill == y->fill;
}

/// Takes casts between floats off a value.
std::string without_casts(const Definitions& all, std::string value) {
  for (auto it = all.find(value); it != all.end(); it = all.find(value)) {
    const auto* let = std::get_if<Let>(&it->second->node);
    if (!let || let->fn != Fn::cast || !is_float(let->dtype)) break;
    value = let->operands[0];
  }
  return value;
}

class SumMatcher {
 public:
  SumMatcher(const loop_ir::Kernel& kernel, const Block& inner, bool vectors) : kernel_(kernel), inner_(inner), vectors_(vectors) {}

  std::optional<WeightedSum> match() {
    if (!collect()) return std::nullopt;
    const bool normalized = loops_.size() == 6;
    const Stmt& last = *loops_.back();
    if (!match_scores(*loops_[0]) || !match_max(*loops_[1]) || !match_weights(*loops_[2]) || !match_sum(*loops_[3])) return std::nullopt;
    if (out_.extra && !count_extra()) return std::nullopt;
    if (normalized && !match_division(*loops_[4])) return std::nullopt;
    if (!match_values(last) || !reads_no_more()) return std::nullopt;
    out_.normalized = normalized;
    out_.over_keys.assign(loops_.begin(), loops_.end() - 1);
    out_.over_keys.push_back(values_);
    find_operands();
    return std::move(out_);
  }

 private:
  bool collect() {
    for (const auto& stmt : inner_) {
      if (is_straight(*stmt) || std::holds_alternative<Store>(stmt->node)) {
        out_.rows.push_back(stmt);
      } else if (const auto* local = std::get_if<loop_ir::Local>(&stmt->node)) {
        locals_[local->name] = local;
      } else if (std::holds_alternative<For>(stmt->node) || std::holds_alternative<Reduce>(stmt->node)) {
        loops_.push_back(stmt.get());
        out_.before = out_.rows.size();
      } else {
        return false;
      }
    }
    if (loops_.size() != 5 && loops_.size() != 6) return false;
    contractions_ = find_contractions(kernel_, vectors_);
    return true;
  }

  /// The sum of products that the nest's body holds, beside straight-line statements and stores.
  const Stmt* sum_of(const Stmt& stmt, Axis& axis) const {
    const auto* loop = std::get_if<For>(&stmt.node);
    if (!loop) return nullptr;
    axis = {loop->axis, loop->extent};
    const Stmt* found = nullptr;
    for (const auto& s : loop->body) {
      if (const auto* reduce = std::get_if<Reduce>(&s->node)) {
        const bool fits = !found && reduce->combiner == Combiner::sum && reduce->results.size() == 1 && reduce->dtypes[0] == DType::f32 &&
                          std::all_of(reduce->body.begin(), reduce->body.end(), [](const auto& x) { return is_straight(*x); });
        if (!fits) return nullptr;
        found = s.get();
      } else if (!is_straight(*s) && !std::holds_alternative<Store>(s->node)) {
        return nullptr;
      }
    }
    return found;
  }

  const Contraction* contraction_of(const Stmt& sum) const {
    for (const Contraction& c : contractions_)
      if (c.reduce == &std::get<Reduce>(sum.node) && c.dtype == DType::f32 && c.reduce->axes.size() == 1) return &c;
    return nullptr;
  }

  bool match_scores(const Stmt& stmt) {
    scores_ = sum_of(stmt, out_.key);
    if (!scores_) return false;
    const Block& body = std::get<For>(stmt.node).body;
    const Store* store = stored_at(body, out_.key.name);
    if (!store || !is_scores(store->buffer)) return false;
    for (const auto& s : body)
      if (is_straight(*s))
        out_.score.push_back(s);
      else if (std::holds_alternative<Store>(s->node) && s != body.back())
        return false;
    out_.local = store->buffer;
    out_.scored = store->value;
    return true;
  }

  /// Where both sums are contractions, as such.
  void find_operands() {
    const Contraction* scores = contraction_of(*scores_);
    const Contraction* values = contraction_of(*values_);
    if (!scores || !values) return;
    const bool a_has = scores->a.axes.count(out_.key.name) > 0;
    if (a_has == (scores->b.axes.count(out_.key.name) > 0)) return;
    const bool weights_first = reads(values->a, weights_);
    out_.contractions = {*scores, *values, a_has ? scores->b : scores->a, a_has ? scores->a : scores->b, weights_first ? values->b : values->a};
  }

  /// A row of float32 numbers, one for each key.
  bool is_scores(const std::string& buffer) const {
    auto local = locals_.find(buffer);
    return local != locals_.end() && local->second->dtype == DType::f32 && local->second->shape == std::vector<Expr>{out_.key.extent};
  }

  /// A reduction along all keys to one float32 number.
  const Reduce* along_keys(const Stmt& stmt, Combiner combiner) const {
    const auto* reduce = std::get_if<Reduce>(&stmt.node);
    const bool fits = reduce && reduce->combiner == combiner && reduce->results.size() == 1 && reduce->dtypes[0] == DType::f32 &&
                      reduce->axes.size() == 1 && reduce->axes[0].extent == out_.key.extent &&
                      std::all_of(reduce->body.begin(), reduce->body.end(), [](const auto& s) { return is_straight(*s); });
    return fits ? reduce : nullptr;
  }

  bool match_max(const Stmt& stmt) {
    const Reduce* reduce = along_keys(stmt, Combiner::max);
    if (!reduce) return false;
    out_.read = reduce->body;
    out_.read_axis = reduce->axes[0].name;
    out_.read_value = reduce->operands[0];
    out_.max = reduce->results[0];
    int64_t loads = 0;
    for (const auto& s : out_.read) {
      const auto* load = std::get_if<Load>(&s->node);
      if (!load || load->buffer != out_.local) continue;
      if (!loads_at(*load, out_.local, out_.read_axis)) return false;
      ++loads;
    }
    find_extra();
    return loads == 1;
  }

  /// The operand beside another one; null if the value is not so made.
  static const std::string* beside(const Let& let, const std::string& operand) {
    for (size_t i : {0, 1})
      if (let.operands[i] == operand) return &let.operands[1 - i];
    return nullptr;
  }

  void find_extra() {
    for (const auto& stmt : out_.rows)
      if (const auto* let = std::get_if<Let>(&stmt->node); let && let->fn == Fn::max && let->dtype == DType::f32)
        if (const std::string* other = beside(*let, out_.max)) {
          largest_key_ = out_.max;
          out_.extra = *other;
          out_.max = let->name;
          return;
        }
  }

  /// That the sum counts it, too. Takes the statements that count it out of the rows.
  bool count_extra() {
    Definitions rows;
    collect_definitions(out_.rows, rows);
    const std::string of_keys = out_.sum;
    const Let* total = nullptr;
    const Let* weight = nullptr;
    for (const auto& [name, stmt] : rows) {
      const Let* let = let_of(rows, name, Fn::add);
      const std::string* other = let ? beside(*let, of_keys) : nullptr;
      const Let* made = other ? let_of(rows, *other, Fn::exp) : nullptr;
      if (!made) continue;
      total = let;
      weight = made;
    }
    const Let* sub = weight ? let_of(rows, weight->operands[0], Fn::sub) : nullptr;
    if (!sub || sub->operands != std::vector<std::string>{*out_.extra, out_.max}) return false;
    out_.sum = total->name;
    const std::set<std::string> counting{total->name, weight->name, sub->name, out_.max};
    out_.before -= std::erase_if(out_.rows, [&](const auto& s) { return counting.count(loop_ir::name_of(*s)) > 0; });
    const std::set<std::string> gone{largest_key_, of_keys, weight->name, sub->name};
    auto uses_gone = [&](const Block& block) {
      std::set<std::string> used;
      for (const auto& s : block) loop_ir::collect_uses(*s, used);
      return std::any_of(gone.begin(), gone.end(), [&](const std::string& name) { return used.count(name) > 0; });
    };
    const Block made = loop_ir::statements_for(out_.rows, {*out_.extra});
    std::set<std::string> early;
    for (const auto& s : made) loop_ir::collect_uses(*s, early);
    for (const Stmt* loop : {loops_[4], loops_.back()})
      if (const auto* nest = std::get_if<For>(&loop->node); nest && uses_gone(nest->body)) return false;
    return !uses_gone(out_.rows) && early.count(out_.max) == 0 && early.count(out_.sum) == 0 && rows.count(*out_.extra) > 0;
  }

  /// The body of a nest over the keys, without its last statement, and the store that this is.
  const Store* over_keys(const Stmt& stmt, Definitions& body) const {
    const auto* loop = std::get_if<For>(&stmt.node);
    if (!loop || loop->extent != out_.key.extent) return nullptr;
    const Store* store = stored_at(loop->body, loop->axis);
    if (!store || !std::all_of(loop->body.begin(), loop->body.end() - 1, [](const auto& s) { return is_straight(*s); })) return nullptr;
    collect_definitions(loop->body, body);
    return locals_.count(store->buffer) > 0 ? store : nullptr;
  }

  static const Let* let_of(const Definitions& all, const std::string& name, Fn fn) {
    auto it = all.find(name);
    const Let* let = it == all.end() ? nullptr : std::get_if<Let>(&it->second->node);
    return let && let->fn == fn && let->dtype == DType::f32 ? let : nullptr;
  }

  bool match_weights(const Stmt& stmt) {
    Definitions body;
    const Store* store = over_keys(stmt, body);
    if (!store || !is_scores(store->buffer)) return false;
    const Let* exp = let_of(body, store->value, Fn::exp);
    const Let* sub = exp ? let_of(body, exp->operands[0], Fn::sub) : nullptr;
    if (!sub || sub->operands[1] != out_.max) return false;
    Definitions read;
    collect_definitions(out_.read, read);
    weights_ = store->buffer;
    return same_value(read, out_.read_value, body, sub->operands[0], {{out_.read_axis, Expr::symbol(std::get<For>(stmt.node).axis)}});
  }

  bool match_sum(const Stmt& stmt) {
    const Reduce* reduce = along_keys(stmt, Combiner::sum);
    if (!reduce || reduce->body.size() != 1) return false;
    const auto* load = std::get_if<Load>(&reduce->body[0]->node);
    out_.sum = reduce->results[0];
    return load && load->guard.empty() && loads_at(*load, weights_, reduce->axes[0].name);
  }

  bool match_division(const Stmt& stmt) {
    Definitions body;
    const Store* store = over_keys(stmt, body);
    if (!store) return false;
    const Let* div = let_of(body, without_casts(body, store->value), Fn::div);
    auto from = div ? body.find(div->operands[0]) : body.end();
    const Load* load = from == body.end() ? nullptr : std::get_if<Load>(&from->second->node);
    if (!load || div->operands[1] != out_.sum || !load->guard.empty() || !loads_at(*load, weights_, std::get<For>(stmt.node).axis)) return false;
    weights_ = store->buffer;
    return true;
  }

  bool match_values(const Stmt& stmt) {
    values_ = sum_of(stmt, out_.column);
    if (!values_) return false;
    const auto& reduce = std::get<Reduce>(values_->node);
    if (reduce.axes.size() != 1 || reduce.axes[0].extent != out_.key.extent) return false;
    out_.column_body = std::get<For>(stmt.node).body;
    Definitions body;
    collect_definitions(reduce.body, body);
    const Let* product = let_of(body, reduce.operands[0], Fn::mul);
    auto is_weight = [&](const std::string& factor) {
      auto from = body.find(without_casts(body, factor));
      const Load* load = from == body.end() ? nullptr : std::get_if<Load>(&from->second->node);
      return load && load->guard.empty() && loads_at(*load, weights_, reduce.axes[0].name);
    };
    if (!product || is_weight(product->operands[0]) == is_weight(product->operands[1])) return false;
    for (std::string at = product->operands[is_weight(product->operands[0]) ? 0 : 1];;) {
      const auto* let = std::get_if<Let>(&body.at(at)->node);
      out_.rounded = out_.rounded || size_of(let ? let->dtype : std::get<Load>(body.at(at)->node).dtype) == 2;
      if (!let) break;
      at = let->operands[0];
    }
    return std::count_if(reduce.body.begin(), reduce.body.end(), [&](const auto& s) {
             const auto* load = std::get_if<Load>(&s->node);
             return load && locals_.count(load->buffer) > 0;
           }) == 1;
  }

  static bool reads(const ContractionOperand& operand, const std::string& buffer) {
    return std::count(operand.buffers.begin(), operand.buffers.end(), buffer) > 0;
  }

  /// That locals are read nowhere else.
  bool reads_no_more() const {
    auto of_locals = [&](const Block& block) {
      return std::any_of(block.begin(), block.end(), [&](const auto& s) {
        const auto* load = std::get_if<Load>(&s->node);
        const auto* store = std::get_if<Store>(&s->node);
        return (load && locals_.count(load->buffer) > 0) || (store && locals_.count(store->buffer) > 0);
      });
    };
    return !of_locals(out_.rows) && !of_locals(out_.score) && !of_locals(out_.column_body) && !of_locals(std::get<Reduce>(scores_->node).body);
  }

  const loop_ir::Kernel& kernel_;
  const Block& inner_;
  const bool vectors_;
  std::vector<const Stmt*> loops_;
  std::map<std::string, const loop_ir::Local*> locals_;
  std::vector<Contraction> contractions_;
  const Stmt* scores_ = nullptr;  ///< the sums of products
  const Stmt* values_ = nullptr;
  std::string weights_;      ///< the local that holds them
  std::string largest_key_;  ///< the maximum before the extra number is counted
  WeightedSum out_;
};

}  // namespace

std::optional<WeightedSum> find_weighted_sum(const loop_ir::Kernel& kernel, const loop_ir::Block& inner, bool vectors) {
  return SumMatcher(kernel, inner, vectors).match();
}

std::vector<KeyLimit> key_limits(const WeightedSum& sum) {
  ValueConditions conditions(sum.rows, {&sum.score, &sum.read}, {sum.local, sum.scored});
  return key_limits(conditions.finite(sum.read_value), sum.read_axis, sum.key.name);
}

std::vector<KeyLimit> soft_key_limits(const WeightedSum& sum) {
  ValueConditions conditions(sum.rows, {&sum.score, &sum.read}, {sum.local, sum.scored});
  const std::vector<KeyLimit> hard = key_limits(sum);
  std::vector<KeyLimit> soft = key_limits(conditions.above(sum.read_value, kMaskedScore), sum.read_axis, sum.key.name);
  std::erase_if(soft, [&](const KeyLimit& l) { return std::count(hard.begin(), hard.end(), l) > 0; });
  return soft;
}

Cond in_part(Expr key, Expr part, int64_t parts) { return equal(mod(floordiv(key, kKeyBlock), parts), part); }

std::optional<KeyPart> key_part(const WeightedSum& sum, const std::vector<Axis>& nest) {
  for (const auto& stmt : sum.read) {
    const auto* load = std::get_if<Load>(&stmt->node);
    if (!load || load->buffer != sum.local || load->guard.empty() || !(std::isinf(load->fill.f) && load->fill.f < 0)) continue;
    for (const Cond& cond : load->guard)
      for (const Axis& axis : nest)
        if (axis.extent.is_constant() && cond == in_part(Expr::symbol(sum.read_axis), Expr::symbol(axis.name), axis.extent.value()))
          return KeyPart{axis, cond};
  }
  return std::nullopt;
}

int64_t parts_of_keys(const loop_ir::Kernel& kernel) {
  const loop_ir::Nest nest = loop_ir::peel(kernel.body);
  const auto sum = nest.axes.empty() ? std::nullopt : find_weighted_sum(kernel, nest.body, true);
  const auto part = sum ? key_part(*sum, nest.axes) : std::nullopt;
  return part ? part->axis.extent.value() : 1;
}

}  // namespace deplo::analysis
