#pragma once

#include <string>

namespace deplo {

/// Machine code that NVRTC made, with whatever it had to say.
struct NvrtcOutput {
  std::string cubin;
  std::string log;
};

/// Compiles CUDA C++ text for `arch` ("sm_80", "sm_90", ...). NVRTC is opened at run time: `library` if given, else
/// libnvrtc.so.13 by the loader's own search. Throws UnsupportedError naming the remedy when there is none, InternalError
/// with NVRTC's log when the text does not compile. No GPU is needed.
NvrtcOutput nvrtc_compile(const std::string& text, const std::string& arch, const std::string& library = "");

}  // namespace deplo
