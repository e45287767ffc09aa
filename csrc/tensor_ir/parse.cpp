#include "base/error.h"
#include "base/text.h"
#include "tensor_ir/ir.h"

namespace deplo::tensor_ir {
namespace {

std::string parse_value(Lexer& lexer, std::string_view what) {
  Token token = lexer.peek();
  std::string name = lexer.identifier(what);
  if (name.size() < 2 || name[0] != '%') lexer.fail(token, fmt::format("expected {} (a name with %), found '{}'", what, name));
  return name;
}

template <class F>
void parse_items(Lexer& lexer, std::string_view open, std::string_view close, F&& item) {
  lexer.expect(open);
  while (!lexer.at(close)) {
    item();
    if (!lexer.accept(",")) break;
  }
  lexer.expect(close);
}

std::vector<Expr> parse_exprs(Lexer& lexer) {
  std::vector<Expr> items;
  parse_items(lexer, "[", "]", [&] { items.push_back(parse_expr(lexer)); });
  return items;
}

std::vector<std::string> parse_values(Lexer& lexer) {
  std::vector<std::string> names;
  parse_items(lexer, "(", ")", [&] { names.push_back(parse_value(lexer, "an operand")); });
  return names;
}

std::vector<std::string> parse_axes(Lexer& lexer) {
  std::vector<std::string> names;
  parse_items(lexer, "(", ")", [&] { names.push_back(lexer.identifier("an axis")); });
  return names;
}

TensorType parse_type(Lexer& lexer) {
  Token where = lexer.peek();
  auto dtype = parse_dtype(lexer.identifier("a dtype"));
  if (!dtype) lexer.fail(where, fmt::format("'{}' is not a dtype", where.text));
  return {*dtype, parse_exprs(lexer)};
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

std::vector<Cond> parse_optional_guard(Lexer& lexer) { return lexer.accept("if") ? parse_guard(lexer) : std::vector<Cond>{}; }

std::vector<Indirect> parse_indirects(Lexer& lexer) {
  std::vector<Indirect> list;
  if (!lexer.accept("with")) return list;
  do {
    Indirect j;
    j.name = lexer.identifier("a coordinate");
    lexer.expect("=");
    j.tensor = parse_value(lexer, "an index tensor");
    j.index = parse_exprs(lexer);
    lexer.expect("in");
    if (lexer.integer("0") != 0) lexer.fail("the range of a coordinate starts at 0");
    lexer.expect("..");
    j.extent = parse_expr(lexer);
    j.checked = !lexer.accept("unchecked");
    j.asserts = j.checked && lexer.accept("asserted");
    list.push_back(std::move(j));
  } while (lexer.accept(","));
  return list;
}

IndexMap parse_map(Lexer& lexer, DType dtype) {
  IndexMap map;
  map.axes = parse_axes(lexer);
  map.indirects = parse_indirects(lexer);
  lexer.expect("->");
  map.fill = {dtype, 0, 0};
  if (!lexer.at("else")) {
    do {
      Source source;
      source.operand = parse_value(lexer, "a source");
      source.index = parse_exprs(lexer);
      source.guard = parse_optional_guard(lexer);
      map.sources.push_back(std::move(source));
    } while (lexer.accept("|"));
    if (map.sources.back().guard.empty()) return map;
  }
  lexer.expect("else");
  map.fill = parse_literal(lexer, dtype);
  return map;
}

Combiner parse_combiner_name(Lexer& lexer) {
  Token where = lexer.peek();
  auto combiner = parse_combiner(lexer.identifier("a combiner"));
  if (!combiner) lexer.fail(where, fmt::format("'{}' is not a combiner", where.text));
  return *combiner;
}

Reduction parse_reduction(Lexer& lexer) {
  Reduction node;
  node.combiner = parse_combiner_name(lexer);
  node.operands = parse_values(lexer);
  lexer.expect("axes");
  lexer.expect("=");
  parse_items(lexer, "[", "]", [&] { node.axes.push_back(lexer.small_integer("an axis")); });
  return node;
}

Scan parse_scan(Lexer& lexer) {
  Scan node;
  node.combiner = parse_combiner_name(lexer);
  node.operands = parse_values(lexer);
  lexer.expect("axis");
  lexer.expect("=");
  node.axis = lexer.small_integer("an axis");
  return node;
}

Scatter parse_scatter(Lexer& lexer) {
  Scatter node;
  node.combiner = parse_combiner_name(lexer);
  Token where = lexer.peek();
  std::vector<std::string> operands = parse_values(lexer);
  if (operands.size() != 2) lexer.fail(where, "scatter takes (base, updates)");
  node.base = operands[0];
  node.updates = operands[1];
  node.axes = parse_axes(lexer);
  node.indirects = parse_indirects(lexer);
  lexer.expect("->");
  node.index = parse_exprs(lexer);
  node.guard = parse_optional_guard(lexer);
  return node;
}

Library parse_library(Lexer& lexer) {
  Library node;
  node.op = lexer.identifier("an operator");
  parse_items(lexer, "(", ")", [&] {
    std::string name = lexer.identifier("an argument name");
    lexer.expect("=");
    node.arguments.emplace_back(std::move(name), parse_attribute(lexer));
  });
  if (lexer.accept("operands")) {
    do node.operands.push_back(lexer.accept("any") ? std::nullopt : std::optional(parse_exprs(lexer)));
    while (lexer.accept(","));
  }
  if (lexer.accept("strides")) {
    do node.strides.push_back(parse_exprs(lexer));
    while (lexer.accept(","));
  }
  lexer.expect("reason");
  node.reason = lexer.quoted("a reason");
  return node;
}

Elementwise parse_elementwise(Lexer& lexer, DType dtype) {
  Elementwise node;
  Token where = lexer.peek();
  auto fn = parse_fn(lexer.identifier("an op"));
  if (!fn) lexer.fail(where, fmt::format("'{}' is neither a scalar function nor reduce, scan, map, scatter, library", where.text));
  node.fn = *fn;
  if (*fn == Fn::constant) {
    node.literal = parse_literal(lexer, dtype);
  } else if (*fn == Fn::index) {
    node.axes = parse_axes(lexer);
    lexer.expect("->");
    node.index = parse_expr(lexer);
  } else {
    node.operands = parse_values(lexer);
  }
  return node;
}

std::vector<Value> parse_results(Lexer& lexer) {
  std::vector<Value> results;
  do {
    Value value;
    value.name = parse_value(lexer, "a result");
    lexer.expect(":");
    value.type = parse_type(lexer);
    results.push_back(std::move(value));
  } while (lexer.accept(","));
  lexer.expect("=");
  return results;
}

Ref<Op> parse_op(Lexer& lexer) {
  auto op = std::make_shared<Op>();
  Token where = lexer.peek();
  op->location = where.location();
  if (where.text[0] == '%') op->results = parse_results(lexer);
  if (lexer.accept("library")) {
    op->node = parse_library(lexer);
  } else {
    if (op->results.empty()) lexer.fail(where, "only a library op may have no result");
    DType dtype = op->results[0].type.dtype;
    if (lexer.accept("reduce"))
      op->node = parse_reduction(lexer);
    else if (lexer.accept("scan"))
      op->node = parse_scan(lexer);
    else if (lexer.accept("map"))
      op->node = parse_map(lexer, dtype);
    else if (lexer.accept("scatter"))
      op->node = parse_scatter(lexer);
    else
      op->node = parse_elementwise(lexer, dtype);
  }
  if (lexer.accept("from")) op->provenance = lexer.quoted("a provenance");
  return op;
}

Input parse_input(Lexer& lexer) {
  Input input;
  input.location = lexer.peek().location();
  input.name = lexer.identifier("an input");
  lexer.expect(":");
  if (lexer.accept("sym")) {
    input.kind = torch_ir::InputKind::symbol;
    return input;
  }
  const Token where = lexer.peek();
  input.type = parse_type(lexer);
  input.strides = lexer.accept("strides") ? parse_exprs(lexer) : lexer.fitting(where, [&] { return torch_ir::default_strides(input.type.shape); });
  for (auto kind : {torch_ir::InputKind::user, torch_ir::InputKind::parameter, torch_ir::InputKind::buffer, torch_ir::InputKind::constant}) {
    if (!lexer.accept(torch_ir::to_string(kind))) continue;
    input.kind = kind;
    break;
  }
  input.is_static = lexer.accept("static");
  return input;
}

// `where s0 in 2.., s1 in 2..4096`: what follows an open upper bound is the next symbol or the body.
Ranges parse_ranges(Lexer& lexer) {
  Ranges ranges;
  if (!lexer.accept("where")) return ranges;
  do {
    std::string name = lexer.identifier("a symbol");
    lexer.expect("in");
    Range range;
    if (!lexer.at("..")) range.lo = parse_expr(lexer);
    lexer.expect("..");
    const Token& token = lexer.peek();
    bool open = token.text == "," || token.text == "check" || token.text == "write" || token.text == "return" || token.text == "library" ||
                token.text[0] == '%' || token.kind == Token::Kind::end;
    if (!open) range.hi = parse_expr(lexer);
    ranges[name] = range;
  } while (lexer.accept(","));
  return ranges;
}

Output parse_output(Lexer& lexer) {
  Output output;
  output.value = parse_attribute(lexer);
  if (lexer.accept("strides")) output.strides = parse_exprs(lexer);
  return output;
}

}  // namespace

Graph parse(const std::string& text, const std::string& file) {
  Lexer lexer(text, file, false);
  Graph graph;
  lexer.expect("tensor");
  Token where = lexer.peek();
  graph.name = lexer.identifier("the graph's name");
  if (graph.name.size() < 2 || graph.name[0] != '@') lexer.fail(where, fmt::format("expected the graph's name (with @), found '{}'", graph.name));
  graph.name.erase(0, 1);
  parse_items(lexer, "(", ")", [&] { graph.inputs.push_back(parse_input(lexer)); });
  graph.symbols = parse_ranges(lexer);
  while (lexer.at("check")) graph.checks.push_back(parse_size_check(lexer));
  while (!lexer.at("write") && !lexer.at("return")) {
    if (lexer.peek().kind != Token::Kind::identifier) lexer.fail(fmt::format("expected an op, write or return, found '{}'", lexer.peek().text));
    graph.ops.push_back(parse_op(lexer));
  }
  while (lexer.at("write")) {
    torch_ir::Write write;
    write.location = lexer.next().location();
    write.value = parse_value(lexer, "the value to write");
    lexer.expect("to");
    write.input = parse_value(lexer, "the input to write to");
    graph.writes.push_back(std::move(write));
  }
  graph.return_location = lexer.peek().location();
  lexer.expect("return");
  while (!lexer.at_end()) {
    graph.outputs.push_back(parse_output(lexer));
    if (!lexer.accept(",")) break;
  }
  if (!lexer.at_end()) lexer.fail(fmt::format("expected the end after return, found '{}'", lexer.peek().text));
  return graph;
}

}  // namespace deplo::tensor_ir
