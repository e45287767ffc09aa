#pragma once

#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/context.h"
#include "kernel_ir/ir.h"
#include "lower/tile_to_kernel/combine.h"
#include "lower/tile_to_kernel/emit.h"
#include "lower/tile_to_kernel/plan.h"
#include "tile_ir/ir.h"

namespace deplo::tile_to_kernel {

/// One vector of a lanes loop: its lanes stand for the indices base, base + 1, ...
struct LaneCopy {
  Expr base;
  std::string mask;      ///< lanes that take part; empty: all
  Expr live;             ///< where there is a mask: it is on in lanes below this
  bool padding = false;  ///< the lanes that are off lie past the end of the loop's constant range
  bool is_cut = false;   ///< or before its beginning
  bool any = false;      ///< where there is a mask: some lane is on for sure
};

/// The lanes loop being lowered.
struct LaneContext {
  std::string axis;
  std::string symbol;  ///< stands for the axis in expressions until a copy is chosen
  int lanes = 1;
  std::vector<LaneCopy> copies;
  std::set<std::string> varying;
  bool diverges = false;  ///< masks may have every lane off
};

/// Whether a masked load leaves it in the lanes that are off.
inline bool is_zero(const Scalar& s) { return is_float(s.dtype) ? s.f == 0 && !std::signbit(s.f) : s.i == 0; }

/// The index of an unrolled axis whose body is being lowered.
struct Unrolling {
  std::string axis;
  int64_t at = 0, lo = 0, hi = 0;
};

/// What a Tile IR name stands for.
struct Value {
  DType dtype = DType::f32;
  std::vector<std::string> copies;  ///< varying: one vector per lane copy; else one scalar
  bool varying = false;
  std::optional<Expr> index;      ///< the value of a scalar integer that is only an expression so far
  std::optional<Scalar> literal;  ///< of a constant
  int last_use = 0;
};

/// A buffer, or an array in memory.
struct Memory {
  std::string name;
  DType dtype = DType::f32;
  std::vector<Expr> strides;
  std::vector<Expr> shape;

  /// Elements of the last dimension, if they lie side by side.
  std::optional<int64_t> group() const {
    if (shape.empty() || !strides.back().is(1) || !shape.back().is_constant()) return std::nullopt;
    return shape.back().value();
  }
};

/// A register array: variables by flat position, of vectors along the last dimension.
struct RegisterArray {
  RegisterPlan plan;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  std::vector<std::vector<std::string>> variables;  ///< [lane copy, or 0][flat position]
  bool per_copy = false;
};

/// Lowers one kernel. Split over lower.cpp (statements), access.cpp (memory, expressions, masks), lanes.cpp (lanes loops), shuffles.cpp, reduce.cpp,
/// scan.cpp.
class Lowering {
 public:
  Lowering(const tile_ir::Kernel& kernel, const PassContext& context);
  kernel_ir::Kernel run();

 private:
  using Body = std::function<void()>;
  friend class Combination;

  // ---- lower.cpp: statements -----------------------------------------------------------------------------------------
  void block(const tile_ir::Block& body);
  void any_statement(const tile_ir::Stmt& stmt);
  void statement(const tile_ir::Let& s);
  void statement(const tile_ir::Load& s);
  void statement(const tile_ir::Store& s);
  void statement(const tile_ir::For& s);
  void statement(const tile_ir::Reduce& s);
  void statement(const tile_ir::Scan& s);
  void statement(const tile_ir::Alloc& s);
  void statement(const tile_ir::If& s);
  void statement(const tile_ir::Check& s);
  void statement(const tile_ir::Barrier& s);
  void statement(const tile_ir::Prefetch& s);
  void statement(const tile_ir::Matrix& s);
  void statement(const tile_ir::CopyAsync& s);
  void statement(const tile_ir::CopyGroup& s);
  void statement(const tile_ir::LoadMatrix& s);
  void statement(const tile_ir::JoinMatrix& s);
  void statement(const tile_ir::Mma& s);
  void statement(const tile_ir::MultiplyTiles& s);
  void statement(const tile_ir::MultiplyGroup& s);
  void top_level(const tile_ir::Stmt& stmt);
  void parallel_loop(const tile_ir::For& s);
  void device_loop(const tile_ir::For& s);
  void unrolled(const tile_ir::Axis& axis, const Body& body);
  /// A loop of Kernel IR around what body() emits; `axis` is bound to its variable (named after `hint`), or to lo if it runs once.
  void serial(const std::string& axis, const std::string& hint, Expr lo, Expr hi, int64_t step, int unroll, const std::set<std::string>& stores,
              const Body& body);
  void branch(const std::vector<Cond>& guard, const Body& body);
  void bind(const std::string& name, const void* definition, Value value);
  void bind_axis(const std::string& axis, Expr value);
  /// Runs body and forgets the names that it bound.
  void scoped(const Body& body);
  /// Before `order`, gives values that read variables of `array` a name of their own, if they are used later.
  void keep_values(const RegisterArray& array, const std::string* variable, int order);
  void keep_values(const std::set<std::string>& stores, int order);

