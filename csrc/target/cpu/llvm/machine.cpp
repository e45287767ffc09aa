#include "target/cpu/llvm/machine.h"

#include <llvm/Analysis/CGSCCPassManager.h>
#include <llvm/Analysis/LoopAnalysisManager.h>
#include <llvm/IR/LegacyPassManager.h>
#include <llvm/MC/TargetRegistry.h>
#include <llvm/Passes/PassBuilder.h>
#include <llvm/Support/CommandLine.h>
#include <llvm/Support/TargetSelect.h>
#include <llvm/Support/raw_ostream.h>
#include <llvm/TargetParser/Host.h>
#include <llvm/Transforms/InstCombine/InstCombine.h>
#include <llvm/Transforms/Scalar/ADCE.h>
#include <llvm/Transforms/Scalar/EarlyCSE.h>
#include <llvm/Transforms/Scalar/LICM.h>
#include <llvm/Transforms/Scalar/LoopPassManager.h>
#include <llvm/Transforms/Scalar/LoopUnrollPass.h>
#include <llvm/Transforms/Scalar/SROA.h>
#include <llvm/Transforms/Scalar/SimplifyCFG.h>
#include <llvm/Transforms/Vectorize/VectorCombine.h>

#include <algorithm>
#include <cctype>
#include <mutex>

#include "base/closest.h"
#include "base/error.h"
#include "base/sha256.h"
#include "base/text.h"
#include "target/cpu/codegen.h"
#include "target/cpu/features.h"
#include "target/cpu/llvm/masked_loads.h"
#include "target/cpu/llvm/single_lane_stores.h"
#include "target/cpu/llvm/translate.h"

