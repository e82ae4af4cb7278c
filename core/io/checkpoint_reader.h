#pragma once
// Reads a committed checkpoint into any layout: any range of a logical tensor, independent of the ranks
// that wrote it.

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

/// One checkpoint open for reading. All data is verified against the manifest's checksums. Not thread-safe;
/// several readers of one directory may coexist.
class CheckpointReader {
 public:
  /// Reads and checks the manifest and the sizes of all files (Validation::quick). Exit::data with a list of
  /// problems; Exit::no_input when there is no such directory.
  explicit CheckpointReader(const std::string& path);

  const std::string& path() const { return path_; }
  const CheckpointManifest& manifest() const { return manifest_; }
  const LogicalTensor* find(std::string_view name) const;
  const LogicalTensor& at(std::string_view name) const;

  /// Compares the wanted tensors with the stored ones. Exit::data listing missing names, other dtypes or
  /// shapes and, unless `allow_more`, unexpected names; at most 10 of each, with their number.
  void check_names(const std::vector<TensorSpec>& wanted, bool allow_more = false) const;

  /// Elements [offset, offset + count) of the tensor in row-major order, in the tensor's dtype, into `dst`
  /// (count x size_of(dtype) bytes). Damage, or a file that contradicts the manifest, is Exit::data with
  /// file, tensor and byte range.
  void read_logical(std::string_view name, int64_t offset, int64_t count, void* dst);
  /// The whole tensor.
  void read_logical(std::string_view name, void* dst, size_t bytes);
  /// Fills slice.data, which must have the tensor's dtype. Exit::data when the shapes differ.
  void read_slice(const TensorSlice& slice);
  /// One of the other files (config.json, position.json), verified.
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
  OpenTensor open_;                                                     // the last tensor read, open_name_
  std::map<std::pair<const CheckpointShard*, uint64_t>, Chunk> cache_;  // chunks read in parts
  uint64_t clock_ = 0;
};

}  // namespace nrl
