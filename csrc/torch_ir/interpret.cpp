#include "torch_ir/interpret.h"

#include "base/error.h"

namespace deplo::torch_ir {
namespace {

using Arguments = std::vector<std::pair<std::string, Attribute>>;

const Attribute* find(const Arguments& arguments, const std::string& name) {
  for (const auto& [key, value] : arguments)
    if (key == name) return &value;
  return nullptr;
}

std::vector<int64_t> integers(const Attribute& list) {
  std::vector<int64_t> values;
  for (const Attribute& item : std::get<std::vector<Attribute>>(list.value)) values.push_back(std::get<Expr>(item.value).value());
  return values;
}

/// Calls f with each position of `shape` in row-major order.
template <class F>
void for_each_position(const std::vector<int64_t>& shape, const F& f) {
  for (int64_t size : shape)
    if (size == 0) return;
  std::vector<int64_t> position(shape.size(), 0);
  while (true) {
    f(position);
    size_t d = shape.size();
    while (d > 0 && ++position[d - 1] == shape[d - 1]) position[--d] = 0;
    if (d == 0) return;
  }
}

int64_t dot(const std::vector<int64_t>& position, const std::vector<int64_t>& strides) {
  int64_t sum = 0;
  for (size_t d = 0; d < position.size(); ++d) sum += position[d] * strides[d];
  return sum;
}

class Interpreter {
 public:
  Interpreter(const Graph& graph, std::map<std::string, int64_t> symbols, Mode mode, const LibraryCall& library)
      : graph_(graph), symbols_(std::move(symbols)), mode_(mode), library_(library) {}

  std::vector<Array> run(const std::vector<Array>& inputs) {
    bind(inputs);
    for (const auto& node : graph_.nodes) run(*node);
    std::vector<Array> results;
    for (const Attribute& output : graph_.outputs) results.push_back(output_value(output));
    std::map<std::string, const Array*> written;
    for (const Write& write : graph_.writes) written[write.input] = &memory_.at(write.value);
    for (const Input& input : graph_.inputs)
      if (written.count(input.name)) results.push_back(*written.at(input.name));
    return results;
  }

 private:
  void bind(const std::vector<Array>& inputs) {
    DEPLO_CHECK(inputs.size() == graph_.inputs.size(), "@{} takes {} inputs, got {}", graph_.name, graph_.inputs.size(), inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i)
      if (graph_.inputs[i].kind == InputKind::symbol) symbols_[graph_.inputs[i].name] = inputs[i].get(0).i;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Input& input = graph_.inputs[i];
      if (input.kind == InputKind::symbol) continue;
      DEPLO_CHECK(inputs[i].dtype == input.type.dtype, "input {} must be {}, got {}", input.name, to_string(input.type.dtype),
                  to_string(inputs[i].dtype));
      bind_symbols(input.type.shape, inputs[i].shape, input.name, symbols_);
      define(input.name, inputs[i], input.type);
    }
    for (const Cond& fact : graph_.facts) DEPLO_CHECK(evaluate(fact, symbols_), "@{} is for inputs with {}", graph_.name, print(fact));
    run_size_checks(graph_.checks, symbols_);
  }

  void define(const std::string& name, Array array, const TensorType& type) {
    DEPLO_ASSERT(array.shape == evaluate_shape(type.shape, symbols_), "[torch] {} has another shape than its type", name);
    // In exact mode every float is computed in float64 and only called what its type says.
    bool same = array.dtype == type.dtype || (mode_ == Mode::exact && is_float(array.dtype) && is_float(type.dtype));
    DEPLO_ASSERT(same, "[torch] {} is {}, its type says {}", name, to_string(array.dtype), to_string(type.dtype));
    array.dtype = type.dtype;
    memory_[name] = std::move(array);
    strides_[name] = evaluate_shape(type.strides, symbols_);
  }

  void run(const Node& node) {
    Arguments arguments = evaluate_arguments(node.arguments, symbols_);
    std::vector<Array> results;
    if (node.op == "aten.as_strided.default" || node.op == "aten.as_strided_copy.default") {
      results.push_back(as_strided(arguments));
    } else if (node.op == "aten.as_strided_scatter.default") {
      results.push_back(as_strided_scatter(arguments));
    } else {
      std::map<std::string, Array> arrays;
      for (auto& [name, value] : arguments) {
        collect(value, arrays);
        if (mode_ == Mode::exact) widen(name, value);
      }
      results = library_(node.op, arguments, arrays);
    }
    DEPLO_ASSERT(results.size() >= node.results.size(), "[torch] {} gave {} results for {}", node.op, results.size(), node.results.size());
    for (size_t k = 0; k < node.results.size(); ++k)
      if (node.results[k].type) define(node.results[k].name, std::move(results[k]), *node.results[k].type);
  }

