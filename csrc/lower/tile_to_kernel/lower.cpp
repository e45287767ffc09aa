#include "lower/lower.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "lower/tile_to_kernel/lowering.h"
#include "scalar/warp.h"
#include "target/target.h"
#include "tile_ir/rewrite.h"
#include "tile_ir/text.h"

namespace deplo::tile_to_kernel {

using namespace tile_ir;

namespace {

constexpr int64_t kScratchAlignment = 64;

bool is_device(LoopKind kind) {
  return kind == LoopKind::block_x || kind == LoopKind::block_y || kind == LoopKind::block_z || kind == LoopKind::thread_x ||
         kind == LoopKind::thread_y;
}

size_t device_dimension(LoopKind kind) { return kind == LoopKind::block_y || kind == LoopKind::thread_y ? 1 : kind == LoopKind::block_z ? 2 : 0; }

bool sets_error(const Let& s) {
  return !is_float(s.dtype) && (s.fn == Fn::trunc_div || s.fn == Fn::floor_div || s.fn == Fn::fmod || s.fn == Fn::remainder);
}

}  // namespace

Lowering::Lowering(const Kernel& kernel, const PassContext& context) : kernel_(kernel), context_(context), plan_(make_plan(kernel, context)) {
  for (const char* name : {"thread", "threads", "block_x", "block_y", "block_z", "thread_x", "thread_y"}) emit_.reserve(name);
  ranges_ = kernel.symbols;
  ranges_["threads"] = {Expr(1), std::nullopt};
  ranges_["thread"] = {Expr(0), Expr::symbol("threads") - 1};
  out_.name = kernel.name;
  out_.provenance = kernel.provenance;
  for (const auto& [symbol, range] : kernel.symbols) {
    emit_.reserve(symbol);
    out_.symbols.push_back(symbol);
  }
  for (const Param& p : kernel.params) {
    emit_.reserve(p.name);
    out_.params.push_back({p.name, p.dtype, p.kind});
    memory_[p.name] = {p.name, p.dtype, p.strides, p.shape};
    if (p.kind == ParamKind::in) emit_.declare_constant(p.name);
  }
}

kernel_ir::Kernel Lowering::run() {
  bool parallel = false;
  visit_all(kernel_.body, [&](const Stmt& stmt) {
    const auto* loop = std::get_if<For>(&stmt.node);
    if (!loop) return;
    parallel = parallel || loop->axis.kind == LoopKind::parallel;
    if (!is_device(loop->axis.kind)) return;
    bool block = loop->axis.kind != LoopKind::thread_x && loop->axis.kind != LoopKind::thread_y;
    std::vector<Expr>& sizes = block ? out_.grid : out_.block;
    size_t d = device_dimension(loop->axis.kind);
    if (sizes.size() <= d) sizes.resize(d + 1, Expr(1));
    sizes[d] = simplify(max(sizes[d], loop->axis.hi - loop->axis.lo), ranges_);
  });
  if (target_of(context_).has_grid || !out_.grid.empty() || !out_.block.empty()) {
    if (out_.grid.empty()) out_.grid = {1};
    if (out_.block.empty()) out_.block = {1};
  }
  out_.chunks = parallel ? kernel_.chunks : Expr(1);
  for (const auto& stmt : kernel_.body) top_level(*stmt);
  out_.scratch_bytes = scratch_most_;
  out_.body = emit_.close();
  return std::move(out_);
}

// Every chunk runs what stands outside the parallel loop; only one of them may write a buffer there.
void Lowering::top_level(const Stmt& stmt) {
  bool parallel = false;
  bool writes = false;
  bool defines = std::holds_alternative<Reduce>(stmt.node) || std::holds_alternative<Alloc>(stmt.node);
  visit_all({std::make_shared<Stmt>(stmt)}, [&](const Stmt& s) {
    if (const auto* loop = std::get_if<For>(&s.node)) parallel = parallel || loop->axis.kind == LoopKind::parallel || is_device(loop->axis.kind);
    if (const auto* store = std::get_if<Store>(&s.node))
      for (const Param& p : kernel_.params) writes = writes || p.name == store->buffer;
  });
  auto lower = [&] { any_statement(stmt); };
  bool alone = writes && !parallel && !defines && !out_.chunks.is(1);
  if (alone)
    branch({equal(Expr::symbol("thread"), 0)}, lower);
  else
    lower();
}

void Lowering::block(const Block& body) {
  factors_.clear();
  for (const auto& stmt : body) any_statement(*stmt);
  factors_.clear();
}

void Lowering::any_statement(const Stmt& stmt) {
  const auto* matrix = std::get_if<Matrix>(&stmt.node);
  if (!matrix || matrix->kind != Matrix::Kind::multiply) factors_.clear();
  std::visit([&](const auto& s) { statement(s); }, stmt.node);
}

// ---- names ---------------------------------------------------------------------------------------------------------

void Lowering::bind(const std::string& name, const void* definition, Value value) {
  auto last = plan_.last_use.find(definition);
  value.last_use = last == plan_.last_use.end() ? 0 : last->second;
  if (value.dtype == DType::i64) {
    if (value.literal) {
      names_[name] = value.literal->i;
    } else if (value.index) {
      names_[name] = *value.index;
    } else if (value.varying) {
      std::string symbol = "$" + name;
      placeholders_[symbol] = name;
      names_[name] = Expr::symbol(symbol);
    } else {
      names_[name] = Expr::symbol(value.copies.at(0));
    }
  }
  values_[name] = std::move(value);
  bound_.push_back(name);
}

void Lowering::bind_axis(const std::string& axis, Expr value) {
  names_[axis] = value;
  bound_.push_back(axis);
}

void Lowering::scoped(const Body& body) {
  size_t mark = bound_.size();
  Expr scratch = scratch_;
  body();
  // Of a GPU's block, some threads may still work on an array that is dead for others.
  if (out_.grid.empty()) scratch_ = scratch;
  for (; bound_.size() > mark; bound_.pop_back()) {
    values_.erase(bound_.back());
    names_.erase(bound_.back());
    placeholders_.erase("$" + bound_.back());
  }
}

void Lowering::keep_values(const RegisterArray& array, const std::string* variable, int order) {
  auto reads = [&](const std::string& name) {
    if (variable) return name == *variable;
    for (const auto& variables : array.variables)
      if (std::find(variables.begin(), variables.end(), name) != variables.end()) return true;
    return false;
  };
  for (auto& [name, value] : values_) {
    if (value.last_use <= order) continue;
    for (std::string& copy : value.copies)
      if (reads(copy)) copy = emit_.copy(copy);
  }
}

void Lowering::keep_values(const std::set<std::string>& stores, int order) {
  for (const std::string& buffer : stores)
    if (auto it = registers_.find(buffer); it != registers_.end() && plan_.in_registers(buffer)) keep_values(it->second, nullptr, order - 1);
}

// ---- statements ----------------------------------------------------------------------------------------------------

void Lowering::statement(const Let& s) {
  Value value;
  value.dtype = s.dtype;
  if (s.fn == Fn::constant) {
    value.literal = s.literal;
    return bind(s.name, &s, std::move(value));
  }
  if (s.fn == Fn::index) {
    value.index = resolve(s.index);
    value.varying = varies(*value.index);
    return bind(s.name, &s, std::move(value));
  }
  bool divides = sets_error(s);
  value.varying = lanes_ && divides && lanes_->diverges;
  for (const std::string& name : s.operands) value.varying = value.varying || values_.at(name).varying;
  if (!value.varying) {
    std::vector<std::string> operands;
    for (const std::string& name : s.operands) operands.push_back(scalar_operand(name));
    value.copies.push_back(emit_.let(s.name, {s.dtype, 1}, s.fn, std::move(operands)));
    return bind(s.name, &s, std::move(value));
  }
  for (size_t c = 0; c < copies(); ++c) {
    std::vector<std::string> operands;
    for (const std::string& name : s.operands) operands.push_back(operand(name, c));
    const std::string& mask = lanes_->copies[c].mask;
    if (divides && !mask.empty())  // lanes that take no part must not divide by zero
      operands[1] = emit_.let("d", {s.dtype, width()}, Fn::where, {mask, operands[1], literal(Scalar::of_int(s.dtype, 1))});
    value.copies.push_back(emit_.let(s.name, {s.dtype, width()}, s.fn, std::move(operands)));
  }
  bind(s.name, &s, std::move(value));
}

void Lowering::statement(const For& s) {
  const Axis& axis = s.axis;
  if (is_device(axis.kind)) return device_loop(s);
  const std::set<std::string>& stores = plan_.stores.at(&s);
  keep_values(stores, plan_.order.at(&s));
  Expr lo = resolve(axis.lo);
  Expr hi = resolve(axis.hi);
  auto body = [&] { block(s.body); };
  switch (axis.kind) {
    case LoopKind::parallel: return parallel_loop(s);
    case LoopKind::unroll: return unrolled(axis, body);
    case LoopKind::lanes:
      if (plan_.width(&s) > 1) return for_lanes(lanes_loop(&s, axis, s.body), lo, hi, body);
      if (auto whole = plan_.whole.find(&s); whole != plan_.whole.end()) {
        for (int64_t i = 0; i < whole->second; ++i) {
          scoped([&] {
            bind_axis(axis.name, lo + i);
            branch({less(lo + i, hi)}, body);
          });
        }
        return;
      }
      [[fallthrough]];
    default: serial(axis.name, axis.name, lo, hi, axis.step, static_cast<int>(axis.by), stores, body);
  }
}

void Lowering::unrolled(const Axis& axis, const Body& body) {
  int64_t hi = axis.hi.value();
  for (int64_t i = axis.lo.value(); i < hi; i += axis.step) {
    scoped([&] {
      bind_axis(axis.name, i);
      if (axis.step == 1) unrolls_.push_back({axis.name, i, axis.lo.value(), hi});
      body();
      if (axis.step == 1) unrolls_.pop_back();
    });
  }
}

void Lowering::serial(const std::string& axis, const std::string& hint, Expr lo, Expr hi, int64_t step, int unroll,
                      const std::set<std::string>& stores, const Body& body) {
  Expr trips = simplify(ceildiv(hi - lo, step), ranges_);
  if (trips.is_constant() && trips.value() <= 0) return;
  if (trips.is(1)) {
    scoped([&] {
      bind_axis(axis, lo);
      body();
    });
    return;
  }
  std::set<std::string> buffers;
  for (const std::string& name : stores)
    if (auto it = memory_.find(name); it != memory_.end()) buffers.insert(it->second.name);
  Expr from = tidy(lo);
  Expr to = tidy(hi);
  std::string variable = emit_.fresh(hint);
  ranges_[variable] = {lo, hi - 1};
  emit_.open(Emitter::Nest::loop, provably_nonnegative(trips - 1, ranges_), buffers);
  emit_.declare_symbol(variable);
  scoped([&] {
    bind_axis(axis, Expr::symbol(variable));
    body();
  });
  kernel_ir::Block inner = emit_.close();
  ranges_.erase(variable);
  emit_.append(kernel_ir::For{variable, from, to, step, unroll, std::move(inner)});
}

void Lowering::parallel_loop(const For& s) {
  const Axis& axis = s.axis;
  Expr lo = resolve(axis.lo);
  Expr trips = resolve(ceildiv(axis.hi - axis.lo, axis.step));
  Expr thread = Expr::symbol("thread");
  Expr threads = Expr::symbol("threads");
  Expr from = lo + floordiv(trips * thread, threads) * axis.step;
  Expr to = lo + floordiv(trips * (thread + 1), threads) * axis.step;
  std::set<std::string> buffers = plan_.stores.at(&s);
  std::string variable = emit_.fresh(axis.name);
  ranges_[variable] = {lo, resolve(axis.hi) - 1};
  emit_.open(Emitter::Nest::loop, false, buffers);
  emit_.declare_symbol(variable);
  scoped([&] {
    bind_axis(axis.name, Expr::symbol(variable));
    block(s.body);
  });
  kernel_ir::Block inner = emit_.close();
  ranges_.erase(variable);
  emit_.append(kernel_ir::For{variable, from, to, axis.step, 1, std::move(inner)});
}

// Blocks and threads are not loops in Kernel IR: the body runs once for each, where its index is within the loop's extent.
void Lowering::device_loop(const For& s) {
  const Axis& axis = s.axis;
  std::string symbol(to_string(axis.kind));
  bool is_block = axis.kind != LoopKind::thread_x && axis.kind != LoopKind::thread_y;
  Expr size = (is_block ? out_.grid : out_.block).at(device_dimension(axis.kind));
  Expr lo = resolve(axis.lo);
  Expr extent = resolve(axis.hi - axis.lo);
  ranges_[symbol] = {Expr(0), extent - 1};
  auto body = [&] {
    scoped([&] {
      bind_axis(axis.name, lo + Expr::symbol(symbol));
      block(s.body);
    });
  };
  if (extent == size) return body();
  Cond inside = less(Expr::symbol(symbol), extent);
  emit_.open(Emitter::Nest::branch, false, {});
  body();
  kernel_ir::Block then = emit_.close();
  emit_.append(kernel_ir::If{{inside}, "", std::move(then), {}});
}

void Lowering::branch(const std::vector<Cond>& guard, const Body& body) {
  std::vector<Cond> undecided;
  for (const Cond& cond : guard) {
    auto known = decide(cond, ranges_);
    if (known && !*known) return;
    if (!known) undecided.push_back({cond.kind, tidy(simplify(cond.expr, ranges_))});
  }
  if (undecided.empty()) return scoped(body);
  emit_.open(Emitter::Nest::branch, false, {});
  scoped(body);
  kernel_ir::Block then = emit_.close();
  emit_.append(kernel_ir::If{std::move(undecided), "", std::move(then), {}});
}

void Lowering::statement(const If& s) {
  bool never = false;
  std::vector<Cond> guard = resolve(s.guard, &never);
  if (never) return;
  std::vector<Cond> uniform;
  std::vector<Cond> varying;
  for (const Cond& cond : guard) (varies(cond.expr) ? varying : uniform).push_back(cond);
  std::vector<Unrolling> unguarded = std::exchange(unrolls_, {});
  branch(uniform, [&] {
    if (varying.empty()) return block(s.body);
    LaneContext outer = *lanes_;
    for (size_t c = 0; c < copies(); ++c) {
      lanes_->copies[c].mask = all_of(outer.copies[c].mask, guard_mask(varying, c));
      lanes_->copies[c].padding = false;
    }
    lanes_->diverges = true;
    block(s.body);
    *lanes_ = std::move(outer);
  });
  unrolls_ = std::move(unguarded);
}

void Lowering::statement(const Alloc& s) {
  if (s.space == Space::matrix) {
    matrix_dtype_ = s.dtype;
    matrix_rows_ = s.shape[0].value() / kMatrixSide;
    matrix_columns_ = s.shape[1].value() / kMatrixSide;
    // Sums, a column of a, and one or more registers for b.
    const int64_t registers = matrix_rows_ * matrix_columns_ + matrix_rows_ + 1;
    DEPLO_SUPPORT(registers <= kernel_ir::kMatrixRegisters, "{}: {} takes {} matrix registers of {}", kernel_.name, s.name, registers,
                  kernel_ir::kMatrixRegisters);
    return;
  }
  if (plan_.in_registers(s.name)) {
    RegisterArray array;
    array.plan = plan_.registers.at(s.name);
    array.dtype = s.dtype;
    array.per_copy = lanes_ != nullptr;
    int64_t count = 1;
    for (const Expr& e : s.shape) array.shape.push_back(e.value());
    for (size_t d = 0; d < array.shape.size(); ++d)
      count *= d + 1 == array.shape.size() ? (array.shape[d] + array.plan.width - 1) / array.plan.width : array.shape[d];
    Type type{s.dtype, array.per_copy ? width() : array.plan.width};
    std::string zero = emit_.constant(type, is_float(s.dtype) ? Scalar::of_float(s.dtype, 0) : Scalar::of_int(s.dtype, 0));
    for (size_t c = 0; c < (array.per_copy ? copies() : 1); ++c) {
      array.variables.emplace_back();
      for (int64_t k = 0; k < count; ++k) array.variables.back().push_back(emit_.var(fmt::format("{}_{}", s.name, k), type, zero));
    }
    registers_[s.name] = std::move(array);
    return;
  }
  kernel_ir::Alloc node;
  node.name = emit_.fresh(s.name);
  node.dtype = s.dtype;
  node.count = simplify(deplo::product(s.shape), ranges_);
  node.space = kernel_ir::Space::stack;
  if (s.space == Space::shared) node.space = kernel_ir::Space::shared;
  if (s.space == Space::scratch) {
    node.space = kernel_ir::Space::scratch;
    node.offset = scratch_;
    scratch_ = scratch_ + ceildiv(node.count * size_of(s.dtype), kScratchAlignment) * kScratchAlignment;
    scratch_most_ = simplify(max(scratch_most_, scratch_), ranges_);
  }
  memory_[s.name] = {node.name, s.dtype, contiguous_strides(s.shape), s.shape};
  emit_.declare_symbol(node.name);
  emit_.append(std::move(node));
}

void Lowering::statement(const Check& s) {
  Cond cond = negated({s.cond.kind, resolve(s.cond.expr)});
  if (auto known = decide(cond, ranges_); known && !*known) return;
  bool vectors = varies(cond.expr) || (lanes_ && lanes_->diverges);
  if (!vectors) return emit_.append(kernel_ir::SetError{s.code, truth(cond)});
  for (size_t c = 0; c < copies(); ++c) emit_.append(kernel_ir::SetError{s.code, all_of(condition(cond, c), lanes_->copies[c].mask)});
}

void Lowering::statement(const Barrier& /*s*/) { emit_.barrier(); }

void Lowering::statement(const Matrix& s) {
  using Kind = kernel_ir::Matrix::Kind;
  // A place, and how far apart its rows and the registers beside and below each other begin.
  struct Rows {
    std::string buffer;
    Expr offset, stride, right, down;
  };
  auto rows_of = [&](const Matrix::Place& p, size_t last, int64_t columns) {
    const Memory& memory = memory_.at(p.buffer);
    const size_t row = p.index.size() - 2 - last;
    const Expr across = memory.strides[row + 1];
    DEPLO_SUPPORT(across.is(last > 0 ? 2 : 1) && memory.strides.back().is(1), "{}: a row of {} is not contiguous", kernel_.name, p.buffer);
    const Expr stride = memory.strides[row];
    return Rows{memory.name, flat(memory, p.index), stride, across * columns, stride * kMatrixSide};
  };
  auto piece = [&](Kind kind, int64_t target, const Rows& rows, int64_t down, int64_t right) {
    const Expr offset = tidy(rows.offset + rows.down * down + rows.right * right);
    return kernel_ir::Matrix{kind, static_cast<int>(target), rows.buffer, offset, rows.stride, 0, 0};
  };
  const int64_t sums = matrix_rows_ * matrix_columns_;
  if (s.kind == Matrix::Kind::zero) {
    for (int64_t t = 0; t < sums; ++t) emit_.matrix({Kind::zero, static_cast<int>(t), {}, 0, 0, 0, 0, matrix_dtype_});
    return;
  }
  if (s.kind != Matrix::Kind::multiply) {
    const Rows rows = rows_of(s.a, 0, kMatrixSide);
    for (int64_t t = 0; t < sums; ++t)
      emit_.matrix(piece(s.kind == Matrix::Kind::load ? Kind::load : Kind::store, t, rows, t / matrix_columns_, t % matrix_columns_));
    return;
  }
  const Rows a = rows_of(s.a, 0, s.bytes ? kMatrixBytes : kMatrixDepth);
  const Rows b = rows_of(s.b, s.bytes ? 0 : 1, kMatrixSide);
  const DType a_dtype = memory_.at(s.a.buffer).dtype;
  const DType b_dtype = s.bytes.value_or(DType::bf16);
  // A factor that the product before this one had, too, is still in its register.
  auto fetch = [&](int64_t target, const Rows& rows, int64_t down, int64_t right) {
    kernel_ir::Matrix node = piece(Kind::load, target, rows, down, right);
    auto held = factors_.find(node.target);
    if (held != factors_.end() && held->second == node) return;
    factors_[node.target] = node;
    emit_.matrix(std::move(node));
  };
  for (int64_t i = 0; i < matrix_rows_; ++i) fetch(sums + i, a, i, 0);
  const int64_t first = sums + matrix_rows_;
  for (int64_t j = 0; j < matrix_columns_; ++j) {
    const int64_t right = first + j % (kernel_ir::kMatrixRegisters - first);
    fetch(right, b, 0, j);
    for (int64_t i = 0; i < matrix_rows_; ++i)
      emit_.matrix({Kind::multiply,
                    static_cast<int>(i * matrix_columns_ + j),
                    {},
                    0,
                    0,
                    static_cast<int>(sums + i),
                    static_cast<int>(right),
                    DType::f32,
                    a_dtype,
                    b_dtype});
  }
}

void Lowering::statement(const CopyAsync& s) {
  bool never = false;
  kernel_ir::CopyAsync node;
  for (const Cond& cond : resolve(s.guard, &never)) node.guard.push_back({cond.kind, tidy(simplify(cond.expr, ranges_))});
  const Memory& to = memory_.at(s.buffer);
  const Memory& from = memory_.at(s.from);
  DEPLO_SUPPORT(from.strides[static_cast<size_t>(s.along)].is(1), "{}: what is copied of {} does not lie side by side", kernel_.name, s.from);
  node.buffer = to.name;
  node.offset = tidy(flat(to, s.index));
  node.from = from.name;
  node.from_offset = tidy(flat(from, s.from_index));
  node.elements = static_cast<int>(s.elements);
  node.count = simplify(resolve(s.count), ranges_);
  if (provably_nonnegative(node.count - s.elements, ranges_)) node.count = s.elements;
  node.count = never ? Expr(0) : tidy(node.count);
  emit_.copy_async(std::move(node));
}

void Lowering::statement(const CopyGroup& s) { emit_.copy_group(s.pending); }

void Lowering::statement(const LoadMatrix& s) {
  const Memory& memory = memory_.at(s.buffer);
  Value value;
  value.dtype = s.dtype;
  value.copies.push_back(
      emit_.load_matrix(s.name, {"", {s.dtype, lanes_of_matrix(s.dtype) * s.count}, memory.name, tidy(flat(memory, s.index)), s.transposed}));
  bind(s.name, &s, std::move(value));
}

void Lowering::statement(const JoinMatrix& s) {
  RegisterArray& array = registers_.at(s.array);
  const int lanes = lanes_of_matrix(s.dtype);
  kernel_ir::JoinMatrix node{"", {s.dtype, lanes * static_cast<int>(s.places.size())}, {}, 0};
  node.lane = static_cast<int>(s.places[0].back().value() % array.plan.width);
  for (const std::vector<Expr>& place : s.places) {
    const int64_t lane = place.back().value() % array.plan.width;
    DEPLO_SUPPORT(lane == node.lane && lane + lanes <= array.plan.width, "{}: places of {} do not lie in the same lanes of its vectors of {}",
                  kernel_.name, s.array, array.plan.width);
    node.parts.push_back(element(array, place, 0));
  }
  Value value;
  value.dtype = s.dtype;
  value.copies.push_back(emit_.join_matrix(s.name, std::move(node)));
  bind(s.name, &s, std::move(value));
}

void Lowering::statement(const Mma& s) {
  RegisterArray& array = registers_.at(s.array);
  const int64_t lane = s.low.back().value() % array.plan.width;
  DEPLO_SUPPORT(lane % 2 == 0 && lane + 1 < array.plan.width && (s.high.back().value() - lane) % array.plan.width == 0,
                "{}: sums of {} do not lie in pairs of the same lanes of its vectors of {}", kernel_.name, s.array, array.plan.width);
  const std::string& low = element(array, s.low, 0);
  const std::string& high = element(array, s.high, 0);
  for (const std::string* sums : {&low, &high}) keep_values(array, sums, plan_.order.at(&s));
  emit_.mma({low, high, static_cast<int>(lane), values_.at(s.a).copies[0], values_.at(s.b).copies[0], s.half});
}

void Lowering::statement(const MultiplyTiles& s) {
  RegisterArray& array = registers_.at(s.array);
  DEPLO_SUPPORT(array.plan.width == 2, "{}: sums of {} do not lie in vectors of 2", kernel_.name, s.array);
  kernel_ir::MultiplyTiles node{{}, s.products};
  for (int64_t g = 0; g < s.products.b.rows / 8; ++g)
    for (int64_t h : {0, 1}) {
      const std::string& sum = element(array, {h, g, 0}, 0);
      keep_values(array, &sum, plan_.order.at(&s));
      node.sums.push_back(sum);
    }
  for_each_expr(node.products, [&](Expr& e) { e = simplify(resolve(e), ranges_); });
  for (TileFactor* f : {&node.products.a, &node.products.b}) {
    f->buffer = memory_.at(f->buffer).name;
    f->tiles = memory_.at(f->tiles).name;
    for (Expr& e : f->at) e = tidy(e);
  }
  node.products.flags = memory_.at(s.products.flags).name;
  emit_.multiply_tiles(std::move(node));
}

void Lowering::statement(const MultiplyGroup& s) {
  RegisterArray& array = registers_.at(s.array);
  const int64_t lanes = s.products.lanes;
  DEPLO_SUPPORT(array.plan.width == lanes, "{}: sums of {} do not lie in vectors of {}", kernel_.name, s.array, lanes);
  kernel_ir::MultiplyGroup node{{}, s.products};
  for (int64_t g = 0; g < s.products.columns / (4 * lanes); ++g)
    for (int64_t h : {0, 1}) {
      const std::string& sum = element(array, {s.unit, h, g, 0}, 0);
      keep_values(array, &sum, plan_.order.at(&s));
      node.sums.push_back(sum);
    }
  for (std::string& matrix : node.products.matrices) matrix = values_.at(matrix).copies[0];
  const auto place = [&](GroupFactor& f) {
    const Memory& memory = memory_.at(f.tile);
    f.at = tidy(flat(memory, {f.at}));
    f.tile = memory.name;
  };
  if (node.products.matrices.empty()) place(node.products.a);
  place(node.products.b);
  emit_.multiply_group(std::move(node));
}

void Lowering::statement(const Prefetch& s) {
  const Memory& memory = memory_.at(s.buffer);
  Expr offset = flat(memory, s.index);
  for (const std::string& symbol : symbols_of(offset))
    if (placeholders_.count(symbol)) return;  // one address per lane: not worth a hint
  std::set<const ExprNode*> done;
  for (size_t c = 0; c < copies(); ++c) {
    Expr place = tidy(lanes_ ? at_copy(offset, lanes_->copies[c]) : offset);
    if (done.insert(place.node()).second) emit_.append(kernel_ir::Prefetch{memory.name, place, s.level});
  }
}

}  // namespace deplo::tile_to_kernel

namespace deplo {

kernel_ir::Module lower_tile_to_kernel(const tile_ir::Module& module, const PassContext& context) {
  kernel_ir::Module out;
  static_cast<ProgramBody&>(out) = module;
  for (const auto& kernel : module.kernels)
    out.kernels.push_back(std::make_shared<kernel_ir::Kernel>(tile_to_kernel::Lowering(*kernel, context).run()));
  return out;
}

}  // namespace deplo
