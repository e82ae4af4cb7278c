#pragma once
// The normalizer and pre-tokenizer of a Hugging Face tokenizer.json.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/data/offset_map.h"
#include "apps/data/regex.h"
#include "apps/data/word_scanner.h"

namespace nrl {
class JsonValue;
}

namespace nrl::data {

/// Bytes as text in the printable alphabet of byte-level BPE (GPT-2): 33-126, 161-172 and 174-255 map to
/// themselves, the others in order to U+0100 and following.
std::string byte_level_text(std::string_view bytes);
/// The inverse; false if a character is not in that alphabet.
bool byte_level_bytes(std::string_view text, std::string& bytes);

/// Applies the entries `normalizer` and `pre_tokenizer`. Steps without an exact equivalent are refused
/// with Error (`data`).
class HfPipeline {
 public:
  /// Either may be null or absent (nullptr).
  HfPipeline(const JsonValue* normalizer, const JsonValue* pre_tokenizer);

  /// Whether the model works on bytes.
  bool byte_level() const { return byte_level_; }
  /// Whether a space is prepended to the text, which decoding must remove.
  bool adds_space() const;

  /// `maps`: if not null, receives the maps of the steps that changed the text.
  std::string normalize(std::string_view text, OffsetMaps* maps = nullptr) const;
  bool normalizes() const { return !normalizers_.empty(); }
  /// Calls `piece` for each part that the model encodes separately. `first`: the text begins the document.
  /// The view is valid during the call only. `marked`: if not null, receives the text that the views are
  /// parts of, before the first call.
  struct Marked {
    const char* begin = nullptr;
    OffsetMaps maps = {};  ///< to `text`
  };
  void split(std::string_view text, bool first, const std::function<void(std::string_view)>& piece,
             Marked* marked = nullptr) const;

 private:
  struct Normalizer {
    enum class Kind { nfc, prepend, replace } kind;
    std::string from = {}, to = {};
  };
  struct Splitter {
    enum class Behavior { isolated, only_gaps, only_matches, merged_with_previous } behavior;
    Regex pattern;
    std::optional<WordScanner> words = {};  // finds most matches of the pattern

    Splitter(Behavior what, const std::string& text, bool literal, const std::string& where);
    bool find(std::string_view text, size_t from, size_t& begin, size_t& end) const;
  };
  enum class Space { none, byte_level, metaspace_first, metaspace_always, metaspace_never };

  void add_normalizer(const JsonValue& step);
  void add_pre_tokenizer(const JsonValue& step, bool only);
  void split_text(std::string_view text, const std::function<void(std::string_view)>& piece) const;
  // `classified`: replace_new_characters(text), for patterns with character classes; same byte offsets.
  void split_from(size_t step, std::string_view text, std::string_view classified,
                  const std::function<void(std::string_view)>& piece) const;

  std::vector<Normalizer> normalizers_;
  std::vector<Splitter> splitters_;
  Space space_ = Space::none;
  std::string metaspace_;  // replacement of a space
  bool metaspace_split_ = false;
  bool byte_level_ = false;
};

}  // namespace nrl::data
