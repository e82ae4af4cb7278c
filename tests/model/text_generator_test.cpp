// Generating text: the tokens chosen against the decoder of tests/reference, where generation stops, which
// tokens it may choose, and how tokens become text.

#include "apps/train/loop/text_generator.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <utility>

#include "apps/data/chat/chat_prompt.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/model/fixture.h"
#include "tests/reference/decoder.h"

using namespace nrl;
using train::SamplingOptions;
using Ids = std::vector<int32_t>;

namespace {

/// Token i is the text pieces[i]; text is encoded by characters.
class ListTokenizer final : public data::Tokenizer {
 public:
  explicit ListTokenizer(size_t count) {
    for (size_t i = 0; i < count; ++i) pieces.push_back(std::string(1, static_cast<char>('A' + i)));
  }
  int64_t encode(std::string_view text, Ids& out) const override {
    for (char c : text) out.push_back(c - 'A');
    return 0;
  }
  int64_t encode_spans(std::string_view text, Ids& ids, std::vector<int64_t>& ends) const override {
    for (size_t i = 0; i < text.size(); ++i) ends.push_back(static_cast<int64_t>(i + 1));
    return encode(text, ids);
  }
  std::optional<int32_t> id_of(std::string_view) const override { return std::nullopt; }
  std::vector<SpecialToken> special_token_list() const override { return {}; }
  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (int32_t id : ids) text += pieces.at(static_cast<size_t>(id));
    return text.substr(text.starts_with(' '));  // as tokenizers that begin every text with a space
  }
  int64_t vocab_size() const override { return static_cast<int64_t>(pieces.size()); }
  std::optional<int32_t> bos() const override { return beginning; }
  std::optional<int32_t> eos() const override { return end; }
  std::string_view kind() const override { return "list"; }
  std::vector<File> files() const override { return {}; }

  std::vector<std::string> pieces;
  std::optional<int32_t> beginning, end;
};

constexpr size_t vocabulary = 29;  // of the fixtures

struct Model {
  explicit Model(const std::string& name) {
    const test::Fixture f = test::read_fixture(name);
    test::write_model(directory_.path(), f.config, f.tensors);
    loaded = std::make_unique<test::LoadedModel>(directory_.path());
    config = reference::read_config(directory_.path());
    weights = reference::read_weights(config, directory_.path());
  }
  train::TextGenerator generator(const std::string& prompt, int64_t max_tokens) const {
    return generator(data::text_prompt(prompt, tokenizer), max_tokens);
  }
  train::TextGenerator generator(data::Prompt prompt, int64_t max_tokens) const {
    return {loaded->spec,      loaded->parameters, loaded->weights,   tokenizer,
            std::move(prompt), max_tokens,         train::cpu_exec(1)};
  }
  std::string text(const std::string& prompt, int64_t max_tokens, const SamplingOptions& options) const {
    train::TextGenerator g = generator(prompt, max_tokens);
    return text_of(g, options);
  }
  static std::string text_of(train::TextGenerator& g, const SamplingOptions& options) {
    std::string text;
    g.run(options, [&](std::string_view piece) { text += piece; });
    return text;
  }
  /// The likeliest continuation of `prompt`.
  Ids greedy(const std::string& prompt, size_t count) const {
    const Ids ids = tokenizer.data::Tokenizer::encode(prompt);
    const Ids all = reference::greedy(config, weights, ids, count);
    return {all.begin() + static_cast<std::ptrdiff_t>(ids.size()), all.end()};
  }
  /// The probabilities of the token after `prompt`.
  std::vector<double> next(const std::string& prompt, double temperature) const {
    const reference::Tensor logits =
        reference::logits(config, weights, tokenizer.data::Tokenizer::encode(prompt));
    std::vector<double> p(vocabulary);
    double sum = 0;
    for (size_t i = 0; i < vocabulary; ++i) sum += p[i] = std::exp(logits(logits.rows - 1, i) / temperature);
    for (double& x : p) x /= sum;
    return p;
  }

  ListTokenizer tokenizer{vocabulary};
  std::unique_ptr<test::LoadedModel> loaded;
  reference::Config config;
  reference::Tensors weights;

