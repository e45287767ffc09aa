#pragma once

#include <map>
#include <optional>
#include <string>

#include "loop_ir/ir.h"
#include "program_ir/text.h"

namespace deplo::loop_ir {

// Text of the statements that Loop and Tile IR share. Dtypes that follow from operands or buffers are left out.

/// Dtypes of the names in scope while one kernel is read.
struct TypeScope {
  std::map<std::string, DType> values;
  std::map<std::string, DType> buffers;
};

std::string print(const Let& s);
std::string print(const Load& s);
std::string print(const Store& s);
std::string print(const Check& s);
std::string print(const Param& p);
std::string print_params(const std::vector<Param>& params);
/// "m: f32, s: f32 = online_softmax(a)": the head of a reduce or scan before its axes.
std::string print_combination(const std::vector<std::string>& results, const std::vector<DType>& dtypes, Combiner combiner,
                              const std::vector<std::string>& operands);
std::string_view to_string(ErrorCode code);

/// "(x: f32[4], out y: f32[4] strides [1] static)"; adds the buffers to the scope.
std::vector<Param> parse_params(Lexer& lexer, TypeScope& scope);

/// A reduce or scan head, as print_combination writes it. Its results join the scope.
struct Combination {
  std::vector<std::string> results;
  std::vector<DType> dtypes;
  Combiner combiner = Combiner::sum;
  std::vector<std::string> operands;
};
Combination parse_combination(Lexer& lexer, TypeScope& scope);

/// One Let, Load, Store or Check up to its end of line, which stays.
std::variant<Let, Load, Store, Check> parse_simple(Lexer& lexer, TypeScope& scope);

}  // namespace deplo::loop_ir
