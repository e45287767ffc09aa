#include "passes/loop/narrow_buffers.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>

#include "analysis/casts.h"
#include "passes/loop/program_graph.h"

namespace deplo {
namespace {

using namespace loop_ir;

/// A factor that the kernel itself makes, for which a buffer is to be added, with the loops around it as dimensions.
struct Made {
  std::string value;
  DType dtype = DType::f32;
  std::vector<Axis> axes;
};

/// A value as a chain of functions of one narrower value, in the order in which they apply. Their other operands are constants, or factors: values
/// that a reader can load, too, and that are the same for many elements.
struct Recipe {
  std::string base;
  DType dtype = DType::f32;  ///< of the base
  std::vector<Let> steps;    ///< `base` and results stand under the names that they have in the body they are from
  std::map<std::string, Scalar> constants;
  Block factors;  ///< the statements that make them; of what is `made` a load from a buffer that has its name
  std::vector<Made> made;
  std::vector<Expr> index;  ///< of the store, whose axes the factors' loads may use

  /// Whether both do the same, whatever the names.
  bool same(const Recipe& other) const {
    if (dtype != other.dtype || steps.size() != other.steps.size() || !factors.empty() || !other.factors.empty()) return false;
    for (size_t n = 0; n < steps.size(); ++n) {
      const Let& a = steps[n];
      const Let& b = other.steps[n];
      if (a.fn != b.fn || a.dtype != b.dtype || a.operands.size() != b.operands.size()) return false;
      for (size_t i = 0; i < a.operands.size(); ++i) {
        auto x = constants.find(a.operands[i]);
        auto y = other.constants.find(b.operands[i]);
        if ((x == constants.end()) != (y == other.constants.end())) return false;
        if (x != constants.end() && !(x->second == y->second)) return false;
      }
    }
    return true;
  }

  Scalar of(const Scalar& from) const {
    std::map<std::string, Scalar> values = constants;
    values[base] = from;
    Scalar last = from;
    for (const Let& step : steps) {
      std::vector<Scalar> operands;
      for (const std::string& operand : step.operands) operands.push_back(values.at(operand));
      last = apply(step.fn, step.dtype, operands.data(), Mode::typed, nullptr);
      values[step.name] = last;
    }
    return last;
  }

  /// What the narrower buffer must give where a guard of the wider one's fails.
  std::optional<Scalar> fill_for(const Scalar& wanted) const {
    if (!factors.empty()) return std::nullopt;
    auto gives = [&](const Scalar& from) { return of(from) == wanted; };
    if (const Scalar zero = zero_of(dtype); gives(zero)) return zero;
    if (dtype != DType::u8 && dtype != DType::i8) return std::nullopt;
    for (int64_t n = dtype == DType::u8 ? 0 : -128, end = n + 256; n < end; ++n)
      if (const Scalar from = Scalar::of_int(dtype, n); gives(from)) return from;
    return std::nullopt;
  }
};

/// What a reader may compute again for each element, beside casts: a zero point and a scale, say.
constexpr int kMostSteps = 2;

struct Recipes {
  std::map<std::string, const Let*> lets;
  std::map<std::string, DType> dtypes;
  std::map<std::string, Ref<Stmt>> statements;
  std::map<std::string, std::vector<Axis>> around;  ///< the loops around what makes a value

  explicit Recipes(const Block& body) {
    visit(body, [&](const Stmt& stmt, const std::vector<Axis>& loops) {
      if (const auto* reduce = std::get_if<Reduce>(&stmt.node)) {
        for (size_t i = 0; i < reduce->results.size(); ++i) {
          dtypes[reduce->results[i]] = reduce->dtypes[i];
          around[reduce->results[i]] = loops;
        }
      }
      if (const auto* load = std::get_if<Load>(&stmt.node)) {
        dtypes[load->name] = load->dtype;
        around[load->name] = loops;
        statements[load->name] = make_stmt(*load);
      }
      const auto* let = std::get_if<Let>(&stmt.node);
      if (!let) return;
      lets[let->name] = let;
      dtypes[let->name] = let->dtype;
      around[let->name] = loops;
      statements[let->name] = make_stmt(*let);
    });
  }

