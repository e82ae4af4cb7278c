#include "core/io/checkpoint_sums.h"

#include <algorithm>

#include "core/io/safetensors.h"

namespace nrl {
namespace {

// A read costs about as much as this many bytes.
constexpr uint64_t bytes_of_a_read = 4096;

uint64_t cost(const CheckpointSums::Sum& sum) {
  return sum.bytes + bytes_of_a_read;
}

}  // namespace

CheckpointSums::CheckpointSums(const CheckpointManifest& manifest) {
  struct Piece {
    std::string_view tensor;
    const CheckpointShard* shard;
    uint64_t bytes;
  };
  std::unordered_map<std::string_view, std::vector<Piece>> pieces;  // by file
  for (const auto& [name, tensor] : manifest.tensors)
    for (const CheckpointShard& s : tensor.shards)
      pieces[s.file].push_back({name, &s, static_cast<uint64_t>(s.count * size_of(tensor.dtype))});
  for (const CheckpointFile& file : manifest.files) {
    Entry& whole = entries_.emplace_back();
    whole.sum.file = &file;
    whole.sum.bytes = file.bytes;
    ++count_;
    const auto held = pieces.find(file.name);
    if (held == pieces.end()) continue;
    const size_t header = entries_.size() - 1;
    uint64_t data = 0;
    for (const Piece& p : held->second) {
      shards_[&file].push_back(p.shard);
      first_[p.shard] = count_;
      const uint64_t chunks = (p.bytes + crc_chunk_bytes - 1) / crc_chunk_bytes;
      entries_.push_back({{&file, p.shard, p.tensor, 0, p.bytes}, chunks});
      count_ += chunks;
      data += p.bytes;
    }
    entries_[header].sum.bytes -= std::min(data, file.bytes);
  }
}

const std::vector<const CheckpointShard*>& CheckpointSums::shards_of(const CheckpointFile& file) const {
  static const std::vector<const CheckpointShard*> none;
  const auto it = shards_.find(&file);
  return it == shards_.end() ? none : it->second;
}

void CheckpointSums::for_each_left(const std::vector<uint8_t>& done,
                                   const std::function<void(size_t, const Sum&)>& visit) const {
  size_t number = 0;
  for (const Entry& e : entries_)
    for (uint64_t chunk = 0; chunk < e.chunks; ++chunk, ++number) {
      if (done[number] != 0) continue;
      Sum sum = e.sum;
      sum.chunk = chunk;
      if (sum.shard) sum.bytes = std::min(crc_chunk_bytes, e.sum.bytes - chunk * crc_chunk_bytes);
      visit(number, sum);
    }
}

void CheckpointSums::for_part(const std::vector<uint8_t>& done, int part, int parts,
                              const std::function<void(size_t, const Sum&)>& visit) const {
  uint64_t total = 0;
  for_each_left(done, [&](size_t, const Sum& sum) { total += cost(sum); });
  const uint64_t share = total / static_cast<uint64_t>(parts), begin = share * static_cast<uint64_t>(part),
                 end = part + 1 == parts ? total : begin + share;
  uint64_t at = 0;
  for_each_left(done, [&](size_t number, const Sum& sum) {
    if (at >= begin && at < end) visit(number, sum);
    at += cost(sum);
  });
}

}  // namespace nrl
