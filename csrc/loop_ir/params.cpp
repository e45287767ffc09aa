#include "loop_ir/params.h"

#include <algorithm>
#include <set>
#include <unordered_map>

#include "base/error.h"

namespace deplo::loop_ir {
namespace {

struct Collector {
  std::vector<Access> list;
  std::unordered_map<std::string, size_t> position;
  std::set<std::string> locals;

  void touch(const std::string& buffer, bool reads, bool writes) {
    if (locals.count(buffer)) return;
    auto [it, added] = position.emplace(buffer, list.size());
    if (added) list.push_back({buffer, false, false});
    list[it->second].reads |= reads;
    list[it->second].writes |= writes;
  }

  void block(const Block& body) {
    for (const auto& stmt : body)
      std::visit(Overloaded{[](const Let&) {}, [&](const Load& s) { touch(s.buffer, true, false); },
                            [&](const Store& s) { touch(s.buffer, s.combiner != Combiner::set, true); }, [&](const For& s) { block(s.body); },
                            [&](const Reduce& s) { block(s.body); },
                            [&](const Scan& s) {
                              block(s.body);
                              block(s.then);
                            },
                            [&](const Local& s) { locals.insert(s.name); }, [](const Check&) {}},
                 stmt->node);
  }
};

}  // namespace

std::vector<Access> accesses(const Block& block) {
  Collector collector;
  collector.block(block);
  return std::move(collector.list);
}

std::vector<Param> make_params(const Block& body, const ProgramBody& program, const std::vector<std::string>& updated) {
  std::vector<Param> inputs;
  std::vector<Param> outputs;
  for (const Access& access : accesses(body)) {
    const Buffer* b = program.find_buffer(access.buffer);
    DEPLO_ASSERT(b, "a kernel touches {}, which the program does not declare", access.buffer);
    bool keeps = std::find(updated.begin(), updated.end(), b->name) != updated.end();
    ParamKind kind = !access.writes ? ParamKind::in : keeps || access.reads ? ParamKind::inout : ParamKind::out;
    (access.writes ? outputs : inputs).push_back({b->name, kind, b->dtype, b->shape, b->strides, b->is_static});
  }
  inputs.insert(inputs.end(), outputs.begin(), outputs.end());
  return inputs;
}

}  // namespace deplo::loop_ir
