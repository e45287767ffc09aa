#pragma once

#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "loop_ir/structure.h"
#include "passes/loop/fusion_cost.h"

namespace deplo {

/// What kernels that differ in the names of buffers alone have in common while nests are being fused.
struct FusionShape {
  size_t id = 0;
  FusionGroup group;  ///< of the kernel that had the shape first
  loop_ir::Names names;
  bool is_pointwise = false;
  std::vector<std::string> buffers;  ///< of that kernel, in the order in which all kernels of this shape number theirs
};

/// A kernel as one of a shape. Without a shape it is like no other.
struct FusionInstance {
  std::shared_ptr<const FusionShape> shape = nullptr;
  std::vector<std::string> buffers = {};
  bool pending = false;  ///< its nest has not been made of the shape's yet
};

/// What came of the attempt to fuse two kernels of given shapes.
struct FusionTrial {
  bool tried = false;
  bool profitable = false;
  bool asks_readers = false;                            ///< what reads the results had a say
  std::shared_ptr<const FusionShape> joined = nullptr;  ///< once some were
};

/// The shapes and trials of one program: what was found out of one layer is known of all that equal it.
class FusionShapes {
 public:
  explicit FusionShapes(ProgramGraph& graph) : graph_(graph) {}

  /// Everything that a kernel's part in fusion follows from, by itself; `buffers` get its numbering.
  std::string key_of(const loop_ir::Block& body, std::vector<std::string>& buffers);
  /// Everything that an attempt to fuse two kernels follows from, but for the order of steps. `flow` goes from the first to the second.
  std::string key_of(size_t first, const FusionInstance& a, size_t second, const FusionInstance& b, const std::set<std::string>& flow, bool by_input,
                     bool one_after_the_other);

  std::shared_ptr<const FusionShape>& shape(const std::string& key) { return shapes_[key]; }
  FusionTrial& trial(const std::string& key) { return trials_[key]; }
  std::shared_ptr<const FusionShape> make(const FusionGroup& group, const loop_ir::Names& names, bool is_pointwise,
                                          const std::vector<std::string>& buffers);

  /// Buffers of both, as their joined kernel numbers them.
  static std::vector<std::string> joined(const FusionInstance& a, const FusionInstance& b);

 private:
  size_t type_of(const std::string& buffer);

  ProgramGraph& graph_;
  std::unordered_map<std::string, size_t> types_;       ///< by what a buffer is
  std::unordered_map<std::string, size_t> type_names_;  ///< by name
  std::unordered_map<std::string, std::shared_ptr<const FusionShape>> shapes_;
  std::unordered_map<std::string, FusionTrial> trials_;
  size_t next_ = 0;
};

}  // namespace deplo
