#pragma once

#include <chrono>
#include <cstdint>

namespace deplo::runtime {

/// Runs part `part` of a job; `worker` in [0, threads) tells concurrent calls apart (scratch memory).
using PartFn = void (*)(void* context, int64_t part, int worker);

/// Runs fn(data) on up to `threads` threads at once, the caller's among them, and returns when all have left it: OpenMP's GOMP_parallel.
using HostPool = void (*)(void (*fn)(void*), void* data, unsigned threads, unsigned flags);

/// From now on jobs run on the host program's own workers (null: on deplo's). OpenMP's spin for milliseconds after a job: a second pool
/// would share the cores with them whenever kernels follow eager operators. Such a job ends when the last worker has come: where one comes later than
/// `patience` after all parts were done, the processors are busy with others' work, and leases of the pause that follows are of deplo's own
/// workers. The `first` pause is short; each that follows another soon is twice as long, up to the `longest`.
void use_host_pool(HostPool pool, std::chrono::nanoseconds patience = std::chrono::microseconds(500),
                   std::chrono::nanoseconds first = std::chrono::milliseconds(5), std::chrono::nanoseconds longest = std::chrono::milliseconds(200));

/// The process's worker threads, borrowed for the length of one object. Where several threads run programs (turns.h), each has its part of them,
/// which is itself alone where there are as many as threads; whoever finds them borrowed works alone instead of waiting.
///
/// Workers spin for some tens of microseconds after a job and then park, so that programs of many small kernels
/// synchronise in well under a microsecond while idle processes burn nothing. Each thread takes the parts of its own
/// contiguous share first and then helps the others: a worker that the system does not run delays nobody. After a fork the
/// child makes workers of its own when it first needs them.
class TeamLease {
 public:
  /// At most `threads` threads take part, the caller's among them; 0 is the caller alone, whoever else is there.
  explicit TeamLease(int threads);
  ~TeamLease();
  TeamLease(const TeamLease&) = delete;
  TeamLease& operator=(const TeamLease&) = delete;

  /// The most threads that run() uses; 1 if the workers are busy elsewhere.
  int threads() const { return threads_; }
  /// Runs every part once and returns when all are done. `fn` must not throw.
  void run(int64_t parts, PartFn fn, void* context);

 private:
  void* team_ = nullptr;
  int threads_ = 1;
  int callers_ = 1;  ///< when it was made
};

/// Most threads that a lease can have.
inline constexpr int kMaxThreads = 256;

}  // namespace deplo::runtime
