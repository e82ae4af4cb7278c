#include "apps/data/bpe.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <functional>

#include "apps/data/unicode.h"
#include "core/base/error.h"

namespace nrl::data {
namespace {

constexpr int32_t no_merge = INT32_MAX;
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
  // Direct-mapped cache: words repeat, and a hit costs one comparison.
  struct Cached {
    uint8_t bytes = 0, count = 0;
    char piece[22];
    int32_t ids[8];
  };
  struct Candidate {
    int32_t rank, left, result;
    bool operator>(const Candidate& o) const { return rank != o.rank ? rank > o.rank : left > o.left; }
  };
  std::vector<Cached> cache{size_t{1} << 15};
  std::vector<int32_t> ids, ranks, results, previous, next;
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

int64_t BpeModel::symbols_of(std::string_view piece, std::vector<int32_t>& ids) const {
  ids.clear();
  int64_t skipped = 0;
  // A pending unknown token may fuse with the next one. As in Hugging Face's BPE, byte tokens do
  // not flush it.
  bool pending_unknown = false;
  const auto flush_unknown = [&] {
    if (pending_unknown) ids.push_back(options_.unknown);
    pending_unknown = false;
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
      ids.push_back(id);
    } else if (!options_.byte_symbols && options_.byte_fallback &&
               std::all_of(symbol.begin(), symbol.end(), [&](char b) { return byte_id(b) >= 0; })) {
      for (const char b : symbol) ids.push_back(byte_id(b));
    } else if (options_.unknown >= 0) {
      if (!options_.fuse_unknown) flush_unknown();
      pending_unknown = true;
    } else {
      skipped += static_cast<int64_t>(symbol.size());
    }
  }
  flush_unknown();
  return skipped;
}

void BpeModel::merge_short(std::vector<int32_t>& ids, Workspace& workspace) const {
  auto& ranks = workspace.state_->ranks;
  auto& results = workspace.state_->results;
  ranks.assign(ids.size(), no_merge);
  results.resize(ids.size());
  const auto look_up = [&](size_t i) {  // the merge of the pair (i, i + 1)
    const MergeSlot* merge = i + 1 < ids.size() ? find_merge(ids[i], ids[i + 1]) : nullptr;
    ranks[i] = merge ? merge->rank : no_merge;
    results[i] = merge ? merge->result : 0;
  };
  for (size_t i = 0; i + 1 < ids.size(); ++i) look_up(i);
  while (true) {
    const auto best = std::min_element(ranks.begin(), ranks.end());  // the leftmost of equal ranks
    if (best == ranks.end() || *best == no_merge) return;
    const auto i = best - ranks.begin();
    ids[i] = results[i];
    ids.erase(ids.begin() + i + 1);
    ranks.erase(ranks.begin() + i + 1);
    results.erase(results.begin() + i + 1);
    look_up(static_cast<size_t>(i));
    if (i > 0) look_up(static_cast<size_t>(i) - 1);
  }
}

void BpeModel::merge_long(std::vector<int32_t>& ids, Workspace& workspace) const {
  auto& [cache, own, ranks, results, previous, next, heap] = *workspace.state_;
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
  std::erase(ids, -1);
}

int64_t BpeModel::encode(std::string_view piece, std::vector<int32_t>& out, Workspace& workspace) const {
  auto& state = *workspace.state_;
  using Cached = Workspace::State::Cached;
  Cached* cached = nullptr;
  int64_t skipped = 0;
  if (piece.empty()) return 0;
  if (piece.size() <= sizeof(Cached::piece)) {
    cached = &state.cache[std::hash<std::string_view>()(piece) & (state.cache.size() - 1)];
    if (cached->bytes == piece.size() && std::memcmp(cached->piece, piece.data(), piece.size()) == 0) {
      out.insert(out.end(), cached->ids, cached->ids + cached->count);
      return 0;
    }
  }
  auto& ids = state.ids;
  const int32_t whole = options_.ignore_merges ? find(piece) : -1;
  if (whole >= 0) {
    ids.assign(1, whole);
  } else {
    if (piece.size() > INT32_MAX / 2)
      fail(Exit::data, "a piece of text is too long: {} bytes; expected at most {}", piece.size(),
           INT32_MAX / 2);
    skipped = symbols_of(piece, ids);
    ids.size() <= short_piece ? merge_short(ids, workspace) : merge_long(ids, workspace);
  }
  out.insert(out.end(), ids.begin(), ids.end());
  if (cached && skipped == 0 && ids.size() <= std::size(cached->ids)) {
    cached->bytes = static_cast<uint8_t>(piece.size());
    cached->count = static_cast<uint8_t>(ids.size());
    std::memcpy(cached->piece, piece.data(), piece.size());
    std::copy(ids.begin(), ids.end(), cached->ids);
  }
  return skipped;
}

}  // namespace nrl::data