  // ---- access.cpp ----------------------------------------------------------------------------------------------------
  Expr resolve(Expr e) const;
  std::vector<Cond> resolve(const std::vector<Cond>& guard, bool* never) const;
  Expr flat(const Memory& memory, const std::vector<Expr>& index) const;
  /// e with its divisions, remainders, minima and maxima computed once, as early as their operands allow: what stays is sums of products.
  Expr tidy(Expr e);
  bool may_name(Expr e) const;
  bool varies(Expr e) const;
  bool varies(const std::vector<Cond>& guard) const;
  /// e for lane 0 of a copy.
  Expr at_copy(Expr e, const LaneCopy& copy) const;
  std::string scalar(Expr e, const std::string& hint = "n");
  std::string truth(const Cond& cond);
  bool uses_values(Expr e) const;
  std::string vector(Expr e, size_t copy);
  std::string vector_atom(Expr e, size_t copy);
  std::string divided(Expr e, std::string a, size_t copy);
  std::string condition(const Cond& cond, size_t copy);
  std::string all_of(std::string a, const std::string& b);
  /// The mask of a guard in a copy, "" if it always holds.
  std::string guard_mask(const std::vector<Cond>& guard, size_t copy);
  std::string scalar_mask(const std::vector<Cond>& guard);
  /// A value as a vector of the current lanes loop (a scalar outside of one).
  std::string operand(const std::string& name, size_t copy);
  std::string scalar_operand(const std::string& name);
  /// A literal in every lane of the current loop.
  std::string literal(const Scalar& value) { return emit_.constant({value.dtype, width()}, value); }
  size_t copies() const { return lanes_ ? lanes_->copies.size() : 1; }
  int width() const { return lanes_ ? lanes_->lanes : 1; }

  Value load_scalar(const tile_ir::Load& s, const Memory& memory, Expr offset, const std::vector<Cond>& guard);
  Expr guarded_offset(Expr offset, const std::vector<Cond>& guard);
  void address(Expr offset, size_t copy, Expr* base, Expr* stride, std::string* gather);
  Expr blockwise(Expr e, const LaneCopy& at) const;
  bool is_multiple(Expr e, int64_t of) const;
  std::string combined(Combiner combiner, const std::string& old, const std::string& value);
  std::string load_vector(const tile_ir::Load& s, const Memory& memory, Expr offset, const std::vector<Cond>& guard, size_t copy);
  void store_vector(const tile_ir::Store& s, const Memory& memory, Expr offset, const std::vector<Cond>& guard, size_t copy);
  void store_scalar(const tile_ir::Store& s, const Memory& memory, Expr offset, const std::vector<Cond>& guard);
  Value load_register(const tile_ir::Load& s, RegisterArray& array, const std::vector<Cond>& guard);
  void store_register(const tile_ir::Store& s, RegisterArray& array, const std::vector<Cond>& guard);
  std::string& element(RegisterArray& array, const std::vector<Expr>& index, size_t copy);

  // ---- shuffles.cpp --------------------------------------------------------------------------------------------------
  /// `group` elements next to each other stay so.
  std::vector<std::string> transpose(std::vector<std::string> rows, int group = 1);
  /// The lanes [lo, hi) of a copy that a guard and the loop's end leave; nothing if they are no interval.
  struct LiveLanes {
    Expr lo, hi;
  };
  std::optional<LiveLanes> live_lanes(const std::vector<Cond>& guard, size_t copy) const;
  std::optional<std::string> spread_load(const tile_ir::Load& s, const Memory& memory, Expr offset, const std::vector<Cond>& guard, size_t copy);
  std::optional<std::string> transposed_load(const tile_ir::Load& s, const Memory& memory, size_t copy);
  Expr at_lane(Expr e, size_t copy, int64_t lane) const;
  std::optional<std::string> window_load(const tile_ir::Load& s, const Memory& memory, Expr offset, const std::vector<Cond>& guard, size_t copy);
  std::optional<std::string> lane_pattern(Expr e, size_t copy);

