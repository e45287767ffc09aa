#pragma once

#include <map>
#include <string>
#include <variant>
#include <vector>

#include "torch_ir/ir.h"

namespace deplo::torch_ir {

using Renaming = std::map<std::string, std::string>;

void rename(std::string& value, const Renaming& names);
/// The attribute with the values in it renamed, lists included.
void rename(Attribute& attribute, const Renaming& names);
/// The node with its operands (not its results) renamed; the same Ref if none is in `names`.
Ref<Node> rename_operands(const Ref<Node>& node, const Renaming& names);

/// Equal but for the names of values.
bool are_alike(const Attribute& a, const Attribute& b);
/// Calls f(name) for each value in the attribute, in order, lists included.
template <class F>
void for_each_value(const Attribute& attribute, const F& f) {
  if (const auto* value = std::get_if<ValueName>(&attribute.value)) f(value->name);
  if (const auto* list = std::get_if<std::vector<Attribute>>(&attribute.value))
    for (const Attribute& item : *list) for_each_value(item, f);
}

}  // namespace deplo::torch_ir
