#pragma once
// Kernels of other trainers, for estimates of what a step takes with them: the bytes that they move and the
// kernels that they launch, counted in the trainers' source. trainer_kernels.cpp has the counts.

#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "apps/machine/device_models.h"
#include "core/config/enums.h"
#include "core/ops/norm.h"

namespace nrl::machine {

/// The kernels of a trainer for one of our ops.
struct OpKernels {
  std::string_view op;
  double bytes = 1;         ///< that they move, over the bytes of ours
  int launches = 1;         ///< kernels for each of ours
  int per_group = 0;        ///< and for each of ops::Cost::groups
  bool host_waits = false;  ///< the host waits for the result, and starts nothing meanwhile
};

/// Bytes that attention moves for each score, where they are in memory. The products are GEMMs of all scores,
/// also of those above the diagonal.
struct ScoreBytes {
  double products = 0, others = 0;  ///< in the products; in other kernels
};
struct Scores {
  ScoreBytes forward = {}, backward = {};
  bool stored() const { return forward.products > 0; }
};

/// Fused attention on devices of a compute capability.
struct FusedAttention {
  int major = 0;
  AttentionRates forward, backward;
};

struct TrainerKernels {
  std::string_view name;              ///< of plan --trainer
  ops::NormKind norm;                 ///< of the models whose ops were counted
  bool dropout = false;               ///< counted with dropout of the scores and of the residual stream
  std::optional<Fp8Recipe> fp8 = {};  ///< counted with this one
  std::span<const OpKernels> ops;
  /// Lists before `ops`: the first one that has an op counts.
  std::array<std::span<const OpKernels>, 2> first = {};
  /// GEMMs of tensor-parallel communication's pieces run on several streams, and operations of layers take no
  /// multiprocessors from GEMMs (userbuffers, symmetric memory); experts have the library's GEMMs.
  bool streams = false, expert_gemms = false;
  /// Inputs of sequence-parallel layers that are gathered again arrive beside the GEMM before the one that
  /// reads them (Megatron, tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication).
  bool gathers_again_beside = false;
  /// FP8 copies of weights, transposed ones included, are made in the first microbatch of a step only
  /// (TransformerEngine, pytorch/module/base.py, is_first_microbatch; Float8Tensor keeps its transpose).
  bool caches_weights = false;
  bool compiled = false;  ///< steps are programs without Python: the host is never late
  /// Bytes that kernels beside the operation move for each byte of gathered weights, of summed gradients, and
  /// of what tensor-parallel ranks gather or sum.
  double gather_copies = 0, reduce_copies = 0, layer_copies = 0;
  Scores scores = {};  ///< empty: attention is fused
  /// Fused attention, where it is not the device's.
  std::span<const FusedAttention> attention = {};

  /// For an op that is not listed: null, the kernels are like ours.
  const OpKernels* find(std::string_view op, const ExpertsOfTrainer& experts = {}) const;
  /// A GPU, as its data sheet and papers have it, with these kernels.
  DeviceModel on(DeviceModel gpu) const;
};

/// "pytorch, ..."
std::string trainer_names();
/// The model whose kernels are asked for.
struct TrainedModel {
  ops::NormKind norm;
  bool dropout = false;               ///< of attention's scores
  std::optional<Fp8Recipe> fp8 = {};  ///< of GEMMs
  bool experts = false;
  bool exchanges = false;  ///< rows go to the ranks of their experts
  bool graphs = false;     ///< policy.cuda_graph
};
/// Fails with Exit::usage and the names that there are, or if the trainer's kernels were not counted for
/// models with this kind of norm. Dropout and FP8 have kernels of their own where they were counted.
const TrainerKernels& find_trainer_kernels(std::string_view name, const TrainedModel& model);

/// A trainer's kernels and what else it does.
struct Trainer {
  const TrainerKernels* kernels = nullptr;
  bool graphs = false;  ///< whole steps are CUDA graphs, or compiled programs: the host is never late
  ExpertsOfTrainer experts = {};

  DeviceModel on(DeviceModel gpu) const;
};
/// `text`: NAME or NAME+PROPERTY+..., of which trainer_properties() says what they are. Fails like
/// find_trainer_kernels(), and for properties that are unknown or have no effect.
Trainer find_trainer(std::string_view text, const TrainedModel& model);
/// For the help of --trainer.
std::string trainer_properties();

}  // namespace nrl::machine
