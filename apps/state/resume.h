#pragma once
// Chooses the checkpoint to resume from, and compares the run that saved it with the current run.

#include <map>
#include <span>
#include <string>
#include <vector>

#include "apps/model/spec/spec.h"
#include "apps/state/input_identity.h"
#include "core/base/dtype.h"
#include "core/config/config.h"
#include "core/io/checkpoint_reader.h"
#include "core/io/checkpoint_store.h"
#include "core/io/json.h"
#include "core/io/run_lock.h"

namespace nrl::train {

struct CheckpointChoice {
  std::string path;  ///< empty: start from initial weights
  std::vector<std::string> warnings;
};

/// The checkpoint selected by `checkpointing.resume`, by its manifest and the sizes of its files; the data is
/// verified while it is loaded. `known`: the damage that loading has found; those checkpoints are not chosen
/// again. Must be called on one rank. Fails (65), with the reasons, if the named checkpoint, or every one in
/// checkpoint_dir, is damaged or of another format; (66) if the named checkpoint does not exist.
CheckpointChoice choose_checkpoint(const CheckpointingConfig& config, const KnownDamage& known = {});

/// After an attempt that ended with silent data corruption: the checkpoints that choose_checkpoint() must not
/// take, because the replicas were not compared when they were saved and others of checkpoint_dir say
/// replicas_agreed. None if no checkpoint says so, with a warning if there are any, or if
/// `checkpointing.resume` names one.
KnownDamage without_agreement(const CheckpointingConfig& config, std::vector<std::string>& warnings);

/// Moves aside all checkpoints in checkpoint_dir that are newer than `resumed_from` (empty: all): the run
/// would replace them, remove them by retention, or later resume from them. Returns a warning with their new
/// location; empty if there are none.
std::string set_other_checkpoints_aside(const CheckpointingConfig& config, const std::string& resumed_from,
                                        const RunLock& lock);

/// Part `part` of `parts` of the work of verifying checksums; none of it if `parts` is 0.
struct VerifyShare {
  int part = 0, parts = 0;
};
inline constexpr VerifyShare verify_all{0, 1}, verify_none{};

/// Verifies this share of the checksums of `directory` if it is one of our checkpoints (it has a
/// manifest.json). Fails (65) naming the damaged files. Plain Hugging Face directories have no checksums and
/// pass.
void verify_model_directory(const std::string& directory, VerifyShare share = verify_all);

/// Problems of a checkpoint directory: those of validate_checkpoint() with all checksums, counters out of
/// range (read_position()), and an unreadable record of the run. Empty: valid.
std::vector<std::string> verify_checkpoint(const std::string& directory);

/// Everything that determines the numbers of a run, as configuration key -> canonical text: settings of
/// optimizer, schedule and data order, identity of the token files, values of the model.
using RunRecord = std::map<std::string, std::string>;

/// `weights`: dtype of the weights that the layers read.
RunRecord make_record(const Config& config, const model::ModelSpec& spec, DType weights, int ranks,
                      const Inputs& inputs);
JsonValue record_to_json(const RunRecord& record);

struct SavedRecord {
  RunRecord record;
  std::string incomplete;  ///< a warning if not everything was recorded
};
/// The record in a checkpoint. For a checkpoint without record: the model and `global_batch` only.
SavedRecord read_record(const CheckpointReader& reader, int64_t global_batch);

/// One line for each permitted difference: those that are always permitted, and those in `allowed`. Fails
/// (78), listing all others and how to allow them; `checkpoint` is its path, for the message.
std::vector<std::string> compare_records(const RunRecord& saved, const RunRecord& now,
                                         std::span<const ResumeChange> allowed,
                                         const std::string& checkpoint);

}  // namespace nrl::train
