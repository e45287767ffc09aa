#pragma once

#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "analysis/contraction.h"
#include "base/context.h"
#include "passes/loop/program_graph.h"
#include "passes/loop/share_axes.h"

namespace deplo {

/// Points that one thread may do alone: more are shared among threads.
constexpr double kSmallIteration = 16384;

/// A kernel while nests are being fused, with what decides about fusing it.
struct FusionGroup {
  NestGroup nest;
  std::vector<analysis::Contraction> contractions;  ///< of the kernel as it stands
  bool contracts = false;                           ///< there are some
  double points = 0;                                ///< innermost iterations
  size_t statements = 0;
  bool fixed = false;  ///< takes no part: writes versioned buffers in part
  size_t small = 1;    ///< kernels that it is made of which have nothing in common
};

/// All axes of the nest are shared.
inline bool covers(const AxisPairs& pairs, const NestGroup& nest) { return pairs.size() == nest.axes.size(); }

/// What it brings to join two nests: traffic saved, against operands that are read again and iterations that threads could have shared.
class FusionCost {
 public:
  FusionCost(ProgramGraph& graph, const PassContext& context) : graph_(graph), context_(context) {}

  double bytes(const std::string& buffer) const;
  double size(Expr e) const;                           ///< of an extent, by the sizes that are likely
  double points_of(const loop_ir::Block& body) const;  ///< iterations of the loads and stores that run most often

  /// `flow` goes from `a` to `b`. `names` are taken in `a`. With `one_after_the_other`, small nests may join that share no axis.
  bool profitable(const FusionGroup& a, const FusionGroup& b, const AxisPairs& pairs, const std::set<std::string>& flow, const loop_ir::Names& names,
                  bool one_after_the_other);

  /// Scores of few queries and their softmax, that and the values, or all that and what follows.
  bool attends(const FusionGroup& a, const FusionGroup& b) const;
  /// Whether `b` is of values that the softmax of `a` weighs, or the two are of few queries.
  bool weighs(const FusionGroup& a, const FusionGroup& b) const;
  /// Whether `a` is of tiles of scores on a grid, whose softmax `b` is.
  bool scores_on_grid(const FusionGroup& a, const FusionGroup& b) const;
  double elements(const std::string& buffer);
  /// Whether it multiplies a row, or a few, of each head by a matrix that changes from call to call.
  bool multiplies_heads(const NestGroup& nest) const { return products_of_heads(nest) > 0; }

 private:
  double points(const std::vector<loop_ir::Axis>& axes) const;
  /// Whether it holds a sum of products, of vectors as well.
  bool multiplies(const NestGroup& nest) const;
  double bytes_read_again(const NestGroup& joined) const;
  bool keep_rows(const NestGroup& rows, const NestGroup& joined, const std::set<std::string>& flow);
  bool has_columns(const NestGroup& nest, const std::vector<std::string>& shared) const;
  /// With `of`: of which an operand is made of one of these buffers.
  size_t products_of_heads(const NestGroup& nest, const std::set<std::string>* of = nullptr) const;
  bool has_narrow_heads(const FusionGroup& scores, const FusionGroup& readers, double shared);
  bool disturbs_attention(const FusionGroup& a, const FusionGroup& b, const AxisPairs& pairs, const std::set<std::string>& flow) const;
  bool chainable(const FusionGroup& a, const FusionGroup& b, const std::set<std::string>& flow);

  ProgramGraph& graph_;
  const PassContext& context_;
  mutable std::unordered_map<std::string, double> bytes_;  ///< of buffers, which keep their types while nests are fused
};

}  // namespace deplo
