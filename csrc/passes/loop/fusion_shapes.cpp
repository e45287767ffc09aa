#include "passes/loop/fusion_shapes.h"

#include <algorithm>

namespace deplo {

using loop_ir::Structure;

size_t FusionShapes::type_of(const std::string& buffer) {
  auto [it, fresh] = type_names_.try_emplace(buffer);
  if (!fresh) return it->second;
  Structure type;
  if (const Buffer* b = graph_.find_buffer(buffer)) {
    type.add(static_cast<char>(b->dtype));
    type.add(static_cast<char>(b->kind));
    type.add(static_cast<char>(b->is_static));
    type.add(b->shape);
    type.add(b->strides);
  }
  return it->second = types_.try_emplace(type.take(), types_.size()).first->second;
}

std::string FusionShapes::key_of(const loop_ir::Block& body, std::vector<std::string>& buffers) {
  Structure key;
  key.add(loop_ir::structure_of(body, buffers));
  for (const std::string& b : buffers) key.add(type_of(b));
  return key.take();
}

std::string FusionShapes::key_of(size_t first, const FusionInstance& a, size_t second, const FusionInstance& b, const std::set<std::string>& flow,
                                 bool by_input, bool one_after_the_other) {
  Structure key;
  key.add(static_cast<char>(by_input));
  key.add(static_cast<char>(one_after_the_other));
  key.add(a.shape->id);
  key.add(b.shape->id);
  std::unordered_map<std::string, size_t> places;
  for (size_t k = 0; k < a.buffers.size(); ++k) places.emplace(a.buffers[k], k);
  for (const std::string& name : b.buffers) {
    auto it = places.find(name);
    key.add(it == places.end() ? a.buffers.size() : it->second);
  }
  if (by_input) {  // what both read decides, and how much that is
    for (const std::string& name : a.buffers) key.add(static_cast<char>(graph_.nodes()[first].reads.count(name)));
    for (const std::string& name : b.buffers) key.add(static_cast<char>(graph_.nodes()[second].reads.count(name)));
    return key.take();
  }
  for (const std::string& name : a.buffers)
    if (flow.count(name)) {
      key.add(places.at(name));
      key.add(static_cast<char>(graph_.is_private(name)));
    }
  return key.take();
}

std::shared_ptr<const FusionShape> FusionShapes::make(const FusionGroup& group, const loop_ir::Names& names, bool is_pointwise,
                                                      const std::vector<std::string>& buffers) {
  return std::make_shared<const FusionShape>(FusionShape{next_++, group, names, is_pointwise, buffers});
}

std::vector<std::string> FusionShapes::joined(const FusionInstance& a, const FusionInstance& b) {
  std::vector<std::string> all = a.buffers;
  const std::set<std::string> known(all.begin(), all.end());
  for (const std::string& name : b.buffers)
    if (!known.count(name)) all.push_back(name);
  return all;
}

}  // namespace deplo
