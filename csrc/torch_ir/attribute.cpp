#include "torch_ir/attribute.h"

#include <algorithm>
#include <string_view>

#include "base/error.h"
#include "base/ref.h"
#include "base/text.h"

namespace deplo {
namespace {

// Closed, so that every other bare name is a symbol of an integer expression.
constexpr std::string_view kWords[] = {
    "strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr",    "sparse_bsc",      "_mkldnn",           "jagged",          "cpu", "cuda",
    "meta",    "mps",        "xpu",        "hpu",        "channels_last", "preserve_format", "contiguous_format", "channels_last_3d"};

bool at_float(const Lexer& lexer) {
  int ahead = lexer.at("-") ? 1 : 0;
  const Token& token = lexer.peek(ahead);
  return token.kind == Token::Kind::floating || token.text == "inf" || token.text == "nan";
}

// A lone negative literal may be INT64_MIN, whose magnitude no expression holds.
bool at_lone_negative(const Lexer& lexer) {
  if (!lexer.at("-") || lexer.peek(1).kind != Token::Kind::integer) return false;
  const std::string& after = lexer.peek(2).text;
  return after == "," || after == "]" || after == ")";
}

Attribute parse_list(Lexer& lexer) {
  std::vector<Attribute> items;
  lexer.expect("[");
  while (!lexer.at("]")) {
    items.push_back(parse_attribute(lexer));
    if (!lexer.accept(",")) break;
  }
  lexer.expect("]");
  return {std::move(items)};
}

}  // namespace

bool Attribute::operator==(const Attribute& other) const {
  const auto* a = std::get_if<double>(&value);
  const auto* b = std::get_if<double>(&other.value);
  return a && b ? same_float(*a, *b) : value == other.value;
}

bool is_word(const std::string& text) { return std::find(std::begin(kWords), std::end(kWords), text) != std::end(kWords); }

std::string print(const Attribute& attribute) {
  return std::visit(Overloaded{[](const None&) -> std::string { return "none"; }, [](const ValueName& v) { return v.name; },
                               [](bool v) -> std::string { return v ? "true" : "false"; }, [](const Expr& v) { return print(v); },
                               [](double v) { return print_float(v); }, [](DType v) { return std::string(to_string(v)); },
                               [](const std::string& v) { return quote(v); }, [](const Word& v) { return v.text; },
                               [](const std::vector<Attribute>& list) {
                                 std::string text = "[";
                                 for (const Attribute& item : list) text += (text.size() > 1 ? ", " : "") + print(item);
                                 return text + "]";
                               }},
                    attribute.value);
}

Attribute parse_attribute(Lexer& lexer) {
  const Token& token = lexer.peek();
  if (token.kind == Token::Kind::string) return {lexer.quoted("an attribute")};
  if (lexer.at("[")) return parse_list(lexer);
  if (at_float(lexer)) return {lexer.number("an attribute")};
  if (at_lone_negative(lexer)) return {Expr(lexer.integer("an attribute"))};
  if (token.kind == Token::Kind::identifier && lexer.peek(1).text != "(") {
    if (token.text.size() > 1 && token.text[0] == '%') return {ValueName{lexer.next().text}};
    if (lexer.accept("none")) return {None{}};
    if (lexer.accept("true")) return {true};
    if (lexer.accept("false")) return {false};
    if (auto dtype = parse_dtype(token.text)) return lexer.next(), Attribute{*dtype};
    if (is_word(token.text)) return {Word{lexer.next().text}};
  }
  return {parse_expr(lexer)};
}

}  // namespace deplo
