#include "core/ops/attention/cpu/bf16.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/check.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

/// Instructions multiply 32 numbers of bf16: heads of few columns would leave most of them empty.
bool has_wide_heads(const Tensor& q) {
  return q.dim(2) >= 16;
}

void forward_kernel(Exec& exec, const AttentionForward& a) {
  if (is_fp8(a.q))
    return for_f32_or_bf16(a.out.dtype,
                           [&]<class Out>() { Forward<fp8::Number<DType::e4m3>, Out>(exec, a).run(); });
  if (a.q.dtype == DType::bf16 && has_wide_heads(a.q)) return ForwardOfBf16(exec, a).run();
  if (a.q.dtype == DType::bf16) return Forward<bf16, bf16>(exec, a).run();
  if (a.q.dtype == DType::f16) return Forward<f16, f16>(exec, a).run();
  Forward<float, float>(exec, a).run();
}

void backward_kernel(Exec& exec, const AttentionBackward& a) {
  if (is_fp8(a.q))
    return for_f32_or_bf16(a.out.dtype, [&]<class Out>() {
      Backward<fp8::Number<DType::e4m3>, fp8::Number<DType::e5m2>, Out>(exec, a).run();
    });
  if (a.q.dtype == DType::bf16 && has_wide_heads(a.q)) return BackwardOfBf16(exec, a).run();
  if (a.q.dtype == DType::bf16) return Backward<bf16, bf16, bf16>(exec, a).run();
  if (a.q.dtype == DType::f16) return Backward<f16, f16, f16>(exec, a).run();
  Backward<float, float, float>(exec, a).run();
}

}  // namespace

void fill_attention(KernelTable& table) {
  table.attention_forward = forward_kernel;
  table.attention_backward = backward_kernel;
}

}  // namespace nrl::ops::NRL_ISA
