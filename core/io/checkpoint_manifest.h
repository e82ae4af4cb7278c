#pragma once
// manifest.json: the description of a checkpoint directory, with checksums.
//
// It lists all files and all logical tensors. Of the pieces that ranks other than 0 write of their own
// (optimizer state) it has the places only, in a text that does not grow with the ranks; keys and checksums
// of rank r's are in manifest-r.json (rank_manifest_name()), which rank r writes, in the same format. So rank
// 0 need not collect them, and a reader opens the manifests of the pieces that it wants.
//
// A logical tensor has the name and shape of the unsharded model (a parameter, its fp32 master copy, a
// moment). Its elements, in row-major order, are stored in pieces ("shards"), each of them one tensor of one
// safetensors file. Reading does not depend on which rank wrote which piece.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"
#include "core/io/json.h"

namespace nrl {

/// One stored piece of a logical tensor. Its element i (row-major, whatever its shape in the file) is element
/// `offset + i / run * stride + i % run` of the logical tensor. A flat ZeRO range is a single run: run ==
/// count. Columns [c, c + n) of a matrix with C columns have offset c, run n, stride C.
struct CheckpointShard {
  std::string file;  ///< name in the checkpoint's directory
  std::string key;   ///< tensor name in that file
  int64_t offset = 0, count = 0;
  int64_t run = 0, stride = 0;
  uint32_t crc32c = 0;  ///< of the piece's bytes as they were in memory
  std::vector<uint32_t>
      chunks;  ///< of each crc_chunk_bytes of it (safetensors.h); empty when there is only one
};

struct LogicalTensor {
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  std::vector<CheckpointShard> shards;
  std::string elsewhere = {};  ///< pack_places() of the pieces that manifests of ranks describe
};

struct CheckpointFile {
  std::string name;
  uint64_t bytes = 0;
  uint32_t crc32c = 0;
  int rank = -1;      ///< whose manifest describes its tensors; -1: this one does
  uint64_t sums = 0;  ///< if a rank's manifest describes it: its number of checksums (CheckpointSums)
};

/// The description of one checkpoint, or of the files that one rank wrote of it.
struct CheckpointManifest {
  int64_t step = 0;
  JsonValue state;  ///< the caller's object: configuration, counters, schedules, ...; null in a rank's
  std::map<std::string, LogicalTensor> tensors;
  std::vector<CheckpointFile> files;

  const CheckpointFile* find_file(std::string_view name) const;

  /// JSON text; its last line holds the CRC-32C of all bytes before it.
  std::string to_text() const;
  /// Checks the CRC and everything else that needs no other file. Exit::data, prefixed with `source`.
  static CheckpointManifest from_text(std::string_view text, std::string_view source);
};

/// "step-1200".
std::string step_directory_name(int64_t step);
/// The step of such a name; nullopt for any other name ("step-01", "step-1.tmp-...").
std::optional<int64_t> parse_step_directory_name(std::string_view name);

inline constexpr std::string_view manifest_name = "manifest.json";
/// "manifest-00012.json".
std::string rank_manifest_name(int rank);
/// Larger ones are neither written nor read.
inline constexpr uint64_t max_manifest_bytes = uint64_t{1} << 30;

/// A tensor description as JSON, as in the manifest and in the writers' reports.
JsonValue tensor_to_json(const LogicalTensor& tensor);
LogicalTensor tensor_from_json(std::string_view name, const JsonValue& value);
JsonValue file_to_json(const CheckpointFile& file);
CheckpointFile file_from_json(const JsonValue& value);

}  // namespace nrl
