#include "analysis/weighted_sum.h"

#include <algorithm>
#include <map>

#include "base/text.h"

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

bool is_straight(const Stmt& stmt) { return std::holds_alternative<Let>(stmt.node) || std::holds_alternative<Load>(stmt.node); }

/// The body's statements but for its last one, which stores at [axis] of a local; null if the body is not so.
const Store* stored_at(const Block& body, const std::string& axis) {
  const auto* store = body.empty() ? nullptr : std::get_if<Store>(&body.back()->node);
  const bool there = store && store->guard.empty() && store->combiner == Combiner::set && store->index.size() == 1 && store->index[0] == Expr::symbol(axis);
  return there ? store : nullptr;
}

bool loads_at(const Load& load, const std::string& buffer, const std::string& axis) {
  return load.buffer == buffer && load.index.size() == 1 && load.index[0] == Expr::symbol(axis);
}

/// Definitions by name.
using Definitions = std::map<std::string, const Stmt*>;
void define(const Block& block, Definitions& into) {
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

class Matcher {
 public:
  Matcher(const loop_ir::Kernel& kernel, const Block& inner) : kernel_(kernel), inner_(inner) {}

  std::optional<WeightedSum> match() {
    if (!collect()) return std::nullopt;
    const bool normalized = loops_.size() == 6;
    const Stmt& last = *loops_.back();
    if (!match_scores(*loops_[0]) || !match_max(*loops_[1]) || !match_weights(*loops_[2]) || !match_sum(*loops_[3])) return std::nullopt;
    if (normalized && !match_division(*loops_[4])) return std::nullopt;
    if (!match_values(last) || !reads_no_more()) return std::nullopt;
    out_.normalized = normalized;
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
    contractions_ = find_contractions(kernel_);
    return contractions_.size() == 2;
  }

  /// The contraction that the nest's body holds, beside straight-line statements and one store.
  const Contraction* contraction_of(const Stmt& stmt, Axis& axis) const {
    const auto* loop = std::get_if<For>(&stmt.node);
    if (!loop) return nullptr;
    axis = {loop->axis, loop->extent};
    const Contraction* found = nullptr;
    for (const auto& s : loop->body) {
      if (const auto* reduce = std::get_if<Reduce>(&s->node)) {
        for (const Contraction& c : contractions_)
          if (c.reduce == reduce && !found) found = &c;
        if (!found || found->reduce != reduce) return nullptr;
      } else if (!is_straight(*s) && !std::holds_alternative<Store>(s->node)) {
        return nullptr;
      }
    }
    return found && found->dtype == DType::f32 && found->reduce->axes.size() == 1 ? found : nullptr;
  }

  bool match_scores(const Stmt& stmt) {
    const Contraction* c = contraction_of(stmt, out_.key);
    if (!c) return false;
    const Block& body = std::get<For>(stmt.node).body;
    const Store* store = stored_at(body, out_.key.name);
    if (!store || !is_scores(store->buffer)) return false;
    for (const auto& s : body)
      if (is_straight(*s))
        out_.score.push_back(s);
      else if (std::holds_alternative<Store>(s->node) && s != body.back())
        return false;
    out_.scores = *c;
    out_.local = store->buffer;
    out_.scored = store->value;
    const bool a_has = c->a.axes.count(out_.key.name) > 0;
    if (a_has == (c->b.axes.count(out_.key.name) > 0)) return false;
    out_.keys = a_has ? c->a : c->b;
    out_.queries = a_has ? c->b : c->a;
    return true;
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
    return loads == 1;
  }

  /// The body of a nest over the keys, without its last statement, and the store that this is.
  const Store* over_keys(const Stmt& stmt, Definitions& body) const {
    const auto* loop = std::get_if<For>(&stmt.node);
    if (!loop || loop->extent != out_.key.extent) return nullptr;
    const Store* store = stored_at(loop->body, loop->axis);
    if (!store || !std::all_of(loop->body.begin(), loop->body.end() - 1, [](const auto& s) { return is_straight(*s); })) return nullptr;
    define(loop->body, body);
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
    define(out_.read, read);
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
    const Contraction* c = contraction_of(stmt, out_.column);
    if (!c || c->reduce->axes[0].extent != out_.key.extent) return false;
    out_.values = *c;
    out_.column_body = std::get<For>(stmt.node).body;
    const ContractionOperand* weights = reads(c->a, weights_) ? &c->a : &c->b;
    out_.value = weights == &c->a ? c->b : c->a;
    Definitions slice;
    define(weights->slice, slice);
    auto from = slice.find(without_casts(slice, weights->value));
    const Load* load = from == slice.end() ? nullptr : std::get_if<Load>(&from->second->node);
    return load && load->guard.empty() && loads_at(*load, weights_, c->reduce->axes[0].name);
  }

  static bool reads(const ContractionOperand& operand, const std::string& buffer) {
    return std::count(operand.buffers.begin(), operand.buffers.end(), buffer) > 0;
  }

  /// That locals are read nowhere else, and maximum and sum only where they are known.
  bool reads_no_more() const {
    auto of_locals = [&](const Block& block) {
      return std::any_of(block.begin(), block.end(), [&](const auto& s) {
        const auto* load = std::get_if<Load>(&s->node);
        const auto* store = std::get_if<Store>(&s->node);
        return (load && locals_.count(load->buffer) > 0) || (store && locals_.count(store->buffer) > 0);
      });
    };
    return !of_locals(out_.rows) && !of_locals(out_.score) && !of_locals(out_.column_body) && !of_locals(out_.queries.slice) &&
           !of_locals(out_.keys.slice) && !of_locals(out_.value.slice);
  }

  const loop_ir::Kernel& kernel_;
  const Block& inner_;
  std::vector<const Stmt*> loops_;
  std::map<std::string, const loop_ir::Local*> locals_;
  std::vector<Contraction> contractions_;
  std::string weights_;  ///< the local that holds them
  WeightedSum out_;
};

}  // namespace

std::optional<WeightedSum> find_weighted_sum(const loop_ir::Kernel& kernel, const loop_ir::Block& inner) { return Matcher(kernel, inner).match(); }

}  // namespace deplo::analysis