  // ---- lanes.cpp -----------------------------------------------------------------------------------------------------
  struct LanesLoop {
    const tile_ir::Axis* axis = nullptr;
    const tile_ir::Block* body = nullptr;
    const std::set<std::string>* stores = nullptr;
    int lanes = 1;
    int64_t in_flight = 1;
    int64_t few = 1;       ///< so many vectors are emitted without a loop
    int64_t capacity = 0;  ///< of the register arrays that it indexes, which must see every vector at once; 0: none
    std::set<std::string> varying;
  };
  LanesLoop lanes_loop(const void* node, const tile_ir::Axis& axis, const tile_ir::Block& body) const;
  void for_lanes(const LanesLoop& loop, Expr lo, Expr hi, const Body& body);
  void lanes_pieces(const LanesLoop& loop, Expr lo, Expr hi, bool runs, const Body& body);
  void full_vectors(const LanesLoop& loop, Expr lo, Expr end, Expr hi, int64_t step, bool runs, const Body& body);
  /// e as one symbol: its value is computed here.
  Expr named(Expr e, const std::string& hint);
  std::optional<Expr> size_of_host(Expr e, const std::string& hint);
  void straight(const LanesLoop& loop, Expr lo, Expr hi, const Body& body);
  void with_copies(const LanesLoop& loop, std::vector<LaneCopy> copies, Expr lo, Expr hi, const Body& body);
  /// How many vectors at once a loop over [lo, hi) will have, at most.
  size_t most_copies(const LanesLoop& loop, Expr lo, Expr hi) const;
  bool loads_uniformly(const LanesLoop& loop) const;

  // ---- reduce.cpp ----------------------------------------------------------------------------------------------------
  struct Reduction;
  void reduce_axes(Reduction& r, size_t at, std::vector<State>& accumulators);
  void reduce_axis(Reduction& r, size_t at, Expr lo, Expr hi, std::vector<State>& accumulators);
  void reduce_serial(Reduction& r, size_t at, Expr lo, Expr hi, std::vector<State>& accumulators);
  void reduce_point(Reduction& r, std::vector<State>& accumulators);
  void reduce_in_blocks(Reduction& r, size_t at, Expr lo, Expr hi, std::vector<State>& accumulators);
  void reduce_blocks(Reduction& r, size_t at, Expr lo, Expr hi, std::vector<int64_t> sizes, std::vector<State>& accumulators);
  std::optional<int64_t> expected(Expr e) const;
  void finish(Reduction& r, const std::vector<State>& accumulators);
  State across_threads(Reduction& r, State state);
  std::vector<State> make_accumulators(Reduction& r);
  void merge_into(Reduction& r, const std::vector<State>& into, const std::vector<State>& from);
  std::optional<int64_t> most_trips(const Reduction& r, size_t from) const;
  std::string nonempty(const std::vector<tile_ir::Axis>& axes);
  State combined_by_exchange(Combination& combination, State own, int64_t threads);

  // ---- scan.cpp ------------------------------------------------------------------------------------------------------
  struct Scanning;
  struct Element;
  void scan_in_order(const tile_ir::Scan& s);
  void scan_piece(Scanning& x, Expr half);
  void scan_elements(Scanning& x, Expr half);
  void scan_lanes(Scanning& x, Expr half);
  Element remembered(const Body& body);
  void recall(const Element& element);
  void make_partials(Scanning& x, size_t copies, int lanes);
  std::vector<State> before_thread(Scanning& x, const std::vector<State>& own, Expr half);
  State before_along_x(Scanning& x, const State& own, Expr half, State* all);
  State before_along_y(Scanning& x, const std::vector<State>& own, size_t copy, Expr half, State* all);
  std::string side_by_side(std::vector<std::string> scalars);

  const tile_ir::Kernel& kernel_;
  const PassContext& context_;
  Plan plan_;
  Emitter emit_;
  kernel_ir::Kernel out_;
  std::map<std::string, Memory> memory_;
  std::map<std::string, RegisterArray> registers_;
  std::map<std::string, Value> values_;
  Substitution names_;                        ///< axes and integer values in terms of Kernel IR
  Ranges ranges_;                             ///< of the symbols of Kernel IR
  Substitution sizes_;                        ///< those that the host computes, in terms of the program's symbols
  std::map<std::string, int64_t> multiples_;  ///< what is known to divide a loop variable
  Substitution steps_;                        ///< a lanes loop's variable by the number of its trip
  std::vector<std::string> bound_;
  LaneContext* lanes_ = nullptr;
  int64_t matrix_rows_ = 0, matrix_columns_ = 0;  ///< of the matrix array in scope, in registers
  DType matrix_dtype_ = DType::f32;
  std::map<int, kernel_ir::Matrix> factors_;         ///< what its registers hold since the products before this statement
  std::vector<Unrolling> unrolls_;                   ///< inside the lanes loop, none of them under a guard
  std::map<std::string, std::string> placeholders_;  ///< symbol in expressions -> varying value
  Expr scratch_ = 0;                                 ///< bytes in use
  Expr scratch_most_ = 0;
};

}  // namespace deplo::tile_to_kernel
