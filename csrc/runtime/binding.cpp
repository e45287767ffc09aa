#include "runtime/binding.h"

#include <algorithm>

#include "base/error.h"

namespace deplo::runtime {
namespace {

std::string print_sizes(const int64_t* values, size_t count) {
  std::string text = "(";
  for (size_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + ")";
}

[[noreturn]] void reject(const Buffer& buffer, const BufferShape& expected, const TensorView& given) {
  auto rank = static_cast<size_t>(given.rank);
  throw UserError(fmt::format("input {}: expected {} of sizes {} and strides {}, got {} of sizes {} and strides {}", buffer.name,
                              to_string(buffer.dtype), print_sizes(expected.sizes.data(), expected.sizes.size()),
                              print_sizes(expected.strides.data(), expected.strides.size()), to_string(given.dtype), print_sizes(given.sizes, rank),
                              print_sizes(given.strides, rank)));
}

/// One dimension of the set of bytes that a strided tensor touches.
struct Extent {
  int64_t stride;
  int64_t last;  ///< largest multiple of the stride
};

/// Whether sum(k_i * stride_i) == target has a solution with 0 <= k_i <= last_i. Strides are positive and descending;
/// `reach` is the largest sum of the extents from each position on. Gives up (true) when `budget` runs out.
bool reachable(const std::vector<Extent>& extents, const std::vector<int64_t>& reach, size_t from, int64_t target, int& budget) {
  if (target == 0) return true;
  if (target < 0 || from == extents.size() || target > reach[from]) return false;
  if (--budget < 0) return true;
  const Extent& extent = extents[from];
  int64_t highest = std::min(extent.last, target / extent.stride);
  int64_t remaining = from + 1 < extents.size() ? reach[from + 1] : 0;
  int64_t lowest = std::max<int64_t>(0, (target - remaining + extent.stride - 1) / extent.stride);
  for (int64_t k = highest; k >= lowest; --k)
    if (reachable(extents, reach, from + 1, target - k * extent.stride, budget)) return true;
  return false;
}

bool is_empty(const TensorView& view) { return std::find(view.sizes, view.sizes + view.rank, 0) != view.sizes + view.rank; }

/// Bytes from the first element to the end of the last.
int64_t span_bytes(const TensorView& view) {
  int64_t last = 0;
  for (int d = 0; d < view.rank; ++d) last += (view.sizes[d] - 1) * view.strides[d];
  return (last + 1) * size_of(view.dtype);
}

void append_extents(std::vector<Extent>& extents, const TensorView& view) {
  for (int d = 0; d < view.rank; ++d)
    if (view.sizes[d] > 1 && view.strides[d] > 0) extents.push_back({view.strides[d] * size_of(view.dtype), view.sizes[d] - 1});
  if (size_of(view.dtype) > 1) extents.push_back({1, size_of(view.dtype) - 1});
}

}  // namespace

bool may_share_memory(const TensorView& a, const TensorView& b) {
  if (is_empty(a) || is_empty(b)) return false;
  if (a.data + span_bytes(a) <= b.data || b.data + span_bytes(b) <= a.data) return false;
  // a.data + i == b.data + j for bytes i of a and j of b. With j' = span(b) - 1 - j, which ranges over the same
  // multiples of b's strides, this is i + j' == b.data - a.data + span(b) - 1: one sum of non-negative terms.
  std::vector<Extent> extents;
  append_extents(extents, a);
  append_extents(extents, b);
  std::sort(extents.begin(), extents.end(), [](const Extent& x, const Extent& y) { return x.stride > y.stride; });
  std::vector<int64_t> reach(extents.size() + 1, 0);
  for (size_t i = extents.size(); i-- > 0;) reach[i] = reach[i + 1] + extents[i].stride * extents[i].last;
  int budget = 10000;
  return reachable(extents, reach, 0, (b.data - a.data) + span_bytes(b) - 1, budget);
}

SymbolSolver::SymbolSolver(const ProgramBody& program) {
  std::map<std::string, const Buffer*> inputs;
  for (const auto& [name, range] : program.symbols) {
    index_[name] = names_.size();
    names_.push_back(name);
  }
  for (const Buffer& buffer : program.buffers)
    if (buffer.kind == BufferKind::input) inputs[buffer.name] = &buffer;
  known_.resize(names_.size(), false);
  arguments_ = program.input_order;
  for (const deplo::Fact& fact : program.facts) {
    const auto at = std::find(arguments_.begin(), arguments_.end(), fact.buffer);
    DEPLO_ASSERT(at != arguments_.end() && index_.contains(fact.symbol), "the fact {} of program {} is about no input", fact.symbol, program.name);
    facts_.push_back({index_.at(fact.symbol), static_cast<size_t>(at - arguments_.begin()), fact.lo, fact.hi});
    known_[index_.at(fact.symbol)] = true;
  }
  // Symbol inputs first, then sizes, then strides: each pass may make another expression solvable.
  for (size_t i = 0; i < arguments_.size(); ++i)
    if (!inputs.contains(arguments_[i]) && index_.contains(arguments_[i])) add(i, Source::integer, 0, Expr::symbol(arguments_[i]));
  for (bool progress = true; progress;) {
    progress = false;
    for (Source source : {Source::size, Source::stride}) {
      for (size_t i = 0; i < arguments_.size(); ++i) {
        auto found = inputs.find(arguments_[i]);
        if (found == inputs.end()) continue;
        const auto& expressions = source == Source::size ? found->second->shape : found->second->strides;
        for (size_t d = 0; d < expressions.size(); ++d) progress |= add(i, source, static_cast<int>(d), expressions[d]);
      }
      if (progress) break;
    }
  }
  for (size_t s = 0; s < names_.size(); ++s) DEPLO_ASSERT(known_[s], "symbol {} of program {} follows from no input", names_[s], program.name);
}

bool SymbolSolver::add(size_t argument, Source source, int dimension, Expr expression) {
  std::string unknown;
  for (const std::string& name : symbols_of(expression)) {
    auto found = index_.find(name);
    if (found == index_.end() || (!known_[found->second] && !unknown.empty())) return false;
    if (!known_[found->second]) unknown = name;
  }
  if (unknown.empty()) return false;
  if (!linear_coefficient(expression, unknown)) return false;
  size_t symbol = index_.at(unknown);
  steps_.push_back({symbol, argument, source, dimension, expression, expression.is_symbol()});
  known_[symbol] = true;
  return true;
}

int64_t SymbolSolver::solve(const Step& step, int64_t given, const std::vector<int64_t>& values) const {
  if (step.direct) return given;
  std::map<std::string, int64_t> at;
  for (const std::string& name : symbols_of(step.expression)) at[name] = values[index_.at(name)];
  const std::string& unknown = names_[step.symbol];
  at[unknown] = 0;
  int64_t rest = evaluate(step.expression, at);
  at[unknown] = 1;
  int64_t coefficient = evaluate(step.expression, at) - rest;
  // A coefficient of 0 (a size that another symbol makes 0) leaves the symbol open: any value gives the same sizes here.
  if (coefficient == 0) return 0;
  DEPLO_CHECK((given - rest) % coefficient == 0, "input {}: {} {} of dimension {} is not of the form {}", arguments_[step.argument],
              step.source == Source::stride ? "stride" : "size", given, step.dimension, print(step.expression));
  return (given - rest) / coefficient;
}

void SymbolSolver::solve(const CallArgument* arguments, std::vector<int64_t>& values) const {
  values.resize(names_.size());
  for (const Fact& fact : facts_) values[fact.symbol] = 0;
  for (const Step& step : steps_) {
    const CallArgument& argument = arguments[step.argument];
    DEPLO_CHECK(argument.is_tensor == (step.source != Source::integer), "input {}: expected {}", arguments_[step.argument],
                argument.is_tensor ? "an integer" : "a tensor");
    int64_t given = argument.integer;
    if (step.source != Source::integer) {
      DEPLO_CHECK(step.dimension < argument.tensor.rank, "input {}: a tensor of {} dimensions, expected more than {}", arguments_[step.argument],
                  argument.tensor.rank, step.dimension);
      given = (step.source == Source::size ? argument.tensor.sizes : argument.tensor.strides)[step.dimension];
    }
    values[step.symbol] = solve(step, given, values);
  }
}

namespace {

template <class Integer>
bool within(const TensorView& view, int64_t lo, int64_t hi) {
  if (is_empty(view)) return true;
  // The innermost dimension in a loop of its own, which the compiler makes vectors of.
  const int64_t length = view.rank == 0 ? 1 : view.sizes[view.rank - 1];
  const int64_t step = view.rank == 0 ? 1 : view.strides[view.rank - 1];
  std::vector<int64_t> index(static_cast<size_t>(std::max(view.rank - 1, 0)), 0);
  while (true) {
    int64_t offset = 0;
    for (size_t d = 0; d < index.size(); ++d) offset += index[d] * view.strides[d];
    const auto* row = reinterpret_cast<const Integer*>(view.data) + offset;
    Integer least = row[0];
    Integer most = row[0];
    for (int64_t i = 1; i < length; ++i) {
      least = std::min(least, row[i * step]);
      most = std::max(most, row[i * step]);
    }
    if (least < lo || most > hi) return false;
    size_t d = index.size();
    while (d > 0 && ++index[d - 1] == view.sizes[d - 1]) index[--d] = 0;
    if (d == 0) return true;
  }
}

}  // namespace

bool all_within(const TensorView& integers, int64_t lo, int64_t hi) {
  switch (integers.dtype) {
    case DType::u8: return within<uint8_t>(integers, lo, hi);
    case DType::i8: return within<int8_t>(integers, lo, hi);
    case DType::i16: return within<int16_t>(integers, lo, hi);
    case DType::i32: return within<int32_t>(integers, lo, hi);
    case DType::i64: return within<int64_t>(integers, lo, hi);
    default: return false;
  }
}

void check_input(const Buffer& buffer, const BufferShape& expected, const TensorView& given) {
  auto rank = static_cast<size_t>(given.rank);
  if (given.dtype != buffer.dtype || rank != expected.sizes.size()) reject(buffer, expected, given);
  bool empty = false;
  for (size_t d = 0; d < rank; ++d) {
    if (given.sizes[d] != expected.sizes[d]) reject(buffer, expected, given);
    empty |= given.sizes[d] == 0;
  }
  for (size_t d = 0; d < rank && !empty; ++d)
    if (given.sizes[d] != 1 && given.strides[d] != expected.strides[d]) reject(buffer, expected, given);
}

BufferShape evaluate_shape(const Buffer& buffer, const std::map<std::string, int64_t>& symbols) {
  BufferShape shape;
  int64_t last = 0;
  bool empty = false;
  for (size_t d = 0; d < buffer.shape.size(); ++d) {
    shape.sizes.push_back(evaluate(buffer.shape[d], symbols));
    shape.strides.push_back(evaluate(buffer.strides[d], symbols));
    DEPLO_CHECK(shape.sizes[d] >= 0, "buffer {}: size {} of dimension {} is {}", buffer.name, print(buffer.shape[d]), d, shape.sizes[d]);
    empty |= shape.sizes[d] == 0;
    last += (shape.sizes[d] - 1) * shape.strides[d];
  }
  shape.bytes = empty ? 0 : (last + 1) * size_of(buffer.dtype);
  return shape;
}

}  // namespace deplo::runtime
