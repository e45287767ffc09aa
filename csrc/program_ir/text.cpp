#include "program_ir/text.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <set>

#include "base/error.h"
#include "expr/check.h"
#include "program_ir/facts.h"
#include "program_ir/names.h"

namespace deplo {
namespace {

using torch_ir::InputKind;

constexpr std::array kInputKinds{std::pair{InputKind::user, "user"}, std::pair{InputKind::parameter, "parameter"},
                                 std::pair{InputKind::buffer, "buffer"}, std::pair{InputKind::constant, "constant"}};
constexpr std::array kBufferKinds{std::pair{BufferKind::temp, ""}, std::pair{BufferKind::output, "output"}, std::pair{BufferKind::packed, "packed"}};

std::string print_arguments(const LibraryStep& step) {
  std::vector<std::string> parts;
  for (const auto& [name, value] : step.arguments) parts.push_back(name + "=" + print(value));
  return joined(parts);
}

std::string print(const Step& step) {
  return std::visit(
      Overloaded{[](const CallStep& s) {
                   std::string when = s.when.empty() ? "" : " when " + print(s.when);
                   return fmt::format("{}call @{}({}){}", s.once ? "once " : s.is_alternative ? "or " : "", s.kernel, joined(s.arguments), when);
                 },
                 [](const LibraryStep& s) {
                   std::string results = s.results.empty() ? "" : " -> " + joined(s.results);
                   return fmt::format("library {}({}){} reason {}", s.op, print_arguments(s), results, quote(s.reason));
                 }},
      step);
}

std::string print_input(const ProgramBody& program, const std::string& name) {
  const Buffer* b = program.find_buffer(name);
  if (!b) return name + ": sym";
  std::string kind;
  for (const auto& [value, word] : kInputKinds)
    if (value == b->input_kind) kind = word;
  return fmt::format("{}: {} {}{}", name, print_type(b->dtype, b->shape, b->strides), kind, b->is_static ? " static" : "");
}

std::string sigil_name(Lexer& lexer, const char* what) {
  std::string name = lexer.identifier(what);
  if (name.size() < 2 || name[0] != '@') lexer.fail(fmt::format("expected {} like @name, found '{}'", what, name));
  return name.substr(1);
}

std::vector<std::string> parse_names(Lexer& lexer, const char* what) {
  std::vector<std::string> names;
  do names.push_back(lexer.identifier(what));
  while (lexer.accept(","));
  return names;
}

// A bare word in text is a buffer if one has that name.
void resolve_buffers(Attribute& attribute, const ProgramBody& program) {
  if (auto* list = std::get_if<std::vector<Attribute>>(&attribute.value)) {
    for (Attribute& item : *list) resolve_buffers(item, program);
    return;
  }
  std::string name;
  if (const auto* word = std::get_if<Word>(&attribute.value)) name = word->text;
  if (const auto* e = std::get_if<Expr>(&attribute.value); e && e->is_symbol()) name = e->name();
  if (!name.empty() && program.find_buffer(name)) attribute.value = ValueName{name};
}

void parse_input(Lexer& lexer, ProgramBody& program) {
  Location location = lexer.peek().location();
  std::string name = lexer.identifier("an input");
  lexer.expect(":");
  program.input_order.push_back(name);
  if (lexer.accept("sym")) {
    program.symbol_inputs.push_back(name);
    return;
  }
  TypeText type = parse_type(lexer);
  Buffer b{name, type.dtype, type.shape, type.strides, BufferKind::input, InputKind::user, false, location};
  for (const auto& [value, word] : kInputKinds)
    if (lexer.accept(word)) {
      b.input_kind = value;
      break;
    }
  b.is_static = lexer.accept("static");
  program.buffers.push_back(std::move(b));
}

Buffer parse_buffer(Lexer& lexer) {
  Location location = lexer.peek().location();
  std::string name = lexer.identifier("a buffer");
  lexer.expect(":");
  TypeText type = parse_type(lexer);
  Buffer b{name, type.dtype, type.shape, type.strides, BufferKind::temp, InputKind::user, false, location};
  for (const auto& [value, word] : kBufferKinds)
    if (*word && lexer.accept(word)) b.kind = value;
  return b;
}

CallStep parse_call(Lexer& lexer) {
  CallStep step;
  step.location = lexer.peek().location();
  step.once = lexer.accept("once");
  step.is_alternative = !step.once && lexer.accept("or");
  lexer.expect("call");
  step.kernel = sigil_name(lexer, "a kernel");
  lexer.expect("(");
  if (!lexer.at(")")) step.arguments = parse_names(lexer, "a buffer");
  lexer.expect(")");
  if (!step.once && lexer.accept("when")) step.when = parse_guard(lexer);
  return step;
}

LibraryStep parse_library(Lexer& lexer, const ProgramBody& program) {
  LibraryStep step;
  step.location = lexer.peek().location();
  step.op = lexer.identifier("an ATen overload");
  lexer.expect("(");
  while (!lexer.at(")")) {
    std::string name = lexer.identifier("an argument name");
    lexer.expect("=");
    Attribute value = parse_attribute(lexer);
    resolve_buffers(value, program);
    step.arguments.emplace_back(std::move(name), std::move(value));
    if (!lexer.accept(",")) break;
  }
  lexer.expect(")");
  if (lexer.accept("->")) step.results = parse_names(lexer, "a result buffer");
  lexer.expect("reason");
  step.reason = lexer.quoted("the reason");
  return step;
}

}  // namespace

std::string buffer_stem(std::string_view value) {
  std::string stem;
  for (const char c : value)
    if (std::isalnum(static_cast<unsigned char>(c)) || c == '_') stem += c;
  return stem.empty() || !std::isalpha(static_cast<unsigned char>(stem[0])) ? "t" + stem : stem;
}

std::vector<Expr> contiguous_strides(const std::vector<Expr>& shape) {
  std::vector<Expr> strides(shape.size());
  Expr stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    if (!shape[d].is(0)) stride = stride * shape[d];
  }
  return strides;
}

