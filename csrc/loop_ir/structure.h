#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "loop_ir/ir.h"

namespace deplo::loop_ir {

/// Bytes that are equal for two things exactly if those say the same, for tables: quicker to make than text, and good for one process only.
class Structure {
 public:
  void add(char value) { bytes_ += value; }
  void add(int64_t value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof value); }
  void add(size_t value) { add(static_cast<int64_t>(value)); }
  void add(const std::string& name);
  void add(Expr e);
  void add(const std::vector<Expr>& list);
  void add(const std::vector<Cond>& guard);
  void add(const Scalar& literal);
  const std::string& bytes() const { return bytes_; }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

/// Of a block, up to the names of its buffers and locals: those that are not in `buffers` yet are appended in the order of their first use.
/// Names of values and axes count.
std::string structure_of(const Block& block, std::vector<std::string>& buffers);
/// Of a statement, up to the names of all that it defines: values, axes and locals.
std::string structure_of(const Stmt& stmt);

/// A copy of a block in which buffers and locals have other names; what names none of them is shared with the original.
Block rename_buffers(const Block& block, const std::unordered_map<std::string, std::string>& names);

}  // namespace deplo::loop_ir
