#include "target/cuda/text.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "expr/node.h"
#include "kernel_ir/rewrite.h"
#include "target/cuda/helpers.h"
#include "target/cuda/index.h"
#include "target/cuda/numbers.h"

namespace deplo {
namespace {

using namespace kernel_ir;
using cuda::cast;
using cuda::literal;
using cuda::memory_type;

constexpr int64_t kWidestAccess = 16;  ///< of one thread's widest access

/// The body of one kernel. With `assumes`, the text is right where conditions() hold.
class BodyWriter {
 public:
  BodyWriter(const Kernel& kernel, bool assumes) : kernel_(kernel), index_(kernel, assumes) {
    for (const Param& p : kernel.params) {
      buffers_[p.name] = p.dtype;
      params_.insert(p.name);
    }
    visit_all(kernel.body, [&](const Stmt& stmt) {
      if (const auto* load = std::get_if<Load>(&stmt.node)) masks_.insert(load->mask);
      if (const auto* store = std::get_if<Store>(&stmt.node)) masks_.insert(store->mask);
    });
    for (size_t before = 0; before != masks_.size();) {
      before = masks_.size();
      visit_all(kernel.body, [&](const Stmt& stmt) {
        const auto* let = std::get_if<Let>(&stmt.node);
        if (let && let->type.dtype == DType::boolean && masks_.count(let->name) > 0) masks_.insert(let->operands.begin(), let->operands.end());
      });
    }
  }

  std::string write(int indent) {
    indent_ = indent;
    index_.name_divisions();
    block(kernel_.body);
    std::string head;
    for (const std::string& declaration : index_.declarations()) head += std::string(static_cast<size_t>(indent) * 2, ' ') + declaration + "\n";
    return head + text_;
  }

  std::vector<std::string> conditions() const {
    std::vector<std::string> out = index_.conditions();
    for (const auto& [name, bytes] : aligned_) out.push_back(fmt::format("(unsigned long long){} % {} == 0", id(name), bytes));
    return out;
  }

 private:
  template <class... Args>
  void line(fmt::format_string<Args...> format, Args&&... args) {
    text_.append(static_cast<size_t>(indent_) * 2, ' ');
    text_ += fmt::format(format, std::forward<Args>(args)...);
    text_ += '\n';
  }

  static std::string id(const std::string& name) { return CudaIndex::id(name); }
  std::string expr(Expr e) { return index_.text(e); }

  /// The function of a statement of one lane's operands.
  std::string apply(const Let& s, const std::vector<std::string>& operands, const std::vector<DType>& types, int lane) {
    auto arg = [&](size_t i) { return operands[i]; };
    auto from = [&](size_t i) { return types[i]; };
    DType operand = operands.empty() ? s.type.dtype : types.back();
    bool wide = operand == DType::f64;
    auto call = [&](std::string_view name) {
      std::string args;
      for (size_t i = 0; i < operands.size(); ++i) args += (i ? ", " : "") + arg(i);
      return fmt::format("{}{}({})", name, is_float(operand) && !wide ? "f" : "", args);
    };
    auto infix = [&](std::string_view op) { return fmt::format("{} {} {}", arg(0), op, arg(1)); };
    // Signed overflow is undefined in C++, so integer arithmetic goes through the unsigned type.
    auto wrapping = [&](std::string_view op) {
      if (is_float(operand)) return infix(op);
      return fmt::format("({})((unsigned long long){} {} (unsigned long long){})", memory_type(s.type.dtype), arg(0), op, arg(1));
    };
    auto helper = [&](std::string_view name) {
      std::string args;
      for (size_t i = 0; i < operands.size(); ++i) args += (i ? ", " : "") + arg(i);
      return fmt::format("deplo_{}({})", name, args);
    };
    switch (s.fn) {
      case Fn::constant: return literal(s.literal, s.type.dtype);
      case Fn::index: {
        const Expr value = s.index + s.lane_step * lane;
        if (s.type.dtype == DType::i64) return expr(value);
        return cast(fmt::format("(long long)({})", expr(value)), DType::i64, s.type.dtype);
      }
      case Fn::cast:
      case Fn::narrow: return cast(arg(0), from(0), s.type.dtype);
      case Fn::bitcast: return fmt::format("deplo_bits<{}>({})", memory_type(s.type.dtype), arg(0));
      case Fn::neg: return is_float(operand) ? "-" + arg(0) : fmt::format("({})(0ULL - (unsigned long long){})", memory_type(s.type.dtype), arg(0));
      case Fn::abs: return is_float(operand) ? call("fabs") : helper("abs_i");
      case Fn::add: return wrapping("+");
      case Fn::sub: return wrapping("-");
      case Fn::mul: return wrapping("*");
      case Fn::div: return infix("/");
      case Fn::trunc_div: return fmt::format("deplo_trunc_div({}, {}, error)", arg(0), arg(1));
      case Fn::floor_div: return fmt::format("deplo_floor_div({}, {}, error)", arg(0), arg(1));
      case Fn::fmod: return is_float(operand) ? call("fmod") : fmt::format("deplo_rem_c({}, {}, error)", arg(0), arg(1));
      case Fn::remainder: return is_float(operand) ? helper("remainder_f") : fmt::format("deplo_rem_python({}, {}, error)", arg(0), arg(1));
      case Fn::pow: return is_float(operand) ? call("pow") : helper("pow_i");
      case Fn::min: return helper("min");
      case Fn::max: return helper("max");
      case Fn::bit_and: return infix(operand == DType::boolean ? "&&" : "&");
      case Fn::bit_or: return infix(operand == DType::boolean ? "||" : "|");
      case Fn::bit_xor: return infix(operand == DType::boolean ? "!=" : "^");
      case Fn::bit_not: return (operand == DType::boolean ? "!" : "~") + arg(0);
      case Fn::shl: return helper("shl");
      case Fn::shr: return helper("shr");
      case Fn::eq: return infix("==");
      case Fn::ne: return infix("!=");
      case Fn::lt: return infix("<");
      case Fn::le: return infix("<=");
      case Fn::gt: return infix(">");
      case Fn::ge: return infix(">=");
      case Fn::where: return fmt::format("{} ? {} : {}", arg(0), arg(1), arg(2));
      case Fn::signbit: return is_float(operand) ? fmt::format("deplo_signbit({})", arg(0)) : arg(0) + " < 0";
      case Fn::round: return call("rint");
      case Fn::dot4: return fmt::format("deplo_dot4({}, {}, {})", arg(0), arg(1), arg(2));
      case Fn::dot2: {
        auto wide = [&](size_t i) { return cast(arg(i), from(i), DType::f32); };
        return fmt::format("fmaf({}, {}, fmaf({}, {}, {}))", wide(0), wide(2), wide(1), wide(3), arg(4));
      }
      case Fn::sigmoid:
      case Fn::softplus:
      case Fn::silu:
      case Fn::mish:
      case Fn::gelu:
      case Fn::gelu_tanh:
      case Fn::logit:
      case Fn::sinc:
      case Fn::xlogy:
      case Fn::logaddexp:
      case Fn::logaddexp2: return helper(to_string(s.fn));
      case Fn::lgamma: return call("lgamma");
      case Fn::erfinv: return call("erfinv");
      case Fn::ndtri: return call("normcdfinv");
      case Fn::i0: return call("cyl_bessel_i0");
      case Fn::i1: return call("cyl_bessel_i1");
      case Fn::exp2_near:
      case Fn::reciprocal_near: return helper(to_string(s.fn));
      case Fn::digamma:
      case Fn::i0e:
      case Fn::i1e:
      case Fn::zeta: throw UnsupportedError(fmt::format("{} has no CUDA form", to_string(s.fn)));
      default: return call(to_string(s.fn));  // exp, log, sin, sqrt, floor, fma, ...: CUDA's name is the table's
    }
  }

