#include "apps/data/unicode.h"

#include <cstring>

#include <unicode/bytestream.h>
#include <unicode/casemap.h>
#include <unicode/edits.h>
#include <unicode/normalizer2.h>
#include <unicode/stringoptions.h>
#include <unicode/uchar.h>
#include <unicode/uniset.h>
#include <unicode/utf8.h>

#include "core/base/error.h"

namespace nrl::data {
namespace {

void require_icu(UErrorCode error) {
  if (U_FAILURE(error))
    fail(Exit::unavailable, "Unicode normalization: ICU reports {}. Fix: reinstall the ICU library",
         u_errorName(error));
}

const icu::Normalizer2& newest_nfc() {
  UErrorCode error = U_ZERO_ERROR;
  const icu::Normalizer2* instance = icu::Normalizer2::getNFCInstance(error);
  require_icu(error);
  return *instance;
}

/// Leaves characters newer than Unicode 9.0 alone, whatever the version of ICU.
const icu::Normalizer2& nfc() {
  static const icu::UnicodeSet characters = [] {
    UErrorCode error = U_ZERO_ERROR;
    icu::UnicodeSet set(u"[:age=9.0:]", error);
    require_icu(error);
    set.freeze();
    return set;
  }();
  static const icu::FilteredNormalizer2 instance(newest_nfc(), characters);
  return instance;
}

/// Calls `map`, which writes the mapped text to a sink.
template <class Map>
std::string mapped(std::string_view text, Map&& map) {
  if (text.size() > INT32_MAX)
    fail(Exit::data, "a text is too long for another case: {} bytes; expected at most {}", text.size(),
         INT32_MAX);
  std::string out;
  UErrorCode error = U_ZERO_ERROR;
  icu::StringByteSink<std::string> sink(&out, static_cast<int32_t>(text.size()));
  map(icu::StringPiece(text.data(), static_cast<int32_t>(text.size())), sink, error);
  require_icu(error);
  return out;
}

}  // namespace

size_t find_invalid_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    if (i + 8 <= text.size()) {
      uint64_t eight;
      std::memcpy(&eight, text.data() + i, 8);
      if ((eight & 0x8080808080808080ull) == 0) {
        i += 8;
        continue;
      }
    }
    const size_t begin = i;
    UChar32 c;
    U8_NEXT(text.data(), i, text.size(), c);
    if (c < 0) return begin;
  }
  return std::string_view::npos;
}

void require_utf8(std::string_view text) {
  if (const size_t bad = find_invalid_utf8(text); bad != std::string_view::npos)
    fail(Exit::data, "the text is not valid UTF-8 at byte {}", bad);
}

char32_t next_character(std::string_view text, size_t& at) {
  UChar32 c;
  U8_NEXT_UNSAFE(text.data(), at, c);
  return static_cast<char32_t>(c);
}

void append_utf8(std::string& out, char32_t c) {
  char bytes[U8_MAX_LENGTH];
  size_t count = 0;
  U8_APPEND_UNSAFE(bytes, count, c);
  out.append(bytes, count);
}

std::string to_nfc(std::string_view text, OffsetMap* map) {
  if (text.size() > INT32_MAX)
    fail(Exit::data, "a text is too long to be normalized: {} bytes; expected at most {}", text.size(),
         INT32_MAX);
  UErrorCode error = U_ZERO_ERROR;
  // A text in the newest form C is in the filtered one: every part of it is in form C.
  const bool unchanged = newest_nfc().isNormalizedUTF8(text, error);
  std::string out;
  if (!unchanged) {
    icu::StringByteSink<std::string> sink(&out, static_cast<int32_t>(text.size()));
    icu::Edits edits;
    nfc().normalizeUTF8(0, text, sink, map ? &edits : nullptr, error);
    if (map)
      for (auto edit = edits.getFineChangesIterator(); edit.next(error);)
        map->add(static_cast<size_t>(edit.destinationIndex()), static_cast<size_t>(edit.oldLength()),
                 static_cast<size_t>(edit.newLength()));
  }
  require_icu(error);
  return unchanged ? std::string(text) : out;
}

std::string to_upper(std::string_view text) {
  return mapped(text, [](icu::StringPiece source, icu::ByteSink& sink, UErrorCode& error) {
    icu::CaseMap::utf8ToUpper("", 0, source, sink, nullptr, error);
  });
}

std::string to_lower(std::string_view text) {
  return mapped(text, [](icu::StringPiece source, icu::ByteSink& sink, UErrorCode& error) {
    icu::CaseMap::utf8ToLower("", 0, source, sink, nullptr, error);
  });
}

std::string to_title(std::string_view character) {
  return mapped(character, [](icu::StringPiece source, icu::ByteSink& sink, UErrorCode& error) {
    icu::CaseMap::utf8ToTitle("", U_TITLECASE_WHOLE_STRING | U_TITLECASE_NO_BREAK_ADJUSTMENT, nullptr, source,
                              sink, nullptr, error);
  });
}

bool is_cased(char32_t c) {
  return u_hasBinaryProperty(static_cast<UChar32>(c), UCHAR_CASED);
}

bool is_printable(char32_t c) {
  if (c == ' ') return true;
  switch (u_charType(static_cast<UChar32>(c))) {
    case U_UNASSIGNED:
    case U_CONTROL_CHAR:
    case U_FORMAT_CHAR:
    case U_SURROGATE:
    case U_PRIVATE_USE_CHAR:
    case U_SPACE_SEPARATOR:
    case U_LINE_SEPARATOR:
    case U_PARAGRAPH_SEPARATOR:
      return false;
    default:
      return true;
  }
}

}  // namespace nrl::data
