#include "apps/state/state_pieces.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace nrl::train {

using model::Part;

ShardSpec StatePiece::shard() const {
  if (count == *checked_product(shape)) return ShardSpec::whole(name, dtype, shape);
  ShardSpec s = ShardSpec::flat(fmt::format("{}@{}", name, offset), name, dtype, shape, offset, count);
  if (!flat()) s.run = run, s.stride = stride;
  return s;
}

namespace {

// Appends elements [begin, end) of a part as pieces: one flat range if the part has whole rows of the logical
// tensor, else the rest of the first row, whole rows and the start of the last row.
void add_pieces(const Part& part, int64_t begin, int64_t end, StatePiece piece,
                std::vector<StatePiece>& out) {
  const auto add = [&](int64_t to, int64_t run) {
    piece.offset = part.element(begin);
    piece.count = to - begin;
    piece.run = run, piece.stride = part.width();
    StatePiece* last = out.empty() ? nullptr : &out.back();
    const bool follows = last && last->name == piece.name && last->flat() && piece.flat() &&
                         last->offset + last->count == piece.offset && last->memory == piece.memory &&
                         last->element + last->count == piece.element &&
                         last->weight + last->count == piece.weight;
    if (follows)
      last->run = last->stride = last->count += piece.count;
    else
      out.push_back(piece);
    piece.element += to - begin;
    piece.weight += to - begin;
    begin = to;
  };
  if (part.columns == part.width()) return add(end, end - begin);
  part.for_each_rows(begin, end,
                     [&](int64_t first, int64_t to) { add(to, std::min(to - first, part.columns)); });
}

}  // namespace

void add_state(const model::ParameterList& parameters, const StateMemory& memory,
               std::span<const plan::OwnedRange> ranges, bool counted_only,
               const std::function<std::string(const Part&)>& name, std::vector<StatePiece>& pieces) {
  for (const plan::OwnedRange& range : ranges) {
    if (counted_only && !range.counted) continue;
    parameters.all[range.parameter].for_each_part(
        range.offset, range.count, [&](const Part& part, int64_t begin, int64_t end) {
          StatePiece piece{name(part), part.global};
          piece.memory = &memory;
          piece.element = range.state + part.offset + begin - range.offset;
          piece.weight = range.weight + part.offset + begin - range.offset;
          add_pieces(part, begin, end, std::move(piece), pieces);
        });
  }
}

namespace {

MemoryRange range_of(const Tensor& t, int64_t first, int64_t count) {
  return {static_cast<const char*>(t.data) + first * size_of(t.dtype),
          static_cast<size_t>(count * size_of(t.dtype))};
}

}  // namespace

StateReader::StateReader(const std::vector<StatePiece>& pieces, Staging* staging) : staging_(staging) {
  if (!staging) return;
  std::vector<MemoryRange> ranges;
  for (const StatePiece& piece : pieces)
    for (int64_t at = 0; at < piece.count; at += count_at(piece, at))
      for (const MemoryRange& range : {companion(piece, at), values(piece, at)})
        if (range.bytes > 0) ranges.push_back(range);
  staging->read_ahead(std::move(ranges));
}

StateReader::Window StateReader::next(const StatePiece& piece, int64_t at) {
  const int64_t count = count_at(piece, at);
  const StateMemory& m = *piece.memory;
  if (const MemoryRange range = companion(piece, at); range.bytes > 0) {
    const auto* bytes = static_cast<const std::byte*>(fetch(range));
    companion_.assign(bytes, bytes + range.bytes);
  }
  const void* const data = fetch(values(piece, at));
  if (!m.encoded()) return {static_cast<const float*>(data), count};
  buffer_.resize(static_cast<size_t>(count));
  if (m.weights)
    ops::join_master(reinterpret_cast<const bf16*>(companion_.data()), static_cast<const uint16_t*>(data),
                     count, buffer_.data());
  else
    ops::decode_moments(m.values.dtype, data, reinterpret_cast<const uint8_t*>(companion_.data()),
                        (piece.element + at) % ops::moment_block, count, buffer_.data());
  return {buffer_.data(), count};
}

int64_t StateReader::count_at(const StatePiece& piece, int64_t at) const {
  int64_t most = piece.memory->encoded() ? state_window : piece.count;
  if (staging_)
    most = std::min(most, static_cast<int64_t>(staging_->piece_bytes()) /
                              std::max<int64_t>(size_of(piece.memory->values.dtype), 2));
  return std::min(most, piece.count - at);
}

MemoryRange StateReader::values(const StatePiece& piece, int64_t at) const {
  const Tensor& t = piece.memory->values;
  return range_of(t, piece.element + at, count_at(piece, at));
}

// What the elements are decoded with: scales or weights.
MemoryRange StateReader::companion(const StatePiece& piece, int64_t at) const {
  const StateMemory& m = *piece.memory;
  const int64_t first = piece.element + at, count = count_at(piece, at);
  if (m.weights) return range_of(m.weights, piece.weight + at, count);
  if (!m.scales) return {};
  const int64_t block = first / ops::moment_block;
  return range_of(m.scales, block, ops::moment_blocks(first + count) - block);
}

namespace {

void copy_to(Staging* staging, const Tensor& t, int64_t first, int64_t count, const void* from) {
  fill_memory(staging, static_cast<char*>(t.data) + first * size_of(t.dtype), count, size_of(t.dtype),
              [&](int64_t at, int64_t n, void* out) {
                std::memcpy(out, static_cast<const char*>(from) + at * size_of(t.dtype),
                            static_cast<size_t>(n * size_of(t.dtype)));
              });
}

}  // namespace

void write_encoded(const StateMemory& m, int64_t first, const std::vector<float>& x, Staging* staging) {
  const auto n = static_cast<int64_t>(x.size());
  std::vector<std::byte> values(x.size() * static_cast<size_t>(size_of(m.values.dtype)));
  std::vector<uint8_t> scales(static_cast<size_t>(ops::moment_blocks(n)));
  if (m.weights)
    ops::split_master(x.data(), n, reinterpret_cast<uint16_t*>(values.data()));
  else
    ops::encode_moments(m.values.dtype, x.data(), n, values.data(), scales.data());
  copy_to(staging, m.values, first, n, values.data());
  if (m.scales) copy_to(staging, m.scales, first / ops::moment_block, ops::moment_blocks(n), scales.data());
}

}  // namespace nrl::train
