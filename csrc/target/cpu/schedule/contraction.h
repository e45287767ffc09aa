#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/context.h"
#include "loop_ir/ir.h"
#include "schedule/schedule.h"
#include "tile_ir/ir.h"

namespace deplo {

/// An operand that a step before the kernel packs: a `once` step if nothing but static buffers goes into it, else one of each call.
struct PackedOperand {
  bool once = true;
  tile_ir::Kernel kernel;            ///< params: the sources, then the packed buffer
  std::vector<std::string> sources;  ///< params of the scheduled kernel, in the order of the pack kernel's
  std::string param;                 ///< name of the packed buffer among the scheduled kernel's params, appended in this order
  DType dtype = DType::f32;          ///< float32, or that of narrower weights, which the kernel widens as it reads them
  std::vector<Expr> shape;           ///< row-major
};

struct ProposedContraction {
  Schedule schedule;
  std::vector<Cond> unless;  ///< sizes at which a schedule that streams the operands as they lie is better: where any of these holds
};

/// All forms of such schedules that the kernel may have, whatever they are expected to cost: lanes along either operand, images under windows or
/// taps apart, operands packed once, once a call or block by block. Weights get no copies that propose_cpu_contraction does without.
std::vector<Schedule> propose_cpu_contractions(const loop_ir::Kernel& kernel, const std::set<std::string>& statics, const PassContext& ctx);

/// What a schedule takes for granted of a param's elements.
struct AssumedRange {
  std::string param;
  int64_t lo = 0;
  int64_t hi = 0;
};

constexpr const char* kCenteredVersion = "_few_bits_centered";

/// A schedule that packs weights in bytes as 4-bit codes, and what must hold for it.
struct FewBits {
  std::string version;  ///< what the kernel's name ends in
  Schedule schedule;
  std::vector<AssumedRange> ranges;
};
/// Those that are possible, the one that takes most for granted first: that zero points are 0, which then are not read.
std::vector<FewBits> propose_few_bits(const loop_ir::Kernel& kernel, const std::set<std::string>& statics, const PassContext& ctx);

struct ScheduledContraction {
  tile_ir::Kernel kernel;
  std::vector<PackedOperand> packed;
};

/// Proposes a schedule of kind `contraction` for a kernel whose outer nest holds contractions and straight-line statements. Of the two operands of a
/// contraction, the one that varies along the store's contiguous axis gets the vector lanes (panels [k][NR]), the other one is broadcast row by row
/// (panels [k][MR]); an MR x NR block accumulates in registers over KC steps of k and is added to a tile of the result in
/// scratch memory, over which the remaining statements run while it is in cache; few and simple ones end the last block of k in registers. Operands
/// made of `statics` alone are packed once, others per block or once a call, in all cases with whatever computes them (casts, scales, padding). An
/// image under overlapping windows is packed as it lies, once for all taps. Nothing if the kernel is not of this form, or if streaming the operands
/// as they lie is better (one or two rows) at all sizes.
std::optional<ProposedContraction> propose_cpu_contraction(const loop_ir::Kernel& kernel, const std::set<std::string>& statics,
                                                           const PassContext& ctx);
/// Throws UserError where the schedule does not fit the kernel.
ScheduledContraction apply_cpu_contraction(const loop_ir::Kernel& kernel, const Schedule& schedule, const std::set<std::string>& statics,
                                           const PassContext& ctx);

/// A block of rows inside of which a contraction runs as one phase among others.
struct ContractionRows {
  std::string tag;    ///< makes names of this phase differ from those of others
  std::string axis;   ///< the axis of the kernel's outer nest whose iterations are the rows
  int64_t count = 0;  ///< rows of a block
  Expr first;
  Expr valid;          ///< rows of this block that exist
  Substitution outer;  ///< what stands for the other shared axes and symbols
};

/// Rows that arrays over a block of `rows` rows must have: whole register blocks.
int64_t contraction_rows(int64_t rows, const PassContext& ctx);

/// How such a kernel runs for one block of rows; the outer nest's axes that `rows` does not bind become lanes. Nothing if the kernel is not of
/// this form.
std::optional<std::vector<Directive>> propose_contraction_rows(const loop_ir::Kernel& kernel, const ContractionRows& rows, const PassContext& ctx);
/// The statements that do so. Throws UserError where the schedule does not fit.
tile_ir::Block apply_contraction_rows(const loop_ir::Kernel& kernel, const ContractionRows& rows, const Schedule& schedule, const PassContext& ctx);

}  // namespace deplo
