#include "apps/data/sentencepiece_unigram.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <unordered_set>

#include "apps/data/unicode.h"
#include "core/base/error.h"

namespace nrl::data {
namespace {

using Model = SentencePieceModel;
using Type = Model::PieceType;

std::vector<PieceTrie::Entry> entries_of(const Model& model) {
  std::vector<PieceTrie::Entry> entries;
  for (size_t id = 0; id < model.pieces.size(); ++id)
    if (const Model::Piece& piece = model.pieces[id];
        piece.type == Type::normal || piece.type == Type::user_defined)
      entries.push_back({piece.text, static_cast<int32_t>(id)});
  return entries;
}

}  // namespace

PieceTrie::PieceTrie(std::vector<Entry> entries) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.text < b.text; });
  struct Node {
    size_t begin, end, depth;  // the entries below it, which agree in `depth` bytes
    size_t cell;
  };
  std::vector<Node> nodes{{0, entries.size(), 0, 0}};
  std::vector<bool> base_used(1);
  size_t first_free = 1;
  cells_.resize(1);
  cells_[0].id_and_label = label_mask;  // the root is not free, and no child
  for (size_t n = 0; n < nodes.size(); ++n) {
    const Node node = nodes[n];
    // The children: their labels and entries. An entry that ends here is the node's own.
    std::vector<std::pair<uint8_t, size_t>> children;
    for (size_t e = node.begin; e < node.end; ++e) {
      if (entries[e].text.size() == node.depth) continue;
      const auto label = static_cast<uint8_t>(entries[e].text[node.depth]);
      if (children.empty() || children.back().first != label) children.push_back({label, e});
    }
    if (children.empty()) {
      cells_[node.cell].base = 0;  // the children of no node: every label differs
      continue;
    }
    const auto free = [&](size_t cell) { return cell >= cells_.size() || cells_[cell].id_and_label == 0; };
    while (!free(first_free)) ++first_free;
    size_t base = first_free > children[0].first ? first_free - children[0].first : 1;
    const size_t searched_from = base;
    const auto fits = [&](const auto& child) { return free(base + child.first); };
    while ((base < base_used.size() && base_used[base]) ||
           !std::all_of(children.begin(), children.end(), fits))
      ++base;
    // Gives up cells that have not suited for long.
    constexpr size_t patience = 128;
    if (base > searched_from + patience) first_free = std::max(first_free, base - patience);
    if (base_used.size() <= base) base_used.resize(base + 1);
    base_used[base] = true;
    if (cells_.size() < base + 256) cells_.resize(base + 256);
    cells_[node.cell].base = static_cast<uint32_t>(base);
    for (size_t c = 0; c < children.size(); ++c) {
      const auto& [label, begin] = children[c];
      const size_t end = c + 1 < children.size() ? children[c + 1].second : node.end;
      Cell& cell = cells_[base + label];
      const Entry& first = entries[begin];
      const uint32_t id = first.text.size() == node.depth + 1 ? static_cast<uint32_t>(first.id) + 1 : 0;
      cell.id_and_label = id << label_bits | (label + 1u);
      nodes.push_back({begin, end, node.depth + 1, base + label});
    }
  }
  cells_.resize(std::max<size_t>(cells_.size(), 256));
}

std::string SentencePieceUnigram::unsupported_reason(const Model& model) {
  if (model.algorithm != Model::Algorithm::unigram) return "it is neither a BPE nor a unigram model";
  if (std::string reason = SentencePieceNormalizer::unsupported_reason(model); !reason.empty()) return reason;
  if (model.pieces.size() > PieceTrie::max_pieces)
    return fmt::format("it has more than {} pieces", PieceTrie::max_pieces);
  std::unordered_set<std::string_view> texts, bytes;
  int unknown = 0, normal = 0;
  for (const Model::Piece& piece : model.pieces) {
    if (!std::isfinite(piece.score)) return "the score of a piece is not finite";
    if (!texts.insert(piece.text).second) return fmt::format("it has the piece '{}' twice", piece.text);
    if (piece.type == Type::byte) bytes.insert(piece.text);
    unknown += piece.type == Type::unknown;
    normal += piece.type == Type::normal;
  }
  if (unknown != 1) return fmt::format("it has {} unknown pieces; expected 1", unknown);
  if (normal == 0) return "it has no normal pieces";
  if (model.byte_fallback) {
    bool all = bytes.size() == 256;
    for (int b = 0; b < 256; ++b) all = all && bytes.count(fmt::format("<0x{:02X}>", b)) == 1;
    if (!all) return "it lacks pieces for some bytes";
  }
  return {};
}

