#pragma once

#include <functional>
#include <string>
#include <unordered_map>

#include "passes/loop/program_graph.h"

namespace deplo {

/// Along which dimension of a buffer memory will run, before layouts are chosen: the strides of inputs and of what is returned say so; temporaries
/// lie as most of what they are made of, element by element, and the result of a sum as what is summed.
class LikelyLines {
 public:
  LikelyLines(ProgramGraph& graph, std::function<double(Expr)> size) : graph_(graph), size_(std::move(size)) {}

  /// The innermost dimension; of a number 0.
  size_t innermost(const std::string& buffer) { return line(buffer).dimension; }

 private:
  struct Line {
    size_t dimension = 0;
    double elements = 0;  ///< that lie so: those of a broadcast are few
  };
  Line line(const std::string& buffer);
  Line as_made(const std::string& buffer, Line otherwise);

  ProgramGraph& graph_;
  std::function<double(Expr)> size_;
  std::unordered_map<std::string, Line> known_;
};

}  // namespace deplo