  /// Appends the statements that make a factor: casts of an element whose place follows from some of the store's axes, but not from all.
  bool add_factor(const std::string& value, const std::vector<Expr>& index, Block& into) const {
    auto it = statements.find(value);
    if (it == statements.end()) return false;
    if (const auto* let = std::get_if<Let>(&it->second->node)) {
      if (let->fn != Fn::cast || !add_factor(let->operands[0], index, into)) return false;
      into.push_back(it->second);
      return true;
    }
    const Load& load = std::get<Load>(it->second->node);
    std::set<std::string> axes;
    for (Expr e : load.index) collect_symbols(e, axes);
    auto is_own = [&](const std::string& axis) { return std::find(index.begin(), index.end(), Expr::symbol(axis)) != index.end(); };
    const auto dimensions = std::count_if(index.begin(), index.end(), [](Expr e) { return !e.is_constant(); });
    if (!load.guard.empty() || static_cast<std::ptrdiff_t>(axes.size()) >= dimensions || !std::all_of(axes.begin(), axes.end(), is_own)) return false;
    into.push_back(it->second);
    return true;
  }

  /// Appends a factor that is made outside of some of the loops around the store.
  bool make_factor(const std::string& value, Recipe& into) const {
    auto loops = around.find(value);
    auto dtype = dtypes.find(value);
    if (loops == around.end() || dtype == dtypes.end()) return false;
    std::vector<Expr> places;
    for (const Axis& axis : loops->second) {
      places.push_back(Expr::symbol(axis.name));
      if (std::find(into.index.begin(), into.index.end(), places.back()) == into.index.end()) return false;
    }
    const auto dimensions = std::count_if(into.index.begin(), into.index.end(), [](Expr e) { return !e.is_constant(); });
    if (static_cast<std::ptrdiff_t>(places.size()) >= dimensions) return false;
    if (places.empty()) places.emplace_back(0);
    into.factors.push_back(make_stmt(Load{value, dtype->second, value, std::move(places), {}, {}}));
    into.made.push_back({value, dtype->second, loops->second});
    return true;
  }

  const Let* constant(const std::string& value) const {
    auto it = lets.find(value);
    return it != lets.end() && it->second->fn == Fn::constant ? it->second : nullptr;
  }

  static bool is_cheap(const Let& let) { return let.fn == Fn::cast || let.fn == Fn::sub || let.fn == Fn::add || let.fn == Fn::mul; }

  /// The recipe from the narrowest value on: a cast that loses nothing, or some steps from a byte.
  std::optional<Recipe> of(const std::string& value, const std::vector<Expr>& index) const {
    std::optional<Recipe> found;
    Recipe so_far;
    so_far.index = index;
    std::string at = value;
    int arithmetic = 0;
    while (true) {
      auto it = lets.find(at);
      if (it == lets.end() || !is_cheap(*it->second)) break;
      if (it->second->fn != Fn::cast && ++arithmetic > kMostSteps) break;
      std::string next;
      bool single = true;
      const auto& operands = it->second->operands;
      for (size_t n = 0; n < operands.size(); ++n) {
        if (const Let* c = constant(operands[n])) {
          so_far.constants[operands[n]] = c->literal;
          continue;
        }
        // What is quantised comes first.
        const size_t before = so_far.factors.size();
        if (n > 0 && !next.empty() && add_factor(operands[n], index, so_far.factors)) continue;
        so_far.factors.resize(before);
        if (n > 0 && !next.empty() && make_factor(operands[n], so_far)) continue;
        single = single && next.empty();
        next = operands[n];
      }
      auto dtype = dtypes.find(next);
      if (!single || dtype == dtypes.end()) break;
      so_far.steps.insert(so_far.steps.begin(), *it->second);
      so_far.base = at = next;
      so_far.dtype = dtype->second;
      const bool cast_alone = so_far.steps.size() == 1 && analysis::is_lossless(so_far.dtype, so_far.steps[0].dtype);
      const bool byte = so_far.dtype == DType::u8 || so_far.dtype == DType::i8;
      if ((cast_alone || byte) && size_of(so_far.dtype) < size_of(dtypes.at(value)) && (!found || size_of(so_far.dtype) < size_of(found->dtype)))
        found = so_far;
    }
    return found;
  }
};

struct Narrower {
  ProgramGraph graph;

