#include "target/cpu/features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <map>

namespace deplo {
namespace {

/// What CPUID says in one register, and what the operating system must save (bits of XCR0) for the feature to be usable.
struct Bit {
  unsigned leaf;
  unsigned subleaf;
  int reg;  ///< eax, ebx, ecx, edx
  int bit;
  uint64_t saved;
};

constexpr uint64_t kAvx = 0x6;
constexpr uint64_t kAvx512 = 0xe6;
constexpr uint64_t kMatrices = 0x60000;

/// Intel's Software Developer's Manual, volume 2A, CPUID; lzcnt as AMD has it.
const std::map<std::string, Bit>& bits() {
  static const std::map<std::string, Bit> known{
      {"sse3", {1, 0, 2, 0, 0}},
      {"ssse3", {1, 0, 2, 9, 0}},
      {"sse4.1", {1, 0, 2, 19, 0}},
      {"sse4.2", {1, 0, 2, 20, 0}},
      {"popcnt", {1, 0, 2, 23, 0}},
      {"cx16", {1, 0, 2, 13, 0}},
      {"movbe", {1, 0, 2, 22, 0}},
      {"avx", {1, 0, 2, 28, kAvx}},
      {"fma", {1, 0, 2, 12, kAvx}},
      {"f16c", {1, 0, 2, 29, kAvx}},
      {"avx2", {7, 0, 1, 5, kAvx}},
      {"avxvnni", {7, 1, 0, 4, kAvx}},
      {"bmi", {7, 0, 1, 3, 0}},
      {"bmi2", {7, 0, 1, 8, 0}},
      {"lzcnt", {0x80000001, 0, 2, 5, 0}},
      {"avx512f", {7, 0, 1, 16, kAvx512}},
      {"avx512dq", {7, 0, 1, 17, kAvx512}},
      {"avx512cd", {7, 0, 1, 28, kAvx512}},
      {"avx512bw", {7, 0, 1, 30, kAvx512}},
      {"avx512vl", {7, 0, 1, 31, kAvx512}},
      {"avx512vbmi", {7, 0, 2, 1, kAvx512}},
      {"avx512vnni", {7, 0, 2, 11, kAvx512}},
      {"avx512bf16", {7, 1, 0, 5, kAvx512}},
      {"amx-bf16", {7, 0, 3, 22, kMatrices}},
      {"amx-tile", {7, 0, 3, 24, kMatrices}},
      {"amx-int8", {7, 0, 3, 25, kMatrices}},
  };
  return known;
}

/// XCR0: whose registers the operating system saves.
uint64_t saved_state() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  constexpr unsigned kXgetbvAllowed = 1U << 27;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & kXgetbvAllowed)) return 0;
  uint32_t low = 0;
  uint32_t high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

bool has_feature(const std::string& feature) {
  auto found = bits().find(feature);
  if (found == bits().end()) return false;
  const Bit& bit = found->second;
  unsigned values[4] = {0, 0, 0, 0};
  if (!__get_cpuid_count(bit.leaf, bit.subleaf, &values[0], &values[1], &values[2], &values[3])) return false;
  if (!(values[bit.reg] >> bit.bit & 1U)) return false;
  return (saved_state() & bit.saved) == bit.saved && (bit.saved != kMatrices || may_use_matrices());
}

}  // namespace

std::vector<std::string> lacking_features(const std::set<std::string>& features) {
  std::vector<std::string> lacking;
  for (const std::string& feature : features)
    if (!has_feature(feature)) lacking.push_back(feature);
  return lacking;
}

bool may_use_matrices() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

}  // namespace deplo
