#include "base/error.h"
#include "base/text.h"
#include "torch_ir/ir.h"

namespace deplo::torch_ir {
namespace {

std::string parse_value(Lexer& lexer, std::string_view what) {
  Token token = lexer.peek();
  std::string name = lexer.identifier(what);
  if (name.size() < 2 || name[0] != '%') lexer.fail(token, fmt::format("expected {} (a name with %), found '{}'", what, name));
  return name;
}

std::vector<Expr> parse_exprs(Lexer& lexer) {
  std::vector<Expr> items;
  lexer.expect("[");
  while (!lexer.at("]")) {
    items.push_back(parse_expr(lexer));
    if (!lexer.accept(",")) break;
  }
  lexer.expect("]");
  return items;
}

TensorType parse_type(Lexer& lexer) {
  Token where = lexer.peek();
  auto dtype = parse_dtype(lexer.identifier("a dtype"));
  if (!dtype) lexer.fail(where, fmt::format("'{}' is not a dtype", where.text));
  TensorType type{*dtype, parse_exprs(lexer), {}};
  Token strides = lexer.peek();
  type.strides = lexer.accept("strides") ? parse_exprs(lexer) : lexer.fitting(where, [&] { return default_strides(type.shape); });
  if (type.strides.size() != type.shape.size())
    lexer.fail(strides, fmt::format("{} strides for {} dimensions", type.strides.size(), type.shape.size()));
  return type;
}

Input parse_input(Lexer& lexer) {
  Input input;
  Token where = lexer.peek();
  input.location = where.location();
  input.name = lexer.identifier("an input");
  lexer.expect(":");
  bool is_value = input.name[0] == '%';
  if (lexer.at("sym") == is_value)
    lexer.fail(where, fmt::format("'{}': a tensor input has a % and a type, a symbol has no % and the type sym", input.name));
  if (lexer.accept("sym")) {
    input.kind = InputKind::symbol;
    return input;
  }
  input.type = parse_type(lexer);
  for (InputKind kind : {InputKind::user, InputKind::parameter, InputKind::buffer, InputKind::constant}) {
    if (!lexer.accept(to_string(kind))) continue;
    input.kind = kind;
    break;
  }
  input.is_static = lexer.accept("static");
  return input;
}

// `where s0 in 2.., s1 in 2..4096, s0 // 2 == s1`: what follows an open upper bound is the next symbol, a fact or the body.
void parse_where(Lexer& lexer, Graph& graph) {
  graph.where_location = lexer.peek().location();
  if (!lexer.accept("where")) return;
  do {
    Token where = lexer.peek();
    if (lexer.peek(1).text != "in") {
      graph.facts.push_back(parse_cond(lexer));
      continue;
    }
    std::string name = lexer.identifier("a symbol");
    lexer.expect("in");
    Range range;
    if (!lexer.at("..")) range.lo = parse_expr(lexer);
    lexer.expect("..");
    const Token& token = lexer.peek();
    bool open = token.text == "," || token.text == "check" || token.text == "write" || token.text == "return" || token.text[0] == '%' ||
                token.kind == Token::Kind::end || token.text.find('.') != std::string::npos;
    if (!open) range.hi = parse_expr(lexer);
    if (!graph.symbols.emplace(name, range).second) lexer.fail(where, fmt::format("symbol {} has two ranges", name));
  } while (lexer.accept(","));
}

std::vector<Result> parse_results(Lexer& lexer) {
  std::vector<Result> results;
  do {
    Result result;
    result.name = parse_value(lexer, "a result");
    lexer.expect(":");
    if (!lexer.accept("none")) result.type = parse_type(lexer);
    results.push_back(std::move(result));
  } while (lexer.accept(","));
  lexer.expect("=");
  return results;
}

Ref<Node> parse_node(Lexer& lexer) {
  auto node = std::make_shared<Node>();
  node->location = lexer.peek().location();
  if (lexer.peek().text[0] == '%') node->results = parse_results(lexer);
  node->op = lexer.identifier("an operator");
  lexer.expect("(");
  while (!lexer.at(")")) {
    std::string name = lexer.identifier("an argument name");
    lexer.expect("=");
    node->arguments.emplace_back(std::move(name), parse_attribute(lexer));
    if (!lexer.accept(",")) break;
  }
  lexer.expect(")");
  if (lexer.accept("at")) node->source = lexer.quoted("a source line");
  if (lexer.accept("in")) node->module = lexer.quoted("a module path");
  return node;
}

}  // namespace

Graph parse(const std::string& text, const std::string& file) {
  Lexer lexer(text, file, false);
  Graph graph;
  lexer.expect("torch");
  Token where = lexer.peek();
  graph.name = lexer.identifier("the graph's name");
  if (graph.name.size() < 2 || graph.name[0] != '@') lexer.fail(where, fmt::format("expected the graph's name (with @), found '{}'", graph.name));
  graph.name.erase(0, 1);
  lexer.expect("(");
  while (!lexer.at(")")) {
    graph.inputs.push_back(parse_input(lexer));
    if (!lexer.accept(",")) break;
  }
  lexer.expect(")");
  parse_where(lexer, graph);
  while (lexer.at("check")) graph.checks.push_back(parse_size_check(lexer));
  while (!lexer.at("write") && !lexer.at("return")) {
    if (lexer.peek().kind != Token::Kind::identifier) lexer.fail(fmt::format("expected a node, write or return, found '{}'", lexer.peek().text));
    graph.nodes.push_back(parse_node(lexer));
  }
  while (lexer.at("write")) {
    Write write;
    write.location = lexer.next().location();
    write.value = parse_value(lexer, "the value to write");
    lexer.expect("to");
    write.input = parse_value(lexer, "the input to write to");
    graph.writes.push_back(std::move(write));
  }
  graph.return_location = lexer.peek().location();
  lexer.expect("return");
  while (!lexer.at_end()) {
    graph.outputs.push_back(parse_attribute(lexer));
    if (!lexer.accept(",")) break;
  }
  if (!lexer.at_end()) lexer.fail(fmt::format("expected the end after return, found '{}'", lexer.peek().text));
  return graph;
}

}  // namespace deplo::torch_ir
