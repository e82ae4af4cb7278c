#pragma once
// manifest.json of a checkpoint: what the directory step-N must hold, to the bit.
//
// A logical tensor is named and shaped as in the unsharded model (a parameter, its fp32 master copy, a
// moment, ...). Its elements, numbered in row-major order, are stored in pieces ("shards"), each one tensor
// of one safetensors file. Which rank wrote which piece plays no part in reading.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"
#include "core/io/json.h"

namespace nrl {

/// One stored piece of a logical tensor. Its element i (row-major, whatever its shape in the file) is element
/// `offset + i / run * stride + i % run` of the logical tensor. A flat range, as ZeRO makes them, is a single
/// run: run == count. A slice of columns [c, c + n) of a matrix with C columns has offset c, run n, stride C.
struct CheckpointShard {
  std::string file;  ///< name in the checkpoint's directory
  std::string key;   ///< tensor name in that file
  int64_t offset = 0, count = 0;
  int64_t run = 0, stride = 0;
  uint32_t crc32c = 0;  ///< of the piece's bytes as they were in memory
  std::vector<uint32_t>
      chunks;  ///< of each kCrcChunkBytes of it (safetensors.h); empty when there is only one
};

struct LogicalTensor {
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  std::vector<CheckpointShard> shards;
};

struct CheckpointFile {
  std::string name;
  uint64_t bytes = 0;
  uint32_t crc32c = 0;
};

/// `count` consecutive elements of a logical tensor from `begin` on are elements `stored`... of shard
/// `shard`.
struct ShardRun {
  int64_t begin = 0, count = 0;
  uint32_t shard = 0;
  int64_t stored = 0;
};

/// The runs of a tensor in logical order. Error(Exit::data) naming the tensor unless they cover every element
/// exactly once. At most 4 Mi runs.
std::vector<ShardRun> shard_runs(std::string_view name, const LogicalTensor& tensor);

/// The complete description of one checkpoint.
struct CheckpointManifest {
  int64_t step = 0;
  JsonValue state;  ///< the caller's object: configuration, counters, schedules, ...
  std::map<std::string, LogicalTensor> tensors;
  std::vector<CheckpointFile> files;

  const CheckpointFile* find_file(std::string_view name) const;

  /// JSON text whose last line holds the CRC-32C of all bytes before it.
  std::string to_text() const;
  /// Checks the CRC, then everything else that needs no other file. Error(Exit::data) with `source` in front.
  static CheckpointManifest from_text(std::string_view text, std::string_view source);
};

inline constexpr std::string_view kManifestName = "manifest.json";

/// A tensor description as JSON, as in the manifest and in the writers' reports.
JsonValue tensor_to_json(const LogicalTensor& tensor);
LogicalTensor tensor_from_json(std::string_view name, const JsonValue& value);
JsonValue file_to_json(const CheckpointFile& file);
CheckpointFile file_from_json(const JsonValue& value);

}  // namespace nrl
