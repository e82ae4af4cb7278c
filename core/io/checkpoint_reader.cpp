#include "core/io/checkpoint_reader.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "core/base/error.h"
#include "core/io/checkpoint_store.h"
#include "core/io/crc32c.h"

namespace nrl {
namespace {

constexpr size_t cached_chunks = 32;
constexpr size_t most_listed = 10;

void list_names(std::string& text, std::string_view what, const std::vector<std::string>& names) {
  if (names.empty()) return;
  const std::vector<std::string> shown(
      names.begin(), names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), most_listed)));
  text += fmt::format("; {} {}: {}{}", names.size(), what, fmt::join(shown, ", "),
                      names.size() > most_listed ? ", ..." : "");
}

}  // namespace

CheckpointReader::CheckpointReader(const std::string& path) : path_(path) {
  if (!is_directory(path)) fail(Exit::no_input, "{}: no such checkpoint directory", path);
  const std::vector<std::string> problems = validate_checkpoint(path, Validation::quick);
  if (!problems.empty()) fail(Exit::data, "{}", fmt::join(problems, "; "));
  const std::string file = join_path(path, manifest_name);
  manifest_ = CheckpointManifest::from_text(read_file(file, uint64_t{1} << 30, File::Links::refuse), file);
}

const LogicalTensor* CheckpointReader::find(std::string_view name) const {
  const auto it = manifest_.tensors.find(std::string(name));
  return it == manifest_.tensors.end() ? nullptr : &it->second;
}

const LogicalTensor& CheckpointReader::at(std::string_view name) const {
  const LogicalTensor* t = find(name);
  if (t == nullptr) fail(Exit::data, "{}: there is no tensor \"{}\"", path_, name);
  return *t;
}

void CheckpointReader::check_names(const std::vector<TensorSpec>& wanted, bool allow_more) const {
  std::vector<std::string> missing, different, unexpected;
  std::set<std::string_view> names;
  for (const TensorSpec& w : wanted) {
    names.insert(w.name);
    const LogicalTensor* t = find(w.name);
    if (t == nullptr) {
      missing.push_back(w.name);
    } else if (t->dtype != w.dtype || t->shape != w.shape) {
      different.push_back(fmt::format("{} (stored {} {}, expected {} {})", w.name, name_of(t->dtype),
                                      shape_text(t->shape), name_of(w.dtype), shape_text(w.shape)));
    }
  }
  for (const auto& [name, tensor] : manifest_.tensors) {
    if (!allow_more && !names.contains(name)) unexpected.push_back(name);
  }
  std::string text;
  list_names(text, "missing", missing);
  list_names(text, "different", different);
  list_names(text, "unexpected", unexpected);
  if (!text.empty()) fail(Exit::data, "{}: does not match this model: {}", path_, text.substr(2));
}

const CheckpointReader::OpenTensor& CheckpointReader::open(std::string_view name) {
  if (open_.tensor == nullptr || open_name_ != name) {
    open_ = OpenTensor();
    const LogicalTensor& tensor = at(name);
    try {
      open_.runs = shard_runs(name, tensor);
    } catch (const Error& e) {
      fail(e.code(), "{}: {}", path_, e.what());
    }
    open_.tensor = &tensor;
    open_name_ = name;
    cache_.clear();
  }
  return open_;
}

const TensorInfo& CheckpointReader::stored(const LogicalTensor& tensor, const CheckpointShard& shard,
                                           const SafetensorsFile*& file) {
  auto it = files_.find(shard.file);
  if (it == files_.end()) {
    auto opened = std::make_unique<SafetensorsFile>(join_path(path_, shard.file), File::Links::refuse);
    it = files_.emplace(shard.file, std::move(opened)).first;
  }
  file = it->second.get();
  const TensorInfo& info = file->at(shard.key);
  if (info.dtype != tensor.dtype || info.elements() != shard.count) {
    fail(Exit::data, "{}: tensor \"{}\" is {} {}, but {} says {} elements of {}", file->path(), shard.key,
         info.dtype_name, shape_text(info.shape), manifest_name, shard.count, name_of(tensor.dtype));
  }
  return info;
}

namespace {

void check_chunk(std::string_view name, const CheckpointShard& shard, const SafetensorsFile& file,
                 const TensorInfo& info, uint64_t chunk, const char* data, uint64_t bytes) {
  const uint32_t wanted = shard.chunks.empty() ? shard.crc32c : shard.chunks[chunk];
  const uint32_t actual = crc32c(data, bytes);
  if (actual == wanted) return;
  const uint64_t at = file.data_offset() + info.begin + chunk * crc_chunk_bytes;
  fail(Exit::data, "{}: damaged: tensor \"{}\", bytes {} to {}: CRC-32C {:08x}, {:08x} in {}", file.path(),
       name, at, at + bytes, actual, wanted, manifest_name);
}

}  // namespace