std::vector<bool> taken_steps(const ProgramBody& program, const std::map<std::string, int64_t>& symbols) {
  std::vector<bool> taken;
  bool done = false;  // one of the alternatives so far was taken
  for (const Step& step : program.steps) {
    const auto* call = std::get_if<CallStep>(&step);
    if (!call || !call->is_alternative) done = false;
    bool holds = !call || std::all_of(call->when.begin(), call->when.end(), [&](const Cond& c) { return evaluate(c, symbols); });
    taken.push_back(holds && !done);
    done = done || holds;
  }
  return taken;
}

std::vector<bool> possible_steps(const ProgramBody& program, const std::map<std::string, int64_t>& known) {
  auto tells = [&](const Cond& c) {
    const auto symbols = symbols_of(c.expr);
    return std::all_of(symbols.begin(), symbols.end(), [&](const auto& s) { return known.count(s) > 0; });
  };
  std::vector<bool> possible;
  bool done = false;  // one of the alternatives so far is sure to be taken, unless one before it is
  for (const Step& step : program.steps) {
    const auto* call = std::get_if<CallStep>(&step);
    if (!call || !call->is_alternative) done = false;
    const bool fails = call && std::any_of(call->when.begin(), call->when.end(), [&](const Cond& c) { return tells(c) && !evaluate(c, known); });
    possible.push_back(!fails && !done);
    const bool is_sure = !call || std::all_of(call->when.begin(), call->when.end(), [&](const Cond& c) { return tells(c) && evaluate(c, known); });
    done = done || is_sure;
  }
  return possible;
}

std::string print_ranges(const Ranges& ranges) {
  std::string text;
  for (const auto& [name, range] : ranges)
    text += fmt::format("{}{} in {}..{}", text.empty() ? " where " : ", ", name, range.lo ? print(*range.lo) : "", range.hi ? print(*range.hi) : "");
  return text;
}

Ranges parse_ranges(Lexer& lexer) {
  Ranges ranges;
  if (!lexer.accept("where")) return ranges;
  do {
    std::string name = lexer.identifier("a symbol");
    lexer.expect("in");
    Range range;
    if (!lexer.at("..")) range.lo = parse_expr(lexer);
    lexer.expect("..");
    Token::Kind next = lexer.peek().kind;
    if (next == Token::Kind::integer || lexer.at("-") || lexer.at("(") ||
        (next == Token::Kind::identifier && !lexer.at("from") && !lexer.at("chunks") && !lexer.at("symbols")))
      range.hi = parse_expr(lexer);
    ranges[name] = range;
  } while (lexer.accept(","));
  return ranges;
}

std::string print_shape(const std::vector<Expr>& shape) {
  std::vector<std::string> parts;
  for (const Expr& e : shape) parts.push_back(print(e));
  return "[" + joined(parts) + "]";
}

std::vector<Expr> parse_shape(Lexer& lexer) {
  std::vector<Expr> shape;
  lexer.expect("[");
  while (!lexer.at("]")) {
    shape.push_back(parse_expr(lexer));
    if (!lexer.accept(",")) break;
  }
  lexer.expect("]");
  return shape;
}

