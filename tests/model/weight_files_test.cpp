// Weights from files that other programs write: number formats, names, and what does not fit the model.

#include <algorithm>
#include <cmath>

#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/model/fixture.h"
#include "tests/reference/decoder.h"

using namespace nrl;
using test::StoredTensor;

namespace {

std::vector<StoredTensor> tensors_of(const test::Fixture& f) {
  std::vector<StoredTensor> tensors;
  for (const auto& [name, shape] : f.tensors) tensors.push_back(test::stored(name, shape));
  return tensors;
}

std::vector<double> last_logits(const std::string& directory, const test::Fixture& f) {
  test::LoadedModel m(directory);
  model::Inference session = m.inference(static_cast<int64_t>(f.tokens.size()));
  const auto logits = session.append(f.tokens);
  return {logits.begin(), logits.end()};
}

double difference(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0, largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i])) return INFINITY;
    worst = std::max(worst, std::abs(a[i] - b[i]));
    largest = std::max(largest, std::abs(b[i]));
  }
  return worst / largest;
}

}  // namespace

TEST_CASE("weights in f16, and in several formats, are held in f32", "[model][weights]") {
  const test::TemporaryDirectory directory(test::TemporaryDirectory::Where::memory);
  for (const char* name : {"gpt2-untied", "saved5-llama-llama3"})
    for (const bool mixed : {false, true}) {
      INFO(name << (mixed ? ", mixed" : ", f16"));
      const test::Fixture f = test::read_fixture(name);
      std::vector<StoredTensor> tensors;
      for (const auto& [tensor, shape] : f.tensors) {
        constexpr DType formats[] = {DType::f16, DType::bf16, DType::f32};
        tensors.push_back(test::stored(tensor, shape, mixed ? formats[tensors.size() % 3] : DType::f16));
      }
      test::write_model(directory.path(), f.config, tensors);
      const test::LoadedModel m(directory.path());
      for (const Tensor& weight : m.weights) CHECK(weight.dtype == DType::f32);
      const reference::Config config = reference::read_config(directory.path());
      const reference::Tensor want =
          reference::logits(config, reference::read_weights(config, directory.path()), f.tokens);
      const std::vector<double> last(want.values.end() - static_cast<std::ptrdiff_t>(want.columns),
                                     want.values.end());
      CHECK(difference(last_logits(directory.path(), f), last) < 1e-5);
      // Not those of the weights that were not rounded.
      CHECK(difference(last_logits(directory.path(), f), f.logits.back()) > 1e-4);
    }
}

TEST_CASE("bf16 weights stay bf16", "[model][weights]") {
  const test::TemporaryDirectory directory(test::TemporaryDirectory::Where::memory);
  const test::Fixture f = test::read_fixture("llama");
  test::write_model(directory.path(), f.config, f.tensors, DType::bf16);
  const test::LoadedModel m(directory.path());
  for (const Tensor& weight : m.weights) CHECK(weight.dtype == DType::bf16);
}

TEST_CASE("published files of GPT-2: no prefix, masks as buffers, the tied head once more",
          "[model][weights]") {
  const test::TemporaryDirectory directory(test::TemporaryDirectory::Where::memory);
  const test::Fixture f = test::read_fixture("gpt2");
  std::vector<StoredTensor> tensors = tensors_of(f);
  for (StoredTensor& t : tensors) t.name = t.name.substr(std::string("transformer.").size());
  StoredTensor head = tensors.at(0);
  REQUIRE(head.name == "wte.weight");
  head.name = "lm_head.weight";
  tensors.push_back(head);
  tensors.push_back(test::stored("h.0.attn.bias", {1, 1, 20, 20}));
  tensors.push_back(test::stored("h.1.attn.masked_bias", {1}));
  test::write_model(directory.path(), f.config, tensors);
  CHECK(difference(last_logits(directory.path(), f), f.logits.back()) < 1e-5);
}

TEST_CASE("multimodal files: the text part under either prefix, the rest is left out", "[model][weights]") {
  const test::TemporaryDirectory directory(test::TemporaryDirectory::Where::memory);
  const test::Fixture f = test::read_fixture("gemma3");
  const std::string before = "language_model.model.", since = "model.language_model.";
  std::vector<StoredTensor> tensors = tensors_of(f);
  for (StoredTensor& t : tensors)
    t.name = t.name.starts_with(before) ? since + t.name.substr(before.size()) : "model." + t.name;
  test::write_model(directory.path(), f.config, tensors);
  CHECK(difference(last_logits(directory.path(), f), f.logits.back()) < 1e-5);
  tensors.push_back(test::stored("model.language_model.layers.0.mlp.gate_proj.bias", {36}));
  test::write_model(directory.path(), f.config, tensors);
  const test::Caught e = test::error_of([&] { test::LoadedModel m(directory.path()); });
  CHECK(e.text.find("gate_proj.bias") != std::string::npos);
  CHECK(e.text.find("vision_tower") == std::string::npos);
}

TEST_CASE("tensors that do not fit the model are refused by name", "[model][weights]") {
  const test::TemporaryDirectory directory(test::TemporaryDirectory::Where::memory);
  for (const char* name : {"gpt2", "qwen3", "gemma3_text"}) {
    const test::Fixture f = test::read_fixture(name);
    const auto refused = [&](const std::vector<StoredTensor>& tensors, const std::string& tensor) {
      test::write_model(directory.path(), f.config, tensors);
      const test::Caught e = test::error_of([&] { test::LoadedModel m(directory.path()); });
      INFO(name << " without a fitting " << tensor << ": " << e.text);
      CHECK(e.code != 0);
      const std::string prefix = "transformer.";  // the message may have the published name
      CHECK(e.text.find(tensor.substr(tensor.starts_with(prefix) ? prefix.size() : 0)) != std::string::npos);
    };
    const std::vector<StoredTensor> all = tensors_of(f);
    for (size_t i = 0; i < all.size(); ++i) {
      std::vector<StoredTensor> tensors = all;
      tensors.erase(tensors.begin() + static_cast<std::ptrdiff_t>(i));
      refused(tensors, all[i].name);
      tensors = all;
      ++tensors[i].shape.back();
      tensors[i] = test::stored(tensors[i].name, tensors[i].shape);
      refused(tensors, all[i].name);
      tensors = all;
      const float nan = NAN;
      tensors[i].bytes.replace(tensors[i].bytes.size() - 4, 4, reinterpret_cast<const char*>(&nan), 4);
      refused(tensors, all[i].name);
    }
    std::vector<StoredTensor> more = all;
    more.push_back(test::stored("model.layers.0.mlp.gate_proj.bias", {36}));
    refused(more, "gate_proj.bias");
  }
}
