#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/dtype.h"
#include "expr/expr.h"

namespace deplo {

struct Attribute;

/// A tensor argument: the name of an SSA value, with its %.
struct ValueName {
  std::string name;
  bool operator==(const ValueName&) const = default;
};
/// A memory format, layout or device: channels_last, strided, cpu. The set is closed (is_word); a device with an index is a string.
struct Word {
  std::string text;
  bool operator==(const Word&) const = default;
};
struct None {
  bool operator==(const None&) const = default;
};

/// One argument of an ATen call: a tensor, a number (integers may be symbolic), a dtype, a string, a word, a list or None.
struct Attribute {
  std::variant<None, ValueName, bool, Expr, double, DType, std::string, Word, std::vector<Attribute>> value;
  bool operator==(const Attribute& other) const;  ///< floats by same_float
};

class Lexer;
bool is_word(const std::string& text);
std::string print(const Attribute& attribute);
Attribute parse_attribute(Lexer& lexer);

}  // namespace deplo
