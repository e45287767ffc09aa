#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "analysis/contraction.h"
#include "passes/loop/share_axes.h"

namespace deplo {

/// A buffer of the program by its name.
using BufferOf = std::function<const Buffer&(const std::string&)>;

/// Whether an operand stays the same between calls, so that it is packed once.
bool is_packed_once(const analysis::ContractionOperand& operand, const BufferOf& buffer);

/// A nest of contractions with those of its axes split that `reader` sees as several: the rows of a batch of sequences, the heads of a layer.
/// `flow` are the buffers that the reader reads of it. Nothing if there is none, or if the reader's stores would cost the contraction its lanes:
/// they may have the parts beside each other, as the whole was, or whole vectors of the innermost one, or run along no part, or leave the lanes to
/// weights that are packed once.
std::optional<NestGroup> split_for_reader(const NestGroup& nest, const std::vector<analysis::Contraction>& contractions, const NestGroup& reader,
                                          const std::set<std::string>& flow, const BufferOf& buffer, const Ranges& symbols, loop_ir::Names& names);

}  // namespace deplo