  // ---- values of one or more lanes ---------------------------------------------------------------------------------

  /// A value: scalars v_x_L0, v_x_L1, ... for its lanes, one v_x for all where they are equal, or the lanes of a pack.
  enum class Form : uint8_t { one, lanes, pack, matrices };
  struct Known {
    DType dtype = DType::f32;
    int lanes = 1;
    Form form = Form::one;
    bool backwards = false;  ///< the last lane of a pack comes first in memory
  };

  const Known& known(const std::string& name) const { return values_.at(name); }
  bool is_uniform(const std::string& name) const { return name.empty() || known(name).form == Form::one; }
  std::string lane(const std::string& name, int l) const {
    switch (known(name).form) {
      case Form::one: return id(name);
      case Form::lanes: return fmt::format("{}_L{}", id(name), l);
      case Form::pack: return fmt::format("{}.lane[{}]", id(name), known(name).backwards ? known(name).lanes - 1 - l : l);
      case Form::matrices: throw InternalError(fmt::format("kernel {}: {} is a part of a warp's matrices", kernel_.name, name));
    }
    return "";
  }

  void define(const std::string& name, Type type, bool uniform, const std::function<std::string(int)>& text) {
    values_[name] = {type.dtype, type.lanes, uniform || type.lanes == 1 ? Form::one : Form::lanes};
    // An integer that an index expression is made of may be an int.
    const std::string_view kind = type.dtype == DType::i64 && type.lanes == 1 && index_.is_narrow_name(name) ? "int" : memory_type(type.dtype);
    for (int l = 0; l < (is_uniform(name) ? 1 : type.lanes); ++l) line("const {} {} = {};", kind, lane(name, l), text(l));
  }

