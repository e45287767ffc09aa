#pragma once

#include <llvm/IR/IRBuilder.h>
#include <llvm/IR/Module.h>

#include <string>
#include <vector>

#include "base/context.h"
#include "kernel_ir/ir.h"

namespace deplo {

/// Scalar functions of the table as LLVM IR, lane by lane over vectors or scalars. bf16 and f16 values are i16 bit patterns, bool values are i1.
/// Emits nothing that is undefined or poison for any input, and no fast-math flag.
class FunctionEmitter {
 public:
  FunctionEmitter(llvm::IRBuilder<>& builder, llvm::Module& module, const TargetInfo& target, llvm::Value* error_word)
      : b_(builder), module_(module), target_(target), error_word_(error_word) {}

  static llvm::Type* element_type(llvm::LLVMContext& context, DType dtype);  ///< of values
  static llvm::Type* memory_type(llvm::LLVMContext& context, DType dtype);   ///< bool is i8
  llvm::Type* type(kernel_ir::Type type) const;
  llvm::Value* splat(llvm::Value* scalar, int lanes);
  llvm::Constant* literal(const Scalar& value, DType dtype) const;

  /// fn applied to operands of dtype `from`; the result has type `to`.
  llvm::Value* apply(Fn fn, kernel_ir::Type to, DType from, const std::vector<llvm::Value*>& operands);
  llvm::Value* cast(llvm::Value* value, DType from, DType to, int lanes);
  /// true if any lane of a bool value is.
  llvm::Value* any(llvm::Value* value);
  /// Sets the error word to `code` where the scalar `condition` holds.
  void set_error_if(llvm::Value* condition, loop_ir::ErrorCode code);

 private:
  llvm::Value* constant_like(llvm::Value* value, double c) const;
  llvm::Value* integer_like(llvm::Value* value, int64_t c) const;
  llvm::Value* apply_float(Fn fn, DType dtype, const std::vector<llvm::Value*>& x, int lanes);
  llvm::Value* apply_integer(Fn fn, DType dtype, const std::vector<llvm::Value*>& x, int lanes);
  llvm::Value* divide(Fn fn, DType dtype, llvm::Value* x, llvm::Value* y);
  llvm::Value* compare(Fn fn, DType dtype, llvm::Value* x, llvm::Value* y);
  llvm::Value* extreme(Fn fn, DType dtype, llvm::Value* x, llvm::Value* y);
  llvm::Value* dot4(const std::vector<llvm::Value*>& x, int lanes);
  llvm::Value* dot2(DType from, const std::vector<llvm::Value*>& x, int lanes);
  llvm::Value* float_to_int(llvm::Value* value, int bits, int lanes);
  llvm::Value* widen(llvm::Value* bits, DType from, int lanes);  ///< bf16 or f16 bits to float
  llvm::Value* narrow(llvm::Value* value, DType to, int lanes);  ///< float to bf16 or f16 bits, to nearest even
  /// Of float32 to bf16, where subnormals may count as 0.
  llvm::Value* narrow_flushing(llvm::Value* value, int lanes);
  llvm::Value* round_to_bf16(llvm::Value* value, int lanes);
  llvm::Value* reciprocal_near(llvm::Value* x, int lanes);
  /// A C function on doubles (or int64s) called for each lane.
  llvm::Value* call_per_lane(const std::string& symbol, llvm::Type* element, const std::vector<llvm::Value*>& x, int lanes);

  llvm::IRBuilder<>& b_;
  llvm::Module& module_;
  const TargetInfo& target_;
  llvm::Value* error_word_;
};

}  // namespace deplo
