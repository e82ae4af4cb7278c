#include "apps/data/tokenizer.h"

#include "apps/data/hf_pipeline.h"
#include "apps/data/unicode.h"
#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/data/tokenizer_files.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::data;
using namespace nrl::test;

namespace {

using Ids = std::vector<int32_t>;

std::string fixture(const std::string& name) {
  return std::string(NRL_TEST_DATA) + "/fixtures/" + name;
}

struct Golden {
  const char *file, *text;
  Ids ids;
  const char* decoded;
};

// Made with Hugging Face's tokenizers 0.23 from the same files.
// clang-format off
const Golden golden_cases[] = {
    {"gpt2.json", "int main(void) { return 12345; }\012\012  x",
     {268, 275, 65, 260, 8, 86, 79, 73, 68, 9, 221, 91, 221, 264, 84, 85, 82, 78, 335, 319, 27, 221, 93, 199, 199, 221, 221, 88},
     "int main(void) { return 12345; }\012\012  x"},
    {"gpt2.json", "they're the other DOG'S, don't",
     {258, 89, 283, 259, 306, 221, 36, 47, 39, 7, 51, 12, 304, 282},
     "they're the other DOG'S, don't"},
    {"gpt2.json", "l'e\314\201te\314\201 \344\270\255\346\226\207\343\200\200\340\244\271\340\244\277\340\244\250\340\245\215\340\244\246\340\245\200 \360\237\230\200\011",
     {76, 7, 69, 137, 224, 84, 69, 137, 224, 278, 160, 223, 223, 261, 118, 331, 330, 334, 329, 333, 221, 173, 254, 247, 223, 198},
     "l'e\314\201te\314\201 \344\270\255\346\226\207\343\200\200\340\244\271\340\244\277\340\244\250\340\245\215\340\244\246\340\245\200 \360\237\230\200\011"},
    {"gpt2.json", "a<tool>sb <|endoftext|>the<tool> end",
     {65, 341, 66, 221, 0, 258, 340, 221, 69, 78, 68},
     "a<tool>sb the<tool> end"},
    {"gpt2.json", "</s> i i  i   1",
     {28, 15, 83, 30, 281, 281, 221, 281, 221, 221, 279},
     "</s> i i  i   1"},
    {"qwen2.json", "int main(void) { return 12345; }\012\012  x",
     {268, 275, 65, 260, 338, 79, 73, 68, 9, 221, 91, 221, 264, 84, 85, 82, 78, 221, 17, 18, 19, 20, 21, 27, 221, 93, 199, 199, 221, 221, 88},
     "int main(void) { return 12345; }\012\012  x"},
    {"qwen2.json", "they're the other DOG'S, don't",
     {258, 89, 281, 259, 304, 221, 36, 47, 39, 7, 51, 12, 302, 280},
     "they're the other DOG'S, don't"},
    {"qwen2.json", "l'e\314\201te\314\201 \344\270\255\346\226\207\343\200\200\340\244\271\340\244\277\340\244\250\340\245\215\340\244\246\340\245\200 \360\237\230\200\011",
     {76, 331, 278, 160, 223, 223, 261, 118, 335, 336, 272, 223, 221, 173, 254, 247, 223, 198},
     "l'\303\251t\303\251 \344\270\255\346\226\207\343\200\200\340\244\271\340\244\277\340\244\250\340\245\215\340\244\246\340\245\200 \360\237\230\200\011"},
    {"qwen2.json", "a<tool>sb <|endoftext|>the<tool> end",
     {65, 341, 66, 221, 0, 258, 340, 221, 69, 78, 68},
     "a<tool>sb the<tool> end"},
    {"qwen2.json", "</s> i i  i   1",
     {28, 15, 83, 30, 279, 279, 221, 279, 221, 221, 221, 17},
     "</s> i i  i   1"},
    {"llama3.json", "int main(void) { return 12345; }\012\012  x",
     {268, 275, 65, 260, 8, 86, 79, 73, 68, 9, 221, 91, 221, 264, 84, 85, 82, 78, 221, 334, 318, 27, 221, 93, 199, 199, 221, 221, 88},
     "int main(void) { return 12345; }\012\012  x"},
    {"llama3.json", "they're the other DOG'S, don't",
     {258, 89, 281, 259, 304, 221, 36, 47, 39, 7, 51, 12, 302, 280},
     "they're the other DOG'S, don't"},
    {"llama3.json", "l'e\314\201te\314\201 \344\270\255\346\226\207\343\200\200\340\244\271\340\244\277\340\244\250\340\245\215\340\244\246\340\245\200 \360\237\230\200\011",
     {76, 7, 69, 137, 224, 84, 69, 137, 224, 278, 160, 223, 223, 261, 118, 339, 332, 100, 272, 223, 221, 173, 254, 247, 223, 198},
     "l'e\314\201te\314\201 \344\270\255\346\226\207\343\200\200\340\244\271\340\244\277\340\244\250\340\245\215\340\244\246\340\245\200 \360\237\230\200\011"},
    {"llama3.json", "a<tool>sb <|endoftext|>the<tool> end",
     {65, 341, 66, 221, 0, 258, 340, 221, 69, 78, 68},
     "a<tool>sb the<tool> end"},
    {"llama3.json", "</s> i i  i   1",
     {28, 15, 83, 30, 279, 279, 221, 279, 221, 221, 221, 17},
     "</s> i i  i   1"},
    {"llama2.json", "int main(void) { return 12345; }\012\012  x",
     {380, 393, 296, 126, 390, 317, 53, 54, 55, 56, 267, 296, 128, 13, 13, 296, 296, 291},
     "int main(void) { return 12345; }\012\012  x"},
    {"llama2.json", "they're the other DOG'S, don't",
     {341, 301, 345, 296, 71, 82, 74, 259, 86, 263, 343},
     "they're the other DOG'S, don't"},
    {"llama2.json", "l'e\314\201te\314\201 \344\270\255\346\226\207\343\200\200\340\244\271\340\244\277\340\244\250\340\245\215\340\244\246\340\245\200 \360\237\230\200\011",
     {310, 259, 272, 207, 132, 287, 272, 207, 132, 316, 230, 131, 131, 227, 167, 188, 227, 167, 194, 227, 167, 171, 227, 168, 144, 227, 167, 169, 295, 296, 243, 162, 155, 131, 12},
     "l'e\314\201te\314\201 \344\270\255\346\226\207\343\200\200\340\244\271\340\244\277\340\244\250\340\245\215\340\244\246\340\245\200 \360\237\230\200\011"},
    {"llama2.json", "a<tool>sb <|endoftext|>the<tool> end",
     {296, 268, 63, 287, 282, 282, 279, 65, 286, 269, 296, 63, 127, 272, 281, 303, 273, 287, 272, 291, 287, 127, 65, 300, 63, 287, 282, 282, 279, 65, 296, 272, 281, 271},
     "a<tool>sb <|endoftext|>the<tool> end"},
    {"llama2.json", "</s> i i  i   1",
     {2, 296, 319, 319, 296, 319, 296, 296, 317},
     " i i  i   1"},
};
// clang-format on

}  // namespace