  void statement(const Let& s) {
    bool uniform = s.fn != Fn::index || s.lane_step.is(0);
    std::vector<DType> types;
    for (const std::string& name : s.operands) {
      uniform = uniform && is_uniform(name);
      types.push_back(known(name).dtype);
    }
    if (s.type.dtype == DType::i64 && s.type.lanes == 1) {
      if (s.fn == Fn::index && varies(s.index)) varying_.insert(s.name);
      if (s.fn == Fn::index)
        index_.define(s.name, s.index);
      else
        index_.define_unknown(s.name);
    }
    define(s.name, s.type, uniform, [&](int l) {
      std::vector<std::string> operands;
      // As an operand an index has its own dtype again, which templates go by.
      for (const std::string& name : s.operands) {
        const bool narrow = known(name).dtype == DType::i64 && is_uniform(name) && index_.is_narrow_name(name);
        operands.push_back((narrow ? "(long long)" : "") + lane(name, l));
      }
      return apply(s, operands, types, l);
    });
  }
  void statement(const Splat& s) {
    define(s.name, s.type, true, [&](int) { return id(s.operand); });
  }
  void statement(const FirstLanes& s) {
    // All or none, if the count is a multiple: worth an assumption where accesses depend on it.
    const bool uniform = s.lanes > 1 && (s.lanes & (s.lanes - 1)) == 0 && masks_.count(s.name) > 0 && index_.is_multiple(s.count, s.lanes);
    define(s.name, {DType::boolean, s.lanes}, uniform, [&](int l) { return fmt::format("{} < {}", l, expr(s.count)); });
  }
  void statement(const ReduceLanes& s) {
    const Known& operand = known(s.operand);
    std::vector<std::string> lanes;
    for (int l = 0; l < operand.lanes; ++l) lanes.push_back(lane(s.operand, l));
    Let pair{s.name, {s.dtype, 1}, s.fn, {}, {}, 0, 0};
    for (int step = 0; lanes.size() > 2; ++step) {
      const size_t half = lanes.size() / 2;
      for (size_t l = 0; l < half; ++l) {
        std::string part = fmt::format("{}_S{}_{}", id(s.name), step, l);
        line("const {} {} = {};", memory_type(s.dtype), part, apply(pair, {lanes[l], lanes[l + half]}, {s.dtype, s.dtype}, 0));
        lanes[l] = part;
      }
      lanes.resize(half);
    }
    define(s.name, {s.dtype, 1}, true, [&](int) { return lanes.size() == 1 ? lanes[0] : apply(pair, lanes, {s.dtype, s.dtype}, 0); });
  }
  void statement(const Extract& s) {
    define(s.name, {s.dtype, 1}, true, [&](int) { return lane(s.operand, s.lane); });
  }
  void statement(const Shuffle& s) {
    define(s.name, s.type, false, [&](int l) {
      const int from = s.lanes[static_cast<size_t>(l)];
      const int lanes = known(s.a).lanes;
      return from < lanes ? lane(s.a, from) : lane(s.b, from - lanes);
    });
  }
  void statement(const Exchange& s) {
    const char* how = s.partner == Partner::differs ? "xor" : s.partner == Partner::number ? "from" : "below";
    define(s.name, {s.dtype, 1}, true, [&](int) { return fmt::format("deplo_exchange_{}({}, {})", how, id(s.operand), s.lane); });
  }

  // ---- memory --------------------------------------------------------------------------------------------------------

  /// Whether lanes side by side are one access, or a few of 16 bytes: where they lie at a multiple of its size. Those of a thread some of whose lanes
  /// are off are single elements.
  template <class Access>
  bool is_packed(const Access& s, DType dtype, int lanes) {
    if (lanes == 1 || (lanes & (lanes - 1)) != 0 || !s.gather.empty() || !(s.stride.is(1) || s.stride.is(-1))) return false;
    const int64_t piece = std::min<int64_t>(lanes, kWidestAccess / size_of(dtype));
    if (params_.count(s.buffer) && !index_.assumes()) return false;
    if (!index_.is_multiple(first_of(s, lanes), piece)) return false;
    if (params_.count(s.buffer)) {
      int64_t& bytes = aligned_[s.buffer];
      bytes = std::max(bytes, piece * size_of(dtype));
    }
    return true;
  }

  /// The lowest place of lanes side by side, upwards or downwards.
  template <class Access>
  static Expr first_of(const Access& s, int lanes) {
    return s.stride.is(-1) ? s.offset - (lanes - 1) : s.offset;
  }

  /// That all lanes of a mask are on.
  std::string all_on(const std::string& mask) const {
    if (is_uniform(mask)) return id(mask);
    std::string all;
    for (int l = 0; l < known(mask).lanes; ++l) all += (l ? " && " : "") + lane(mask, l);
    return all;
  }

  template <class Access>
  std::string place(const Access& s, int l) {
    // Lanes that are gathered have no stride.
    const std::string at = expr(s.gather.empty() ? s.offset + s.stride * l : s.offset);
    return s.gather.empty() ? fmt::format("{}[{}]", id(s.buffer), at) : fmt::format("{}[{} + {}]", id(s.buffer), at, lane(s.gather, l));
  }

  /// Whether threads side by side surely have places of their own: their number is a part of the offset.
  static bool has_places_of_lanes(Expr offset) {
    const Expr thread = Expr::symbol("thread_x");
    const Expr step = substitute(offset, {{"thread_x", thread + 1}}) - offset;
    return step.is_constant() && step.value() != 0;
  }

