#pragma once
// The checksums of a checkpoint, numbered so that ranks can share their verification.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/io/checkpoint_manifest.h"

namespace nrl {

/// Every byte of a checkpoint's files counts in one checksum: of a file that holds no tensors, of the header
/// of one that does, or of a chunk (crc_chunk_bytes) of a piece of a tensor. The numbers follow from the
/// manifest alone and run through one file after the other.
class CheckpointSums {
 public:
  /// Keeps pointers into the manifest.
  explicit CheckpointSums(const CheckpointManifest& manifest);

  /// One checksum.
  struct Sum {
    const CheckpointFile* file = nullptr;
    const CheckpointShard* shard = nullptr;  ///< null: of the file without tensors, or of the header
    std::string_view tensor;
    uint64_t chunk = 0;
    uint64_t bytes = 0;
  };

  size_t count() const { return count_; }
  /// The number of a chunk of a piece of the manifest.
  size_t number(const CheckpointShard& shard, uint64_t chunk) const { return first_.at(&shard) + chunk; }
  /// The pieces in a file; empty: it holds no tensors.
  const std::vector<const CheckpointShard*>& shards_of(const CheckpointFile& file) const;

  /// Calls visit(number, sum) for part `part` of `parts` of the checksums for which done[number] is 0: parts
  /// of about equal bytes, each in one stretch.
  void for_part(const std::vector<uint8_t>& done, int part, int parts,
                const std::function<void(size_t number, const Sum& sum)>& visit) const;

 private:
  struct Entry {
    Sum sum;              // without chunk
    uint64_t chunks = 1;  // of a piece
  };
  void for_each_left(const std::vector<uint8_t>& done,
                     const std::function<void(size_t number, const Sum& sum)>& visit) const;

  std::vector<Entry> entries_;
  std::unordered_map<const CheckpointShard*, size_t> first_;  // number of the first chunk
  std::unordered_map<const CheckpointFile*, std::vector<const CheckpointShard*>> shards_;
  size_t count_ = 0;
};

}  // namespace nrl