std::string print_type(DType dtype, const std::vector<Expr>& shape, const std::vector<Expr>& strides) {
  std::string text = fmt::format("{}{}", to_string(dtype), print_shape(shape));
  if (strides != contiguous_strides(shape)) text += " strides " + print_shape(strides);
  return text;
}

DType parse_dtype(Lexer& lexer) {
  Token where = lexer.peek();
  auto dtype = parse_dtype(std::string_view(lexer.identifier("a dtype")));
  if (!dtype) lexer.fail(where, fmt::format("unknown dtype '{}'", where.text));
  return *dtype;
}

TypeText parse_type(Lexer& lexer) {
  TypeText type;
  const Token start = lexer.peek();
  type.dtype = parse_dtype(lexer);
  type.shape = parse_shape(lexer);
  type.strides = lexer.fitting(start, [&] { return contiguous_strides(type.shape); });
  Token where = lexer.peek();
  if (lexer.accept("strides")) type.strides = parse_shape(lexer);
  if (type.strides.size() != type.shape.size())
    lexer.fail(where, fmt::format("{} strides for {} dimensions", type.strides.size(), type.shape.size()));
  return type;
}

std::string print_literal(const Scalar& literal) {
  if (is_float(literal.dtype)) return print_float(literal.f);
  if (literal.dtype == DType::boolean) return literal.i ? "true" : "false";
  return std::to_string(literal.i);
}

Scalar parse_literal(Lexer& lexer, DType dtype) {
  if (is_float(dtype)) return Scalar::of_float(dtype, lexer.number("a literal"));
  if (dtype == DType::boolean) {
    if (lexer.accept("true")) return Scalar::of_int(dtype, 1);
    lexer.expect("false");
    return Scalar::of_int(dtype, 0);
  }
  return Scalar::of_int(dtype, lexer.integer("a literal"));
}

std::string print_provenance(const std::vector<std::string>& provenance) {
  std::string text;
  for (const std::string& name : provenance) text += (text.empty() ? " from " : ", ") + quote(name);
  return text;
}

std::vector<std::string> parse_provenance(Lexer& lexer) {
  std::vector<std::string> provenance;
  if (!lexer.accept("from")) return provenance;
  do provenance.push_back(lexer.quoted("a name"));
  while (lexer.accept(","));
  return provenance;
}

std::string print(const ProgramBody& program) {
  if (program.name.empty() && program.buffers.empty() && program.steps.empty()) return "";
  std::vector<std::string> inputs;
  for (const std::string& name : program.input_order) inputs.push_back(print_input(program, name));
  std::string text = fmt::format("program @{}({}){}\n", program.name, joined(inputs), print_ranges(program.symbols));
  for (const SizeCheck& check : program.checks) text += "  " + print(check) + "\n";
  for (const Fact& fact : program.facts) text += fmt::format("  fact {} = all {} in {}..{}\n", fact.symbol, fact.buffer, fact.lo, fact.hi);
  for (const Buffer& b : program.buffers) {
    if (b.kind == BufferKind::input) continue;
    text += fmt::format("  buffer {}: {}", b.name, print_type(b.dtype, b.shape, b.strides));
    for (const auto& [value, word] : kBufferKinds)
      if (*word && value == b.kind) text += fmt::format(" {}", word);
    text += '\n';
  }
  for (const Step& step : program.steps) text += "  " + print(step) + "\n";
  std::vector<std::string> outputs;
  for (const Attribute& output : program.outputs) outputs.push_back(print(output));
  return text + (outputs.empty() ? "  return" : "  return " + joined(outputs)) + "\n";
}

static Fact parse_fact(Lexer& lexer) {
  Fact fact;
  fact.symbol = lexer.identifier("a symbol");
  lexer.expect("=");
  lexer.expect("all");
  fact.buffer = lexer.identifier("a buffer");
  lexer.expect("in");
  fact.lo = lexer.integer("the least element");
  lexer.expect("..");
  fact.hi = lexer.integer("the largest element");
  return fact;
}