  void statement(const Load& s) {
    const Scalar zero = is_float(s.type.dtype) ? Scalar::of_float(s.type.dtype, 0) : Scalar::of_int(s.type.dtype, 0);
    auto otherwise = [&](int l) { return s.passthrough.empty() ? literal(zero, s.type.dtype) : lane(s.passthrough, l); };
    if (s.type.dtype == DType::i64 && s.type.lanes == 1) index_.define_unknown(s.name);
    if (is_packed(s, s.type.dtype, s.type.lanes)) {
      const bool of_window = !s.mask.empty() && params_.count(s.buffer) > 0 && varies(s.offset);
      const Expr first = first_of(s, s.type.lanes);
      const std::string from = of_window ? pointer(s.buffer, first) : fmt::format("{} + {}", id(s.buffer), expr(first));
      values_[s.name] = {s.type.dtype, s.type.lanes, Form::pack, s.stride.is(-1)};
      const std::string read = fmt::format("deplo_get<{}>({})", s.type.lanes, from);
      const std::string type = fmt::format("deplo_pack<{}, {}>", memory_type(s.type.dtype), s.type.lanes);
      if (s.mask.empty()) {
        line("const {} {} = {};", type, id(s.name), read);
      } else {
        std::string lanes;
        for (int l = 0; l < s.type.lanes; ++l) lanes += (l ? ", " : "") + otherwise(s.stride.is(-1) ? s.type.lanes - 1 - l : l);
        line("{} {}{{{{{}}}}};", type, id(s.name), lanes);
        line("if ({}) {} = {};", all_on(s.mask), id(s.name), read);
        for (int l = 0; !is_uniform(s.mask) && l < s.type.lanes; ++l)
          line("{}if ({}) {} = {};{}", l ? "  " : "else { ", lane(s.mask, l), lane(s.name, l), place(s, l), l + 1 < s.type.lanes ? "" : " }");
      }
      return;
    }
    const bool uniform = s.gather.empty() && s.stride.is(0) && is_uniform(s.mask) && is_uniform(s.passthrough);
    define(s.name, s.type, uniform,
           [&](int l) { return s.mask.empty() ? place(s, l) : fmt::format("{} ? {} : {}", lane(s.mask, l), place(s, l), otherwise(l)); });
  }

  void statement(const Store& s) {
    const Known value = known(s.value);
    if (s.combiner == Combiner::set && is_packed(s, value.dtype, value.lanes)) {
      std::string lanes;
      for (int l = 0; l < value.lanes; ++l) lanes += (l ? ", " : "") + lane(s.value, s.stride.is(-1) ? value.lanes - 1 - l : l);
      line("{}deplo_put({} + {}, deplo_pack<{}, {}>{{{{{}}}}});", s.mask.empty() ? "" : fmt::format("if ({}) ", all_on(s.mask)), id(s.buffer),
           expr(first_of(s, value.lanes)), memory_type(value.dtype), value.lanes, lanes);
      for (int l = 0; !is_uniform(s.mask) && l < value.lanes; ++l)
        line("{}if ({}) {} = {};{}", l ? "  " : "else { ", lane(s.mask, l), place(s, l), lane(s.value, l), l + 1 < value.lanes ? "" : " }");
      return;
    }
    for (int l = 0; l < value.lanes; ++l) {
      const std::string target = place(s, l);
      const std::string condition = s.mask.empty() ? "" : fmt::format("if ({}) ", lane(s.mask, l));
      if (s.combiner == Combiner::set) {
        line("{}{} = {};", condition, target, lane(s.value, l));
      } else if (s.atomic) {
        line("{}deplo_add_{}(&{}, {});", condition, has_places_of_lanes(s.offset) ? "atomic" : "together", target, lane(s.value, l));
      } else {
        std::string_view how = s.combiner == Combiner::sum    ? "add"
                               : s.combiner == Combiner::prod ? "mul"
                               : s.combiner == Combiner::min  ? "min"
                                                              : "max";
        line("{}{} = deplo_{}({}, {});", condition, target, how, target, lane(s.value, l));
      }
    }
  }

  // ---- the rest ------------------------------------------------------------------------------------------------------

  void statement(const Var& s) {
    index_.define_unknown(s.name);
    values_[s.name] = {s.type.dtype, s.type.lanes, s.type.lanes == 1 ? Form::one : Form::lanes};
    for (int l = 0; l < s.type.lanes; ++l) line("{} {} = {};", memory_type(s.type.dtype), lane(s.name, l), lane(s.init, l));
  }
  void statement(const Assign& s) {
    for (int l = 0; l < known(s.name).lanes; ++l) line("{} = {};", lane(s.name, l), lane(s.value, l));
  }
  void statement(const For& s) {
    // A pipeline's stages are one body, however few they are.
    if (std::any_of(s.body.begin(), s.body.end(), [](const auto& stmt) { return std::holds_alternative<CopyGroup>(stmt->node); }))
      line("#pragma unroll 1");
    else if (s.unroll > 1)
      line("#pragma unroll {}", s.unroll);
    const std::string lo = expr(s.lo);
    const std::string hi = expr(s.hi);
    const std::string step = expr(s.step);
    index_.define_loop(s);
    line("for ({4} {0} = {1}; {0} < {2}; {0} += {3}) {{", id(s.name), lo, hi, step, index_.is_narrow_name(s.name) ? "int" : "long long");
    std::set<std::string> outside{s.name};
    outside.swap(varying_);
    nested(s.body);
    outside.swap(varying_);
    line("}}");
  }
  void statement(const If& s) {
    line("if ({}) {{", s.guard.empty() ? id(s.condition) : index_.text(s.guard));
    nested(s.then);
    if (!s.otherwise.empty()) {
      line("}} else {{");
      nested(s.otherwise);
    }
    line("}}");
  }
  void statement(const Alloc& s) {
    buffers_[s.name] = s.dtype;
    if (s.space == Space::scratch) {
      line("{0}* const {1} = ({0}*)(block_scratch + {2});", memory_type(s.dtype), id(s.name), expr(s.offset));
      return;
    }
    DEPLO_SUPPORT(s.count.is_constant(), "kernel {}: {} has a symbolic size, CUDA arrays need a constant one", kernel_.name, s.name);
    if (s.space == Space::shared) return;  // declared at the kernel's start
    line("__align__(16) {} {}[{}];", memory_type(s.dtype), id(s.name), s.count.value());
  }
  void statement(const Prefetch& /*s*/) {}
  /// In an array that a block has, which ints count.
  std::string shared_offset(Expr offset) { return index_.is_narrow(offset) ? expr(offset) : fmt::format("(int)({})", expr(offset)); }

