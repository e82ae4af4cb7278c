#include "apps/data/sentencepiece_bpe.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <unordered_map>
#include <unordered_set>

#include "apps/data/unicode.h"
#include "core/base/error.h"

namespace nrl::data {
namespace {

using Model = SentencePieceModel;
using Type = Model::PieceType;

size_t first_character_size(std::string_view text) {
  size_t at = 0;
  next_character(text, at);
  return at;
}

std::unordered_map<std::string_view, int32_t> normal_pieces(const Model& model) {
  std::unordered_map<std::string_view, int32_t> ids;
  for (size_t id = 0; id < model.pieces.size(); ++id)
    if (model.pieces[id].type == Type::normal) ids.emplace(model.pieces[id].text, static_cast<int32_t>(id));
  return ids;
}

}  // namespace

std::vector<BpeModel::Merge> sentencepiece_merges(const Model& model) {
  const auto ids = normal_pieces(model);
  std::vector<int32_t> order;
  for (const auto& [text, id] : ids) order.push_back(id);
  const auto score = [&](int32_t id) { return model.pieces[id].score; };
  std::sort(order.begin(), order.end(),
            [&](int32_t a, int32_t b) { return score(a) != score(b) ? score(a) > score(b) : a < b; });
  std::vector<BpeModel::Merge> merges;
  for (size_t rank = 0; rank < order.size(); ++rank) {
    const std::string_view text = model.pieces[order[rank]].text;
    for (size_t at = 0; next_character(text, at), at < text.size();) {
      const auto left = ids.find(text.substr(0, at)), right = ids.find(text.substr(at));
      if (left != ids.end() && right != ids.end())
        merges.push_back({.left = left->second,
                          .right = right->second,
                          .result = order[rank],
                          .rank = static_cast<int32_t>(rank)});
    }
  }
  return merges;
}

// Limits the quadratic work of sentencepiece_merges(), which tries every split of a piece.
constexpr size_t max_piece_bytes = 4096;

std::string SentencePieceBpe::unsupported_reason(const Model& model) {
  if (model.algorithm != Model::Algorithm::bpe) return "it is not a BPE model";
  if (std::string reason = SentencePieceNormalizer::unsupported_reason(model); !reason.empty()) return reason;
  const auto normal = normal_pieces(model);
  std::unordered_set<float> scores;
  std::unordered_set<std::string_view> bytes;
  int unknown = 0;
  for (const Model::Piece& piece : model.pieces) {
    if (!std::isfinite(piece.score)) return "the score of a piece is not finite";
    if (piece.text.size() > max_piece_bytes)
      return fmt::format("a piece has more than {} bytes", max_piece_bytes);
    if (piece.type == Type::unused) return "it has unused pieces";
    if (piece.type == Type::byte) bytes.insert(piece.text);
    unknown += piece.type == Type::unknown;
    const bool single = first_character_size(piece.text) == piece.text.size();
    if (single && piece.type != Type::normal && piece.type != Type::user_defined)
      return fmt::format("its piece '{}' is a single character, but not of type normal", piece.text);
    if (single || piece.type != Type::normal) continue;
    // For equal scores sentencepiece merges by position, which ranked merges cannot represent.
    if (!scores.insert(piece.score).second)
      return fmt::format("two pieces have the same score {}", piece.score);
    for (size_t at = 0; at < piece.text.size();) {
      const size_t begin = at;
      next_character(piece.text, at);
      if (normal.count(std::string_view(piece.text).substr(begin, at - begin)) == 0)
        return fmt::format("a character of the piece '{}' is not itself a piece", piece.text);
    }
  }
  if (unknown != 1) return fmt::format("it has {} unknown pieces; expected 1", unknown);
  if (model.byte_fallback && bytes.size() != 256) return "it lacks pieces for some bytes";
  return {};
}

SentencePieceBpe::SentencePieceBpe(const Model& model) : normalizer_(model) {
  std::unordered_map<std::string, int32_t> tokens;
  for (size_t i = 0; i < model.pieces.size(); ++i) {
    const Model::Piece& piece = model.pieces[i];
    const auto id = static_cast<int32_t>(i);
    if (piece.type == Type::user_defined) user_defined_.add({piece.text, id});
    if (piece.type == Type::unknown) unknown_ = id;
    if (piece.type == Type::normal || piece.type == Type::byte) tokens.emplace(piece.text, id);
  }
  BpeModel::Options options;
  options.byte_symbols = false;
  options.byte_fallback = model.byte_fallback;
  options.unknown = unknown_;
  bpe_ = std::make_unique<BpeModel>(options, std::move(tokens), sentencepiece_merges(model));
}

void SentencePieceBpe::encode(std::string_view text, std::vector<int32_t>& out,
                              std::vector<int64_t>* ends) const {
  OffsetMap map;
  const std::string normal = normalizer_.normalize(text, ends ? &map : nullptr);
  const std::string_view all = normal;
  const size_t begin = out.size(), first_end = ends ? ends->size() : 0;
  BpeModel::Workspace& workspace = bpe_->workspace();
  user_defined_.split(
      all,
      [&](size_t from, size_t to) {
        bpe_->encode(all.substr(from, to - from), out, workspace, ends, static_cast<int64_t>(from));
      },
      [&](int32_t id, size_t end) {
        out.push_back(id);
        if (ends) ends->push_back(static_cast<int64_t>(end));
      });
  // Consecutive unknown characters become one unknown piece.
  const auto ids = std::span(out).subspan(begin);
  const auto both_unknown = [&](int32_t a, int32_t b) { return a == unknown_ && b == unknown_; };
  auto kept = static_cast<size_t>(std::adjacent_find(ids.begin(), ids.end(), both_unknown) - ids.begin());
  for (size_t i = kept; i < ids.size(); ++i) {
    if (kept > 0 && both_unknown(ids[kept - 1], ids[i])) --kept;
    ids[kept] = ids[i];
    if (ends) (*ends)[first_end + kept] = (*ends)[first_end + i];
    ++kept;
  }
  out.resize(begin + kept);
  if (!ends) return;
  ends->resize(first_end + kept);
  map.convert(std::span(*ends).subspan(first_end));
}

}  // namespace nrl::data
