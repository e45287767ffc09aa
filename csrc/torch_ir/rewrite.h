#pragma once

#include <map>
#include <string>

#include "torch_ir/ir.h"

namespace deplo::torch_ir {

using Renaming = std::map<std::string, std::string>;

void rename(std::string& value, const Renaming& names);
/// The attribute with the values in it renamed, lists included.
void rename(Attribute& attribute, const Renaming& names);
/// The node with its operands (not its results) renamed; the same Ref if none is in `names`.
Ref<Node> rename_operands(const Ref<Node>& node, const Renaming& names);

}  // namespace deplo::torch_ir
