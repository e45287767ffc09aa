#include "target/cuda/schedule/truths.h"

#include <algorithm>
#include <utility>

#include "loop_ir/build.h"
#include "loop_ir/rewrite.h"

namespace deplo::loop_to_tile {

using namespace loop_ir;

Kernel with_counted_truths(Kernel kernel) {
  const auto is_truth = [](const Stmt& stmt) {
    const auto* reduce = std::get_if<Reduce>(&stmt.node);
    return reduce && reduce->results.size() == 1 && reduce->dtypes[0] == DType::boolean;
  };
  bool found = false;
  visit(kernel.body, [&](const Stmt& stmt, const auto&) { found = found || is_truth(stmt); });
  if (!found) return kernel;
  Names names;
  names.reserve(kernel);
  kernel.body = rewrite(kernel.body, [&](const Ref<Stmt>& stmt) {
    if (!is_truth(*stmt)) return Block{stmt};
    Reduce reduce = std::get<Reduce>(stmt->node);
    const std::string truth = std::exchange(reduce.results[0], names.fresh(reduce.results[0] + "_number"));
    const std::string number = names.fresh(reduce.operands[0] + "_number");
    reduce.dtypes[0] = DType::i32;
    reduce.body.push_back(make_stmt(Let{number, DType::i32, Fn::cast, {std::exchange(reduce.operands[0], number)}, {}, 0}));
    const std::string result = reduce.results[0];
    // Of no elements the maximum is the least number, which is no truth.
    const std::string zero = names.fresh(result + "_zero");
    return Block{make_stmt(std::move(reduce)), make_stmt(Let{zero, DType::i32, Fn::constant, {}, Scalar::of_int(DType::i32, 0), 0}),
                 make_stmt(Let{truth, DType::boolean, Fn::gt, {result, zero}, {}, 0})};
  });
  return kernel;
}

}  // namespace deplo::loop_to_tile
