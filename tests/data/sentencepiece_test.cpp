// Our encoding of sentencepiece models against the sentencepiece library.

#include <cmath>
#include <map>

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include "apps/data/sentencepiece_bpe.h"
#include "apps/data/sentencepiece_unigram.h"
#include "apps/data/tokenizer.h"
#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/data/hostile_text.h"
#include "tests/data/sentencepiece_kinds.h"
#include "tests/data/tokenizer_files.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::data;
using namespace nrl::test;

namespace {

using Ids = std::vector<int32_t>;
std::string content(const std::vector<Tokenizer::File>& files, const std::string& name) {
  for (const auto& file : files)
    if (file.name == name) return file.content;
  return {};
}

}  // namespace

TEST_CASE("sentencepiece models are encoded as the library does", "[tokenizer][sentencepiece]") {
  const auto documents = hostile_documents(1500);
  for (const Kind& kind : kinds()) {
    INFO(kind.name);
    const std::string bytes = train(kind.options);
    sentencepiece::SentencePieceProcessor library;
    REQUIRE(library.LoadFromSerializedProto(bytes).ok());
    const auto tokenizer = make_sentencepiece(bytes, "test");
    CHECK(tokenizer->slow_reason() == kind.slow_reason);
    Ids expected;
    for (const std::string& text : documents) {
      REQUIRE(library.Encode(text, &expected).ok());
      if (const Ids ids = tokenizer->encode(text); ids != expected) {
        CAPTURE(text);
        CHECK(ids == expected);
        break;
      }
    }
  }
}

TEST_CASE("a model directory of a sentencepiece model has what transformers needs",
          "[tokenizer][sentencepiece]") {
  const auto documents = hostile_documents(400);
  for (const Kind& kind : kinds()) {
    INFO(kind.name);
    const auto tokenizer = make_sentencepiece(train(kind.options), "test");
    const auto files = tokenizer->files();
    CHECK(files.front().name == "tokenizer.model");
    const JsonValue config = parse_json(content(files, "tokenizer_config.json"), "tokenizer_config.json");
    CHECK(config.get_string("eos_token") == "</s>");
    CHECK(config.get_string("tokenizer_class") ==
          (kind.json ? "PreTrainedTokenizerFast" : "BertGenerationTokenizer"));
    CHECK(content(files, "tokenizer.json").empty() != kind.json);
    CHECK((content(files, "spiece.model") == files.front().content) != kind.json);
    const TemporaryDirectory dir;
    write_files(*tokenizer, dir.path());
    CHECK(tokenizer_in(dir.path())->kind() == "sentencepiece");
    // Our reader of tokenizer.json has no regular expressions in normalizers.
    if (!kind.json || std::string(kind.name) == "collapsed spaces") continue;
    const auto hf = load_hf_tokenizer(dir / "tokenizer.json");
    CHECK(hf->vocab_size() == tokenizer->vocab_size());
    CHECK(hf->eos() == tokenizer->eos());
    for (const std::string& text : documents) {
      // There control pieces are found in text; for the library they are names only.
      if (text.find("s>") != std::string::npos || text.find("<unk>") != std::string::npos) continue;
      CAPTURE(text);
      REQUIRE(hf->encode(text) == tokenizer->encode(text));
    }
  }
}

TEST_CASE("no mutation of a sentencepiece model does harm", "[tokenizer][sentencepiece][fuzz]") {
  const std::string models[] = {
      train({{"byte_fallback", "true"}, {"user_defined_symbols", "<ud>"}}),
      train({{"byte_fallback", "true"}, {"normalization_rule_name", "nmt_nfkc"}}),
      train({{"model_type", "unigram"}, {"vocab_size", "300"}, {"normalization_rule_name", "nmt_nfkc"}})};
  int parsed = 0;
  for (int i = 0; i < fuzz_iterations() / 40; ++i) {
    const std::string& bytes = models[i % 3];
    const auto model = SentencePieceModel::parse(mutated(bytes, static_cast<uint64_t>(i)));
    if (!model) continue;
    Ids ids;
    const auto encode = [&](const auto& encoder) {
      ++parsed;
      for (const char* text : {"int main() \u4e2d 123 <ud>", "\uff28\uff49 \ufb01\u2460 e\u0301\u3000x"})
        try {
          encoder.encode(text, ids);
        } catch (const Error& e) {
          CHECK(std::string(e.what()).find("damaged rule") != std::string::npos);
        }
    };
    if (SentencePieceBpe::unsupported_reason(*model).empty()) {
      encode(SentencePieceBpe(*model));
      sentencepiece_companions(*model, bytes, -1, -1);
    }
    if (SentencePieceUnigram::unsupported_reason(*model).empty()) encode(SentencePieceUnigram(*model));
  }
  CHECK(parsed > 0);
}

