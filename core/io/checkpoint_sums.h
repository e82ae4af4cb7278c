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
/// of one that does, or of a chunk (crc_chunk_bytes) of a piece of a tensor. The numbers run through one file
/// after the other and follow from manifest.json alone; what is behind those of a rank's file is known once
/// its manifest has been added.
class CheckpointSums {
 public:
  /// Keeps pointers into the manifest. Exit::data if there are more than 2^30.
  explicit CheckpointSums(const CheckpointManifest& manifest);
  /// Adds a rank's manifest; keeps pointers into it. Exit::data unless it describes files of that rank, of
  /// the same bytes and number of checksums.
  void add(const CheckpointManifest& of_rank, int rank);

  /// One checksum.
  struct Sum {
    const CheckpointFile* file = nullptr;
    const CheckpointShard* shard = nullptr;  ///< null: of the file without tensors, or of the header
    std::string_view tensor;
    uint64_t chunk = 0;
    uint64_t bytes = 0;
  };

  size_t count() const { return count_; }
  /// Of one of the manifest's files.
  size_t count_of(std::string_view file) const { return files_.at(by_name_.at(file)).count; }
  /// The number of a chunk of a piece.
  size_t number(const CheckpointShard& shard, uint64_t chunk) const { return first_.at(&shard) + chunk; }
  /// The number of a file that holds no tensors, or of its header.
  size_t number(std::string_view file) const { return files_.at(by_name_.at(file)).first; }
  /// The pieces in a file; empty: it holds no tensors, or nothing is known about it yet.
  std::vector<const CheckpointShard*> shards_of(const CheckpointFile& file) const;

  /// Part `part` of `parts` of the checksums for which done[number] is 0: parts of about equal bytes, each in
  /// one stretch. Calls describe(file) before the first of a file that no manifest has described yet, which
  /// may add() its manifest; else the file is skipped. Calls visit(number, sum) for every other.
  void for_part(const std::vector<uint8_t>& done, int part, int parts,
                const std::function<void(const CheckpointFile& file)>& describe,
                const std::function<void(size_t number, const Sum& sum)>& visit) const;

 private:
  struct Piece {
    const CheckpointShard* shard;
    std::string_view tensor;
    uint64_t bytes, sums;
  };
  struct File {
    const CheckpointFile* file;
    size_t first, count;  // numbers
    bool described;
    std::vector<Piece> pieces;
  };
  void describe(File& file, std::vector<Piece> pieces);

  std::vector<File> files_;
  std::unordered_map<std::string_view, size_t> by_name_;
  std::unordered_map<int, size_t> files_of_rank_;             // their number
  std::unordered_map<const CheckpointShard*, size_t> first_;  // number of the first chunk
  size_t count_ = 0;
};

}  // namespace nrl
