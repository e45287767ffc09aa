#pragma once

#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <random>
#include <regex>
#include <string>
#include <vector>

#include "base/array.h"
#include "program_ir/interpret.h"
#include "tensor_ir/ir.h"

// Small Tensor IR programs that tests send through the levels.

namespace deplo::testing {

using Sizes = std::map<std::string, int64_t>;

struct Case {
  std::string name;
  std::string text;
  Sizes sizes;
};

inline std::string softmax_of(const std::string& rows, const std::string& columns, const std::string& where = "") {
  std::string text = R"(tensor @softmax(%x: f32[ROWS, COLUMNS] strides [COLUMNS, 1] user)WHERE
  %m: f32[ROWS] = reduce max(%x) axes=[1]
  %b: f32[ROWS, COLUMNS] = map (i, j) -> %m[i]
  %d: f32[ROWS, COLUMNS] = sub(%x, %b)
  %e: f32[ROWS, COLUMNS] = exp(%d)
  %s: f32[ROWS] = reduce sum(%e) axes=[1]
  %t: f32[ROWS, COLUMNS] = map (i, j) -> %s[i]
  %y: f32[ROWS, COLUMNS] = div(%e, %t)
  return %y strides [COLUMNS, 1]
)";
  for (const auto& [from, to] : {std::pair<std::string, std::string>{"ROWS", rows}, {"COLUMNS", columns}, {"WHERE", where}})
    text = std::regex_replace(text, std::regex(from), to);
  return text;
}

/// Products of 16-bit operands, each in either layout (`x`, `y`: "i, k" or "k, i"), added up in float32 and rounded behind a bias.
inline std::string halves_of(const std::string& dtype, const std::string& m, const std::string& n, const std::string& k, bool x_by_k, bool y_by_k) {
  const std::string where = m[0] == 's' ? " where " + m + " in 1.." : "";
  auto shape = [&](const std::string& size, bool by_k) {
    return by_k ? fmt::format("[{}, {}] strides [{}, 1]", k, size, size) : fmt::format("[{}, {}] strides [{}, 1]", size, k, k);
  };
  auto sizes = [&](const std::string& size, bool by_k) { return by_k ? fmt::format("[{}, {}]", k, size) : fmt::format("[{}, {}]", size, k); };
  return fmt::format(R"(tensor @halves(%x: {0}{1} user, %y: {0}{2} user, %b: {0}[{4}] strides [1] user){5}
  %xf: f32{7} = cast(%x)
  %yf: f32{8} = cast(%y)
  %xm: f32[{3}, {4}, {6}] = map (i, j, k) -> %xf[{9}]
  %ym: f32[{3}, {4}, {6}] = map (i, j, k) -> %yf[{10}]
  %p: f32[{3}, {4}, {6}] = mul(%xm, %ym)
  %c: f32[{3}, {4}] = reduce sum(%p) axes=[2]
  %bf: f32[{4}] = cast(%b)
  %bm: f32[{3}, {4}] = map (i, j) -> %bf[j]
  %s: f32[{3}, {4}] = add(%c, %bm)
  %r: {0}[{3}, {4}] = cast(%s)
  return %r strides [{4}, 1]
)",
                     dtype, shape(m, x_by_k), shape(n, y_by_k), m, n, where, k, sizes(m, x_by_k), sizes(n, y_by_k), x_by_k ? "k, i" : "i, k",
                     y_by_k ? "k, j" : "j, k");
}

