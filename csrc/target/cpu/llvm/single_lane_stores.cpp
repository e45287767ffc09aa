#include "target/cpu/llvm/single_lane_stores.h"

#include <llvm/IR/Constants.h>
#include <llvm/IR/IRBuilder.h>
#include <llvm/IR/IntrinsicInst.h>
#include <llvm/IR/Module.h>

#include <optional>
#include <vector>

namespace deplo {
namespace {

// The lanes that are on; nothing if the mask is not constant.
std::optional<std::vector<unsigned>> lanes_on(const llvm::Value* mask) {
  const auto* constant = llvm::dyn_cast<llvm::Constant>(mask);
  const auto* type = llvm::dyn_cast<llvm::FixedVectorType>(mask->getType());
  if (!constant || !type) return std::nullopt;
  std::vector<unsigned> lanes;
  for (unsigned l = 0; l < type->getNumElements(); ++l) {
    const auto* bit = llvm::dyn_cast_or_null<llvm::ConstantInt>(constant->getAggregateElement(l));
    if (!bit) return std::nullopt;
    if (bit->isOne()) lanes.push_back(l);
  }
  return lanes;
}

}  // namespace

void split_single_lane_stores(llvm::Module& module) {
  for (llvm::Function& function : module)
    for (llvm::BasicBlock& block : function)
      for (llvm::Instruction& instruction : llvm::make_early_inc_range(block)) {
        auto* call = llvm::dyn_cast<llvm::IntrinsicInst>(&instruction);
        if (!call || call->getIntrinsicID() != llvm::Intrinsic::masked_store) continue;
        auto lanes = lanes_on(call->getArgOperand(call->arg_size() - 1));
        if (!lanes || lanes->size() > 1) continue;
        if (lanes->size() == 1) {
          llvm::IRBuilder<> builder(call);
          llvm::Value* lane = builder.CreateExtractElement(call->getArgOperand(0), lanes->front());
          llvm::Value* place = builder.CreateConstInBoundsGEP1_64(lane->getType(), call->getArgOperand(1), lanes->front());
          auto* store = builder.CreateAlignedStore(lane, place, llvm::Align(1));
          store->copyMetadata(*call, {llvm::LLVMContext::MD_alias_scope, llvm::LLVMContext::MD_noalias});
        }
        call->eraseFromParent();
      }
}

}  // namespace deplo