TEST_CASE("a tokenizer.json gives the ids of Hugging Face's tokenizers", "[tokenizer]") {
  for (const Golden& golden : golden_cases) {
    INFO(golden.file << ": " << golden.text);
    const auto tokenizer = load_hf_tokenizer(fixture(golden.file));
    CHECK(tokenizer->encode(golden.text) == golden.ids);
    CHECK(tokenizer->encode(golden.text) == golden.ids);  // from the cache
    CHECK(tokenizer->decode(golden.ids) == golden.decoded);
  }
}

TEST_CASE("special tokens and names of a tokenizer.json", "[tokenizer]") {
  const auto gpt2 = load_hf_tokenizer(fixture("gpt2.json"));
  CHECK(gpt2->vocab_size() == 342);
  CHECK(gpt2->eos() == 0);
  CHECK_FALSE(gpt2->bos().has_value());
  const auto llama2 = load_hf_tokenizer(fixture("llama2.json"));
  CHECK(llama2->eos() == 2);
  CHECK(llama2->bos() == 1);
  CHECK(error_of([&] { gpt2->encode("ab\xff"); }).text == "the text is not valid UTF-8 at byte 2");
  CHECK(error_of([&] { gpt2->decode(Ids{342}); }).code == 65);
  CHECK(error_of([&] { gpt2->decode(Ids{-1}); }).code == 65);
}

