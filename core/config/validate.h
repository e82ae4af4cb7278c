#pragma once
// Checks between keys. Internal to core/config.

#include <span>

#include "core/base/cluster_node.h"
#include "core/config/checker.h"
#include "core/config/load.h"

namespace nrl::config_detail {

/// Keys without effect (without_effect()): those whose value asks for something, although what they need
/// (Key::needs) is missing. Where that is a warning, they get their defaults in `result`.
Diagnostics check_needs(ConfigResult& result);

/// Problems between sound keys that do not depend on the number of ranks.
Diagnostics validate(const ConfigResult& result);

// Parts of the validators, each in a file of its own.

/// Tensor and sequence parallelism and what overlaps their communication.
void check_tensor_parallel(Checker c);
/// The number formats of weights, gradients and optimizer state, and the loss scale.
void check_precision(Checker c);
/// FP8 operands of GEMMs.
void check_fp8(Checker c);
/// The tokens that tensor-parallel ranks divide, once the batch fits the ranks.
void check_sequence_parallel(Checker c, int world);
/// The pipeline's keys.
void check_pipeline(Checker c);
/// What is recomputed: the keys that say it, and contradictions between them.
void check_recompute(Checker c);
void check_offload(Checker c);
/// Page-locked buffers, on a GPU or a CPU; `why`: the reason for that device, as a note.
void check_pin_memory(Checker& c, bool gpu, const std::string& why);
/// Context parallelism: the length of samples, and the exchanges that are given.
void check_context_parallel(Checker c);
/// The section `cluster` against `world` ranks on `nodes`, in the launcher's order; empty: unknown.
void check_cluster(Checker c, int64_t world, std::span<const ClusterNode> nodes, RankCount count);
/// How to get `ranks` ranks: "start it with mpirun -n 24", "plan with --world 24".
std::string with_ranks(int64_t ranks, RankCount count);

}  // namespace nrl::config_detail
