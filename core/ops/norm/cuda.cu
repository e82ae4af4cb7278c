#include "core/ops/norm/backward.cuh"
#include "core/ops/norm/forward.cuh"
#include "core/ops/ops_list.h"

namespace nrl::ops::NRL_GPU {
namespace {

void norm_forward_launch(Exec& exec, const NormForward& a) {
  for_float_type(a.x.dtype, [&]<class T>() {
    a.kind == NormKind::rms ? forward<T, NormKind::rms>(exec, a) : forward<T, NormKind::layer>(exec, a);
  });
}

void norm_backward_launch(Exec& exec, const NormBackward& a) {
  for_float_type(a.x.dtype, [&]<class T>() {
    a.kind == NormKind::rms ? backward<T, NormKind::rms>(exec, a) : backward<T, NormKind::layer>(exec, a);
  });
}

}  // namespace

void fill_norm(KernelTable& table) {
  table.norm_forward = norm_forward_launch;
  table.norm_backward = norm_backward_launch;
}

}  // namespace nrl::ops::NRL_GPU
