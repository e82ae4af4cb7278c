#pragma once
// The packed GEMM (packed.h), and its kernel of operands that are both bf16 on this instruction set.

#include "core/ops/gemm/few_rows.h"
#include "core/ops/gemm/packed.h"
#include "core/ops/linear.h"
#if defined(NRL_ISA_avx512_amx)
#include "core/ops/gemm/few_rows_amx.h"
#include "core/ops/gemm/packed_amx.h"
#include "core/ops/gemm/tiles_amx.h"
#elif defined(NRL_ISA_amx_emulated)
#include "core/ops/gemm/few_rows_amx.h"
#include "core/ops/gemm/packed_amx.h"
#include "core/ops/gemm/tiles_emulated.h"
#elif defined(NRL_ISA_avx512_bf16)
#include "core/ops/gemm/pairs_avx512.h"
#endif

namespace nrl::ops::NRL_ISA::packed {

#if defined(NRL_ISA_avx512_amx)
inline constexpr auto bf16_products = Bf16Products::amx;
using Bf16Kernel = TileKernel<Tiles>;
#elif defined(NRL_ISA_amx_emulated)
inline constexpr auto bf16_products = Bf16Products::amx;
using Bf16Kernel = TileKernel<EmulatedTiles>;
#elif defined(NRL_ISA_avx512_bf16)
inline constexpr auto bf16_products = Bf16Products::native;
using Bf16Kernel = VectorKernel<bf16>;
#else
inline constexpr auto bf16_products = Bf16Products::upcast;
using Bf16Kernel = VectorKernel<float>;
#endif

}  // namespace nrl::ops::NRL_ISA::packed
