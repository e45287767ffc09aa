#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>

namespace deplo {

class TunedSchedules;

/// Example sizes of symbols: they reach schedules and costs only, never legality.
using SizeHints = std::map<std::string, int64_t>;

/// What a machine of a target offers, as schedules and lowerings see it.
struct TargetInfo {
  std::string name;                ///< of the target; empty: the default one
  std::set<std::string> features;  ///< "avx2", "fma", "avx512f", ... or "sm_90"
  int vector_bytes = 32;           ///< 16 (SSE), 32 (AVX2), 64 (AVX-512)
  int vector_registers = 16;
  double load_cost = 0;  ///< of a vector load among multiply-adds, in multiply-adds: 0 where loads keep up with them
  int threads = 1;       ///< hint for costs; never baked into code
  int64_t l1_bytes = 32 << 10;
  int64_t l2_bytes = 512 << 10;
  int64_t l3_bytes = 32 << 20;
};

/// Which layers' weights are packed once, into copies that live as long as the program.
enum class Weights {
  automatic,  ///< those that are clearly faster so
  packed,     ///< all that are not slower so
  original,   ///< none of more than a few kilobytes: they are read where the caller has them
};

/// Everything that a pass may know besides its module. No globals, no environment reads in passes.
struct PassContext {
  TargetInfo target;
  SizeHints hints;
  bool training = false;  ///< parameters change between calls: what is packed of them is packed for each
  Weights weights = Weights::automatic;
  bool deterministic = false;                    ///< sums of floating-point numbers have one order in all calls, as PyTorch asks for
  std::set<std::string> disabled;                ///< names of passes to skip
  std::map<std::string, std::string> schedules;  ///< kernel name or canonical nest -> schedule text given by the user
  std::shared_ptr<const TunedSchedules> tuned;   ///< what is known from measurements; null: nothing
};

}  // namespace deplo
