#include "core/io/checkpoint_manifest.h"

#include <algorithm>
#include <charconv>
#include <climits>

#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "core/io/crc32c.h"
#include "core/io/safetensors.h"

namespace nrl {
namespace {

constexpr std::string_view format_version = "nrl-checkpoint-1";
constexpr std::string_view format_with_ranks = "nrl-checkpoint-2";  // refers to manifests of ranks
constexpr std::string_view step_prefix = "step-";
constexpr std::string_view tail_start = "\"crc32c\":\"";
constexpr std::string_view tail_end = "\"}\n";
constexpr size_t tail_bytes = tail_start.size() + 8 + tail_end.size();

std::string hex(uint32_t crc) {
  return fmt::format("{:08x}", crc);
}

bool parse_hex(std::string_view digits, uint32_t& value) {
  const bool lower = std::all_of(digits.begin(), digits.end(),
                                 [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
  if (digits.size() != 8 || !lower) return false;
  std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  return true;
}

uint32_t crc_at(const JsonValue& object, std::string_view key) {
  uint32_t value = 0;
  if (!parse_hex(object.get_string(key), value)) {
    fail(Exit::data, "{}\"{}\" must be 8 hexadecimal digits", object.at(key).where(), key);
  }
  return value;
}

DType dtype_from(const JsonValue& value) {
  for (int i = 0; i <= static_cast<int>(DType::u8); ++i) {
    if (name_of(static_cast<DType>(i)) == value.as_string()) return static_cast<DType>(i);
  }
  fail(Exit::data, "{}unknown dtype \"{}\"", value.where(), value.as_string().substr(0, 40));
}

std::string plain_name(const JsonValue& value) {
  if (!is_plain_name(value.as_string())) {
    fail(Exit::data, "{}\"{}\" is not a plain file name", value.where(), value.as_string().substr(0, 200));
  }
  return value.as_string();
}

uint64_t chunk_count(uint64_t bytes) {
  return bytes / crc_chunk_bytes + (bytes % crc_chunk_bytes != 0 ? 1 : 0);
}

JsonValue shard_to_json(const CheckpointShard& s) {
  JsonValue v = JsonValue::object({{"file", s.file},
                                   {"key", s.key},
                                   {"offset", s.offset},
                                   {"count", s.count},
                                   {"crc32c", hex(s.crc32c)}});
  if (s.run != s.count) {
    v.set("run", s.run);
    v.set("stride", s.stride);
  }
  if (s.chunks.size() > 1) {
    std::string all;
    for (uint32_t c : s.chunks) all += hex(c);
    v.set("chunks", all);
  }
  return v;
}

CheckpointShard shard_from_json(const JsonValue& v, DType dtype) {
  CheckpointShard s;
  s.file = plain_name(v.at("file"));
  s.key = v.get_string("key");
  s.offset = v.get_int("offset");
  s.count = v.get_int("count");
  s.run = v.get_int("run", s.count);
  s.stride = v.get_int("stride", s.count);
  s.crc32c = crc_at(v, "crc32c");
  int64_t bytes = 0;
  if (s.count < 0 || __builtin_mul_overflow(s.count, size_of(dtype), &bytes)) {
    fail(Exit::data, "{}count {} is out of range", v.where(), s.count);
  }
  const uint64_t expected = chunk_count(static_cast<uint64_t>(bytes));
  const std::string chunks = v.get_string("chunks", "");
  if (chunks.size() % 8 != 0 || chunks.size() / 8 != (expected > 1 ? expected : 0)) {
    fail(Exit::data, "{}{} checksums of chunks for {} bytes", v.where(), chunks.size() / 8, bytes);
  }
  for (size_t i = 0; i < chunks.size(); i += 8) {
    uint32_t crc = 0;
    if (!parse_hex(std::string_view(chunks).substr(i, 8), crc)) {
      fail(Exit::data, "{}\"chunks\" must be hexadecimal digits", v.where());
    }
    s.chunks.push_back(crc);
  }
  return s;
}

}  // namespace

std::string rank_manifest_name(int rank) {
  return fmt::format("manifest-{:05}.json", rank);
}

std::string step_directory_name(int64_t step) {
  return fmt::format("{}{}", step_prefix, step);
}

std::optional<int64_t> parse_step_directory_name(std::string_view name) {
  if (!name.starts_with(step_prefix)) return {};
  const std::string_view digits = name.substr(step_prefix.size());
  int64_t step = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (error != std::errc() || step < 0 || name != step_directory_name(step)) return {};
  return step;
}

JsonValue tensor_to_json(const LogicalTensor& tensor) {
  JsonValue shards = JsonValue::array();
  for (const CheckpointShard& s : tensor.shards) shards.push_back(shard_to_json(s));
  JsonValue v =
      JsonValue::object({{"dtype", name_of(tensor.dtype)}, {"shape", tensor.shape}, {"shards", shards}});
  if (!tensor.elsewhere.empty()) v.set("of_ranks", tensor.elsewhere);
  return v;
}

LogicalTensor tensor_from_json(std::string_view name, const JsonValue& value) {
  LogicalTensor t;
  t.dtype = dtype_from(value.at("dtype"));
  for (const JsonValue& d : value.at("shape").items()) t.shape.push_back(d.as_int());
  if (t.shape.size() > 32 || !checked_product(t.shape, size_of(t.dtype))) {
    fail(Exit::data, "{}tensor \"{}\": impossible shape", value.where(), name.substr(0, 200));
  }
  for (const JsonValue& s : value.at("shards").items()) t.shards.push_back(shard_from_json(s, t.dtype));
  t.elsewhere = value.get_string("of_ranks", "");
  return t;
}

JsonValue file_to_json(const CheckpointFile& file) {
  JsonValue v = JsonValue::object({{"name", file.name}, {"bytes", file.bytes}, {"crc32c", hex(file.crc32c)}});
  if (file.rank >= 0) {
    v.set("rank", file.rank);
    v.set("sums", file.sums);
  }
  return v;
}

CheckpointFile file_from_json(const JsonValue& value) {
  CheckpointFile file{plain_name(value.at("name")), value.get_uint("bytes"), crc_at(value, "crc32c")};
  const int64_t rank = value.get_int("rank", -1);
  if (rank < 0) return file;
  file.rank = static_cast<int>(std::min<int64_t>(rank, INT_MAX));
  file.sums = value.get_uint("sums");
  if (file.sums < 1 || file.sums > file.bytes)
    fail(Exit::data, "{}{} checksums of {} bytes", value.where(), file.sums, file.bytes);
  return file;
}

const CheckpointFile* CheckpointManifest::find_file(std::string_view name) const {
  const auto it =
      std::find_if(files.begin(), files.end(), [&](const CheckpointFile& f) { return f.name == name; });
  return it == files.end() ? nullptr : &*it;
}

std::string CheckpointManifest::to_text() const {
  constexpr auto refuse = JsonValue::NonFinite::refuse;
  // One line per tensor and file, so that manifests can be read and diffed.
  const bool ranks = std::any_of(files.begin(), files.end(), [](const auto& f) { return f.rank >= 0; });
  std::string text = fmt::format("{{\"format\":\"{}\",\n\"step\":{},\n\"state\":{},\n\"tensors\":{{",
                                 ranks ? format_with_ranks : format_version, step, state.dump(0, refuse));
  bool first = true;
  for (const auto& [name, tensor] : tensors) {
    text += fmt::format("{}\n{}:{}", first ? "" : ",", JsonValue(name).dump(), tensor_to_json(tensor).dump());
    first = false;
  }
  text += "\n},\n\"files\":[";
  first = true;
  for (const CheckpointFile& f : files) {
    text += fmt::format("{}\n{}", first ? "" : ",", file_to_json(f).dump());
    first = false;
  }
  text += "\n],\n";
  const uint32_t crc = crc32c(text.data(), text.size());
  text.append(tail_start).append(hex(crc)).append(tail_end);
  return text;
}

CheckpointManifest CheckpointManifest::from_text(std::string_view text, std::string_view source) {
  if (text.size() < tail_bytes || !text.ends_with(tail_end) ||
      text.substr(text.size() - tail_bytes, tail_start.size()) != tail_start) {
    fail(Exit::data, "{}: truncated or damaged: does not end with its checksum", source);
  }
  const std::string_view body = text.substr(0, text.size() - tail_bytes);
  uint32_t wanted = 0;
  const uint32_t actual = crc32c(body.data(), body.size());
  if (!parse_hex(text.substr(body.size() + tail_start.size(), 8), wanted) || wanted != actual) {
    fail(Exit::data, "{}: damaged: CRC-32C {}, {} recorded", source, hex(actual),
         text.substr(body.size() + tail_start.size(), 8));
  }
  JsonLimits limits;
  limits.text_bytes = max_manifest_bytes;
  limits.string_bytes = size_t{256} << 20;
  limits.values = 4096 + text.size() / 4;
  const JsonValue root = parse_json(text, source, limits);
  const std::string& format = root.get_string("format");
  if (format != format_version && format != format_with_ranks) {
    fail(Exit::data, "{}the format is \"{}\"; this program reads \"{}\" and \"{}\"",
         root.at("format").where(), format.substr(0, 40), format_version, format_with_ranks);
  }
  CheckpointManifest m;
  m.step = root.get_int("step");
  if (m.step < 0) fail(Exit::data, "{}negative step", root.at("step").where());
  m.state = root.at("state");
  for (const JsonValue& f : root.at("files").items()) m.files.push_back(file_from_json(f));
  std::map<std::string_view, const CheckpointFile*> by_name;
  for (const CheckpointFile& f : m.files) {
    if (!by_name.emplace(f.name, &f).second) fail(Exit::data, "{}: the file {} occurs twice", source, f.name);
  }
  for (const CheckpointFile& f : m.files)
    if (f.rank >= 0 && !by_name.contains(rank_manifest_name(f.rank)))
      fail(Exit::data, "{}: {} is described by {}, which is not a file of this checkpoint", source, f.name,
           rank_manifest_name(f.rank));
  for (const auto& [name, value] : root.at("tensors").members()) {
    LogicalTensor t = tensor_from_json(name, value);
    for (const CheckpointShard& s : t.shards) {
      const auto file = by_name.find(s.file);
      if (file == by_name.end()) {
        fail(Exit::data, "{}tensor \"{}\" lies in {}, which is not a file of this checkpoint", value.where(),
             name.substr(0, 200), s.file);
      }
      // Bounds later allocations for a tensor by the sizes of files.
      if (static_cast<uint64_t>(s.count) > file->second->bytes / static_cast<uint64_t>(size_of(t.dtype))) {
        fail(Exit::data, "{}tensor \"{}\": {} elements cannot lie in the {} bytes of {}", value.where(),
             name.substr(0, 200), s.count, file->second->bytes, s.file);
      }
    }
    m.tensors.emplace(name, std::move(t));
  }
  return m;
}

}  // namespace nrl