 private:
  test::TemporaryDirectory directory_{test::TemporaryDirectory::Where::memory};
};

constexpr SamplingOptions likeliest{0.0, 0, 1.0, 0};

// Chi-square of counts against probabilities, less its expected value, in standard deviations.
double excess(const std::map<char, int>& counts, const std::vector<double>& p, int total) {
  double chi2 = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    const auto found = counts.find(static_cast<char>('A' + i));
    const double expected = p[i] * total, d = (found == counts.end() ? 0 : found->second) - expected;
    chi2 += d * d / expected;
  }
  const auto freedom = static_cast<double>(p.size() - 1);
  return (chi2 - freedom) / std::sqrt(2 * freedom);
}

}  // namespace

TEST_CASE("greedy text is that of the reference decoder", "[generate]") {
  for (const char* name : {"gpt2", "llama", "llama-type-yarn", "mistral", "qwen2", "qwen3", "gemma3_text"}) {
    const Model m(name);
    for (const char* prompt : {"F", "CQIBKY"}) {
      INFO(name << ", prompt " << prompt);
      CHECK(m.text(prompt, 12, likeliest) == m.tokenizer.decode(m.greedy(prompt, 12)));
      CHECK(m.text(prompt, 12, {5.0, 1, 1.0, 3}) == m.tokenizer.decode(m.greedy(prompt, 12)));
      CHECK(m.text(prompt, 12, {5.0, 0, 0.0, 3}) == m.tokenizer.decode(m.greedy(prompt, 12)));
    }
  }
}

TEST_CASE("generation stops after max_tokens, at the end token, and at the end of learned positions",
          "[generate]") {
  Model m("gpt2");  // 20 positions
  for (int64_t count : {1, 2, 9})
    CHECK(m.text("ABC", count, {1.0, 0, 1.0, 5}).size() == static_cast<size_t>(count));
  // The last token follows a full context.
  CHECK(m.text("ABC", 17, likeliest) == m.tokenizer.decode(m.greedy("ABC", 17)));
  CHECK(m.text("ABC", 18, likeliest) == m.tokenizer.decode(m.greedy("ABC", 18)));
  CHECK(m.text("ABC", 100, likeliest) == m.tokenizer.decode(m.greedy("ABC", 18)));
  CHECK(m.text(std::string(19, 'B'), 100, likeliest).size() == 2);
  for (size_t length : {20, 21}) {
    const test::Caught e = test::error_of([&] { m.generator(std::string(length, 'B'), 1); });
    CHECK(e.code == static_cast<int>(Exit::usage));
    CHECK_THAT(e.text, ContainsSubstring("20 positions"));
  }
  const Ids tokens = m.greedy("ABC", 10);
  const size_t first =
      static_cast<size_t>(std::find(tokens.begin(), tokens.end(), tokens[4]) - tokens.begin());
  m.tokenizer.end = tokens[4];
  CHECK(m.text("ABC", 10, likeliest) == m.tokenizer.decode(Ids(tokens.begin(), tokens.begin() + first)));
  // In the prompt it ends nothing.
  const std::string prompt = std::string("ABC") + static_cast<char>('A' + tokens[4]);
  m.tokenizer.end.reset();
  const std::string free = m.text(prompt, 3, likeliest);
  m.tokenizer.end = tokens[4];
  CHECK(m.text(prompt, 3, likeliest) == free.substr(0, free.find(static_cast<char>('A' + tokens[4]))));
}

TEST_CASE("rotary positions have no last one", "[generate]") {
  const Model m("llama-type-dynamic");  // max_position_embeddings 8
  CHECK(m.text("ABCDEFGHIJ", 30, {1.0, 0, 1.0, 5}).size() == 30);
}

