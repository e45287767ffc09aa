#include "passes/loop/repeats.h"

namespace deplo {

size_t& Repeats::made() {
  thread_local size_t count = 0;
  return count;
}

std::unordered_map<std::string, std::string> renaming(const std::vector<std::string>& names, const std::vector<std::string>& others) {
  std::unordered_map<std::string, std::string> result;
  for (size_t k = 0; k < names.size(); ++k)
    if (names[k] != others[k]) result.emplace(names[k], others[k]);
  return result;
}

loop_ir::Block Repeats::operator()(const loop_ir::Block& body, const Make& make, const Describe& describe) {
  if (!on_) return make();
  std::vector<std::string> buffers;
  loop_ir::Structure key;
  key.add(loop_ir::structure_of(body, buffers));
  if (describe) describe(key, buffers);
  std::string known = key.take();
  if (unchanged_.contains(known)) return body;
  const bool is_new = !results_.contains(known);
  loop_ir::Block result = (*this)(known, std::move(buffers), make);
  if (!is_new || !(result == body)) return result;
  unchanged_.insert(std::move(known));
  return body;
}

loop_ir::Block Repeats::operator()(std::string key, std::vector<std::string> buffers, const Make& make) {
  if (!on_) return make();
  auto it = results_.find(key);
  if (it == results_.end()) {
    ++made();
    return results_.emplace(std::move(key), Result{make(), std::move(buffers)}).first->second.block;
  }
  const auto names = renaming(it->second.buffers, buffers);
  return names.empty() ? it->second.block : loop_ir::rename_buffers(it->second.block, names);
}

}  // namespace deplo
