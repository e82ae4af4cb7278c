#pragma once
// What a training checkpoint holds and how it gets in and out: `step-N/` is a Hugging Face model directory
// (model.safetensors, config.json, tokenizer files) with the optimizer's state and the run's position beside
// it.
//
// Logical tensors: weights under their Hugging Face names and in their shape on disk; the optimizer's as
// "<name of the state>/<name>" ("exp_avg/model.norm.weight") in our [out, in] order. A rank stores the ranges
// that are counted on it and reads the slices and ranges it needs, so that any number of ranks can read what
// any other number wrote.

#include <cstdint>
#include <string>
#include <vector>

#include "apps/engine/group_tensors.h"
#include "apps/model/parameters.h"
#include "apps/train/hf_files.h"
#include "core/io/checkpoint_reader.h"
#include "core/io/checkpoint_store.h"

namespace nrl::train {

/// Where a run is. Independent of the number of ranks.
struct Position {
  int64_t step = 0;     ///< optimizer steps made, skipped ones included
  int64_t updates = 0;  ///< updates applied: the optimizer's step count
  int64_t consumed_samples = 0;
  int64_t tokens = 0;
  int64_t skipped = 0;  ///< steps skipped because their gradients were not finite
  int64_t skipped_in_a_row = 0;
  int64_t dataset_samples = 0;  ///< samples the data order was made for
  int64_t global_batch = 0;
  double best_val_loss = 0;  ///< 0: none yet
  int64_t best_val_step = 0;
};

/// A rank's view of everything a checkpoint holds.
struct TrainState {
  const model::ModelSpec* spec = nullptr;
  const model::ParameterList* parameters = nullptr;
  std::vector<Tensor> weights;               ///< per parameter, what the layers read
  std::vector<engine::GroupTensors> groups;  ///< their optimizer state; nothing else of them is read
};

struct SaveOptions {
  std::string store;  ///< checkpointing.checkpoint_dir
  bool optimizer = true;
  std::string resolved_config;  ///< YAML text
  JsonValue run;                ///< record_to_json() of apps/train/resume.h
  HfFiles hf;                   ///< written beside the weights
};

/// Collective over `group`. Returns the committed directory. Fails with the same Error on all ranks.
std::string save_checkpoint(const TrainState& state, const Position& position, const SaveOptions& options,
                            const RankGroup& group);

/// The position in the manifest. Fails (65) on counters that are out of range or contradict each other.
Position read_position(const CheckpointReader& reader);

/// Reads weights and this rank's optimizer state. Every rank reads for itself. Fails (65) when the checkpoint
/// is of another model, has no optimizer state, or holds NaN or infinity (naming tensor and count).
void load_checkpoint(CheckpointReader& reader, const TrainState& state);

/// The dtype to hold a directory's weights in without loss: bf16 where all of them are stored so, else f32.
DType stored_dtype(const std::string& directory);

/// Reads weights only, from a checkpoint or any Hugging Face directory (f32, bf16 or f16 tensors). Names the
/// missing and the unexpected tensors, and those that hold NaN or infinity.
void load_weights(const std::string& directory, const model::ModelSpec& spec,
                  const model::ParameterList& parameters, const std::vector<Tensor>& weights);

}  // namespace nrl::train
