#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lower/loop_to_tile/convert.h"

namespace deplo::loop_to_tile {

/// Adds straight-line statements to a block, whose names all end in one suffix.
class Statements {
 public:
  Statements(tile_ir::Block& into, std::string suffix) : into_(into), suffix_(std::move(suffix)) {}

  std::string let(const std::string& name, DType dtype, Fn fn, std::vector<std::string> operands, Scalar literal = {}) {
    into_.push_back(make(loop_ir::Let{name + suffix_, dtype, fn, std::move(operands), literal, 0}));
    return name + suffix_;
  }
  std::string word(const std::string& name, Fn fn, std::vector<std::string> operands) { return let(name, DType::i32, fn, std::move(operands)); }
  std::string number(const std::string& name, int64_t value) { return let(name, DType::i32, Fn::constant, {}, Scalar::of_int(DType::i32, value)); }
  std::string real(const std::string& name, double value) { return let(name, DType::f32, Fn::constant, {}, Scalar::of_float(DType::f32, value)); }
  std::string load(const std::string& name, DType dtype, const std::string& buffer, std::vector<Expr> index) {
    into_.push_back(make(loop_ir::Load{name + suffix_, dtype, buffer, std::move(index), {}, Scalar::of_float(dtype, 0)}));
    return name + suffix_;
  }
  /// The two bf16 numbers in a word: that of the lower half first.
  std::pair<std::string, std::string> halves(const std::string& word, const std::string& which) {
    const std::string low = let("low" + which, DType::i16, Fn::cast, {word});
    const std::string high = let("high" + which, DType::i16, Fn::cast, {this->word("upper" + which, Fn::shr, {word, number("up" + which, 16)})});
    return {let("even" + which, DType::bf16, Fn::bitcast, {low}), let("odd" + which, DType::bf16, Fn::bitcast, {high})};
  }
  /// A word of two float32 numbers, rounded to bf16 as dot2 reads them: the first one in the lower half.
  std::string pair(const std::string& even, const std::string& odd, const std::string& which) {
    auto bits = [&](const std::string& name, const std::string& value) {
      const std::string narrow = let("narrow" + name, DType::bf16, Fn::narrow, {value});
      return this->word("wide" + name, Fn::cast, {let("bits" + name, DType::i16, Fn::bitcast, {narrow})});
    };
    const std::string low = this->word("lower" + which, Fn::bit_and, {bits("e" + which, even), number("mask" + which, 0xffff)});
    const std::string high = this->word("higher" + which, Fn::shl, {bits("o" + which, odd), number("half" + which, 16)});
    return this->word("pair" + which, Fn::bit_or, {low, high});
  }
  void store(const std::string& buffer, std::vector<Expr> index, const std::string& value) {
    into_.push_back(make(loop_ir::Store{buffer, std::move(index), value, {}, Combiner::set}));
  }

 private:
  tile_ir::Block& into_;
  std::string suffix_;
};

}  // namespace deplo::loop_to_tile
