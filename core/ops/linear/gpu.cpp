#include "core/ops/linear/gpu.h"

#include <algorithm>

#include "core/ops/gemm/engine.h"
#include "core/ops/libraries.h"
#include "core/ops/shared/check.h"

namespace nrl::ops {

size_t gpu_linear_workspace(int64_t widest, int partials) {
  return std::max(gemm::workspace_bytes, column_sums_workspace(widest, partials));
}

namespace gpu {
namespace {

using gemm::Epilogue;
using gemm::GemmOperands;
using gemm::GemmPlan;
using gemm::Operand;

int alignment_of(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  return static_cast<int>(std::min<uintptr_t>(address & (~address + 1), 256));
}
Operand operand(const Tensor& t, bool transposed = false) {
  NRL_CHECK(t.dense_scales(), "a GEMM reads {}, whose scales are not contiguous: slice along {}", describe(t),
            t.scales.kind == Scaling::row128 ? "columns" : "rows");
  NRL_CHECK(t.scales.kind != Scaling::tensor ||
                reinterpret_cast<uintptr_t>(t.scales.data) % (aligned_scale * sizeof(float)) == 0,
            "a GEMM reads {}, whose scale is not at a multiple of {} bytes", describe(t),
            aligned_scale * sizeof(float));
  return {t.dtype, t.dim(0) > 1 ? t.step(0) : t.dim(1), transposed, alignment_of(t.data), t.scales.kind};
}

GemmPlan plan_of(const Tensor& d, int64_t inner, bool accumulate, gemm::Compute compute, DType inputs) {
  GemmPlan p;
  p.rows = d.dim(0);
  p.cols = d.dim(1);
  p.inner = inner;
  p.d = operand(d);
  p.accumulate = accumulate;
  if (inputs == DType::f32) p.compute = compute;
  return p;
}

gemm::Compute compute_of(const Exec& exec) {
  return exec.libraries->tf32 ? gemm::Compute::tf32 : gemm::Compute::f32;
}

GemmOperands operands(const Tensor& a, const Tensor& b, const Tensor& d) {
  return {.a = a.data, .b = b.data, .d = d.data, .scale_a = a.scales.data, .scale_b = b.scales.data};
}

void run(Exec& exec, const GemmPlan& plan, const GemmOperands& operands) {
  exec.libraries->gemm->run(plan, operands, exec.workspace, exec.stream);
}

}  // namespace

// Row-major: y = x W^T, dx = dy W, dW = dy^T x. FP8 operands are the copies whose columns are summed over:
// each GEMM is a (rows, inner) times the transpose of a (columns, inner).
GemmPlan forward_plan(const LinearForward& a, gemm::Compute compute) {
  GemmPlan p = plan_of(a.out, a.x.dim(1), a.accumulate, compute, a.x.dtype);
  p.a = operand(a.x);
  p.b = operand(a.weight, true);
  p.fast_accumulation = is_fp8(a.x) && a.x.scales.kind == Scaling::tensor;
  return p;
}
GemmPlan backward_data_plan(const LinearBackwardData& a, gemm::Compute compute) {
  GemmPlan p = plan_of(a.dx, a.dout.dim(1), a.accumulate, compute, a.dout.dtype);
  p.a = operand(a.dout);
  p.b = operand(a.weight, is_fp8(a.dout));
  return p;
}
GemmPlan backward_weight_plan(const LinearBackwardWeight& a, gemm::Compute compute) {
  const bool fp8 = is_fp8(a.dout);
  GemmPlan p = plan_of(a.dweight, a.dout.dim(fp8 ? 1 : 0), a.accumulate, compute, a.dout.dtype);
  p.a = operand(a.dout, !fp8);
  p.b = operand(a.x, fp8);
  return p;
}

namespace {

GemmPlan whole_plan(const Exec& exec, const LinearForward& a) {
  GemmPlan p = forward_plan(a, compute_of(exec));
  if (a.bias) {
    p.bias = a.bias.dtype;
    // Epilogues read the bias in vectors as wide as the result's, but the library takes no alignment for it.
    p.d.alignment = std::min(p.d.alignment, alignment_of(a.bias.data));
  }
  if (a.activation == Activation::none) {
    p.epilogue = a.bias ? Epilogue::bias : Epilogue::none;
  } else if (a.pre_activation) {
    p.epilogue = a.bias ? Epilogue::gelu_aux_bias : Epilogue::gelu_aux;
    p.aux = operand(a.pre_activation);
  } else {
    p.epilogue = a.bias ? Epilogue::gelu_bias : Epilogue::gelu;
  }
  return p;
}
GemmPlan whole_plan(const Exec& exec, const LinearBackwardData& a) {
  GemmPlan p = backward_data_plan(a, compute_of(exec));
  if (a.activation == Activation::none) return p;
  p.epilogue = Epilogue::dgelu;
  p.aux = operand(a.pre_activation);
  return p;
}

GemmPlan whole_plan(const Exec& exec, const LinearBackwardWeight& a) {
  return backward_weight_plan(a, compute_of(exec));
}

template <class Arguments>
bool fuses(const Exec& exec, const Arguments& a) {
  return a.activation == Activation::gelu_tanh && exec.libraries->gemm->supports(whole_plan(exec, a));
}

template <class Arguments>
void prepare_plan(const Exec& exec, const Arguments& a) {
  const GemmPlan plan = whole_plan(exec, a);
  if (plan.rows == 0 || plan.cols == 0 || plan.inner == 0) return;
  if (exec.libraries->gemm->supports(plan)) return;
  std::string why = plan.validate(gemm::architecture_of(exec.device->properties().major));
  if (!why.empty()) why.insert(0, ": ");
  if (!plan.fp8())
    fail(Exit::unavailable,
         "this GPU's cuBLASLt has no GEMM {}{}. Fix: use another policy.precision or another cuBLASLt",
         plan.key(), why);
  fail(Exit::unavailable,
       "policy.fp8_cfg.fp8_recipe: this GPU or its cuBLASLt has no FP8 GEMM {}{}. tensorwise and delayed "
       "need compute capability 9.0, blockwise 9.0 (Hopper) and cuBLASLt 12.9, mxfp8 10.0 (Blackwell). Fix: "
       "use another recipe, or policy.fp8_cfg.enabled: false",
       plan.key(), why);
}

}  // namespace

bool fuses_activation(const Exec& exec, const LinearForward& a) {
  return fuses(exec, a);
}
bool fuses_activation(const Exec& exec, const LinearBackwardData& a) {
  return fuses(exec, a);
}

void prepare(const Exec& exec, const LinearForward& a) {
  prepare_plan(exec, a);
}
void prepare(const Exec& exec, const LinearBackwardData& a) {
  prepare_plan(exec, a);
}
void prepare(const Exec& exec, const LinearBackwardWeight& a) {
  prepare_plan(exec, a);
}

void linear_forward(Exec& exec, const LinearForward& a) {
  GemmOperands o = operands(a.x, a.weight, a.out);
  o.bias = a.bias.data;
  o.aux = a.pre_activation.data;
  o.alpha = a.scale;
  run(exec, whole_plan(exec, a), o);
}

void linear_backward_data(Exec& exec, const LinearBackwardData& a) {
  GemmOperands o = operands(a.dout, a.weight, a.dx);
  o.aux = a.pre_activation.data;
  o.alpha = a.scale;
  run(exec, whole_plan(exec, a), o);
}

void linear_backward_weight(Exec& exec, const LinearBackwardWeight& a) {
  run(exec, whole_plan(exec, a), operands(a.dout, a.x, a.dweight));
}

}  // namespace gpu
}  // namespace nrl::ops
