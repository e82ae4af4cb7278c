#pragma once
// Attention on bf16: with products of bf16 where this instruction set has them, else in f32.

#include "core/ops/attention/cpu/backward.h"
#include "core/ops/attention/cpu/forward.h"
#if defined(NRL_ISA_avx512_bf16) || defined(NRL_ISA_amx_emulated)
#include "core/ops/attention/cpu/bf16_backward.h"
#include "core/ops/attention/cpu/bf16_forward.h"
#endif

namespace nrl::ops::NRL_ISA {

#if defined(NRL_ISA_avx512_bf16) || defined(NRL_ISA_amx_emulated)
using ForwardOfBf16 = Bf16Forward;
using BackwardOfBf16 = Bf16Backward;
#else
using ForwardOfBf16 = Forward<bf16, bf16>;
using BackwardOfBf16 = Backward<bf16, bf16, bf16>;
#endif

}  // namespace nrl::ops::NRL_ISA
