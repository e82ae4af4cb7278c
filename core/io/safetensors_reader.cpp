#include <algorithm>
#include <bit>
#include <cstring>

#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/json.h"
#include "core/io/safetensors.h"
#include "core/io/safetensors_common.h"

namespace nrl {
namespace {

static_assert(std::endian::native == std::endian::little,
              "safetensors data is little-endian and read as it is");

constexpr size_t kMaxDimensions = 32;

std::string quoted(std::string_view name) {
  return fmt::format("tensor \"{}\"", name.substr(0, 200));
}
// Argument-dependent lookup would take std::quoted.
std::string quoted(const std::string& name) {
  return quoted(std::string_view(name));
}

}  // namespace

int64_t TensorInfo::row_elements() const {
  if (shape.empty()) return 1;
  return *checked_product({shape.begin() + 1, shape.end()});
}

SafetensorsFile::SafetensorsFile(const std::string& path, File::Links links)
    : file_(File::open_read(path, links)) {
  const uint64_t size = file_.size();
  if (size < 8) fail(Exit::data, "{}: {} bytes, a safetensors file has at least 8", path, size);
  uint64_t header = 0;
  file_.pread_all(&header, 8, 0);
  if (header > kSafetensorsMaxHeader) {
    fail(Exit::data, "{}: header length {}, more than the format's limit of {}", path, header,
         kSafetensorsMaxHeader);
  }
  if (header > size - 8) {
    fail(Exit::data, "{}: header length {}, but the file has only {} bytes: not safetensors, or cut off",
         path, header, size);
  }
  std::string json(header, '\0');
  file_.pread_all(json.data(), header, 8);
  data_offset_ = 8 + header;
  parse_header(json);
  check_layout(size - data_offset_);
  for (size_t i = 0; i < tensors_.size(); ++i) by_name_.emplace(tensors_[i].name, i);
}

void SafetensorsFile::parse_header(std::string_view json) {
  JsonLimits limits;
  limits.depth = 3;
  limits.text_bytes = kSafetensorsMaxHeader;
  limits.values =
      std::min<size_t>(4096 + json.size() / 4, limits.values);  // a tensor takes > 4 bytes per value
  const JsonValue root = parse_json(json, path() + " (header)", limits);
  for (const auto& [name, value] : root.members()) {
    if (name == "__metadata__") {
      for (const auto& [key, text] : value.members()) metadata_[key] = text.as_string();
      continue;
    }
    TensorInfo t;
    t.name = name;
    t.dtype_name = value.get_string("dtype");
    const auto* dtype = detail::find_safetensors_dtype(t.dtype_name);
    if (dtype == nullptr) {
      fail(Exit::data, "{}{} has the unknown dtype \"{}\"", value.where(), quoted(name),
           t.dtype_name.substr(0, 40));
    }
    t.dtype = dtype->ours;
    const auto& shape = value.at("shape").items();
    if (shape.size() > kMaxDimensions) {
      fail(Exit::data, "{}{} has {} dimensions, more than {}", value.where(), quoted(name), shape.size(),
           kMaxDimensions);
    }
    for (const JsonValue& d : shape) {
      t.shape.push_back(d.as_int());
      if (t.shape.back() < 0) fail(Exit::data, "{}{}: negative dimension", d.where(), quoted(name));
    }
    const auto& offsets = value.at("data_offsets").items();
    if (offsets.size() != 2) {
      fail(Exit::data, "{}{}: data_offsets has {} entries, not 2", value.where(), quoted(name),
           offsets.size());
    }
    t.begin = offsets[0].as_uint();
    t.end = offsets[1].as_uint();
    if (value.members().size() != 3) {
      fail(Exit::data, "{}{} has more than dtype, shape and data_offsets", value.where(), quoted(name));
    }
    const std::optional<int64_t> bits = checked_product(t.shape, dtype->bits);
    if (!bits) {
      fail(Exit::data, "{}{}: the shape {} overflows", value.where(), quoted(name), shape_text(t.shape));
    }
    if (*bits % 8 != 0) {
      fail(Exit::data, "{}{}: {} of {} do not fill whole bytes", value.where(), quoted(name),
           shape_text(t.shape), t.dtype_name);
    }
    if (t.end < t.begin || t.end - t.begin != static_cast<uint64_t>(*bits) / 8) {
      fail(Exit::data, "{}{}: data_offsets [{}, {}] are not the {} bytes of {} {}", value.where(),
           quoted(name), t.begin, t.end, *bits / 8, t.dtype_name, shape_text(t.shape));
    }
    tensors_.push_back(std::move(t));
  }
}

void SafetensorsFile::check_layout(uint64_t data_bytes) {
  std::sort(tensors_.begin(), tensors_.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  uint64_t expected = 0;
  for (const TensorInfo& t : tensors_) {
    if (t.begin != expected) {
      fail(Exit::data, "{}: {} starts at byte {} of the data, but the tensors before it end at {}: {}",
           path(), quoted(t.name), t.begin, expected, t.begin < expected ? "they overlap" : "there is a gap");
    }
    if (t.end > data_bytes) {
      fail(Exit::data, "{}: {} ends at byte {} of the data, but the file has only {}: it is cut off", path(),
           quoted(t.name), t.end, data_bytes);
    }
    expected = t.end;
  }
  if (expected != data_bytes) {
    fail(Exit::data, "{}: {} bytes after the last tensor", path(), data_bytes - expected);
  }
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &tensors_[it->second];
}

const TensorInfo& SafetensorsFile::at(std::string_view name) const {
  const TensorInfo* t = find(name);
  if (t == nullptr) fail(Exit::data, "{}: there is no {}", path(), quoted(name));
  return *t;
}

void SafetensorsFile::read(const TensorInfo& tensor, void* dst, size_t bytes) const {
  NRL_CHECK(bytes == tensor.bytes(), "{} has {} bytes, not {}", quoted(tensor.name), tensor.bytes(), bytes);
  read_bytes(tensor, 0, dst, bytes);
}

void SafetensorsFile::read_bytes(const TensorInfo& tensor, uint64_t offset, void* dst, size_t bytes) const {
  NRL_CHECK(offset <= tensor.bytes() && bytes <= tensor.bytes() - offset, "bytes {}+{} of {} with {} bytes",
            offset, bytes, quoted(tensor.name), tensor.bytes());
  file_.pread_all(dst, bytes, data_offset_ + tensor.begin + offset);
}

void SafetensorsFile::read_rows(const TensorInfo& tensor, int64_t first, int64_t count, void* dst) const {
  const int64_t rows = tensor.shape.empty() ? 1 : tensor.shape[0];
  NRL_CHECK(first >= 0 && count >= 0 && first <= rows && count <= rows - first, "rows {}+{} of {} {}", first,
            count, quoted(tensor.name), shape_text(tensor.shape));
  if (rows == 0) return;
  const uint64_t row_bytes = tensor.bytes() / static_cast<uint64_t>(rows);
  if (tensor.bytes() % static_cast<uint64_t>(rows) != 0) {
    fail(Exit::data, "{}: rows of {} are no whole bytes", path(), quoted(tensor.name));
  }
  read_bytes(tensor, row_bytes * static_cast<uint64_t>(first), dst, row_bytes * static_cast<uint64_t>(count));
}

SafetensorsSet::SafetensorsSet(const std::string& path, std::string_view stem) : path_(path) {
  constexpr std::string_view index_suffix = ".safetensors.index.json";
  if (!is_directory(path)) {
    if (path.ends_with(index_suffix)) {
      open_index(path);
    } else {
      add_file(path);
    }
    return;
  }
  const std::string single = join_path(path, fmt::format("{}.safetensors", stem));
  const std::string index = join_path(path, fmt::format("{}{}", stem, index_suffix));
  if (path_exists(single)) {
    add_file(single);
  } else if (path_exists(index)) {
    open_index(index);
  } else {
    fail(Exit::no_input, "{}: holds neither {}.safetensors nor {}{}", path, stem, stem, index_suffix);
  }
}

void SafetensorsSet::add_file(const std::string& path) {
  files_.push_back(std::make_unique<SafetensorsFile>(path));
  const SafetensorsFile* file = files_.back().get();
  for (const TensorInfo& t : file->tensors()) {
    const auto [it, added] = by_name_.emplace(t.name, Entry{file, &t});
    if (!added) {
      fail(Exit::data, "{}: {} is also in {}", path, quoted(t.name), it->second.file->path());
    }
  }
}

void SafetensorsSet::open_index(const std::string& path) {
  JsonLimits limits;
  limits.depth = 8;
  const JsonValue index = read_json(path, limits);
  const JsonObject& weight_map = index.at("weight_map").members();
  std::map<std::string, std::string> opened;  // name in the index -> path
  for (const auto& [name, value] : weight_map) {
    const std::string& file = value.as_string();
    if (!is_plain_name(file)) {
      fail(Exit::data, "{}\"{}\" is no plain file name: the shards must lie beside the index", value.where(),
           file.substr(0, 200));
    }
    const std::string shard = join_path(parent_path(path), file);
    if (opened.emplace(file, shard).second) {
      if (!path_exists(shard)) fail(Exit::no_input, "{}missing shard {}", value.where(), shard);
      add_file(shard);
    }
  }
  for (const auto& [name, value] : weight_map) {
    const auto entry = find(name);
    const std::string& shard = opened.at(value.as_string());
    if (!entry || entry->file->path() != shard) {
      fail(Exit::data, "{}{} is not in {}", value.where(), quoted(name), shard);
    }
  }
}

std::optional<SafetensorsSet::Entry> SafetensorsSet::find(std::string_view name) const {
  const auto it = by_name_.find(name);
  if (it == by_name_.end()) return {};
  return it->second;
}

SafetensorsSet::Entry SafetensorsSet::at(std::string_view name) const {
  if (const auto entry = find(name)) return *entry;
  const std::vector<std::string> all = names();
  const std::vector<std::string_view> views(all.begin(), all.end());
  const std::string_view near = nearest(name, views);
  fail(Exit::data, "{}: there is no {}{}", path_, quoted(name),
       near.empty() ? std::string() : fmt::format(" (did you mean \"{}\"?)", near));
}

std::vector<std::string> SafetensorsSet::names() const {
  std::vector<std::string> out;
  for (const auto& [name, entry] : by_name_) out.push_back(name);
  return out;
}

uint64_t SafetensorsSet::total_bytes() const {
  uint64_t sum = 0;
  for (const auto& [name, entry] : by_name_) sum += entry.tensor->bytes();
  return sum;
}

void SafetensorsSet::read(std::string_view name, void* dst, size_t bytes) const {
  const Entry e = at(name);
  e.file->read(*e.tensor, dst, bytes);
}

void SafetensorsSet::read_rows(std::string_view name, int64_t first, int64_t count, void* dst) const {
  const Entry e = at(name);
  e.file->read_rows(*e.tensor, first, count, dst);
}

}  // namespace nrl
