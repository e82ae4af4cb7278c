#pragma once
// Saves and loads training checkpoints. `step-N/` is a Hugging Face model directory (model.safetensors,
// config.json, tokenizer files) plus optimizer state and the position of the run. A run that trains adapters
// saves these alone, as a directory of PEFT (adapter_files.h): it starts from its base model again.
//
// Logical tensors: weights under their Hugging Face names and shapes; optimizer state as "<state>/<name>"
// ("exp_avg/model.norm.weight") in [out, in] order and fp32, whatever their format in memory, and, with
// gradients in fp8, what rounding them lost: of every rank that sums them ("grad_error.3/NAME"), and of their
// sums ("grad_sum_error/NAME"), and the delayed scales of FP8 operands ("fp8.scale", "fp8.amax"), which the
// first rank stores. Ranks that hold the same share the writing of it (plan::ParamGroup::saved); a rank reads
// the slices and ranges it needs, so that a checkpoint can be loaded on any number of ranks.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "apps/engine/group_tensors.h"
#include "apps/model/spec/parameters.h"
#include "apps/state/hf_files.h"
#include "core/io/checkpoint_reader.h"
#include "core/io/checkpoint_store.h"
#include "core/io/staging.h"

namespace nrl::train {

class Snapshot;

/// The position of a run. Independent of the number of ranks.
struct Position {
  int64_t step = 0;     ///< completed optimizer steps, skipped ones included
  int64_t updates = 0;  ///< applied updates: the optimizer's step count
  int64_t consumed_samples = 0;
  int64_t tokens = 0;
  int64_t skipped = 0;  ///< steps skipped because of non-finite gradients
  int64_t skipped_in_a_row = 0;
  double loss_scale = 0;        ///< of the next step; 0: none
  int64_t clean_steps = 0;      ///< steps without overflow since it changed
  int64_t dataset_samples = 0;  ///< number of samples for which the data order was built
  int64_t global_batch = 0;
  double best_val_loss = 0;  ///< 0: none yet
  int64_t best_val_step = 0;
  double lr_factor = 1;          ///< of the learning rate, by rollbacks
  int64_t recoveries = 0;        ///< rollbacks so far
  int64_t prompts = 0;           ///< position in the order of the prompts that the policy answers
  bool replicas_agreed = false;  ///< all replicas had the same bits when it was saved
};

/// A rank's view of the state in a checkpoint: in host memory, or in memory that `staging` accesses.
struct TrainState {
  const model::ModelSpec* spec = nullptr;
  const model::ParameterList* parameters = nullptr;  ///< of this rank
  const model::ParameterList* whole = nullptr;       ///< of the whole model: the tensors of the checkpoint
  std::vector<engine::WeightSlice> weights;          ///< that this rank keeps
  std::vector<engine::GroupTensors> groups;          ///< only their optimizer state is used
  Tensor scales, amax;                               ///< model::DelayedScales; equal on all ranks
  Staging* staging = nullptr;                        ///< null: host memory
  Snapshot* snapshot = nullptr;                      ///< not null: save_checkpoint() reads this copy instead
};

struct SaveOptions {
  std::string store;  ///< checkpointing.checkpoint_dir
  bool optimizer = true;
  std::string resolved_config;  ///< YAML text
  JsonValue run;                ///< record_to_json() of apps/state/resume.h
  HfFiles hf;                   ///< additional files of the model directory
  std::string base = {};        ///< of adapters: the directory of their base model
  SavePlans* plans = nullptr;   ///< see CheckpointWriter::Options
  /// Called on rank 0 when all is written, before the checkpoint gets its name; an error of it is one of the
  /// save.
  std::function<void()> before_commit = {};
};

/// Collective over `group`. Returns the committed directory. Fails with the same Error on all ranks.
std::string save_checkpoint(const TrainState& state, const Position& position, const SaveOptions& options,
                            const RankGroup& group);

/// The position in the manifest. Fails (65) on counters that are out of range or inconsistent.
Position read_position(const CheckpointReader& reader);

/// Reads the weights and this rank's optimizer state; not collective. Fails (65) if the checkpoint belongs to
/// another model, has no optimizer state, or contains NaN or infinity (naming tensor and count). Returns a
/// warning, the same on all ranks, of state that begins anew; empty: none does.
std::string load_checkpoint(CheckpointReader& reader, const TrainState& state);

/// The smallest dtype that represents a directory's weights exactly: bf16 if all are stored as
/// bf16, else f32.
DType stored_dtype(const std::string& directory);

/// Reads weights only, from a checkpoint or any Hugging Face directory (f32, bf16 or f16 tensors), or from an
/// adapter and its base model. A directory without adapters leaves the weights of adapters as they are. Fails
/// (65), naming them, on missing or unexpected tensors and on tensors with NaN or infinity. `staging`: see
/// TrainState.
void load_weights(const std::string& directory, const model::ModelSpec& spec,
                  const std::vector<engine::WeightSlice>& weights, Staging* staging = nullptr);

/// Reads the weights of adapters among `weights` from a directory of PEFT. Fails as load_weights() does.
void load_adapter(const std::string& directory, const model::ModelSpec& spec,
                  const std::vector<engine::WeightSlice>& weights, Staging* staging = nullptr);

}  // namespace nrl::train
