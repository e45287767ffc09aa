#include <algorithm>
#include <unordered_map>

#include "base/error.h"
#include "lower/torch_to_tensor.h"
#include "lower/torch_to_tensor/builder.h"

namespace deplo::rules {
namespace {

using Table = std::unordered_map<std::string_view, Rule>;

Table joined_table() {
  Table table;
  for (const auto* rows : {&pointwise_rules(), &view_rules(), &index_rules(), &creation_rules(), &reduction_rules(), &contraction_rules(),
                           &convolution_rules(), &normalization_rules(), &attention_rules(), &pooling_rules(), &backward_rules()})
    for (const Row& row : *rows) DEPLO_ASSERT(table.emplace(row.overload, row.rule).second, "two rules for {}", row.overload);
  return table;
}

const Table& table() {
  static const Table joined = joined_table();
  return joined;
}

struct Reason {
  std::string_view packet;  ///< "aten.sort": all its overloads
  std::string_view text;
};

constexpr std::string_view kRandom = "random numbers come from ATen's generator";
constexpr std::string_view kSorting = "sorting is left to ATen";
constexpr std::string_view kLinalg = "dense factorisations are left to LAPACK";
constexpr std::string_view kDataSize = "the result's size depends on values";

constexpr Reason kReasons[] = {
    {"aten.rand", kRandom},
    {"aten.rand_like", kRandom},
    {"aten.randn", kRandom},
    {"aten.randn_like", kRandom},
    {"aten.randint", kRandom},
    {"aten.randint_like", kRandom},
    {"aten.randperm", kRandom},
    {"aten.bernoulli", kRandom},
    {"aten.multinomial", kRandom},
    {"aten.normal", kRandom},
    {"aten.normal_functional", kRandom},
    {"aten.uniform", kRandom},
    {"aten.exponential", kRandom},
    {"aten.geometric", kRandom},
    {"aten.poisson", kRandom},
    {"aten.sort", kSorting},
    {"aten.argsort", kSorting},
    {"aten.topk", kSorting},
    {"aten.kthvalue", kSorting},
    {"aten.median", kSorting},
    {"aten.mode", kSorting},
    {"aten.searchsorted", kSorting},
    {"aten.bucketize", kSorting},
    {"aten.unique_consecutive", kDataSize},
    {"aten._unique2", kDataSize},
    {"aten.nonzero", kDataSize},
    {"aten.masked_select", kDataSize},
    {"aten._fft_r2c", "Fourier transforms are left to ATen"},
    {"aten._fft_c2r", "Fourier transforms are left to ATen"},
    {"aten._fft_c2c", "Fourier transforms are left to ATen"},
    {"aten.linalg_inv_ex", kLinalg},
    {"aten.linalg_solve_triangular", kLinalg},
    {"aten.linalg_qr", kLinalg},
    {"aten.linalg_cholesky_ex", kLinalg},
    {"aten._linalg_svd", kLinalg},
    {"aten._linalg_eigh", kLinalg},
    {"aten._linalg_det", kLinalg},
    {"aten._linalg_slogdet", kLinalg},
    {"aten._linalg_solve_ex", kLinalg},
};

constexpr std::string_view kLayoutOps[] = {"aten.as_strided", "aten.as_strided_copy", "aten.as_strided_scatter", "aten.view_as_real",
                                           "aten.view_as_complex"};

constexpr std::string_view kViews[] = {"aten._reshape_alias",   "aten._unsafe_view",   "aten.alias",     "aten.as_strided",
                                       "aten.detach",           "aten.diagonal",       "aten.expand",    "aten.lift_fresh",
                                       "aten.permute",          "aten.select",         "aten.slice",     "aten.split",
                                       "aten.split_with_sizes", "aten.squeeze",        "aten.t",         "aten.transpose",
                                       "aten.unbind",           "aten.unfold",         "aten.unsqueeze", "aten.view",
                                       "aten.view_as_real",     "aten.view_as_complex"};

std::string_view packet_of(std::string_view overload) { return overload.substr(0, overload.rfind('.')); }

}  // namespace

Rule find_rule(std::string_view overload) {
  auto it = table().find(overload);
  return it == table().end() ? nullptr : it->second;
}

std::string_view library_reason(std::string_view overload) {
  for (const Reason& reason : kReasons)
    if (reason.packet == packet_of(overload)) return reason.text;
  return "";
}

bool needs_layout(std::string_view overload) {
  return std::find(std::begin(kLayoutOps), std::end(kLayoutOps), packet_of(overload)) != std::end(kLayoutOps);
}

bool is_view(std::string_view overload) { return std::find(std::begin(kViews), std::end(kViews), packet_of(overload)) != std::end(kViews); }

}  // namespace deplo::rules

namespace deplo {

std::vector<std::string> decomposed_overloads() {
  std::vector<std::string> names;
  for (const auto& [overload, rule] : rules::table()) names.emplace_back(overload);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace deplo