TEST_CASE("characters without a token are counted and left out, or become unk_token", "[tokenizer]") {
  const TemporaryDirectory dir;
  const auto load = [&](const std::string& options, const std::string& vocab,
                        const std::string& pre_tokenizer) {
    write_file_atomic(dir / "t.json", R"({"normalizer":null,"pre_tokenizer":)" + pre_tokenizer +
                                          R"(,"model":{"type":"BPE",)" + options +
                                          R"("vocab":{"a":0,"b":1,"ab":2)" + vocab +
                                          R"(},"merges":["a b"]}})");
    return load_hf_tokenizer(dir / "t.json");
  };
  // The ids are those of Hugging Face's tokenizers 0.23.
  const auto bytes = load("", "", R"({"type":"ByteLevel","add_prefix_space":false,"use_regex":false})");
  Ids ids;
  CHECK(bytes->encode("aXb", ids) == 1);
  CHECK(ids == Ids{2});
  CHECK(bytes->encode("X\u00e9", ids) == 3);
  CHECK(bytes->encode("aXb", ids) == 1);  // not from the cache
  CHECK(ids == Ids{2, 2});
  for (const bool fuse : {false, true}) {
    const auto fallback = load(fmt::format(R"("unk_token":"?","byte_fallback":true,"fuse_unk":{},)", fuse),
                               R"(,"?":3,"<0xC3>":4,"<0xA9>":5)", "null");
    CHECK(fallback->encode("aXYb") == (fuse ? Ids{0, 3, 1} : Ids{0, 3, 3, 1}));
    CHECK(fallback->encode("aX\u00e9b") == Ids{0, 4, 5, 3, 1});
    CHECK(fallback->encode("X\u00e9Yab") == (fuse ? Ids{4, 5, 3, 2} : Ids{4, 5, 3, 3, 2}));
  }
}

TEST_CASE("Metaspace marks the first part, every part or none", "[tokenizer]") {
  struct Golden {  // ids of Hugging Face's tokenizers 0.23
    const char* scheme;
    bool split;
    Ids first, second;
  };
  const Golden goldens[] = {{"first", true, {5, 4, 7, 2, 3, 4}, {5, 7, 4, 7, 1}},
                            {"first", false, {4, 8, 0, 7, 0, 8, 4}, {5, 7, 4, 7, 1}},
                            {"always", true, {5, 4, 7, 5, 3, 4}, {5, 7, 4, 7, 3, 1}},
                            {"always", false, {4, 8, 0, 7, 4, 8, 4}, {5, 7, 4, 7, 3, 1}},
                            {"never", true, {2, 4, 7, 2, 3, 4}, {5, 7, 4, 7, 1}},
                            {"never", false, {0, 8, 0, 7, 0, 8, 4}, {5, 7, 4, 7, 1}}};
  const TemporaryDirectory dir;
  for (const Golden& golden : goldens) {
    CAPTURE(golden.scheme, golden.split);
    write_file_atomic(
        dir / "t.json",
        fmt::format(R"({{"normalizer":null,"added_tokens":[{{"id":7,"content":"<x>","special":true}}],)"
                    R"("pre_tokenizer":{{"type":"Metaspace","replacement":"\u2581","prepend_scheme":"{}",)"
                    R"("split":{}}},"model":{{"type":"BPE","unk_token":"?","vocab":{{"a":0,"b":1,"ab":2,)"
                    R"("\u2581":3,"\u2581a":4,"\u2581ab":5,"?":6,"<x>":7,"b\u2581":8}},)"
                    R"("merges":["b \u2581","a b","\u2581 ab","\u2581 a"]}}}})",
                    golden.scheme, golden.split));
    const auto tokenizer = load_hf_tokenizer(dir / "t.json");
    CHECK(tokenizer->encode("ab a<x>ab  a") == golden.first);
    CHECK(tokenizer->encode(" ab<x> a<x>b") == golden.second);
  }
}

