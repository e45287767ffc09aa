#include "target/cpu/llvm/functions.h"

#include <llvm/Analysis/VectorUtils.h>
#include <llvm/IR/Constants.h>
#include <llvm/IR/Intrinsics.h>
#include <llvm/IR/IntrinsicsX86.h>
#include <llvm/IR/MDBuilder.h>
#include <llvm/IR/PatternMatch.h>

#include "base/error.h"
#include "target/cpu/callable.h"

namespace deplo {

using llvm::Value;
using llvm::Intrinsic::ID;

namespace {

/// A constant of floats, the same in all lanes, that is not NaN.
bool is_number(const Value* value) {
  const auto* constant = llvm::dyn_cast<llvm::Constant>(value);
  if (constant && constant->getType()->isVectorTy()) constant = constant->getSplatValue();
  const auto* number = constant ? llvm::dyn_cast<llvm::ConstantFP>(constant) : nullptr;
  return number && !number->isNaN();
}

}  // namespace

llvm::Type* FunctionEmitter::element_type(llvm::LLVMContext& c, DType dtype) {
  switch (dtype) {
    case DType::boolean: return llvm::Type::getInt1Ty(c);
    case DType::u8:
    case DType::f8:
    case DType::i8: return llvm::Type::getInt8Ty(c);
    case DType::i16:
    case DType::f16:
    case DType::bf16: return llvm::Type::getInt16Ty(c);
    case DType::i32: return llvm::Type::getInt32Ty(c);
    case DType::i64: return llvm::Type::getInt64Ty(c);
    case DType::f32: return llvm::Type::getFloatTy(c);
    case DType::f64: return llvm::Type::getDoubleTy(c);
  }
  return nullptr;
}

llvm::Type* FunctionEmitter::memory_type(llvm::LLVMContext& c, DType dtype) {
  return dtype == DType::boolean ? llvm::Type::getInt8Ty(c) : element_type(c, dtype);
}

llvm::Type* FunctionEmitter::type(kernel_ir::Type t) const {
  llvm::Type* element = element_type(module_.getContext(), t.dtype);
  return t.lanes == 1 ? element : llvm::FixedVectorType::get(element, static_cast<unsigned>(t.lanes));
}

Value* FunctionEmitter::splat(Value* scalar, int lanes) { return lanes == 1 ? scalar : b_.CreateVectorSplat(static_cast<unsigned>(lanes), scalar); }

llvm::Constant* FunctionEmitter::literal(const Scalar& value, DType dtype) const {
  llvm::Type* t = element_type(module_.getContext(), dtype);
  switch (dtype) {
    case DType::f64: return llvm::ConstantFP::get(t, value.f);
    case DType::f32: return llvm::ConstantFP::get(t, llvm::APFloat(static_cast<float>(value.f)));
    case DType::bf16: return llvm::ConstantInt::get(t, f32_to_bf16(static_cast<float>(value.f)));
    case DType::f16: return llvm::ConstantInt::get(t, f32_to_f16(static_cast<float>(value.f)));
    case DType::f8: return llvm::ConstantInt::get(t, f32_to_f8(static_cast<float>(value.f)));
    default: return llvm::ConstantInt::get(t, static_cast<uint64_t>(value.i), true, true);
  }
}

Value* FunctionEmitter::constant_like(Value* value, double c) const { return llvm::ConstantFP::get(value->getType(), c); }
Value* FunctionEmitter::integer_like(Value* value, int64_t c) const {
  return llvm::ConstantInt::get(value->getType(), static_cast<uint64_t>(c), true, true);
}

Value* FunctionEmitter::any(Value* value) { return value->getType()->isVectorTy() ? b_.CreateOrReduce(value) : value; }

void FunctionEmitter::set_error_if(Value* condition, loop_ir::ErrorCode code) {
  llvm::Function* function = b_.GetInsertBlock()->getParent();
  auto* set = llvm::BasicBlock::Create(module_.getContext(), "error", function);
  auto* next = llvm::BasicBlock::Create(module_.getContext(), "go_on", function);
  b_.CreateCondBr(condition, set, next);
  b_.SetInsertPoint(set);
  // Other threads may set it at the same time.
  auto* store = b_.CreateAlignedStore(b_.getInt32(static_cast<uint32_t>(code)), error_word_, llvm::Align(4));
  store->setAtomic(llvm::AtomicOrdering::Monotonic);
  b_.CreateBr(next);
  b_.SetInsertPoint(next);
}

Value* FunctionEmitter::apply(Fn fn, kernel_ir::Type to, DType from, const std::vector<Value*>& x) {
  const FunctionInfo& row = info(fn);
  switch (row.signature) {
    case Signature::nullary: throw InternalError("constant and index have no operands");
    case Signature::select: return b_.CreateSelect(x[0], x[1], x[2]);
    case Signature::convert:
      if (fn == Fn::cast) return cast(x[0], from, to.dtype, to.lanes);
      if (fn == Fn::narrow) return narrow_flushing(x[0], to.lanes);
      if (fn == Fn::exp2_near) return apply_float(Fn::exp2, DType::f32, x, to.lanes);
      if (fn == Fn::reciprocal_near) return reciprocal_near(x[0], to.lanes);
      return x[0]->getType() == type(to) ? x[0] : b_.CreateBitCast(x[0], type(to));
    case Signature::predicate: {
      Value* a = x[0];
      DType dtype = from;
      if (dtype == DType::bf16 || dtype == DType::f16) {
        if (fn == Fn::signbit) return b_.CreateICmpSLT(a, integer_like(a, 0));
        a = widen(a, from, to.lanes);
        return compare(fn, DType::f32, a, widen(x[1], from, to.lanes));
      }
      if (fn != Fn::signbit) return compare(fn, dtype, a, x[1]);
      if (!is_float(dtype)) return is_signed(dtype) ? b_.CreateICmpSLT(a, integer_like(a, 0)) : integer_like(b_.CreateICmpEQ(a, a), 0);
      Value* bits = b_.CreateBitCast(a, type({dtype == DType::f64 ? DType::i64 : DType::i32, to.lanes}));
      return b_.CreateICmpSLT(bits, integer_like(bits, 0));
    }
    case Signature::dot: return dot2(from, x, to.lanes);
    case Signature::same: break;
  }
  if (!is_float(from)) return apply_integer(fn, from, x, to.lanes);
  if (from == DType::bf16 || from == DType::f16) {
    std::vector<Value*> wide;
    for (Value* v : x) wide.push_back(widen(v, from, to.lanes));
    return narrow(apply_float(fn, DType::f32, wide, to.lanes), from, to.lanes);
  }
  return apply_float(fn, from, x, to.lanes);
}

// Newton's step from what the processor has 11 or 14 bits of.
Value* FunctionEmitter::reciprocal_near(Value* x, int lanes) {
  llvm::Type* t = type({DType::f32, lanes});
  Value* y = nullptr;
  if (lanes == 16 && target_.features.contains("avx512f"))
    y = b_.CreateIntrinsic(llvm::Intrinsic::x86_avx512_rcp14_ps_512, {}, {x, llvm::Constant::getNullValue(t), b_.getInt16(0xffff)});
  else if (lanes == 8 && target_.features.contains("avx"))
    y = b_.CreateIntrinsic(llvm::Intrinsic::x86_avx_rcp_ps_256, {}, {x});
  else if (lanes == 4)
    y = b_.CreateIntrinsic(llvm::Intrinsic::x86_sse_rcp_ps, {}, {x});
  if (!y) return b_.CreateFDiv(llvm::ConstantFP::get(t, 1), x);
  Value* rest = apply_float(Fn::fma, DType::f32, {b_.CreateFNeg(x), y, llvm::ConstantFP::get(t, 1)}, lanes);
  return apply_float(Fn::fma, DType::f32, {y, rest, y}, lanes);
}

Value* FunctionEmitter::compare(Fn fn, DType dtype, Value* x, Value* y) {
  bool real = is_float(dtype);
  bool s = is_signed(dtype);
  switch (fn) {
    case Fn::eq: return real ? b_.CreateFCmpOEQ(x, y) : b_.CreateICmpEQ(x, y);
    case Fn::ne: return real ? b_.CreateFCmpUNE(x, y) : b_.CreateICmpNE(x, y);
    case Fn::lt: return real ? b_.CreateFCmpOLT(x, y) : s ? b_.CreateICmpSLT(x, y) : b_.CreateICmpULT(x, y);
    case Fn::le: return real ? b_.CreateFCmpOLE(x, y) : s ? b_.CreateICmpSLE(x, y) : b_.CreateICmpULE(x, y);
    case Fn::gt: return real ? b_.CreateFCmpOGT(x, y) : s ? b_.CreateICmpSGT(x, y) : b_.CreateICmpUGT(x, y);
    case Fn::ge: return real ? b_.CreateFCmpOGE(x, y) : s ? b_.CreateICmpSGE(x, y) : b_.CreateICmpUGE(x, y);
    default: throw InternalError(fmt::format("{} is not a comparison", to_string(fn)));
  }
}

// select(x > y, x, y) is one max instruction, which gives y when either is NaN; a NaN in x is put back, unless x is known to be none.
Value* FunctionEmitter::extreme(Fn fn, DType dtype, Value* x, Value* y) {
  if (is_number(y)) std::swap(x, y);
  Value* chosen = b_.CreateSelect(compare(fn == Fn::min ? Fn::lt : Fn::gt, dtype, x, y), x, y);
  return is_float(dtype) && !is_number(x) ? b_.CreateSelect(b_.CreateFCmpUNO(x, x), x, chosen) : chosen;
}

Value* FunctionEmitter::apply_float(Fn fn, DType dtype, const std::vector<Value*>& x, int lanes) {
  auto intrinsic = [&](ID id) {
    llvm::Type* t = x[0]->getType();
    return b_.CreateIntrinsic(id, {t}, x);
  };
  switch (fn) {
    case Fn::neg: return b_.CreateFNeg(x[0]);
    case Fn::abs: return intrinsic(llvm::Intrinsic::fabs);
    case Fn::sqrt: return intrinsic(llvm::Intrinsic::sqrt);
    case Fn::floor: return intrinsic(llvm::Intrinsic::floor);
    case Fn::ceil: return intrinsic(llvm::Intrinsic::ceil);
    case Fn::trunc: return intrinsic(llvm::Intrinsic::trunc);
    case Fn::round: return intrinsic(llvm::Intrinsic::roundeven);
    case Fn::copysign: return intrinsic(llvm::Intrinsic::copysign);
    case Fn::fma: return intrinsic(llvm::Intrinsic::fma);
    case Fn::add: return b_.CreateFAdd(x[0], x[1]);
    case Fn::sub: return b_.CreateFSub(x[0], x[1]);
    case Fn::mul: return b_.CreateFMul(x[0], x[1]);
    case Fn::div: return b_.CreateFDiv(x[0], x[1]);
    case Fn::min:
    case Fn::max: return extreme(fn, dtype, x[0], x[1]);
    default: break;
  }
  std::string name(to_string(fn));
  if (fn == Fn::nextafter) return call_per_lane(dtype == DType::f64 ? "nextafter" : "nextafterf", x[0]->getType()->getScalarType(), x, lanes);
  // The rest in float64 by libm, rounded once.
  std::vector<Value*> wide = x;
  llvm::Type* f64 = type({DType::f64, lanes});
  if (dtype == DType::f32)
    for (Value*& v : wide) v = b_.CreateFPExt(v, f64);
  std::string own = "deplo_" + name;
  // For float32, libm's double is exact enough.
  bool in_libm = callable_address(name) != nullptr;
  if (callable_address(own) && (dtype == DType::f64 || !in_libm)) name = own;
  if (fn == Fn::remainder) {
    Value* r = call_per_lane("fmod", b_.getDoubleTy(), wide, lanes);
    Value* zero = constant_like(r, 0);
    Value* differ = b_.CreateXor(b_.CreateFCmpOLT(r, zero), b_.CreateFCmpOLT(wide[1], zero));
    Value* adjust = b_.CreateAnd(b_.CreateFCmpUNE(r, zero), differ);
    r = b_.CreateSelect(adjust, b_.CreateFAdd(r, wide[1]), r);
    return dtype == DType::f32 ? b_.CreateFPTrunc(r, x[0]->getType()) : r;
  }
  Value* r = call_per_lane(name, b_.getDoubleTy(), wide, lanes);
  return dtype == DType::f32 ? b_.CreateFPTrunc(r, x[0]->getType()) : r;
}

Value* FunctionEmitter::call_per_lane(const std::string& symbol, llvm::Type* element, const std::vector<Value*>& x, int lanes) {
  DEPLO_ASSERT(callable_address(symbol), "generated code may not call {}", symbol);
  std::vector<llvm::Type*> parameters(x.size(), element);
  auto callee = module_.getOrInsertFunction(symbol, llvm::FunctionType::get(element, parameters, false));
  // The function of the table and no other: LLVM would turn pow(2, x) into ldexp(1, x).
  auto call = [&](const std::vector<Value*>& arguments) {
    llvm::CallInst* made = b_.CreateCall(callee, arguments);
    made->addFnAttr(llvm::Attribute::NoBuiltin);
    return made;
  };
  if (lanes == 1) return call(x);
  Value* result = llvm::PoisonValue::get(llvm::FixedVectorType::get(element, static_cast<unsigned>(lanes)));
  for (int lane = 0; lane < lanes; ++lane) {
    std::vector<Value*> arguments;
    for (Value* v : x) arguments.push_back(b_.CreateExtractElement(v, static_cast<uint64_t>(lane)));
    result = b_.CreateInsertElement(result, call(arguments), static_cast<uint64_t>(lane));
  }
  return result;
}

Value* FunctionEmitter::divide(Fn fn, DType dtype, Value* x, Value* y) {
  Value* zero = b_.CreateICmpEQ(y, integer_like(y, 0));
  if (!llvm::isa<llvm::Constant>(zero) || !llvm::cast<llvm::Constant>(zero)->isNullValue())
    set_error_if(any(zero), loop_ir::ErrorCode::division_by_zero);
  bool s = is_signed(dtype);
  // The machine traps on x / 0 and on the smallest integer / -1: divide by 1 instead and mend the result.
  Value* minus_one = s ? b_.CreateICmpEQ(y, integer_like(y, -1)) : nullptr;
  Value* odd = s ? b_.CreateOr(zero, minus_one) : zero;
  Value* safe = b_.CreateSelect(odd, integer_like(y, 1), y);
  Value* quotient = s ? b_.CreateSDiv(x, safe) : b_.CreateUDiv(x, safe);
  Value* rest = b_.CreateSub(x, b_.CreateMul(quotient, safe));
  if (s) quotient = b_.CreateSelect(minus_one, b_.CreateNeg(x), quotient);
  quotient = b_.CreateSelect(zero, integer_like(y, 0), quotient);
  if (fn == Fn::trunc_div) return quotient;
  if (fn == Fn::fmod) return rest;
  if (!s) return fn == Fn::floor_div ? quotient : rest;
  Value* nonzero = b_.CreateICmpNE(rest, integer_like(y, 0));
  Value* differ = b_.CreateICmpSLT(b_.CreateXor(rest, y), integer_like(y, 0));
  Value* adjust = b_.CreateAnd(b_.CreateAnd(nonzero, differ), b_.CreateNot(zero));
  if (fn == Fn::floor_div) return b_.CreateSelect(adjust, b_.CreateSub(quotient, integer_like(y, 1)), quotient);
  return b_.CreateSelect(adjust, b_.CreateAdd(rest, y), rest);
}

Value* FunctionEmitter::apply_integer(Fn fn, DType dtype, const std::vector<Value*>& x, int lanes) {
  int bits = dtype == DType::boolean ? 1 : static_cast<int>(size_of(dtype) * 8);
  switch (fn) {
    case Fn::neg: return b_.CreateNeg(x[0]);
    case Fn::abs: return is_signed(dtype) ? b_.CreateSelect(b_.CreateICmpSLT(x[0], integer_like(x[0], 0)), b_.CreateNeg(x[0]), x[0]) : x[0];
    case Fn::bit_not: return b_.CreateNot(x[0]);
    case Fn::add: return b_.CreateAdd(x[0], x[1]);
    case Fn::sub: return b_.CreateSub(x[0], x[1]);
    case Fn::mul: return b_.CreateMul(x[0], x[1]);
    case Fn::dot4: return dot4(x, lanes);
    case Fn::bit_and: return b_.CreateAnd(x[0], x[1]);
    case Fn::bit_or: return b_.CreateOr(x[0], x[1]);
    case Fn::bit_xor: return b_.CreateXor(x[0], x[1]);
    case Fn::min:
    case Fn::max: return extreme(fn, dtype, x[0], x[1]);
    case Fn::trunc_div:
    case Fn::floor_div:
    case Fn::fmod:
    case Fn::remainder: return divide(fn, dtype, x[0], x[1]);
    case Fn::shl:
    case Fn::shr: {
      Value* valid = b_.CreateICmpULT(x[1], integer_like(x[1], bits));
      if (const auto* known = llvm::dyn_cast<llvm::Constant>(valid); known && known->isAllOnesValue())
        return fn == Fn::shl ? b_.CreateShl(x[0], x[1]) : is_signed(dtype) ? b_.CreateAShr(x[0], x[1]) : b_.CreateLShr(x[0], x[1]);
      Value* amount = b_.CreateSelect(valid, x[1], integer_like(x[1], 0));
      if (fn == Fn::shl) return b_.CreateSelect(valid, b_.CreateShl(x[0], amount), integer_like(x[0], 0));
      if (!is_signed(dtype)) return b_.CreateSelect(valid, b_.CreateLShr(x[0], amount), integer_like(x[0], 0));
      return b_.CreateSelect(valid, b_.CreateAShr(x[0], amount), b_.CreateAShr(x[0], integer_like(x[0], bits - 1)));
    }
    case Fn::pow: {
      llvm::Type* wide = type({DType::i64, lanes});
      auto extend = [&](Value* v) { return is_signed(dtype) ? b_.CreateSExt(v, wide) : b_.CreateZExt(v, wide); };
      return b_.CreateTrunc(call_per_lane("deplo_pow_i64", b_.getInt64Ty(), {extend(x[0]), extend(x[1])}, lanes), x[0]->getType());
    }
    default: throw InternalError(fmt::format("{} does not take {}", to_string(fn), to_string(dtype)));
  }
}

// cvttss2si gives the most negative integer for NaN and whatever does not fit; fptosi alone would be poison there.
Value* FunctionEmitter::float_to_int(Value* value, int bits, int lanes) {
  if (bits == 32 && value->getType()->getScalarType()->isFloatTy()) {
    // One instruction, which gives the smallest integer for what does not fit.
    if (lanes == 16 && target_.features.contains("avx512f")) {
      llvm::Type* i32 = type({DType::i32, lanes});
      constexpr uint32_t kCurrentRounding = 4;
      return b_.CreateIntrinsic(llvm::Intrinsic::x86_avx512_mask_cvttps2dq_512, {},
                                {value, llvm::Constant::getNullValue(i32), b_.getInt16(0xffff), b_.getInt32(kCurrentRounding)});
    }
    if (lanes == 8 && target_.features.contains("avx")) return b_.CreateIntrinsic(llvm::Intrinsic::x86_avx_cvtt_ps2dq_256, {}, {value});
  }
  DType dtype = bits == 64 ? DType::i64 : DType::i32;
  double limit = bits == 64 ? 0x1p63 : 0x1p31;
  Value* low = b_.CreateFCmpOGE(value, constant_like(value, -limit));
  // In float64, everything above -2^31 - 1 truncates into range.
  if (bits == 32 && value->getType()->getScalarType()->isDoubleTy()) low = b_.CreateFCmpOGT(value, constant_like(value, -limit - 1));
  Value* fits = b_.CreateAnd(low, b_.CreateFCmpOLT(value, constant_like(value, limit)));
  Value* safe = b_.CreateSelect(fits, value, constant_like(value, 0));
  Value* converted = b_.CreateFPToSI(safe, type({dtype, lanes}));
  int64_t indefinite = bits == 64 ? INT64_MIN : INT32_MIN;
  return b_.CreateSelect(fits, converted, integer_like(converted, indefinite));
}

namespace {

/// Whether each byte of the words is at most 15 by how they are made.
bool is_few_bits(Value* words) {
  using namespace llvm::PatternMatch;
  const llvm::APInt* mask = nullptr;
  return match(words, m_And(m_Value(), m_APInt(mask))) && (*mask & 0xf0f0f0f0) == 0;
}

}  // namespace

Value* FunctionEmitter::dot4(const std::vector<Value*>& x, int lanes) {
  const auto count = static_cast<unsigned>(lanes);
  llvm::Type* i8 = b_.getInt8Ty();
  llvm::Type* i16 = b_.getInt16Ty();
  auto bytes = [&](Value* v) { return b_.CreateBitCast(v, llvm::FixedVectorType::get(i8, 4 * count)); };
  if (target_.features.contains("avx512vnni") || (target_.features.contains("avxvnni") && lanes <= 8)) {
    ID id = llvm::Intrinsic::not_intrinsic;
    if (lanes == 16) id = llvm::Intrinsic::x86_avx512_vpdpbusd_512;
    if (lanes == 8) id = llvm::Intrinsic::x86_avx512_vpdpbusd_256;
    if (lanes == 4) id = llvm::Intrinsic::x86_avx512_vpdpbusd_128;
    if (id != llvm::Intrinsic::not_intrinsic) return b_.CreateIntrinsic(id, {}, {x[2], bytes(x[0]), bytes(x[1])});
  }
  // 4 bits of one operand: no sum of two products leaves 16 bits (pmaddubsw would saturate).
  const bool few = is_few_bits(x[0]);
  if (few && ((lanes == 16 && target_.features.contains("avx512bw")) || (lanes == 8 && target_.features.contains("avx2")))) {
    const bool wide = lanes == 16;
    Value* pairs =
        b_.CreateIntrinsic(wide ? llvm::Intrinsic::x86_avx512_pmaddubs_w_512 : llvm::Intrinsic::x86_avx2_pmadd_ub_sw, {}, {bytes(x[0]), bytes(x[1])});
    Value* ones = llvm::ConstantInt::get(llvm::FixedVectorType::get(i16, 2 * count), 1);
    return b_.CreateAdd(x[2],
                        b_.CreateIntrinsic(wide ? llvm::Intrinsic::x86_avx512_pmaddw_d_512 : llvm::Intrinsic::x86_avx2_pmadd_wd, {}, {pairs, ones}));
  }
  // Even and odd bytes as numbers of 16 bits, whose products and sums in pairs are exact (pmaddwd); pmaddubsw would saturate.
  ID id = llvm::Intrinsic::not_intrinsic;
  if (lanes == 16 && target_.features.contains("avx512bw")) id = llvm::Intrinsic::x86_avx512_pmaddw_d_512;
  if (lanes == 8 && target_.features.contains("avx2")) id = llvm::Intrinsic::x86_avx2_pmadd_wd;
  if (lanes == 4) id = llvm::Intrinsic::x86_sse2_pmadd_wd;
  auto shifted = [&](Value* v, int64_t by) { return b_.CreateAShr(b_.CreateShl(v, integer_like(v, by)), integer_like(v, 24)); };
  if (id == llvm::Intrinsic::not_intrinsic) {
    Value* sum = x[2];
    for (int64_t byte = 0; byte < 4; ++byte) {
      Value* a = b_.CreateAnd(b_.CreateLShr(x[0], integer_like(x[0], 8 * byte)), integer_like(x[0], 0xff));
      sum = b_.CreateAdd(sum, b_.CreateMul(a, shifted(x[1], 24 - 8 * byte)));
    }
    return sum;
  }
  auto halves = [&](Value* v) { return b_.CreateBitCast(v, llvm::FixedVectorType::get(i16, 2 * count)); };
  Value* a = halves(x[0]);
  Value* b = halves(x[1]);
  Value* even =
      b_.CreateIntrinsic(id, {}, {b_.CreateAnd(a, integer_like(a, 0xff)), b_.CreateAShr(b_.CreateShl(b, integer_like(b, 8)), integer_like(b, 8))});
  Value* odd = b_.CreateIntrinsic(id, {}, {b_.CreateLShr(a, integer_like(a, 8)), b_.CreateAShr(b, integer_like(b, 8))});
  return b_.CreateAdd(b_.CreateAdd(x[2], even), odd);
}

Value* FunctionEmitter::dot2(DType from, const std::vector<Value*>& x, int lanes) {
  ID id = llvm::Intrinsic::not_intrinsic;
  if (lanes == 16) id = llvm::Intrinsic::x86_avx512bf16_dpbf16ps_512;
  if (lanes == 8) id = llvm::Intrinsic::x86_avx512bf16_dpbf16ps_256;
  if (lanes == 4) id = llvm::Intrinsic::x86_avx512bf16_dpbf16ps_128;
  if (from != DType::bf16 || id == llvm::Intrinsic::not_intrinsic || !target_.features.contains("avx512bf16")) {
    auto product = [&](Value* a, Value* b, Value* sum) {
      return apply_float(Fn::fma, DType::f32, {widen(a, from, lanes), widen(b, from, lanes), sum}, lanes);
    };
    return product(x[0], x[2], product(x[1], x[3], x[4]));
  }
  const auto count = static_cast<unsigned>(lanes);
  llvm::Type* pairs = llvm::FixedVectorType::get(llvm::Type::getBFloatTy(module_.getContext()), 2 * count);
  auto interleaved = [&](Value* even, Value* odd) {
    // One word for all lanes: a broadcast from memory where both elements lie side by side.
    Value* first = llvm::getSplatValue(even);
    Value* second = llvm::getSplatValue(odd);
    if (first && second) {
      llvm::Type* i32 = b_.getInt32Ty();
      Value* word = b_.CreateOr(b_.CreateZExt(first, i32), b_.CreateShl(b_.CreateZExt(second, i32), 16));
      return b_.CreateBitCast(b_.CreateVectorSplat(count, word), pairs);
    }
    // The halves of words.
    using namespace llvm::PatternMatch;
    if (Value* word = nullptr, *other = nullptr; match(even, m_Trunc(m_Value(word))) &&
                                                 match(odd, m_Trunc(m_Shr(m_Value(other), m_SpecificInt(16)))) && word == other &&
                                                 word->getType() == type({DType::i32, lanes}))
      return b_.CreateBitCast(word, pairs);
    std::vector<int> order;
    for (int lane = 0; lane < lanes; ++lane) order.insert(order.end(), {lane, lanes + lane});
    return b_.CreateBitCast(b_.CreateShuffleVector(even, odd, order), pairs);
  };
  // Multiplies and adds the odd elements first, each with one rounding; subnormals count as zero.
  return b_.CreateIntrinsic(id, {}, {x[4], interleaved(x[0], x[1]), interleaved(x[2], x[3])});
}

Value* FunctionEmitter::widen(Value* bits, DType from, int lanes) {
  llvm::Type* i32 = type({DType::i32, lanes});
  llvm::Type* f32 = type({DType::f32, lanes});
  if (from == DType::bf16) return b_.CreateBitCast(b_.CreateShl(b_.CreateZExt(bits, i32), llvm::ConstantInt::get(i32, 16)), f32);
  if (from == DType::f8) {
    // The bits of a 16-bit float 2^8 times as small, in which all numbers are exact, and no flag of the CPU makes subnormals 0.
    llvm::Type* i16 = type({DType::i16, lanes});
    auto c = [&](uint64_t v) { return llvm::ConstantInt::get(i16, v); };
    Value* moved = b_.CreateAnd(b_.CreateAShr(b_.CreateShl(b_.CreateZExt(bits, i16), c(8)), c(1)), c(0xbfff));
    Value* number = b_.CreateFMul(widen(moved, DType::f16, lanes), llvm::ConstantFP::get(f32, 256));
    Value* nan = b_.CreateICmpEQ(b_.CreateAnd(bits, integer_like(bits, 0x7f)), integer_like(bits, 0x7f));
    return b_.CreateSelect(nan, llvm::ConstantFP::getNaN(f32), number);
  }
  if (target_.features.contains("f16c")) {
    llvm::Type* half = llvm::Type::getHalfTy(module_.getContext());
    if (lanes > 1) half = llvm::FixedVectorType::get(half, static_cast<unsigned>(lanes));
    return b_.CreateFPExt(b_.CreateBitCast(bits, half), f32);
  }
  // Shifted into float32's place and scaled by 2^112, which also makes denormals normal; inf and NaN get the full exponent.
  auto c = [&](uint64_t v) { return llvm::ConstantInt::get(i32, v); };
  Value* wide = b_.CreateZExt(bits, i32);
  Value* sign = b_.CreateShl(b_.CreateAnd(wide, c(0x8000)), c(16));
  Value* rest = b_.CreateShl(b_.CreateAnd(wide, c(0x7fff)), c(13));
  Value* scaled = b_.CreateBitCast(b_.CreateFMul(b_.CreateBitCast(rest, f32), llvm::ConstantFP::get(f32, 0x1p112)), i32);
  Value* special = b_.CreateICmpUGE(rest, c(0x0f800000));
  Value* magnitude = b_.CreateSelect(special, b_.CreateOr(rest, c(0x7f800000)), scaled);
  return b_.CreateBitCast(b_.CreateOr(magnitude, sign), f32);
}

Value* FunctionEmitter::narrow(Value* value, DType to, int lanes) {
  llvm::Type* i32 = type({DType::i32, lanes});
  llvm::Type* i16 = type({DType::i16, lanes});
  llvm::Type* f32 = type({DType::f32, lanes});
  auto c = [&](uint64_t v) { return llvm::ConstantInt::get(i32, v); };
  if (to == DType::f16 && target_.features.contains("f16c")) {
    llvm::Type* half = llvm::Type::getHalfTy(module_.getContext());
    if (lanes > 1) half = llvm::FixedVectorType::get(half, static_cast<unsigned>(lanes));
    // LLVM carries the rounding into a copysign of float64, and rounds its sign to f16 by a library function that is not there.
    if (llvm::isa<llvm::FPTruncInst>(value)) value = b_.CreateArithmeticFence(value, value->getType());
    return b_.CreateBitCast(b_.CreateFPTrunc(value, half), i16);
  }
  Value* bits = b_.CreateBitCast(value, i32);
  if (to == DType::bf16) {
    Value* lsb = b_.CreateAnd(b_.CreateLShr(bits, c(16)), c(1));
    Value* rounded = b_.CreateLShr(b_.CreateAdd(b_.CreateAdd(bits, c(0x7fff)), lsb), c(16));
    Value* quiet = b_.CreateOr(b_.CreateLShr(bits, c(16)), c(0x40));
    return b_.CreateTrunc(b_.CreateSelect(b_.CreateFCmpUNO(value, value), quiet, rounded), i16);
  }
  Value* magnitude = b_.CreateAnd(bits, c(0x7fffffff));
  if (to == DType::f8) {
    // Below 2^-6 the result is a multiple of 2^-9: adding 2^14 rounds it there. Beyond its range it is the largest number.
    Value* shifted = b_.CreateFAdd(b_.CreateBitCast(magnitude, f32), llvm::ConstantFP::get(f32, 0x1p14));
    Value* tiny = b_.CreateSub(b_.CreateBitCast(shifted, i32), c(0x46800000));
    Value* lsb = b_.CreateAnd(b_.CreateLShr(magnitude, c(20)), c(1));
    Value* normal = b_.CreateLShr(b_.CreateSub(b_.CreateAdd(b_.CreateAdd(magnitude, c(0x7ffff)), lsb), c(0x3c000000)), c(20));
    Value* r = b_.CreateSelect(b_.CreateICmpULT(magnitude, c(0x3c800000)), tiny, normal);
    r = b_.CreateSelect(b_.CreateICmpUGT(r, c(0x7e)), c(0x7e), r);
    r = b_.CreateSelect(b_.CreateICmpUGT(magnitude, c(0x7f800000)), c(0x7f), r);
    return b_.CreateTrunc(b_.CreateOr(r, b_.CreateAnd(b_.CreateLShr(bits, c(24)), c(0x80))), type({DType::u8, lanes}));
  }
  Value* sign = b_.CreateAnd(b_.CreateLShr(bits, c(16)), c(0x8000));
  // Below 2^-14 the result is a multiple of 2^-24: adding 0.5 rounds it there.
  Value* half = llvm::ConstantFP::get(f32, 0.5);
  Value* tiny = b_.CreateSub(b_.CreateBitCast(b_.CreateFAdd(b_.CreateBitCast(magnitude, f32), half), i32), c(0x3f000000));
  Value* lsb = b_.CreateAnd(b_.CreateLShr(magnitude, c(13)), c(1));
  Value* normal = b_.CreateLShr(b_.CreateSub(b_.CreateAdd(b_.CreateAdd(magnitude, c(0xfff)), lsb), c(0x38000000)), c(13));
  Value* r = b_.CreateSelect(b_.CreateICmpULT(magnitude, c(0x38800000)), tiny, normal);
  r = b_.CreateSelect(b_.CreateICmpUGE(magnitude, c(0x477ff000)), c(0x7c00), r);
  r = b_.CreateSelect(b_.CreateICmpUGT(magnitude, c(0x7f800000)), c(0x7e00), r);
  return b_.CreateTrunc(b_.CreateOr(r, sign), i16);
}

// By the processor's instruction, which makes subnormal numbers zero: the rare vectors that hold one go another way.
Value* FunctionEmitter::round_to_bf16(Value* value, int lanes) {
  const bool by_processor = target_.features.contains("avx512bf16") && (lanes == 8 || lanes == 16);
  if (!by_processor || llvm::isa<llvm::Constant>(value)) return narrow(value, DType::bf16, lanes);
  Value* rounded = narrow_flushing(value, lanes);
  llvm::Function* function = b_.GetInsertBlock()->getParent();
  llvm::BasicBlock* before = b_.GetInsertBlock();
  auto* rare = llvm::BasicBlock::Create(module_.getContext(), "subnormal", function);
  auto* next = llvm::BasicBlock::Create(module_.getContext(), "rounded", function);
  // fpclass's bit 5 asks for subnormal numbers.
  Value* subnormal = lanes == 16 && target_.features.contains("avx512dq")
                         ? b_.CreateIntrinsic(llvm::Intrinsic::x86_avx512_fpclass_ps_512, {}, {value, b_.getInt32(0x20)})
                         : b_.createIsFPClass(value, llvm::fcSubnormal);
  b_.CreateCondBr(any(subnormal), rare, next, llvm::MDBuilder(module_.getContext()).createUnlikelyBranchWeights());
  b_.SetInsertPoint(rare);
  Value* exact = narrow(value, DType::bf16, lanes);
  b_.CreateBr(next);
  b_.SetInsertPoint(next);
  llvm::PHINode* chosen = b_.CreatePHI(rounded->getType(), 2);
  chosen->addIncoming(rounded, before);
  chosen->addIncoming(exact, rare);
  return chosen;
}

Value* FunctionEmitter::narrow_flushing(Value* value, int lanes) {
  ID id = llvm::Intrinsic::not_intrinsic;
  if (lanes == 16) id = llvm::Intrinsic::x86_avx512bf16_cvtneps2bf16_512;
  if (lanes == 8) id = llvm::Intrinsic::x86_avx512bf16_cvtneps2bf16_256;
  if (id == llvm::Intrinsic::not_intrinsic || !target_.features.contains("avx512bf16")) return narrow(value, DType::bf16, lanes);
  return b_.CreateBitCast(b_.CreateIntrinsic(id, {}, {value}), type({DType::bf16, lanes}));
}

Value* FunctionEmitter::cast(Value* value, DType from, DType to, int lanes) {
  if (from == to) return value;
  if (from == DType::bf16 || from == DType::f16 || from == DType::f8) return cast(widen(value, from, lanes), DType::f32, to, lanes);
  llvm::Type* t = type({to, lanes});
  if (to == DType::f8) return narrow(cast(value, from, DType::f32, lanes), to, lanes);
  if (to == DType::bf16 || to == DType::f16) {
    // Through float32, rounded to odd where float64 or wide integers lose bits, so that the second rounding is right.
    if (from == DType::f64) {
      Value* f32 = b_.CreateFPTrunc(value, type({DType::f32, lanes}));
      Value* back = b_.CreateFPExt(f32, value->getType());
      llvm::Type* i32 = type({DType::i32, lanes});
      Value* bits = b_.CreateBitCast(f32, i32);
      Value* inexact = b_.CreateFCmpONE(back, value);
      Value* finite = b_.CreateFCmpOLT(b_.CreateIntrinsic(llvm::Intrinsic::fabs, {value->getType()}, {back}), constant_like(value, __builtin_inf()));
      Value* grew = b_.CreateFCmpOGT(b_.CreateIntrinsic(llvm::Intrinsic::fabs, {value->getType()}, {back}),
                                     b_.CreateIntrinsic(llvm::Intrinsic::fabs, {value->getType()}, {value}));
      Value* toward_zero = b_.CreateSub(bits, b_.CreateZExt(grew, i32));
      Value* odd = b_.CreateOr(toward_zero, llvm::ConstantInt::get(i32, 1));
      Value* fixed = b_.CreateSelect(b_.CreateAnd(inexact, finite), odd, bits);
      return narrow(b_.CreateBitCast(fixed, f32->getType()), to, lanes);
    }
    if (from == DType::f32) return to == DType::bf16 ? round_to_bf16(value, lanes) : narrow(value, to, lanes);
    Value* number = cast(value, from, DType::f32, lanes);
    // Whole numbers are no subnormals.
    return to == DType::bf16 ? narrow_flushing(number, lanes) : narrow(number, to, lanes);
  }
  bool real_from = is_float(from);
  bool real_to = is_float(to);
  if (to == DType::boolean) return real_from ? b_.CreateFCmpUNE(value, constant_like(value, 0)) : b_.CreateICmpNE(value, integer_like(value, 0));
  if (real_from && real_to) return from == DType::f32 ? b_.CreateFPExt(value, t) : b_.CreateFPTrunc(value, t);
  if (real_to) return is_signed(from) ? b_.CreateSIToFP(value, t) : b_.CreateUIToFP(value, t);
  if (real_from) {
    Value* wide = float_to_int(value, to == DType::i64 ? 64 : 32, lanes);
    return to == DType::i64 || to == DType::i32 ? wide : b_.CreateTrunc(wide, t);
  }
  return is_signed(from) ? b_.CreateSExtOrTrunc(value, t) : b_.CreateZExtOrTrunc(value, t);
}

}  // namespace deplo