TEST_CASE("a trie finds every piece that a text begins with", "[tokenizer][sentencepiece]") {
  const PhiloxStream random(3, 0);
  uint64_t counter = 0;
  const auto word = [&](uint64_t longest) {
    std::string text(1 + random.bits(counter++) % longest, ' ');
    for (char& c : text)
      c = std::string_view(
          "\0\x01"
          "ab\xe2\xff",
          6)[random.bits(counter++) % 6];
    return text;
  };
  std::map<std::string, int32_t> pieces;
  while (pieces.size() < 2000) pieces.emplace(word(8), static_cast<int32_t>(pieces.size()));
  std::vector<PieceTrie::Entry> entries;
  for (const auto& [text, id] : pieces) entries.push_back({text, id});
  const PieceTrie trie(entries);
  for (int i = 0; i < 5000; ++i) {
    const std::string text = word(12);
    std::vector<std::pair<int32_t, size_t>> found, expected;
    for (size_t n = 1; n <= text.size(); ++n)
      if (const auto piece = pieces.find(text.substr(0, n)); piece != pieces.end())
        expected.push_back({piece->second, n});
    trie.each_prefix(text, [&](int32_t id, size_t bytes) { found.push_back({id, bytes}); });
    REQUIRE(found == expected);
  }
}

TEST_CASE("unigram models that the library alone encodes", "[tokenizer][sentencepiece]") {
  using Model = SentencePieceModel;
  const auto parsed = Model::parse(train({{"model_type", "unigram"}, {"vocab_size", "300"}}));
  REQUIRE(parsed);
  REQUIRE(SentencePieceUnigram::unsupported_reason(*parsed).empty());
  const auto unsupported = [&](const std::function<void(Model&)>& change) {
    Model model = *parsed;
    change(model);
    return SentencePieceUnigram::unsupported_reason(model);
  };
  CHECK(unsupported([](Model& m) { m.pieces[9].text = m.pieces[10].text; }).find("twice") !=
        std::string::npos);
  CHECK(unsupported([](Model& m) { m.byte_fallback = true; }) == "it lacks pieces for some bytes");
  CHECK(unsupported([](Model& m) { m.charsmap = "abc"; }) == "the rules of its normalizer cannot be read");
  CHECK(unsupported([](Model& m) { m.pieces[0].type = Model::PieceType::normal; }) ==
        "it has 0 unknown pieces; expected 1");
  CHECK(unsupported([](Model& m) { m.pieces[9].score = NAN; }) == "the score of a piece is not finite");
}

TEST_CASE("models that ranked merges cannot represent are not supported", "[tokenizer][sentencepiece]") {
  using Model = SentencePieceModel;
  const auto parsed = Model::parse(train({{"byte_fallback", "true"}}));
  REQUIRE(parsed);
  REQUIRE(SentencePieceBpe::unsupported_reason(*parsed).empty());
  const auto unsupported = [&](const std::function<void(Model&)>& change) {
    Model model = *parsed;
    change(model);
    return SentencePieceBpe::unsupported_reason(model);
  };
  const auto longer = [](Model& m) -> Model::Piece& {
    return *std::find_if(m.pieces.rbegin(), m.pieces.rend(), [](const auto& p) { return p.text == "the"; });
  };
  CHECK(unsupported([&](Model& m) { longer(m).score = m.pieces[260].score; }).find("score") !=
        std::string::npos);
  CHECK(unsupported([&](Model& m) { longer(m).text = "t\u4e2d"; }).find("not itself a piece") !=
        std::string::npos);
  CHECK(unsupported([&](Model& m) { longer(m).type = Model::PieceType::unused; }) == "it has unused pieces");
  CHECK(unsupported([&](Model& m) {
          longer(m) = {"x y", 0, Model::PieceType::user_defined};
        }) == "a user-defined piece contains a space");
  CHECK(unsupported([&](Model& m) {
          m.pieces.push_back({"\u4e2d", 0, Model::PieceType::control});
        }).find("single character") != std::string::npos);
  CHECK(unsupported([&](Model& m) { m.pieces[5].type = Model::PieceType::control; }) ==
        "it lacks pieces for some bytes");
  CHECK(unsupported([&](Model& m) { m.pieces[0].type = Model::PieceType::control; }) ==
        "it has 0 unknown pieces; expected 1");
}