TEST_CASE("a tokenizer.json brings the files that lay beside it", "[tokenizer]") {
  const TemporaryDirectory dir;
  const auto names = [](const Tokenizer& tokenizer) {
    std::string all;
    for (const auto& file : tokenizer.files()) all += file.name + (file.derived ? "* " : " ");
    return all;
  };
  write_file_atomic(dir / "tokenizer.json", read_file(fixture("gpt2.json"), 1 << 20));
  const auto bare = load_hf_tokenizer(dir / "tokenizer.json");
  CHECK(names(*bare) == "tokenizer.json special_tokens_map.json* tokenizer_config.json* ");
  const JsonValue config = parse_json(bare->files()[2].content, "c");
  CHECK(config.get_string("tokenizer_class") == "PreTrainedTokenizerFast");
  CHECK(config.get_string("eos_token") == "<|endoftext|>");
  write_file_atomic(dir / "tokenizer_config.json", R"({"eos_token":{"content":"<tool>"},"bos_token":null})");
  write_file_atomic(dir / "chat_template.jinja", "{{ messages }}");
  const auto full = load_hf_tokenizer(dir / "tokenizer.json");
  CHECK(names(*full) == "tokenizer.json tokenizer_config.json chat_template.jinja special_tokens_map.json* ");
  CHECK(full->eos() == 340);
  CHECK(full->files()[3].content.find("\"eos_token\": \"<tool>\"") != std::string::npos);
}

TEST_CASE("long pieces are merged as short ones are", "[tokenizer]") {
  // Over 48 symbols a heap takes over from scanning: the ids of a repeated word must not change.
  const auto tokenizer = load_hf_tokenizer(fixture("gpt2.json"));
  const Ids word = tokenizer->encode(std::string(40, 'o'));
  std::string text(400, 'o');
  CHECK(tokenizer->decode(tokenizer->encode(text)) == text);
  CHECK(tokenizer->encode(text).size() == word.size() * 10);
}

TEST_CASE("a model directory carries its tokenizer", "[tokenizer]") {
  const std::string text = "the caf\xc3\xa9 <|endoftext|>\n";
  const auto bytes = make_tokenizer("bytes");
  CHECK(bytes->vocab_size() == 257);
  CHECK(bytes->eos() == 256);
  CHECK(bytes->decode(bytes->encode(text)) == text);
  CHECK(bytes->encode("\xff") == Ids{255});
  const TemporaryDirectory a, b;
  write_files(*bytes, a.path());
  CHECK(make_tokenizer(a.path())->kind() == "bytes");
  // The same file read as what it is for other programs.
  const auto as_hf = load_hf_tokenizer(a / "tokenizer.json");
  CHECK(as_hf->encode("the caf\xc3\xa9") == bytes->encode("the caf\xc3\xa9"));
  CHECK(as_hf->eos() == 256);
  const auto gpt2 = load_hf_tokenizer(fixture("gpt2.json"));
  write_files(*gpt2, b.path());
  CHECK(tokenizer_in(b.path())->encode(text) == gpt2->encode(text));
  CHECK(error_of([] { make_tokenizer("bpe"); }).code == 64);
  const TemporaryDirectory empty;
  CHECK(error_of([&] { make_tokenizer(empty.path()); }).code == 66);
}

