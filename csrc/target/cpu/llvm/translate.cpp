#include "target/cpu/llvm/translate.h"

#include <llvm/IR/Constants.h>
#include <llvm/IR/Intrinsics.h>
#include <llvm/IR/IntrinsicsX86.h>
#include <llvm/IR/MDBuilder.h>
#include <llvm/IR/Verifier.h>
#include <llvm/Support/raw_ostream.h>

#include <map>
#include <memory>
#include <numeric>
#include <set>

#include "base/error.h"
#include "target/cpu/llvm/functions.h"

namespace deplo {
namespace {

using namespace kernel_ir;
using llvm::Value;

class Translator {
 public:
  Translator(const Kernel& kernel, llvm::Module& module, const TargetInfo& target)
      : kernel_(kernel), module_(module), target_(target), context_(module.getContext()), b_(context_) {}

  void run(const std::string& symbol) {
    llvm::Type* i64 = b_.getInt64Ty();
    llvm::Type* pointer = b_.getPtrTy();
    auto* signature = llvm::FunctionType::get(b_.getVoidTy(), {pointer, i64, i64}, false);
    function_ = llvm::Function::Create(signature, llvm::Function::ExternalLinkage, symbol, module_);
    function_->addFnAttr(llvm::Attribute::NoUnwind);
    function_->addFnAttr("min-legal-vector-width", std::to_string(target_.vector_bytes * 8));
    function_->addFnAttr("prefer-vector-width", std::to_string(target_.vector_bytes * 8));
    entry_ = llvm::BasicBlock::Create(context_, "entry", function_);
    auto* body = llvm::BasicBlock::Create(context_, "body", function_);
    b_.SetInsertPoint(entry_);
    Value* args = function_->getArg(0);
    auto field = [&](unsigned index) { return b_.CreateLoad(pointer, b_.CreateConstInBoundsGEP1_64(pointer, args, index)); };
    Value* buffers = field(0);
    Value* symbols = field(1);
    error_word_ = field(2);
    scratch_ = field(3);
    emitter_ = std::make_unique<FunctionEmitter>(b_, module_, target_, error_word_);
    llvm::MDBuilder metadata(context_);
    llvm::MDNode* domain = metadata.createAnonymousAliasScopeDomain("buffers");
    for (size_t i = 0; i < kernel_.params.size(); ++i) {
      const Param& p = kernel_.params[i];
      Value* base = b_.CreateLoad(pointer, b_.CreateConstInBoundsGEP1_64(pointer, buffers, i), p.name);
      buffers_[p.name] = {base, p.dtype, metadata.createAnonymousAliasScope(domain, p.name)};
    }
    std::vector<std::string> passed = kernel_.symbols;
    for (const kernel_ir::Size& size : kernel_.sizes) passed.push_back(size.name);
    for (size_t i = 0; i < passed.size(); ++i)
      define(passed[i], {DType::i64, 1}, b_.CreateLoad(i64, b_.CreateConstInBoundsGEP1_64(i64, symbols, i), passed[i]));
    define("thread", {DType::i64, 1}, function_->getArg(1));
    define("threads", {DType::i64, 1}, function_->getArg(2));
    b_.SetInsertPoint(body);
    block(kernel_.body);
    if (matrices_) call(llvm::Intrinsic::x86_tilerelease, {});
    b_.CreateRetVoid();
    b_.SetInsertPoint(entry_);
    if (matrices_) configure_matrices();
    b_.CreateBr(body);
    attach_alias_scopes();
    std::string complaint;
    llvm::raw_string_ostream out(complaint);
    if (llvm::verifyFunction(*function_, &out)) throw InternalError(fmt::format("[codegen/llvm] kernel {}: {}", kernel_.name, out.str()));
  }

 private:
  struct Buffer {
    Value* base;
    DType dtype;
    llvm::MDNode* scope;
  };
  struct Named {
    Type type;
    Value* value;            ///< of an SSA value
    llvm::AllocaInst* slot;  ///< of a var
  };

  // ---- names ---------------------------------------------------------------------------------------------------

  void define(const std::string& name, Type type, Value* value) {
    if (!llvm::isa<llvm::Constant>(value) && !llvm::isa<llvm::Argument>(value)) value->setName(name);
    name_as(name, {type, value, nullptr});
  }

