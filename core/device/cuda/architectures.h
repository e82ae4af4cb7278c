#pragma once
// Which GPUs the kernels of a build run on.

#include <string>
#include <string_view>

namespace nrl::cuda {

/// True when code built for `architectures` (CMAKE_CUDA_ARCHITECTURES with ',' or ';' between: "80,90a,100f")
/// runs on a device of compute capability major.minor. Rules of the CUDA C++ programming guide, "Application
/// compatibility": machine code ("-real") needs the same major number and at least the minor one; PTX
/// ("-virtual") at least the version; a plain number has both. "a" code runs on its version only, "f" code on
/// its family: the same major number and at least the minor one.
bool runs_on(std::string_view architectures, int major, int minor);

/// "80;90a" -> "8.0, 9.0a".
std::string architectures_text(std::string_view architectures);

}  // namespace nrl::cuda