ProgramBody parse_program(Lexer& lexer) {
  ProgramBody program;
  lexer.expect("program");
  program.name = sigil_name(lexer, "a program");
  lexer.expect("(");
  while (!lexer.at(")")) {
    parse_input(lexer, program);
    if (!lexer.accept(",")) break;
  }
  lexer.expect(")");
  program.symbols = parse_ranges(lexer);
  lexer.expect("end of line");
  lexer.expect("indent");
  while (!lexer.at("return")) {
    if (lexer.at("check")) {
      program.checks.push_back(parse_size_check(lexer));
    } else if (lexer.accept("fact")) {
      program.facts.push_back(parse_fact(lexer));
    } else if (lexer.accept("buffer")) {
      program.buffers.push_back(parse_buffer(lexer));
    } else if (lexer.at("once") || lexer.at("or") || lexer.at("call")) {
      program.steps.emplace_back(parse_call(lexer));
    } else if (lexer.accept("library")) {
      program.steps.emplace_back(parse_library(lexer, program));
    } else {
      lexer.fail(fmt::format("expected check, fact, buffer, call, once, or, library or return, found '{}'", lexer.peek().text));
    }
    lexer.expect("end of line");
  }
  program.return_location = lexer.peek().location();
  lexer.expect("return");
  while (!lexer.at("end of line")) {
    Attribute output = parse_attribute(lexer);
    resolve_buffers(output, program);
    program.outputs.push_back(std::move(output));
    if (!lexer.accept(",")) break;
  }
  lexer.expect("end of line");
  lexer.expect("dedent");
  return program;
}

namespace {

void collect_buffers(const Attribute& attribute, std::vector<std::string>& names) {
  if (const auto* list = std::get_if<std::vector<Attribute>>(&attribute.value))
    for (const Attribute& item : *list) collect_buffers(item, names);
  if (const auto* value = std::get_if<ValueName>(&attribute.value)) names.push_back(value->name);
}

// Which buffers hold a value so far, step by step.
struct ProgramVerifier {
  const ProgramBody& program;
  const FindParams& find_params;
  std::set<std::string> defined;
  bool open = false;  ///< the step before has conditions: an alternative must follow
  std::set<std::string> alternative_writes;
  const BufferIndex buffers = BufferIndex(program);

  const Buffer& buffer(const std::string& name, const std::string& where) const {
    const Buffer* b = buffers.find(name);
    DEPLO_ASSERT(b, "program @{}: {} names the undefined buffer {}", program.name, where, name);
    return *b;
  }

  void read(const std::string& name, const std::string& where) const {
    const Buffer& b = buffer(name, where);
    // Nothing writes a buffer of no elements, and nothing reads one.
    if (std::any_of(b.shape.begin(), b.shape.end(), [](const Expr& size) { return size.is(0); })) return;
    DEPLO_ASSERT(defined.count(name), "program @{}: {} reads {} before anything wrote it", program.name, where, name);
  }

  void check(const Buffer& b) const {
    DEPLO_ASSERT(b.shape.size() == b.strides.size(), "program @{}: buffer {} has {} sizes and {} strides", program.name, b.name, b.shape.size(),
                 b.strides.size());
    for (const auto& [sizes, what] : {std::pair{&b.shape, "size"}, std::pair{&b.strides, "stride"}})
      for (const Expr& size : *sizes) {
        for (const std::string& symbol : symbols_of(size))
          DEPLO_ASSERT(program.symbols.count(symbol), "program @{}: buffer {} uses the symbol {}, which has no range", program.name, b.name, symbol);
        check_divisors(size, program.symbols);
        DEPLO_ASSERT(decide(less(size, 0), program.symbols) != std::optional<bool>(true), "program @{}: buffer {} has the {} {}", program.name,
                     b.name, what, print(size));
      }
    bytes_of(b.dtype, b.shape);
    bytes_of(b.dtype, b.shape, b.strides);
  }

