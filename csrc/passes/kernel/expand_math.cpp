#include "passes/kernel/expand_math.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernel_ir/rewrite.h"
#include "passes/kernel/vector_math.h"
#include "target/target.h"

namespace deplo {
namespace {

using namespace kernel_ir;

/// Appends statements to a block; a value is its name and type.
class Emitter {
 public:
  struct Value {
    std::string name;
    Type type;
  };

  Emitter(Block& out, std::string prefix, const std::set<Fn>& own) : out_(out), own_(own), prefix_(std::move(prefix)) {}

  /// Whether the target's compiler computes the function by itself.
  bool has(Fn fn) const { return own_.contains(fn); }

  Value literal(DType dtype, double value) {
    auto key = std::make_pair(dtype, print_key(value));
    if (auto it = literals_.find(key); it != literals_.end()) return it->second;
    Let let{fresh(), {dtype, lanes_}, Fn::constant, {}, {}, {}, {}};
    let.literal = is_float(dtype) ? Scalar::of_float(dtype, value) : Scalar::of_int(dtype, static_cast<int64_t>(value));
    Value v{let.name, let.type};
    out_.push_back(make_stmt(std::move(let)));
    literals_.emplace(key, v);
    return v;
  }

  Value apply(Fn fn, std::initializer_list<Value> operands) {
    DType dtype = operands.begin()[operands.size() - 1].type.dtype;
    if (info(fn).signature == Signature::predicate) dtype = DType::boolean;
    return let(fn, dtype, operands);
  }
  Value cast(Value x, DType dtype) { return let(Fn::cast, dtype, {x}); }
  Value bitcast(Value x, DType dtype) { return let(Fn::bitcast, dtype, {x}); }

  Value patch(Value mask, Fn fn, Value x, Value y) {
    Var var{fresh(), y.type, y.name};
    Value result{var.name, var.type};
    out_.push_back(make_stmt(std::move(var)));
    std::string any = mask.name;
    if (lanes_ > 1) {
      any = fresh();
      out_.push_back(make_stmt(ReduceLanes{any, DType::boolean, Fn::bit_or, mask.name}));
    }
    If branch;
    branch.condition = any;
    std::swap(out_, branch.then);
    Value exact = cast(let(fn, DType::f64, {cast(x, DType::f64)}), DType::f32);
    Value chosen = let(Fn::where, y.type.dtype, {mask, exact, y});
    out_.push_back(make_stmt(Assign{result.name, chosen.name}));
    std::swap(out_, branch.then);
    out_.push_back(make_stmt(std::move(branch)));
    return result;
  }

  void set_lanes(int lanes) { lanes_ = lanes; }

 private:
  static int64_t print_key(double value) { return __builtin_bit_cast(int64_t, value); }
  std::string fresh() { return prefix_ + ".m" + std::to_string(next_++); }
  Value let(Fn fn, DType dtype, std::initializer_list<Value> operands) {
    Let node{fresh(), {dtype, lanes_}, fn, {}, {}, {}, {}};
    for (const Value& v : operands) node.operands.push_back(v.name);
    Value v{node.name, node.type};
    out_.push_back(make_stmt(std::move(node)));
    return v;
  }

  Block& out_;
  const std::set<Fn>& own_;
  std::string prefix_;
  std::map<std::pair<DType, int64_t>, Value> literals_;
  int lanes_ = 1;
  int next_ = 0;
};

using Math = VectorMath<Emitter>;
using Unary = Emitter::Value (Math::*)(Emitter::Value);
using Binary = Emitter::Value (Math::*)(Emitter::Value, Emitter::Value);

Unary unary_sequence(Fn fn) {
  switch (fn) {
    case Fn::exp: return &Math::exp;
    case Fn::exp2: return &Math::exp2;
    case Fn::exp2_near: return &Math::exp2_near;
    case Fn::expm1: return &Math::expm1;
    case Fn::log: return &Math::log;
    case Fn::log2: return &Math::log2;
    case Fn::log10: return &Math::log10;
    case Fn::log1p: return &Math::log1p;
    case Fn::sin: return &Math::sin;
    case Fn::cos: return &Math::cos;
    case Fn::tan: return &Math::tan;
    case Fn::asin: return &Math::asin;
    case Fn::acos: return &Math::acos;
    case Fn::atan: return &Math::atan;
    case Fn::sinh: return &Math::sinh;
    case Fn::cosh: return &Math::cosh;
    case Fn::tanh: return &Math::tanh;
    case Fn::asinh: return &Math::asinh;
    case Fn::acosh: return &Math::acosh;
    case Fn::atanh: return &Math::atanh;
    case Fn::sigmoid: return &Math::sigmoid;
    case Fn::softplus: return &Math::softplus;
    case Fn::silu: return &Math::silu;
    case Fn::mish: return &Math::mish;
    case Fn::gelu: return &Math::gelu;
    case Fn::gelu_tanh: return &Math::gelu_tanh;
    case Fn::logit: return &Math::logit;
    case Fn::sinc: return &Math::sinc;
    case Fn::erf: return &Math::erf;
    default: return nullptr;
  }
}

Binary binary_sequence(Fn fn) {
  switch (fn) {
    case Fn::pow: return &Math::pow;
    case Fn::atan2: return &Math::atan2;
    case Fn::hypot: return &Math::hypot;
    case Fn::xlogy: return &Math::xlogy;
    case Fn::logaddexp: return &Math::logaddexp;
    case Fn::logaddexp2: return &Math::logaddexp2;
    default: return nullptr;
  }
}

/// Who reads each value of a kernel.
class Readers {
 public:
  explicit Readers(const Block& body) {
    visit_all(body, [&](const Stmt& stmt) {
      const auto* let = std::get_if<Let>(&stmt.node);
      map_uses(std::make_shared<Stmt>(stmt), {[&](const std::string& name) {
                                                readers_[name].push_back(let);
                                                return name;
                                              },
                                              [](Expr e) { return e; }});
    });
  }

