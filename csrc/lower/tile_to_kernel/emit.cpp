#include "lower/tile_to_kernel/emit.h"

#include <algorithm>

#include "base/error.h"

namespace deplo::tile_to_kernel {
namespace {

std::string type_key(Type type) { return fmt::format("{}x{}", to_string(type.dtype), type.lanes); }

bool sets_error(Fn fn, DType dtype) {
  return !is_float(dtype) && (fn == Fn::trunc_div || fn == Fn::floor_div || fn == Fn::fmod || fn == Fn::remainder);
}

}  // namespace

std::string Emitter::fresh(const std::string& hint) {
  if (used_.insert(hint).second) return hint;
  int& n = next_[hint];
  std::string name;
  do name = fmt::format("{}_{}", hint, ++n);
  while (!used_.insert(name).second);
  return name;
}

void Emitter::open(Nest nest, bool always, const std::set<std::string>& stores) {
  Level level;
  level.nest = nest;
  level.always = always;
  level.stores = stores;
  levels_.push_back(std::move(level));
  if (nest == Nest::loop) {
    // The body runs again after its own stores.
    for (const std::string& buffer : stores) ++versions_[buffer];
    ++epoch_;
  }
}

kernel_ir::Block Emitter::close() {
  kernel_ir::Block block = std::move(levels_.back().block);
  levels_.pop_back();
  ++epoch_;
  return block;
}

void Emitter::append(decltype(kernel_ir::Stmt::node) node) {
  levels_.back().block.push_back(std::make_shared<kernel_ir::Stmt>(kernel_ir::Stmt{std::move(node)}));
}

std::string Emitter::key(const std::string& operand) const {
  auto it = values_.find(operand);
  bool mutates = it != values_.end() && it->second.mutates;
  return mutates ? fmt::format("{}@{}", operand, epoch_) : operand;
}

std::string Emitter::key(Expr e) { return fmt::format("{}", static_cast<const void*>(e.node())); }

size_t Emitter::depth_of(const std::string& operand) const {
  if (operand.empty()) return 0;
  auto it = values_.find(operand);
  if (it == values_.end()) return 0;  // a size or a thread index
  return it->second.mutates ? depth() : it->second.depth;
}

size_t Emitter::depth_of(Expr e) const {
  size_t deepest = 0;
  for (const std::string& symbol : symbols_of(e)) deepest = std::max(deepest, depth_of(symbol));
  return deepest;
}

const std::string* Emitter::find(const std::string& key) const {
  for (size_t at = levels_.size(); at-- > 0;) {
    auto it = levels_[at].numbers.find(key);
    if (it != levels_[at].numbers.end()) return &it->second;
  }
  return nullptr;
}

template <class Node>
std::string Emitter::pure(const std::string& key, const std::string& hint, Type type, size_t at, bool cheap, Node node) {
  if (const std::string* known = find(key)) return *known;
  // Leaves loops as far as its operands allow; work is not moved out of a branch that may not be taken.
  size_t place = depth();
  while (place > at && (cheap || levels_[place].nest == Nest::loop)) --place;
  node.name = fresh(hint);
  std::string name = node.name;
  levels_[place].block.push_back(std::make_shared<kernel_ir::Stmt>(kernel_ir::Stmt{std::move(node)}));
  levels_[place].numbers[key] = name;
  define(name, type, place);
  return name;
}

std::string Emitter::constant(Type type, const Scalar& literal) {
  kernel_ir::Let node;
  node.type = type;
  node.literal = literal;
  std::string value =
      is_float(type.dtype) ? fmt::format("{:a}{}", literal.f, literal.f == 0 && 1 / literal.f < 0 ? "-" : "") : std::to_string(literal.i);
  return pure(fmt::format("constant|{}|{}", type_key(type), value), "c", type, 0, true, std::move(node));
}

std::string Emitter::let(const std::string& hint, Type type, Fn fn, std::vector<std::string> operands) {
  std::string text = fmt::format("{}|{}", to_string(fn), type_key(type));
  size_t at = 0;
  for (const std::string& operand : operands) {
    text += "|" + key(operand);
    if (info(fn).signature == Signature::convert) text += type_key(this->type(operand));
    at = std::max(at, depth_of(operand));
  }
  if (sets_error(fn, type.dtype)) at = depth();
  kernel_ir::Let node;
  node.type = type;
  node.fn = fn;
  node.operands = std::move(operands);
  return pure(text, hint, type, at, false, std::move(node));
}

std::string Emitter::index(const std::string& hint, Type type, Expr value, Expr lane_step) {
  kernel_ir::Let node;
  node.type = type;
  node.fn = Fn::index;
  node.index = value;
  node.lane_step = lane_step;
  size_t at = std::max(depth_of(value), depth_of(lane_step));
  return pure(fmt::format("index|{}|{}|{}", type_key(type), key(value), key(lane_step)), hint, type, at, true, std::move(node));
}

std::string Emitter::splat(const std::string& operand, int lanes) {
  if (lanes == 1) return operand;
  Type type{this->type(operand).dtype, lanes};
  return pure(fmt::format("splat|{}|{}", lanes, key(operand)), operand + "_v", type, depth_of(operand), true, kernel_ir::Splat{"", type, operand});
}

std::string Emitter::first(int lanes, Expr count) {
  return pure(fmt::format("first|{}|{}", lanes, key(count)), "first", {DType::boolean, lanes}, depth_of(count), true,
              kernel_ir::FirstLanes{"", lanes, count});
}

std::string Emitter::shuffle(Type type, const std::string& a, const std::string& b, std::vector<int> lanes) {
  std::string text = fmt::format("shuffle|{}|{}|{}", type_key(type), key(a), key(b));
  for (int lane : lanes) text += fmt::format(",{}", lane);
  size_t at = std::max(depth_of(a), depth_of(b));
  return pure(text, a + "_s", type, at, false, kernel_ir::Shuffle{"", type, a, b, std::move(lanes)});
}

std::string Emitter::reduce_lanes(Fn fn, const std::string& operand) {
  if (type(operand).lanes == 1) return operand;
  DType dtype = type(operand).dtype;
  return pure(fmt::format("lanes|{}|{}", to_string(fn), key(operand)), operand + "_r", {dtype, 1}, depth_of(operand), false,
              kernel_ir::ReduceLanes{"", dtype, fn, operand});
}

std::string Emitter::extract(const std::string& operand, int lane) {
  if (type(operand).lanes == 1) return operand;
  DType dtype = type(operand).dtype;
  return pure(fmt::format("extract|{}|{}", lane, key(operand)), operand + "_l", {dtype, 1}, depth_of(operand), false,
              kernel_ir::Extract{"", dtype, operand, lane});
}

std::string Emitter::exchange(const std::string& operand, int lane, kernel_ir::Partner partner) {
  const Type type = this->type(operand);
  std::string name = fresh(operand + "_x");
  define(name, type, depth());
  append(kernel_ir::Exchange{name, type.dtype, operand, lane, partner});
  return name;
}

std::string Emitter::load(const std::string& hint, kernel_ir::Load load) {
  const int memory = constant_.count(load.buffer) ? 0 : memory_;
  std::string text = fmt::format("load|{}@{}.{}|{}|{}|{}|{}|{}|{}", load.buffer, memory, versions_[load.buffer], type_key(load.type),
                                 key(load.offset), key(load.stride), key(load.gather), key(load.mask), key(load.passthrough));
  if (const std::string* known = find(text)) return *known;
  size_t at = std::max(
      {depth_of(load.offset), depth_of(load.stride), depth_of(load.gather), depth_of(load.mask), depth_of(load.passthrough), depth_of(load.buffer)});
  size_t place = depth();
  while (place > at && levels_[place].nest == Nest::loop && levels_[place].always && !levels_[place].stores.count(load.buffer)) --place;
  load.name = fresh(hint);
  std::string name = load.name;
  define(name, load.type, place);
  levels_[place].block.push_back(std::make_shared<kernel_ir::Stmt>(kernel_ir::Stmt{std::move(load)}));
  levels_[place].numbers[text] = name;
  return name;
}

void Emitter::store(kernel_ir::Store store) {
  ++versions_[store.buffer];
  append(std::move(store));
}

void Emitter::matrix(kernel_ir::Matrix matrix) {
  if (matrix.kind == kernel_ir::Matrix::Kind::store) ++versions_[matrix.buffer];
  append(std::move(matrix));
}

void Emitter::copy_async(kernel_ir::CopyAsync copy) {
  ++versions_[copy.buffer];
  append(std::move(copy));
}

void Emitter::copy_group(int pending) {
  ++memory_;
  append(kernel_ir::CopyGroup{pending});
}

std::string Emitter::load_matrix(const std::string& hint, kernel_ir::LoadMatrix load) {
  load.name = fresh(hint);
  std::string name = load.name;
  define(name, load.type, depth());
  append(std::move(load));
  return name;
}

std::string Emitter::join_matrix(const std::string& hint, kernel_ir::JoinMatrix join) {
  join.name = fresh(hint);
  std::string name = join.name;
  define(name, join.type, depth());
  append(std::move(join));
  return name;
}

void Emitter::mma(kernel_ir::Mma product) {
  ++epoch_;
  append(std::move(product));
}

void Emitter::multiply_tiles(kernel_ir::MultiplyTiles products) {
  ++epoch_;
  ++memory_;
  append(std::move(products));
}

void Emitter::multiply_group(kernel_ir::MultiplyGroup products) {
  ++epoch_;
  append(std::move(products));
}

void Emitter::barrier() {
  ++memory_;
  append(kernel_ir::Barrier{});
}

std::string Emitter::var(const std::string& hint, Type type, const std::string& init) {
  std::string name = fresh(hint);
  append(kernel_ir::Var{name, type, init});
  values_[name] = {type, depth(), true};
  return name;
}

void Emitter::assign(const std::string& var, const std::string& value) {
  ++epoch_;
  if (var != value) append(kernel_ir::Assign{var, value});
}

std::string Emitter::copy(const std::string& var) {
  Type type = this->type(var);
  kernel_ir::Let node;
  node.name = fresh(var + "_c");
  node.type = type;
  node.fn = Fn::cast;
  node.operands = {var};
  std::string name = node.name;
  define(name, type, depth());
  append(std::move(node));
  return name;
}

}  // namespace deplo::tile_to_kernel
