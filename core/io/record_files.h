#pragma once
// The framing of two files of records: TFRecord (TensorBoard) and the log of LevelDB (Weights & Biases).

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/io/atomic_file.h"

namespace nrl {

/// A record as in a TFRecord file: u64 length, u32 masked CRC-32C of these 8 bytes, data, u32 masked CRC-32C
/// of the data; little-endian. Source: RecordWriter of TensorFlow.
std::string tf_record(std::string_view data);

/// Frames records for a log in the format of LevelDB (its documentation, "Log format"): blocks of 32 KiB, in
/// which a record is one chunk or several. A chunk is u32 CRC, u16 length, u8 type (1 whole, 2 first, 3
/// middle, 4 last) and data; the last bytes of a block are zeros if they are too few for a chunk. The CRC is
/// the one of zlib over type and data, unmasked, as W&B has it; LevelDB itself uses a masked CRC-32C.
class LevelLogFrames {
 public:
  static constexpr size_t block = 32768, header = 7;
  /// `position`: bytes of the file before the first record; they count for the blocks.
  explicit LevelLogFrames(size_t position) : position_(position % block) {}
  /// The bytes that append a record to the file.
  std::string frame(std::string_view data);

 private:
  size_t position_;  // in the current block
};

/// Reads such a log from the first record, which is at `position`. `file` must outlive the reader.
class LevelLogReader {
 public:
  LevelLogReader(const File& file, uint64_t position) : file_(file), end_(file.size()), at_(position) {}

  struct Record {
    uint64_t offset;  ///< of its first chunk
    std::string data;
  };
  /// Unset at the end of the file, and at a record that is incomplete, as a kill leaves it, or damaged.
  std::optional<Record> next();

 private:
  const File& file_;
  uint64_t end_, at_;
  std::string block_;  // the bytes of the current block from `block_at_` on
  uint64_t block_at_ = 0;
};

}  // namespace nrl
