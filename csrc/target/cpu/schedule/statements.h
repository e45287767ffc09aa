#pragma once

#include <string>
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
  void store(const std::string& buffer, std::vector<Expr> index, const std::string& value) {
    into_.push_back(make(loop_ir::Store{buffer, std::move(index), value, {}, Combiner::set}));
  }

 private:
  tile_ir::Block& into_;
  std::string suffix_;
};

}  // namespace deplo::loop_to_tile
