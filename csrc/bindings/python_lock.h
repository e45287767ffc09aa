#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace deplo::bindings {

/// Lets other threads of Python run; nothing if this thread does already.
///
/// Threads that run programs queue up for Python before they ask for its lock, one for all that lies between two programs: whoever asks for a lock
/// that is taken is woken each time that its holder lets go for a moment, as Dynamo does in every check of its guards, which no other thread may
/// enter meanwhile (it compiles again then, without need). The first of them spins for a while, since the holder mostly comes to its next program
/// soon.
PyThreadState* release_python();
void take_python(PyThreadState* state);

/// Measures one of a thread's programs now and then, and the Python before it, to tell the runtime how many threads are useful at once: one in
/// Python, and as many in programs as come out of it meanwhile.
class CallSample {
 public:
  CallSample();
  void program_ended();
  ~CallSample();
  CallSample(const CallSample&) = delete;
  CallSample& operator=(const CallSample&) = delete;

 private:
  int64_t began_ = -1;
};

}  // namespace deplo::bindings
