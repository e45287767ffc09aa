#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "loop_ir/build.h"
#include "target/cuda/schedule/block.h"

namespace deplo::loop_to_tile {

/// Schedules of kinds gpu_points, gpu_rows and gpu_serial, one of which fits every kernel.
class GpuNest {
 public:
  explicit GpuNest(const loop_ir::Kernel& kernel);

  /// `deterministic`: floating-point numbers are added in one order.
  Schedule propose(bool deterministic = false) const;
  /// The kernel's body as a grid of blocks.
  tile_ir::Block apply(const Schedule& schedule);

 private:
  /// How the statements inside the outer axes run.
  enum class Share : uint8_t {
    alone,     ///< by one thread, everything serial
    together,  ///< by all threads of the block in step
  };

  void read(const Schedule& schedule);
  bool shares_rows() const;
  std::vector<std::string> ordered_axes() const;
  bool adds_in_any_order(bool deterministic) const;
  int64_t proposed_sharers(const std::vector<std::string>& ordered) const;
  std::optional<Expr> shared_place() const;
  tile_ir::Block of_sharer(tile_ir::Block body, Expr sharer) const;
  bool needs_scratch(const loop_ir::Block& block, Share share, int64_t& shared_bytes) const;
  tile_ir::Space space_of(const loop_ir::Local& s, Share share, int64_t& shared_bytes) const;
  int64_t reduction_bytes() const;

  tile_ir::Block points();
  tile_ir::Block rows();
  tile_ir::Block serial();
  template <class Body>
  tile_ir::Block over_blocks(Expr count, const Body& body);

  tile_ir::Block convert(const loop_ir::Block& block, Share share);
  void lower(loop_ir::Let s, Share share, tile_ir::Block& out);
  void lower(loop_ir::Load s, Share share, tile_ir::Block& out);
  void lower(loop_ir::Store s, Share share, tile_ir::Block& out);
  void lower(loop_ir::Check s, Share share, tile_ir::Block& out);
  void lower(const loop_ir::Local& s, Share share, tile_ir::Block& out);
  void lower(const loop_ir::For& s, Share share, tile_ir::Block& out);
  void lower(const loop_ir::Scan& s, Share share, tile_ir::Block& out);
  void lower(const loop_ir::Reduce& s, Share share, tile_ir::Block& out);
  bool can_share(const loop_ir::Scan& s) const;
  void share_elements(const loop_ir::Scan& s, tile_ir::Block& out);
  tile_ir::Axis share_axes(const std::vector<loop_ir::Axis>& axes);

  std::string shared_for(DType dtype, tile_ir::Block& out);
  void barrier(tile_ir::Block& out);
  void before_writing(const loop_ir::Block& block, tile_ir::Block& out);
  Expr thread() const { return sym(thread_); }

  const loop_ir::Kernel& kernel_;
  loop_ir::Names names_;
  std::vector<loop_ir::Axis> outer_;
  const loop_ir::Block* inner_ = nullptr;
  std::string block_;   ///< the block's index
  std::string thread_;  ///< the thread's

  int64_t threads_ = kGpuThreads;
  int64_t blocks_ = 0;              ///< of a grid, at most; 0: any
  std::vector<std::string> order_;  ///< outer axes that a thread runs through, for stores that may meet along them
  bool atomic_ = false;             ///< stores that may meet add to memory in any order
  int64_t sharers_ = 1;             ///< threads of a point, each with places of its own

  Substitution map_;                     ///< the outer axes
  std::map<DType, std::string> arrays_;  ///< shared, an element for each thread
  std::set<std::string> of_thread_;      ///< locals with a first dimension of threads
  std::set<std::string> read_;           ///< buffers that threads may still be reading, each for itself, since the last barrier
  int64_t shared_bytes_ = 0;
};

}  // namespace deplo::loop_to_tile
