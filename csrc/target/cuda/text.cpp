#include "target/cuda/text.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "target/cuda/prelude.h"

namespace deplo {
namespace {

using namespace kernel_ir;

std::string_view memory_type(DType dtype) {
  switch (dtype) {
    case DType::boolean: return "bool";
    case DType::u8: return "unsigned char";
    case DType::i8: return "signed char";
    case DType::i16: return "short";
    case DType::i32: return "int";
    case DType::i64: return "long long";
    case DType::f16: return "deplo_f16";
    case DType::bf16: return "deplo_bf16";
    case DType::f32: return "float";
    case DType::f64: return "double";
  }
  return "";
}

/// A C++ identifier for an IR name; dots become underscores.
std::string id(const std::string& name) {
  std::string out;
  for (char c : name) out += c == '.' || c == '%' || c == '@' || c == '$' ? '_' : c;
  return "v_" + out;
}

bool in_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

/// Whether the text uses a name as a whole word.
bool mentions(std::string_view text, std::string_view name) {
  for (size_t at = text.find(name); at != std::string_view::npos; at = text.find(name, at + 1)) {
    size_t end = at + name.size();
    if ((at == 0 || !in_name(text[at - 1])) && (end == text.size() || !in_name(text[end]))) return true;
  }
  return false;
}

/// One declaration of the prelude.
struct Helper {
  std::string_view name;
  std::string_view text;
};

/// The prelude's declarations in order: each starts at the left margin, and its name is the word before the first bracket or, of a type, before
/// the semicolon.
std::vector<Helper> split_prelude() {
  std::vector<Helper> helpers;
  for (size_t start = 0; start < kCudaPrelude.size();) {
    size_t end = kCudaPrelude.find('\n', start) + 1;
    while (end < kCudaPrelude.size() && (kCudaPrelude[end] == ' ' || kCudaPrelude[end] == '}')) end = kCudaPrelude.find('\n', end) + 1;
    std::string_view text = kCudaPrelude.substr(start, end - start);
    size_t stop = std::min(text.find('('), text.rfind(';'));
    size_t from = stop;
    while (from > 0 && in_name(text[from - 1])) --from;
    helpers.push_back({text.substr(from, stop - from), text});
    start = end;
  }
  return helpers;
}

/// What kernels need of the prelude.
std::string helpers_for(const std::string& kernels) {
  static const std::vector<Helper> kHelpers = split_prelude();
  std::string used;
  for (size_t i = kHelpers.size(); i-- > 0;)  // later ones use earlier ones
    if (mentions(kernels, kHelpers[i].name) || mentions(used, kHelpers[i].name)) used.insert(0, kHelpers[i].text);
  return used.empty() ? used : used + "\n";
}

class CudaWriter {
 public:
  explicit CudaWriter(const Kernel& kernel) : kernel_(kernel) {}

  std::string write() {
    std::string params;
    for (const Param& p : kernel_.params) {
      bool reads = p.kind == loop_ir::ParamKind::in;
      params += fmt::format("{}{}{}* __restrict__ {}", params.empty() ? "" : ", ", reads ? "const " : "", memory_type(p.dtype), id(p.name));
      buffers_[p.name] = p.dtype;
    }
    for (const std::string& s : kernel_.symbols) params += fmt::format("{}long long {}", params.empty() ? "" : ", ", id(s));
    for (const kernel_ir::Size& s : kernel_.sizes) params += fmt::format("{}long long {}", params.empty() ? "" : ", ", id(s.name));
    params += fmt::format("{}int* __restrict__ error", params.empty() ? "" : ", ");
    indent_ = 1;
    if (!kernel_.scratch_bytes.is(0)) {
      params += ", unsigned char* __restrict__ scratch";
      // Few bytes lie in shared memory that the launch gives: then there is no pointer.
      line("extern __shared__ double deplo_shared[];");
      std::string_view block =
          kernel_.grid.size() > 1 ? "(((long long)blockIdx.z*gridDim.y + blockIdx.y)*gridDim.x + blockIdx.x)" : "(long long)blockIdx.x";
      line("unsigned char* const block_scratch = scratch ? scratch + {}*{} : (unsigned char*)deplo_shared;", block, expr(kernel_.scratch_bytes));
    }
    block(kernel_.body);
    return fmt::format("{}extern \"C\" __global__ void {}({}) {{\n{}}}\n", launch(), kernel_.name, params, text_);
  }