  void name_as(const std::string& name, const Named& meaning) {
    auto [it, is_new] = names_.try_emplace(name, meaning);
    hidden_.emplace_back(name, is_new ? std::nullopt : std::optional(it->second));
    it->second = meaning;
  }

  const Named& find(const std::string& name) const {
    auto it = names_.find(name);
    DEPLO_ASSERT(it != names_.end(), "kernel {}: {} is not defined", kernel_.name, name);
    return it->second;
  }
  Value* value(const std::string& name) {
    const Named& n = find(name);
    return n.slot ? b_.CreateLoad(n.slot->getAllocatedType(), n.slot) : n.value;
  }
  Type type_of(const std::string& name) const { return find(name).type; }
  const Buffer& buffer(const std::string& name) const {
    auto it = buffers_.find(name);
    DEPLO_ASSERT(it != buffers_.end(), "kernel {}: buffer {} is not declared", kernel_.name, name);
    return it->second;
  }

  llvm::AllocaInst* entry_alloca(llvm::Type* type, Value* count, const std::string& name) {
    llvm::IRBuilder<> at(entry_, entry_->begin());
    return at.CreateAlloca(type, count, name);
  }

  // ---- index expressions -----------------------------------------------------------------------------------------

  Value* integer(int64_t v) { return b_.getInt64(static_cast<uint64_t>(v)); }

  Value* expr(Expr e) {
    switch (e.kind()) {
      case ExprKind::constant: return integer(e.value());
      case ExprKind::symbol: {
        Value* v = value(e.name());
        return widen_index(v, type_of(e.name()).dtype, b_.getInt64Ty());
      }
      // Index arithmetic stays within 64 bits by the meaning of expressions, so it may be marked as not wrapping.
      case ExprKind::add: {
        Value* sum = nullptr;
        for (const Expr& t : e.operands()) sum = sum ? b_.CreateNSWAdd(sum, expr(t)) : expr(t);
        return sum;
      }
      case ExprKind::mul: {
        Value* result = nullptr;
        for (const Expr& t : e.operands()) result = result ? b_.CreateNSWMul(result, expr(t)) : expr(t);
        return result;
      }
      case ExprKind::floordiv: return floor_divide(e, false);
      case ExprKind::mod: return floor_divide(e, true);
      case ExprKind::min: return b_.CreateBinaryIntrinsic(llvm::Intrinsic::smin, expr(e.operands()[0]), expr(e.operands()[1]));
      case ExprKind::max: return b_.CreateBinaryIntrinsic(llvm::Intrinsic::smax, expr(e.operands()[0]), expr(e.operands()[1]));
    }
    return nullptr;
  }

  Value* widen_index(Value* v, DType dtype, llvm::Type* i64) {
    return is_signed(dtype) ? b_.CreateSExtOrTrunc(v, i64) : b_.CreateZExtOrTrunc(v, i64);
  }

  Value* floor_divide(Expr e, bool want_mod) {
    Value* a = expr(e.operands()[0]);
    Expr divisor = e.operands()[1];
    if (auto c = divisor.as_constant(); c && (*c & (*c - 1)) == 0)
      return want_mod ? b_.CreateAnd(a, integer(*c - 1)) : b_.CreateAShr(a, integer(__builtin_ctzll(static_cast<uint64_t>(*c))));
    if (!never_negative(divisor)) return floor_divide_by_any(a, expr(divisor), want_mod);
    // A size of 0 runs no iteration, but its division may be hoisted before the loop: it must not trap.
    Value* d = divisor.is_constant() ? integer(divisor.value()) : b_.CreateBinaryIntrinsic(llvm::Intrinsic::umax, expr(divisor), integer(1));
    if (never_negative(e.operands()[0])) return want_mod ? b_.CreateURem(a, d) : b_.CreateUDiv(a, d);
    Value* rest = b_.CreateSRem(a, d);
    Value* negative = b_.CreateICmpSLT(rest, integer(0));
    if (want_mod) return b_.CreateSelect(negative, b_.CreateAdd(rest, d), rest);
    return b_.CreateSub(b_.CreateSDiv(a, d), b_.CreateZExt(negative, b_.getInt64Ty()));
  }

