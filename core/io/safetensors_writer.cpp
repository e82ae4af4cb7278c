#include <algorithm>
#include <cstring>

#include "core/base/error.h"
#include "core/base/finite.h"
#include "core/io/crc32c.h"
#include "core/io/json.h"
#include "core/io/safetensors.h"
#include "core/io/safetensors_common.h"

namespace nrl {

std::pair<std::string, std::vector<SafetensorsWriter::Tensor>> SafetensorsWriter::plan(
    std::vector<TensorSpec> specs, const Options& options) {
  std::sort(specs.begin(), specs.end(), [](const TensorSpec& a, const TensorSpec& b) {
    const int ra = detail::safetensors_rank(a.dtype), rb = detail::safetensors_rank(b.dtype);
    return ra != rb ? ra > rb : a.name < b.name;
  });
  JsonObject header;
  if (!options.metadata.empty()) {
    JsonObject metadata;
    for (const auto& [key, value] : options.metadata) metadata.set(key, value);
    header.set("__metadata__", std::move(metadata));
  }
  std::vector<Tensor> tensors;
  uint64_t offset = 0;
  for (TensorSpec& spec : specs) {
    const auto bytes = checked_product(spec.shape, size_of(spec.dtype));
    NRL_CHECK(bytes.has_value(), "tensor \"{}\": the shape {} overflows", spec.name, shape_text(spec.shape));
    NRL_CHECK(header.find(spec.name) == nullptr && spec.name != "__metadata__", "tensor name \"{}\" is taken",
              spec.name);
    const uint64_t end = offset + static_cast<uint64_t>(*bytes);
    header.set(spec.name, JsonValue::object({{"dtype", safetensors_name(spec.dtype)},
                                             {"shape", spec.shape},
                                             {"data_offsets", JsonValue::array({offset, end})}}));
    tensors.push_back({std::move(spec), offset, end - offset, {}, {}});
    offset = end;
  }
  std::string json = JsonValue(std::move(header)).dump();
  json.append((8 - json.size() % 8) % 8, ' ');
  NRL_CHECK(json.size() <= safetensors_max_header, "the header of {} tensors has {} bytes: use more files",
            tensors.size(), json.size());
  return {std::move(json), std::move(tensors)};
}

uint64_t SafetensorsWriter::file_bytes(std::vector<TensorSpec> tensors, const Options& options) {
  const auto [json, planned] = plan(std::move(tensors), options);
  return 8 + json.size() + (planned.empty() ? 0 : planned.back().begin + planned.back().bytes);
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<TensorSpec> tensors)
    : SafetensorsWriter(path, std::move(tensors), Options()) {}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<TensorSpec> tensors,
                                     Options options)
    : options_(std::move(options)) {
  auto [json, planned] = plan(std::move(tensors), options_);
  tensors_ = std::move(planned);
  for (size_t i = 0; i < tensors_.size(); ++i) by_name_.emplace(tensors_[i].spec.name, i);
  data_bytes_ = tensors_.empty() ? 0 : tensors_.back().begin + tensors_.back().bytes;
  const uint64_t length = json.size();
  std::string head(8, '\0');
  std::memcpy(head.data(), &length, 8);
  head += json;
  data_offset_ = head.size();
  header_crc_ = crc32c(head.data(), head.size());
  file_ = File::create(path);
  file_.allocate(data_offset_ + data_bytes_);
  file_.pwrite_all(head.data(), head.size(), 0);
}

SafetensorsWriter::~SafetensorsWriter() = default;

SafetensorsWriter::Tensor& SafetensorsWriter::at(std::string_view name) {
  const auto it = by_name_.find(name);
  NRL_CHECK(it != by_name_.end(), "{}: tensor \"{}\" was not declared", file_.path(), name);
  return tensors_[it->second];
}

const TensorChecksum& SafetensorsWriter::checksum(std::string_view name) const {
  NRL_CHECK(finished_, "checksums are complete after finish()");
  return const_cast<SafetensorsWriter*>(this)->at(name).checksum;
}

