#include "apps/data/sentencepiece_normalizer.h"

#include <algorithm>
#include <cstring>

#include "apps/data/sentencepiece_model.h"
#include "apps/data/unicode.h"
#include "core/base/error.h"

namespace nrl::data {
namespace {

// Fields of a unit of darts-clone.
bool has_leaf(uint32_t unit) {
  return unit >> 8 & 1;
}
uint32_t value_of(uint32_t unit) {
  return unit & 0x7FFFFFFF;
}
uint32_t label_of(uint32_t unit) {
  return unit & 0x800000FF;  // of a leaf not a byte
}
uint32_t offset_of(uint32_t unit) {
  return unit >> 10 << ((unit & 1u << 9) >> 6);
}

// Size of the double array, which follows it; 0 if the text is too short.
size_t array_bytes(std::string_view charsmap) {
  uint32_t bytes = 0;
  if (charsmap.size() <= sizeof bytes) return 0;
  std::memcpy(&bytes, charsmap.data(), sizeof bytes);
  return bytes < charsmap.size() - sizeof bytes ? bytes : 0;
}

}  // namespace

std::string CharacterRules::problem(std::string_view charsmap) {
  if (charsmap.empty()) return {};
  const size_t bytes = array_bytes(charsmap);
  if (bytes < sizeof(uint32_t) || bytes % sizeof(uint32_t) != 0 || charsmap.back() != '\0' ||
      find_invalid_utf8(charsmap.substr(sizeof(uint32_t) + bytes)) != std::string_view::npos)
    return "the rules of its normalizer cannot be read";
  return {};
}

CharacterRules::CharacterRules(std::string_view charsmap) {
  const size_t bytes = array_bytes(charsmap);
  units_.resize(bytes / sizeof(uint32_t));
  if (!units_.empty()) {
    std::memcpy(units_.data(), charsmap.data() + sizeof(uint32_t), bytes);
    replacements_ = charsmap.substr(sizeof(uint32_t) + bytes);
  }
  const auto child = [&](uint32_t node, uint32_t byte) {
    node ^= byte;
    return node < units_.size() && label_of(units_[node]) == byte ? node : 0;
  };
  for (uint32_t a = 1; a < 128; ++a) {
    const uint32_t node = units_.empty() ? 0 : child(offset_of(units_[0]), a);
    keeps_ascii_[a] = true;
    if (node == 0) continue;
    keeps_ascii_[a] = !has_leaf(units_[node]);
    for (uint32_t b = 0; b < 128; ++b)
      if (child(node ^ offset_of(units_[node]), b) != 0) keeps_ascii_[a] = false;
  }
}

CharacterRules::Match CharacterRules::longest(std::string_view text) const {
  Match best;
  if (units_.empty()) return best;
  uint32_t node = offset_of(units_[0]);
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    node ^= byte;
    if (node >= units_.size() || label_of(units_[node]) != byte) break;
    const uint32_t unit = units_[node];
    node ^= offset_of(unit);
    if (has_leaf(unit) && node < units_.size()) best = {i + 1, value_of(units_[node])};
  }
  return best;
}

std::string_view CharacterRules::replacement(std::string_view text, size_t& bytes) const {
  const Match match = longest(text);
  bytes = match.bytes;
  if (bytes == 0) return {};
  const size_t begin = match.value;
  size_t after = bytes;
  while (after < text.size() && (static_cast<uint8_t>(text[after]) & 0xC0) == 0x80) ++after;
  if (begin >= replacements_.size() || (static_cast<uint8_t>(replacements_[begin]) & 0xC0) == 0x80 ||
      after != bytes)
    fail(Exit::data, "the sentencepiece model has a damaged rule for '{}'. Fix: copy the model again",
         text.substr(0, after));
  return std::string_view(replacements_).substr(begin, replacements_.find('\0', begin) - begin);
}

std::string SentencePieceNormalizer::unsupported_reason(const SentencePieceModel& model) {
  if (!model.escape_whitespaces || model.whitespace_as_suffix)
    return "it does not attach spaces to the beginning of words";
  for (const auto& piece : model.pieces) {
    if (piece.text.empty() || find_invalid_utf8(piece.text) != std::string_view::npos)
      return "a piece is empty or not valid UTF-8";
    if (piece.text.find('\0') != std::string::npos) return "a piece contains a NUL byte";
    if (piece.type == SentencePieceModel::PieceType::user_defined &&
        piece.text.find(' ') != std::string::npos)
      return "a user-defined piece contains a space";
  }
  return CharacterRules::problem(model.charsmap);
}