  /// By a divisor of either sign. By 0, and by -1, whose quotient the processor may refuse, 1 divides in its place: nothing may trap.
  Value* floor_divide_by_any(Value* a, Value* divisor, bool want_mod) {
    Value* minus_one = b_.CreateICmpEQ(divisor, integer(-1));
    Value* one = b_.CreateOr(minus_one, b_.CreateICmpEQ(divisor, integer(0)));
    Value* d = b_.CreateSelect(one, integer(1), divisor);
    Value* rest = b_.CreateSRem(a, d);
    Value* rounds = b_.CreateAnd(b_.CreateICmpNE(rest, integer(0)), b_.CreateICmpSLT(b_.CreateXor(rest, d), integer(0)));
    if (want_mod) return b_.CreateSelect(rounds, b_.CreateAdd(rest, d), rest);
    Value* quotient = b_.CreateSub(b_.CreateSDiv(a, d), b_.CreateZExt(rounds, b_.getInt64Ty()));
    return b_.CreateSelect(minus_one, b_.CreateNeg(a), quotient);
  }

  /// Sums and products of constants and of loop variables that start at or above 0. A symbol may be any integer that the caller passed.
  bool never_negative(Expr e) const {
    switch (e.kind()) {
      case ExprKind::constant: return e.value() >= 0;
      case ExprKind::symbol: return non_negative_.count(e.name()) > 0;
      case ExprKind::mod: return never_negative(e.operands()[1]);
      case ExprKind::floordiv: return never_negative(e.operands()[0]) && never_negative(e.operands()[1]);
      case ExprKind::max: return never_negative(e.operands()[0]) || never_negative(e.operands()[1]);
      default: break;
    }
    for (const Expr& t : e.operands())
      if (!never_negative(t)) return false;
    return true;
  }

  Value* guard(const std::vector<Cond>& conds) {
    Value* all = b_.getTrue();
    for (const Cond& c : conds) {
      Value* v = expr(c.expr);
      Value* zero = integer(0);
      Value* holds = c.kind == Cond::Kind::ge0   ? b_.CreateICmpSGE(v, zero)
                     : c.kind == Cond::Kind::eq0 ? b_.CreateICmpEQ(v, zero)
                                                 : b_.CreateICmpNE(v, zero);
      all = b_.CreateAnd(all, holds);
    }
    return all;
  }

  // ---- memory ----------------------------------------------------------------------------------------------------

  llvm::Type* memory(DType dtype, int lanes) {
    llvm::Type* element = FunctionEmitter::memory_type(context_, dtype);
    return lanes == 1 ? element : llvm::FixedVectorType::get(element, static_cast<unsigned>(lanes));
  }
  Value* from_memory(Value* v, DType dtype) { return dtype == DType::boolean ? b_.CreateICmpNE(v, llvm::Constant::getNullValue(v->getType())) : v; }
  Value* to_memory(Value* v, DType dtype, int lanes) { return dtype == DType::boolean ? b_.CreateZExt(v, memory(dtype, lanes)) : v; }
  llvm::Align align_of(DType dtype) const { return llvm::Align(static_cast<uint64_t>(size_of(dtype))); }

  Value* address(const Buffer& buffer, Value* offset) { return b_.CreateInBoundsGEP(memory(buffer.dtype, 1), buffer.base, offset); }

  template <class Access>
  Access* note(Access* access, const Buffer& buffer) {
    accesses_.emplace_back(access, buffer.scope);
    return access;
  }

  /// Each access belongs to its buffer's scope and to none of the others': buffers never overlap.
  void attach_alias_scopes() {
    std::map<llvm::MDNode*, llvm::MDNode*> others;
    for (const auto& [name, buffer] : buffers_) {
      if (!buffer.scope) continue;
      llvm::SmallVector<llvm::Metadata*> rest;
      for (const auto& [other_name, other] : buffers_)
        if (other.scope && other.scope != buffer.scope) rest.push_back(other.scope);
      others[buffer.scope] = llvm::MDNode::get(context_, rest);
    }
    for (auto& [access, scope] : accesses_) {
      if (!scope) continue;
      access->setMetadata(llvm::LLVMContext::MD_alias_scope, llvm::MDNode::get(context_, {scope}));
      access->setMetadata(llvm::LLVMContext::MD_noalias, others[scope]);
    }
  }

