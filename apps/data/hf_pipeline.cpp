#include "apps/data/hf_pipeline.h"

#include <algorithm>
#include <array>

#include "apps/data/oniguruma.h"
#include "apps/data/unicode.h"
#include "core/base/error.h"
#include "core/io/json.h"

namespace nrl::data {
namespace {

struct ByteAlphabet {
  std::array<char32_t, 256> character;
  std::array<int16_t, 512> byte;  // by character; -1: none
  ByteAlphabet() {
    byte.fill(-1);
    char32_t next = 0x100;
    for (uint32_t b = 0; b < 256; ++b) {
      const bool itself = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
      character[b] = itself ? b : next++;
      byte[character[b]] = static_cast<int16_t>(b);
    }
  }
};

const ByteAlphabet& alphabet() {
  static const ByteAlphabet instance;
  return instance;
}

void replace_all(std::string& text, std::string_view from, std::string_view to, OffsetMaps* maps = nullptr) {
  size_t at = text.find(from);
  if (at == std::string::npos) return;
  OffsetMap* const map = maps ? &maps->emplace_back() : nullptr;
  std::string out;
  size_t copied = 0;
  for (; at != std::string::npos; at = text.find(from, copied)) {
    out.append(text, copied, at - copied);
    if (map) map->add(out.size(), from.size(), to.size());
    out += to;
    copied = at + from.size();
  }
  text = out.append(text, copied);
}

void prepend(std::string& text, std::string_view prefix, OffsetMaps* maps) {
  text.insert(0, prefix);
  if (maps) maps->emplace_back().add(0, 0, prefix.size());
}

[[noreturn]] void unsupported(const JsonValue& step, std::string_view what) {
  fail(Exit::data, "{}{} is not supported by this program's tokenizers", step.where(), what);
}

void split_metaspace(std::string_view text, std::string_view mark,
                     const std::function<void(std::string_view)>& piece) {
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find(mark, begin + 1), text.size());
    piece(text.substr(begin, end - begin));
    begin = end;
  }
}

}  // namespace

std::string byte_level_text(std::string_view bytes) {
  std::string out;
  for (const char b : bytes) append_utf8(out, alphabet().character[static_cast<uint8_t>(b)]);
  return out;
}

bool byte_level_bytes(std::string_view text, std::string& bytes) {
  bytes.clear();
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next_character(text, at);
    if (c >= alphabet().byte.size() || alphabet().byte[c] < 0) return false;
    bytes += static_cast<char>(alphabet().byte[c]);
  }
  return true;
}

HfPipeline::HfPipeline(const JsonValue* normalizer, const JsonValue* pre_tokenizer) {
  if (normalizer && !normalizer->is_null()) add_normalizer(*normalizer);
  if (pre_tokenizer && !pre_tokenizer->is_null()) add_pre_tokenizer(*pre_tokenizer, true);
}

void HfPipeline::add_normalizer(const JsonValue& step) {
  const std::string& type = step.get_string("type");
  if (type == "Sequence") {
    for (const JsonValue& each : step.at("normalizers").items()) add_normalizer(each);
  } else if (type == "NFC") {
    normalizers_.push_back({.kind = Normalizer::Kind::nfc});
  } else if (type == "Prepend") {
    normalizers_.push_back({.kind = Normalizer::Kind::prepend, .to = step.get_string("prepend")});
  } else if (type == "Replace") {
    const JsonValue* text = step.at("pattern").find("String");
    if (text == nullptr || text->as_string().empty())
      unsupported(step, "a Replace normalizer without a String pattern");
    normalizers_.push_back(
        {.kind = Normalizer::Kind::replace, .from = text->as_string(), .to = step.get_string("content")});
  } else {
    unsupported(step, fmt::format("the normalizer '{}'", type));
  }
}

void HfPipeline::add_pre_tokenizer(const JsonValue& step, bool only) {
  using Behavior = Splitter::Behavior;
  const std::string& type = step.get_string("type");
  if (type == "Sequence") {
    const auto& steps = step.at("pretokenizers").items();
    for (const JsonValue& each : steps) add_pre_tokenizer(each, only && steps.size() == 1);
  } else if (type == "ByteLevel") {
    byte_level_ = true;
    if (step.get_bool("add_prefix_space", true)) {
      if (!only) unsupported(step, "add_prefix_space in a sequence of pre-tokenizers");
      space_ = Space::byte_level;
    }
    if (step.get_bool("use_regex", true))
      splitters_.emplace_back(Behavior::isolated, std::string(gpt2_pattern), false, step.where());
  } else if (type == "Digits") {
    // Hugging Face's tokenizers library already has the digits of Unicode 17.0.
    const std::string digit = "[\\p{N}\\x{11DE0}-\\x{11DE9}\\x{16FF4}-\\x{16FF6}]";
    const std::string pattern = step.get_bool("individual_digits", false) ? digit : digit + "+";
    splitters_.emplace_back(Behavior::isolated, pattern, false, step.where());
  } else if (type == "Split") {
    const JsonValue& pattern = step.at("pattern");
    const JsonValue* literal = pattern.find("String");
    const std::string& text = literal ? literal->as_string() : pattern.get_string("Regex");
    const std::string& behavior = step.get_string("behavior");
    const bool invert = step.get_bool("invert", false);
    Behavior wanted;
    if (behavior == "Isolated") {
      wanted = Behavior::isolated;
    } else if (behavior == "Removed") {
      wanted = invert ? Behavior::only_matches : Behavior::only_gaps;
    } else if (behavior == "MergedWithPrevious" && !invert) {
      wanted = Behavior::merged_with_previous;
    } else {
      unsupported(step, fmt::format("a Split with behavior '{}'{}", behavior, invert ? " and invert" : ""));
    }
    splitters_.emplace_back(wanted, text, literal != nullptr, pattern.where());
  } else if (type == "Metaspace") {
    if (!only) unsupported(step, "Metaspace in a sequence of pre-tokenizers");
    metaspace_ = step.get_string("replacement", "\u2581");
    const std::string scheme =
        step.get_string("prepend_scheme", step.get_bool("add_prefix_space", true) ? "always" : "never");
    if ((scheme != "first" && scheme != "always" && scheme != "never") || metaspace_.empty())
      unsupported(step, fmt::format("a Metaspace with prepend_scheme '{}'", scheme));
    space_ = scheme == "first"    ? Space::metaspace_first
             : scheme == "always" ? Space::metaspace_always
                                  : Space::metaspace_never;
    metaspace_split_ = step.get_bool("split", true);
  } else {
    unsupported(step, fmt::format("the pre-tokenizer '{}'", type));
  }
}