  /// The address of an element of a parameter. What a loop leaves as it is makes a pointer of its own, which is computed before the loop, and a
  /// constant behind the rest becomes a part of the instruction.
  std::string pointer(const std::string& buffer, Expr offset) {
    Expr fixed = 0;
    Expr moving = 0;
    int64_t constant = 0;
    for (const Term& term : terms_of(offset)) {
      if (term.atoms.empty())
        constant = term.coefficient;
      else
        (varies(atoms_product(term)) ? moving : fixed) = (varies(atoms_product(term)) ? moving : fixed) + from_terms({term});
    }
    if (moving.is(0) || fixed.is(0)) {
      const std::string start = fmt::format("&{}[{}]", id(buffer), expr(offset - constant));
      return constant == 0 ? start : fmt::format("{} + {}", start, constant);
    }
    if (constant < 0) fixed = fixed + constant;
    const std::string start = fmt::format("&{}[{}] + {}", id(buffer), expr(fixed), expr(moving));
    return constant > 0 ? fmt::format("{} + {}", start, constant) : start;
  }

  /// Whether e changes from one turn of the innermost loop to the next.
  bool varies(Expr e) const {
    const auto names = symbols_of(e);
    return std::any_of(names.begin(), names.end(), [&](const std::string& name) { return varying_.count(name) > 0; });
  }