  /// Per-lane pointers of a strided or gathered access.
  Value* pointers(const Buffer& buffer, Value* base, Expr stride, const std::string& gather, int lanes) {
    Value* index = nullptr;
    if (!gather.empty()) {
      index = value(gather);
      auto* wide = llvm::FixedVectorType::get(b_.getInt64Ty(), static_cast<unsigned>(lanes));
      index = widen_index(index, type_of(gather).dtype, wide);
    } else {
      index = b_.CreateMul(iota(lanes), b_.CreateVectorSplat(static_cast<unsigned>(lanes), expr(stride)));
    }
    return b_.CreateGEP(memory(buffer.dtype, 1), base, index);
  }

  Value* iota(int lanes) {
    llvm::SmallVector<uint64_t> steps(static_cast<size_t>(lanes));
    std::iota(steps.begin(), steps.end(), 0);
    return llvm::ConstantDataVector::get(context_, steps);
  }

  Value* zero_of(llvm::Type* type) { return llvm::Constant::getNullValue(type); }

  // ---- statements ------------------------------------------------------------------------------------------------

  void statement(const Let& s) {
    if (s.fn == Fn::constant) {
      define(s.name, s.type, emitter_->splat(emitter_->literal(s.literal, s.type.dtype), s.type.lanes));
      return;
    }
    if (s.fn == Fn::index) {
      Value* v = expr(s.index);
      if (s.type.lanes > 1) {
        auto lanes = static_cast<unsigned>(s.type.lanes);
        v = b_.CreateVectorSplat(lanes, v);
        if (!s.lane_step.is(0)) v = b_.CreateAdd(v, b_.CreateMul(iota(s.type.lanes), b_.CreateVectorSplat(lanes, expr(s.lane_step))));
      }
      define(s.name, s.type, emitter_->cast(v, DType::i64, s.type.dtype, s.type.lanes));
      return;
    }
    std::vector<Value*> operands;
    for (const std::string& name : s.operands) operands.push_back(value(name));
    // Of a choice the last operand, of a dot product the first says what it is over.
    const std::string& typical = info(s.fn).signature == Signature::dot ? s.operands.front() : s.operands.back();
    define(s.name, s.type, emitter_->apply(s.fn, s.type, type_of(typical).dtype, operands));
  }

  void statement(const Splat& s) { define(s.name, s.type, emitter_->splat(value(s.operand), s.type.lanes)); }

  void statement(const FirstLanes& s) {
    if (s.lanes == 1) {
      define(s.name, {DType::boolean, 1}, b_.CreateICmpSGT(expr(s.count), integer(0)));
      return;
    }
    Value* count = b_.CreateBinaryIntrinsic(llvm::Intrinsic::smin, expr(s.count), integer(s.lanes));
    count = b_.CreateTrunc(b_.CreateBinaryIntrinsic(llvm::Intrinsic::smax, count, integer(0)), b_.getInt32Ty());
    llvm::SmallVector<uint32_t> steps(static_cast<size_t>(s.lanes));
    std::iota(steps.begin(), steps.end(), 0);
    Value* lanes = llvm::ConstantDataVector::get(context_, steps);
    define(s.name, {DType::boolean, s.lanes}, b_.CreateICmpSLT(lanes, b_.CreateVectorSplat(static_cast<unsigned>(s.lanes), count)));
  }

  void statement(const ReduceLanes& s) {
    Value* v = value(s.operand);
    int lanes = type_of(s.operand).lanes;
    DEPLO_ASSERT((lanes & (lanes - 1)) == 0, "kernel {}: {} has {} lanes, not a power of two", kernel_.name, s.operand, lanes);
    // A mask is one integer to the machine.
    if (s.dtype == DType::boolean && lanes > 1 && (s.fn == Fn::bit_or || s.fn == Fn::bit_and || s.fn == Fn::max || s.fn == Fn::min)) {
      define(s.name, {s.dtype, 1}, s.fn == Fn::bit_or || s.fn == Fn::max ? b_.CreateOrReduce(v) : b_.CreateAndReduce(v));
      return;
    }
    while (lanes > 1) {
      lanes /= 2;
      llvm::SmallVector<int> low(static_cast<size_t>(lanes));
      llvm::SmallVector<int> high(static_cast<size_t>(lanes));
      std::iota(low.begin(), low.end(), 0);
      std::iota(high.begin(), high.end(), lanes);
      Value* a = b_.CreateShuffleVector(v, low);
      Value* b = b_.CreateShuffleVector(v, high);
      if (lanes == 1) {
        a = b_.CreateExtractElement(a, uint64_t{0});
        b = b_.CreateExtractElement(b, uint64_t{0});
      }
      v = emitter_->apply(s.fn, {s.dtype, lanes}, s.dtype, {a, b});
    }
    define(s.name, {s.dtype, 1}, v);
  }

