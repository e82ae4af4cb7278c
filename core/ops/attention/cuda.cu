#include "core/ops/attention/cudnn/ragged.cuh"
#include "core/ops/attention/flash/mma.cuh"
#include "core/ops/attention_engine.h"
#include "core/ops/libraries.h"
#include "core/ops/ops_list.h"

namespace nrl::ops::NRL_GPU {
namespace {

/// The library, when it takes this problem.
template <class Attention>
attention::Engine* engine_for(const Exec& exec, const Attention& a) {
  if (!exec.libraries) return nullptr;
  return attention::choose(exec.libraries->attention.get(), attention::problem_of(a), exec.workspace.size);
}

void forward(Exec& exec, const AttentionForward& a) {
  if (attention::Engine* engine = engine_for(exec, a)) return engine->forward(exec, a);
  if (on_tensor_cores(a.q, a.k, a.v, a.out)) return mma_forward(exec, a);
  a.q.dtype == DType::f32 ? flash_forward_of<float>(exec, a) : flash_forward_of<bf16>(exec, a);
}

void backward(Exec& exec, const AttentionBackward& a) {
  if (attention::Engine* engine = engine_for(exec, a)) return engine->backward(exec, a);
  if (on_tensor_cores(a.q, a.k, a.v, a.out, a.dout, a.dq, a.dk, a.dv)) return mma_backward(exec, a);
  a.q.dtype == DType::f32 ? flash_backward_of<float>(exec, a) : flash_backward_of<bf16>(exec, a);
}

}  // namespace

void fill_attention(KernelTable& table) {
  table.attention_forward = forward;
  table.attention_backward = backward;
}

}  // namespace nrl::ops::NRL_GPU