namespace deplo {
namespace {

// Loops keep a pointer for each array rather than one index for all of them: a multiply-add whose operand in memory has an index is two
// instructions to Intel's cores, and with half as many loads in flight a layer of one row reads 8 % slower.
void prefer_pointers() {
  auto& options = llvm::cl::getRegisteredOptions();
  auto found = options.find("lsr-insns-cost");
  if (found != options.end()) found->second->addOccurrence(0, "lsr-insns-cost", "false");
}

void initialize_target() {
  static std::once_flag once;
  std::call_once(once, [] {
    prefer_pointers();
    LLVMInitializeX86TargetInfo();
    LLVMInitializeX86Target();
    LLVMInitializeX86TargetMC();
    LLVMInitializeX86AsmPrinter();
  });
}

constexpr const char* kTriple = "x86_64-unknown-linux-gnu";

/// The features that decide which instructions appear; the rest of the host's are left alone, so that a restricted target is what it says.
std::string feature_string(const TargetInfo& target) {
  std::string text;
  for (const std::string& f : target.features) text += (text.empty() ? "+" : ",+") + f;
  return text;
}

/// Whose instruction costs code generation assumes. A processor's name brings no feature with it here, as it would in createTargetMachine.
std::string tuning_cpu(const TargetInfo& target) {
  if (target.features.contains("avx512f")) return "znver4";
  if (target.features.contains("avx2")) return "znver3";
  return "x86-64-v2";
}

bool has_dot_products(const llvm::Module& module) {
  return std::any_of(module.begin(), module.end(), [](const llvm::Function& f) { return f.getName().starts_with("llvm.x86.avx512bf16.dpbf16ps"); });
}

/// Promotion of vars to registers, common subexpressions, invariants out of loops: what the generated code needs and no more (O3 costs
/// twice the time and gains nothing on explicit vectors).
void optimize(llvm::Module& module, llvm::TargetMachine& machine, const TargetInfo& target) {
  llvm::LoopAnalysisManager loops;
  llvm::FunctionAnalysisManager functions;
  llvm::CGSCCAnalysisManager calls;
  llvm::ModuleAnalysisManager modules;
  llvm::PassBuilder builder(&machine);
  builder.registerModuleAnalyses(modules);
  builder.registerCGSCCAnalyses(calls);
  builder.registerFunctionAnalyses(functions);
  builder.registerLoopAnalyses(loops);
  builder.crossRegisterProxies(loops, functions, calls, modules);
  llvm::FunctionPassManager passes;
  passes.addPass(llvm::SROAPass(llvm::SROAOptions::ModifyCFG));
  passes.addPass(llvm::EarlyCSEPass(true));
  passes.addPass(llvm::InstCombinePass());
  passes.addPass(llvm::SimplifyCFGPass());
  passes.addPass(llvm::createFunctionToLoopPassAdaptor(llvm::LICMPass(llvm::LICMOptions()), /*UseMemorySSA=*/true));
  passes.addPass(llvm::LoopUnrollPass(llvm::LoopUnrollOptions(2, /*OnlyWhenForced=*/true)));
  passes.addPass(llvm::EarlyCSEPass(true));
  passes.addPass(llvm::SimplifyCFGPass());
  // Dot products of pairs take apart and join again what lies in memory as they want it.
  if (has_dot_products(module)) passes.addPass(llvm::VectorCombinePass());
  passes.addPass(llvm::ADCEPass());
  llvm::ModulePassManager pipeline;
  pipeline.addPass(llvm::createModuleToFunctionPassAdaptor(std::move(passes)));
  pipeline.run(module, modules);
  split_single_lane_stores(module);
  write_masked_loads(module, target);
}

void check_known(const std::string& features) {
  const std::vector<std::string> known{"native", "avx512", "avx2", "sse"};
  if (features.empty() || std::find(known.begin(), known.end(), features) != known.end()) return;
  std::string close = closest(features, known);
  throw UserError(fmt::format("no CPU features are called '{}'{} one of {}", features,
                              close.empty() ? ": expected" : ", did you mean '" + close + "'? Expected", joined(known)));
}

}  // namespace

std::unique_ptr<llvm::TargetMachine> make_machine(const TargetInfo& target) {
  initialize_target();
  std::string error;
  llvm::Triple triple(kTriple);
  const llvm::Target* found = llvm::TargetRegistry::lookupTarget(triple, error);
  DEPLO_ASSERT(found, "[codegen/llvm] {}", error);
  llvm::TargetOptions options;
  // Only the fma of the table fuses: compiled code and the interpreter then round alike on every CPU.
  options.AllowFPOpFusion = llvm::FPOpFusion::Strict;
  std::unique_ptr<llvm::TargetMachine> machine(found->createTargetMachine(triple, "x86-64", feature_string(target), options, llvm::Reloc::PIC_,
                                                                          llvm::CodeModel::Small, llvm::CodeGenOptLevel::Default, true));
  DEPLO_ASSERT(machine, "[codegen/llvm] no target machine for features {}", feature_string(target));
  return machine;
}

void build_module(const kernel_ir::Kernel& kernel, const std::string& symbol, const TargetInfo& target, llvm::TargetMachine& machine,
                  llvm::Module& module) {
  module.setTargetTriple(machine.getTargetTriple());
  module.setDataLayout(machine.createDataLayout());
  translate_kernel(kernel, symbol, module, target);
  for (llvm::Function& function : module)
    if (!function.isDeclaration()) function.addFnAttr("tune-cpu", tuning_cpu(target));
  optimize(module, machine, target);
}

std::string emit_object(llvm::Module& module, llvm::TargetMachine& machine) {
  llvm::SmallVector<char, 0> bytes;
  llvm::raw_svector_ostream out(bytes);
  llvm::legacy::PassManager passes;
  bool failed = machine.addPassesToEmitFile(passes, out, nullptr, llvm::CodeGenFileType::ObjectFile);
  DEPLO_ASSERT(!failed, "[codegen/llvm] the target cannot write object files");
  passes.run(module);
  return {bytes.data(), bytes.size()};
}

std::string canonical_text(const kernel_ir::Kernel& kernel) {
  kernel_ir::Kernel anonymous = kernel;
  anonymous.name = "k";
  anonymous.provenance.clear();
  return print(anonymous);
}

std::string machine_symbol(const kernel_ir::Kernel& kernel, const std::string& key) {
  std::string ops;
  for (char c : kernel.name) ops += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return "deplo_" + ops + "_" + key.substr(0, 12);
}

std::string cpu_llvm_text(const kernel_ir::Kernel& kernel, const PassContext& context) {
  auto machine = make_machine(context.target);
  llvm::LLVMContext llvm_context;
  llvm::Module module(kernel.name, llvm_context);
  build_module(kernel, machine_symbol(kernel, sha256_hex(canonical_text(kernel))), context.target, *machine, module);
  std::string text;
  llvm::raw_string_ostream out(text);
  module.print(out, nullptr);
  return text;
}

std::string cpu_assembly_text(const kernel_ir::Kernel& kernel, const PassContext& context) {
  auto machine = make_machine(context.target);
  machine->Options.MCOptions.AsmVerbose = false;
  llvm::LLVMContext llvm_context;
  llvm::Module module(kernel.name, llvm_context);
  build_module(kernel, machine_symbol(kernel, sha256_hex(canonical_text(kernel))), context.target, *machine, module);
  llvm::SmallVector<char, 0> bytes;
  llvm::raw_svector_ostream out(bytes);
  llvm::legacy::PassManager passes;
  bool failed = machine->addPassesToEmitFile(passes, out, nullptr, llvm::CodeGenFileType::AssemblyFile);
  DEPLO_ASSERT(!failed, "[codegen/llvm] the target cannot write assembly");
  passes.run(module);
  return {bytes.data(), bytes.size()};
}

TargetInfo cpu_target_info(const std::string& features) {
  check_known(features);
  TargetInfo info;
  llvm::StringMap<bool> host = llvm::sys::getHostCPUFeatures();
  auto has = [&](const char* f) { return host.lookup(f); };
  // In order of width: each set is used only if the CPU has all of it.
  const std::vector<std::string> sse{"sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16"};
  const std::vector<std::string> avx2{"avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe"};
  const std::vector<std::string> avx512{"avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512cd"};
  const std::vector<std::string> extras{"avx512bf16", "avx512vnni", "avx512vbmi"};
  auto all = [&](const std::vector<std::string>& set) {
    return std::all_of(set.begin(), set.end(), [&](const std::string& f) { return has(f.c_str()); });
  };
  int found = all(sse) ? (all(avx2) ? (all(avx512) ? 3 : 2) : 1) : 0;
  int wanted = found;
  if (features == "avx512")
    wanted = 3;
  else if (features == "avx2")
    wanted = 2;
  else if (features == "sse")
    wanted = 1;
  DEPLO_CHECK(wanted <= found, "this CPU ({}) has no {}", std::string(llvm::sys::getHostCPUName()), features);
  if (wanted >= 1) info.features.insert(sse.begin(), sse.end());
  if (wanted >= 2) info.features.insert(avx2.begin(), avx2.end());
  // On its own: beside AVX-512 there are wider ones.
  if (wanted == 2 && features != "avx2" && has("avxvnni")) info.features.insert("avxvnni");
  if (wanted >= 3) {
    info.features.insert(avx512.begin(), avx512.end());
    for (const std::string& f : extras)
      if (has(f.c_str())) info.features.insert(f);
    if (features != "avx512" && has("amx-tile") && may_use_matrices())
      for (const auto& [unit, beside] : {std::pair{"amx-bf16", "avx512bf16"}, std::pair{"amx-int8", "avx512vnni"}})
        if (has(unit) && has(beside)) info.features.insert({"amx-tile", unit});
  }
  info.vector_bytes = wanted >= 3 ? 64 : wanted == 2 ? 32 : 16;
  info.vector_registers = wanted >= 3 ? 32 : 16;
  // Zen 4 does one multiply-add of 64 bytes a cycle, others two, beside which two loads a cycle fall behind. Fits blocks of 14 x 2, 9 x 3 and
  // 8 x 3 vectors on a Sapphire Rapids.
  if (wanted >= 3 && llvm::sys::getHostCPUName() != "znver4") info.load_cost = 0.5;
  return info;
}

std::string codegen_version() { return "llvm " LLVM_VERSION_STRING " deplo-codegen 9"; }

}  // namespace deplo