  void statement(const Exchange& s) { DEPLO_ASSERT(false, "kernel {}: {} is exchanged between threads of a GPU", kernel_.name, s.operand); }
  void statement(const Extract& s) {
    Value* v = value(s.operand);
    define(s.name, {s.dtype, 1}, v->getType()->isVectorTy() ? b_.CreateExtractElement(v, static_cast<uint64_t>(s.lane)) : v);
  }

  void statement(const Shuffle& s) {
    Value* a = value(s.a);
    llvm::SmallVector<int> lanes(s.lanes.begin(), s.lanes.end());
    Value* b = s.b.empty() ? static_cast<Value*>(llvm::PoisonValue::get(a->getType())) : value(s.b);
    Value* v = b_.CreateShuffleVector(a, b, lanes);
    if (s.type.lanes == 1) v = b_.CreateExtractElement(v, uint64_t{0});
    define(s.name, s.type, v);
  }

  void statement(const Load& s) {
    const Buffer& from = buffer(s.buffer);
    Value* base = address(from, expr(s.offset));
    int lanes = s.type.lanes;
    llvm::Type* t = memory(from.dtype, lanes);
    Value* mask = s.mask.empty() ? nullptr : value(s.mask);
    Value* other = s.passthrough.empty() ? zero_of(t) : to_memory(value(s.passthrough), from.dtype, lanes);
    Value* v = nullptr;
    if (lanes == 1) {
      if (!s.gather.empty()) base = b_.CreateGEP(memory(from.dtype, 1), base, widen_index(value(s.gather), type_of(s.gather).dtype, b_.getInt64Ty()));
      v = mask ? masked_scalar_load(from, base, t, mask, other) : note(b_.CreateAlignedLoad(t, base, align_of(from.dtype)), from);
    } else if (s.gather.empty() && s.stride.is(1)) {
      v = mask ? static_cast<Value*>(note(b_.CreateMaskedLoad(t, base, align_of(from.dtype), mask, other), from))
               : note(b_.CreateAlignedLoad(t, base, align_of(from.dtype)), from);
    } else if (!mask && s.gather.empty()) {
      v = llvm::PoisonValue::get(t);
      Value* step = expr(s.stride);
      for (int lane = 0; lane < lanes; ++lane) {
        Value* place = b_.CreateGEP(memory(from.dtype, 1), base, b_.CreateNSWMul(step, integer(lane)));
        v = b_.CreateInsertElement(v, note(b_.CreateAlignedLoad(memory(from.dtype, 1), place, align_of(from.dtype)), from),
                                   static_cast<uint64_t>(lane));
      }
    } else {
      Value* all = mask ? mask : emitter_->splat(b_.getTrue(), lanes);
      v = note(b_.CreateMaskedGather(t, pointers(from, base, s.stride, s.gather, lanes), align_of(from.dtype), all, other), from);
    }
    define(s.name, s.type, from_memory(v, from.dtype));
  }

  Value* masked_scalar_load(const Buffer& from, Value* place, llvm::Type* t, Value* mask, Value* other) {
    auto* before = b_.GetInsertBlock();
    auto* read = llvm::BasicBlock::Create(context_, "read", function_);
    auto* next = llvm::BasicBlock::Create(context_, "next", function_);
    b_.CreateCondBr(mask, read, next);
    b_.SetInsertPoint(read);
    Value* v = note(b_.CreateAlignedLoad(t, place, align_of(from.dtype)), from);
    b_.CreateBr(next);
    b_.SetInsertPoint(next);
    auto* phi = b_.CreatePHI(t, 2);
    phi->addIncoming(other, before);
    phi->addIncoming(v, read);
    return phi;
  }

