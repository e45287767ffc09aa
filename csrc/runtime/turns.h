#pragma once

#include <cstdint>

namespace deplo::runtime {

/// One program under way on this thread, from before its first step to behind its last.
///
/// Of all threads that call, as many run programs at once as there are processors, and no more than are useful: with more, the system takes
/// processors from threads in the middle of a program. They take turns of about five milliseconds, the longest waiting first, which hold between
/// their calls, too: handing over at each call would cost more than a short one takes. A thread that stays away loses its turn; one that waited long
/// goes on without, since what a program waits for may be another one that is not let in. A program that a library call of another one calls has that
/// one's turn.
class Turn {
 public:
  Turn() = default;
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  /// Begins without waiting; false: wait() does.
  bool begin();
  /// Parks until it is this thread's turn. Whoever holds a lock that others need to end their turns (Python's) lets it go before.
  void wait();

 private:
  void* turns_ = nullptr;  ///< which it belongs to; a forked child has others
  bool begun_ = false;
};

/// Threads that run programs, or wait for their turn to, or did of late, the caller's among them: at least 1.
int callers();
/// Whether another thread has called a program within as long as Python takes to hand its lock on by itself.
bool has_company();

/// How many threads' turns it is at once at most; as many as there are processors if that is fewer.
void set_useful_callers(int callers);
int useful_callers();

/// The calling thread's number, from 1.
uint32_t thread_number();

}  // namespace deplo::runtime
