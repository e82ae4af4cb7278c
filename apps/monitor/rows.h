#pragma once
// The rows of the sinks, with the names that NeMo RL gives to the same numbers where it has them.

#include "apps/monitor/facts.h"
#include "apps/monitor/sink.h"

namespace nrl::monitor {

/// "train/": loss, grad_norm, lr, tokens, skipped (0 or 1), loss_scale, router_aux_loss, router_z_loss,
/// expert_load, and the metrics of the objective. "perf/": tokens_per_s, mfu, step_ms, data_ms, exposed_ms
/// (communication), gemm_ms, attention_ms. "timing/train/", as in NeMo RL: total_step_time and
/// policy_training (without waiting for data) in seconds, valid_tokens_per_sec_per_gpu (tokens with a loss).
/// "memory/", in 1e9 bytes: allocated_gb (planned), max_allocated_gb (measured on a CPU, else planned) and
/// <category>_gb. A number that is not known has no entry.
Row sink_row(const StepFacts& facts);
/// "validation/val_loss", "validation/<metric>", and "timing/validation/total_validation_time" in seconds.
Row sink_row(const EvalFacts& facts);

}  // namespace nrl::monitor