TEST_CASE("ids beyond the tokenizer's are never chosen, and refused in a prompt", "[generate]") {
  Model m("llama");
  m.tokenizer.pieces.resize(6);  // of 29 ids of the model
  std::set<char> seen;
  for (uint64_t seed = 0; seed < 20; ++seed)
    for (char c : m.text("AB", 20, {20.0, 0, 1.0, seed})) seen.insert(c);
  CHECK(seen == std::set<char>{'A', 'B', 'C', 'D', 'E', 'F'});
  const reference::Tensor logits = reference::logits(m.config, m.weights, {0, 1});
  size_t best = 0;
  for (size_t i = 0; i < 6; ++i)
    if (logits(1, i) > logits(1, best)) best = i;
  CHECK(m.text("AB", 1, likeliest) == m.tokenizer.pieces[best]);
  m.tokenizer = ListTokenizer(32);
  const test::Caught e = test::error_of([&] { m.generator("A]", 1); });  // id 28 is the last
  CHECK(e.code == 0);
  const test::Caught beyond = test::error_of([&] { m.generator("A^", 1); });
  CHECK(beyond.code == static_cast<int>(Exit::data));
  CHECK_THAT(beyond.text, ContainsSubstring("29"));
}

TEST_CASE("an empty prompt begins with the beginning token, else with the end token", "[generate]") {
  Model m("qwen3");
  CHECK(test::error_of([&] { m.generator("", 1); }).code == static_cast<int>(Exit::usage));
  m.tokenizer.end = 7;
  const auto until_end = [](std::string text) { return text.substr(0, text.find('H')); };
  CHECK(m.text("", 5, likeliest) == until_end(m.tokenizer.decode(m.greedy("H", 5))));
  m.tokenizer.beginning = 4;
  CHECK(m.text("", 5, likeliest) == until_end(m.tokenizer.decode(m.greedy("E", 5))));
  // Other prompts stay as they are.
  for (const char* prompt : {"A", "CQ", "FIBKY"})
    CHECK(m.text(prompt, 5, likeliest) == until_end(m.tokenizer.decode(m.greedy(prompt, 5))));
}

TEST_CASE("a seed decides the text", "[generate]") {
  const Model m("llama");
  train::TextGenerator g = m.generator("ABC", 20);
  std::set<std::string> texts;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    const SamplingOptions options{1.5, 0, 1.0, seed};
    const std::string text = Model::text_of(g, options);
    CHECK(text.size() == 20);
    texts.insert(text);
    // Neither an earlier text of this generator nor another generator changes it.
    CHECK(Model::text_of(g, options) == text);
    CHECK(m.text("ABC", 20, options) == text);
    CHECK(m.text("ABC", 8, options) == text.substr(0, 8));
  }
  CHECK(texts.size() == 10);
}

TEST_CASE("the first tokens of many seeds have the model's distribution", "[generate]") {
  const Model m("qwen2");
  for (double temperature : {0.7, 1.0}) {
    train::TextGenerator g = m.generator("HELLO", 1);
    std::map<char, int> counts;
    constexpr int seeds = 4000;
    for (uint64_t seed = 0; seed < seeds; ++seed)
      ++counts[Model::text_of(g, {temperature, 0, 1.0, seed}).at(0)];
    CHECK(std::abs(excess(counts, m.next("HELLO", temperature), seeds)) < 4);
    // The distribution of another temperature would be noticed.
    CHECK(excess(counts, m.next("HELLO", 1.3 * temperature), seeds) > 10);
  }
}

TEST_CASE("the tokens of one text are drawn independently", "[generate]") {
  // With constant embeddings and no positions every token has the same distribution.
  Model m("llama");
  const Tensor embedding = m.loaded->weights[m.loaded->parameters.embedding];
  for (int64_t i = 0; i < embedding.numel(); ++i)
    embedding.ptr<float>()[i] = 0.02f * static_cast<float>(i % embedding.dim(1) % 5 - 2);
  for (double& w : m.weights.at("embedding.weight").values) w = 0;
  for (size_t r = 0; r < vocabulary; ++r)
    for (size_t i = 0; i < m.config.hidden; ++i)
      m.weights.at("embedding.weight")(r, i) = static_cast<double>(embedding.ptr<float>()[i]);
  const std::vector<double> p = m.next("A", 2.0);
  constexpr int count = 1500;
  const std::string text = m.text("A", count, {2.0, 0, 1.0, 11});
  REQUIRE(text.size() == count);
  std::map<char, int> counts;
  double same = 0, expected = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    ++counts[text[i]];
    if (i > 0 && text[i] == text[i - 1]) ++same;
  }
  CHECK(std::abs(excess(counts, p, count)) < 4);
  // Two tokens in a row are equal with the sum of p^2.
  for (double x : p) expected += x * x * (count - 1);
  CHECK(std::abs(same - expected) < 4 * std::sqrt(expected));
}

