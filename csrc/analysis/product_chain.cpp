#include "analysis/product_chain.h"

#include <algorithm>
#include <map>

#include "loop_ir/places.h"

namespace deplo::analysis {
namespace {

using loop_ir::Axis;
using loop_ir::Block;
using loop_ir::For;
using loop_ir::Let;
using loop_ir::Load;
using loop_ir::Reduce;
using loop_ir::Store;

class ChainMatcher {
 public:
  explicit ChainMatcher(const loop_ir::Kernel& kernel) : contractions_(find_contractions(kernel)) {}

  std::optional<ProductChain> match(const Block& body) {
    std::vector<const For*> loops;
    for (const auto& stmt : body) {
      if (is_straight(*stmt))
        out_.rows.push_back(stmt);
      else if (const auto* local = std::get_if<loop_ir::Local>(&stmt->node))
        locals_[local->name] = local;
      else if (const auto* loop = std::get_if<For>(&stmt->node))
        loops.push_back(loop);
      else
        return std::nullopt;
    }
    if (loops.size() < 2 || locals_.empty() || !match_points(*loops[0])) return std::nullopt;
    for (size_t i = 1; i < loops.size(); ++i)
      if (!match_column(*loops[i])) return std::nullopt;
    return reads_no_more() ? std::optional(std::move(out_)) : std::nullopt;
  }

 private:
  const Contraction* contraction_of(const Reduce& reduce) const {
    for (const Contraction& c : contractions_)
      if (c.reduce == &reduce && c.dtype == DType::f32) return &c;
    return nullptr;
  }

  static bool uses_any(const std::set<std::string>& axes, const std::vector<Axis>& of) {
    return std::any_of(of.begin(), of.end(), [&](const Axis& a) { return axes.count(a.name) > 0; });
  }

  bool is_at(const std::vector<Expr>& index, const std::vector<Axis>& axes) const {
    return std::equal(index.begin(), index.end(), axes.begin(), axes.end(), [](Expr e, const Axis& a) { return e == Expr::symbol(a.name); });
  }

  bool match_points(const For& outermost) {
    const For* loop = &outermost;
    for (;;) {
      out_.keys.push_back({loop->axis, loop->extent});
      const For* next = loop->body.size() == 1 ? std::get_if<For>(&loop->body[0]->node) : nullptr;
      if (!next) break;
      loop = next;
    }
    for (const auto& stmt : loop->body) {
      if (is_straight(*stmt)) {
        out_.points.push_back(stmt);
      } else if (const auto* reduce = std::get_if<Reduce>(&stmt->node)) {
        const Contraction* c = contraction_of(*reduce);
        if (!c || reduce->axes.size() != 1) return false;
        const bool a_moves = uses_any(c->a.axes, out_.keys);
        if (a_moves == uses_any(c->b.axes, out_.keys)) return false;
        out_.inner.push_back({*c, a_moves ? c->b : c->a, a_moves ? c->a : c->b});
      } else if (const auto* store = std::get_if<Store>(&stmt->node)) {
        const bool fits = locals_.count(store->buffer) > 0 && weights_.count(store->buffer) == 0 && store->guard.empty() &&
                          store->combiner == Combiner::set && is_at(store->index, out_.keys);
        if (!fits) return false;
        weights_[store->buffer] = store->value;
      } else {
        return false;
      }
    }
    return !out_.inner.empty() && weights_.size() == locals_.size();
  }

  bool match_column(const For& loop) {
    const Reduce* reduce = nullptr;
    for (const auto& stmt : loop.body) {
      if (const auto* r = std::get_if<Reduce>(&stmt->node)) {
        if (reduce) return false;
        reduce = r;
      } else if (!is_straight(*stmt) && !std::holds_alternative<Store>(stmt->node)) {
        return false;
      }
    }
    const Contraction* c = reduce ? contraction_of(*reduce) : nullptr;
    if (!c || reduce->axes.size() != out_.keys.size()) return false;
    for (size_t i = 0; i < out_.keys.size(); ++i)
      if (reduce->axes[i].extent != out_.keys[i].extent) return false;
    ProductChain::Outer outer{*c, {}, "", false, {loop.axis, loop.extent}, loop.body};
    for (bool first : {true, false}) {
      const ContractionOperand& factor = first ? c->a : c->b;
      if (!outer.weight.empty() || factor.buffers.size() != 1 || locals_.count(factor.buffers[0]) == 0) continue;
      if (!match_weight(factor, *reduce, outer)) return false;
      outer.other = first ? c->b : c->a;
    }
    if (outer.weight.empty()) return false;
    for (const std::string& buffer : outer.other.buffers)
      if (locals_.count(buffer) > 0) return false;
    out_.outer.push_back(std::move(outer));
    return true;
  }

