#pragma once

#include <string>
#include <vector>

#include "passes/loop/share_axes.h"

namespace deplo {

/// Index-set splitting (Griebl, Feautrier, Lengauer, "Index Set Splitting", 2000): the perfect nest as several that together visit its points,
/// each once, such that the guards of loads that bound one axis (i < 48) are decided in every one of them: a concatenation falls apart into its
/// operands, a padding into border and image. The one nest that was given where there is nothing to split, or more than `most`.
std::vector<NestGroup> split_index_set(const NestGroup& nest, const Ranges& symbols, size_t most);

/// The nest with the axes of what it stores in `buffer` cut to what `reader`, its only one, reads of them; unchanged if it stores anything else.
NestGroup cut_to_reader(const NestGroup& nest, const NestGroup& reader, const std::string& buffer, const Ranges& symbols);

}  // namespace deplo
