#include "core/ops/attention/cpu/backward.h"
#include "core/ops/attention/cpu/forward.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/check.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

void forward_kernel(Exec& exec, const AttentionForward& a) {
  if (is_fp8(a.q))
    return for_f32_or_bf16(a.out.dtype,
                           [&]<class Out>() { Forward<fp8::Number<DType::e4m3>, Out>(exec, a).run(); });
  for_float_type(a.q.dtype, [&]<class T>() { Forward<T, T>(exec, a).run(); });
}

void backward_kernel(Exec& exec, const AttentionBackward& a) {
  if (is_fp8(a.q))
    return for_f32_or_bf16(a.out.dtype, [&]<class Out>() {
      Backward<fp8::Number<DType::e4m3>, fp8::Number<DType::e5m2>, Out>(exec, a).run();
    });
  for_float_type(a.q.dtype, [&]<class T>() { Backward<T, T, T>(exec, a).run(); });
}

}  // namespace

void fill_attention(KernelTable& table) {
  table.attention_forward = forward_kernel;
  table.attention_backward = backward_kernel;
}

}  // namespace nrl::ops::NRL_ISA