const std::string& CheckpointReader::cached_chunk(std::string_view name, const LogicalTensor& tensor,
                                                  const CheckpointShard& shard, uint64_t chunk,
                                                  uint64_t bytes) {
  const std::pair key(&shard, chunk);
  auto it = cache_.find(key);
  if (it == cache_.end()) {
    if (cache_.size() >= cached_chunks) {
      cache_.erase(std::min_element(cache_.begin(), cache_.end(), [](const auto& a, const auto& b) {
        return a.second.last_use < b.second.last_use;
      }));
    }
    const SafetensorsFile* file = nullptr;
    const TensorInfo& info = stored(tensor, shard, file);
    std::string data(bytes, '\0');
    file->read_bytes(info, chunk * crc_chunk_bytes, data.data(), bytes);
    check_chunk(name, shard, *file, info, chunk, data.data(), bytes);
    it = cache_.emplace(key, Chunk{std::move(data), 0}).first;
  }
  it->second.last_use = ++clock_;
  return it->second.data;
}

void CheckpointReader::read_stored(std::string_view name, const LogicalTensor& tensor,
                                   const CheckpointShard& shard, uint64_t begin, uint64_t bytes, char* dst) {
  const uint64_t end = begin + bytes;
  const uint64_t total = static_cast<uint64_t>(shard.count) * static_cast<uint64_t>(size_of(tensor.dtype));
  for (uint64_t at = begin; at < end;) {
    const uint64_t chunk = at / crc_chunk_bytes, first = chunk * crc_chunk_bytes;
    const uint64_t last = std::min(total, first + crc_chunk_bytes);
    const uint64_t to = std::min(end, last);
    if (at == first && to == last) {
      const SafetensorsFile* file = nullptr;
      const TensorInfo& info = stored(tensor, shard, file);
      file->read_bytes(info, first, dst, last - first);
      check_chunk(name, shard, *file, info, chunk, dst, last - first);
    } else {
      std::memcpy(dst, cached_chunk(name, tensor, shard, chunk, last - first).data() + (at - first), to - at);
    }
    dst += to - at;
    at = to;
  }
}

void CheckpointReader::read_logical(std::string_view name, int64_t offset, int64_t count, void* dst) {
  const OpenTensor& open_tensor = open(name);
  const LogicalTensor& tensor = *open_tensor.tensor;
  const int64_t elements = *checked_product(tensor.shape);
  NRL_CHECK(offset >= 0 && count >= 0 && offset <= elements && count <= elements - offset,
            "elements {}+{} of tensor \"{}\" with {}", offset, count, name, elements);
  const int64_t unit = size_of(tensor.dtype);
  auto* out = static_cast<char*>(dst);
  auto run = std::upper_bound(open_tensor.runs.begin(), open_tensor.runs.end(), offset,
                              [](int64_t at, const ShardRun& r) { return at < r.begin; });
  if (run != open_tensor.runs.begin()) --run;
  const int64_t end = offset + count;
  for (int64_t at = offset; at < end; ++run) {
    const int64_t to = std::min(end, run->begin + run->count);
    const int64_t first = run->stored + (at - run->begin);
    read_stored(name, tensor, tensor.shards[run->shard], static_cast<uint64_t>(first * unit),
                static_cast<uint64_t>((to - at) * unit), out);
    out += (to - at) * unit;
    at = to;
  }
}

void CheckpointReader::read_logical(std::string_view name, void* dst, size_t bytes) {
  const LogicalTensor& tensor = at(name);
  const int64_t elements = *checked_product(tensor.shape);
  NRL_CHECK(bytes == static_cast<size_t>(elements * size_of(tensor.dtype)),
            "tensor \"{}\" has {} elements of {}", name, elements, name_of(tensor.dtype));
  read_logical(name, 0, elements, dst);
}

void CheckpointReader::read_slice(const TensorSlice& slice) {
  const LogicalTensor& tensor = at(slice.name);
  if (tensor.dtype != slice.dtype || tensor.shape != slice.shape)
    fail(Exit::data, "{}: tensor \"{}\" is {} {}; expected {} {}", path_, slice.name, name_of(tensor.dtype),
         shape_text(tensor.shape), name_of(slice.dtype), shape_text(slice.shape));
  nrl::read_slice(slice, tensor.dtype, [&](int64_t offset, int64_t count, void* out) {
    read_logical(slice.name, offset, count, out);
  });
}

std::string CheckpointReader::read_text(std::string_view file) const {
  const CheckpointFile* entry = manifest_.find_file(file);
  if (entry == nullptr) fail(Exit::data, "{}: there is no file {}", path_, file);
  const std::string path = join_path(path_, file);
  std::string text = read_file(path, entry->bytes, File::Links::refuse);
  if (text.size() != entry->bytes || crc32c(text.data(), text.size()) != entry->crc32c) {
    fail(Exit::data, "{}: damaged: size or checksum differs from {}", path, manifest_name);
  }
  return text;
}

}  // namespace nrl
