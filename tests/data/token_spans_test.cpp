// Spans of tokens in text: the same ids as encode(), and the offsets of Hugging Face's tokenizers and of the
// sentencepiece library.

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include <sentencepiece_processor.h>

#include "apps/data/sentencepiece_model.h"
#include "apps/data/tokenizer.h"
#include "apps/data/unicode.h"
#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/data/hostile_text.h"
#include "tests/data/sentencepiece_kinds.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::data;
using namespace nrl::test;

namespace {

using Ids = std::vector<int32_t>;
using Ends = std::vector<int64_t>;

std::string fixture_path(const std::string& name) {
  return std::string(NRL_TEST_DATA) + "/fixtures/" + name;
}

// Characters [begin, end).
struct Span {
  int64_t begin, end;
  bool operator==(const Span&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Span& s) {
  return out << '[' << s.begin << ',' << s.end << ')';
}

// The characters of each token. A token of no width has the characters of the next one.
std::vector<Span> character_spans(std::string_view text, const Ends& ends) {
  std::vector<int64_t> character(text.size() + 1);  // index of the character of a byte
  int64_t count = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    count += (static_cast<uint8_t>(text[i]) & 0xC0) != 0x80;
    character[i] = count - 1;
  }
  character[text.size()] = count;
  std::vector<Span> spans(ends.size());
  for (size_t i = ends.size(); i-- > 0;) {
    const int64_t begin = i > 0 ? ends[i - 1] : 0, end = ends[i];
    REQUIRE(end >= begin);
    REQUIRE(end <= static_cast<int64_t>(text.size()));
    if (end > begin)
      spans[i] = {character[static_cast<size_t>(begin)], character[static_cast<size_t>(end - 1)] + 1};
    else
      spans[i] = i + 1 < ends.size() ? spans[i + 1] : Span{count, count};
  }
  return spans;
}

Ends ends_of(const Tokenizer& tokenizer, std::string_view text) {
  Ids ids;
  Ends ends;
  const int64_t skipped = tokenizer.encode_spans(text, ids, ends);
  Ids expected;
  REQUIRE(tokenizer.encode(text, expected) == skipped);
  REQUIRE(ids == expected);
  REQUIRE(ends.size() == ids.size());
  return ends;
}

}  // namespace

TEST_CASE("spans of tokens are those of Hugging Face's tokenizers", "[tokenizer][spans]") {
  const JsonValue vectors = read_json(fixture_path("token_spans.json"));
  const TemporaryDirectory dir;
  for (const JsonValue& entry : vectors.at("cases").items()) {
    const std::string name = entry.get_string("name");
    JsonValue json = read_json(fixture_path(entry.get_string("file")));
    for (const auto& [key, value] : entry.at("replaced").members()) {
      if (key == "model") {
        for (const auto& [option, setting] : value.members()) json.members().find(key)->set(option, setting);
      } else {
        json.set(key, value);
      }
    }
    write_file_atomic(dir / "t.json", json.dump());
    const auto tokenizer = load_hf_tokenizer(dir / "t.json");
    const auto& documents = vectors.at("documents").items();
    for (size_t d = 0; d < documents.size(); ++d) {
      const std::string& text = documents[d].as_string();
      const auto& flat = entry.at("offsets").items()[d].items();
      std::vector<Span> expected;
      for (size_t i = 0; i < flat.size(); i += 2)
        expected.push_back({flat[i].as_int(), flat[i + 1].as_int()});
      const Ends ends = ends_of(*tokenizer, text);
      const auto spans = character_spans(text, ends);
      CAPTURE(name, text, spans, expected);
      REQUIRE(spans.size() == expected.size());
      const bool trimmed = name == "byte-level, trimmed";
      // Normalization removes characters, such as combining marks, which are in no span there. Here they
      // belong to the character before them: spans are compared in units of a character and removed ones
      // after it.
      std::vector<bool> covered(text.size() + 1);
      for (const Span& span : expected)
        for (int64_t c = span.begin; c < span.end; ++c) covered[static_cast<size_t>(c)] = true;
      std::vector<int64_t> unit(text.size() + 1);
      int64_t units = 0;
      for (size_t c = 0; c < unit.size(); ++c) unit[c] = (units += covered[c] || trimmed) - 1;
      const auto in_units = [&](const Span& span) {
        return Span{unit.at(static_cast<size_t>(span.begin)),
                    span.end > span.begin ? unit.at(static_cast<size_t>(span.end - 1)) + 1
                                          : unit.at(static_cast<size_t>(span.begin))};
      };
      for (size_t i = 0; i < spans.size(); ++i) {
        const Span ours = in_units(spans[i]), theirs = in_units(expected[i]);
        CAPTURE(i);
        if (ends[i] == (i > 0 ? ends[i - 1] : 0)) {
          CHECK(ours.begin == theirs.begin);  // an added space has the first character after it there
        } else if (trimmed) {
          CHECK((ours.begin <= theirs.begin && theirs.end <= ours.end));
        } else {
          CHECK(ours == theirs);
        }
      }
    }
  }
}

