// Inference with a cache against the decoder in double precision of tests/reference: every position, in
// chunks of many sizes, within sliding windows, and in bf16.

#include "apps/model/inference.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/model/fixture.h"
#include "tests/reference/decoder.h"

using namespace nrl;

namespace {

using Chunks = std::vector<size_t>;

constexpr size_t long_sequence = 150;  // the prompt goes through the model in pieces of 128 tokens

std::vector<int32_t> tokens_of(size_t count, size_t seed = 0) {
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < count; ++i)
    tokens.push_back(static_cast<int32_t>((i * i + 7 * i + 3 + seed * 5) % 29));
  return tokens;
}

/// Pieces of `size` that make up `total`; the last one may be shorter.
Chunks pieces(size_t size, size_t total) {
  Chunks sizes(total / size, size);
  if (total % size) sizes.push_back(total % size);
  return sizes;
}

/// A model directory and both ways to compute its logits.
class BothModels {
 public:
  BothModels(const std::string& fixture, const std::vector<std::pair<std::string, JsonValue>>& changes = {},
             DType dtype = DType::f32) {
    test::Fixture f = test::read_fixture(fixture);
    for (const auto& [key, value] : changes) f.config.set(key, value);
    test::write_model(directory_.path(), f.config, f.tensors, dtype);
    product_ = std::make_unique<test::LoadedModel>(directory_.path());
    config_ = reference::read_config(directory_.path());
    weights_ = reference::read_weights(config_, directory_.path());
  }

  reference::Tensor want(const std::vector<int32_t>& tokens, size_t rope_length = 0) const {
    return reference::logits(config_, weights_, tokens, rope_length);
  }
  model::Inference inference(size_t max_tokens, int threads = 1) {
    return product_->inference(static_cast<int64_t>(max_tokens), threads);
  }

 private:
  test::TemporaryDirectory directory_{test::TemporaryDirectory::Where::memory};
  std::unique_ptr<test::LoadedModel> product_;
  reference::Config config_;
  reference::Tensors weights_;
};

/// Appends the tokens in these chunks. The logits after each chunk against their row of `want`: the greatest
/// difference relative to the greatest logit of all.
double difference(model::Inference& session, const std::vector<int32_t>& tokens, const Chunks& chunks,
                  const reference::Tensor& want) {
  double largest = 0, worst = 0;
  for (size_t i = 0; i < want.size(); ++i) largest = std::max(largest, std::abs(want[i]));
  size_t done = 0;
  for (size_t count : chunks) {
    const auto logits = session.append(std::span(tokens).subspan(done, count));
    done += count;
    REQUIRE(session.length() == static_cast<int64_t>(done));
    REQUIRE(logits.size() == want.columns);
    if (!std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); })) return INFINITY;
    for (size_t v = 0; v < logits.size(); ++v)
      worst = std::max(worst, std::abs(static_cast<double>(logits[v]) - want(done - 1, v)));
  }
  REQUIRE(done == tokens.size());
  return worst / largest;
}

// Sums in fp32, and angles of rotary positions that are rounded to fp32.
constexpr double tolerance = 3e-5;

// Norms after attention and MLP scale errors up: 1e-5 in one piece, five times as much in single rows.
double tolerance_of(std::string_view name) {
  return name == "gemma3_text" ? 1e-4 : tolerance;
}

}  // namespace

TEST_CASE("logits of inference, token by token and in chunks", "[model][inference]") {
  for (const char* name : {"gpt2-untied", "gpt2-gelu", "llama-biases", "saved5-llama-llama3",
                           "llama-type-yarn", "mistral", "saved4-qwen2", "qwen3-bias", "gemma3_text"}) {
    INFO(name);
    BothModels m(name);
    const size_t length = std::string(name).starts_with("gpt2") ? 20 : long_sequence;
    const std::vector<int32_t> tokens = tokens_of(length);
    const reference::Tensor want = m.want(tokens);
    for (size_t chunk :
         {size_t{1}, size_t{2}, size_t{3}, size_t{7}, size_t{64}, size_t{128}, size_t{129}, length}) {
      if (chunk > length) continue;
      INFO("chunks of " << chunk);
      model::Inference session = m.inference(length, chunk % 2 ? 1 : 2);
      CHECK(difference(session, tokens, pieces(chunk, length), want) < tolerance_of(name));
    }
    INFO("a prompt and single tokens");
    Chunks chunks{length - 12};
    chunks.resize(13, 1);
    model::Inference session = m.inference(length);
    CHECK(difference(session, tokens, chunks, want) < tolerance_of(name));
  }
}

TEST_CASE("inference within sliding windows shorter and longer than the sequence", "[model][inference]") {
  const std::vector<int32_t> tokens = tokens_of(long_sequence);
  for (int window : {1, 2, 16, 127, 128, 129, 149, 150, 151, 4096}) {
    BothModels m("mistral", {{"sliding_window", window}});
    const reference::Tensor want = m.want(tokens);
    for (size_t chunk : {size_t{1}, size_t{60}, long_sequence}) {
      INFO("window " << window << ", chunks of " << chunk);
      model::Inference session = m.inference(long_sequence);
      CHECK(difference(session, tokens, pieces(chunk, long_sequence), want) < tolerance);
    }
  }
}

TEST_CASE("a sequence after reset() sees nothing of the one before", "[model][inference]") {
  for (const char* name : {"gpt2", "llama", "mistral"}) {
    INFO(name);
    BothModels m(name);
    model::Inference session = m.inference(20);
    for (size_t length : {size_t{20}, size_t{9}, size_t{14}}) {
      const std::vector<int32_t> tokens = tokens_of(length, length);
      session.reset();
      CHECK(difference(session, tokens, pieces(4, length), m.want(tokens)) < tolerance);
    }
  }
}

TEST_CASE("rope type dynamic is stretched for the longest sequence of a session", "[model][inference]") {
  BothModels m("llama-type-dynamic");  // 8 positions
  const std::vector<int32_t> tokens = tokens_of(12);
  for (size_t longest : {size_t{12}, size_t{40}}) {
    model::Inference session = m.inference(longest);
    CHECK(difference(session, tokens, pieces(5, 12), m.want(tokens, longest)) < tolerance);
  }
}

TEST_CASE("inference with weights and activations in bf16", "[model][inference]") {
  for (const char* name : {"gpt2-untied", "llama-biases", "mistral", "saved4-qwen2", "qwen3-bias"}) {
    INFO(name);
    BothModels m(name, {}, DType::bf16);
    const std::vector<int32_t> tokens = tokens_of(20);
    const reference::Tensor want = m.want(tokens);
    for (size_t chunk : {size_t{1}, size_t{6}, size_t{20}}) {
      INFO("chunks of " << chunk);
      model::Inference session = m.inference(20);
      // The weights are the same in both. Activations are rounded to 8 bits (2^-9 = 0.002) about ten times in
      // each of two layers.
      const double d = difference(session, tokens, pieces(chunk, 20), want);
      CHECK(d < 0.03);
    }
  }
}
