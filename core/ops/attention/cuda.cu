// Attention on a GPU: cuDNN where it runs the problem, else our own kernels, on tensor cores where
// the layout allows.

#include "core/ops/attention/cudnn/ragged.cuh"
#include "core/ops/attention/flash/mma_backward.cuh"
#include "core/ops/attention/flash/mma_forward.cuh"
#include "core/ops/attention_engine.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/check.h"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

/// The library, or null. A problem that it does not take is noted.
template <class Attention>
attention::Engine* engine_for(const Exec& exec, const Attention& a) {
  if (!exec.libraries || !exec.libraries->attention) {
    NRL_CHECK(!is_fp8(a.q), "attention in FP8 without cuDNN");
    return nullptr;
  }
  const attention::Problem problem = attention::problem_of(a);
  const attention::Choice choice = attention::choose(*exec.libraries, problem, exec.workspace.size);
  if (choice.engine) return choice.engine;
  NRL_CHECK(!is_fp8(a.q), "attention in FP8: {}", choice.reason);
  note_choice(exec, describe(choice, problem));
  return nullptr;
}

void forward(Exec& exec, const AttentionForward& a) {
  if (attention::Engine* engine = engine_for(exec, a)) return engine->forward(exec, a);
  if (a.scale > 0 && on_tensor_cores(a.q, a.k, a.v, a.out)) return mma_forward(exec, a);
  for_float_type(a.q.dtype, [&]<class T>() { flash_forward_of<T>(exec, a); });
}

void backward(Exec& exec, const AttentionBackward& a) {
  if (attention::Engine* engine = engine_for(exec, a)) return engine->backward(exec, a);
  if (a.scale > 0 && on_tensor_cores(a.q, a.k, a.v, a.out, a.dout, a.dq, a.dk, a.dv) &&
      mma_backward_fits(exec, a))
    return mma_backward(exec, a);
  for_float_type(a.q.dtype, [&]<class T>() { flash_backward_of<T>(exec, a); });
}

}  // namespace

void fill_attention(KernelTable& table) {
  table.attention_forward = forward;
  table.attention_backward = backward;
}

}  // namespace nrl::ops::NRL_GPU