  static bool is_made(const Recipe& recipe, const std::string& value) {
    return std::any_of(recipe.made.begin(), recipe.made.end(), [&](const Made& made) { return made.value == value; });
  }

  /// Adds the buffers of factors that the writer makes.
  void store_factors(size_t writer, Recipe& recipe) {
    for (const Made& made : recipe.made) {
      std::vector<Expr> shape;
      for (const Axis& axis : made.axes) shape.push_back(axis.extent);
      if (shape.empty()) shape.emplace_back(1);
      const std::string buffer = graph.add_buffer("factor0", made.dtype, shape);
      for (auto& factor : recipe.factors) {
        const auto* load = std::get_if<Load>(&factor->node);
        if (!load || load->name != made.value) continue;
        Load from = *load;
        from.buffer = buffer;
        factor = make_stmt(from);
        const Store store{buffer, from.index, made.value, {}, Combiner::set};
        graph.set_body(writer, rewrite(graph.nodes()[writer].body, [&](const Ref<Stmt>& stmt) -> Block {
                         const auto* let = std::get_if<Let>(&stmt->node);
                         const auto* read = std::get_if<Load>(&stmt->node);
                         const auto* reduce = std::get_if<Reduce>(&stmt->node);
                         const bool makes = (let && let->name == made.value) || (read && read->name == made.value) ||
                                            (reduce && std::count(reduce->results.begin(), reduce->results.end(), made.value) > 0);
                         return makes ? Block{stmt, make_stmt(store)} : Block{stmt};
                       }));
      }
    }
  }

  /// What all stores to the buffer store.
  std::optional<Recipe> recipe_of(const std::string& name) {
    if (graph.find_buffer(name)->kind != BufferKind::temp || !graph.is_private(name)) return std::nullopt;
    const auto& writers = graph.writers(name);
    if (writers.size() != 1) return std::nullopt;
    const auto& node = graph.nodes()[writers[0]];
    if (!node.alive || !node.is_kernel || node.updated.count(name)) return std::nullopt;
    const Recipes recipes(node.body);
    std::optional<Recipe> found;
    bool fits = true;
    size_t stores = 0;
    bool own = true;
    visit(node.body, [&](const Stmt& stmt, const std::vector<Axis>& loops) {
      const auto* store = std::get_if<Store>(&stmt.node);
      if (!store || store->buffer != name) return;
      for (Expr e : store->index) {
        const bool is_axis = std::any_of(loops.begin(), loops.end(), [&](const Axis& axis) { return e == Expr::symbol(axis.name); });
        own = own && (e.is_constant() || is_axis);
      }
      auto recipe = recipes.of(store->value, store->index);
      fits = fits && store->combiner == Combiner::set && recipe && (!found || found->same(*recipe));
      if (fits && !found) found = recipe;
      ++stores;
    });
    if (found && !found->factors.empty()) {
      // Each element of the buffer stands for itself, and factors stay as they are until the last reader.
      fits = fits && stores == 1 && own;
      for (const auto& factor : found->factors)
        if (const auto* load = std::get_if<Load>(&factor->node); load && !is_made(*found, load->name))
          fits = fits && graph.find_buffer(load->buffer) && !graph.is_versioned(load->buffer) && node.writes.count(load->buffer) == 0;
    }
    if (!fits || !found) return std::nullopt;
    auto reads = [&](const Stmt& stmt, const auto&) {
      const auto* load = std::get_if<Load>(&stmt.node);
      if (load && load->buffer == name && !load->guard.empty()) fits = fits && found->fill_for(load->fill);
    };
    visit(node.body, reads);
    for (size_t reader : graph.readers(name)) {
      if (!graph.nodes()[reader].is_kernel) return std::nullopt;
      visit(graph.nodes()[reader].body, reads);
    }
    return fits ? found : std::nullopt;
  }

