#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "kernel_ir/ir.h"

namespace deplo {

/// What is known of a kernel's integers, and their text. With `assumes`, what is not known but worth much is assumed and noted as a condition that
/// the kernel checks when it starts: that sizes are multiples of a vector, and that indices fit in 32 bits.
class CudaIndex {
 public:
  CudaIndex(const kernel_ir::Kernel& kernel, bool assumes);

  bool assumes() const { return assumes_; }
  /// The conditions assumed so far, as CUDA text without side effects, each once.
  std::vector<std::string> conditions() const;

  /// Tells of a scalar integer that is an expression, of a loop's variable, and of any other scalar integer, of dtype i64 or narrower.
  void define(const std::string& name, Expr value);
  void define_loop(const kernel_ir::For& loop);
  void define_unknown(const std::string& name);

  /// Whether e and all that it is made of fit in an int, or are assumed to.
  bool is_narrow(Expr e);
  bool is_narrow_name(const std::string& name) const { return narrow_.count(name) > 0; }
  void set_narrow_name(const std::string& name) { narrow_.insert(name); }
  /// Text of an expression: of ints where it is narrow, else of long longs.
  std::string text(Expr e);
  /// From now on texts name what they divide, or choose the least or largest of, of sizes and of indices of blocks and threads alone, each once: of
  /// symbolic sizes such expressions are long, and come again in almost every index.
  void name_divisions() { names_divisions_ = true; }
  /// What declares those names, in order, at the head of a kernel's body.
  const std::vector<std::string>& declarations() const { return declarations_; }
  std::string text(const std::vector<Cond>& guard);
  /// Whether `of`, a power of two, divides e, or is assumed to.
  bool is_multiple(Expr e, int64_t of);
  /// A C++ identifier for an IR name.
  static std::string id(const std::string& name);

 private:
  std::string print(Expr e, bool narrow);
  std::string named(Expr e, bool narrow, std::string text);
  std::string symbol(const std::string& name, bool narrow) const;
  Expr magnitude(Expr e, bool* known) const;
  Expr bound_of(Expr e, bool* known) const;
  bool divides_narrow(Expr e);
  int64_t factor(Expr e) const;
  int64_t factor_of(const std::string& name) const;
  bool is_size(const std::string& name) const { return sizes_.count(name) > 0; }

  bool assumes_;
  std::set<std::string> sizes_;               ///< symbols, and what the host computes of them
  Ranges ranges_;                             ///< lower bounds above all
  std::map<std::string, Expr> magnitudes_;    ///< bounds of |value|, in sizes
  std::map<std::string, int64_t> multiples_;  ///< what divides a value
  std::set<std::string> narrow_;              ///< variables of type int
  std::set<std::string> divisible_;           ///< conditions
  std::vector<Expr> below_;                   ///< that must be below 2^31
  bool names_divisions_ = false;
  std::map<std::string, std::string> named_;  ///< by type and text
  std::vector<std::string> declarations_;
};

}  // namespace deplo
