#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/location.h"

namespace deplo {

/// One token of IR text. `%name`, `@name` and plain names are identifiers with their sigil kept in `text`.
struct Token {
  enum class Kind { identifier, integer, floating, string, symbol, newline, indent, dedent, end };
  Kind kind = Kind::end;
  std::string text;
  int line = 1;
  int column = 1;
  Location location() const { return {line, column}; }
};

/// The tokens of one .ir text, shared by the parsers of all levels.
/// `#` and `;` start comments that run to the end of the line. With `layout`, line ends and the indentation of
/// lines (outside brackets) become newline / indent / dedent tokens, as in Python; without it they are skipped.
/// Every failure is a UserError `file:line:column: expected ..., found ...`.
class Lexer {
 public:
  Lexer(std::string_view text, std::string file, bool layout);

  const Token& peek(int ahead = 0) const;
  Token next();
  bool at(std::string_view text) const;           ///< the next token is this identifier or symbol
  bool accept(std::string_view text);             ///< takes it if so
  void expect(std::string_view text);             ///< takes it, or fails
  std::string identifier(std::string_view what);  ///< an identifier, or fails naming `what`
  int64_t integer(std::string_view what);         ///< a possibly negative integer
  int small_integer(std::string_view what);       ///< one of 32 bits
  double number(std::string_view what);           ///< integer, float, inf, nan, with optional minus
  std::string quoted(std::string_view what);      ///< a string literal, unescaped
  bool at_end() const;
  void skip_newlines();
  [[noreturn]] void fail(std::string_view message) const;  ///< at the next token
  [[noreturn]] void fail(const Token& where, std::string_view message) const;
  /// f(), which fails at `where` if a number in it does not fit in 64 bits.
  template <class F>
  auto fitting(const Token& where, F&& f) const {
    try {
      return f();
    } catch (const UnsupportedError& error) {
      fail(where, error.what());
    }
  }

 private:
  std::string file_;
  std::vector<Token> tokens_;
  size_t position_ = 0;
};

/// "a, b, c".
std::string joined(const std::vector<std::string>& parts, std::string_view separator = ", ");
/// A quoted, escaped string literal that Lexer::quoted reads back.
std::string quote(std::string_view text);
/// The shortest decimal that reads back as the same double; "inf", "-inf", "nan"; always has a '.', an 'e' or letters.
std::string print_float(double value);

}  // namespace deplo
