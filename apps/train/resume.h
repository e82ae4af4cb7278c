#pragma once
// Resuming: which checkpoint a run continues, what the run that saved it was made of, and what has changed
// since.

#include <map>
#include <span>
#include <string>
#include <vector>

#include "apps/model/spec.h"
#include "apps/train/input_identity.h"
#include "core/base/dtype.h"
#include "core/config/config.h"
#include "core/io/checkpoint_reader.h"
#include "core/io/json.h"
#include "core/io/run_lock.h"

namespace nrl::train {

struct CheckpointChoice {
  std::string path;  ///< empty: start from the beginning
  std::vector<std::string> warnings;
};

/// The checkpoint that `checkpointing.resume` asks for, every checksum of it verified. Call on one rank.
/// Fails (65) when the one named, or every one in checkpoint_dir, is damaged or of another format, with the
/// reasons; (66) when the one named does not exist.
CheckpointChoice choose_checkpoint(const CheckpointingConfig& config);

/// Moves those checkpoints aside that the run does not continue and that would otherwise be replaced, removed
/// by retention, or taken for its own: in checkpoint_dir, all newer than `resumed_from` (empty: all). Returns
/// a warning that says where they are; empty when there are none.
std::string set_other_checkpoints_aside(const CheckpointingConfig& config, const std::string& resumed_from,
                                        const RunLock& lock);

/// Verifies every checksum of `directory` if it is a checkpoint of ours (it has a manifest.json). Fails (65)
/// with what is damaged. Plain Hugging Face directories have no checksums and pass.
void verify_model_directory(const std::string& directory);

/// What decides which numbers a run computes, as configuration key -> canonical text: settings of optimizer
/// and schedule, data order, identity of the token files, values of the model.
using RunRecord = std::map<std::string, std::string>;

/// `weights`: what the layers read.
RunRecord make_record(const Config& config, const model::ModelSpec& spec, DType weights, int ranks,
                      const Inputs& inputs);
JsonValue record_to_json(const RunRecord& record);

struct SavedRecord {
  RunRecord record;
  std::string incomplete;  ///< a warning when not everything was recorded
};
/// The record in a checkpoint. Checkpoints without one give what else is known: the model and `global_batch`.
SavedRecord read_record(const CheckpointReader& reader, int64_t global_batch);

/// One line for each difference: those that any run may make, and those in `allowed`. Fails (78) with all
/// others and the key that allows them; `checkpoint` names it in the message.
std::vector<std::string> compare_records(const RunRecord& saved, const RunRecord& now,
                                         std::span<const ResumeChange> allowed,
                                         const std::string& checkpoint);

}  // namespace nrl::train
