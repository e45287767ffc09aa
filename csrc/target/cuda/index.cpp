#include "target/cuda/index.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "base/text.h"
#include "expr/node.h"

namespace deplo {
namespace {

using namespace kernel_ir;

constexpr int64_t kMostInt = std::numeric_limits<int32_t>::max();
/// Of a magnitude that is computed in float32, with room for its rounding.
constexpr const char* kBelow = "2.1e9f";
constexpr int64_t kLargestMultiple = int64_t{1} << 40;

/// Names of indices in Kernel IR, in CUDA, and the extent that bounds them.
struct Builtin {
  const char* name;
  const char* text;
  bool of_grid;
  size_t dimension;
};
constexpr Builtin kBuiltins[] = {{"block_x", "blockIdx.x", true, 0},
                                 {"block_y", "blockIdx.y", true, 1},
                                 {"block_z", "blockIdx.z", true, 2},
                                 {"thread_x", "threadIdx.x", false, 0},
                                 {"thread_y", "threadIdx.y", false, 1}};

const Builtin* find_builtin(const std::string& name) {
  for (const Builtin& b : kBuiltins)
    if (name == b.name) return &b;
  return nullptr;
}

}  // namespace

CudaIndex::CudaIndex(const Kernel& kernel, bool assumes) : assumes_(assumes) {
  for (const std::string& s : kernel.symbols) sizes_.insert(s);
  for (const Size& s : kernel.sizes) sizes_.insert(s.name);
  for (const std::string& s : sizes_) {
    magnitudes_[s] = Expr::symbol(s);
    if (assumes) ranges_[s] = {Expr(0), std::nullopt};
  }
  for (const Builtin& b : kBuiltins) {
    const std::vector<Expr>& extents = b.of_grid ? kernel.grid : kernel.block;
    const Expr extent = b.dimension < extents.size() ? extents[b.dimension] : Expr(1);
    // The host computes grids: a driver takes no more than 2^31 blocks.
    bool known = true;
    Expr bound = extent.is_constant() ? extent : magnitude(extent, &known);
    ranges_[b.name] = {Expr(0), extent.is_constant() ? std::optional<Expr>(extent - 1) : std::nullopt};
    if (known) magnitudes_[b.name] = bound;
    narrow_.insert(b.name);
  }
}

std::string CudaIndex::id(const std::string& name) {
  std::string out;
  for (char c : name) out += c == '.' || c == '%' || c == '@' || c == '$' ? '_' : c;
  return "v_" + out;
}

std::vector<std::string> CudaIndex::conditions() const {
  std::vector<std::string> out(divisible_.begin(), divisible_.end());
  for (size_t k = 0; k < below_.size(); ++k) {
    // One that another one implies says nothing.
    bool implied = false;
    for (size_t other = 0; other < below_.size() && !implied; ++other)
      implied = other != k && provably_nonnegative(below_[other] - below_[k], ranges_) &&
                (other < k || !provably_nonnegative(below_[k] - below_[other], ranges_));
    if (implied) continue;
    auto product = [&](auto& self, Expr e) -> std::string {
      if (e.is_constant()) return std::to_string(e.value()) + ".0f";
      if (e.is_symbol()) return fmt::format("(float){}", id(e.name()));
      std::string parts;
      const std::string_view op = e.kind() == ExprKind::add ? " + " : e.kind() == ExprKind::mul ? "*" : " / ";
      for (Expr part : e.operands()) parts += (parts.empty() ? "" : std::string(op)) + self(self, part);
      return "(" + parts + ")";
    };
    out.push_back(fmt::format("{} < {}", product(product, below_[k]), kBelow));
  }
  if (assumes_)
    for (const std::string& s : sizes_) out.push_back(fmt::format("{} >= 0", id(s)));
  return out;
}

/// A bound of |e| that is a sum of products of sizes and numbers; none where these leave 64 bits.
Expr CudaIndex::magnitude(Expr e, bool* known) const {
  try {
    return bound_of(e, known);
  } catch (const UnsupportedError&) {
    *known = false;
    return 0;
  }
}

Expr CudaIndex::bound_of(Expr e, bool* known) const {
  switch (e.kind()) {
    case ExprKind::constant: return e.value() < 0 ? Expr(0) - e : e;
    case ExprKind::symbol: {
      auto it = magnitudes_.find(e.name());
      *known = *known && it != magnitudes_.end();
      return it == magnitudes_.end() ? Expr(0) : it->second;
    }
    case ExprKind::add: {
      Expr sum = 0;
      for (Expr t : e.operands()) sum = sum + bound_of(t, known);
      return sum;
    }
    case ExprKind::mul: {
      Expr result = 1;
      for (Expr t : e.operands()) result = result * bound_of(t, known);
      return result;
    }
    case ExprKind::floordiv: {
      Expr whole = bound_of(e.operands()[0], known);
      Expr by = e.operands()[1];
      // Rounding away from 0 adds at most one; the bound is evaluated as a float, so that a divisor of 0 makes it infinite.
      const Expr divisor = bound_of(by, known);
      if (divisor.is(0)) *known = false;
      return *known ? floordiv(whole, divisor) + 1 : Expr(0);
    }
    case ExprKind::mod: return bound_of(e.operands()[1], known);
    case ExprKind::min:
    case ExprKind::max: {
      Expr a = bound_of(e.operands()[0], known);
      Expr b = bound_of(e.operands()[1], known);
      if (a.is_constant() && b.is_constant()) return std::max(a.value(), b.value());
      return a + b;
    }
  }
  return 0;
}

// Sums and products bound their parts; what is divided may be larger than its quotient.
bool CudaIndex::divides_narrow(Expr e) {
  if (e.is_constant() || e.is_symbol()) return true;
  const bool divides = e.kind() == ExprKind::floordiv || e.kind() == ExprKind::mod;
  return std::all_of(e.operands().begin(), e.operands().end(), [&](Expr part) { return divides ? is_narrow(part) : divides_narrow(part); });
}

bool CudaIndex::is_narrow(Expr e) {
  if (!divides_narrow(e)) return false;
  bool known = true;
  Expr most = magnitude(e, &known);
  if (!known) return false;
  if (most.is_constant()) return most.value() <= kMostInt;
  if (!assumes_) return false;
  if (std::find(below_.begin(), below_.end(), most) == below_.end()) below_.push_back(most);
  return true;
}

void CudaIndex::define(const std::string& name, Expr value) {
  bool known = true;
  Expr most = magnitude(value, &known);
  if (known) magnitudes_[name] = most;
  multiples_[name] = factor(value);
  const Interval found = bounds(value, ranges_);
  Range range;
  if (found.lo) range.lo = *found.lo;
  if (found.hi) range.hi = *found.hi;
  ranges_[name] = range;
  if (is_narrow(value)) narrow_.insert(name);
}

void CudaIndex::define_loop(const For& loop) {
  bool known = true;
  Expr most = magnitude(loop.hi, &known);
  Expr first = magnitude(loop.lo, &known);
  const Interval lo = bounds(loop.lo, ranges_);
  const Interval hi = bounds(loop.hi, ranges_);
  Range range;
  if (lo.lo) range.lo = *lo.lo;
  if (hi.hi) range.hi = *hi.hi - 1;
  // Values lie from lo to below hi, so one bounds them where the other cannot be larger in size.
  const bool positive = lo.lo && *lo.lo >= 0;
  Expr bound = positive ? most : most + first;
  if (known) magnitudes_[loop.name] = bound;
  ranges_[loop.name] = range;
  multiples_[loop.name] = std::gcd(factor(loop.lo), factor(loop.step));
  // The last step may go beyond the end.
  if (known && loop.step.is_constant() && is_narrow(loop.lo) && is_narrow(loop.hi + loop.step)) narrow_.insert(loop.name);
}

void CudaIndex::define_unknown(const std::string& name) {
  magnitudes_.erase(name);
  multiples_.erase(name);
  ranges_.erase(name);
}

int64_t CudaIndex::factor_of(const std::string& name) const {
  auto it = multiples_.find(name);
  return it == multiples_.end() ? 1 : it->second;
}

/// A number that divides e.
int64_t CudaIndex::factor(Expr e) const {
  switch (e.kind()) {
    case ExprKind::constant: return e.value() == 0 ? kLargestMultiple : std::gcd(e.value() < 0 ? -e.value() : e.value(), kLargestMultiple);
    case ExprKind::symbol: return factor_of(e.name());
    case ExprKind::add: {
      int64_t g = 0;
      for (Expr t : e.operands()) g = std::gcd(g, factor(t));
      return g;
    }
    case ExprKind::mul: {
      int64_t product = 1;
      for (Expr t : e.operands()) product = std::gcd(product * std::min<int64_t>(factor(t), 1 << 20), kLargestMultiple);
      return product;
    }
    case ExprKind::mod:
    case ExprKind::min:
    case ExprKind::max: return std::gcd(factor(e.operands()[0]), factor(e.operands()[1]));
    case ExprKind::floordiv: return 1;
  }
  return 1;
}

bool CudaIndex::is_multiple(Expr e, int64_t of) {
  if (factor(e) % of == 0) return true;
  if (!assumes_) return false;
  std::set<std::string> needed;
  std::vector<Expr> terms = e.kind() == ExprKind::add ? e.operands() : std::vector<Expr>{e};
  for (Expr term : terms) {
    if (factor(term) % of == 0) continue;
    std::string size;
    std::vector<Expr> atoms = term.kind() == ExprKind::mul ? term.operands() : std::vector<Expr>{term};
    for (Expr atom : atoms)
      if (atom.is_symbol() && is_size(atom.name())) size = atom.name();
    if (size.empty()) return false;
    needed.insert(fmt::format("{} % {} == 0", id(size), of));
  }
  divisible_.insert(needed.begin(), needed.end());
  return true;
}

std::string CudaIndex::symbol(const std::string& name, bool narrow) const {
  const Builtin* builtin = find_builtin(name);
  if (builtin) return fmt::format("({}){}", narrow ? "int" : "long long", builtin->text);
  if (narrow) return narrow_.count(name) ? id(name) : "(int)" + id(name);
  return narrow_.count(name) ? "(long long)" + id(name) : id(name);
}

std::string CudaIndex::text(Expr e) { return print(e, is_narrow(e)); }

std::string CudaIndex::print(Expr e, bool narrow) {
  auto pair = [&](std::string_view function) {
    return fmt::format("{}({}, {})", function, print(e.operands()[0], narrow), print(e.operands()[1], narrow));
  };
  switch (e.kind()) {
    case ExprKind::constant: {
      const bool large = e.value() > kMostInt || e.value() < -kMostInt;
      return std::to_string(e.value()) + (large || !narrow ? "LL" : "");
    }
    case ExprKind::symbol: return symbol(e.name(), narrow);
    case ExprKind::add:
    case ExprKind::mul: {
      std::string out;
      for (const Expr& t : e.operands()) out += (out.empty() ? "" : e.kind() == ExprKind::add ? " + " : "*") + print(t, narrow);
      return "(" + out + ")";
    }
    case ExprKind::floordiv:
    case ExprKind::mod: {
      const Interval left = bounds(e.operands()[0], ranges_);
      const Interval right = bounds(e.operands()[1], ranges_);
      const bool floor = e.kind() == ExprKind::floordiv;
      // Of numbers without a sign C++ means the same; unsigned division by a constant is a multiplication and a shift.
      if (left.lo && *left.lo >= 0 && right.lo && *right.lo > 0) {
        std::string_view type = narrow ? "int" : "long long";
        return named(e, narrow,
                     fmt::format("({0})((unsigned {0}){1} {2} (unsigned {0}){3})", type, print(e.operands()[0], narrow), floor ? "/" : "%",
                                 print(e.operands()[1], narrow)));
      }
      return named(e, narrow, pair(floor ? "deplo_floordiv" : "deplo_mod"));
    }
    case ExprKind::min: return named(e, narrow, pair("deplo_min_i"));
    case ExprKind::max: return named(e, narrow, pair("deplo_max_i"));
  }
  return "";
}

std::string CudaIndex::named(Expr e, bool narrow, std::string text) {
  if (!names_divisions_) return text;
  std::set<std::string> symbols;
  collect_symbols(e, symbols);
  const bool known = std::all_of(symbols.begin(), symbols.end(), [&](const std::string& s) { return is_size(s) || find_builtin(s); });
  if (!known || std::none_of(symbols.begin(), symbols.end(), [&](const std::string& s) { return is_size(s); })) return text;
  const std::string_view type = narrow ? "int" : "long long";
  const auto [at, is_new] = named_.emplace(fmt::format("{} {}", type, text), fmt::format("q_{}", named_.size()));
  if (is_new) declarations_.push_back(fmt::format("const {} {} = {};", type, at->second, text));
  return at->second;
}

std::string CudaIndex::text(const std::vector<Cond>& guard) {
  std::string out;
  std::vector<bool> done(guard.size(), false);
  for (size_t k = 0; k < guard.size(); ++k) {
    if (done[k]) continue;
    const Cond& c = guard[k];
    // From 0 to a constant: one comparison of numbers without a sign.
    size_t other = k + 1;
    const auto closes = [&](const Cond& d) {
      const Expr length = c.expr + d.expr;
      return c.kind == Cond::Kind::ge0 && d.kind == Cond::Kind::ge0 && length.is_constant() && length.value() >= 0 && length.value() <= kMostInt;
    };
    while (other < guard.size() && (done[other] || !closes(guard[other]))) ++other;
    if (other < guard.size() && is_narrow(c.expr) && is_narrow(guard[other].expr)) {
      done[other] = true;
      const Expr length = c.expr + guard[other].expr;
      const auto terms = terms_of(c.expr);
      const bool turned = std::any_of(terms.begin(), terms.end(), [](const Term& t) { return !t.atoms.empty() && t.coefficient < 0; });
      out += fmt::format("{}(unsigned int){} <= {}u", out.empty() ? "" : " && ", text(turned ? guard[other].expr : c.expr), length.value());
      continue;
    }
    std::string_view op = c.kind == Cond::Kind::ge0 ? ">=" : c.kind == Cond::Kind::eq0 ? "==" : "!=";
    out += fmt::format("{}{} {} 0", out.empty() ? "" : " && ", text(c.expr), op);
  }
  return out.empty() ? "true" : out;
}

}  // namespace deplo
