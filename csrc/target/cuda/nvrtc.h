#pragma once

#include <string>

namespace deplo {

/// What NVRTC made, with whatever it had to say.
struct NvrtcOutput {
  std::string image;  ///< a cubin, or PTX
  std::string log;
};

/// Compiles CUDA C++ text for `arch`: machine code of "sm_90", PTX for "compute_90". NVRTC is opened at run time: `library` if given, else
/// libnvrtc.so.13 by the loader's own search. Throws UnsupportedError naming the remedy when there is none, InternalError
/// with NVRTC's log when the text does not compile. No GPU is needed. A kernel that would spill, though it could have more registers, gets more.
NvrtcOutput nvrtc_compile(const std::string& text, const std::string& arch, const std::string& library = "");

/// Its version, as "13.0". Throws UnsupportedError where there is none.
std::string nvrtc_version(const std::string& library = "");

/// The arch to compile for, for a device of this capability (90): its own, or for a device that is newer than this NVRTC, PTX of the newest one that
/// NVRTC knows, which the driver compiles further. Throws UnsupportedError for a device that is older than what NVRTC compiles for.
std::string nvrtc_arch(int capability, const std::string& library = "");

}  // namespace deplo
