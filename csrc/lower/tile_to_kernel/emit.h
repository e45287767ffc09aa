#pragma once

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernel_ir/ir.h"

namespace deplo::tile_to_kernel {

using kernel_ir::Type;

/// Builds nested blocks of Kernel IR. Equal pure values and equal loads of unchanged memory get one name; what does not depend on a loop
/// is placed before it (loads only if the loop is known to run).
class Emitter {
 public:
  // ---- names ---------------------------------------------------------------------------------------------------------
  void reserve(const std::string& name) { used_.insert(name); }
  std::string fresh(const std::string& hint);

  // ---- blocks --------------------------------------------------------------------------------------------------------
  enum class Nest : uint8_t { loop, branch };
  /// Opens a block. `always`: it runs at least once whenever the block outside does. `stores`: buffers it may write.
  void open(Nest nest, bool always, const std::set<std::string>& stores);
  kernel_ir::Block close();
  void append(decltype(kernel_ir::Stmt::node) node);
  /// Tells that `symbol`, a loop variable or the like, is defined in the innermost open block.
  void declare_symbol(const std::string& symbol) { values_[symbol] = {{}, depth(), false}; }

  /// Gives a value a further key, by which it is found as long as the block lives in which it was made.
  void remember(const std::string& key, const std::string& value) { levels_[depth_of(value)].numbers[key] = value; }
  const std::string* recall(const std::string& key) const { return find(key); }

  // ---- values --------------------------------------------------------------------------------------------------------
  std::string constant(Type type, const Scalar& literal);
  std::string let(const std::string& hint, Type type, Fn fn, std::vector<std::string> operands);
  std::string index(const std::string& hint, Type type, Expr value, Expr lane_step);
  std::string splat(const std::string& operand, int lanes);
  std::string first(int lanes, Expr count);
  std::string shuffle(Type type, const std::string& a, const std::string& b, std::vector<int> lanes);
  std::string reduce_lanes(Fn fn, const std::string& operand);
  std::string extract(const std::string& operand, int lane);
  /// A scalar of another thread; all threads of the warp must be here.
  std::string exchange(const std::string& operand, int lane, kernel_ir::Partner partner);
  /// Tells that nothing stores to a buffer while the kernel runs.
  void declare_constant(const std::string& buffer) { constant_.insert(buffer); }
  std::string load(const std::string& hint, kernel_ir::Load load);
  void store(kernel_ir::Store store);
  /// After it, memory holds what other threads wrote.
  void barrier();
  void matrix(kernel_ir::Matrix matrix);
  void copy_async(kernel_ir::CopyAsync copy);
  /// Closes a group of copies, or waits for those before the last `pending`.
  void copy_group(int pending);
  std::string load_matrix(const std::string& hint, kernel_ir::LoadMatrix load);
  std::string join_matrix(const std::string& hint, kernel_ir::JoinMatrix join);
  void mma(kernel_ir::Mma product);
  void multiply_tiles(kernel_ir::MultiplyTiles products);
  void multiply_group(kernel_ir::MultiplyGroup products);
  std::string var(const std::string& hint, Type type, const std::string& init);
  void assign(const std::string& var, const std::string& value);
  /// A copy of what a var holds now.
  std::string copy(const std::string& var);
  /// From here on the var is never assigned.
  void freeze(const std::string& var) { values_.at(var).mutates = false; }

  const Type& type(const std::string& value) const { return values_.at(value).type; }

 private:
  struct Known {
    Type type;
    size_t depth = 0;
    bool mutates = false;
  };
  struct Level {
    kernel_ir::Block block;
    Nest nest = Nest::branch;
    bool always = false;
    std::set<std::string> stores;
    std::unordered_map<std::string, std::string> numbers;  ///< key of a pure value -> its name
  };

  size_t depth() const { return levels_.size() - 1; }
  std::string key(const std::string& operand) const;
  static std::string key(Expr e);
  size_t depth_of(const std::string& operand) const;
  size_t depth_of(Expr e) const;
  const std::string* find(const std::string& key) const;
  void define(const std::string& name, Type type, size_t at) { values_[name] = {type, at, false}; }
  template <class Node>
  std::string pure(const std::string& key, const std::string& hint, Type type, size_t at, bool cheap, Node node);

  std::vector<Level> levels_{1};
  std::unordered_map<std::string, Known> values_;
  std::set<std::string> used_;
  std::map<std::string, int> next_;
  std::map<std::string, int> versions_;  ///< of buffers: grows with every store
  std::set<std::string> constant_;       ///< buffers that nothing stores to
  int memory_ = 0;                       ///< grows with every barrier
  int epoch_ = 0;                        ///< grows whenever a var may have changed
};

}  // namespace deplo::tile_to_kernel
