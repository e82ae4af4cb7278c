#include "core/ops/ops_list.h"
#include "core/ops/qk_norm_rope/backward.cuh"
#include "core/ops/qk_norm_rope/forward.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

void qk_forward_launch(Exec& exec, const QkNormRopeForward& a) {
  for_float_type(a.out.dtype, [&]<class T>() { forward<T>(exec, a); });
}

void qk_backward_launch(Exec& exec, const QkNormRopeBackward& a) {
  for_float_type(a.dx.dtype, [&]<class T>() { backward<T>(exec, a); });
}

}  // namespace

void fill_qk_norm_rope(KernelTable& table) {
  table.qk_norm_rope_forward = qk_forward_launch;
  table.qk_norm_rope_backward = qk_backward_launch;
}

}  // namespace nrl::ops::NRL_GPU
