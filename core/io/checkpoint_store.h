#pragma once
// Checkpoints on disk: a directory `step-N` exists under that name only when all of it is durable.
//
//   DIR/step-1200/              committed; a Hugging Face model directory with our files beside it
//       manifest.json           written last, with its own checksum
//       manifest-00001.json     of rank 1, if it has pieces of its own
//   DIR/step-2400.tmp-<nonce>/  being written
//   DIR/.trash-<nonce>/         being removed
//   DIR/previous-1/step-1200/   of an earlier run that this one did not continue
//   DIR/LATEST                  "step-1200": a hint; a resume takes the newest directory whose checksums
//   verify
//
// Order of a commit: every file is written and fsynced; manifest.json is written under a temporary name,
// fsynced and renamed; the directory is fsynced and renamed; its parent is fsynced. A crash at any point
// leaves the earlier checkpoints intact, with or without the new one.

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/error.h"
#include "core/io/checkpoint_manifest.h"
#include "core/io/rank_group.h"
#include "core/io/run_lock.h"
#include "core/io/safetensors.h"
#include "core/io/slice_plan.h"
#include "core/io/staging.h"
#include "core/io/tensor_slice.h"

namespace nrl {

/// What a save planned, for the next one of the same rank: used again while no rank's tensors change.
struct SavePlans {
  std::map<std::string, SliceShare> slices;       ///< by the stem of their files
  bool saved = false;                             ///< the rest is of a save that succeeded
  std::string places;                             ///< places_to_text() of this rank
  std::map<std::string, LogicalTensor> of_ranks;  ///< rank 0: merge_places() of all
};

/// A tensor that one rank stores, as a piece of a logical tensor.
struct ShardSpec {
  std::string key;                    ///< tensor name in the file
  std::vector<int64_t> stored_shape;  ///< shape in the file
  std::string logical;                ///< name of the logical tensor
  DType dtype = DType::f32;           ///< of both
  std::vector<int64_t> shape;         ///< of the logical tensor
  int64_t offset = 0;                 ///< see CheckpointShard
  int64_t run = 0;                    ///< 0: one flat range
  int64_t stride = 0;

  /// The complete logical tensor, under its own name.
  static ShardSpec whole(std::string name, DType dtype, std::vector<int64_t> shape);
  /// Elements [offset, offset + count) of it.
  static ShardSpec flat(std::string key, std::string logical, DType dtype, std::vector<int64_t> shape,
                        int64_t offset, int64_t count);
};

/// Writes one checkpoint together with the other ranks. Between construction and commit() storage errors do
/// not throw: the first error of a rank is kept, its later writes are skipped, and commit() throws the same
/// Error on every rank. So no rank waits for one that has left.
class CheckpointWriter {
 public:
  struct Options {
    uint64_t reserve_bytes = uint64_t{64} << 20;  ///< disk space to leave free
    bool refuse_non_finite = false;  ///< a NaN or infinity in any tensor: no checkpoint (Exit::diverged)
    std::string nonce;               ///< rank 0's, as from random_nonce(); empty: a new one
    SavePlans* plans = nullptr;      ///< not null on any rank: keeps plans from save to save
    uint64_t manifest_limit = max_manifest_bytes;  ///< for tests
    Staging* staging = nullptr;                    ///< not null: the data of add_slices() is read through it
    /// Called on rank 0 when all files are written, before the checkpoint gets its name. If it fails, so does
    /// the commit.
    std::function<void()> before_publish = {};
  };
  /// Collective. `local_bytes`: bytes that this rank will write. Throws on every rank when there is not
  /// enough space or the directory cannot be created. Creates `store` if it is missing.
  CheckpointWriter(std::string store, int64_t step, uint64_t local_bytes, RankGroup group, Options options);
  CheckpointWriter(std::string store, int64_t step, uint64_t local_bytes, RankGroup group = {});
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;
  /// Without commit, rank 0 removes the files written so far.
  ~CheckpointWriter();

  /// Where the files are being written.
  const std::string& directory() const { return temporary_; }
  bool failed() const { return error_.has_value(); }

  /// One safetensors file of this rank; file names must be unique over all ranks. `fill` must write
  /// every declared key.
  void add_tensors(const std::string& file, const std::vector<ShardSpec>& shards,
                   const std::function<void(SafetensorsWriter&)>& fill);
  /// Collective. One file STEM-00001-of-0000N.safetensors for each of the N ranks that have shards, numbered
  /// in rank order without gaps. Ranks other than 0 describe theirs in manifests of their own.
  void add_tensor_set(const std::string& stem, const std::vector<ShardSpec>& shards,
                      const std::function<void(SafetensorsWriter&)>& fill);
  /// Collective. Assembles complete tensors from the ranks' slices; each tensor is written by one rank
  /// (plan_slices()): STEM.safetensors if one rank writes all of them, else STEM-00001-of-0000N.safetensors
  /// and STEM.safetensors.index.json. Slices must cover every element; slices held by several ranks must be
  /// equal. Memory: a block of slice_block_bytes. `one_file`: rank 0 writes all of them, for formats without
  /// an index.
  void add_slices(const std::string& stem, const std::vector<TensorSlice>& slices, bool one_file = false);
  void add_file(const std::string& name, std::string_view text);
  /// Runs the caller's own part of the work; keeps its errors for commit() as well.
  void guard(const std::function<void()>& work);