TEST_CASE("text ends before an end token or an end text", "[generate]") {
  const Model m("llama");
  constexpr int64_t most = 12;
  const Ids tokens = m.greedy("ABC", most);
  const std::string free = m.tokenizer.decode(tokens);
  const Ids prompt = m.tokenizer.data::Tokenizer::encode("ABC");
  const auto ended = [&](Ids end_ids, std::string end_text) {
    train::TextGenerator g =
        m.generator({.ids = prompt, .end_ids = std::move(end_ids), .end_text = std::move(end_text)}, most);
    std::string text;
    const bool ends = g.run(likeliest, [&](std::string_view piece) { text += piece; });
    return std::pair(text, ends);
  };
  CHECK(ended({}, "") == std::pair(free, false));
  CHECK(ended({28, tokens[5]}, "") == std::pair(free.substr(0, free.find(free[5])), true));
  const std::string end = free.substr(5, 3);
  CHECK(ended({}, end) == std::pair(free.substr(0, free.find(end)), true));
  // Text that is held back is shown if the end text does not follow.
  CHECK(ended({}, free.substr(most - 2) + "x") == std::pair(free, false));
  CHECK(ended({tokens[5]}, free.substr(free.find(free[5]) - 1, 1) + "x") ==
        std::pair(free.substr(0, free.find(free[5])), true));
}

TEST_CASE("text that may begin an end text is held back", "[generate]") {
  train::TextEnd end("<|end|>");
  const auto append = [&](std::string_view piece) { return end.append(piece); };
  CHECK(append("a<b<") == "a<b");
  CHECK(append("|en") == "");
  CHECK(append("<<|en") == "<|en<");
  CHECK(append("d|") == "");
  CHECK_FALSE(end.reached());
  CHECK(append("> more") == "");
  CHECK(end.reached());
  CHECK(end.rest() == "");
  train::TextEnd whole("ab"), none("");
  CHECK(whole.append("xaby") == "x");
  CHECK(whole.reached());
  CHECK(none.append("abc") == "abc");
  CHECK_FALSE(none.reached());
}

TEST_CASE("the end of a text does not depend on its pieces", "[generate][fuzz]") {
  std::mt19937 random(7);
  const auto letters = [&](size_t count) {
    std::string text;
    for (size_t i = 0; i < count; ++i) text += static_cast<char>('a' + random() % 2);
    return text;
  };
  for (int round = 0; round < 2000; ++round) {
    const std::string text = letters(random() % 20), end_text = letters(1 + random() % 4);
    train::TextEnd end(end_text);
    std::string shown;
    for (size_t at = 0, size; at < text.size() && !end.reached(); at += size)
      shown += end.append(text.substr(at, size = 1 + random() % 3));
    shown += end.rest();
    INFO(text << ", end " << end_text);
    CHECK(shown == text.substr(0, text.find(end_text)));
    CHECK(end.reached() == (text.find(end_text) != std::string::npos));
  }
}

TEST_CASE("a prompt may be replaced by a longer or a shorter one", "[generate]") {
  for (const char* name : {"llama", "gpt2"}) {
    const Model m(name);
    train::TextGenerator g = m.generator("AB", 3);
    for (const char* prompt : {"CQIBKY", "AB", "CQIBKYCQIBKYCQIB", "F"}) {
      INFO(name << ", prompt " << prompt);
      g.set_prompt(data::text_prompt(prompt, m.tokenizer));
      CHECK(Model::text_of(g, likeliest) == m.text(prompt, 3, likeliest));
    }
  }
  const Model m("gpt2");  // 20 positions
  train::TextGenerator g = m.generator("AB", 3);
  CHECK(test::error_of([&] { g.set_prompt(data::text_prompt(std::string(20, 'A'), m.tokenizer)); }).code ==
        static_cast<int>(Exit::usage));
}

