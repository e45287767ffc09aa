#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "analysis/conditions.h"
#include "analysis/contraction.h"
#include "loop_ir/ir.h"

namespace deplo::analysis {

/// For each point of a kernel's outer axes, what these statements, in this order and no other loops, compute over one axis of keys:
///
///   score[j] = f(sum over k of query[k] * key[j, k], j)          `scores`, in a nest over j
///   u[j]     = g(score[j], j)                                     `read`: mostly score[j] itself, or -inf where a guard fails
///   max      = max of u[j]
///   max      = max(max, extra)                                    only if there is an `extra`: a sink
///   w[j]     = exp(u[j] - max)
///   sum      = sum of w[j]
///   sum      = sum + exp(extra - max)                             as above
///   w[j]     = w[j] / sum                                         only if `normalized`, maybe rounded
///   y[d]     = h(sum over j of w[j] * value[j, d], max, sum, d)   `values`, in a nest over d
///
/// So the keys may be taken in blocks, with a maximum so far: weights of earlier blocks are then scaled by exp(old - new maximum), and the division
/// comes last. Keys whose u is -inf may be left out.
struct WeightedSum {
  /// Both sums of products, where they are contractions, and their operands but for the weights.
  struct Contractions {
    Contraction scores, values;
    ContractionOperand queries, keys, value;
  };
  std::optional<Contractions> contractions;
  std::vector<const loop_ir::Stmt*> over_keys;  ///< the loops and reductions over keys, in order
  loop_ir::Axis key;                            ///< of the nest of scores
  loop_ir::Axis column;                         ///< of the nest of values
  loop_ir::Block score;                         ///< what the nest of scores holds besides its reduction, the store left out
  std::string scored;                           ///< the value that it stores
  loop_ir::Block read;                          ///< of the reduction to the maximum: computes `read_value` at `read_axis`
  std::string read_axis, read_value;
  std::string local;                 ///< the buffer of scores, which one statement of `read` loads
  std::string max, sum;              ///< values that later statements may use
  std::optional<std::string> extra;  ///< a number of the row that counts as one more score, without a value
  bool normalized = false;
  bool rounded = false;        ///< weights are rounded to 16 bits before they are multiplied
  loop_ir::Block rows;         ///< the straight-line statements of the outer nest, in order; not those that count `extra` in
  size_t before = 0;           ///< how many of them come before the nest of values
  loop_ir::Block column_body;  ///< of the nest of values
};

/// Such a sum, if it is all that the kernel's outer nest holds. `inner`: what the nest holds; `vectors`: contractions may be of one query.
std::optional<WeightedSum> find_weighted_sum(const loop_ir::Kernel& kernel, const loop_ir::Block& inner, bool vectors = false);

/// What guards, and comparisons of integers that choose between a score and -inf, say about the keys that count: u[j] is -inf for others.
std::vector<KeyLimit> key_limits(const WeightedSum& sum);
/// Those besides where u[j] is at most kMaskedScore: such keys weigh nothing in rows whose maximum is above kLeastMaximum. Scores themselves, to
/// which masks add least numbers, are supposed to be smaller than the difference of both.
std::vector<KeyLimit> soft_key_limits(const WeightedSum& sum);
constexpr double kMaskedScore = -1e30;
constexpr double kLeastMaximum = -1e29;

/// Rows up to which a CPU reads keys and values where they lie, some rows side by side, instead of packing them.
constexpr int64_t kFewQueries = 16;

/// Keys in parts: block b of kKeyBlock keys is in part b mod `parts`, so that parts of what a mask leaves are equal.
constexpr int64_t kKeyBlock = 64;
Cond in_part(Expr key, Expr part, int64_t parts);
struct KeyPart {
  loop_ir::Axis axis;  ///< of the outer nest
  Cond cond;           ///< in_part
};
/// Such a condition among the guards of a sum whose other keys read -inf.
std::optional<KeyPart> key_part(const WeightedSum& sum, const std::vector<loop_ir::Axis>& nest);
/// How many parts a kernel's keys are in; 1 where they are in none.
int64_t parts_of_keys(const loop_ir::Kernel& kernel);

}  // namespace deplo::analysis