  void statement(const CopyAsync& s) {
    const int64_t bytes = s.elements * size_of(buffers_.at(s.buffer));
    const std::string to = fmt::format("{}, {}", id(s.buffer), shared_offset(s.offset));
    const std::string from = pointer(s.from, s.from_offset);
    const bool aligned =
        index_.assumes() && params_.count(s.from) && index_.is_multiple(s.from_offset, s.elements) && index_.is_multiple(s.offset, s.elements);
    const bool all = s.count.is(s.elements) && s.guard.empty();
    if (!aligned) {
      const std::string count = s.guard.empty() ? expr(s.count) : fmt::format("{} ? (long long)({}) : 0LL", index_.text(s.guard), expr(s.count));
      line("deplo_copy_elements<{}>(&{}[{}], {}, {});", s.elements, id(s.buffer), expr(s.offset), from, count);
      return;
    }
    aligned_[s.from] = std::max(aligned_[s.from], bytes);
    if (all) {
      line("deplo_copy_async({}, {});", to, from);
      return;
    }
    // All or none, if the count is a multiple.
    std::vector<Cond> guard = s.guard;
    const bool whole = s.count.is(s.elements) || index_.is_multiple(s.count, s.elements);
    if (whole && !s.count.is(s.elements)) guard.push_back(less(0, s.count));
    const std::string some =
        whole ? std::to_string(bytes) : fmt::format("deplo_copied_bytes<{}, {}>({})", s.elements, bytes / s.elements, expr(s.count));
    line("deplo_copy_async_first({}, {}, {});", to, from, guard.empty() ? some : fmt::format("{} ? {} : 0", index_.text(guard), some));
  }
  void statement(const CopyGroup& s) {
    if (s.pending == CopyGroup::kCommit)
      line("deplo_copy_commit();");
    else
      line("deplo_copy_wait<{}>();", s.pending);
  }
  void statement(const LoadMatrix& s) {
    const int64_t count = s.type.lanes * size_of(s.type.dtype) / 4;
    const std::string loaded =
        fmt::format("deplo_load_matrix_x{}{}({}, {})", count, s.transposed ? "_transposed" : "", id(s.buffer), shared_offset(s.offset));
    line("const deplo_pack<unsigned, {}> {} = {};", count, id(s.name),
         s.type.dtype == DType::f32 ? fmt::format("deplo_tf32_of({})", loaded) : loaded);
    values_[s.name] = {s.type.dtype, s.type.lanes, Form::matrices};
  }
  void statement(const JoinMatrix& s) {
    std::string words;
    for (const std::string& part : s.parts)
      if (s.type.dtype == DType::f32)
        words += fmt::format("{}deplo_tf32({})", words.empty() ? "" : ", ", lane(part, s.lane));
      else
        words += fmt::format("{}deplo_pair_{}({}, {})", words.empty() ? "" : ", ",
                             known(part).dtype != DType::f32 ? "bits"
                             : s.type.dtype == DType::bf16   ? "bf16"
                                                             : "f16",
                             lane(part, s.lane), lane(part, s.lane + 1));
    line("const deplo_pack<unsigned, {}> {}{{{{{}}}}};", s.parts.size(), id(s.name), words);
    values_[s.name] = {s.type.dtype, s.type.lanes, Form::matrices};
  }
  void statement(const Mma& s) {
    const DType a = known(s.a).dtype;
    const DType b = known(s.b).dtype;
    const std::string kind = size_of(a) == 1   ? fmt::format("{}8_{}8", a == DType::i8 ? "s" : "u", b == DType::i8 ? "s" : "u")
                             : a == DType::f32 ? "tf32"
                                               : std::string(to_string(a));
    line("deplo_mma_{}({}, {}, {}, {}, {}, {}.lane[{}], {}.lane[{}]);", kind, lane(s.low, s.lane), lane(s.low, s.lane + 1), lane(s.high, s.lane),
         lane(s.high, s.lane + 1), id(s.a), id(s.b), 2 * s.half, id(s.b), 2 * s.half + 1);
  }
  /// Copies run ahead in a warp of their own where tensor maps can tell where tiles lie; else all threads copy, one tile of each factor after the
  /// other.
  void statement(const MultiplyTiles& s) {
    const TileProducts& p = s.products;
    std::string sums;
    for (const std::string& sum : s.sums) sums += fmt::format("{}{}, {}", sums.empty() ? "" : ", ", lane(sum, 0), lane(sum, 1));
    const std::string thread = expr(p.thread);
    const std::string steps = shared_offset(p.tiles_of_k());
    const std::string flags = id(p.flags);
    const size_t first_map = maps_;
    maps_ += 2;
    const TileFactor* factors[] = {&p.a, &p.b};
    const auto multiply = [&](const std::string& stage) {
      line("deplo_group_start();");
      for (int f : {0, 1}) {
        const std::string of_group = f == 0 ? fmt::format(" + {} / {} * {}", thread, kTileGroup, kTileGroupRows * kTileDepth) : "";
        line("const unsigned long long {} = deplo_tile_descriptor({}, {}*{}{}, {}, {});", f == 0 ? "tile_a" : "tile_b", id(factors[f]->tiles), stage,
             factors[f]->elements(), of_group, factors[f]->turned ? kTileDepth * kTileDepth * 2 : 16, 1024);
      }
      for (int64_t k = 0; k < kTileDepth; k += 16) {
        const auto step = [&](const TileFactor& f) { return (f.turned ? k * kTileDepth * 2 : k * 2) / 16; };
        line("deplo_group_multiply_{}_{}<{}, {}>({}, tile_a + {}, tile_b + {});", buffers_.at(p.a.buffer) == DType::bf16 ? "bf16" : "f16", p.b.rows,
             static_cast<int>(p.a.turned), static_cast<int>(p.b.turned), sums, step(p.a), step(p.b));
      }
      line("deplo_group_commit();");
    };
    const auto open = [&](const std::string& head) {
      line("{} {{", head);
      ++indent_;
    };
    const auto close = [&] {
      --indent_;
      line("}}");
    };
    if (!index_.assumes()) {
      open(fmt::format("for (int step = 0; step < {}; ++step)", steps));
      line("__syncthreads();");
      std::string threads;
      for (Expr e : kernel_.block) threads += (threads.empty() ? "" : "*") + expr(e);
      for (const TileFactor* f : factors) {
        const std::string buffer = id(f->buffer);
        Expr start = f->offset;
        for (size_t d = 1; d < f->at.size(); ++d) start = start + f->at[d] * f->strides[d + 1];
        const int64_t boxes = f->turned ? f->rows / kTileDepth : 1;
        for (int64_t box = 0; box < boxes; ++box) {
          const std::string k = fmt::format("step * {}LL", kTileDepth);
          const std::string row = expr(f->at[0] + box * kTileDepth);
          line("deplo_fill_tile({} + {}, {}, {} + {}, {}, {}, {}, {}, {}, {}, {});", id(f->tiles), box * kTileDepth * kTileDepth,
               f->turned ? kTileDepth : f->rows, buffer, expr(start), expr(f->strides[1]), f->turned ? row : k, expr(f->extents[0]),
               f->turned ? k : row, expr(f->extents[1]), thread, threads);
        }
      }
      line("deplo_tiles_written();");
      line("__syncthreads();");
      open(fmt::format("if ({} < {})", thread, p.threads()));
      multiply("0");
      line("deplo_group_end_{}({});", p.b.rows, sums);
      close();
      close();
      return;
    }
    int64_t bytes = 0;
    for (const TileFactor* f : factors) {
      aligned_[f->buffer] = std::max<int64_t>(aligned_[f->buffer], kWidestAccess);
      bytes += f->elements() * 2;
    }
    const bool is_first = p.after.is(0);
    if (is_first) {
      line("if ({} == 0) deplo_flags_start({}, {}, {});", thread, flags, p.stages, p.threads() / 32);
      line("__syncthreads();");
    }
    const auto loop = [&] {
      line("int stage = {}, turn = {};", is_first ? "0" : fmt::format("{} % {}", shared_offset(p.after), p.stages),
           is_first ? "0" : fmt::format("{} / {} & 1", shared_offset(p.after), p.stages));
      line("#pragma unroll 1");
      open(fmt::format("for (int step = 0; step < {}; ++step)", steps));
    };
    const auto next = [&] { line("if (++stage == {}) {{ stage = 0; turn ^= 1; }}", p.stages); };
    open(fmt::format("if ({} >= {})", thread, p.threads()));
    open(fmt::format("if ({} == {})", thread, p.threads()));
    loop();
    line("deplo_flag_wait({}, {} + stage, turn ^ 1);", flags, p.stages);
    line("deplo_flag_expect({}, stage, {});", flags, bytes);
    for (int f : {0, 1}) {
      const TileFactor& factor = *factors[f];
      for (int64_t box = 0; box < (factor.turned ? factor.rows / kTileDepth : 1); ++box) {
        const std::string k = fmt::format("step * {}", kTileDepth);
        const std::string row = shared_offset(factor.at[0] + box * kTileDepth);
        std::string at = fmt::format("{}, {}", factor.turned ? row : k, factor.turned ? k : row);
        for (size_t d = 1; d < factor.at.size(); ++d) at += ", " + shared_offset(factor.at[d]);
        line("deplo_copy_tile_{}d({}, stage * {} + {}, &map_{}, {}, {}, stage);", factor.extents.size(), id(factor.tiles), factor.elements(),
             box * kTileDepth * kTileDepth, first_map + static_cast<size_t>(f), at, flags);
      }
    }
    next();
    close();
    close();
    --indent_;
    line("}} else {{");
    ++indent_;
    loop();
    line("deplo_flag_wait({}, stage, turn);", flags);
    multiply("stage");
    // The products before these are done: whoever copies may overwrite what they read.
    line("deplo_group_wait<1>();");
    line("if (step > 0 && {} % 32 == 0) deplo_flag_arrive({}, {} + (stage == 0 ? {} : stage - 1));", thread, flags, p.stages, p.stages - 1);
    next();
    close();
    line("deplo_group_end_{}({});", p.b.rows, sums);
    line("if ({} > 0 && {} % 32 == 0) deplo_flag_arrive({}, {} + (stage == 0 ? {} : stage - 1));", steps, thread, flags, p.stages, p.stages - 1);
    close();
  }
  /// Products of one statement are a group of them, which is waited for at its end unless more may be under way.
  void statement(const MultiplyGroup& s) {
    const GroupProducts& p = s.products;
    std::string sums;
    for (int64_t g = 0; g < p.columns / 8; ++g)
      for (int64_t h : {0, 1})
        for (int64_t c : {0, 1}) sums += (sums.empty() ? "" : ", ") + lane(s.sums[s.var_of(h, g)], static_cast<int>(g % (p.lanes / 2) * 2 + c));
    line("{{");
    ++indent_;
    const auto descriptor = [&](const char* name, const GroupFactor& f) {
      line("const unsigned long long {} = deplo_tile_descriptor({}, {}, {}, {});", name, id(f.tile), shared_offset(f.at),
           f.turned ? f.lines * 128 : 16, kGroupLines * 128);
    };
    const DType dtype = buffers_.at(p.b.tile);
    const int64_t bytes = size_of(dtype);
    const int64_t length = 128 / bytes;
    // In units of 16 bytes.
    const auto step = [&](const GroupFactor& f, int64_t k) { return (f.turned ? k * 128 : k / length * f.lines * 128 + k % length * bytes) / 16; };
    if (p.depth > 0) {
      if (p.matrices.empty()) descriptor("tile_a", p.a);
      descriptor("tile_b", p.b);
      line("deplo_group_start();");
      const auto sign = [&](const GroupFactor& f) { return buffers_.at(f.tile) == DType::i8 ? "s8" : "u8"; };
      const std::string type = bytes == 1 ? fmt::format("{}_{}", sign(p.a), sign(p.b)) : std::string(to_string(dtype));
      for (int64_t k = 0; k < p.depth; k += 2 * kWidestAccess / bytes) {
        const std::string b = fmt::format("tile_b + {}", step(p.b, k));
        if (p.matrices.empty())
          line("deplo_group_multiply_{}_{}<{}, {}>({}, tile_a + {}, {});", type, p.columns, static_cast<int>(p.a.turned),
               static_cast<int>(p.b.turned), sums, step(p.a, k), b);
        else
          line("deplo_group_multiply_rows_{}_{}<{}>({}, {}, {});", type, p.columns, static_cast<int>(p.b.turned), sums,
               id(p.matrices[static_cast<size_t>(k / kGroupDepth)]), b);
      }
      line("deplo_group_commit();");
    }
    if (p.pending == 0)
      line("deplo_group_end_{}{}({});", bytes == 1 ? "bytes_" : "", p.columns, sums);
    else
      line("deplo_group_wait<{}>();", p.pending);
    --indent_;
    line("}}");
  }
  void statement(const Matrix& /*s*/) { throw UnsupportedError(fmt::format("kernel {}: matrix statements are for CPUs", kernel_.name)); }
  void statement(const Barrier& /*s*/) {
    // Matrix units read what threads wrote.
    if (has_groups_) line("deplo_tiles_written();");
    line("__syncthreads();");
  }
  void statement(const SetError& s) {
    std::string any = lane(s.condition, 0);
    for (int l = 1; !is_uniform(s.condition) && l < known(s.condition).lanes; ++l) any += " || " + lane(s.condition, l);
    line("if ({}) *error = {};", any, static_cast<int>(s.code));
  }

