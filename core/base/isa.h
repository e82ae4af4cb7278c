#pragma once
// Instruction sets of processors.

#include "core/base/enum_names.h"

namespace nrl {

/// Instruction sets that the CPU kernels are compiled for, weakest first.
NRL_ENUM(Isa, (baseline, avx2, avx512, avx512_bf16, avx512_amx),
         ("baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx"), ())

}  // namespace nrl
