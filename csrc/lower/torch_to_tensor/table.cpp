#include <algorithm>
#include <unordered_map>

#include "base/error.h"
#include "lower/torch_to_tensor.h"
#include "lower/torch_to_tensor/builder.h"

namespace deplo::rules {
namespace {

struct Family {
  std::string_view file;
  const std::vector<Row>& rows;
};

std::vector<Family> families() {
  return {{"pointwise", pointwise_rules()},
          {"view", view_rules()},
          {"index", index_rules()},
          {"creation", creation_rules()},
          {"reduction", reduction_rules()},
          {"contraction", contraction_rules()},
          {"convolution", convolution_rules()},
          {"normalization", normalization_rules()},
          {"attention", attention_rules()},
          {"pooling", pooling_rules()},
          {"backward", backward_rules()}};
}

struct Entry {
  Rule rule;
  std::string_view file;
};
using Table = std::unordered_map<std::string_view, Entry>;

Table joined_table() {
  Table table;
  for (const Family& family : families())
    for (const Row& row : family.rows)
      DEPLO_ASSERT(table.emplace(row.overload, Entry{row.rule, family.file}).second, "two rules for {}", row.overload);
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
constexpr std::string_view kSearch = "a search in a sequence of symbolic length, or of booleans, is left to ATen";
constexpr std::string_view kLinalg = "dense factorisations are left to LAPACK";
constexpr std::string_view kDataSize = "the result's size depends on values";
constexpr std::string_view kDataBranch = "a number that the program branches on";
constexpr std::string_view kFourier = "Fourier transforms are left to ATen";

constexpr std::string_view kWhile = "a loop whose length depends on the values";
constexpr std::string_view kRecurrence = "a recurrence as long as the value of an operand";
constexpr std::string_view kSeries = "a series of ATen that has no rule yet";
constexpr std::string_view kHistogram = "a histogram whose edges or ranges are checked by value";
constexpr std::string_view kAssertion = "an assertion, which raises by value";

constexpr Reason kReasons[] = {
    {"deplo.generator_state", kRandom},
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
    {"aten.binomial", kRandom},
    {"aten.cauchy", kRandom},
    {"aten.log_normal", kRandom},
    {"aten.rrelu_with_noise_functional", kRandom},
    {"aten.sort", kSorting},
    {"aten.argsort", kSorting},
    {"aten.topk", kSorting},
    {"aten.kthvalue", kSorting},
    {"aten.median", kSorting},
    {"aten.mode", kSorting},
    {"aten.nanmedian", kSorting},
    {"aten.searchsorted", kSearch},
    {"aten.bucketize", kSearch},
    {"aten.unique_consecutive", kDataSize},
    {"aten._unique2", kDataSize},
    {"aten.nonzero", kDataSize},
    {"aten.nonzero_static", "a list of the places that are not zero is left to ATen"},
    {"aten._local_scalar_dense", kDataBranch},
    {"aten.equal", kDataBranch},
    {"aten.allclose", kDataBranch},
    {"aten.masked_select", kDataSize},
    {"aten._fft_r2c", kFourier},
    {"aten._fft_c2r", kFourier},
    {"aten._fft_c2c", kFourier},
    {"aten.linalg_inv_ex", kLinalg},
    {"aten._linalg_check_errors", "raises what a factorisation reports"},
    {"aten.linalg_solve_triangular", kLinalg},
    {"aten.linalg_qr", kLinalg},
    {"aten.linalg_cholesky_ex", kLinalg},
    {"aten._linalg_svd", kLinalg},
    {"aten._linalg_eigh", kLinalg},
    {"aten._linalg_det", kLinalg},
    {"aten._linalg_slogdet", kLinalg},
    {"aten._linalg_solve_ex", kLinalg},
    {"aten.cholesky", kLinalg},
    {"aten.cholesky_inverse", kLinalg},
    {"aten.cholesky_solve", kLinalg},
    {"aten.linalg_eig", kLinalg},
    {"aten.linalg_eigvals", kLinalg},
    {"aten.linalg_householder_product", kLinalg},
    {"aten.linalg_ldl_factor_ex", kLinalg},
    {"aten.linalg_ldl_solve", kLinalg},
    {"aten.linalg_lstsq", kLinalg},
    {"aten.linalg_lu", kLinalg},
    {"aten.linalg_lu_factor_ex", kLinalg},
    {"aten.linalg_lu_solve", kLinalg},
    {"aten.linalg_matrix_exp", kLinalg},
    {"aten.linalg_pinv", kLinalg},
    {"aten.lu_unpack", kLinalg},
    {"aten.geqrf", kLinalg},
    {"aten.ormqr", kLinalg},
    {"aten.triangular_solve", kLinalg},
    {"aten._standard_gamma", kRandom},
    {"aten._sample_dirichlet", kRandom},
    {"aten.random", kRandom},
    {"aten._assert_async", kAssertion},
    {"aten._functional_assert_async", kAssertion},
    {"aten.gcd", kWhile},
    {"aten.lcm", kWhile},
    {"aten.histc", kHistogram},
    {"aten.histogram", kHistogram},
    {"aten._histogramdd_bin_edges", kHistogram},
    {"aten._histogramdd_from_bin_cts", kHistogram},
    {"aten._histogramdd_from_bin_tensors", kHistogram},
    {"aten.igamma", kSeries},
    {"aten.igammac", kSeries},
    {"aten.special_airy_ai", kSeries},
    {"aten.special_spherical_bessel_j0", kSeries},
    {"aten.bincount", kDataSize},
    {"aten._ctc_loss", kDataBranch},
    {"torch_nn._linear_cross_entropy_batch_chunked", "a loop over chunks, which bounds its memory"},
    {"torch_nn._linear_cross_entropy_batch_chunked_no_reduction", "a loop over chunks, which bounds its memory"},
    {"aten.special_bessel_j0", kSeries},
    {"aten.special_bessel_j1", kSeries},
    {"aten.special_bessel_y0", kSeries},
    {"aten.special_bessel_y1", kSeries},
    {"aten.special_modified_bessel_k0", kSeries},
    {"aten.special_modified_bessel_k1", kSeries},
    {"aten.special_scaled_modified_bessel_k0", kSeries},
    {"aten.special_scaled_modified_bessel_k1", kSeries},
    {"aten.special_chebyshev_polynomial_t", kRecurrence},
    {"aten.special_chebyshev_polynomial_u", kRecurrence},
    {"aten.special_chebyshev_polynomial_v", kRecurrence},
    {"aten.special_chebyshev_polynomial_w", kRecurrence},
    {"aten.special_hermite_polynomial_h", kRecurrence},
    {"aten.special_hermite_polynomial_he", kRecurrence},
    {"aten.special_laguerre_polynomial_l", kRecurrence},
    {"aten.special_legendre_polynomial_p", kRecurrence},
    {"aten.special_shifted_chebyshev_polynomial_t", kRecurrence},
    {"aten.special_shifted_chebyshev_polynomial_u", kRecurrence},
    {"aten.special_shifted_chebyshev_polynomial_v", kRecurrence},
    {"aten.special_shifted_chebyshev_polynomial_w", kRecurrence},
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
  return it == table().end() ? nullptr : it->second.rule;
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

std::vector<std::pair<std::string, std::string>> overload_files() {
  std::vector<std::pair<std::string, std::string>> rows;
  for (const auto& [overload, entry] : rules::table()) rows.emplace_back(overload, fmt::format("{}.cpp", entry.file));
  std::sort(rows.begin(), rows.end());
  return rows;
}

bool is_view(std::string_view overload) { return rules::is_view(overload); }

bool is_deterministic(std::string_view overload) {
  // The rule of dropout draws its mask by a library call.
  if (rules::packet_of(overload) == "aten.native_dropout") return false;
  std::string_view reason = rules::library_reason(overload);
  return rules::find_rule(overload) || (!reason.empty() && reason != rules::kRandom);
}

std::vector<std::pair<std::string, std::string>> library_packets() {
  std::vector<std::pair<std::string, std::string>> rows;
  for (const rules::Reason& reason : rules::kReasons) rows.emplace_back(reason.packet, reason.text);
  std::sort(rows.begin(), rows.end());
  return rows;
}

}  // namespace deplo
