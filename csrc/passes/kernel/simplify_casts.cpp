#include "passes/kernel/simplify_casts.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "kernel_ir/rewrite.h"

namespace deplo {
namespace {

using namespace kernel_ir;

/// Whole numbers.
struct Numbers {
  int64_t lo = 0;
  int64_t hi = 0;
};

/// The largest n such that the dtype holds all whole numbers from -n to n; 0 for those that are not looked at.
int64_t most_whole(DType dtype) {
  switch (dtype) {
    case DType::bf16: return int64_t{1} << 8;
    case DType::f16: return int64_t{1} << 11;
    case DType::f32: return int64_t{1} << 24;
    default: return 0;
  }
}

std::optional<Numbers> numbers_of(DType dtype) {
  if (dtype == DType::i8) return Numbers{-128, 127};
  if (dtype == DType::u8) return Numbers{0, 255};
  return std::nullopt;
}

/// The whole number that a literal is.
std::optional<Numbers> number_of(const Scalar& literal) {
  const double value = literal.as_double();
  if (value != std::floor(value) || std::abs(value) > static_cast<double>(most_whole(DType::f32)) || (value == 0 && std::signbit(value)))
    return std::nullopt;
  return Numbers{static_cast<int64_t>(value), static_cast<int64_t>(value)};
}

bool held(const Numbers& n, DType dtype) { return std::max(-n.lo, n.hi) <= most_whole(dtype); }

class Simplifier {
 public:
  Block run(const Block& body) {
    Block out = exact(body);
    count(out);
    out = narrowed(out);
    if (bypassed_.empty()) return out;
    uses_.clear();
    count(out);
    return rewrite(out, [&](const Ref<Stmt>& stmt) {
      Block kept;
      const auto* let = std::get_if<Let>(&stmt->node);
      if (!let || bypassed_.count(let->name) == 0 || uses_[let->name] > 0) kept.push_back(stmt);
      return kept;
    });
  }

 private:
  struct Known {
    Type type;
    std::optional<Numbers> numbers;  ///< if the value is known to be one of them
    std::string whole;               ///< the value before a cast that did not change it
    Type whole_type;
    std::string rounded;  ///< the float32 value before a cast to bf16
    bool from_bf16 = false;
  };

  void note(const Stmt& stmt) {
    const std::string name = defined_value(stmt);
    if (name.empty()) return;
    Known known;
    if (const auto* load = std::get_if<Load>(&stmt.node)) {
      known.type = load->type;
      known.numbers = numbers_of(load->type.dtype);
    } else if (const auto* splat = std::get_if<Splat>(&stmt.node)) {
      known.type = splat->type;
      if (const Known* from = find(splat->operand)) known.numbers = from->numbers, known.from_bf16 = from->from_bf16;
    } else if (const auto* let = std::get_if<Let>(&stmt.node)) {
      known = of(*let);
    } else {
      known_.erase(name);
      return;
    }
    known_[name] = std::move(known);
  }

  Known of(const Let& let) const {
    Known known;
    known.type = let.type;
    const Known* a = let.operands.empty() ? nullptr : find(let.operands[0]);
    const Known* b = let.operands.size() < 2 ? nullptr : find(let.operands[1]);
    if (let.fn == Fn::constant) known.numbers = number_of(let.literal);
    if (let.fn == Fn::cast && is_integer(let.type.dtype)) {
      const auto all = numbers_of(let.type.dtype);
      known.numbers = all && a && a->numbers && a->numbers->lo >= all->lo && a->numbers->hi <= all->hi ? a->numbers : all;
      return known;
    }
    // Some of the bits of a number that is not negative.
    if (let.fn == Fn::bit_and && is_integer(let.type.dtype) && b && b->numbers && b->numbers->lo == b->numbers->hi && b->numbers->lo >= 0)
      known.numbers = Numbers{0, b->numbers->hi};
    if (let.fn == Fn::cast && a) {
      known.from_bf16 = a->type.dtype == DType::bf16 && let.type.dtype == DType::f32;
      if (let.type.dtype == DType::bf16 && a->type.dtype == DType::f32) known.rounded = let.operands[0];
      if (!a->numbers || !held(*a->numbers, let.type.dtype)) return known;
      known.numbers = a->numbers;
      known.whole = a->whole.empty() ? let.operands[0] : a->whole;
      known.whole_type = a->whole.empty() ? a->type : a->whole_type;
    } else if (is_float(let.type.dtype) && a && b && a->numbers && b->numbers) {
      Numbers n;
      if (let.fn == Fn::add) {
        n = {a->numbers->lo + b->numbers->lo, a->numbers->hi + b->numbers->hi};
      } else if (let.fn == Fn::sub) {
        n = {a->numbers->lo - b->numbers->hi, a->numbers->hi - b->numbers->lo};
      } else if (let.fn == Fn::mul) {
        const int64_t most = std::max(-a->numbers->lo, a->numbers->hi) * std::max(-b->numbers->lo, b->numbers->hi);
        n = {-most, most};
      } else {
        return known;
      }
      if (held(n, let.type.dtype)) known.numbers = n;
    }
    return known;
  }