TEST_CASE("spans of sentencepiece models are the library's", "[tokenizer][sentencepiece][spans]") {
  const auto documents = hostile_documents(700);
  for (const Kind& kind : kinds()) {
    INFO(kind.name);
    const std::string bytes = train(kind.options);
    sentencepiece::SentencePieceProcessor library;
    REQUIRE(library.LoadFromSerializedProto(bytes).ok());
    const auto tokenizer = make_sentencepiece(bytes, "test");
    for (const std::string& text : documents) {
      CAPTURE(text);
      const auto pieces = sentencepiece_spans(library.EncodeAsSerializedProto(text));
      REQUIRE(pieces);
      Ids ids{77};
      Ends ends{1 << 20};  // both are appended to
      REQUIRE(tokenizer->encode_spans(text, ids, ends) == 0);
      REQUIRE(std::vector(ids.begin() + 1, ids.end()) == tokenizer->encode(text));
      REQUIRE(ids.size() == pieces->size() + 1);
      REQUIRE(ends.size() == ids.size());
      // Pieces that share characters: there the last one has all of them, here they are divided.
      int64_t after = static_cast<int64_t>(text.size());  // end of the next piece that ends later
      for (size_t i = pieces->size(); i-- > 0;) {
        const int64_t theirs = (*pieces)[i].end, ours = ends[i + 1];
        const bool last = i + 1 == pieces->size();
        if (!last && (*pieces)[i + 1].end > theirs) after = (*pieces)[i + 1].end;
        CAPTURE(i);
        REQUIRE(ours >= theirs);
        REQUIRE((ours == theirs || (!last && ours < after) || library.IsByte(ids[i + 1])));
        REQUIRE((last || ours <= ends[i + 2]));
      }
    }
  }
}

TEST_CASE("spans of a damaged message of sentencepiece are refused",
          "[tokenizer][sentencepiece][spans][fuzz]") {
  sentencepiece::SentencePieceProcessor library;
  REQUIRE(library.LoadFromSerializedProto(train({{"byte_fallback", "true"}})).ok());
  const std::string good = library.EncodeAsSerializedProto("the caf\u00e9 \u4e2d");
  REQUIRE(sentencepiece_spans(good)->back().end == 13);
  CHECK_FALSE(sentencepiece_spans(good.substr(0, good.size() - 1)));
  for (int i = 0; i < fuzz_iterations() / 10; ++i)
    sentencepiece_spans(mutated(good, static_cast<uint64_t>(i)));
}

TEST_CASE("spans of hostile text", "[tokenizer][spans]") {
  const auto documents = hostile_documents(1500);
  const auto bytes = make_byte_tokenizer();
  Ids ids;
  Ends ends;
  bytes->encode_spans("a\xff", ids, ends);
  CHECK(ids == Ids{'a', 255});
  CHECK(ends == Ends{1, 2});
  for (const char* file : {"gpt2.json", "llama2.json", "llama3.json", "qwen2.json"}) {
    const auto tokenizer = load_hf_tokenizer(fixture_path(file));
    const bool unchanged = std::string(file) != "qwen2.json";
    for (const std::string& text : documents) {
      CAPTURE(file, text);
      for (int twice = 0; twice < 2; ++twice) {  // then from the cache
        ends = ends_of(*tokenizer, text);
        REQUIRE(std::is_sorted(ends.begin(), ends.end()));
        if (!text.empty()) REQUIRE(ends.back() == static_cast<int64_t>(text.size()));
      }
      if (!unchanged) continue;
      // Without normalization, the text of a token is its span, apart from spaces and special tokens.
      ids = tokenizer->encode(text);
      const std::string decoded = tokenizer->decode(ids);
      if (std::string(file) == "llama2.json" || decoded != text) continue;
      for (size_t i = 0; i < ids.size(); ++i) {
        const auto begin = static_cast<size_t>(i > 0 ? ends[i - 1] : 0);
        REQUIRE(tokenizer->decode({&ids[i], 1}) == text.substr(begin, static_cast<size_t>(ends[i]) - begin));
      }
    }
    CHECK(error_of([&] { tokenizer->encode_spans("ab\xff", ids, ends); }).code == 65);
  }
}

TEST_CASE("tokens that share characters divide them", "[tokenizer][spans]") {
  const auto llama = load_hf_tokenizer(fixture_path("llama2.json"));
  // The added space, the bytes of the character, a space, x.
  CHECK(ends_of(*llama, "\U0001f600 x") == Ends{0, 1, 2, 3, 4, 5, 6});
  const auto slow = make_sentencepiece(
      train(
          {{"treat_whitespace_as_suffix", "true"}, {"byte_fallback", "true"}, {"add_dummy_prefix", "false"}}),
      "test");
  CHECK(ends_of(*slow, "\U0001f600 x") == Ends{1, 2, 3, 4, 5, 6});
  const auto gpt2 = load_hf_tokenizer(fixture_path("gpt2.json"));
  CHECK(ends_of(*gpt2, "\U0001f600the") == Ends{1, 2, 3, 4, 7});
  const auto qwen = load_hf_tokenizer(fixture_path("qwen2.json"));
  CHECK(ends_of(*qwen, "ae\u0301b") == Ends{1, 4, 5});  // one token for two characters
  // Bytes without a token count to the next token, or to none.
  const TemporaryDirectory dir;
  write_file_atomic(
      dir / "t.json",
      R"({"normalizer":null,"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,)"
      R"("use_regex":false},"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}})");
  const auto partial = load_hf_tokenizer(dir / "t.json");
  CHECK(ends_of(*partial, "XaYbabZ") == Ends{4, 6});
  CHECK(partial->encode("XaYbabZ") == Ids{2, 2});
  CHECK(ends_of(*partial, "XXX").empty());
}
