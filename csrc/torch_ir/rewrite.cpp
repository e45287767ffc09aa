#include "torch_ir/rewrite.h"

#include <algorithm>

namespace deplo::torch_ir {

void rename(std::string& value, const Renaming& names) {
  if (auto it = names.find(value); it != names.end()) value = it->second;
}

void rename(Attribute& attribute, const Renaming& names) {
  if (auto* value = std::get_if<ValueName>(&attribute.value)) rename(value->name, names);
  if (auto* list = std::get_if<std::vector<Attribute>>(&attribute.value))
    for (Attribute& item : *list) rename(item, names);
}

Ref<Node> rename_operands(const Ref<Node>& node, const Renaming& names) {
  Node copy = *node;
  for (auto& [name, value] : copy.arguments) rename(value, names);
  return copy == *node ? node : std::make_shared<Node>(std::move(copy));
}

bool are_alike(const Attribute& a, const Attribute& b) {
  if (std::holds_alternative<ValueName>(a.value)) return std::holds_alternative<ValueName>(b.value);
  const auto* list = std::get_if<std::vector<Attribute>>(&a.value);
  const auto* other = std::get_if<std::vector<Attribute>>(&b.value);
  if (!list || !other) return a == b;
  return std::ranges::equal(*list, *other, [](const Attribute& x, const Attribute& y) { return are_alike(x, y); });
}

}  // namespace deplo::torch_ir