  void collect(const Attribute& attribute, std::map<std::string, Array>& arrays) const {
    if (const auto* value = std::get_if<ValueName>(&attribute.value)) arrays[value->name] = memory_.at(value->name);
    if (const auto* list = std::get_if<std::vector<Attribute>>(&attribute.value))
      for (const Attribute& item : *list) collect(item, arrays);
  }

  static void widen(const std::string& name, Attribute& value) {
    if (auto* dtype = std::get_if<DType>(&value.value); dtype && is_float(*dtype)) value.value = DType::f64;
    if (name == "half_to_float") value.value = false;
  }

  /// Where as_strided reads or writes: sizes, strides and the offset from the first element of self, whose own offset the view adds to.
  struct Window {
    std::string self;
    std::vector<int64_t> shape;
    std::vector<int64_t> strides;
    int64_t offset = 0;
  };

  static Window window(const Arguments& arguments) {
    Window w{std::get<ValueName>(find(arguments, "self")->value).name, integers(*find(arguments, "size")), integers(*find(arguments, "stride"))};
    const Attribute* offset = find(arguments, "storage_offset");
    if (offset && std::holds_alternative<Expr>(offset->value)) w.offset = std::get<Expr>(offset->value).value();
    return w;
  }

  /// The flat position in `self` of each element of its storage, by the strides of its type.
  std::map<int64_t, int64_t> places(const std::string& self) const {
    const Array& array = memory_.at(self);
    std::map<int64_t, int64_t> flat_of;
    int64_t flat = 0;
    for_each_position(array.shape, [&](const std::vector<int64_t>& position) { flat_of[dot(position, strides_.at(self))] = flat++; });
    return flat_of;
  }

  static int64_t place(const std::map<int64_t, int64_t>& flat_of, int64_t at) {
    auto found = flat_of.find(at);
    DEPLO_SUPPORT(found != flat_of.end(), "as_strided reads element {} of a storage that the tensor itself does not show", at);
    return found->second;
  }

  Array as_strided(const Arguments& arguments) const {
    Window w = window(arguments);
    const Array& self = memory_.at(w.self);
    auto flat_of = places(w.self);
    Array result = Array::zeros(self.dtype, w.shape);
    int64_t flat = 0;
    for_each_position(w.shape, [&](const auto& position) { result.set(flat++, self.get(place(flat_of, w.offset + dot(position, w.strides)))); });
    return result;
  }

  Array as_strided_scatter(const Arguments& arguments) const {
    Window w = window(arguments);
    Array result = memory_.at(w.self);
    const Array& source = memory_.at(std::get<ValueName>(find(arguments, "src")->value).name);
    auto flat_of = places(w.self);
    int64_t flat = 0;
    for_each_position(w.shape, [&](const auto& position) { result.set(place(flat_of, w.offset + dot(position, w.strides)), source.get(flat++)); });
    return result;
  }

  Array output_value(const Attribute& output) const {
    if (const auto* value = std::get_if<ValueName>(&output.value)) return memory_.at(value->name);
    if (const auto* e = std::get_if<Expr>(&output.value)) {
      Array array = Array::zeros(DType::i64, {});
      array.set(0, Scalar::of_int(DType::i64, evaluate(*e, symbols_)));
      return array;
    }
    return Array::zeros(DType::boolean, {0});
  }

  const Graph& graph_;
  std::map<std::string, int64_t> symbols_;
  Mode mode_;
  const LibraryCall& library_;
  std::map<std::string, Array> memory_;
  std::map<std::string, std::vector<int64_t>> strides_;
};

}  // namespace

std::vector<Array> interpret(const Graph& graph, const std::vector<Array>& inputs, const std::map<std::string, int64_t>& symbols, Mode mode,
                             const LibraryCall& library) {
  return Interpreter(graph, symbols, mode, library).run(inputs);
}

}  // namespace deplo::torch_ir