  const Known* find(const std::string& name) const {
    auto it = known_.find(name);
    return it == known_.end() ? nullptr : &it->second;
  }

  Block exact(const Block& body) {
    Block out;
    bool changed = false;
    for (const auto& stmt : body) {
      Ref<Stmt> now = map_uses(stmt, {[&](const std::string& name) {
                                        auto it = renamed_.find(name);
                                        return it == renamed_.end() ? name : it->second;
                                      },
                                      [](Expr e) { return e; }});
      if (const auto* loop = std::get_if<For>(&now->node)) {
        For copy = *loop;
        copy.body = exact(loop->body);
        if (copy.body != loop->body) now = make_stmt(std::move(copy));
      } else if (const auto* branch = std::get_if<If>(&now->node)) {
        If copy = *branch;
        copy.then = exact(branch->then);
        copy.otherwise = exact(branch->otherwise);
        if (copy.then != branch->then || copy.otherwise != branch->otherwise) now = make_stmt(std::move(copy));
      } else if (const auto* let = std::get_if<Let>(&now->node)) {
        now = skipped(now, *let);
      }
      renamed_.erase(defined_value(*stmt));
      if (now) {
        note(*now);
        out.push_back(now);
      } else {
        const Let& let = std::get<Let>(stmt->node);
        renamed_[let.name] = find(renamed_.count(let.operands[0]) ? renamed_.at(let.operands[0]) : let.operands[0])->whole;
      }
      changed = changed || now != stmt;
    }
    return changed ? out : body;
  }

  /// A cast of a number that reads it from before another cast; nothing if it is that value itself.
  Ref<Stmt> skipped(const Ref<Stmt>& stmt, const Let& let) {
    const Known* from = let.fn == Fn::cast ? find(let.operands[0]) : nullptr;
    if (!from || from->whole.empty() || !from->numbers || !held(*from->numbers, let.type.dtype)) return stmt;
    bypassed_.insert(let.operands[0]);
    if (from->whole_type == let.type) return nullptr;
    Let copy = let;
    copy.operands[0] = from->whole;
    return make_stmt(std::move(copy));
  }

  void count(const Block& body) {
    visit_all(body, [&](const Stmt& stmt) {
      auto shared = std::make_shared<Stmt>(stmt);
      const auto* let = std::get_if<Let>(&stmt.node);
      map_uses(shared, {[&](const std::string& name) {
                          ++uses_[name];
                          if (let) readers_[name] = let;
                          return name;
                        },
                        [](Expr e) { return e; }});
      note(stmt);
    });
  }

  /// The only reader of a value.
  const Let* reader(const std::string& name) const {
    auto count = uses_.find(name);
    auto it = readers_.find(name);
    return count != uses_.end() && count->second == 1 && it != readers_.end() ? it->second : nullptr;
  }

  bool only_multiplied(const std::string& name) const {
    const Let* wide = reader(name);
    if (!wide || wide->fn != Fn::cast || wide->type.dtype != DType::f32) return false;
    const Let* fma = reader(wide->name);
    if (!fma || fma->fn != Fn::fma || fma->operands[2] == wide->name) return false;
    const Known* other = find(fma->operands[fma->operands[0] == wide->name ? 1 : 0]);
    return other && other->from_bf16;
  }

  Block narrowed(const Block& body) {
    return rewrite(body, [&](const Ref<Stmt>& stmt) {
      note(*stmt);  // names may stand for other values in other scopes
      Block out;
      out.push_back(stmt);
      const auto* let = std::get_if<Let>(&stmt->node);
      const Known* known = let ? find(let->name) : nullptr;
      if (known && !known->rounded.empty() && !known->numbers && only_multiplied(let->name)) {
        Let copy = *let;
        copy.fn = Fn::narrow;
        out.back() = make_stmt(std::move(copy));
      }
      return out;
    });
  }

  std::map<std::string, Known> known_;
  std::map<std::string, std::string> renamed_;
  std::set<std::string> bypassed_;
  std::map<std::string, int> uses_;
  std::map<std::string, const Let*> readers_;
};

}  // namespace

kernel_ir::Module simplify_casts(kernel_ir::Module module, const PassContext& /*ctx*/) {
  return with_bodies(std::move(module), [](const Kernel& kernel) {
    bool found = false;
    visit_all(kernel.body, [&](const Stmt& s) {
      const auto* let = std::get_if<Let>(&s.node);
      found = found || (let && let->fn == Fn::cast && (let->type.dtype == DType::bf16 || let->type.dtype == DType::f16));
    });
    return found ? Simplifier().run(kernel.body) : kernel.body;
  });
}

}  // namespace deplo
