#pragma once
// The safetensors format (https://github.com/huggingface/safetensors): u64 length, JSON header,
// raw little-endian row-major data. Files are read as untrusted input; writing needs no buffers
// besides the caller's.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/dtype.h"
#include "core/io/atomic_file.h"
#include "core/io/pooled_file.h"

namespace nrl {

/// The largest header that the format allows.
inline constexpr uint64_t safetensors_max_header = 100'000'000;

/// The format's name of an element type: "F32", "BF16", "F8_E4M3", ...
std::string_view safetensors_name(DType dtype);

/// "[4096, 1024]"; "[]" for a scalar.
std::string shape_text(const std::vector<int64_t>& shape);

/// Product of the shape times `unit`; nullopt when it overflows int64 or a dimension is negative.
std::optional<int64_t> checked_product(const std::vector<int64_t>& shape, int64_t unit = 1);

/// One tensor of a file.
struct TensorInfo {
  std::string name;
  std::string_view dtype_name;  ///< as in the file, including types without a DType (BOOL, C64, ...)
  std::optional<DType> dtype;   ///< nullopt for those
  std::vector<int64_t> shape;   ///< [] for a scalar; dimensions may be 0
  uint64_t begin = 0, end = 0;  ///< bytes, relative to the start of the data

  uint64_t bytes() const { return end - begin; }
  int64_t elements() const { return *checked_product(shape); }
  /// Elements in one step of the first dimension (1 for a scalar).
  int64_t row_elements() const;
};

/// One safetensors file for reading, open only now and then (PooledFile). The constructor checks header size,
/// strict JSON, element types, shapes without overflow, contiguous offsets from 0 and the file size, and
/// fails with Exit::data "path:
/// ..."; it recognizes other formats by name. No allocation depends on an unchecked number; opening takes at
/// most 4 times the header's size plus 1 MiB. Reads are pread and thread-safe.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path, File::Links links = File::Links::follow);

  const std::string& path() const { return file_.path(); }
  /// In the order of the data.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const TensorInfo* find(std::string_view name) const;
  const TensorInfo& at(std::string_view name) const;  ///< Exit::data when absent
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// Where the data starts in the file.
  uint64_t data_offset() const { return data_offset_; }
  /// CRC-32C of everything before the data.
  uint32_t header_crc() const { return header_crc_; }

  /// Reads the whole tensor; `bytes` must be its size.
  void read(const TensorInfo& tensor, void* dst, size_t bytes) const;
  /// Reads `bytes` bytes of the tensor from byte `offset`.
  void read_bytes(const TensorInfo& tensor, uint64_t offset, void* dst, size_t bytes) const;
  /// Reads rows [first, first + count) of the first dimension.
  void read_rows(const TensorInfo& tensor, int64_t first, int64_t count, void* dst) const;

 private:
  void read_header();
  void check_layout(uint64_t data_bytes);

  PooledFile file_;
  std::vector<TensorInfo> tensors_;
  std::vector<uint32_t> by_name_;  // places in tensors_, sorted by name
  std::map<std::string, std::string> metadata_;
  uint64_t data_offset_ = 0;
  uint32_t header_crc_ = 0;
};

/// A model's tensors, in one file or in shards.
class SafetensorsSet {
 public:
  /// `path` is a .safetensors file, a *.safetensors.index.json, or a directory with `stem`.safetensors or
  /// `stem`.safetensors.index.json (the plain file wins, as in transformers). Opens and checks every file;
  /// every name must be in the file that the index gives, and file names in the index must be plain names.
  explicit SafetensorsSet(const std::string& path, std::string_view stem = "model");

  struct Entry {
    const SafetensorsFile* file = nullptr;
    const TensorInfo* tensor = nullptr;
  };
  std::optional<Entry> find(std::string_view name) const;
  /// Exit::data with the nearest name when absent.
  Entry at(std::string_view name) const;
  /// All names, sorted.
  std::vector<std::string> names() const;
  const std::vector<std::unique_ptr<SafetensorsFile>>& files() const { return files_; }
  uint64_t total_bytes() const;

  void read(std::string_view name, void* dst, size_t bytes) const;
  void read_rows(std::string_view name, int64_t first, int64_t count, void* dst) const;

 private:
  void add_file(const std::string& path);
  void open_index(const std::string& path);
  /// Call after all files are open.
  void sort_names();

  std::string path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<Entry> by_name_;  // sorted
};

/// A tensor to be written.
struct TensorSpec {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
};

/// Size of the chunks of a tensor with their own CRC, so that a part of a large tensor can be verified.
inline constexpr uint64_t crc_chunk_bytes = uint64_t{1} << 20;

/// CRC-32C of a tensor's bytes in memory.
struct TensorChecksum {
  uint32_t crc = 0;              ///< of the whole tensor
  std::vector<uint32_t> chunks;  ///< of each crc_chunk_bytes, the last one shorter; empty for an empty tensor
};

/// Writes one safetensors file whose tensors are declared first and then filled in any order, whole or by
/// slices. Every byte must be written exactly once; finish() checks it. The file is created under `path`
/// itself (O_EXCL): for a file that is to appear in one step, write under a temporary name and rename. One
/// thread at a time.
class SafetensorsWriter {
 public:
  struct Options {
    std::map<std::string, std::string> metadata = {{"format", "pt"}};
    bool refuse_non_finite =
        false;  ///< a NaN or infinity in f32, f16, bf16 or f64 data is Error(Exit::diverged)
  };
  SafetensorsWriter(const std::string& path, std::vector<TensorSpec> tensors);
  SafetensorsWriter(const std::string& path, std::vector<TensorSpec> tensors, Options options);
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;
  ~SafetensorsWriter();

  /// Size of the file with these tensors, without writing it.
  static uint64_t file_bytes(std::vector<TensorSpec> tensors, const Options& options);

  /// The whole tensor.
  void write(std::string_view name, const void* data, size_t bytes);
  /// Writes `bytes` bytes of the tensor at byte `offset`; both must be multiples of the element size.
  void write_slice(std::string_view name, uint64_t offset, const void* data, size_t bytes);
  /// Checks that every tensor is complete, fsyncs and closes.
  void finish();

  // After finish():
  uint64_t bytes() const { return data_offset_ + data_bytes_; }
  const TensorChecksum& checksum(std::string_view name) const;
  uint32_t file_crc() const { return file_crc_; }  ///< of the whole file

 private:
  struct Piece {
    uint64_t begin = 0, end = 0;
    uint32_t crc = 0;
  };
  struct Tensor {
    TensorSpec spec;
    uint64_t begin = 0, bytes = 0;
    std::vector<Piece> pieces;  // never across a chunk's end
    TensorChecksum checksum;
  };
  static std::pair<std::string, std::vector<Tensor>> plan(std::vector<TensorSpec> specs,
                                                          const Options& options);
  Tensor& at(std::string_view name);
  void complete(Tensor& tensor);

  std::vector<Tensor> tensors_;  // in the order of the data
  std::unordered_map<std::string_view, size_t> by_name_;
  Options options_;
  File file_;
  uint64_t data_offset_ = 0, data_bytes_ = 0;
  uint32_t header_crc_ = 0, file_crc_ = 0;
  bool finished_ = false;
};

/// The text of STEM.safetensors.index.json: weight_map name -> file name, total bytes of all tensors.
std::string safetensors_index(const std::map<std::string, std::string>& weight_map, uint64_t total_bytes);

}  // namespace nrl
