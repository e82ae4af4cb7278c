#pragma once
// Reads a committed checkpoint into any layout: whatever ranks wrote it, any range of a logical tensor can be
// read.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/io/checkpoint_manifest.h"
#include "core/io/safetensors.h"
#include "core/io/tensor_slice.h"

namespace nrl {

/// One checkpoint open for reading. Every byte that it hands out has been checked against the manifest's
/// checksums. One thread at a time; several readers of one directory are fine.
class CheckpointReader {
 public:
  /// Reads and checks the manifest and the sizes of all files (Validation::quick). Error(Exit::data) lists
  /// what is wrong; Exit::no_input when there is no such directory.
  explicit CheckpointReader(const std::string& path);

  const std::string& path() const { return path_; }
  const CheckpointManifest& manifest() const { return manifest_; }
  const LogicalTensor* find(std::string_view name) const;
  const LogicalTensor& at(std::string_view name) const;

  /// Compares what is wanted with what is there, and refuses (Exit::data) with the missing names, those of
  /// another dtype or shape, and, unless `allow_more`, the unexpected ones; at most 10 of each and their
  /// number.
  void check_names(const std::vector<TensorSpec>& wanted, bool allow_more = false) const;

  /// Elements [offset, offset + count) of the tensor in row-major order, in the tensor's own dtype, into
  /// `dst` (count x size_of(dtype) bytes). Damage, and a file that does not hold what the manifest says, is
  /// Exit::data with file, tensor and byte range.
  void read_logical(std::string_view name, int64_t offset, int64_t count, void* dst);
  /// The whole tensor.
  void read_logical(std::string_view name, void* dst, size_t bytes);
  /// Fills slice.data, which is of the tensor's own dtype. A tensor of another shape is Exit::data.
  void read_slice(const TensorSlice& slice);
  /// One of the other files (config.json, position.json), checked.
  std::string read_text(std::string_view file) const;

 private:
  struct OpenTensor {
    const LogicalTensor* tensor = nullptr;
    std::vector<ShardRun> runs;
  };
  struct Chunk {
    std::string data;
    uint64_t last_use = 0;
  };

  const OpenTensor& open(std::string_view name);
  const TensorInfo& stored(const LogicalTensor& tensor, const CheckpointShard& shard,
                           const SafetensorsFile*& file);
  void read_stored(std::string_view name, const LogicalTensor& tensor, const CheckpointShard& shard,
                   uint64_t begin, uint64_t bytes, char* dst);
  const std::string& cached_chunk(std::string_view name, const LogicalTensor& tensor,
                                  const CheckpointShard& shard, uint64_t chunk, uint64_t bytes);

  std::string path_;
  CheckpointManifest manifest_;
  std::map<std::string, std::unique_ptr<SafetensorsFile>, std::less<>> files_;
  std::string open_name_;
  OpenTensor open_;  // of open_name_, the last tensor asked for
  std::map<std::pair<const CheckpointShard*, uint64_t>, Chunk> cache_;  // chunks that are read in parts
  uint64_t clock_ = 0;
};

}  // namespace nrl
