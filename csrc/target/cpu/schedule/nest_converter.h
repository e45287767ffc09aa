#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/context.h"
#include "lower/loop_to_tile/convert.h"
#include "schedule/reader.h"

namespace deplo::loop_to_tile {

/// Which axes of inner loops and reductions get the lanes: by name, and by place among those of that name in the order of the text.
struct InnerLanes {
  struct Choice {
    int64_t by = 1;
    const Directive* from = nullptr;
    bool applied = false;
  };
  std::map<std::pair<std::string, int64_t>, Choice> choices;
  std::map<std::string, int64_t> seen;     ///< how many loops over an axis were passed so far
  const ScheduleReader* reader = nullptr;  ///< of the schedule that the choices are from, if any

  std::vector<Directive> describe() const;
  /// The vectorize directives, but for one about the axis `outer`.
  static InnerLanes read(ScheduleReader& reader, const std::string& outer);
  /// That every choice met its loop.
  void finish() const;
  /// The choice for a loop nest over these axes, empty if it has none; `allowed`: it may have one, else `why` not.
  std::string take(const std::vector<loop_ir::Axis>& axes, bool allowed, const std::string& why, int64_t& by);
  /// Gives this loop nest the lanes on one of its axes, or on none.
  void add(const std::vector<loop_ir::Axis>& axes, const std::string& lanes, int64_t by);
  /// So many vectors in flight for every choice.
  void set_vectors(int64_t by);
};

/// Vectors of a block of columns that are reduced side by side.
int64_t column_vectors(const PassContext& ctx);

/// Turns the statements of one kernel into Tile IR under a substitution of its axes: inner loops and reductions get their best vector axis.
class NestConverter {
 public:
  NestConverter(const loop_ir::Kernel& kernel, const PassContext& ctx);

  /// What stands for the axes that are bound so far.
  Substitution& map() { return map_; }
  /// What stood for merged axes when these were all.
  const Substitution& merged() const { return merged_; }
  /// The best vector axes of inner loops and reductions.
  void propose_lanes(const loop_ir::Block& block, InnerLanes& lanes) const;
  /// `vectorize`: inner loops and reductions may take the lanes.
  tile_ir::Block convert(const loop_ir::Block& block, bool vectorize, InnerLanes& lanes);
  /// How much an axis gains by vectors: contiguous accesses count for it, strided ones against it. `reduced`: only what reductions load.
  double lane_score(const loop_ir::Axis& a, bool reduced = false) const;
  /// How much a reduction gains by lanes along its best axis.
  double reduce_score(const loop_ir::Reduce& reduce) const;
  /// Reductions that would leave most lanes empty, at points that fill them.
  bool short_windows(const std::vector<loop_ir::Axis>& axes, const loop_ir::Block& body) const;
  std::string best_lane_axis(const std::vector<loop_ir::Axis>& free) const;
  /// An axis along which a load is contiguous that is strided along `lanes`, or null.
  const loop_ir::Axis* transposed_axis(const std::vector<loop_ir::Axis>& free, const std::string& lanes) const;
  /// Merges neighbours (i, j) into one axis of extent I*J where every access moves along i by J times its step along j.
  void merge(std::vector<loop_ir::Axis>& axes);
  int64_t hint(Expr e) const;
  /// Of an access, in elements.
  Expr offset(const std::string& buffer, const std::vector<Expr>& index) const;
  /// In terms of merged axes.
  Expr merged_offset(const std::string& buffer, const std::vector<Expr>& index) const;
  const std::vector<const loop_ir::Store*>& colliding() const { return colliding_; }
  static bool is_straight(const loop_ir::Block& block);

 private:
  struct Access {
    Expr offset;  ///< in elements
    int weight;
    bool plain_load;  ///< a load without a guard
    bool reduced;     ///< inside of a reduction
  };
  void collect_accesses(const loop_ir::Block& block, bool reduced);
  bool mergeable(const loop_ir::Axis& outer, const loop_ir::Axis& inner) const;
  bool mentions_merged(Expr e, const loop_ir::Axis& outer, const loop_ir::Axis& inner) const;
  tile_ir::Block convert(const loop_ir::Block& block, bool vectorize);
  void lower(const loop_ir::Let& s, bool vectorize, tile_ir::Block& out);
  void lower(const loop_ir::Load& s, bool vectorize, tile_ir::Block& out);
  void lower(const loop_ir::Store& s, bool vectorize, tile_ir::Block& out);
  void lower(const loop_ir::Check& s, bool vectorize, tile_ir::Block& out);
  void lower(const loop_ir::Local& s, bool vectorize, tile_ir::Block& out);
  void lower(const loop_ir::For& s, bool vectorize, tile_ir::Block& out);
  void lower(const loop_ir::Reduce& s, bool vectorize, tile_ir::Block& out);
  void lower(const loop_ir::Scan& s, bool vectorize, tile_ir::Block& out);
  bool inner_columns(const std::vector<loop_ir::Axis>& axes, const loop_ir::Block& body) const;
  bool orders(const std::vector<loop_ir::Axis>& axes) const;

  const loop_ir::Kernel& kernel_;
  const PassContext& ctx_;
  std::map<std::string, std::vector<Expr>> strides_;
  Ranges ranges_;  ///< of the axes
  std::vector<Access> accesses_;
  std::vector<const loop_ir::Store*> colliding_;
  Substitution map_;
  Substitution merged_;
  std::map<std::string, Expr> merged_axes_;  ///< extents
  InnerLanes* lanes_ = nullptr;              ///< of the conversion in progress
};

}  // namespace deplo::loop_to_tile
