#include "base/text.h"

#include <cctype>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "base/error.h"

namespace deplo {
namespace {

bool starts_name(char c) { return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '%' || c == '@' || c == '$'; }
bool continues_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.'; }

/// Parsers and passes recurse into what brackets and blocks hold.
constexpr int kMaxDepth = 200;

/// What no text has; a message that quoted a NUL would end there.
bool is_control(char c) { return std::iscntrl(static_cast<unsigned char>(c)) && c != '\n' && c != '\t' && c != '\r'; }

constexpr std::string_view kTwoCharSymbols[] = {"->", "<=", ">=", "==", "!=", "..", "//", "+=", "**"};

}  // namespace

Lexer::Lexer(std::string_view text, std::string file, bool layout) : file_(std::move(file)) { tokenize(text, layout); }

void Lexer::tokenize(std::string_view text, bool layout) {
  std::vector<int> indents{0};
  int line = 1;
  int brackets = 0;
  size_t i = 0;
  bool line_start = true;
  size_t line_begin = 0;
  auto column = [&] { return static_cast<int>(i - line_begin) + 1; };
  auto refuse_control = [&](char c, int at_line, int at_column) {
    fail({Token::Kind::end, "", at_line, at_column}, fmt::format("the character {:#04x} is no text", static_cast<unsigned char>(c)));
  };
  auto add = [&](Token::Kind kind, std::string value, int col) { tokens_.push_back({kind, std::move(value), line, col}); };
  while (i < text.size()) {
    if (line_start && brackets == 0) {
      size_t start = i;
      while (i < text.size() && text[i] == ' ') ++i;
      bool blank = i >= text.size() || text[i] == '\n' || text[i] == '#' || text[i] == ';' || text[i] == '\r' || text.substr(i, 2) == "//";
      if (!blank && layout) {
        int width = static_cast<int>(i - start);
        if (width > indents.back()) {
          indents.push_back(width);
          if (indents.size() > kMaxDepth) {
            add(Token::Kind::end, "", column());
            fail(tokens_.back(), fmt::format("blocks are nested deeper than {}", kMaxDepth));
          }
          add(Token::Kind::indent, "indent", 1);
        }
        while (width < indents.back()) {
          indents.pop_back();
          add(Token::Kind::dedent, "dedent", 1);
        }
        if (width != indents.back()) {
          add(Token::Kind::end, "", column());
          fail(tokens_.back(), "this indentation matches no outer block");
        }
      }
      // A line that starts with // is a comment (the header lines of golden files).
      if (text.substr(i, 2) == "//") {
        while (i < text.size() && text[i] != '\n') ++i;
      }
      line_start = false;
      if (i >= text.size()) break;
    }
    char c = text[i];
    if (is_control(c)) refuse_control(c, line, column());
    if (c == '\n') {
      if (layout && brackets == 0 && !tokens_.empty() && tokens_.back().kind != Token::Kind::newline && tokens_.back().kind != Token::Kind::indent &&
          tokens_.back().kind != Token::Kind::dedent)
        add(Token::Kind::newline, "end of line", column());
      ++i;
      ++line;
      line_begin = i;
      line_start = true;
      continue;
    }
    if (c == ' ' || c == '\t' || c == '\r') {
      ++i;
      continue;
    }
    if (c == '#' || c == ';') {
      while (i < text.size() && text[i] != '\n') ++i;
      continue;
    }
    int col = column();
    if (starts_name(c)) {
      size_t start = i++;
      while (i < text.size() && continues_name(text[i]) && text.substr(i, 2) != "..") ++i;
      add(Token::Kind::identifier, std::string(text.substr(start, i - start)), col);
      continue;
    }
    if (std::isdigit(static_cast<unsigned char>(c))) {
      size_t start = i;
      bool floating = false;
      while (i < text.size() && std::isdigit(static_cast<unsigned char>(text[i]))) ++i;
      if (i < text.size() && text[i] == '.' && text.substr(i, 2) != "..") {
        floating = true;
        ++i;
        while (i < text.size() && std::isdigit(static_cast<unsigned char>(text[i]))) ++i;
      }
      if (i < text.size() && (text[i] == 'e' || text[i] == 'E')) {
        size_t mark = i++;
        if (i < text.size() && (text[i] == '+' || text[i] == '-')) ++i;
        if (i < text.size() && std::isdigit(static_cast<unsigned char>(text[i]))) {
          floating = true;
          while (i < text.size() && std::isdigit(static_cast<unsigned char>(text[i]))) ++i;
        } else {
          i = mark;
        }
      }
      add(floating ? Token::Kind::floating : Token::Kind::integer, std::string(text.substr(start, i - start)), col);
      continue;
    }
    if (c == '"') {
      std::string value;
      ++i;
      while (i < text.size() && text[i] != '"' && text[i] != '\n') {
        if (is_control(text[i])) refuse_control(text[i], line, column());
        if (text[i] == '\\' && i + 1 < text.size()) {
          ++i;
          value += text[i] == 'n' ? '\n' : text[i] == 't' ? '\t' : text[i];
        } else {
          value += text[i];
        }
        ++i;
      }
      if (i >= text.size() || text[i] != '"') {
        add(Token::Kind::end, "", col);
        fail(tokens_.back(), "this string has no closing quote");
      }
      ++i;
      add(Token::Kind::string, std::move(value), col);
      continue;
    }
    std::string symbol(1, c);
    // A character of several bytes stays whole: half of one in a message would be no text.
    while (static_cast<unsigned char>(c) >= 0x80 && i + symbol.size() < text.size() && (text[i + symbol.size()] & 0xC0) == 0x80)
      symbol += text[i + symbol.size()];
    for (std::string_view two : kTwoCharSymbols)
      if (text.substr(i, 2) == two) symbol = two;
    if (c == '(' || c == '[' || c == '{') ++brackets;
    if (brackets > kMaxDepth) {
      add(Token::Kind::end, "", col);
      fail(tokens_.back(), fmt::format("more than {} brackets are open here", kMaxDepth));
    }
    if (c == ')' || c == ']' || c == '}') brackets = brackets > 0 ? brackets - 1 : 0;
    i += symbol.size();
    add(Token::Kind::symbol, std::move(symbol), col);
  }
  if (layout && !tokens_.empty() && tokens_.back().kind != Token::Kind::newline) add(Token::Kind::newline, "end of line", column());
  for (size_t level = 1; layout && level < indents.size(); ++level) add(Token::Kind::dedent, "dedent", 1);
  add(Token::Kind::end, "end of file", column());
}

const Token& Lexer::peek(int ahead) const {
  size_t at = position_ + static_cast<size_t>(ahead);
  return at < tokens_.size() ? tokens_[at] : tokens_.back();
}

Token Lexer::next() {
  Token token = peek();
  if (position_ + 1 < tokens_.size()) ++position_;
  return token;
}

bool Lexer::at(std::string_view text) const {
  const Token& token = peek();
  return (token.kind == Token::Kind::identifier || token.kind == Token::Kind::symbol || token.kind == Token::Kind::newline ||
          token.kind == Token::Kind::indent || token.kind == Token::Kind::dedent) &&
         token.text == text;
}

bool Lexer::accept(std::string_view text) {
  if (!at(text)) return false;
  next();
  return true;
}

void Lexer::expect(std::string_view text) {
  if (!accept(text)) fail(fmt::format("expected '{}', found '{}'", text, peek().text));
}

std::string Lexer::identifier(std::string_view what) {
  if (peek().kind != Token::Kind::identifier) fail(fmt::format("expected {}, found '{}'", what, peek().text));
  return next().text;
}

int64_t Lexer::integer(std::string_view what) {
  bool negative = accept("-");
  if (peek().kind != Token::Kind::integer) fail(fmt::format("expected {} (an integer), found '{}'", what, peek().text));
  Token token = next();
  uint64_t magnitude = 0;
  uint64_t limit = static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) + (negative ? 1U : 0U);
  for (char c : token.text) {
    auto digit = static_cast<uint64_t>(c - '0');
    if (magnitude > (limit - digit) / 10) fail(token, fmt::format("{} does not fit in 64 bits", token.text));
    magnitude = magnitude * 10 + digit;
  }
  return static_cast<int64_t>(negative ? 0 - magnitude : magnitude);
}

