#pragma once
// Linear layers on the GEMM engine of a GPU; the same host code for CUDA and the simulated device.

#include "core/ops/gemm/plan.h"
#include "core/ops/linear.h"

namespace nrl::ops::gpu {

/// True if the library of `exec` fuses this activation into the GEMM; cached per plan.
bool fuses_activation(const Exec& exec, const LinearForward& a);
bool fuses_activation(const Exec& exec, const LinearBackwardData& a);

/// For a dry run: the library chooses its algorithm for the GEMM now, and not in the first step.
void prepare(const Exec& exec, const LinearForward& a);
void prepare(const Exec& exec, const LinearBackwardData& a);
void prepare(const Exec& exec, const LinearBackwardWeight& a);

/// As the kernels of the table; an activation must be one that fuses_activation(). Ignores dbias.
void linear_forward(Exec& exec, const LinearForward& a);
void linear_backward_data(Exec& exec, const LinearBackwardData& a);
void linear_backward_weight(Exec& exec, const LinearBackwardWeight& a);

/// The GEMMs of a layer without epilogues; `compute` for f32 operands.
gemm::GemmPlan forward_plan(const LinearForward& a, gemm::Compute compute);
gemm::GemmPlan backward_data_plan(const LinearBackwardData& a, gemm::Compute compute);
gemm::GemmPlan backward_weight_plan(const LinearBackwardWeight& a, gemm::Compute compute);

}  // namespace nrl::ops::gpu