  static Block narrowed(const Block& body, const std::string& name, const Recipe& recipe) {
    Kernel kernel;
    kernel.body = body;
    Names names;
    names.reserve(kernel);
    const Recipes recipes(body);
    return rewrite(body, [&](const Ref<Stmt>& stmt) -> Block {
      if (const auto* store = std::get_if<Store>(&stmt->node); store && store->buffer == name) {
        Store s = *store;
        s.value = recipes.of(s.value, s.index)->base;
        return {make_stmt(std::move(s))};
      }
      const auto* load = std::get_if<Load>(&stmt->node);
      if (!load || load->buffer != name) return {stmt};
      Load s = *load;
      s.name = names.fresh(load->name);
      s.dtype = recipe.dtype;
      s.fill = load->guard.empty() ? zero_of(recipe.dtype) : *recipe.fill_for(load->fill);
      std::map<std::string, std::string> renamed{{recipe.base, s.name}};
      Block out{make_stmt(std::move(s))};
      Renaming places;
      for (size_t d = 0; d < recipe.index.size(); ++d)
        if (!recipe.index[d].is_constant()) places.exprs[recipe.index[d].name()] = load->index[d];
      for (const auto& factor : recipe.factors) {
        const auto* let = std::get_if<Let>(&factor->node);
        const std::string& name = let ? let->name : std::get<Load>(factor->node).name;
        if (renamed.count(name) > 0) continue;
        const std::string fresh = names.fresh(load->name);
        for (auto& copy : copy_block({factor}, places, nullptr)) {
          Stmt changed = *copy;
          if (auto* c = std::get_if<Let>(&changed.node)) {
            c->name = fresh;
            for (std::string& operand : c->operands) operand = renamed.at(operand);
          } else {
            std::get<Load>(changed.node).name = fresh;
          }
          out.push_back(make_stmt(changed.node));
        }
        renamed[name] = fresh;
      }
      for (const auto& [constant, literal] : recipe.constants) {
        Let let;
        let.name = renamed[constant] = names.fresh(load->name);
        let.dtype = literal.dtype;
        let.literal = literal;
        out.push_back(make_stmt(std::move(let)));
      }
      for (size_t n = 0; n < recipe.steps.size(); ++n) {
        Let step = recipe.steps[n];
        const std::string to = n + 1 == recipe.steps.size() ? load->name : names.fresh(load->name);
        for (std::string& operand : step.operands) operand = renamed.at(operand);
        renamed[step.name] = to;
        step.name = to;
        out.push_back(make_stmt(std::move(step)));
      }
      return out;
    });
  }

  Module run() {
    std::vector<std::string> buffers;
    for (const Buffer& buffer : graph.program().buffers) buffers.push_back(buffer.name);
    for (const std::string& name : buffers) {
      auto recipe = recipe_of(name);
      if (!recipe) continue;
      FlatSet<size_t> users = graph.readers(name);
      users.insert(graph.writers(name)[0]);
      store_factors(graph.writers(name)[0], *recipe);
      graph.set_dtype(name, recipe->dtype);
      for (size_t at : users) graph.set_body(at, clean(narrowed(graph.nodes()[at].body, name, *recipe), graph.program().symbols));
    }
    return graph.finish();
  }
};

}  // namespace

Module narrow_buffers(Module module, const PassContext&) { return Narrower{ProgramGraph(std::move(module))}.run(); }

}  // namespace deplo