TEST_CASE("a trained sentencepiece model gives every text back", "[tokenizer]") {
  std::vector<std::string> lines;
  for (int i = 0; i < 300; ++i)
    lines.push_back(fmt::format("  for (int i{} = 0; i < {}; ++i) total += value[i];", i, i));
  const std::string model = train_sentencepiece(lines, 400, 1);
  const auto tokenizer = make_sentencepiece(model, "test");
  CHECK(tokenizer->vocab_size() <= 400);
  CHECK(tokenizer->eos() == 2);
  const std::string text = "  for\n\n\tint  \xe4\xb8\xad\xf0\x9f\x98\x80 x ";
  CHECK(tokenizer->decode(tokenizer->encode(text)) == text);
  CHECK(tokenizer->encode("for (int").size() < 8);
  CHECK(error_of([&] { tokenizer->encode("\xc0"); }).code == 65);
  CHECK(error_of([&] { train_sentencepiece(lines, 100, 1); }).code == 64);
  CHECK(error_of([&] { train_sentencepiece({"", ""}, 400, 1); }).code == 65);
  CHECK(error_of([] { make_sentencepiece("not a model", "x.model"); }).code == 65);
}

TEST_CASE("unsupported settings of tokenizer.json are reported with their position", "[tokenizer]") {
  const TemporaryDirectory dir;
  const std::string text = read_file(fixture("gpt2.json"), 1 << 20);
  const auto refused = [&](const std::string& from, const std::string& to, const std::string& part) {
    std::string changed = text;
    const size_t at = changed.find(from);
    REQUIRE(at != std::string::npos);
    changed.replace(at, from.size(), to);
    write_file_atomic(dir / "t.json", changed);
    const Caught caught = error_of([&] { load_hf_tokenizer(dir / "t.json"); });
    INFO(caught.text);
    CHECK(caught.code == 65);
    CHECK(contains(caught.text, part));
    CHECK(contains(caught.text, "t.json:1:"));
  };
  refused("\"type\":\"BPE\"", "\"type\":\"WordPiece\"", "'WordPiece'");
  refused("\"normalizer\":null", "\"normalizer\":{\"type\":\"Lowercase\"}", "'Lowercase'");
  refused("\"pre_tokenizer\":{\"type\":\"ByteLevel\"", "\"pre_tokenizer\":{\"type\":\"Whitespace\"",
          "'Whitespace'");
  refused("\"dropout\":null", "\"dropout\":0.5", "dropout");
  refused("\"merges\":[\"", "\"merges\":[\"q q\",\"", "not in the vocabulary");
  refused("\"merges\":[\"", "\"merges\":[\"qq\",\"", "two tokens");
  refused("\"vocab\":{\"<|endoftext|>\":0", "\"vocab\":{\"<|endoftext|>\":1", "used twice");
  refused("\"vocab\":{\"<|endoftext|>\":0", "\"vocab\":{\"<|endoftext|>\":2000000000", "out of range");
  refused("\"single_word\":false", "\"single_word\":true", "single_word");
}

TEST_CASE("no mutation of a tokenizer.json does harm", "[tokenizer][fuzz]") {
  const TemporaryDirectory dir;
  const std::string text = read_file(fixture("llama3.json"), 1 << 20);
  for (int i = 0; i < fuzz_iterations() / 40; ++i) {
    const std::string changed = mutated(text, static_cast<uint64_t>(i));
    const std::string path = dir / "m.json";
    std::filesystem::remove(path);
    File::create(path).pwrite_all(changed.data(), changed.size(), 0);
    const Caught caught = error_of([&] {
      const auto tokenizer = load_hf_tokenizer(path);
      tokenizer->decode(tokenizer->encode("int main() \xe4\xb8\xad 123 <tool>"));
    });
    REQUIRE((caught.code == 0 || caught.code == 65));
  }
}