TEST_CASE("text comes in whole characters", "[generate]") {
  Model m("llama-type-yarn");
  const Ids tokens = m.greedy("CQIBKY", 5);
  REQUIRE(std::set<int32_t>(tokens.begin(), tokens.end()).size() == 5);
  // " x", then a character of four bytes in two tokens, then one of three bytes in two.
  const std::vector<std::string> parts = {" x", "\xf0\x9f", "\x98\x80y\xe2", "\x82", "\xac"};
  for (size_t i = 0; i < 5; ++i) m.tokenizer.pieces[tokens[i]] = parts[i];
  const std::vector<std::string> whole = {" x", "\xf0\x9f\x98\x80y", "\xe2\x82\xac"};
  for (int64_t count = 1; count <= 5; ++count) {
    std::vector<std::string> pieces;
    train::TextGenerator g = m.generator("CQIBKY", count);
    g.run(likeliest, [&](std::string_view piece) { pieces.emplace_back(piece); });
    const size_t complete = count < 3 ? 1 : count < 5 ? 2 : 3;
    CHECK(pieces ==
          std::vector<std::string>(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(complete)));
  }
}

TEST_CASE("text follows its prompt as if both were one", "[generate]") {
  const auto continued = [](const data::Tokenizer& tokenizer, std::string_view prompt,
                            std::string_view rest) {
    const Ids all = tokenizer.encode(std::string(prompt) + std::string(rest));
    const Ids first = tokenizer.encode(prompt);
    REQUIRE(std::equal(first.begin(), first.end(), all.begin()));
    train::TextStream stream(tokenizer, first);
    std::string text;
    for (size_t i = first.size(); i < all.size(); ++i) {
      const std::string piece = stream.append(all[i]);
      INFO(piece);
      CHECK(piece.find("\xef\xbf\xbd") == std::string::npos);
      text += piece;
    }
    return text;
  };
  // A space before the first token of a text is the tokenizer's own, one before a later token is not.
  const auto llama2 =
      data::make_tokenizer("hf:" + std::string(NRL_TEST_DATA) + "/../data/fixtures/llama2.json");
  CHECK(continued(*llama2, "the", " other i") == " other i");
  // Special tokens have no text.
  REQUIRE(llama2->eos());
  train::TextStream stream(*llama2, llama2->encode("the"));
  CHECK(stream.append(*llama2->eos()).empty());
  CHECK(stream.append(llama2->encode("the").at(0)) == " the");
  // Characters that are not in the vocabulary come as bytes.
  const auto sentencepiece = data::make_sentencepiece(
      data::train_sentencepiece(std::vector<std::string>(50, "the cat sat on the mat with the other cat"),
                                300, 1),
      "m");
  CHECK(continued(*sentencepiece, "the", " cat \xe2\x82\xac\xf0\x9f\x98\x80 on") ==
        " cat \xe2\x82\xac\xf0\x9f\x98\x80 on");
  CHECK(continued(*data::make_byte_tokenizer(), "a", "\xe2\x82\xac b") == "\xe2\x82\xac b");
}

TEST_CASE("texts that are computed together are those of their seeds alone", "[generate]") {
  const Model m("llama");
  train::TextGenerator together(m.loaded->spec, m.loaded->parameters, m.loaded->weights, m.tokenizer, 12,
                                train::cpu_exec(1));
  const std::vector<std::string> texts{"AB", "HELLO", "Q"};
  std::vector<data::Prompt> prompts;
  for (const std::string& t : texts) prompts.push_back(data::text_prompt(t, m.tokenizer));
  const SamplingOptions options{.temperature = 0.9, .top_k = 20, .top_p = 0.9, .seed = 5};
  std::map<size_t, std::string> all;
  together.run_all(prompts, 3, options, [&](size_t i, const train::TextGenerator::Text& text) {
    CHECK(all.emplace(i, text.text).second);
    CHECK(!text.ended);
  });
  REQUIRE(all.size() == 9);
  for (const auto& [i, text] : all) {
    SamplingOptions own = options;
    own.seed += i;
    CHECK(text == m.text(texts[i / 3], 12, own));
  }
  CHECK(all.at(0) != all.at(1));
  const train::GenerationSpeed& speed = together.speed();
  CHECK(speed.prompt_tokens == 2 + 5 + 1);
  CHECK(speed.decoded_tokens > 0);
  CHECK(speed.first_token_seconds > 0);
}
