#include "target/cpu/llvm/masked_loads.h"

#include <llvm/IR/Constants.h>
#include <llvm/IR/IRBuilder.h>
#include <llvm/IR/IntrinsicInst.h>
#include <llvm/IR/IntrinsicsX86.h>
#include <llvm/IR/Module.h>

#include <algorithm>
#include <numeric>

namespace deplo {
namespace {

/// Of `lanes` elements of a type of 32 or 64 bits, which fill 128 or 256 bits.
llvm::Intrinsic::ID masked_move(const llvm::Type& element, unsigned lanes) {
  namespace id = llvm::Intrinsic;
  const bool whole = element.getPrimitiveSizeInBits() * lanes == 256;
  if (element.isFloatTy()) return whole ? id::x86_avx_maskload_ps_256 : id::x86_avx_maskload_ps;
  if (element.isDoubleTy()) return whole ? id::x86_avx_maskload_pd_256 : id::x86_avx_maskload_pd;
  if (element.isIntegerTy(32)) return whole ? id::x86_avx2_maskload_d_256 : id::x86_avx2_maskload_d;
  return whole ? id::x86_avx2_maskload_q_256 : id::x86_avx2_maskload_q;
}

/// `count` lanes from `first` on; lanes that `v` has not are zero.
llvm::Value* lanes_of(llvm::IRBuilder<>& builder, llvm::Value* v, unsigned first, unsigned count) {
  const unsigned size = llvm::cast<llvm::FixedVectorType>(v->getType())->getNumElements();
  llvm::SmallVector<int> places(count);
  for (unsigned l = 0; l < count; ++l) places[l] = static_cast<int>(std::min(first + l, size));
  return builder.CreateShuffleVector(v, llvm::Constant::getNullValue(v->getType()), places);
}

llvm::Value* joined(llvm::IRBuilder<>& builder, llvm::Value* a, llvm::Value* b) {
  const unsigned before = llvm::cast<llvm::FixedVectorType>(a->getType())->getNumElements();
  const unsigned added = llvm::cast<llvm::FixedVectorType>(b->getType())->getNumElements();
  llvm::SmallVector<int> places(before + added);
  std::iota(places.begin(), places.end(), 0);
  if (added < before) {  // operands of a shuffle are of one size
    for (unsigned l = 0; l < added; ++l) places[before + l] = static_cast<int>(before + l);
    b = lanes_of(builder, b, 0, before);
  }
  return builder.CreateShuffleVector(a, b, places);
}

llvm::Value* loaded(llvm::IntrinsicInst& call) {
  llvm::IRBuilder<> builder(&call);
  llvm::Value* base = call.getArgOperand(0);
  llvm::Value* mask = call.getArgOperand(1);
  llvm::Value* other = call.getArgOperand(2);
  auto* type = llvm::cast<llvm::FixedVectorType>(call.getType());
  llvm::Type* element = type->getElementType();
  const auto bits = static_cast<unsigned>(element->getPrimitiveSizeInBits());
  const unsigned lanes = type->getNumElements();
  llvm::Value* wide = builder.CreateSExt(mask, llvm::FixedVectorType::get(builder.getIntNTy(bits), lanes));
  llvm::Value* result = nullptr;
  for (unsigned first = 0; first < lanes;) {
    const unsigned count = (lanes - first) * bits > 128 ? 256 / bits : 128 / bits;
    llvm::Value* place = builder.CreateConstGEP1_64(element, base, first);
    llvm::CallInst* part = builder.CreateIntrinsic(masked_move(*element, count), {place, lanes_of(builder, wide, first, count)});
    part->copyMetadata(call, {llvm::LLVMContext::MD_alias_scope, llvm::LLVMContext::MD_noalias});
    result = result ? joined(builder, result, part) : part;
    first += count;
  }
  if (llvm::cast<llvm::FixedVectorType>(result->getType())->getNumElements() > lanes) result = lanes_of(builder, result, 0, lanes);
  const auto* constant = llvm::dyn_cast<llvm::Constant>(other);
  return constant && constant->isNullValue() ? result : builder.CreateSelect(mask, result, other);
}

bool is_wide(const llvm::Type* element) {
  return element->isFloatTy() || element->isDoubleTy() || element->isIntegerTy(32) || element->isIntegerTy(64);
}

}  // namespace

void write_masked_loads(llvm::Module& module, const TargetInfo& target) {
  if (!target.features.contains("avx2") || target.features.contains("avx512f")) return;
  for (llvm::Function& function : module)
    for (llvm::BasicBlock& block : function)
      for (llvm::Instruction& instruction : llvm::make_early_inc_range(block)) {
        auto* call = llvm::dyn_cast<llvm::IntrinsicInst>(&instruction);
        if (!call || call->getIntrinsicID() != llvm::Intrinsic::masked_load || !is_wide(call->getType()->getScalarType())) continue;
        call->replaceAllUsesWith(loaded(*call));
        call->eraseFromParent();
      }
}

}  // namespace deplo
