#include "apps/data/bpe.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <functional>

#include "apps/data/encode_progress.h"
#include "apps/data/piece_cache.h"
#include "apps/data/unicode.h"
#include "core/base/error.h"

namespace nrl::data {
namespace {

constexpr size_t short_piece = 48;  // up to this length a linear scan is faster than a heap

uint64_t mix(uint64_t key) {
  key ^= key >> 29;
  key *= 0xBF58476D1CE4E5B9ull;
  return key ^ key >> 32;
}

uint64_t next_instance() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

struct BpeModel::Workspace::State {
  struct Candidate {
    int32_t rank, left, result;
    bool operator>(const Candidate& o) const { return rank != o.rank ? rank > o.rank : left > o.left; }
  };
  PieceCache cache;
  std::vector<int32_t> ids, sizes, previous, next;
  std::vector<Candidate> heap;
};

BpeModel::Workspace::Workspace() : state_(std::make_unique<State>()) {}
BpeModel::Workspace::~Workspace() = default;
BpeModel::~BpeModel() = default;

BpeModel::BpeModel(const Options& options, std::unordered_map<std::string, int32_t> tokens,
                   const std::vector<Merge>& merges)
    : instance_(next_instance()), options_(options) {
  tokens_.reserve(tokens.size());
  for (auto& [text, id] : tokens) tokens_.emplace(text, id);
  for (int b = 0; b < 256; ++b)
    byte_ids_[b] =
        find(options.byte_symbols ? std::string(1, static_cast<char>(b)) : fmt::format("<0x{:02X}>", b));
  merges_.resize(std::bit_ceil(2 * merges.size() + 16));
  for (const Merge& merge : merges) {
    const uint64_t key =
        uint64_t{static_cast<uint32_t>(merge.left)} << 32 | static_cast<uint32_t>(merge.right);
    size_t at = mix(key) & (merges_.size() - 1);
    while (merges_[at].key != UINT64_MAX && merges_[at].key != key) at = (at + 1) & (merges_.size() - 1);
    // If a pair is listed twice, the later entry counts, as in Hugging Face's BPE.
    merges_[at] = {key, merge.rank, merge.result};
  }
  find_joins(merges);
  find_sizes();
}

void BpeModel::find_sizes() {
  const auto set = [&](int32_t id, size_t size) {
    if (sizes_.size() <= static_cast<size_t>(id)) sizes_.resize(static_cast<size_t>(id) + 1);
    sizes_[static_cast<size_t>(id)] = size <= UINT8_MAX ? static_cast<uint8_t>(size) : 0;
  };
  for (const auto& [text, id] : tokens_) set(id, text.size());
  // The text of these ids is not the text that they encode.
  if (!options_.byte_symbols && options_.byte_fallback)
    for (const int32_t id : byte_ids_)
      if (id >= 0) set(id, 1);
  if (options_.unknown >= 0) set(options_.unknown, 0);
}

void BpeModel::find_joins(const std::vector<Merge>& merges) {
  // A piece must remain whole if it is looked up as a token, if unknown tokens of two parts could fuse or be
  // reordered, or if a symbol without a token vanishes, so that its neighbors may merge.
  if (options_.ignore_merges) return;
  const bool all_bytes = std::all_of(byte_ids_.begin(), byte_ids_.end(), [](int32_t id) { return id >= 0; });
  const bool no_unknown = options_.byte_symbols ? all_bytes : options_.byte_fallback && all_bytes;
  if (!no_unknown && (options_.unknown < 0 || options_.byte_fallback || options_.fuse_unknown)) return;

  std::unordered_map<int32_t, std::string_view> texts;
  for (const auto& [text, id] : tokens_) texts.emplace(id, text);
  // The text of these ids is not the text that they encode.
  texts.erase(options_.unknown);
  if (!options_.byte_symbols && options_.byte_fallback)
    for (const int32_t id : byte_ids_) texts.erase(id);
  auto joins = std::make_unique<Joins>();
  for (const Merge& merge : merges) {
    const auto left = texts.find(merge.left), right = texts.find(merge.right);
    if (left == texts.end() || right == texts.end() || left->second.empty() || right->second.empty()) return;
    const auto last = static_cast<uint8_t>(left->second.back()),
               first = static_cast<uint8_t>(right->second.front());
    const bool marks = !options_.byte_symbols;
    joins->add(marks && left->second.ends_with(space_mark) ? Joins::mark : last,
               marks && right->second.starts_with(space_mark) ? Joins::mark : first);
  }
  joins_ = std::move(joins);
}

// The end of the part that begins at `begin`; adds to `marks` the number of space marks in it.
size_t BpeModel::part_end(std::string_view text, size_t begin, size_t& marks) const {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  size_t at = begin;
  if (options_.byte_symbols) {
    do ++at;
    while (at < text.size() && joins_->have(byte(at - 1), byte(at)));
    return at;
  }
  // The class of the character at `at`, and its end.
  const auto character = [&](size_t& end) {
    const uint8_t first = byte(at);
    if (first < 0x80) {
      end = at + 1;
      return first;
    }
    if (first == static_cast<uint8_t>(space_mark[0]) && text.substr(at).starts_with(space_mark)) {
      end = at + space_mark.size();
      return Joins::mark;
    }
    end = at;
    next_character(text, end);
    return first;
  };
  uint8_t previous = 0;
  while (at < text.size()) {
    size_t end;
    const uint8_t own = character(end);
    if (at > begin && !joins_->have(previous, own)) break;
    marks += own == Joins::mark;
    previous = own == Joins::mark ? own : byte(end - 1);
    at = end;
  }
  return at;
}

int32_t BpeModel::find(std::string_view token) const {
  const auto found = tokens_.find(token);
  return found == tokens_.end() ? -1 : found->second;
}

const BpeModel::MergeSlot* BpeModel::find_merge(int32_t left, int32_t right) const {
  const uint64_t key = uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  for (size_t at = mix(key) & (merges_.size() - 1);; at = (at + 1) & (merges_.size() - 1)) {
    if (merges_[at].key == key) return &merges_[at];
    if (merges_[at].key == UINT64_MAX) return nullptr;
  }
}

BpeModel::Workspace& BpeModel::workspace() const {
  thread_local uint64_t owner = 0;
  thread_local std::unique_ptr<Workspace> workspace;
  if (owner != instance_) {
    workspace = std::make_unique<Workspace>();
    owner = instance_;
  }
  return *workspace;
}

// `sizes`: if not null, receives the bytes of each symbol, skipped ones before it included.
int64_t BpeModel::symbols_of(std::string_view piece, std::vector<int32_t>& ids,
                             std::vector<int32_t>* sizes) const {
  ids.clear();
  if (sizes) sizes->clear();
  int64_t skipped = 0;
  size_t skipped_before = 0, pending_size = 0;
  const auto push = [&](int32_t id, size_t size) {
    ids.push_back(id);
    if (sizes) sizes->push_back(static_cast<int32_t>(skipped_before + size));
    skipped_before = 0;
  };
  // A pending unknown token may fuse with the next one. As in Hugging Face's BPE, byte tokens do
  // not flush it.
  bool pending_unknown = false;
  const auto flush_unknown = [&] {
    if (pending_unknown) push(options_.unknown, pending_size);
    pending_unknown = false;
    pending_size = 0;
  };
  for (size_t at = 0; at < piece.size();) {
    const size_t begin = at;
    int32_t id;
    if (options_.byte_symbols) {
      id = byte_ids_[static_cast<uint8_t>(piece[at++])];
    } else {
      next_character(piece, at);
      id = find(piece.substr(begin, at - begin));
    }
    const std::string_view symbol = piece.substr(begin, at - begin);
    const auto byte_id = [&](char byte) { return byte_ids_[static_cast<uint8_t>(byte)]; };
    if (id >= 0) {
      flush_unknown();
      push(id, symbol.size());
    } else if (!options_.byte_symbols && options_.byte_fallback &&
               std::all_of(symbol.begin(), symbol.end(), [&](char b) { return byte_id(b) >= 0; })) {
      for (const char b : symbol) push(byte_id(b), 1);
    } else if (options_.unknown >= 0) {
      if (!options_.fuse_unknown) flush_unknown();
      pending_unknown = true;
      pending_size += symbol.size();
    } else {
      skipped_before += symbol.size();
      skipped += static_cast<int64_t>(symbol.size());
    }
  }
  flush_unknown();
  return skipped;
}

// merge_short() and merge_long() set symbols to -1 that became part of the one before.
void BpeModel::merge_short(std::vector<int32_t>& ids) const {
  // Merge of the pair (i, next[i]): its rank, then i, so that the least key is the next merge.
  constexpr uint64_t no_merge = UINT64_MAX;
  std::array<uint64_t, short_piece> keys;
  std::array<int32_t, short_piece> results;
  std::array<uint8_t, short_piece> previous, next;
  const size_t count = ids.size();
  const auto look_up = [&](size_t i) {
    const MergeSlot* merge = next[i] < count ? find_merge(ids[i], ids[next[i]]) : nullptr;
    keys[i] = merge ? uint64_t{static_cast<uint32_t>(merge->rank)} << 8 | i : no_merge;
    results[i] = merge ? merge->result : 0;
  };
  for (size_t i = 0; i < count; ++i) {
    previous[i] = static_cast<uint8_t>(i - 1);  // of the first symbol: 255
    next[i] = static_cast<uint8_t>(i + 1);
    look_up(i);
  }
  while (true) {
    uint64_t best = no_merge;
    for (size_t i = 0; i < count; ++i) best = std::min(best, keys[i]);
    if (best == no_merge) break;
    const size_t i = best & 0xFF, right = next[i];
    ids[i] = results[i];
    ids[right] = -1;
    keys[right] = no_merge;
    next[i] = next[right];
    if (next[i] < count) previous[next[i]] = static_cast<uint8_t>(i);
    look_up(i);
    if (previous[i] < count) look_up(previous[i]);
  }
}

void BpeModel::merge_long(std::vector<int32_t>& ids, Workspace& workspace) const {
  auto& [cache, own, sizes, previous, next, heap] = *workspace.state_;
  const auto count = static_cast<int32_t>(ids.size());
  previous.resize(ids.size());
  next.resize(ids.size());
  heap.clear();
  const auto at = [](int32_t i) { return static_cast<size_t>(i); };
  for (int32_t i = 0; i < count; ++i) {
    previous[at(i)] = i - 1;
    next[at(i)] = i + 1;
    if (i + 1 == count) break;
    if (const MergeSlot* merge = find_merge(ids[at(i)], ids[at(i + 1)]))
      heap.push_back({merge->rank, i, merge->result});
  }
  const auto after = std::greater<>();
  std::make_heap(heap.begin(), heap.end(), after);
  const auto push_pair = [&](int32_t i) {
    if (i < 0 || next[at(i)] == count) return;
    if (const MergeSlot* merge = find_merge(ids[at(i)], ids[at(next[at(i)])])) {
      heap.push_back({merge->rank, i, merge->result});
      std::push_heap(heap.begin(), heap.end(), after);
    }
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), after);
    const auto top = heap.back();
    heap.pop_back();
    const int32_t right = ids[at(top.left)] < 0 ? count : next[at(top.left)];
    if (right == count) continue;
    const MergeSlot* merge = find_merge(ids[at(top.left)], ids[at(right)]);
    if (merge == nullptr || merge->rank != top.rank) continue;  // stale: one of the two was merged meanwhile
    ids[at(top.left)] = top.result;
    ids[at(right)] = -1;
    next[at(top.left)] = next[at(right)];
    if (next[at(right)] != count) previous[at(next[at(right)])] = top.left;
    push_pair(top.left);
    push_pair(previous[at(top.left)]);
  }
}