  void nested(const Block& body) {
    ++indent_;
    block(body);
    --indent_;
  }
  void block(const Block& body) {
    for (const auto& stmt : body) std::visit([&](const auto& s) { statement(s); }, stmt->node);
  }

  const Kernel& kernel_;
  CudaIndex index_;
  std::map<std::string, Known> values_;
  std::map<std::string, DType> buffers_;
  std::set<std::string> params_;
  std::set<std::string> varying_;           ///< integers that change in the innermost loop
  std::set<std::string> masks_;             ///< that accesses of memory depend on
  std::map<std::string, int64_t> aligned_;  ///< parameters, and the bytes at whose multiples they begin
  std::string text_;
  int indent_ = 0;
  size_t maps_ = 0;  ///< that statements so far take
  bool has_groups_ = multiplies_in_groups(kernel_);
};

class CudaWriter {
 public:
  explicit CudaWriter(const Kernel& kernel) : kernel_(kernel) {}

  std::string write() {
    std::string params;
    for (const Param& p : kernel_.params) {
      bool reads = p.kind == loop_ir::ParamKind::in;
      params +=
          fmt::format("{}{}{}* __restrict__ {}", params.empty() ? "" : ", ", reads ? "const " : "", memory_type(p.dtype), CudaIndex::id(p.name));
    }
    for (const std::string& s : kernel_.symbols) params += fmt::format("{}long long {}", params.empty() ? "" : ", ", CudaIndex::id(s));
    for (const kernel_ir::Size& s : kernel_.sizes) params += fmt::format("{}long long {}", params.empty() ? "" : ", ", CudaIndex::id(s.name));
    params += fmt::format("{}int* __restrict__ error", params.empty() ? "" : ", ");
    std::string start;
    const bool dynamic = dynamic_shared_bytes(kernel_) > 0;
    if (dynamic || !kernel_.scratch_bytes.is(0))
      start += fmt::format("  extern __shared__ __align__({}) double deplo_shared[];\n", shared_alignment(kernel_));
    if (!kernel_.scratch_bytes.is(0)) {
      params += ", unsigned char* __restrict__ scratch";
      // Few bytes lie in shared memory that the launch gives: then there is no pointer.
      std::string_view block =
          kernel_.grid.size() > 1 ? "(((long long)blockIdx.z*gridDim.y + blockIdx.y)*gridDim.x + blockIdx.x)" : "(long long)blockIdx.x";
      start += fmt::format("  unsigned char* const block_scratch = scratch ? scratch + {}*{} : (unsigned char*)deplo_shared;\n", block,
                           CudaIndex(kernel_, false).text(kernel_.scratch_bytes));
    }
    for (size_t map = 0; map < 2 * tile_products(kernel_).size(); ++map)
      params += fmt::format(", const __grid_constant__ deplo_tensor_map map_{}", map);
    int64_t offset = 0;
    visit_all(kernel_.body, [&](const Stmt& stmt) {
      const auto* array = std::get_if<Alloc>(&stmt.node);
      if (!array || array->space != Space::shared) return;
      if (dynamic) {
        start += fmt::format("  {0}* const {1} = ({0}*)((unsigned char*)deplo_shared + {2});\n", memory_type(array->dtype),
                             CudaIndex::id(array->name), offset);
        offset += shared_bytes_of(*array, shared_alignment(kernel_));
        return;
      }
      DEPLO_SUPPORT(array->count.is_constant(), "kernel {}: {} has a symbolic size, CUDA arrays need a constant one", kernel_.name, array->name);
      start += fmt::format("  __shared__ __align__(16) {} {}[{}];\n", memory_type(array->dtype), CudaIndex::id(array->name), array->count.value());
    });
    return fmt::format("{}extern \"C\" __global__ void {}{}({}) {{\n{}{}}}\n", launch(), bounds(), kernel_.name, params, start, body());
  }