void SafetensorsWriter::write(std::string_view name, const void* data, size_t bytes) {
  NRL_CHECK(bytes == at(name).bytes, "tensor \"{}\" has {} bytes, not {}", name, at(name).bytes, bytes);
  write_slice(name, 0, data, bytes);
}

void SafetensorsWriter::write_slice(std::string_view name, uint64_t offset, const void* data, size_t bytes) {
  Tensor& t = at(name);
  NRL_CHECK(!finished_ && offset <= t.bytes && bytes <= t.bytes - offset,
            "bytes {}+{} of tensor \"{}\" with {}", offset, bytes, name, t.bytes);
  const auto unit = static_cast<uint64_t>(size_of(t.spec.dtype));
  NRL_CHECK(offset % unit == 0 && bytes % unit == 0, "bytes {}+{} of tensor \"{}\" split an element", offset,
            bytes, name);
  const auto* p = static_cast<const char*>(data);
  // In chunks: the CRC leaves the bytes in the cache for the write.
  while (bytes > 0) {
    const size_t n = std::min<uint64_t>(bytes, crc_chunk_bytes - offset % crc_chunk_bytes);
    if (options_.refuse_non_finite && count_non_finite(t.spec.dtype, p, n) > 0) {
      fail(Exit::diverged, "tensor \"{}\" holds a NaN or an infinity near element {}: not written to {}",
           name, offset / unit, file_.path());
    }
    if (!t.pieces.empty() && t.pieces.back().end == offset && offset % crc_chunk_bytes != 0) {
      t.pieces.back().crc = crc32c(p, n, t.pieces.back().crc);
      t.pieces.back().end += n;
    } else {
      t.pieces.push_back({offset, offset + n, crc32c(p, n)});
    }
    file_.pwrite_all(p, n, data_offset_ + t.begin + offset);
    p += n;
    offset += n;
    bytes -= n;
  }
}

void SafetensorsWriter::complete(Tensor& tensor) {
  std::sort(tensor.pieces.begin(), tensor.pieces.end(),
            [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  uint64_t expected = 0;
  TensorChecksum& sum = tensor.checksum;
  for (const Piece& piece : tensor.pieces) {
    NRL_CHECK(piece.begin == expected, "{}: tensor \"{}\": bytes from {} on were written {}", file_.path(),
              tensor.spec.name, std::min(piece.begin, expected), piece.begin < expected ? "twice" : "never");
    const uint64_t n = piece.end - piece.begin;
    if (piece.begin % crc_chunk_bytes == 0) {
      sum.chunks.push_back(piece.crc);
    } else {
      sum.chunks.back() = crc32c_combine(sum.chunks.back(), piece.crc, n);
    }
    sum.crc = crc32c_combine(sum.crc, piece.crc, n);
    expected = piece.end;
  }
  NRL_CHECK(expected == tensor.bytes, "{}: tensor \"{}\": bytes from {} on were never written", file_.path(),
            tensor.spec.name, expected);
  tensor.pieces.clear();
}

void SafetensorsWriter::finish() {
  NRL_CHECK(!finished_, "{} is finished", file_.path());
  file_crc_ = header_crc_;
  for (Tensor& t : tensors_) {
    complete(t);
    file_crc_ = crc32c_combine(file_crc_, t.checksum.crc, t.bytes);
  }
  file_.sync();
  file_.close();
  finished_ = true;
}

std::string safetensors_index(const std::map<std::string, std::string>& weight_map, uint64_t total_bytes) {
  JsonObject map;
  for (const auto& [name, file] : weight_map) map.set(name, file);
  JsonValue root = JsonValue::object({{"metadata", JsonValue::object({{"total_size", total_bytes}})}});
  root.set("weight_map", std::move(map));
  return root.dump(2) + "\n";
}

}  // namespace nrl