  /// The factor is what a local holds, perhaps rounded to 16 bits, and widened.
  bool match_weight(const ContractionOperand& factor, const Reduce& reduce, ProductChain::Outer& outer) const {
    for (const auto& stmt : factor.slice) {
      if (const auto* let = std::get_if<Let>(&stmt->node)) {
        if (let->fn != Fn::cast || !is_float(let->dtype)) return false;
        outer.rounded = outer.rounded || size_of(let->dtype) == 2;
        continue;
      }
      const auto* load = std::get_if<Load>(&stmt->node);
      if (!load || !load->guard.empty() || !is_at(load->index, reduce.axes)) return false;
      outer.weight = weights_.at(load->buffer);
      outer.rounded = outer.rounded || size_of(load->dtype) == 2;
    }
    // Casts that narrow and widen again are exact of what was rounded already.
    for (std::string at = outer.weight;;) {
      const Let* let = nullptr;
      for (const auto& stmt : out_.points)
        if (loop_ir::name_of(*stmt) == at) let = std::get_if<Let>(&stmt->node);
      if (!let || let->fn != Fn::cast || !is_float(let->dtype)) break;
      outer.rounded = outer.rounded || size_of(let->dtype) == 2;
      at = let->operands[0];
    }
    return !outer.weight.empty();
  }

  /// That locals are read nowhere else.
  bool reads_no_more() const {
    const auto of_locals = [&](const Block& block) {
      return std::any_of(block.begin(), block.end(), [&](const auto& s) {
        const auto* load = std::get_if<Load>(&s->node);
        const auto* store = std::get_if<Store>(&s->node);
        return (load && locals_.count(load->buffer) > 0) || (store && locals_.count(store->buffer) > 0);
      });
    };
    return !of_locals(out_.rows) && !of_locals(out_.points) &&
           std::none_of(out_.inner.begin(), out_.inner.end(), [&](const auto& i) { return of_locals(i.contraction.reduce->body); }) &&
           std::none_of(out_.outer.begin(), out_.outer.end(), [&](const auto& o) { return of_locals(o.body); });
  }

  std::vector<Contraction> contractions_;
  std::map<std::string, const loop_ir::Local*> locals_;
  std::map<std::string, std::string> weights_;  ///< the value stored in each local
  ProductChain out_;
};

}  // namespace

std::optional<ProductChain> find_product_chain(const loop_ir::Kernel& kernel, const Block& body) { return ChainMatcher(kernel).match(body); }

std::vector<KeyLimit> key_limits(const ProductChain& chain) {
  ValueConditions conditions(chain.rows, {&chain.points});
  std::vector<Cond> all = conditions.nonzero(chain.outer[0].weight);
  for (const ProductChain::Outer& outer : chain.outer) {
    const std::vector<Cond> one = conditions.nonzero(outer.weight);
    all.erase(std::remove_if(all.begin(), all.end(), [&](const Cond& c) { return std::find(one.begin(), one.end(), c) == one.end(); }), all.end());
  }
  const std::string& key = chain.keys.back().name;
  std::vector<KeyLimit> limits = key_limits(all, key, key);
  // A block of keys is left out for all points of the other axes.
  limits.erase(std::remove_if(limits.begin(), limits.end(),
                              [&](const KeyLimit& limit) {
                                return std::any_of(chain.keys.begin(), chain.keys.end() - 1,
                                                   [&](const Axis& a) { return uses(limit.limit, a.name); });
                              }),
               limits.end());
  return limits;
}

}  // namespace deplo::analysis