  void statement(const Store& s) {
    const Buffer& to = buffer(s.buffer);
    Type type = type_of(s.value);
    Value* v = value(s.value);
    Value* base = address(to, expr(s.offset));
    Value* mask = s.mask.empty() ? nullptr : value(s.mask);
    if (s.combiner != Combiner::set) {
      combine(s, to, v, base, mask, type);
      return;
    }
    Value* raw = to_memory(v, to.dtype, type.lanes);
    if (type.lanes == 1) {
      if (!s.gather.empty()) base = b_.CreateGEP(memory(to.dtype, 1), base, widen_index(value(s.gather), type_of(s.gather).dtype, b_.getInt64Ty()));
      when(mask, [&] { note(b_.CreateAlignedStore(raw, base, align_of(to.dtype)), to); });
    } else if (s.gather.empty() && s.stride.is(1)) {
      if (mask)
        note(b_.CreateMaskedStore(raw, base, align_of(to.dtype), mask), to);
      else
        note(b_.CreateAlignedStore(raw, base, align_of(to.dtype)), to);
    } else if (!mask) {
      // In lane order, so that the last of two lanes at one place wins.
      Value* places = pointers(to, base, s.stride, s.gather, type.lanes);
      for (int lane = 0; lane < type.lanes; ++lane) {
        auto at = static_cast<uint64_t>(lane);
        note(b_.CreateAlignedStore(b_.CreateExtractElement(raw, at), b_.CreateExtractElement(places, at), align_of(to.dtype)), to);
      }
    } else {
      note(b_.CreateMaskedScatter(raw, pointers(to, base, s.stride, s.gather, type.lanes), align_of(to.dtype), mask), to);
    }
  }

  /// Runs `body` only where the scalar `mask` holds; always when it is null.
  template <class F>
  void when(Value* mask, const F& body) {
    if (!mask) {
      body();
      return;
    }
    auto* inside = llvm::BasicBlock::Create(context_, "then", function_);
    auto* next = llvm::BasicBlock::Create(context_, "next", function_);
    b_.CreateCondBr(mask, inside, next);
    b_.SetInsertPoint(inside);
    body();
    b_.CreateBr(next);
    b_.SetInsertPoint(next);
  }

  static Fn function_of(Combiner combiner) {
    switch (combiner) {
      case Combiner::sum: return Fn::add;
      case Combiner::prod: return Fn::mul;
      case Combiner::min: return Fn::min;
      case Combiner::max: return Fn::max;
      default: throw InternalError(fmt::format("{} is not a combiner of stores", to_string(combiner)));
    }
  }

  void combine(const Store& s, const Buffer& to, Value* v, Value* base, Value* mask, Type type) {
    DEPLO_SUPPORT(!s.atomic, "kernel {}: atomic stores are not built for CPUs", kernel_.name);
    Fn fn = function_of(s.combiner);
    Value* places = type.lanes > 1 ? pointers(to, base, s.stride, s.gather, type.lanes) : nullptr;
    if (type.lanes == 1 && !s.gather.empty())
      base = b_.CreateGEP(memory(to.dtype, 1), base, widen_index(value(s.gather), type_of(s.gather).dtype, b_.getInt64Ty()));
    for (int lane = 0; lane < type.lanes; ++lane) {
      auto at = static_cast<uint64_t>(lane);
      Value* place = type.lanes == 1 ? base : b_.CreateExtractElement(places, at);
      Value* element = type.lanes == 1 ? v : b_.CreateExtractElement(v, at);
      Value* on = !mask ? nullptr : type.lanes == 1 ? mask : b_.CreateExtractElement(mask, at);
      when(on, [&] {
        Value* old = from_memory(note(b_.CreateAlignedLoad(memory(to.dtype, 1), place, align_of(to.dtype)), to), to.dtype);
        Value* combined = to.dtype == DType::boolean ? (fn == Fn::max || fn == Fn::add ? b_.CreateOr(old, element) : b_.CreateAnd(old, element))
                                                     : emitter_->apply(fn, {to.dtype, 1}, to.dtype, {old, element});
        note(b_.CreateAlignedStore(to_memory(combined, to.dtype, 1), place, align_of(to.dtype)), to);
      });
    }
  }

  void statement(const Var& s) {
    Value* init = value(s.init);
    llvm::AllocaInst* slot = entry_alloca(init->getType(), nullptr, s.name);
    b_.CreateStore(init, slot);
    name_as(s.name, {s.type, nullptr, slot});
  }

  void statement(const Assign& s) {
    const Named& target = find(s.name);
    DEPLO_ASSERT(target.slot, "kernel {}: {} is not a var", kernel_.name, s.name);
    b_.CreateStore(value(s.value), target.slot);
  }

