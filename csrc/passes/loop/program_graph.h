#pragma once

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/flat_set.h"
#include "loop_ir/params.h"
#include "loop_ir/rewrite.h"

namespace deplo {

/// Statements that fusion puts into one kernel: to schedule and to compile more takes more than linear time.
constexpr size_t kMostStatements = 1024;

/// A module's steps as a graph that fusion edits: kernel bodies name the program's buffers directly, and who writes and reads
/// each buffer is kept up to date. Kernels that came to nothing leave a hole; finish() closes the holes.
class ProgramGraph {
 public:
  struct Node {
    bool alive = true;
    bool is_kernel = false;
    bool once = false;
    size_t place = 0;              ///< among the steps, as far as nothing else orders them; shared by nodes that come of one
    loop_ir::Block body;           ///< of a kernel
    FlatSet<std::string> updated;  ///< buffers that it keeps in part: inout
    std::vector<std::string> provenance;
    std::string name;
    Ref<loop_ir::Kernel> made;  ///< the kernel that it was, as finish() would make it
    LibraryStep library;
    FlatSet<std::string> reads;
    FlatSet<std::string> writes;
    std::vector<std::string> inside;  ///< buffers that flowed between kernels that this one is made of, and that no other one sees
  };

  explicit ProgramGraph(loop_ir::Module module);

  std::vector<Node>& nodes() { return nodes_; }
  const ProgramBody& program() const { return module_; }
  const Buffer& buffer(const std::string& name) const { return *buffers_.at(name); }
  /// Nothing where a kernel declares it for itself.
  const Buffer* find_buffer(const std::string& name) const {
    auto it = buffers_.find(name);
    return it == buffers_.end() ? nullptr : it->second;
  }
  /// Writers and readers in step order.
  const std::vector<size_t>& writers(const std::string& buffer) { return writers_[buffer]; }
  const FlatSet<size_t>& readers(const std::string& buffer) { return readers_[buffer]; }
  /// Written by one kernel as a whole, read by nothing but kernels, and not returned: fusion may make it disappear.
  bool is_private(const std::string& buffer);
  bool is_returned(const std::string& buffer) const { return returned_.count(buffer) > 0; }

  /// For each node: a kernel that reads nothing but static inputs and results of such kernels, uses no symbol, and writes only
  /// private buffers.
  std::vector<bool> static_nodes();
  void set_kind(const std::string& buffer, BufferKind kind) { buffers_.at(buffer)->kind = kind; }
  /// Gives a buffer another dtype; the bodies that access it are the caller's to change.
  void set_dtype(const std::string& buffer, DType dtype) { buffers_.at(buffer)->dtype = dtype; }
  /// Gives a buffer another shape, row-major; the bodies that access it are the caller's to change.
  void set_shape(const std::string& buffer, std::vector<Expr> shape);
  /// The symbol that is 1 where all elements of a static input of integers lie in lo..hi, else 0.
  std::string add_fact(const std::string& buffer, int64_t lo, int64_t hi);
  /// A new temp buffer; `hint` should end in a digit.
  std::string add_buffer(const std::string& hint, DType dtype, std::vector<Expr> shape);
  /// A new kernel that keeps the order that `like` had to keep.
  size_t add_kernel(loop_ir::Block body, size_t like);
  /// New kernels in place of one, each of which stores some elements of what that one wrote and keeps the others. They may run in any order.
  std::vector<size_t> split(size_t at, const std::vector<loop_ir::Block>& bodies);
  /// `second` must run after `first`.
  void add_order(size_t first, size_t second);

  void set_body(size_t node, loop_ir::Block body);
  /// `body` of node `into` holds what node `from` did, too, which disappears. Private buffers that only the two of them saw are `inside` from now
  /// on, and in no list of reads, writes, readers or writers, until the body is set again.
  void join(size_t from, size_t into, loop_ir::Block body);
  /// Steps that name buffer `from` name `to` instead.
  void rename_buffer(const std::string& from, const std::string& to);
  void remove(size_t node);
  /// Removes kernels without effect: nothing reads what they write, and they check nothing.
  void remove_dead();
  /// Appends the torch nodes of one kernel to another's.
  void merge_provenance(size_t from, size_t into, bool before);
  /// Nodes that must run before this one.
  std::set<size_t> predecessors(size_t node);
  /// True if `to` must run after `from`, be it through other nodes; `skip_direct` ignores an edge that leads straight there. Looks at what lies
  /// between the two only, as positions in an order that all edges follow tell.
  bool reaches(size_t from, size_t to, bool skip_direct = false);
  /// Written more than once, or an input that is written: its readers and writers keep the order of the steps.
  bool is_versioned(const std::string& buffer) const { return versioned_.count(buffer) > 0; }
  /// Writers of versioned buffers that must stay behind this node because it reads what they overwrite.
  const FlatSet<size_t>& overwriters(size_t node) const { return edges(after_, node); }
  /// `into` takes over the order that `from` had to keep (its body is about to contain what `from` reads and writes).
  void inherit_order(size_t from, size_t into);

  /// The module with steps in dependence order (stable), buffers that nothing uses dropped, parameters recomputed.
  loop_ir::Module finish();

 private:
  /// No input, not returned, written once: what only one kernel sees need not exist.
  bool may_vanish(const std::string& buffer) const;
  void index_accesses(size_t node);
  void index_accesses(size_t node, const std::vector<loop_ir::Access>& accesses);
  Ref<loop_ir::Kernel> kernel_of(Node& node, const BufferIndex& buffers, const Ranges& symbols) const;
  void forget_accesses(size_t node);
  void record_order();
  template <class F>
  void for_predecessors(size_t node, const F& f) const;
  template <class F>
  void for_successors(size_t node, const F& f) const;
  void keep_order(size_t first, size_t second);
  void keep_order_around(size_t node);
  void find_positions();

  loop_ir::Module module_;
  loop_ir::Names names_;  ///< of buffers and symbols, once a buffer was added
  bool adds_buffers_ = false;
  std::unordered_map<std::string, Buffer*> buffers_;
  std::vector<Node> nodes_;
  std::unordered_map<std::string, std::vector<size_t>> writers_;
  std::unordered_map<std::string, FlatSet<size_t>> readers_;
  std::unordered_set<std::string> returned_;
  std::unordered_set<std::string> versioned_;
  using Edges = std::unordered_map<size_t, FlatSet<size_t>>;
  static const FlatSet<size_t>& edges(const Edges& all, size_t node) {
    static const FlatSet<size_t> none;
    auto it = all.find(node);
    return it == all.end() ? none : it->second;
  }
  Edges before_;  ///< order edges of versioned buffers, both ways
  Edges after_;
  std::vector<size_t> positions_;  ///< of nodes, in an order that all edges follow
  bool ordered_ = false;           ///< the positions are known
};

}  // namespace deplo