 private:
  template <class... Args>
  void line(fmt::format_string<Args...> format, Args&&... args) {
    text_.append(static_cast<size_t>(indent_) * 2, ' ');
    text_ += fmt::format(format, std::forward<Args>(args)...);
    text_ += '\n';
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

  void scalar_only(int lanes) const {
    DEPLO_SUPPORT(lanes == 1, "kernel {}: CUDA text takes scalar values, found {} lanes; schedule it with threads instead", kernel_.name, lanes);
  }

  std::string expr(Expr e) const {
    switch (e.kind()) {
      case ExprKind::constant: return std::to_string(e.value()) + (e.value() > 2147483647 || e.value() < -2147483647 ? "LL" : "");
      case ExprKind::symbol: return symbol(e.name());
      case ExprKind::add:
      case ExprKind::mul: {
        std::string out;
        for (const Expr& t : e.operands()) out += (out.empty() ? "" : e.kind() == ExprKind::add ? " + " : "*") + expr(t);
        return "(" + out + ")";
      }
      case ExprKind::floordiv: return fmt::format("deplo_floordiv({}, {})", expr(e.operands()[0]), expr(e.operands()[1]));
      case ExprKind::mod: return fmt::format("deplo_mod({}, {})", expr(e.operands()[0]), expr(e.operands()[1]));
      case ExprKind::min: return fmt::format("deplo_min_i({}, {})", expr(e.operands()[0]), expr(e.operands()[1]));
      case ExprKind::max: return fmt::format("deplo_max_i({}, {})", expr(e.operands()[0]), expr(e.operands()[1]));
    }
    return "";
  }

  static std::string symbol(const std::string& name) {
    static const std::map<std::string, std::string> kIndices{{"block_x", "(long long)blockIdx.x"},
                                                             {"block_y", "(long long)blockIdx.y"},
                                                             {"block_z", "(long long)blockIdx.z"},
                                                             {"thread_x", "(long long)threadIdx.x"},
                                                             {"thread_y", "(long long)threadIdx.y"}};
    auto it = kIndices.find(name);
    return it == kIndices.end() ? id(name) : it->second;
  }

  std::string guard(const std::vector<Cond>& conds) const {
    std::string out;
    for (const Cond& c : conds) {
      std::string_view op = c.kind == Cond::Kind::ge0 ? ">=" : c.kind == Cond::Kind::eq0 ? "==" : "!=";
      out += fmt::format("{}{} {} 0", out.empty() ? "" : " && ", expr(c.expr), op);
    }
    return out.empty() ? "true" : out;
  }

  static std::string literal(const Scalar& value, DType dtype) {
    if (!is_float(dtype)) {
      if (dtype == DType::boolean) return value.i ? "true" : "false";
      if (value.i == INT64_MIN) return "(-9223372036854775807LL - 1)";
      return fmt::format("({}){}LL", memory_type(dtype), value.i);
    }
    std::string text = print_float(value.f);
    std::string suffix = dtype == DType::f64 ? "" : "f";
    if (text == "nan") return dtype == DType::f64 ? "deplo_nan64()" : wrap(dtype, "deplo_nan32()");
    if (text == "inf" || text == "-inf") {
      std::string call = fmt::format("{}deplo_inf{}()", text[0] == '-' ? "-" : "", dtype == DType::f64 ? "64" : "32");
      return wrap(dtype, call);
    }
    return wrap(dtype, text + suffix);
  }

  static std::string wrap(DType dtype, const std::string& f32) {
    if (dtype == DType::bf16) return fmt::format("deplo_to_bf16({})", f32);
    if (dtype == DType::f16) return fmt::format("deplo_to_f16({})", f32);
    return f32;
  }

  /// The value of operand `name` as its dtype.
  static std::string value(const std::string& name) { return id(name); }

  std::string cast(const std::string& operand, DType from, DType to) const {
    if (from == to) return operand;
    std::string wide = from == DType::bf16  ? fmt::format("deplo_from_bf16({})", operand)
                       : from == DType::f16 ? fmt::format("deplo_from_f16({})", operand)
                                            : operand;
    DType source = compute_type(from);
    if (to == DType::boolean) return fmt::format("({} != 0)", wide);
    if (to == DType::bf16 || to == DType::f16) return wrap(to, source == DType::f32 ? wide : fmt::format("(float){}", wide));
    if (is_float(source) && !is_float(to)) return fmt::format("({})deplo_float_to_{}({})", memory_type(to), to == DType::i64 ? "i64" : "i32", wide);
    return fmt::format("({}){}", memory_type(to), wide);
  }

  std::string apply(const Let& s) const {
    auto arg = [&](size_t i) { return value(s.operands[i]); };
    auto from = [&](size_t i) { return types_.at(s.operands[i]); };
    DType operand = s.operands.empty() ? s.type.dtype : from(s.operands.size() - 1);
    bool wide = operand == DType::f64;
    auto call = [&](std::string_view name) {
      std::string args;
      for (size_t i = 0; i < s.operands.size(); ++i) args += (i ? ", " : "") + arg(i);
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
      for (size_t i = 0; i < s.operands.size(); ++i) args += (i ? ", " : "") + arg(i);
      return fmt::format("deplo_{}({})", name, args);
    };
    switch (s.fn) {
      case Fn::constant: return literal(s.literal, s.type.dtype);
      case Fn::index: return cast(fmt::format("(long long)({})", expr(s.index)), DType::i64, s.type.dtype);
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
      case Fn::digamma:
      case Fn::i0e:
      case Fn::i1e:
      case Fn::zeta: throw UnsupportedError(fmt::format("{} has no CUDA form", to_string(s.fn)));
      default: return call(to_string(s.fn));  // exp, log, sin, sqrt, floor, fma, ...: CUDA's name is the table's
    }
  }

  void define(const std::string& name, DType dtype, const std::string& text) {
    types_[name] = dtype;
    line("const {} {} = {};", memory_type(dtype), id(name), text);
  }

  std::string place(const std::string& buffer, Expr offset) const { return fmt::format("{}[{}]", id(buffer), expr(offset)); }

  void statement(const Let& s) {
    scalar_only(s.type.lanes);
    define(s.name, s.type.dtype, apply(s));
  }
  void statement(const Splat& s) {
    scalar_only(s.type.lanes);
    define(s.name, s.type.dtype, id(s.operand));
  }
  void statement(const FirstLanes& s) {
    scalar_only(s.lanes);
    define(s.name, DType::boolean, fmt::format("0 < {}", expr(s.count)));
  }
  void statement(const ReduceLanes& s) { define(s.name, s.dtype, id(s.operand)); }
  void statement(const Extract& s) { define(s.name, s.dtype, id(s.operand)); }
  void statement(const Shuffle& s) {
    scalar_only(s.type.lanes);
    define(s.name, s.type.dtype, id(s.lanes[0] == 0 ? s.a : s.b));
  }
  void statement(const Load& s) {
    scalar_only(s.type.lanes);
    std::string read = s.gather.empty() ? place(s.buffer, s.offset) : fmt::format("{}[{} + {}]", id(s.buffer), expr(s.offset), id(s.gather));
    if (!s.mask.empty()) {
      Scalar zero = is_float(s.type.dtype) ? Scalar::of_float(s.type.dtype, 0) : Scalar::of_int(s.type.dtype, 0);
      read = fmt::format("{} ? {} : {}", id(s.mask), read, s.passthrough.empty() ? literal(zero, s.type.dtype) : id(s.passthrough));
    }
    define(s.name, s.type.dtype, read);
  }
  void statement(const Store& s) {
    std::string target = s.gather.empty() ? place(s.buffer, s.offset) : fmt::format("{}[{} + {}]", id(s.buffer), expr(s.offset), id(s.gather));
    std::string condition = s.mask.empty() ? "" : fmt::format("if ({}) ", id(s.mask));
    if (s.combiner == Combiner::set) {
      line("{}{} = {};", condition, target, id(s.value));
    } else if (s.atomic) {
      DEPLO_SUPPORT(s.combiner == Combiner::sum && buffers_.at(s.buffer) == DType::f32,
                    "kernel {}: only float32 sums combine atomically in CUDA text", kernel_.name);
      line("{}atomicAdd(&{}, {});", condition, target, id(s.value));
    } else {
      std::string_view how = s.combiner == Combiner::sum ? "add" : s.combiner == Combiner::prod ? "mul" : s.combiner == Combiner::min ? "min" : "max";
      line("{}{} = deplo_{}({}, {});", condition, target, how, target, id(s.value));
    }
  }
  void statement(const Var& s) {
    scalar_only(s.type.lanes);
    types_[s.name] = s.type.dtype;
    line("{} {} = {};", memory_type(s.type.dtype), id(s.name), id(s.init));
  }
  void statement(const Assign& s) { line("{} = {};", id(s.name), id(s.value)); }
  void statement(const For& s) {
    if (s.unroll > 1) line("#pragma unroll {}", s.unroll);
    line("for (long long {0} = {1}; {0} < {2}; {0} += {3}) {{", id(s.name), expr(s.lo), expr(s.hi), expr(s.step));
    nested(s.body);
    line("}}");
  }
  void statement(const If& s) {
    line("if ({}) {{", s.guard.empty() ? id(s.condition) : guard(s.guard));
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
    line("{}{} {}[{}];", s.space == Space::shared ? "__shared__ " : "", memory_type(s.dtype), id(s.name), expr(s.count));
  }
  void statement(const Prefetch& /*s*/) {}
  void statement(const Matrix& /*s*/) { throw UnsupportedError(fmt::format("kernel {}: matrix statements are for CPUs", kernel_.name)); }
  void statement(const Barrier& /*s*/) { line("__syncthreads();"); }
  void statement(const SetError& s) { line("if ({}) *error = {};", id(s.condition), static_cast<int>(s.code)); }

  void nested(const Block& body) {
    ++indent_;
    block(body);
    --indent_;
  }
  void block(const Block& body) {
    for (const auto& stmt : body) std::visit([&](const auto& s) { statement(s); }, stmt->node);
  }

  const Kernel& kernel_;
  std::map<std::string, DType> types_;
  std::map<std::string, DType> buffers_;
  std::string text_;
  int indent_ = 0;
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