  void statement(const For& s) {
    Value* lo = expr(s.lo);
    Value* hi = expr(s.hi);
    Value* step = expr(s.step);
    auto* before = b_.GetInsertBlock();
    auto* loop = llvm::BasicBlock::Create(context_, "for_" + s.name, function_);
    auto* after = llvm::BasicBlock::Create(context_, "end_" + s.name, function_);
    // Tested at the bottom, entered only if there is a first iteration.
    b_.CreateCondBr(b_.CreateICmpSLT(lo, hi), loop, after);
    b_.SetInsertPoint(loop);
    auto* i = b_.CreatePHI(b_.getInt64Ty(), 2, s.name);
    i->addIncoming(lo, before);
    name_as(s.name, {{DType::i64, 1}, i, nullptr});
    bool counts_up = never_negative(s.lo);
    if (counts_up) non_negative_.insert(s.name);
    block(s.body);
    non_negative_.erase(s.name);
    Value* next = b_.CreateNSWAdd(i, step);
    i->addIncoming(next, b_.GetInsertBlock());
    auto* branch = b_.CreateCondBr(b_.CreateICmpSLT(next, hi), loop, after);
    if (s.unroll > 1) branch->setMetadata(llvm::LLVMContext::MD_loop, unroll_hint(s.unroll));
    b_.SetInsertPoint(after);
  }

  llvm::MDNode* unroll_hint(int count) {
    auto* name = llvm::MDString::get(context_, "llvm.loop.unroll.count");
    auto* number = llvm::ConstantAsMetadata::get(b_.getInt32(static_cast<uint32_t>(count)));
    auto self = llvm::MDNode::getTemporary(context_, {});
    llvm::MDNode* node = llvm::MDNode::getDistinct(context_, {self.get(), llvm::MDNode::get(context_, {name, number})});
    node->replaceOperandWith(0, node);
    return node;
  }

  void statement(const If& s) {
    Value* condition = s.guard.empty() ? value(s.condition) : guard(s.guard);
    auto* then = llvm::BasicBlock::Create(context_, "then", function_);
    auto* next = llvm::BasicBlock::Create(context_, "next", function_);
    auto* otherwise = s.otherwise.empty() ? next : llvm::BasicBlock::Create(context_, "else", function_);
    b_.CreateCondBr(condition, then, otherwise);
    b_.SetInsertPoint(then);
    block(s.then);
    b_.CreateBr(next);
    if (otherwise != next) {
      b_.SetInsertPoint(otherwise);
      block(s.otherwise);
      b_.CreateBr(next);
    }
    b_.SetInsertPoint(next);
  }

  void statement(const Alloc& s) {
    DEPLO_SUPPORT(s.space != Space::shared, "kernel {}: {} lies in shared memory, which a CPU has none of", kernel_.name, s.name);
    Value* base = nullptr;
    if (s.space == Space::stack) {
      DEPLO_ASSERT(s.count.is_constant(), "kernel {}: stack array {} has the symbolic size {}", kernel_.name, s.name, print(s.count));
      auto* slot = entry_alloca(memory(s.dtype, 1), integer(s.count.value()), s.name);
      slot->setAlignment(llvm::Align(64));
      base = slot;
    } else {
      base = b_.CreateInBoundsGEP(b_.getInt8Ty(), scratch_, expr(s.offset), s.name);
    }
    // Arrays of one kernel may share scratch memory once dead, so they get no scope of their own.
    buffers_[s.name] = {base, s.dtype, nullptr};
  }

  void statement(const Prefetch& s) {
    const Buffer& from = buffer(s.buffer);
    Value* place = address(from, expr(s.offset));
    int locality = s.level == 1 ? 3 : s.level == 2 ? 2 : 1;
    b_.CreateIntrinsic(llvm::Intrinsic::prefetch, {b_.getPtrTy()},
                       {place, b_.getInt32(0), b_.getInt32(static_cast<uint32_t>(locality)), b_.getInt32(1)});
  }

  void call(llvm::Intrinsic::ID id, const std::vector<Value*>& operands) {
    b_.CreateCall(llvm::Intrinsic::getOrInsertDeclaration(&module_, id), operands);
  }