double Lexer::number(std::string_view what) {
  bool negative = accept("-");
  const Token& token = peek();
  double value = 0;
  if (token.kind == Token::Kind::integer || token.kind == Token::Kind::floating)
    value = std::strtod(token.text.c_str(), nullptr);
  else if (token.text == "inf")
    value = std::numeric_limits<double>::infinity();
  else if (token.text == "nan")
    value = std::numeric_limits<double>::quiet_NaN();
  else
    fail(fmt::format("expected {} (a number), found '{}'", what, token.text));
  next();
  return negative ? -value : value;
}

std::string Lexer::quoted(std::string_view what) {
  if (peek().kind != Token::Kind::string) fail(fmt::format("expected {} (a quoted string), found '{}'", what, peek().text));
  return next().text;
}

bool Lexer::at_end() const { return peek().kind == Token::Kind::end; }

void Lexer::skip_newlines() {
  while (peek().kind == Token::Kind::newline) next();
}

void Lexer::fail(std::string_view message) const { fail(peek(), message); }

void Lexer::fail(const Token& where, std::string_view message) const {
  throw UserError(fmt::format("{}:{}:{}: {}", file_, where.line, where.column, message));
}

std::string joined(const std::vector<std::string>& parts, std::string_view separator) {
  std::string text;
  for (const auto& part : parts) {
    if (!text.empty() || &part != parts.data()) text += separator;
    text += part;
  }
  return text;
}

std::string quote(std::string_view text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (c == '\n')
      out += "\\n";
    else if (c == '\t')
      out += "\\t";
    else
      out += c;
  }
  return out + "\"";
}

std::string print_float(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

}  // namespace deplo
