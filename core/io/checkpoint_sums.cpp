#include "core/io/checkpoint_sums.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/io/safetensors.h"

namespace nrl {
namespace {

// A read costs about as much as this many bytes.
constexpr uint64_t bytes_of_a_read = 4096;
constexpr size_t max_sums = size_t{1} << 30;

// Calls visit(file name, shard, tensor, bytes) for all pieces.
template <class Visit>
void each_piece(const CheckpointManifest& manifest, const Visit& visit) {
  for (const auto& [name, tensor] : manifest.tensors)
    for (const CheckpointShard& s : tensor.shards)
      visit(s.file, &s, std::string_view(name), static_cast<uint64_t>(s.count * size_of(tensor.dtype)));
}

}  // namespace

CheckpointSums::CheckpointSums(const CheckpointManifest& manifest) {
  std::unordered_map<std::string_view, std::vector<Piece>> pieces;  // by file
  std::unordered_map<std::string_view, size_t> sums;
  each_piece(manifest, [&](std::string_view file, const CheckpointShard* shard, std::string_view tensor,
                           uint64_t bytes) {
    const uint64_t chunks = (bytes + crc_chunk_bytes - 1) / crc_chunk_bytes;
    pieces[file].push_back({shard, tensor, bytes, chunks});
    sums[file] += chunks;
  });
  for (const CheckpointFile& file : manifest.files) {
    const bool described = file.rank < 0;
    const size_t count = described ? 1 + sums[file.name] : file.sums;
    if (count > max_sums - count_)
      fail(Exit::data, "{}: the files have more than {} checksums", manifest_name, max_sums);
    by_name_.emplace(file.name, files_.size());
    ++files_of_rank_[file.rank];
    files_.push_back({&file, count_, count, false, {}});
    count_ += count;
    if (described) describe(files_.back(), std::move(pieces[file.name]));
  }
}

void CheckpointSums::add(const CheckpointManifest& of_rank, int rank) {
  std::unordered_map<std::string_view, std::vector<Piece>> pieces;
  const CheckpointSums own(of_rank);
  for (const File& theirs : own.files_) {
    const auto at = by_name_.find(theirs.file->name);
    const CheckpointFile* known = at == by_name_.end() ? nullptr : files_[at->second].file;
    if (!known || known->rank != rank || known->bytes != theirs.file->bytes ||
        known->crc32c != theirs.file->crc32c || known->sums != theirs.count)
      fail(Exit::data, "{}: damaged: its file {} is not as in {}", rank_manifest_name(rank),
           theirs.file->name, manifest_name);
    describe(files_[at->second], theirs.pieces);
  }
  if (own.files_.size() != files_of_rank_[rank])
    fail(Exit::data, "{}: damaged: it describes {} files, {} in {}", rank_manifest_name(rank),
         own.files_.size(), files_of_rank_[rank], manifest_name);
}

void CheckpointSums::describe(File& file, std::vector<Piece> pieces) {
  size_t number = file.first + 1;
  for (const Piece& p : pieces) {
    first_[p.shard] = number;
    number += p.sums;
  }
  file.pieces = std::move(pieces);
  file.described = true;
}

std::vector<const CheckpointShard*> CheckpointSums::shards_of(const CheckpointFile& file) const {
  std::vector<const CheckpointShard*> out;
  for (const Piece& p : files_.at(by_name_.at(file.name)).pieces) out.push_back(p.shard);
  return out;
}

void CheckpointSums::for_part(const std::vector<uint8_t>& done, int part, int parts,
                              const std::function<void(const CheckpointFile&)>& describe,
                              const std::function<void(size_t, const Sum&)>& visit) const {
  const auto left_of = [&](const File& f) {
    const auto begin = done.begin() + static_cast<std::ptrdiff_t>(f.first);
    return static_cast<uint64_t>(std::count(begin, begin + static_cast<std::ptrdiff_t>(f.count), 0));
  };
  // The checksums of a file are of about as many bytes each: pieces without their manifest are not known.
  const auto cost_in = [&](const File& f) { return f.file->bytes / f.count + bytes_of_a_read; };
  uint64_t total = 0;
  for (const File& f : files_) total += left_of(f) * cost_in(f);
  const uint64_t share = total / static_cast<uint64_t>(parts), begin = share * static_cast<uint64_t>(part),
                 end = part + 1 == parts ? total : begin + share;
  uint64_t at = 0;
  for (const File& f : files_) {
    const uint64_t cost = cost_in(f), of_file = left_of(f) * cost;
    if (at + of_file <= begin || at >= end) {
      at += of_file;
      continue;
    }
    if (!f.described) describe(*f.file);
    size_t number = f.first;
    const auto next = [&](const Sum& sum) {
      if (done[number] == 0) {
        if (f.described && at >= begin && at < end) visit(number, sum);
        at += cost;
      }
      ++number;
    };
    uint64_t header = f.file->bytes;
    for (const Piece& p : f.pieces) header -= std::min(header, p.bytes);
    next({f.file, nullptr, {}, 0, header});
    for (const Piece& p : f.pieces)
      for (uint64_t chunk = 0; chunk < p.sums; ++chunk)
        next(
            {f.file, p.shard, p.tensor, chunk, std::min(crc_chunk_bytes, p.bytes - chunk * crc_chunk_bytes)});
    if (!f.described) at += of_file - (done[f.first] == 0 ? cost : 0);
  }
}

}  // namespace nrl