// Appends the ends of tokens that encode `bytes` bytes, from the sizes of the tokens. False, and appends
// nothing, if these are not known.
bool BpeModel::add_known_ends(std::span<const int32_t> ids, size_t bytes, int64_t offset,
                              std::vector<int64_t>& ends) const {
  const size_t count = ends.size();
  ends.resize(count + ids.size());
  size_t at = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    at += sizes_[static_cast<size_t>(ids[i])];
    ends[count + i] = offset + static_cast<int64_t>(at);
  }
  // No size is larger than what the token encodes, so that a correct sum means correct sizes.
  if (at == bytes) return true;
  ends.resize(count);
  return false;
}

int64_t BpeModel::encode_part(std::string_view part, std::vector<int32_t>& out, Workspace& workspace,
                              std::vector<int64_t>* ends, int64_t offset) const {
  auto& state = *workspace.state_;
  PieceCache::Entry key, *cached = nullptr;
  if (part.size() <= PieceCache::max_bytes) {
    key = PieceCache::key(part);
    cached = &state.cache.slot(key);
    if (cached->holds(key) &&
        (!ends || add_known_ends({cached->ids.data(), cached->count}, part.size(), offset, *ends))) {
      out.insert(out.end(), cached->ids.data(), cached->ids.data() + cached->count);
      return 0;
    }
  }
  auto& ids = state.ids;
  auto& sizes = state.sizes;
  int64_t skipped = 0;
  const int32_t whole = options_.ignore_merges ? find(part) : -1;
  if (whole >= 0) {
    ids.assign(1, whole);
    sizes.assign(1, static_cast<int32_t>(part.size()));
  } else {
    skipped = symbols_of(part, ids, ends ? &sizes : nullptr);
    ids.size() <= short_piece ? merge_short(ids) : merge_long(ids, workspace);
  }
  if (ends) {
    for (size_t i = 0; i < ids.size(); ++i) {
      offset += sizes[i];
      if (ids[i] < 0) {
        ends->back() = offset;
      } else {
        ends->push_back(offset);
      }
    }
  }
  std::erase(ids, -1);
  out.insert(out.end(), ids.begin(), ids.end());
  if (cached && skipped == 0 && ids.size() <= PieceCache::max_ids) {
    key.count = static_cast<uint8_t>(ids.size());
    std::copy(ids.begin(), ids.end(), key.ids.begin());
    *cached = key;
  }
  return skipped;
}

int64_t BpeModel::encode(std::string_view piece, std::vector<int32_t>& out, Workspace& workspace,
                         std::vector<int64_t>* ends, int64_t offset) const {
  if (piece.size() > INT32_MAX / 2)
    fail(Exit::data, "a piece of text is too long: {} bytes; expected at most {}", piece.size(),
         INT32_MAX / 2);
  if (piece.empty()) return 0;
  // Pieces of byte-level models are words already.
  if (!joins_ || (options_.byte_symbols && piece.size() <= PieceCache::max_bytes)) {
    add_encode_progress(piece.size());
    return encode_part(piece, out, workspace, ends, offset);
  }
  int64_t skipped = 0;
  for (size_t begin = 0; begin < piece.size();) {
    size_t marks = 0;
    const size_t end = part_end(piece, begin, marks);
    // A mark is one byte of the text, which was a space.
    add_encode_progress(end - begin - marks * (space_mark.size() - 1));
    skipped += encode_part(piece.substr(begin, end - begin), out, workspace, ends,
                           offset + static_cast<int64_t>(begin));
    begin = end;
  }
  return skipped;
}

}  // namespace nrl::data
