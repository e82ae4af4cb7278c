#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/crc32c.h"
#include "core/io/json.h"
#include "core/io/safetensors.h"
#include "core/io/safetensors_common.h"

namespace nrl {
namespace {

static_assert(std::endian::native == std::endian::little,
              "safetensors data is little-endian and read without conversion");

using detail::quoted_tensor;

// Names weights in other formats in a directory without safetensors.
std::string other_weights(const std::string& directory) {
  for (const std::string& name : list_directory(directory))
    for (std::string_view suffix :
         {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx"})
      if (name.ends_with(suffix) && name != "training_args.bin")
        return fmt::format(
            "; {} is another format. Fix: save the model again with transformers: "
            "model.save_pretrained(DIR, safe_serialization=True)",
            clipped(name));
  return "";
}

}  // namespace

int64_t TensorInfo::row_elements() const {
  if (shape.empty()) return 1;
  return *checked_product({shape.begin() + 1, shape.end()});
}

SafetensorsFile::SafetensorsFile(const std::string& path, File::Links links) : file_(path, links) {
  read_header();
  std::sort(tensors_.begin(), tensors_.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  for (size_t i = 1; i < tensors_.size(); ++i)
    if (tensors_[i - 1].name == tensors_[i].name)
      fail(Exit::data, "{}: {} occurs twice", path, quoted_tensor(tensors_[i].name));
  check_layout(file_.size() - data_offset_);
  by_name_.resize(tensors_.size());
  std::iota(by_name_.begin(), by_name_.end(), 0u);
  std::sort(by_name_.begin(), by_name_.end(),
            [this](uint32_t a, uint32_t b) { return tensors_[a].name < tensors_[b].name; });
}

void SafetensorsFile::read_header() {
  const uint64_t size = file_.size();
  std::string head(std::min<uint64_t>(size, 64), '\0');
  file_.pread_all(head.data(), head.size(), 0);
  // Most other formats yield an impossible header length.
  const auto refuse = [&](const std::string& what) {
    const std::string foreign = detail::foreign_format(head);
    fail(Exit::data, "{}: {}", path(), foreign.empty() ? what : "not safetensors, but " + foreign);
  };
  if (size < 8) refuse(fmt::format("{} bytes, a safetensors file has at least 8", size));
  uint64_t header = 0;
  std::memcpy(&header, head.data(), 8);
  if (header > safetensors_max_header)
    refuse(
        fmt::format("header length {}, more than the format's limit of {}", header, safetensors_max_header));
  if (header > size - 8)
    refuse(fmt::format("header length {}, but the file has only {} bytes: not safetensors, or truncated",
                       header, size));
  // Some archives begin with a plausible length.
  if (const size_t first = head.find_first_not_of(" \t\r\n", 8);
      first != std::string::npos && head[first] != '{')
    refuse(fmt::format("byte {} of the header: expected an object", first - 7));
  std::string json(header, '\0');
  file_.pread_all(json.data(), header, 8);
  data_offset_ = 8 + header;
  header_crc_ = crc32c(json.data(), json.size(), crc32c(head.data(), 8));
  detail::SafetensorsHeader parsed = detail::parse_safetensors_header(json, path());
  tensors_ = std::move(parsed.tensors);
  metadata_ = std::move(parsed.metadata);
}

void SafetensorsFile::check_layout(uint64_t data_bytes) {
  std::sort(tensors_.begin(), tensors_.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  uint64_t expected = 0;
  for (const TensorInfo& t : tensors_) {
    if (t.begin != expected) {
      fail(Exit::data, "{}: {} starts at byte {} of the data, but the tensors before it end at {}: {}",
           path(), quoted_tensor(t.name), t.begin, expected,
           t.begin < expected ? "they overlap" : "there is a gap");
    }
    if (t.end > data_bytes) {
      fail(Exit::data, "{}: {} ends at byte {} of the data, but the file has only {}: truncated", path(),
           quoted_tensor(t.name), t.end, data_bytes);
    }
    expected = t.end;
  }
  if (expected != data_bytes) {
    fail(Exit::data, "{}: {} bytes after the last tensor", path(), data_bytes - expected);
  }
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto it = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                   [this](uint32_t i, std::string_view n) { return tensors_[i].name < n; });
  return it == by_name_.end() || tensors_[*it].name != name ? nullptr : &tensors_[*it];
}

const TensorInfo& SafetensorsFile::at(std::string_view name) const {
  const TensorInfo* t = find(name);
  if (t == nullptr) fail(Exit::data, "{}: there is no {}", path(), quoted_tensor(name));
  return *t;
}

void SafetensorsFile::read(const TensorInfo& tensor, void* dst, size_t bytes) const {
  NRL_CHECK(bytes == tensor.bytes(), "{} has {} bytes, not {}", quoted_tensor(tensor.name), tensor.bytes(),
            bytes);
  read_bytes(tensor, 0, dst, bytes);
}

void SafetensorsFile::read_bytes(const TensorInfo& tensor, uint64_t offset, void* dst, size_t bytes) const {
  NRL_CHECK(offset <= tensor.bytes() && bytes <= tensor.bytes() - offset, "bytes {}+{} of {} with {} bytes",
            offset, bytes, quoted_tensor(tensor.name), tensor.bytes());
  file_.pread_all(dst, bytes, data_offset_ + tensor.begin + offset);
}

void SafetensorsFile::read_rows(const TensorInfo& tensor, int64_t first, int64_t count, void* dst) const {
  const int64_t rows = tensor.shape.empty() ? 1 : tensor.shape[0];
  NRL_CHECK(first >= 0 && count >= 0 && first <= rows && count <= rows - first, "rows {}+{} of {} {}", first,
            count, quoted_tensor(tensor.name), shape_text(tensor.shape));
  if (rows == 0) return;
  const uint64_t row_bytes = tensor.bytes() / static_cast<uint64_t>(rows);
  if (tensor.bytes() % static_cast<uint64_t>(rows) != 0) {
    fail(Exit::data, "{}: rows of {} are not whole bytes", path(), quoted_tensor(tensor.name));
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
      sort_names();
    }
    return;
  }
  const std::string single = join_path(path, fmt::format("{}.safetensors", stem));
  const std::string index = join_path(path, fmt::format("{}{}", stem, index_suffix));
  if (path_exists(single)) {
    add_file(single);
    sort_names();
  } else if (path_exists(index)) {
    open_index(index);
  } else {
    fail(Exit::no_input, "{}: holds neither {}.safetensors nor {}{}{}", path, stem, stem, index_suffix,
         other_weights(path));
  }
}

void SafetensorsSet::add_file(const std::string& path) {
  files_.push_back(std::make_unique<SafetensorsFile>(path));
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
      fail(Exit::data, "{}\"{}\" is not a plain file name: shards must be in the index's directory",
           value.where(), clipped(file));
    }
    const std::string shard = join_path(parent_path(path), file);
    if (opened.emplace(file, shard).second) {
      if (!path_exists(shard)) fail(Exit::no_input, "{}missing shard {}", value.where(), shard);
      add_file(shard);
    }
  }
  sort_names();
  for (const auto& [name, value] : weight_map) {
    const auto entry = find(name);
    const std::string& shard = opened.at(value.as_string());
    if (!entry || entry->file->path() != shard) {
      fail(Exit::data, "{}{} is not in {}", value.where(), quoted_tensor(name), shard);
    }
  }
}

void SafetensorsSet::sort_names() {
  size_t count = 0;
  for (const auto& file : files_) count += file->tensors().size();
  by_name_.reserve(count);
  for (const auto& file : files_)
    for (const TensorInfo& t : file->tensors()) by_name_.push_back({file.get(), &t});
  std::sort(by_name_.begin(), by_name_.end(),
            [](const Entry& a, const Entry& b) { return a.tensor->name < b.tensor->name; });
  for (size_t i = 1; i < by_name_.size(); ++i)
    if (by_name_[i - 1].tensor->name == by_name_[i].tensor->name)
      fail(Exit::data, "{}: {} is also in {}", by_name_[i].file->path(),
           quoted_tensor(by_name_[i].tensor->name), by_name_[i - 1].file->path());
}

std::optional<SafetensorsSet::Entry> SafetensorsSet::find(std::string_view name) const {
  const auto it = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                   [](const Entry& e, std::string_view n) { return e.tensor->name < n; });
  if (it == by_name_.end() || it->tensor->name != name) return {};
  return *it;
}

SafetensorsSet::Entry SafetensorsSet::at(std::string_view name) const {
  if (const auto entry = find(name)) return *entry;
  const std::vector<std::string> all = names();
  const std::vector<std::string_view> views(all.begin(), all.end());
  const std::string_view near = nearest(name, views);
  fail(Exit::data, "{}: there is no {}{}", path_, quoted_tensor(name),
       near.empty() ? std::string() : fmt::format(" (did you mean \"{}\"?)", near));
}

std::vector<std::string> SafetensorsSet::names() const {
  std::vector<std::string> out;
  for (const Entry& entry : by_name_) out.push_back(entry.tensor->name);
  return out;
}

uint64_t SafetensorsSet::total_bytes() const {
  uint64_t sum = 0;
  for (const Entry& entry : by_name_) sum += entry.tensor->bytes();
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