bool HfPipeline::adds_space() const {
  for (const Normalizer& n : normalizers_)
    if (n.kind == Normalizer::Kind::prepend) return true;
  return space_ != Space::none && space_ != Space::metaspace_never;
}

std::string HfPipeline::normalize(std::string_view text, OffsetMaps* maps) const {
  std::string out(text);
  for (const Normalizer& n : normalizers_) switch (n.kind) {
      case Normalizer::Kind::nfc:
        out = to_nfc(out, maps ? &maps->emplace_back() : nullptr);
        break;
      case Normalizer::Kind::prepend:
        if (!out.empty()) prepend(out, n.to, maps);
        break;
      case Normalizer::Kind::replace:
        replace_all(out, n.from, n.to, maps);
    }
  return out;
}

void HfPipeline::split(std::string_view text, bool first, const std::function<void(std::string_view)>& piece,
                       Marked* marked) const {
  if (text.empty()) return;
  if (marked) *marked = {text.data()};
  OffsetMaps* const maps = marked ? &marked->maps : nullptr;
  if (space_ == Space::none) return split_text(text, piece);
  std::string spaced(text);
  if (space_ == Space::byte_level) {
    if (!text.starts_with(' ')) prepend(spaced, " ", maps);
    if (marked) marked->begin = spaced.data();
    return split_text(spaced, piece);
  }
  replace_all(spaced, " ", metaspace_, maps);
  const bool prefix = space_ == Space::metaspace_always || (space_ == Space::metaspace_first && first);
  if (prefix && !spaced.starts_with(metaspace_)) prepend(spaced, metaspace_, maps);
  if (marked) marked->begin = spaced.data();
  metaspace_split_ ? split_metaspace(spaced, metaspace_, piece) : piece(spaced);
}

HfPipeline::Splitter::Splitter(Behavior what, const std::string& text, bool literal, const std::string& where)
    : behavior(what), pattern(text, literal, where) {
  if (!literal) words = WordScanner::of(text);
}

bool HfPipeline::Splitter::find(std::string_view text, size_t from, size_t& begin, size_t& end) const {
  if (words)
    if (const size_t match = words->match(text, from); match != 0) {
      begin = from, end = match;
      return true;
    }
  return pattern.find(text, from, begin, end);
}

void HfPipeline::split_text(std::string_view text, const std::function<void(std::string_view)>& piece) const {
  std::string replaced;
  const bool any = std::any_of(splitters_.begin(), splitters_.end(),
                               [](const Splitter& s) { return s.pattern.has_classes(); }) &&
                   replace_new_characters(text, replaced);
  split_from(0, text, any ? std::string_view(replaced) : text, piece);
}

void HfPipeline::split_from(size_t step, std::string_view text, std::string_view classified,
                            const std::function<void(std::string_view)>& piece) const {
  using Behavior = Splitter::Behavior;
  if (step == splitters_.size()) {
    if (!text.empty()) piece(text);
    return;
  }
  const Splitter& splitter = splitters_[step];
  const bool last = step + 1 == splitters_.size();
  const auto part = [&](size_t from, size_t to) {
    if (from >= to) return;
    if (last) return piece(text.substr(from, to - from));
    split_from(step + 1, text.substr(from, to - from), classified.substr(from, to - from), piece);
  };
  const std::string_view subject = splitter.pattern.has_classes() ? classified : text;
  size_t done = 0, begin = 0, end = 0;
  while (done < text.size() && splitter.find(subject, done, begin, end) && begin >= done) {
    switch (splitter.behavior) {
      case Behavior::isolated:
        part(done, begin);
        part(begin, end);
        break;
      case Behavior::only_gaps:
        part(done, begin);
        break;
      case Behavior::only_matches:
        part(begin, end);
        break;
      case Behavior::merged_with_previous:
        part(done, end);  // directly after another match, only the match itself
    }
    done = end;
  }
  if (splitter.behavior != Behavior::only_matches) part(done, text.size());
}

}  // namespace nrl::data