  /// All eight registers have 16 rows of 64 bytes (Intel's manual, LDTILECFG: palette 1, then columns in bytes from byte 16, rows from byte 48).
  void configure_matrices() {
    constexpr int kConfigBytes = 64;
    std::vector<uint8_t> bytes(kConfigBytes, 0);
    bytes[0] = 1;
    for (size_t t = 0; t < kMatrixRegisters; ++t) {
      bytes[16 + 2 * t] = 64;
      bytes[48 + t] = 16;
    }
    auto* data = llvm::ConstantDataArray::get(context_, bytes);
    auto* config = new llvm::GlobalVariable(module_, data->getType(), true, llvm::GlobalValue::PrivateLinkage, data, "matrix_config");
    config->setAlignment(llvm::Align(kConfigBytes));
    call(llvm::Intrinsic::x86_ldtilecfg, {config});
  }

  template <class S>
    requires std::is_same_v<S, CopyAsync> || std::is_same_v<S, CopyGroup> || std::is_same_v<S, LoadMatrix> || std::is_same_v<S, JoinMatrix> ||
             std::is_same_v<S, Mma> || std::is_same_v<S, MultiplyTiles> || std::is_same_v<S, MultiplyGroup>
  void statement(const S& /*s*/) {
    DEPLO_ASSERT(false, "kernel {}: asynchronous copies and matrices of warps are a GPU's", kernel_.name);
  }
  void statement(const Matrix& s) {
    matrices_ = true;
    auto number = [&](int t) { return b_.getInt8(static_cast<uint8_t>(t)); };
    if (s.kind == Matrix::Kind::zero) {
      call(llvm::Intrinsic::x86_tilezero, {number(s.target)});
    } else if (s.kind == Matrix::Kind::multiply) {
      const bool signed_b = s.b_dtype == DType::i8;
      const llvm::Intrinsic::ID id = s.a_dtype == DType::bf16 ? llvm::Intrinsic::x86_tdpbf16ps
                                     : s.a_dtype == DType::i8 ? (signed_b ? llvm::Intrinsic::x86_tdpbssd : llvm::Intrinsic::x86_tdpbsud)
                                                              : (signed_b ? llvm::Intrinsic::x86_tdpbusd : llvm::Intrinsic::x86_tdpbuud);
      call(id, {number(s.target), number(s.a), number(s.b)});
    } else {
      const Buffer& memory = buffer(s.buffer);
      Value* place = address(memory, expr(s.offset));
      Value* stride = b_.CreateNSWMul(expr(s.stride), integer(size_of(memory.dtype)));
      const llvm::Intrinsic::ID id = s.kind == Matrix::Kind::load ? llvm::Intrinsic::x86_tileloadd64 : llvm::Intrinsic::x86_tilestored64;
      call(id, {number(s.target), place, stride});
    }
  }

  void statement(const Barrier& /*s*/) { throw UnsupportedError(fmt::format("kernel {}: a CPU kernel has no barrier", kernel_.name)); }
  void statement(const SetError& s) { emitter_->set_error_if(emitter_->any(value(s.condition)), s.code); }

  void block(const Block& statements) {
    // Names of an inner block end with it; an outer name may be defined anew beside it.
    const size_t outer = hidden_.size();
    for (const auto& stmt : statements) std::visit([&](const auto& s) { statement(s); }, stmt->node);
    for (; hidden_.size() > outer; hidden_.pop_back()) {
      const auto& [name, before] = hidden_.back();
      if (before)
        names_.at(name) = *before;
      else
        names_.erase(name);
    }
  }

  const Kernel& kernel_;
  llvm::Module& module_;
  const TargetInfo& target_;
  llvm::LLVMContext& context_;
  llvm::IRBuilder<> b_;
  std::unique_ptr<FunctionEmitter> emitter_;
  llvm::Function* function_ = nullptr;
  llvm::BasicBlock* entry_ = nullptr;
  Value* error_word_ = nullptr;
  Value* scratch_ = nullptr;
  bool matrices_ = false;  ///< whether the kernel uses a matrix unit
  std::map<std::string, Buffer> buffers_;
  std::map<std::string, Named> names_;
  std::vector<std::pair<std::string, std::optional<Named>>> hidden_;  ///< what names meant before, in the order of their definitions
  std::set<std::string> non_negative_{"thread", "threads"};
  std::vector<std::pair<llvm::Instruction*, llvm::MDNode*>> accesses_;
};

}  // namespace

void translate_kernel(const Kernel& kernel, const std::string& symbol, llvm::Module& module, const TargetInfo& target) {
  Translator(kernel, module, target).run(symbol);
}

}  // namespace deplo