inline std::vector<Case> cases() {
  const std::string softmax = softmax_of("s0", "s1", " where s0 in 1.., s1 in 1..");
  const std::string rows = softmax_of("s0", "300", " where s0 in 1..");
  const std::string norm = R"(tensor @norm(%x: f32[6, 40] strides [40, 1] user, %w: f32[40] strides [1] parameter static)
  %n: f32[6] = constant 0.025
  %s: f32[6] = reduce sum(%x) axes=[1]
  %mean: f32[6] = mul(%s, %n)
  %mb: f32[6, 40] = map (i, j) -> %mean[i]
  %d: f32[6, 40] = sub(%x, %mb)
  %q: f32[6, 40] = mul(%d, %d)
  %v: f32[6] = reduce sum(%q) axes=[1]
  %va: f32[6] = mul(%v, %n)
  %r: f32[6] = sqrt(%va)
  %rb: f32[6, 40] = map (i, j) -> %r[i]
  %z: f32[6, 40] = div(%d, %rb)
  %wb: f32[6, 40] = map (i, j) -> %w[j]
  %y: f32[6, 40] = mul(%z, %wb)
  return %y strides [40, 1]
)";
  const std::string linear =
      R"(tensor @linear(%x: f32[s0, 50] strides [50, 1] user, %w: f32[70, 50] strides [50, 1] parameter static, %b: f32[70] strides [1] parameter static) where s0 in 1..
  %xm: f32[s0, 70, 50] = map (i, n, k) -> %x[i, k]
  %wm: f32[s0, 70, 50] = map (i, n, k) -> %w[n, k]
  %p: f32[s0, 70, 50] = mul(%xm, %wm)
  %c: f32[s0, 70] = reduce sum(%p) axes=[2]
  %bb: f32[s0, 70] = map (i, n) -> %b[n]
  %h: f32[s0, 70] = add(%c, %bb)
  %z: f32[s0, 70] = constant 0.0
  %y: f32[s0, 70] = max(%h, %z)
  return %y strides [70, 1]
)";
  const std::string transpose = R"(tensor @transpose(%x: f32[9, 13] strides [13, 1] user)
  %a: f32[9, 13] = tanh(%x)
  %t: f32[13, 9] = map (i, j) -> %a[j, i]
  %y: f32[13, 11] = map (i, j) -> %t[i, j - 1] if j - 1 >= 0 and j < 10 else 0.5
  return %y strides [11, 1]
)";
  const std::string low = R"(tensor @low(%x: bf16[5, 33] strides [33, 1] user)
  %f: f32[5, 33] = cast(%x)
  %e: f32[5, 33] = exp(%f)
  %y: bf16[5, 33] = cast(%e)
  return %y strides [33, 1]
)";
  const std::string pairs = R"(tensor @pairs(%x: bf16[s0, 62] strides [62, 1] user, %w: bf16[40, 62] strides [62, 1] parameter static) where s0 in 1..
  %xf: f32[s0, 62] = cast(%x)
  %wf: f32[40, 62] = cast(%w)
  %xm: f32[s0, 40, 62] = map (i, n, k) -> %xf[i, k]
  %wm: f32[s0, 40, 62] = map (i, n, k) -> %wf[n, k]
  %p: f32[s0, 40, 62] = mul(%xm, %wm)
  %y: f32[s0, 40] = reduce sum(%p) axes=[2]
  return %y strides [40, 1]
)";
  const std::string total = R"(tensor @total(%x: f32[s0, 17] strides [17, 1] user) where s0 in 1..
  %s: f32[] = reduce sum(%x) axes=[0, 1]
  %c: f32[17] = reduce max(%x) axes=[0]
  return %s strides [], %c strides [1]
)";
  const std::string squares = R"(tensor @squares(%x: f32[50, s0] strides [s0, 1] user, %z: f32[s0, 50] strides [50, 1] user) where s0 in 1..
  %t: f32[s0, 50] = map (i, j) -> %x[j, i]
  %y: f32[s0, 50] = add(%t, %z)
  return %y strides [50, 1]
)";
  const std::string columns = R"(tensor @columns(%x: f32[37, 300] strides [300, 1] user)
  %y: f32[300] = reduce sum(%x) axes=[0]
  %s: f32[] = reduce sum(%x) axes=[0, 1]
  return %y strides [1], %s strides []
)";
  const std::string attention =
      R"(tensor @attention(%q: f32[2, s0, 4] strides [4*s0, 4, 1] user, %k: f32[2, 21, 4] strides [84, 4, 1] user, %v: f32[2, 21, 4] strides [84, 4, 1] user) where s0 in 1..
  %qm: f32[2, s0, 21, 4] = map (h, i, j, d) -> %q[h, i, d]
  %km: f32[2, s0, 21, 4] = map (h, i, j, d) -> %k[h, j, d]
  %p: f32[2, s0, 21, 4] = mul(%qm, %km)
  %c: f32[2, s0, 21] = reduce sum(%p) axes=[3]
  %m: f32[2, s0] = reduce max(%c) axes=[2]
  %b: f32[2, s0, 21] = map (h, i, j) -> %m[h, i]
  %d: f32[2, s0, 21] = sub(%c, %b)
  %e: f32[2, s0, 21] = exp(%d)
  %s: f32[2, s0] = reduce sum(%e) axes=[2]
  %t: f32[2, s0, 21] = map (h, i, j) -> %s[h, i]
  %y: f32[2, s0, 21] = div(%e, %t)
  %ym: f32[2, s0, 4, 21] = map (h, i, d, j) -> %y[h, i, j]
  %vm: f32[2, s0, 4, 21] = map (h, i, d, j) -> %v[h, j, d]
  %pv: f32[2, s0, 4, 21] = mul(%ym, %vm)
  %o: f32[2, s0, 4] = reduce sum(%pv) axes=[3]
  return %o strides [4*s0, 4, 1]
)";
  // With at most 64 elements, a loop of four whole vectors runs once or not at all.
  const std::string short_rows = R"(tensor @short(%x: f32[s0, s0] strides [s0, 1] user) where s0 in 1..64
  %a: f32[s0, s0, s0] = map (i, j, k) -> %x[i, k]
  %b: f32[s0, s0, s0] = map (i, j, k) -> %x[j, k]
  %c: f32[s0, s0, s0] = mul(%a, %b)
  %d: f32[s0, s0] = reduce sum(%c) axes=[2]
  return %d strides [s0, 1], %c strides [s0*s0, s0, 1]
)";
  // By sizes and numbers below 0, which lanes hold, one value a lane, or the host computes.
  const std::string divisions = R"(tensor @divisions(%x: f32[s0, 37] strides [37, 1] user) where s0 in 1..30
  %q: i64[s0, 37] = index (i, j) -> (j - 20) // (s0 - 40)
  %r: i64[s0, 37] = index (i, j) -> (j - 20) % (s0 - 40)
  %c: i64[s0, 37] = index (i, j) -> (i - j) // (-3) + (i - j) % (-5) + s0 // (s0 - 31) + (7 - s0) % (s0 - 31)
  %d: i64[s0, 37] = add(%q, %r)
  %e: i64[s0, 37] = add(%d, %c)
  %f: f32[s0, 37] = cast(%e)
  %g: f32[s0, 37] = map (i, j) -> %x[max(min(0 - i // (s0 - 40), s0 - 1), 0), max(0 - j % (s0 - 37), 0)]
  %y: f32[s0, 37] = add(%f, %g)
  %n: f32[s0 // (0 - 2) + s0, s0 % (s0 - 31) - s0 + 40] = map (i, j) -> %y[i, 0]
  return %y strides [37, 1], %n strides [s0 % (s0 - 31) - s0 + 40, 1]
)";
  // Weighted sums of neighbours, every other one of a line, inside of an image.
  const std::string windows =
      R"(tensor @windows(%x: f32[3, s0, 75] strides [s0*75, 75, 1] user, %w: f32[3, 3, 3] strides [9, 3, 1] user) where s0 in 2..
  %a: f32[3, s0, 38, 3, 3] = map (c, i, j, k, l) -> %x[c, i + k*2 - 2, j*2 + l - 1] if i + k*2 >= 2 and i + k*2 - 2 < s0 and j*2 + l >= 1 and j*2 + l - 1 < 75 else 0.0
  %b: f32[3, s0, 38, 3, 3] = map (c, i, j, k, l) -> %w[c, k, l]
  %p: f32[3, s0, 38, 3, 3] = mul(%a, %b)
  %y: f32[3, s0, 38] = reduce sum(%p) axes=[3, 4]
  return %y strides [s0*38, 38, 1]
)";
  return {{"squares", squares, {{"s0", 41}}},
          {"windows", windows, {{"s0", 13}}},
          {"short rows", short_rows, {{"s0", 3}}},
          {"columns", columns, {}},
          {"attention", attention, {{"s0", 7}}},
          {"softmax", softmax, {{"s0", 5}, {"s1", 37}}},
          {"softmax of constant rows", rows, {{"s0", 5}}},
          {"softmax of short rows", softmax, {{"s0", 3}, {"s1", 2}}},
          {"norm", norm, {}},
          {"linear", linear, {{"s0", 19}}},
          {"pairs of bf16", pairs, {{"s0", 19}}},
          {"bf16 along k", halves_of("bf16", "s0", "40", "64", false, false), {{"s0", 21}}},
          {"f16 along rows and columns", halves_of("f16", "40", "24", "72", true, true), {}},
          {"linear of one row", linear, {{"s0", 1}}},
          {"divisions", divisions, {{"s0", 19}}},
          {"transpose", transpose, {}},
          {"bfloat16", low, {}},
          {"reductions over everything and over rows", total, {{"s0", 41}}}};
}

inline std::vector<Array> random_inputs(const tensor_ir::Graph& graph, const Sizes& sizes) {
  std::mt19937 rng(5);
  std::vector<Array> inputs;
  for (const auto& input : graph.inputs) {
    Array a = Array::zeros(input.type.dtype, evaluate_shape(input.type.shape, sizes));
    for (int64_t k = 0; k < a.count(); ++k) a.set(k, Scalar::of_float(a.dtype, static_cast<double>(rng() % 2001) / 1000 - 1));
    inputs.push_back(std::move(a));
  }
  return inputs;
}

/// Half the distance from 1 to the next number: what one rounding to dtype may change, relative to the result.
inline double unit_roundoff(DType dtype) {
  return std::ldexp(1.0, dtype == DType::f64 ? -53 : dtype == DType::f32 ? -24 : dtype == DType::f16 ? -11 : -8);
}

/// The most roundings that make one element of a graph: those of its longest chain of sums, in any order, and a few for each op around them
/// (functions are good to 1 ulp, which is two of these units).
inline double roundings(const tensor_ir::Graph& graph, const Sizes& sizes) {
  double terms = 0;
  double ops = 0;
  std::map<std::string, std::vector<Expr>> shapes;
  for (const auto& input : graph.inputs) shapes[input.name] = input.type.shape;
  for (const auto& op : graph.ops) {
    for (const auto& value : op->results) shapes[value.name] = value.type.shape;
    std::vector<int> axes;
    if (const auto* n = std::get_if<tensor_ir::Reduction>(&op->node)) axes = n->axes;
    if (const auto* n = std::get_if<tensor_ir::Scan>(&op->node)) axes = {n->axis};
    double count = axes.empty() ? 0 : 1;
    for (int axis : axes) count *= static_cast<double>(evaluate(shapes.at(tensor_ir::operands_of(*op)[0])[static_cast<size_t>(axis)], sizes));
    terms += count;
    ops += 1;
  }
  return terms + 2 * ops;
}

inline void require_close(const std::vector<Array>& got, const std::vector<Array>& wanted, double tolerance) {
  REQUIRE(got.size() == wanted.size());
  for (size_t k = 0; k < got.size(); ++k) {
    REQUIRE(got[k].shape == wanted[k].shape);
    for (int64_t i = 0; i < got[k].count(); ++i) {
      INFO("output " << k << ", element " << i);
      REQUIRE(got[k].get(i).as_double() == Approx(wanted[k].get(i).as_double()).epsilon(tolerance).margin(tolerance));
    }
  }
}

}  // namespace deplo::testing
