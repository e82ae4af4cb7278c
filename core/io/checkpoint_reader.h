#pragma once
// Reads a committed checkpoint into any layout: any range of a logical tensor, independent of the ranks
// that wrote it.

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/error.h"
#include "core/io/checkpoint_manifest.h"
#include "core/io/checkpoint_places.h"
#include "core/io/checkpoint_sums.h"
#include "core/io/safetensors.h"
#include "core/io/tensor_slice.h"

namespace nrl {

/// A file of a checkpoint is missing, cannot be read, or differs from the manifest. The message begins with
/// the file's path.
class CheckpointDamage : public Error {
 public:
  using Error::Error;
};

/// The manifest of a checkpoint directory, compared with the sizes of its files.
struct OpenedManifest {
  CheckpointManifest manifest;
  std::vector<std::string> problems;  ///< one line each: file and what is wrong; empty: none
  std::set<std::string> unusable;     ///< the files with problems
};
/// Looks at part `part` of `parts` of the files, so that many ranks together look at each file once.
OpenedManifest open_manifest(const std::string& path, int part = 0, int parts = 1);

/// One checkpoint open for reading. Manifests of ranks are read when one of their pieces is. All data is
/// verified against the manifest's checksums as it is read. Not thread-safe; several readers of one directory
/// may coexist.
class CheckpointReader {
 public:
  /// Reads the manifest and checks the sizes of part `part` of `parts` of the files (open_manifest()).
  /// CheckpointDamage with a list of problems; Exit::no_input when there is no such directory.
  explicit CheckpointReader(const std::string& path, int part = 0, int parts = 1);
  CheckpointReader(std::string path, CheckpointManifest manifest);
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  const std::string& path() const { return path_; }
  const CheckpointManifest& manifest() const { return manifest_; }
  std::string manifest_path() const { return join_path(path_, manifest_name); }
  /// The paths of the files that hold the tensor, for messages. May read manifests of ranks.
  std::string files_of(std::string_view name);
  const LogicalTensor* find(std::string_view name) const;
  const LogicalTensor& at(std::string_view name) const;

  /// Compares the wanted tensors with the stored ones. Exit::data listing missing names, other dtypes or
  /// shapes and, unless `allow_more`, unexpected names; at most 10 of each, with their number.
  void check_names(const std::vector<TensorSpec>& wanted, bool allow_more = false) const;

  /// Elements [offset, offset + count) of the tensor in row-major order, in the tensor's dtype, into `dst`
  /// (count x size_of(dtype) bytes). Damage, or a file that contradicts the manifest, is CheckpointDamage
  /// with file, tensor and byte range.
  void read_logical(std::string_view name, int64_t offset, int64_t count, void* dst);
  /// The whole tensor.
  void read_logical(std::string_view name, void* dst, size_t bytes);
  /// Fills slice.data, which must have the tensor's dtype. Exit::data when the shapes differ.
  void read_slice(const TensorSlice& slice);
  /// One of the other files (config.json, position.json), verified.
  std::string read_text(std::string_view file) const;

  /// One byte for each number of CheckpointSums: not 0 once this reader has verified that checksum. Ranks
  /// that read the same checkpoint may unite theirs, to share what is left.
  std::vector<uint8_t>& verified() { return verified_; }
  /// Verifies part `part` of `parts` of the checksums that are not verified() yet, and that the pieces cover
  /// every element of the tensors exactly once, as the manifests of ranks that were read also say. Returns
  /// the problems, one line each: file, tensor, byte range. Skips the files in `unusable`, and all that is
  /// left once `stop` returns true.
  std::vector<std::string> verify_rest(int part, int parts, const std::set<std::string>& unusable = {},
                                       const std::function<bool()>& stop = {});

 private:
  struct OpenTensor {
    const LogicalTensor* tensor = nullptr;
    TensorPieces pieces;
  };
  struct Chunk {
    std::string data;
    uint64_t last_use = 0;
  };

  const OpenTensor& open(std::string_view name);
  const CheckpointManifest& of_rank(int rank);
  const CheckpointShard& shard_of(std::string_view name, const OpenTensor& open, uint32_t piece);
  const SafetensorsFile& file(const std::string& name);
  const TensorInfo& stored(const LogicalTensor& tensor, const CheckpointShard& shard,
                           const SafetensorsFile*& file);
  void read_chunk(std::string_view name, const LogicalTensor& tensor, const CheckpointShard& shard,
                  uint64_t chunk, char* dst, uint64_t bytes);
  void verify(const CheckpointSums::Sum& sum, std::string& buffer);
  void verify_header(const CheckpointFile& entry);
  void read_stored(std::string_view name, const LogicalTensor& tensor, const CheckpointShard& shard,
                   uint64_t begin, uint64_t bytes, char* dst);
  const std::string& cached_chunk(std::string_view name, const LogicalTensor& tensor,
                                  const CheckpointShard& shard, uint64_t chunk, uint64_t bytes);

  std::string path_;
  CheckpointManifest manifest_;
  CheckpointSums sums_;
  std::map<int, std::unique_ptr<CheckpointManifest>> of_ranks_;  // read so far
  std::vector<uint8_t> verified_;
  std::map<std::string, std::unique_ptr<SafetensorsFile>, std::less<>> files_;
  std::string open_name_;
  OpenTensor open_;                                                     // the last tensor read, open_name_
  std::map<std::pair<const CheckpointShard*, uint64_t>, Chunk> cache_;  // chunks read in parts
  uint64_t clock_ = 0;
};

}  // namespace nrl