  /// Whether all readers of a value round it to 16 bits, or it becomes a byte.
  bool is_narrowed(const std::string& name) const { return becomes_byte(name) || is_rounded_to(name, {DType::bf16, DType::f16}); }

  /// Whether all readers of a value round it to one of these dtypes, after what may choose among values.
  bool is_rounded_to(const std::string& name, const std::set<DType>& dtypes) const {
    auto it = readers_.find(name);
    return it != readers_.end() && std::ranges::all_of(it->second, [&](const Let* let) {
             if (!let) return false;
             if (let->fn == Fn::cast) return dtypes.contains(let->type.dtype);
             const bool chooses = let->fn == Fn::where || let->fn == Fn::neg || let->fn == Fn::abs;
             return chooses && let->type.dtype == DType::f32 && is_rounded_to(let->name, dtypes);
           });
  }

 private:
  /// Whether a value is only scaled, rounded to a whole number and kept as a byte.
  bool becomes_byte(std::string name) const {
    for (bool rounded = false;;) {
      auto it = readers_.find(name);
      const Let* let = it != readers_.end() && it->second.size() == 1 ? it->second[0] : nullptr;
      if (!let) return false;
      if (let->fn == Fn::cast) return rounded && size_of(let->type.dtype) == 1 && is_integer(let->type.dtype);
      rounded = rounded || let->fn == Fn::round;
      const bool scales = let->fn == Fn::mul || let->fn == Fn::add || let->fn == Fn::max || let->fn == Fn::min;
      if (!(scales && (rounded || let->fn == Fn::mul)) && let->fn != Fn::round) return false;
      name = let->name;
    }
  }

  std::map<std::string, std::vector<const Let*>> readers_;  ///< a null pointer: another statement than a Let
};

/// A sequence in float32 for results whose last digits do not show; a target may have the later ones of its own.
Unary near_sequence(Fn fn, bool to_bf16, const std::set<Fn>& own) {
  switch (fn) {
    case Fn::tanh: return &Math::tanh_near;
    case Fn::sigmoid: return &Math::sigmoid_near;
    case Fn::silu: return &Math::silu_near;
    case Fn::gelu: return to_bf16 ? &Math::gelu_near_bf16 : &Math::gelu_near;
    case Fn::gelu_tanh: return &Math::gelu_tanh_near;
    case Fn::softplus: return own.contains(fn) ? nullptr : &Math::softplus_near;
    case Fn::mish: return own.contains(fn) ? nullptr : &Math::mish_near;
    case Fn::sin: return own.contains(fn) ? nullptr : &Math::sin_near;
    case Fn::cos: return own.contains(fn) ? nullptr : &Math::cos_near;
    default: return nullptr;
  }
}

/// The statements that compute `let`, the last of which defines its name; nothing if it stays.
std::optional<Block> expand(const Let& let, const Readers& readers, const std::set<Fn>& own) {
  if (let.type.dtype != DType::f32) return std::nullopt;
  const bool to_bf16 = readers.is_rounded_to(let.name, {DType::bf16});
  Unary unary = to_bf16 || readers.is_narrowed(let.name) ? near_sequence(let.fn, to_bf16, own) : nullptr;
  if (!unary && own.contains(let.fn)) return std::nullopt;
  if (!unary) unary = unary_sequence(let.fn);
  Binary binary = binary_sequence(let.fn);
  if (!unary && !binary) return std::nullopt;
  Block block;
  Emitter emitter(block, let.name, own);
  emitter.set_lanes(let.type.lanes);
  Math math(emitter);
  Emitter::Value x{let.operands[0], let.type};
  Emitter::Value result = unary ? (math.*unary)(x) : (math.*binary)(x, {let.operands[1], let.type});
  const auto* last = std::get_if<Let>(&block.back()->node);
  if (last && last->name == result.name) {
    Let renamed = *last;
    renamed.name = let.name;
    block.back() = make_stmt(std::move(renamed));
  } else {
    block.push_back(make_stmt(Let{let.name, let.type, Fn::cast, {result.name}, {}, {}, {}}));
  }
  return block;
}

}  // namespace

kernel_ir::Module expand_math(kernel_ir::Module module, const PassContext& ctx) {
  const std::set<Fn>& own = target_of(ctx).own_functions;
  return with_bodies(std::move(module), [&](const Kernel& kernel) {
    const Readers readers(kernel.body);
    return rewrite(kernel.body, [&](const Ref<Stmt>& stmt) -> Block {
      if (const auto* let = std::get_if<Let>(&stmt->node))
        if (auto sequence = expand(*let, readers, own)) return *std::move(sequence);
      return Block{stmt};
    });
  });
}

}  // namespace deplo