SentencePieceNormalizer::SentencePieceNormalizer(const SentencePieceModel& model)
    : dummy_prefix_(model.add_dummy_prefix),
      collapse_spaces_(model.remove_extra_whitespaces),
      rules_(model.charsmap) {
  for (const auto& piece : model.pieces)
    if (piece.type == SentencePieceModel::PieceType::user_defined) user_defined_.add({piece.text, 0});
}

// The replacement of the beginning of a text, and the bytes that it replaces.
std::string_view SentencePieceNormalizer::next_part(std::string_view text, size_t& bytes) const {
  if (const AddedToken* const token = user_defined_.match(text)) {
    bytes = token->content.size();
    return text.substr(0, bytes);
  }
  const std::string_view replacement = rules_.replacement(text, bytes);
  if (bytes > 0) return replacement;
  next_character(text, bytes);
  return text.substr(0, bytes);
}

namespace {

// Removes marked spaces at the end.
void remove_final_spaces(std::string& out, OffsetMap* map) {
  while (out.ends_with(space_mark)) out.resize(out.size() - space_mark.size());
  if (map) map->cut(out.size());
}

}  // namespace

std::string SentencePieceNormalizer::normalize(std::string_view text, OffsetMap* map) const {
  if (!rules_.any()) return mark_spaces(text, map);
  const size_t all = text.size();
  size_t bytes = 0;
  while (collapse_spaces_ && !text.empty() && next_part(text, bytes) == " ") text.remove_prefix(bytes);
  std::string out;
  if (text.empty()) return out;
  out.reserve(text.size() + text.size() / 2 + space_mark.size());
  if (dummy_prefix_) out += space_mark;
  if (map) {
    map->reserve(text.size() / 4);  // a space ends most words
    map->add(0, all - text.size(), out.size());
  }
  bool after_space = collapse_spaces_;
  const auto ascii_stays = [&](size_t at) {
    return rules_.keeps_ascii(text[at]) && text[at] != ' ' && !user_defined_.may_begin(text[at]) &&
           (at + 1 == text.size() || static_cast<uint8_t>(text[at + 1]) < 0x80);
  };
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    while (at < text.size() && ascii_stays(at)) ++at;
    if (at > begin) {
      out += text.substr(begin, at - begin);
      after_space = false;
      continue;
    }
    std::string_view part = next_part(text.substr(at), bytes);
    const bool same = part.data() == text.data() + at && part != " ";
    at += bytes;
    const size_t size = part.size(), before = out.size();
    while (after_space && part.starts_with(' ')) part.remove_prefix(1);
    for (const char c : part)
      if (c == ' ')
        out += space_mark;
      else
        out += c;
    if (map && !(same && part.size() == size)) map->add(before, bytes, out.size() - before);
    if (!part.empty()) after_space = collapse_spaces_ && part.ends_with(' ');
  }
  if (collapse_spaces_) remove_final_spaces(out, map);
  return out;
}

// The same without rules.
std::string SentencePieceNormalizer::mark_spaces(std::string_view text, OffsetMap* map) const {
  const size_t all = text.size();
  if (collapse_spaces_)
    while (text.starts_with(' ')) text.remove_prefix(1);
  std::string out;
  if (text.empty()) return out;
  out.reserve(text.size() + text.size() / 2 + space_mark.size());
  if (dummy_prefix_) out += space_mark;
  if (map) {
    map->reserve(text.size() / 4);  // a space ends most words
    map->add(0, all - text.size(), out.size());
  }
  for (size_t at = 0; at < text.size();) {
    const size_t space = std::min(text.find(' ', at), text.size());
    out += text.substr(at, space - at);
    if (space == text.size()) break;
    at = space + 1;
    while (collapse_spaces_ && at < text.size() && text[at] == ' ') ++at;
    if (map) map->add(out.size(), at - space, space_mark.size());
    out += space_mark;
  }
  if (collapse_spaces_) remove_final_spaces(out, map);
  return out;
}

}  // namespace nrl::data
