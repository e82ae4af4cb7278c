// The fast paths of reading and splitting text against the general ones.

#include "apps/data/word_scanner.h"

#include "apps/data/json_line.h"
#include "apps/data/oniguruma.h"
#include "apps/data/regex.h"
#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/data/hostile_text.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::data;
using namespace nrl::test;

TEST_CASE("words are the matches of the regular expression", "[tokenizer][unicode]") {
  const auto random_text = [](uint64_t seed) {
    const std::vector<std::string> parts = {
        "a",      "Zz",     "'",          "'s",         "'LL",    "'re",    "'v",     "1",
        "23",     " ",      "  ",         "\n",         "\r\n",   "\t",     "\v",     ".",
        "!?",     "\u00e9", "\u0661",     "\u00a0",     "\u0085", "\u2028", "\u3000", "\u017f",
        "\u4e2d", "\u2019", "\U0001f600", "\U00010400", "\x1c"};
    const PhiloxStream random(seed, 1);
    std::string text;
    for (uint64_t i = 0; i < 12; ++i) text += parts[random.bits(i) % parts.size()];
    return text;
  };
  std::vector<std::string> texts = hostile_documents(600);
  for (uint64_t seed = 0; seed < 20000; ++seed) texts.push_back(random_text(seed));
  for (const std::string_view pattern : {gpt2_pattern, llama3_pattern, qwen2_pattern}) {
    const Regex regex(std::string(pattern), false, "");
    const auto scanner = WordScanner::of(pattern);
    REQUIRE(scanner);
    size_t words = 0, scanned = 0;
    for (const std::string& original : texts) {
      std::string replaced;
      const std::string& text = replace_new_characters(original, replaced) ? replaced : original;
      for (size_t at = 0, begin = 0, end = 0; at < text.size(); at = end) {
        REQUIRE(regex.find(text, at, begin, end));
        REQUIRE(begin == at);
        const size_t own = scanner->match(text, at);
        CAPTURE(pattern, text, at);
        if (own != 0 && own != end) REQUIRE(own == end);
        ++words;
        scanned += own != 0;
      }
    }
    CHECK(scanned > words * 3 / 4);
    CHECK(scanned < words);
  }
  CHECK_FALSE(WordScanner::of("\\s+"));
}

TEST_CASE("ASCII words need no regular expression", "[tokenizer]") {
  const std::string text = "int main(void) { return 12345; }  // don't\n\n\tend ";
  for (const std::string_view pattern : {gpt2_pattern, llama3_pattern, qwen2_pattern}) {
    const auto scanner = WordScanner::of(pattern);
    for (size_t at = 0; at < text.size();) {
      const size_t end = scanner->match(text, at);
      REQUIRE(end > at);
      at = end;
    }
  }
}

TEST_CASE("the text of a plain JSON line is that of the parser", "[prepare]") {
  const std::vector<std::string> plain = {
      R"({"text":"a long text of plain words"})",
      R"( { "id" : 7 , "score": -0.25, "text" : "\"\\\/\b\f\n\r\t", "ok": true, "no":false,"x":null } )"
      "\r",
      R"({"url":"http://x","text":"\u00e9\ud83d\ude00 é 中"})", R"({"text":"","te\u0078t2":"b"})"};
  const std::vector<std::string> other = {R"({"text":"a","text":"b"})",
                                          R"({"text":"a","meta":{"b":1}})",
                                          R"({"text":"a","list":[]})",
                                          R"({"text":"a","n":1e999})",
                                          R"({"text":"a","n":01})",
                                          R"({"text":"a","n":-})",
                                          R"({"text":"a"}})",
                                          R"({"text":"a",})",
                                          R"({"text":"\ud83d"})",
                                          R"({"text":"\ud83dx"})",
                                          R"({"text":"\q"})",
                                          "{\"text\":\"a\tb\"}",
                                          R"({"text":1})",
                                          R"({"other":"a"})",
                                          R"("text")",
                                          R"({"text":"a"} x)",
                                          R"({})",
                                          "",
                                          R"({"text":"a)",
                                          R"({"text":"\u12)",
                                          R"({"text":"a","n":1.})"};
  for (const std::string& line : plain) {
    CAPTURE(line);
    CHECK(text_of_plain_line(line, "text") == parse_json(line, "line").get_string("text"));
  }
  for (const std::string& line : other) {
    CAPTURE(line);
    CHECK_FALSE(text_of_plain_line(line, "text"));
  }
  std::vector<std::string> all = plain;
  all.insert(all.end(), other.begin(), other.end());
  int taken = 0;
  for (int i = 0; i < fuzz_iterations(); ++i) {
    const std::string line = mutated(all[static_cast<size_t>(i) % all.size()], static_cast<uint64_t>(i));
    if (find_invalid_utf8(line) != std::string::npos || line.find('\0') != std::string::npos) continue;
    const auto text = text_of_plain_line(line, "text");
    if (!text) continue;
    ++taken;
    CAPTURE(line);
    REQUIRE(parse_json(line, "line").get_string("text") == *text);
  }
  CHECK(taken > 0);
}