  void check(const CallStep& step) {
    std::string where = "call @" + step.kernel;
    auto params = find_params(step.kernel);
    DEPLO_ASSERT(params, "program @{}: {} names no kernel", program.name, where);
    DEPLO_ASSERT(params->size() == step.arguments.size(), "program @{}: {} has {} arguments for {} parameters", program.name, where,
                 step.arguments.size(), params->size());
    for (size_t i = 0; i < params->size(); ++i) {
      const Buffer& b = buffer(step.arguments[i], where);
      DEPLO_ASSERT(b.dtype == (*params)[i].dtype, "program @{}: {} binds {} {} to a parameter of dtype {}", program.name, where, to_string(b.dtype),
                   b.name, to_string((*params)[i].dtype));
      DEPLO_ASSERT(!(*params)[i].shape || (*params)[i].shape == b.shape, "program @{}: {} binds {} of shape {} to a parameter of shape {}",
                   program.name, where, b.name, print_shape(b.shape), print_shape(*(*params)[i].shape));
      if (!(*params)[i].writes) read(b.name, where);
      if (step.once && (*params)[i].writes)
        DEPLO_ASSERT(b.kind == BufferKind::packed, "program @{}: once {} writes {}, which is not packed", program.name, where, b.name);
      if (step.once && !(*params)[i].writes)
        DEPLO_ASSERT(b.kind == BufferKind::packed || (b.kind == BufferKind::input && b.is_static),
                     "program @{}: once {} reads {}, which is not static", program.name, where, b.name);
    }
    std::set<std::string> written;
    for (size_t i = 0; i < params->size(); ++i)
      if ((*params)[i].writes) written.insert(step.arguments[i]);
    for (const std::string& name : written)  // no two buffers of a kernel overlap
      DEPLO_ASSERT(std::count(step.arguments.begin(), step.arguments.end(), name) == 1, "program @{}: {} writes {}, which it is given twice",
                   program.name, where, name);
    check_alternatives(step, written, where);
    // What alternatives write holds a value after the last of them.
    if (step.when.empty()) defined.insert(written.begin(), written.end());
  }

  void check_alternatives(const CallStep& step, const std::set<std::string>& written, const std::string& where) {
    for (const Cond& c : step.when)
      for (const std::string& symbol : symbols_of(c.expr))
        DEPLO_ASSERT(program.symbols.count(symbol), "program @{}: {} asks for the symbol {}, which has no range", program.name, where, symbol);
    DEPLO_ASSERT(step.is_alternative == open, "program @{}: {}", program.name,
                 open ? where + " follows a call with `when`, so that it must be an alternative: or call"
                      : where + " is an alternative of no call: the one before has no `when`");
    DEPLO_ASSERT(!open || written == alternative_writes, "program @{}: {} writes other buffers than the calls whose alternative it is", program.name,
                 where);
    open = !step.when.empty();
    alternative_writes = written;
  }

  void check(const LibraryStep& step) {
    DEPLO_ASSERT(!open, "program @{}: {} follows a call with `when`, which needs an alternative first", program.name, step.op);
    std::vector<std::string> names;
    for (const auto& [key, value] : step.arguments) collect_buffers(value, names);
    for (const std::string& name : names) read(name, step.op);
    for (const std::string& name : step.results) {
      buffer(name, step.op);
      defined.insert(name);
    }
  }
};

}  // namespace

std::string add_fact(ProgramBody& program, const std::string& buffer, int64_t lo, int64_t hi) {
  for (const Fact& fact : program.facts)
    if (fact.buffer == buffer && fact.lo == lo && fact.hi == hi) return fact.symbol;
  std::string name;
  for (size_t n = program.facts.size(); name.empty() || program.symbols.count(name) > 0 || program.find_buffer(name); ++n)
    name = "fits" + std::to_string(n);
  program.facts.push_back({name, buffer, lo, hi});
  program.symbols[name] = {Expr(0), Expr(1)};
  return name;
}

void verify(const ProgramBody& program, const FindParams& find_params) {
  ProgramVerifier verifier{program, find_params, {}, false, {}};
  for (const SizeCheck& check : program.checks) verify(check, program.symbols);
  for (const Fact& fact : program.facts) {
    const Buffer* b = program.find_buffer(fact.buffer);
    DEPLO_ASSERT(b && b->kind == BufferKind::input && b->is_static && !is_float(b->dtype) && b->dtype != DType::boolean,
                 "program @{}: the fact {} is about {}, which is no static input of integers", program.name, fact.symbol, fact.buffer);
    DEPLO_ASSERT(program.symbols.count(fact.symbol), "program @{}: the fact {} has no range", program.name, fact.symbol);
  }
  std::set<std::string> names;
  for (const Buffer& b : program.buffers) {
    located(b.location, [&] {
      DEPLO_ASSERT(names.insert(b.name).second, "program @{}: buffer {} is declared twice", program.name, b.name);
      verifier.check(b);
    });
    if (b.kind == BufferKind::input) verifier.defined.insert(b.name);
  }
  for (const Step& step : program.steps) std::visit([&](const auto& s) { located(s.location, [&] { verifier.check(s); }); }, step);
  located(program.return_location, [&] { DEPLO_ASSERT(!verifier.open, "program @{}: its last call has a `when` and no alternative", program.name); });
  for (const Attribute& output : program.outputs)
    if (const auto* value = std::get_if<ValueName>(&output.value)) located(program.return_location, [&] { verifier.read(value->name, "return"); });
}

}  // namespace deplo
