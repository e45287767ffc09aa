#include "base/text.h"

#include <algorithm>
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

[[noreturn]] void fail_at(const std::string& file, int line, int column, std::string_view message) {
  throw UserError(fmt::format("{}:{}:{}: {}", file, line, column, message));
}

/// One pass over a text: each method takes the characters of what it is named after.
class Tokenizer {
 public:
  Tokenizer(std::string_view text, const std::string& file, bool layout) : text_(text), file_(file), layout_(layout) {}

  std::vector<Token> run() {
    tokens_.reserve(text_.size() / 6);
    while (at_ < text_.size()) {
      if (line_start_ && brackets_ == 0) {
        begin_line();
        continue;
      }
      take();
    }
    if (layout_ && !tokens_.empty() && tokens_.back().kind != Token::Kind::newline) add(Token::Kind::newline, "end of line", column());
    for (size_t level = 1; layout_ && level < indents_.size(); ++level) add(Token::Kind::dedent, "dedent", 1);
    add(Token::Kind::end, "end of file", column());
    return std::move(tokens_);
  }

 private:
  bool more() const { return at_ < text_.size(); }
  bool ahead(std::string_view what) const { return text_.substr(at_, what.size()) == what; }
  int column() const { return static_cast<int>(at_ - line_begin_) + 1; }
  void add(Token::Kind kind, std::string value, int column) { tokens_.push_back({kind, std::move(value), line_, column}); }
  [[noreturn]] void refuse(int column, std::string_view message) const { fail_at(file_, line_, column, message); }
  void refuse_control(char c) const {
    if (is_control(c)) refuse(column(), fmt::format("the character {:#04x} is no text", static_cast<unsigned char>(c)));
  }
  void skip_line() {
    while (more() && text_[at_] != '\n') ++at_;
  }

  void begin_line() {
    line_start_ = false;
    const size_t start = at_;
    while (more() && text_[at_] == ' ') ++at_;
    // A line that starts with // is a comment (the header lines of golden files).
    const bool comment = ahead("//");
    const bool blank = !more() || comment || std::string_view("\n#;\r").find(text_[at_]) != std::string_view::npos;
    if (!blank && layout_) indent(static_cast<int>(at_ - start));
    if (comment) skip_line();
  }

  void indent(int width) {
    if (width > indents_.back()) {
      indents_.push_back(width);
      if (indents_.size() > kMaxDepth) refuse(column(), fmt::format("blocks are nested deeper than {}", kMaxDepth));
      add(Token::Kind::indent, "indent", 1);
    }
    while (width < indents_.back()) {
      indents_.pop_back();
      add(Token::Kind::dedent, "dedent", 1);
    }
    if (width != indents_.back()) refuse(column(), "this indentation matches no outer block");
  }

  void take() {
    const char c = text_[at_];
    refuse_control(c);
    if (c == '\n') return end_line();
    if (c == ' ' || c == '\t' || c == '\r') {
      ++at_;
      return;
    }
    if (c == '#' || c == ';') return skip_line();
    if (starts_name(c)) return name();
    if (is_digit()) return number();
    if (c == '"') return string();
    symbol();
  }

  void end_line() {
    const bool ends = !tokens_.empty() && tokens_.back().kind != Token::Kind::newline && tokens_.back().kind != Token::Kind::indent &&
                      tokens_.back().kind != Token::Kind::dedent;
    if (layout_ && brackets_ == 0 && ends) add(Token::Kind::newline, "end of line", column());
    ++at_;
    ++line_;
    line_begin_ = at_;
    line_start_ = true;
  }

  void name() {
    const int col = column();
    const size_t start = at_++;
    while (more() && continues_name(text_[at_]) && !ahead("..")) ++at_;
    add(Token::Kind::identifier, std::string(text_.substr(start, at_ - start)), col);
  }

  bool is_digit() const { return more() && std::isdigit(static_cast<unsigned char>(text_[at_])); }
  void digits() {
    while (is_digit()) ++at_;
  }

  void number() {
    const int col = column();
    const size_t start = at_;
    bool floating = false;
    digits();
    if (ahead(".") && !ahead("..")) {
      floating = true;
      ++at_;
      digits();
    }
    if (ahead("e") || ahead("E")) {
      const size_t mark = at_++;
      if (ahead("+") || ahead("-")) ++at_;
      if (is_digit()) {
        floating = true;
        digits();
      } else {
        at_ = mark;
      }
    }
    add(floating ? Token::Kind::floating : Token::Kind::integer, std::string(text_.substr(start, at_ - start)), col);
  }

  void string() {
    const int col = column();
    std::string value;
    for (++at_; more() && text_[at_] != '"' && text_[at_] != '\n'; ++at_) {
      refuse_control(text_[at_]);
      if (text_[at_] == '\\' && at_ + 1 < text_.size()) {
        ++at_;
        value += text_[at_] == 'n' ? '\n' : text_[at_] == 't' ? '\t' : text_[at_];
      } else {
        value += text_[at_];
      }
    }
    if (!ahead("\"")) refuse(col, "this string has no closing quote");
    ++at_;
    add(Token::Kind::string, std::move(value), col);
  }

  void symbol() {
    const int col = column();
    const char c = text_[at_];
    std::string symbol(1, c);
    // A character of several bytes stays whole: half of one in a message would be no text.
    while (static_cast<unsigned char>(c) >= 0x80 && at_ + symbol.size() < text_.size() && (text_[at_ + symbol.size()] & 0xC0) == 0x80)
      symbol += text_[at_ + symbol.size()];
    for (std::string_view two : kTwoCharSymbols)
      if (ahead(two)) symbol = two;
    if (c == '(' || c == '[' || c == '{') ++brackets_;
    if (brackets_ > kMaxDepth) refuse(col, fmt::format("more than {} brackets are open here", kMaxDepth));
    if (c == ')' || c == ']' || c == '}') brackets_ = std::max(brackets_ - 1, 0);
    at_ += symbol.size();
    add(Token::Kind::symbol, std::move(symbol), col);
  }

  std::string_view text_;
  const std::string& file_;
  bool layout_;
  std::vector<Token> tokens_;
  std::vector<int> indents_{0};
  size_t at_ = 0;
  size_t line_begin_ = 0;
  int line_ = 1;
  int brackets_ = 0;
  bool line_start_ = true;
};

}  // namespace

Lexer::Lexer(std::string_view text, std::string file, bool layout) : file_(std::move(file)), tokens_(Tokenizer(text, file_, layout).run()) {}

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

int Lexer::small_integer(std::string_view what) {
  const Token where = peek();
  int64_t value = integer(what);
  if (value != static_cast<int>(value)) fail(where, fmt::format("{} does not fit in 32 bits", value));
  return static_cast<int>(value);
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

void Lexer::fail(const Token& where, std::string_view message) const { fail_at(file_, where.line, where.column, message); }

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