SentencePieceUnigram::SentencePieceUnigram(const Model& model)
    : normalizer_(model), trie_(entries_of(model)), scores_(model.pieces.size()) {
  // The sentencepiece library has the same limits, and below the same precisions.
  float least = std::numeric_limits<float>::max(), most = std::numeric_limits<float>::min();
  for (const Model::Piece& piece : model.pieces)
    if (piece.type == Type::normal) {
      least = std::min(least, piece.score);
      most = std::max(most, piece.score);
    }
  unknown_score_ = least - 10.0f;
  if (model.byte_fallback) byte_ids_.resize(256);
  for (size_t id = 0; id < model.pieces.size(); ++id) {
    const Model::Piece& piece = model.pieces[id];
    scores_[id] = piece.score;
    // User-defined pieces always win.
    if (piece.type == Type::user_defined) scores_[id] = static_cast<float>(piece.text.size()) * most - 0.1;
    if (piece.type == Type::unknown) unknown_ = static_cast<int32_t>(id);
    if (model.byte_fallback && piece.type == Type::byte)
      byte_ids_[std::stoul(piece.text.substr(3, 2), nullptr, 16)] = static_cast<int32_t>(id);
  }
}

void SentencePieceUnigram::encode(std::string_view text, std::vector<int32_t>& out,
                                  std::vector<int64_t>* ends) const {
  OffsetMap map;
  const std::string normal = normalizer_.normalize(text, ends ? &map : nullptr);
  if (normal.size() > INT32_MAX / 2)
    fail(Exit::data, "a document is too long: {} bytes; expected at most {}", normal.size(), INT32_MAX / 2);
  // The best path to every position: its score and its last piece.
  struct Best {
    float score = 0;
    int32_t begin = -1, id = -1;
  };
  std::vector<Best> best(normal.size() + 1);
  for (size_t begin = 0, next; begin < normal.size(); begin = next) {
    next = begin;
    next_character(normal, next);
    const float before = best[begin].score;
    const auto take = [&](size_t end, double score, int32_t id) {
      Best& at = best[end];
      const double sum = score + before;
      if (at.begin < 0 || sum > at.score) at = {static_cast<float>(sum), static_cast<int32_t>(begin), id};
    };
    bool single = false;
    trie_.each_prefix(std::string_view(normal).substr(begin), [&](int32_t id, size_t bytes) {
      take(begin + bytes, scores_[id], id);
      single = single || begin + bytes == next;
    });
    if (!single) {
      // In the library this sum is one of floats.
      const float sum = unknown_score_ + before;
      Best& at = best[next];
      if (at.begin < 0 || sum > at.score) at = {sum, static_cast<int32_t>(begin), unknown_};
    }
  }
  // Backwards; consecutive unknown characters become one unknown piece.
  const auto first = static_cast<std::ptrdiff_t>(out.size());
  const size_t first_end = ends ? ends->size() : 0;
  const auto push = [&](int32_t id, int32_t end) {
    out.push_back(id);
    if (ends) ends->push_back(end);
  };
  bool unknown = false;
  for (auto end = static_cast<int32_t>(normal.size()); end > 0; end = best[end].begin) {
    const Best& last = best[end];
    if (last.id == unknown_ && !byte_ids_.empty()) {
      for (int32_t i = end; i-- > last.begin;) push(byte_ids_[static_cast<uint8_t>(normal[i])], i + 1);
    } else if (last.id != unknown_ || !unknown) {
      push(last.id, end);
    }
    unknown = last.id == unknown_;
  }
  std::reverse(out.begin() + first, out.end());
  if (!ends) return;
  const auto own_ends = std::span(*ends).subspan(first_end);
  std::reverse(own_ends.begin(), own_ends.end());
  map.convert(own_ends);
}

}  // namespace nrl::data