TEST_CASE("UTF-8 is checked", "[tokenizer]") {
  for (const char* good :
       {"", "plain ascii text", "\xc3\xa9", "\xe4\xb8\xad", "\xf0\x9f\x98\x80", "\xed\x9f\xbf"})
    CHECK(find_invalid_utf8(good) == std::string_view::npos);
  for (const char* bad : {"abc\xff", "abc\xc3", "abc\xc0\x80", "abc\xe0\x80\x80", "abc\xed\xa0\x80",
                          "abc\xf4\x90\x80\x80", "abc\xf0\x9f\x98", "abc\x80"})
    CHECK(find_invalid_utf8(bad) == 3);
}

TEST_CASE("texts are normalized to form C", "[tokenizer][unicode]") {
  // clang-format off
  for (const auto& [text, expected] : std::vector<std::pair<std::string, std::string>>{
           {"", ""},
           {"ascii, d\u00e9j\u00e0 vu", "ascii, d\u00e9j\u00e0 vu"},
           {"e\u0301", "\u00e9"},
           {"\u212b", "\u00c5"},                                // a singleton
           {"\u0344", "\u0308\u0301"},                          // decomposes into marks
           {"\u1ea5a\u0302\u0301", "\u1ea5\u1ea5"},             // two steps of composition
           {"\u1100\u1161\u11a8", "\uac01"},                    // Hangul
           {"\uac00\u11a8\u11a8", "\uac01\u11a8"},
           {"\uac00\u11a7", "\uac00\u11a7"},                    // no final consonant
           {"\u0958", "\u0915\u093c"},                          // excluded from composition
           {"\ufb1d", "\u05d9\u05b4"},
           {"\U0001d15e", "\U0001d157\U0001d165"},
           {"\u2adc", "\u2add\u0338"},
           {"a\u0323\u0307", "\u1ea1\u0307"},                   // the dot above stays
           {"a\u0307\u0323", "\u1ea1\u0307"},                   // and comes second
           {"a\u0315\u0300\u05ae\u0062", "\u00e0\u05ae\u0315b"},  // classes 232, 230, 228
           {"a\u0300\u0301", "\u00e0\u0301"},                   // one class: order stays
           {"\u0b47\u0300\u0b3e", "\u0b47\u0300\u0b3e"},       // blocked by a mark in between
           {"\u0345\u0316", "\u0316\u0345"},
           {"\U00011131\U00011127", "\U0001112e"},              // Unicode 6.1
           {"\u1e945\U0001e94a\U0001e944", "\u1e945\U0001e94a\U0001e944"},  // 9.0: 7 before 230
           // Newer characters neither move, compose nor decompose.
           {"\u0345\u1dfb\u1df6\u0316", "\u1dfb\u0345\u1df6\u0316"},  // 9.0 and 10.0
           {"\U00011935\U00011930", "\U00011935\U00011930"},   // 13.0
           {"\u0345\u0898\u0316", "\u0345\u0898\u0316"},       // 14.0
           {"\u0345\U0001e4ee", "\u0345\U0001e4ee"},           // 15.0
           {"\U000105d2\u0307", "\U000105d2\u0307"},           // 16.0
           {"\U00011938\u0301\u0327", "\U00011938\u0327\u0301"}}) {  // marks after one do
    INFO(text);
    CHECK(to_nfc(text) == expected);
    CHECK(to_nfc("x " + text + " " + text) == "x " + expected + " " + expected);
  }
  // clang-format on
}

TEST_CASE("the printable alphabet of bytes is GPT-2's", "[tokenizer]") {
  CHECK(byte_level_text(" \n!\x7f") == "\u0120\u010a!\u0121");
  std::string bytes;
  std::string all;
  for (int b = 0; b < 256; ++b) all += static_cast<char>(b);
  CHECK(byte_level_bytes(byte_level_text(all), bytes));
  CHECK(bytes == all);
  CHECK_FALSE(byte_level_bytes(" ", bytes));
}
