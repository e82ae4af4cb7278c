// Patterns against what Hugging Face's tokenizers match (scripts/dev/unicode-tables.py classes).

#include "apps/data/oniguruma.h"

#include <set>
#include <sstream>

#include "apps/data/hf_pipeline.h"
#include "apps/data/regex.h"
#include "apps/data/unicode.h"
#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::data;
using namespace nrl::test;

namespace {

constexpr char32_t end_of_codepoints = 0x110000;

bool is_surrogate(char32_t c) {
  return c >= 0xD800 && c < 0xE000;
}

std::string utf8(char32_t c) {
  std::string out;
  append_utf8(out, c);
  return out;
}

using Parts = std::vector<std::string>;

Parts matches(const std::string& pattern, const std::string& text) {
  const Regex regex(pattern, false, "");
  std::string classified;
  if (!replace_new_characters(text, classified)) classified = text;
  REQUIRE(classified.size() == text.size());
  Parts parts;
  for (size_t begin = 0, end = 0; regex.find(classified, end, begin, end);)
    parts.push_back(text.substr(begin, end - begin));
  return parts;
}

std::string refusal(const std::string& pattern) {
  return error_of([&] { from_oniguruma(pattern, "file:1:2: "); }).text;
}

}  // namespace

TEST_CASE("classes of characters are those of Unicode 16.0", "[tokenizer][unicode]") {
  std::string all;  // every character, with a line end that no class but \s has in between where it matters
  for (char32_t c = 0; c < end_of_codepoints; ++c)
    if (!is_surrogate(c)) append_utf8(all, c);
  std::string classified;
  REQUIRE(replace_new_characters(all, classified));
  REQUIRE(classified.size() == all.size());

  std::istringstream file(read_file(std::string(NRL_TEST_DATA) + "/fixtures/unicode_classes.txt", 1 << 20));
  int tested = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    std::istringstream fields(line);
    std::string pattern, range;
    fields >> pattern;
    std::vector<bool> expected(end_of_codepoints), found(end_of_codepoints);
    while (fields >> range) {
      const size_t dash = range.find('-');
      const auto first = std::stoul(range, nullptr, 16);
      const auto last = dash == std::string::npos ? first : std::stoul(range.substr(dash + 1), nullptr, 16);
      for (auto c = first; c <= last; ++c) expected[c] = true;
    }
    if (pattern == "digits") {
      const HfPipeline pipeline(nullptr, &static_cast<const JsonValue&>(parse_json(
                                             R"({"type":"Digits","individual_digits":true})", "d")));
      // A digit stands alone, whatever is around it.
      for (char32_t c = 0; c < end_of_codepoints; ++c) {
        if (is_surrogate(c)) continue;
        int parts = 0;
        pipeline.split(fmt::format("a{}a", utf8(c)), true, [&](std::string_view) { ++parts; });
        found[c] = parts == 3;
      }
    } else {
      const Regex regex(pattern, false, "");
      for (size_t begin = 0, end = 0; regex.find(classified, end, begin, end);) {
        size_t at = begin;
        found[next_character(all, at)] = true;
        REQUIRE(at == end);
      }
    }
    ++tested;
    for (char32_t c = 0; c < end_of_codepoints; ++c)
      if (!is_surrogate(c) && expected[c] != found[c]) {
        INFO(pattern << " and U+" << std::hex << static_cast<uint32_t>(c));
        CHECK(expected[c] == found[c]);
        break;
      }
  }
  CHECK(tested > 20);
}

TEST_CASE("patterns mean what they mean in Ruby's syntax", "[tokenizer][unicode]") {
  CHECK(matches("\\s+$", "a  \n b") == Parts{"  "});  // $ before every line end
  CHECK(matches("^b", "a\nb") == Parts{"b"});
  CHECK(matches("\\d{1,3}+", "1234567") == Parts{"1234567"});
  CHECK(matches("x(?:ab|c){2}+", "xabcab xabcabc") == Parts{"xabc", "xabcabc"});
  CHECK(matches("(?m)a.b|a.c", "a\nb") == Parts{"a\nb"});
  CHECK(matches("a.b", "a\nb") == Parts{});
  CHECK(matches("\\h+", "xffg\t ") == Parts{"ff"});
  CHECK(matches("a\\v", "a\n a\v") == Parts{"a\v"});
  CHECK(matches("\\bab\\b", "ab \u00e9ab ab\u0301 ab") == Parts{"ab", "ab"});
  CHECK(matches("[\\w-]+", "a-\u0301\u24b6\u2460") == Parts{"a-\u0301\u24b6"});
  CHECK(matches("[\\u4e00-\\u9fa5]+", "a\u4e2d") == Parts{"\u4e2d"});
  CHECK(matches("\\p{^L}+|\\P{N}", "1a") == Parts{"1", "a"});
  CHECK(matches("[\\p{Han}]+", "\u3007\u2ffcx\U0002ebf0\u3001") == Parts{"\u3007", "\U0002ebf0"});
  CHECK(matches("[\\p{N}a-c\\-_-]+", "b-_1d") == Parts{"b-_1"});
  CHECK(matches("a{,b|]", "a{,b]") == Parts{"a{,b", "]"});
  for (const auto& [pattern, part] :
       std::vector<std::pair<const char*, const char*>>{{"[a[bc]]", "a set within a set"},
                                                        {"[\\p{L}&&a]", "an intersection"},
                                                        {"[[:alpha:]]", "POSIX"},
                                                        {"[\\W]", "\\W in a set"},
                                                        {"\\p{Latin}", "\\p{Latin}"},
                                                        {"\\X", "\\X"},
                                                        {"\\p{L", "without an end"},
                                                        {"[ab", "a set without an end"},
                                                        {"\\", "backslash"},
                                                        {"\\u12", "\\u"},
                                                        {"\\p{N}|\\x{1C89}", "U+1C89"},
                                                        {"[\\p{N}\u1c85-\u1c8f]", "U+1C85 to U+1C8F"}}) {
    INFO(pattern);
    CHECK(contains(refusal(pattern), part));
    CHECK(contains(refusal(pattern), "file:1:2: unsupported pattern"));
  }
}
