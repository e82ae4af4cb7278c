#include "core/ops/attention/cpu/backward.h"
#include "core/ops/attention/cpu/forward.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

void forward_kernel(Exec& exec, const AttentionForward& a) {
  for_float_type(a.q.dtype, [&]<class T>() { Forward<T>(exec, a).run(); });
}

void backward_kernel(Exec& exec, const AttentionBackward& a) {
  for_float_type(a.q.dtype, [&]<class T>() { Backward<T>(exec, a).run(); });
}

}  // namespace

void fill_attention(KernelTable& table) {
  table.attention_forward = forward_kernel;
  table.attention_backward = backward_kernel;
}

}  // namespace nrl::ops::NRL_ISA