 private:
  /// What holds for large and odd sizes as well stands behind what is fast.
  std::string body() const {
    BodyWriter fast(kernel_, true);
    std::string text = fast.write(2);
    const std::vector<std::string> conditions = fast.conditions();
    if (conditions.empty()) return BodyWriter(kernel_, false).write(1);
    return fmt::format("  if ({}) {{\n{}  }} else {{\n{}  }}\n", joined(conditions, " && "), text, BodyWriter(kernel_, false).write(2));
  }

  std::string bounds() const {
    int64_t threads = 1;
    for (Expr e : kernel_.block) {
      if (!e.is_constant()) return "";
      threads *= e.value();
    }
    return fmt::format("__launch_bounds__({}) ", threads);
  }

  /// How the kernel is to be launched.
  std::string launch() const {
    auto list = [](const std::vector<Expr>& sizes) {
      std::vector<std::string> parts;
      for (Expr e : sizes) parts.push_back(deplo::print(e));
      return joined(parts);
    };
    std::string scratch = kernel_.scratch_bytes.is(0) ? "" : fmt::format(", scratch {} bytes a block", deplo::print(kernel_.scratch_bytes));
    return fmt::format("// grid ({}), block ({}){}\n", list(kernel_.grid), list(kernel_.block), scratch);
  }

  const Kernel& kernel_;
};

}  // namespace

std::string cuda_text(const Kernel& kernel) {
  std::string text = CudaWriter(kernel).write();
  return helpers_for(text) + text;
}

std::string cuda_text(const Module& module) {
  std::string text;
  for (const auto& kernel : module.kernels) text += (text.empty() ? "" : "\n") + CudaWriter(*kernel).write();
  return helpers_for(text) + text;
}

}  // namespace deplo
