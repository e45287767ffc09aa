#include "loop_ir/text.h"

#include <array>

#include "base/error.h"

namespace deplo::loop_ir {
namespace {

constexpr std::array kErrorCodes{std::pair{ErrorCode::index_out_of_range, "index_out_of_range"},
                                 std::pair{ErrorCode::division_by_zero, "division_by_zero"}, std::pair{ErrorCode::assertion, "assertion"}};

std::string print_guard(const std::vector<Cond>& guard) { return guard.empty() ? "" : " if " + deplo::print(guard); }

DType dtype_of(Lexer& lexer, const TypeScope& scope, const Token& where, const std::string& name) {
  auto it = scope.values.find(name);
  if (it == scope.values.end()) lexer.fail(where, fmt::format("unknown value '{}'", name));
  return it->second;
}

DType buffer_dtype(Lexer& lexer, const TypeScope& scope, const Token& where, const std::string& name) {
  auto it = scope.buffers.find(name);
  if (it == scope.buffers.end()) lexer.fail(where, fmt::format("unknown buffer '{}'", name));
  return it->second;
}

// The dtype that a function's result has by itself, if the operands decide it.
std::optional<DType> deduced(const Let& s, const TypeScope& scope) {
  switch (info(s.fn).signature) {
    case Signature::same: return scope.values.at(s.operands.at(0));
    case Signature::predicate: return DType::boolean;
    case Signature::dot: return DType::f32;
    case Signature::select: return scope.values.at(s.operands.at(1));
    case Signature::nullary:
    case Signature::convert: break;
  }
  return std::nullopt;
}

std::vector<std::string> parse_operands(Lexer& lexer, const TypeScope* scope) {
  std::vector<std::string> operands;
  lexer.expect("(");
  while (!lexer.at(")")) {
    Token where = lexer.peek();
    operands.push_back(lexer.identifier("an operand"));
    if (scope) dtype_of(lexer, *scope, where, operands.back());
    if (!lexer.accept(",")) break;
  }
  lexer.expect(")");
  return operands;
}

Load parse_load(Lexer& lexer, TypeScope& scope, std::string name) {
  Load s;
  s.name = std::move(name);
  Token where = lexer.peek();
  s.buffer = lexer.identifier("a buffer");
  s.dtype = buffer_dtype(lexer, scope, where, s.buffer);
  s.index = parse_shape(lexer);
  s.fill = is_float(s.dtype) ? Scalar::of_float(s.dtype, 0) : Scalar::of_int(s.dtype, 0);
  if (lexer.accept("if")) {
    s.guard = parse_guard(lexer);
    lexer.expect("else");
    s.fill = parse_literal(lexer, s.dtype);
  }
  return s;
}

Let parse_let(Lexer& lexer, TypeScope& scope, std::string name, std::optional<DType> dtype) {
  Let s;
  s.name = std::move(name);
  Token where = lexer.peek();
  auto fn = parse_fn(lexer.identifier("a function"));
  if (!fn) lexer.fail(where, fmt::format("unknown function '{}'", where.text));
  s.fn = *fn;
  auto need_dtype = [&] {
    if (!dtype) lexer.fail(where, fmt::format("{} needs the result's dtype: `{}: f32 = {} ...`", where.text, s.name, where.text));
    return *dtype;
  };
  if (s.fn == Fn::constant) {
    s.dtype = need_dtype();
    s.literal = parse_literal(lexer, s.dtype);
    return s;
  }
  if (s.fn == Fn::index) {
    s.dtype = need_dtype();
    s.index = parse_expr(lexer);
    return s;
  }
  s.operands = parse_operands(lexer, &scope);
  if (static_cast<int>(s.operands.size()) != info(s.fn).arity)
    lexer.fail(where, fmt::format("{} takes {} operands, found {}", where.text, info(s.fn).arity, s.operands.size()));
  auto own = deduced(s, scope);
  s.dtype = dtype ? *dtype : own ? *own : need_dtype();
  return s;
}

Store parse_store(Lexer& lexer) {
  Store s;
  s.atomic = lexer.peek(1).kind == Token::Kind::identifier && lexer.accept("atomic");
  if (lexer.peek(1).text != "[") {
    Token where = lexer.peek();
    auto combiner = parse_combiner(lexer.identifier("a combiner"));
    if (!combiner) lexer.fail(where, fmt::format("unknown combiner '{}'", where.text));
    s.combiner = *combiner;
  }
  s.buffer = lexer.identifier("a buffer");
  s.index = parse_shape(lexer);
  lexer.expect("=");
  s.value = lexer.identifier("a value");
  if (lexer.accept("if")) s.guard = parse_guard(lexer);
  return s;
}

Check parse_check(Lexer& lexer) {
  Check s;
  s.cond = parse_cond(lexer);
  lexer.expect("else");
  Token where = lexer.peek();
  std::string word = lexer.identifier("an error code");
  for (const auto& [code, name] : kErrorCodes)
    if (word == name) {
      s.code = code;
      return s;
    }
  lexer.fail(where, fmt::format("unknown error code '{}'", word));
}

}  // namespace

std::string_view to_string(ErrorCode code) {
  for (const auto& [value, name] : kErrorCodes)
    if (value == code) return name;
  return "none";
}

std::string print(const Let& s) {
  if (s.fn == Fn::constant) return fmt::format("{}: {} = constant {}", s.name, to_string(s.dtype), print_literal(s.literal));
  if (s.fn == Fn::index) return fmt::format("{}: {} = index {}", s.name, to_string(s.dtype), deplo::print(s.index));
  std::string dtype = info(s.fn).signature == Signature::convert ? fmt::format(": {}", to_string(s.dtype)) : "";
  return fmt::format("{}{} = {}({})", s.name, dtype, to_string(s.fn), joined(s.operands));
}

std::string print(const Load& s) {
  std::string guard = s.guard.empty() ? "" : print_guard(s.guard) + " else " + print_literal(s.fill);
  return fmt::format("{} = load {}{}{}", s.name, s.buffer, print_shape(s.index), guard);
}

std::string print(const Store& s) {
  std::string combiner = s.combiner == Combiner::set ? "" : fmt::format("{} ", to_string(s.combiner));
  return fmt::format("store {}{}{}{} = {}{}", s.atomic ? "atomic " : "", combiner, s.buffer, print_shape(s.index), s.value, print_guard(s.guard));
}

std::string print(const Check& s) { return fmt::format("check {} else {}", deplo::print(s.cond), to_string(s.code)); }

std::string print(const Param& p) {
  std::string kind = p.kind == ParamKind::in ? "" : p.kind == ParamKind::out ? "out " : "inout ";
  return fmt::format("{}{}: {}{}", kind, p.name, print_type(p.dtype, p.shape, p.strides), p.is_static ? " static" : "");
}

std::string print_params(const std::vector<Param>& params) {
  std::vector<std::string> parts;
  for (const Param& p : params) parts.push_back(print(p));
  return "(" + joined(parts) + ")";
}

std::string print_combination(const std::vector<std::string>& results, const std::vector<DType>& dtypes, Combiner combiner,
                              const std::vector<std::string>& operands) {
  std::vector<std::string> parts;
  for (size_t k = 0; k < results.size(); ++k) parts.push_back(fmt::format("{}: {}", results[k], to_string(dtypes[k])));
  return fmt::format("{} = {}({})", joined(parts), to_string(combiner), joined(operands));
}

std::vector<Param> parse_params(Lexer& lexer, TypeScope& scope) {
  std::vector<Param> params;
  lexer.expect("(");
  while (!lexer.at(")")) {
    Param p;
    p.location = lexer.peek().location();
    bool named = lexer.peek(1).text == ":";
    if (!named && lexer.accept("out"))
      p.kind = ParamKind::out;
    else if (!named && lexer.accept("inout"))
      p.kind = ParamKind::inout;
    p.name = lexer.identifier("a parameter");
    lexer.expect(":");
    TypeText type = parse_type(lexer);
    p.dtype = type.dtype;
    p.shape = type.shape;
    p.strides = type.strides;
    p.is_static = lexer.accept("static");
    scope.buffers[p.name] = p.dtype;
    params.push_back(std::move(p));
    if (!lexer.accept(",")) break;
  }
  lexer.expect(")");
  return params;
}

Combination parse_combination(Lexer& lexer, TypeScope& scope) {
  Combination c;
  do {
    c.results.push_back(lexer.identifier("a result"));
    lexer.expect(":");
    c.dtypes.push_back(parse_dtype(lexer));
    scope.values[c.results.back()] = c.dtypes.back();
  } while (lexer.accept(","));
  lexer.expect("=");
  Token where = lexer.peek();
  auto combiner = parse_combiner(lexer.identifier("a combiner"));
  if (!combiner) lexer.fail(where, fmt::format("unknown combiner '{}'", where.text));
  c.combiner = *combiner;
  c.operands = parse_operands(lexer, nullptr);  // defined in the body, which follows
  return c;
}

std::variant<Let, Load, Store, Check> parse_simple(Lexer& lexer, TypeScope& scope) {
  if (lexer.peek().kind != Token::Kind::identifier) lexer.fail(fmt::format("expected a statement, found '{}'", lexer.peek().text));
  bool defines = lexer.peek(1).text == "=" || lexer.peek(1).text == ":";
  if (!defines && lexer.accept("store")) return parse_store(lexer);
  if (!defines && lexer.accept("check")) return parse_check(lexer);
  if (!defines) lexer.fail(fmt::format("expected a statement, found '{}'", lexer.peek().text));
  std::string name = lexer.identifier("a value");
  std::optional<DType> dtype;
  if (lexer.accept(":")) dtype = parse_dtype(lexer);
  lexer.expect("=");
  if (lexer.accept("load")) {
    Load s = parse_load(lexer, scope, name);
    scope.values[name] = s.dtype;
    return s;
  }
  Let s = parse_let(lexer, scope, name, dtype);
  scope.values[name] = s.dtype;
  return s;
}

}  // namespace deplo::loop_ir
