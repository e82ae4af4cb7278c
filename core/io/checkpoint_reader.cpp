#include "core/io/checkpoint_reader.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <unordered_map>
#include <utility>

#include "core/base/text.h"
#include "core/io/atomic_file.h"
#include "core/io/crc32c.h"

namespace nrl {
namespace {

constexpr size_t cached_chunks = 32;
constexpr size_t max_problems_of_file = 3;

void list_names(std::string& text, std::string_view what, const std::vector<std::string>& names) {
  if (!names.empty()) text += fmt::format("; {} {}: {}", names.size(), what, joined(names));
}

// Runs `read`, whose errors mean that the checkpoint is damaged.
template <class Read>
decltype(auto) from_checkpoint(const Read& read) {
  try {
    return read();
  } catch (const CheckpointDamage&) {
    throw;
  } catch (const Error& e) {
    if (e.code() == Exit::internal) throw;
    throw CheckpointDamage(e.code(), e.what());
  }
}

// Compares existence and size with the manifest's entry, without reading the content; empty: they agree.
std::string size_problem(const std::string& path, const CheckpointFile& entry) {
  if (!path_exists(path)) return fmt::format("{}: missing", path);
  try {
    const uint64_t size = File::open_read(path, File::Links::refuse).size();
    return size == entry.bytes
               ? ""
               : fmt::format("{}: size {} != {} in {}", path, size, entry.bytes, manifest_name);
  } catch (const Error& e) {
    return e.what();
  }
}

}  // namespace

OpenedManifest open_manifest(const std::string& path, int part, int parts) {
  NRL_CHECK(part >= 0 && part < parts, "part {} of {}", part, parts);
  OpenedManifest opened;
  const std::string file = join_path(path, manifest_name);
  try {
    if (!path_exists(file)) fail(Exit::data, "{}: missing", file);
    opened.manifest =
        CheckpointManifest::from_text(read_file(file, max_manifest_bytes, File::Links::refuse), file);
  } catch (const Error& e) {
    opened.problems.push_back(e.what());
    return opened;
  }
  const size_t end = path.find_last_not_of('/');
  const std::string trimmed = path.substr(0, end == std::string::npos ? 0 : end + 1);
  const auto named = parse_step_directory_name(trimmed.substr(trimmed.rfind('/') + 1));
  if (named && *named != opened.manifest.step)
    opened.problems.push_back(fmt::format("{}: is of step {}, but the directory is of step {}", file,
                                          opened.manifest.step, *named));
  const std::vector<CheckpointFile>& files = opened.manifest.files;
  for (auto i = static_cast<size_t>(part); i < files.size(); i += static_cast<size_t>(parts)) {
    const CheckpointFile& entry = files[i];
    std::string problem = size_problem(join_path(path, entry.name), entry);
    if (problem.empty()) continue;
    opened.problems.push_back(std::move(problem));
    opened.unusable.insert(entry.name);
  }
  return opened;
}

namespace {

CheckpointManifest usable_manifest(const std::string& path, int part, int parts) {
  if (!is_directory(path)) fail(Exit::no_input, "{}: no such checkpoint directory", path);
  OpenedManifest opened = open_manifest(path, part, parts);
  if (!opened.problems.empty()) throw CheckpointDamage(Exit::data, joined(opened.problems, "\n"));
  return std::move(opened.manifest);
}

}  // namespace

CheckpointReader::CheckpointReader(const std::string& path, int part, int parts)
    : CheckpointReader(path, usable_manifest(path, part, parts)) {}

CheckpointReader::CheckpointReader(std::string path, CheckpointManifest manifest)
    : path_(std::move(path)), manifest_(std::move(manifest)), sums_(manifest_), verified_(sums_.count()) {}

std::string CheckpointReader::files_of(std::string_view name) {
  constexpr size_t most = 3;
  std::set<std::string> files;
  const OpenTensor& tensor = open(name);
  const size_t pieces = tensor.tensor->shards.size() + tensor.pieces.elsewhere.size();
  for (uint32_t i = 0; i < pieces && files.size() <= most; ++i)
    files.insert(join_path(path_, shard_of(name, tensor, i).file));
  const std::vector<std::string> list(files.begin(), files.end());
  return joined(list, ", ", most);
}

const LogicalTensor* CheckpointReader::find(std::string_view name) const {
  const auto it = manifest_.tensors.find(std::string(name));
  return it == manifest_.tensors.end() ? nullptr : &it->second;
}

const LogicalTensor& CheckpointReader::at(std::string_view name) const {
  const LogicalTensor* t = find(name);
  if (t == nullptr) fail(Exit::data, "{}: there is no tensor \"{}\"", manifest_path(), name);
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
  if (!text.empty()) fail(Exit::data, "{}: does not match this model: {}", manifest_path(), text.substr(2));
}

namespace {

// tensor_pieces(), with the manifest's path in front of an error.
TensorPieces covering_pieces(const std::string& manifest, std::string_view name,
                             const LogicalTensor& tensor) {
  try {
    return tensor_pieces(name, tensor);
  } catch (const Error& e) {
    throw CheckpointDamage(e.code(), fmt::format("{}: {}", manifest, e.what()));
  }
}

// The content of a file without tensors, verified.
std::string read_entry(const std::string& path, const CheckpointFile& entry) {
  std::string text = read_file(path, entry.bytes, File::Links::refuse);
  const uint32_t crc = crc32c(text.data(), text.size());
  if (text.size() != entry.bytes || crc != entry.crc32c)
    fail(Exit::data, "{}: damaged: {} bytes, CRC-32C {:08x}; {} bytes, {:08x} in {}", path, text.size(), crc,
         entry.bytes, entry.crc32c, manifest_name);
  return text;
}

}  // namespace

const CheckpointReader::OpenTensor& CheckpointReader::open(std::string_view name) {
  if (open_.tensor == nullptr || open_name_ != name) {
    open_ = OpenTensor();
    const LogicalTensor& tensor = at(name);
    open_.pieces = covering_pieces(manifest_path(), name, tensor);
    open_.tensor = &tensor;
    open_name_ = name;
    cache_.clear();
  }
  return open_;
}

// The manifest of a rank, read once.
const CheckpointManifest& CheckpointReader::of_rank(int rank) {
  if (const auto found = of_ranks_.find(rank); found != of_ranks_.end()) return *found->second;
  std::unique_ptr<CheckpointManifest> read;
  const std::string name = rank_manifest_name(rank), path = join_path(path_, name);
  from_checkpoint([&] {
    const CheckpointFile* entry = manifest_.find_file(name);
    if (!entry) fail(Exit::data, "{}: there is no file {}", manifest_path(), name);
    auto parsed =
        std::make_unique<CheckpointManifest>(CheckpointManifest::from_text(read_entry(path, *entry), path));
    if (parsed->step != manifest_.step)
      fail(Exit::data, "{}: damaged: it is of step {}, {} of {}", path, parsed->step, manifest_name,
           manifest_.step);
    try {
      sums_.add(*parsed, rank);
    } catch (const Error& e) {
      fail(e.code(), "{}", join_path(path_, e.what()));
    }
    read = std::move(parsed);
  });
  verified_[sums_.number(name)] = 1;
  return *of_ranks_.emplace(rank, std::move(read)).first->second;
}

// Piece `piece` of an open tensor, with its file and checksums.
const CheckpointShard& CheckpointReader::shard_of(std::string_view name, const OpenTensor& open,
                                                  uint32_t piece) {
  const LogicalTensor& here = *open.tensor;
  if (piece < here.shards.size()) return here.shards[piece];
  const PiecePlace& place = open.pieces.elsewhere[piece - here.shards.size()];
  const CheckpointManifest& manifest = of_rank(place.rank);
  const auto found = manifest.tensors.find(std::string(name));
  if (found != manifest.tensors.end() && found->second.dtype == here.dtype &&
      found->second.shape == here.shape)
    for (const CheckpointShard& s : found->second.shards)
      if (PiecePlace{place.rank, s.offset, s.count, s.run, s.stride} == place) return s;
  throw CheckpointDamage(
      Exit::data,
      fmt::format("{}: damaged: it does not have the piece of tensor \"{}\" at {} with {} elements, "
                  "which is in {}",
                  join_path(path_, rank_manifest_name(place.rank)), name, place.offset, place.count,
                  manifest_name));
}

const SafetensorsFile& CheckpointReader::file(const std::string& name) {
  auto it = files_.find(name);
  if (it != files_.end()) return *it->second;
  const std::string path = join_path(path_, name);
  try {
    it = files_.emplace(name, std::make_unique<SafetensorsFile>(path, File::Links::refuse)).first;
  } catch (const Error& e) {
    // The file was sound when it was written.
    std::string_view what = e.what();
    if (e.code() != Exit::data || !what.starts_with(path + ": ")) throw CheckpointDamage(e.code(), e.what());
    throw CheckpointDamage(e.code(), fmt::format("{}: damaged: {}", path, what.substr(path.size() + 2)));
  }
  return *it->second;
}

const TensorInfo& CheckpointReader::stored(const LogicalTensor& tensor, const CheckpointShard& shard,
                                           const SafetensorsFile*& file) {
  file = &this->file(shard.file);
  const TensorInfo* info = file->find(shard.key);
  if (!info)
    fail(Exit::data, "{}: damaged: there is no tensor \"{}\", which is in {}", file->path(), shard.key,
         manifest_name);
  if (info->dtype != tensor.dtype || info->elements() != shard.count) {
    fail(Exit::data, "{}: damaged: tensor \"{}\" is {} {}, but {} says {} elements of {}", file->path(),
         shard.key, info->dtype_name, shape_text(info->shape), manifest_name, shard.count,
         name_of(tensor.dtype));
  }
  return *info;
}

void CheckpointReader::read_chunk(std::string_view name, const LogicalTensor& tensor,
                                  const CheckpointShard& shard, uint64_t chunk, char* dst, uint64_t bytes) {
  const SafetensorsFile* file = nullptr;
  const TensorInfo& info = stored(tensor, shard, file);
  file->read_bytes(info, chunk * crc_chunk_bytes, dst, bytes);
  const uint32_t wanted = shard.chunks.empty() ? shard.crc32c : shard.chunks[chunk];
  const uint32_t actual = crc32c(dst, bytes);
  if (actual != wanted) {
    const uint64_t at = file->data_offset() + info.begin + chunk * crc_chunk_bytes;
    fail(Exit::data, "{}: damaged: tensor \"{}\", bytes {} to {}: CRC-32C {:08x}, {:08x} in {}", file->path(),
         name, at, at + bytes, actual, wanted, manifest_name);
  }
  verified_[sums_.number(shard, chunk)] = 1;
}

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
    std::string data(bytes, '\0');
    read_chunk(name, tensor, shard, chunk, data.data(), bytes);
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
      read_chunk(name, tensor, shard, chunk, dst, last - first);
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
  const std::vector<PieceRun>& runs = open_tensor.pieces.runs;
  auto run = std::upper_bound(runs.begin(), runs.end(), offset,
                              [](int64_t at, const PieceRun& r) { return at < r.begin; });
  if (run != runs.begin()) --run;
  const int64_t end = offset + count;
  for (int64_t at = offset; at < end; ++run) {
    const int64_t to = std::min(end, run->begin + run->count);
    const int64_t first = run->stored + (at - run->begin);
    from_checkpoint([&] {
      read_stored(name, tensor, shard_of(name, open_tensor, run->piece), static_cast<uint64_t>(first * unit),
                  static_cast<uint64_t>((to - at) * unit), out);
    });
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
    fail(Exit::data, "{}: tensor \"{}\" is {} {}; expected {} {}", manifest_path(), slice.name,
         name_of(tensor.dtype), shape_text(tensor.shape), name_of(slice.dtype), shape_text(slice.shape));
  nrl::read_slice(slice, tensor.dtype, [&](int64_t offset, int64_t count, void* out) {
    read_logical(slice.name, offset, count, out);
  });
}

std::string CheckpointReader::read_text(std::string_view file) const {
  const CheckpointFile* entry = manifest_.find_file(file);
  if (entry == nullptr) fail(Exit::data, "{}: there is no file {}", manifest_path(), file);
  return from_checkpoint([&] { return read_entry(join_path(path_, file), *entry); });
}

// The manifest has no checksum of a header. It follows from that of the file and those of the tensors, whose
// data is not read here.
void CheckpointReader::verify_header(const CheckpointFile& entry) {
  const SafetensorsFile& st = file(entry.name);
  std::unordered_map<std::string_view, const CheckpointShard*> by_key;
  for (const CheckpointShard* s : sums_.shards_of(entry)) by_key.emplace(s->key, s);
  uint32_t crc = st.header_crc();
  for (const TensorInfo& t : st.tensors()) {
    const auto shard = by_key.find(t.name);
    if (shard == by_key.end())
      fail(Exit::data, "{}: damaged: tensor \"{}\" is not in {}", st.path(), clipped(t.name), manifest_name);
    crc = crc32c_combine(crc, shard->second->crc32c, t.bytes());
  }
  if (crc != entry.crc32c)
    fail(Exit::data, "{}: damaged: the header, bytes 0 to {}: CRC-32C {:08x} of the file, {:08x} in {}",
         st.path(), st.data_offset(), crc, entry.crc32c, manifest_name);
}

void CheckpointReader::verify(const CheckpointSums::Sum& sum, std::string& buffer) {
  if (sum.shard) {
    buffer.resize(crc_chunk_bytes);
    read_chunk(sum.tensor, at(sum.tensor), *sum.shard, sum.chunk, buffer.data(), sum.bytes);
  } else if (sums_.shards_of(*sum.file).empty()) {
    (void)read_entry(join_path(path_, sum.file->name), *sum.file);
  } else {
    verify_header(*sum.file);
  }
}

std::vector<std::string> CheckpointReader::verify_rest(int part, int parts,
                                                       const std::set<std::string>& unusable,
                                                       const std::function<bool()>& stop) {
  std::vector<std::string> problems;
  std::string buffer;
  std::map<std::string, size_t> found;  // problems by file
  const auto report = [&](const std::string& file, const Error& e) {
    if (e.code() == Exit::internal) throw e;
    const bool known = std::find(problems.begin(), problems.end(), e.what()) != problems.end();
    if (!known && ++found[file] <= max_problems_of_file) problems.push_back(e.what());
  };
  const CheckpointFile* no_header = nullptr;
  std::set<int> unread;  // ranks whose manifest cannot be read
  const auto describe = [&](const CheckpointFile& file) {
    if (unusable.contains(rank_manifest_name(file.rank)) || unread.contains(file.rank)) return;
    try {
      (void)of_rank(file.rank);
    } catch (const Error& e) {
      unread.insert(file.rank);
      report(rank_manifest_name(file.rank), e);
    }
  };
  sums_.for_part(verified_, part, parts, describe, [&](size_t number, const CheckpointSums::Sum& sum) {
    if (unusable.contains(sum.file->name) || sum.file == no_header || (stop && stop())) return;
    try {
      verify(sum, buffer);
      verified_[number] = 1;
    } catch (const Error& e) {
      // Without its header a file's tensors cannot be found.
      if (!sum.shard || !files_.contains(sum.file->name)) no_header = sum.file;
      report(sum.file->name, e);
    }
  });
  size_t n = 0;
  for (const auto& [name, tensor] : manifest_.tensors) {
    if (n++ % static_cast<size_t>(parts) != static_cast<size_t>(part)) continue;
    try {
      const OpenTensor& opened = open(name);
      for (size_t i = 0; i < opened.pieces.elsewhere.size(); ++i) {
        // Several readers leave to each other what none of them had to open.
        const int rank = opened.pieces.elsewhere[i].rank;
        const bool usable = !unread.contains(rank) && !unusable.contains(rank_manifest_name(rank));
        if (parts == 1 ? usable : of_ranks_.contains(rank))
          (void)shard_of(name, opened, static_cast<uint32_t>(tensor.shards.size() + i));
      }
    } catch (const Error& e) {
      report(std::string(manifest_name), e);
    }
  }
  for (const auto& [name, count] : found)
    if (count > max_problems_of_file)
      problems.push_back(
          fmt::format("{}: and {} more", join_path(path_, name), count - max_problems_of_file));
  return problems;
}

}  // namespace nrl
