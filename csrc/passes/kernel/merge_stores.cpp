#include "passes/kernel/merge_stores.h"

#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "kernel_ir/rewrite.h"

namespace deplo {
namespace {

using namespace kernel_ir;

constexpr size_t kReach = 256;  // statements between two stores, at most

using Types = std::map<std::string, Type>;

void note_type(const Stmt& stmt, Types& types) {
  std::visit(
      [&](const auto& s) {
        if constexpr (requires {
                        s.name;
                        s.type;
                      })
          types[s.name] = s.type;
      },
      stmt.node);
}

bool steps_by_two(const Store& s) { return s.stride.is(2) && s.gather.empty() && s.combiner == Combiner::set && !s.atomic; }

std::optional<int64_t> distance(const Store& a, const Store& b) {
  Expr d = simplify(b.offset - a.offset, Ranges{});
  return d.is_constant() ? std::optional(d.value()) : std::nullopt;
}

class Merger {
 public:
  Block block(const Block& statements, Types types) {
    for (const auto& stmt : statements) note_type(*stmt, types);
    Block out;
    std::map<size_t, Block> merged;  // by the place of the second store
    bool changed = false;
    for (size_t i = 0; i < statements.size(); ++i) {
      const auto& stmt = statements[i];
      if (auto at = merged.find(i); at != merged.end()) {
        out.insert(out.end(), at->second.begin(), at->second.end());
        continue;
      }
      if (const Store* store = mergeable(stmt, types)) {
        if (auto second = partner(statements, i, types); second && !merged.count(*second)) {
          merged[*second] = interleaved(*store, std::get<Store>(statements[*second]->node), types.at(store->value));
          changed = true;
          continue;
        }
      }
      Ref<Stmt> kept = nested(stmt, types);
      changed = changed || kept != stmt;
      out.push_back(std::move(kept));
    }
    return changed ? out : statements;
  }

 private:
  /// A store of a whole vector of known type to every other element.
  static const Store* mergeable(const Ref<Stmt>& stmt, const Types& types) {
    const auto* store = std::get_if<Store>(&stmt->node);
    if (!store || !steps_by_two(*store)) return nullptr;
    const auto type = types.find(store->value);
    return type != types.end() && type->second.lanes > 1 ? store : nullptr;
  }

  Ref<Stmt> nested(const Ref<Stmt>& stmt, const Types& types) {
    if (const auto* loop = std::get_if<For>(&stmt->node)) {
      For copy = *loop;
      copy.body = block(loop->body, types);
      return copy.body == loop->body ? stmt : make_stmt(std::move(copy));
    }
    if (const auto* branch = std::get_if<If>(&stmt->node)) {
      If copy = *branch;
      copy.then = block(branch->then, types);
      copy.otherwise = block(branch->otherwise, types);
      return copy.then == branch->then && copy.otherwise == branch->otherwise ? stmt : make_stmt(std::move(copy));
    }
    return stmt;
  }

  /// The store that fills the other places of store i, which may be made as late as that one: those between are as wide and lie elsewhere.
  static std::optional<size_t> partner(const Block& statements, size_t i, const Types& types) {
    const Store& first = std::get<Store>(statements[i]->node);
    const Type type = types.at(first.value);
    for (size_t j = i + 1; j < statements.size() && j <= i + kReach; ++j) {
      const auto& node = statements[j]->node;
      if (std::holds_alternative<For>(node) || std::holds_alternative<If>(node) || std::holds_alternative<Alloc>(node) ||
          std::holds_alternative<Assign>(node) || std::holds_alternative<Barrier>(node) || std::holds_alternative<Matrix>(node) ||
          std::holds_alternative<CopyAsync>(node) || std::holds_alternative<CopyGroup>(node) || std::holds_alternative<Mma>(node) ||
          std::holds_alternative<MultiplyGroup>(node))
        return std::nullopt;
      if (const auto* load = std::get_if<Load>(&node); load && load->buffer == first.buffer) return std::nullopt;
      const auto* any = std::get_if<Store>(&node);
      if (!any || any->buffer != first.buffer) continue;
      const Store* store = mergeable(statements[j], types);
      if (!store || types.at(store->value) != type) return std::nullopt;
      const auto apart = distance(first, *store);
      if (!apart) return std::nullopt;
      if (std::abs(*apart) == 1) return store->mask == first.mask ? std::optional(j) : std::nullopt;
      if (*apart % 2 == 0 && std::abs(*apart) < 2 * int64_t{type.lanes}) return std::nullopt;
    }
    return std::nullopt;
  }

  /// Of lanes and their mask alike.
  Block interleaved(const Store& a, const Store& b, Type type) {
    const bool in_order = *distance(a, b) > 0;
    const Store& even = in_order ? a : b;
    const Store& odd = in_order ? b : a;
    const std::string name = a.value + ".z" + std::to_string(count_++);
    Block out;
    for (int part : {0, 1}) {
      Shuffle both{name + (part == 0 ? "l" : "h"), type, even.value, odd.value, {}};
      for (int l = 0; l < type.lanes; ++l) both.lanes.push_back((l % 2 == 0 ? 0 : type.lanes) + (l + part * type.lanes) / 2);
      Store whole = even;
      whole.offset = simplify(even.offset + part * type.lanes, Ranges{});
      whole.stride = 1;
      whole.value = both.name;
      if (!even.mask.empty()) {
        Shuffle mask{both.name + "m", {DType::boolean, type.lanes}, even.mask, "", {}};
        for (int l = 0; l < type.lanes; ++l) mask.lanes.push_back((l + part * type.lanes) / 2);
        whole.mask = mask.name;
        out.push_back(make_stmt(std::move(mask)));
      }
      out.push_back(make_stmt(std::move(both)));
      out.push_back(make_stmt(std::move(whole)));
    }
    return out;
  }

  int count_ = 0;
};

}  // namespace

kernel_ir::Module merge_stores(kernel_ir::Module module, const PassContext& /*ctx*/) {
  return with_bodies(std::move(module), [](const Kernel& kernel) {
    bool found = false;
    visit_all(kernel.body, [&](const Stmt& s) {
      if (const auto* store = std::get_if<Store>(&s.node)) found = found || steps_by_two(*store);
    });
    return found ? Merger().block(kernel.body, {}) : kernel.body;
  });
}

}  // namespace deplo