  /// Collective; returns the path of the committed directory on every rank. Uses rank 0's `state`.
  /// Replaces a checkpoint of the same step. When it throws, nothing of the attempt remains and
  /// older checkpoints are unchanged.
  std::string commit(const JsonValue& state);

 private:
  class LocalSlices;
  struct Written {
    std::map<std::string, LogicalTensor> tensors;
    std::vector<CheckpointFile> files;
  };
  struct Merged {
    CheckpointManifest manifest;
    bool same_places = true;  // on all ranks as in the last save
  };
  SliceShare share_of(const std::string& stem, const std::vector<TensorSlice>& slices, bool one_file);
  void write_slices(const SlicePlan& plan, const std::vector<TensorSlice>& slices, SafetensorsWriter* file);
  void add_tensors(const std::string& file, const std::vector<ShardSpec>& shards,
                   const std::function<void(SafetensorsWriter&)>& fill, Written& written);
  void record(const std::string& file, const std::vector<ShardSpec>& shards, const SafetensorsWriter& writer,
              Written& written);
  std::string text_of(const CheckpointManifest& manifest) const;
  void add_own_manifest();
  JsonValue report(bool same_places) const;
  Merged merge(const std::vector<std::string>& reports, const JsonValue& state) const;
  void add_places(const std::map<std::string, LogicalTensor>& places, CheckpointManifest& manifest) const;
  void publish(const CheckpointManifest& manifest);

  std::string store_, temporary_, final_;
  int64_t step_;
  RankGroup group_;
  Options options_;
  std::optional<Error> error_;
  Written shared_;  // described in manifest.json
  Written own_;     // described in this rank's manifest
  bool done_ = false, renamed_ = false;
};

/// quick: the manifest's checksum, its step, names and sizes of files. full: the checksums of all
/// files as well. none: nothing.
enum class Validation { none, quick, full };

/// Problems of a checkpoint directory, one line each: path of the file, tensor, byte range. Empty:
/// valid. Damage does not throw.
std::vector<std::string> validate_checkpoint(const std::string& path, Validation level);

struct CheckpointEntry {
  int64_t step = 0;
  std::string path;
  std::vector<std::string> problems;
  bool valid() const { return problems.empty(); }
};

/// Every step-N in the store, newest first; empty when the store does not exist.
std::vector<CheckpointEntry> list_checkpoints(const std::string& store, Validation level);

struct ResumePoint {
  std::optional<CheckpointEntry> checkpoint;
  std::vector<CheckpointEntry> rejected;  ///< newer than `checkpoint`, with their problems; newest first
  std::vector<std::string> warnings;      ///< LATEST names another checkpoint
};

/// Problems of checkpoints that were found by reading them, by path.
using KnownDamage = std::map<std::string, std::vector<std::string>>;

/// The newest valid checkpoint; older ones are not read. No checkpoint and none rejected: the store is empty.
/// Checkpoints in `known` are rejected for the problems that it gives.
ResumePoint find_resume(const std::string& store, Validation level = Validation::full,
                        const KnownDamage& known = {});

/// Moves every checkpoint of a step greater than `step` (-1: all) to STORE/previous-K, the first free K from
/// 1; nothing is removed or replaced there. Returns that directory; empty when there was nothing to move.
std::string set_checkpoints_aside(const std::string& store, int64_t step, const RunLock& lock);

/// In a checkpoint that was read back after it was saved (verify_saved()).
inline constexpr const char* verified_name = "VERIFIED";

/// Reads a checkpoint back, from storage and not from the page cache where the system permits it, and writes
/// verified_name into it. Returns its problems, as validate_checkpoint(); empty: it is marked, or `stop`
/// returned true.
std::vector<std::string> verify_saved(const std::string& path, const std::function<bool()>& stop = {});

/// Removes all but the `keep_newest` (at least 1) newest valid checkpoints, the newest that has
/// verified_name, and those for which `pinned` returns true. Never removes damaged ones or those in another
/// format. Returns the removed steps. Call on one rank, after a commit. `known`: steps of the store that are
/// known to be valid; they are validated again only if their manifest is missing. Valid ones are added, so
/// that later calls do not read them.
std::vector<int64_t> apply_retention(const std::string& store, int keep_newest,
                                     const std::function<bool(int64_t step)>& pinned = {},
                                     std::set<int64_t>* known = nullptr);

/// Removes leftovers of crashed runs (step-N.tmp-*, .trash-*, LATEST.tmp-*). The lock proves that no other
/// run writes to the store. Returns the removed names.
std::vector<std::string> clean_store(const std::string& store, const RunLock& lock);

}  // namespace nrl
