// Reward models in files: scores against double precision, heads that are missing or do not fit, and adapters
// with a head.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>

#include "apps/engine/engine.h"
#include "apps/model/families/hf_config.h"
#include "apps/plan/forward_plan.h"
#include "apps/state/adapter_files.h"
#include "apps/state/checkpoint.h"
#include "apps/state/hf_files.h"
#include "apps/state/merge_adapter.h"
#include "apps/state/model_source.h"
#include "core/device/cpu/features.h"
#include "core/io/atomic_file.h"
#include "core/io/safetensors.h"
#include "core/ops/kernel_table.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/model/fixture.h"
#include "tests/reference/decoder.h"

using namespace nrl;
using test::StoredTensor;
using test::TemporaryDirectory;

namespace {

constexpr int64_t scoring_rank = 3;
const std::string peft_prefix = "base_model.model.";

bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

int64_t hidden_of(const test::Fixture& f) {
  return f.tensors.front().second.back();
}

/// The configuration of a fixture with another head.
JsonValue reward_config(const test::Fixture& f, int64_t labels = 1) {
  JsonValue config = f.config;
  config.set("architectures", JsonValue::array({"AForSequenceClassification"}));
  config.set("num_labels", labels);
  return config;
}

/// The tensors of a fixture without the logits' matrix, and `score`.
std::vector<StoredTensor> reward_tensors(const test::Fixture& f, const StoredTensor& score) {
  std::vector<StoredTensor> out;
  for (const auto& [name, shape] : f.tensors)
    if (name != "lm_head.weight") out.push_back(test::stored(name, shape));
  out.push_back(score);
  return out;
}

StoredTensor score_of(const test::Fixture& f, const std::string& name = "score.weight") {
  return test::stored(name, {1, hidden_of(f)});
}

/// The scores of all tokens, as an evaluation computes them.
std::vector<double> scores(const std::string& directory, const std::vector<int32_t>& tokens) {
  ops::Exec exec;
  exec.kernels = &ops::cpu_kernels(cpu::best_isa());
  exec.threads = 1;
  engine::Engine engine(
      plan::make_forward_plan(train::load_model_directory(directory),
                              {.sequence_length = static_cast<int64_t>(tokens.size()),
                               .recipe = precision::recipe_for_weights(train::stored_dtype(directory)),
                               .products = exec.kernels->bf16_products},
                              {}, plan::grid_position({}, 1, 0)),
      exec);
  train::load_weights(directory, engine.plan().spec, engine.weight_slices());
  data::HostMicroBatch batch;
  batch.tokens = batch.targets = tokens;
  const Tensor all = engine.log_probs(batch);
  return {all.ptr<float>(), all.ptr<float>() + all.numel()};
}

/// The same in double precision: the first logits of a model whose matrix of logits begins with the score's.
std::vector<double> reference_scores(const std::string& directory, const test::Fixture& f,
                                     const std::vector<StoredTensor>& tensors, const StoredTensor& score) {
  std::vector<StoredTensor> all = tensors;
  std::erase_if(all, [](const StoredTensor& t) { return t.name == "score.weight"; });
  const int64_t vocabulary = f.tensors.front().second.front();
  StoredTensor logits = test::stored("lm_head.weight", {vocabulary, hidden_of(f)});
  std::memcpy(logits.bytes.data(), score.bytes.data(), score.bytes.size());
  all.push_back(logits);
  JsonValue config = f.config;
  config.set("tie_word_embeddings", false);
  test::write_model(directory, config, all);
  const reference::Config read = reference::read_config(directory);
  const reference::Tensor rows = reference::logits(read, reference::read_weights(read, directory), f.tokens);
  std::vector<double> out;
  for (size_t at = 0; at < rows.values.size(); at += rows.columns) out.push_back(rows.values[at]);
  return out;
}

double score_difference(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0, largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i])) return INFINITY;
    worst = std::max(worst, std::abs(a[i] - b[i]));
    largest = std::max(largest, std::abs(b[i]));
  }
  return worst / largest;
}

/// An adapter of the query projections with a head.
std::vector<StoredTensor> scoring_adapter(const test::Fixture& f) {
  std::vector<StoredTensor> out{score_of(f, peft_prefix + "score.weight")};
  for (const auto& [name, shape] : f.tensors) {
    if (!name.ends_with(".q_proj.weight")) continue;
    const std::string module = peft_prefix + name.substr(0, name.size() - 7);
    out.push_back(test::stored(module + ".lora_A.weight", {scoring_rank, shape[1]}));
    out.push_back(test::stored(module + ".lora_B.weight", {shape[0], scoring_rank}));
  }
  return out;
}

JsonValue scoring_config(const std::string& base, JsonValue saved) {
  return JsonValue::object({{"peft_type", "LORA"},
                            {"task_type", "SEQ_CLS"},
                            {"r", scoring_rank},
                            {"lora_alpha", 1.5},
                            {"modules_to_save", std::move(saved)},
                            {"base_model_name_or_path", base}});
}

/// As PEFT writes it.
JsonValue saved_modules() {
  return JsonValue::array({"classifier", "score"});
}

void write_scoring_adapter(const std::string& directory, const JsonValue& config,
                           const std::vector<StoredTensor>& tensors) {
  std::filesystem::create_directories(directory);
  write_file_atomic(directory + "/adapter_config.json", config.dump(2));
  test::write_tensors(directory + "/adapter_model.safetensors", tensors);
}

std::string failure(const std::function<void()>& work) {
  const test::Caught e = test::error_of(work);
  INFO(e.text);
  CHECK(e.code != 0);
  return e.text;
}

}  // namespace

TEST_CASE("scores are those in double precision", "[model][reward]") {
  const TemporaryDirectory directory(TemporaryDirectory::Where::memory);
  for (const char* name : {"llama", "mistral", "qwen2", "qwen3", "gpt2-untied", "qwen3_moe", "qwen2-tied"}) {
    INFO(name);
    const test::Fixture f = test::read_fixture(name);
    const StoredTensor score = score_of(f);
    const std::vector<StoredTensor> tensors = reward_tensors(f, score);
    test::write_model(directory / "reward", reward_config(f), tensors);
    CHECK(score_difference(scores(directory / "reward", f.tokens),
                           reference_scores(directory / "causal", f, tensors, score)) < 1e-5);
  }
}

TEST_CASE("heads that do not fit are refused by name", "[model][reward]") {
  const TemporaryDirectory directory(TemporaryDirectory::Where::memory);
  const test::Fixture f = test::read_fixture("llama");
  const auto refusal = [&](const JsonValue& config, const std::vector<StoredTensor>& tensors) {
    test::write_model(directory.path(), config, tensors);
    return failure([&] { test::LoadedModel m(directory.path()); });
  };
  std::vector<StoredTensor> tensors = reward_tensors(f, score_of(f));
  CHECK(mentions(refusal(reward_config(f, 2), tensors), "2 labels"));
  CHECK(mentions(refusal(f.config, tensors), "lm_head.weight"));
  tensors.back() = test::stored("score.weight", {2, hidden_of(f)});
  CHECK(mentions(refusal(reward_config(f), tensors), "score.weight has shape"));
  tensors.back() = test::stored("score.bias", {1});
  CHECK(mentions(refusal(reward_config(f), tensors), "score.weight"));
  tensors.back() = test::stored("lm_head.weight", f.tensors.back().second);
  tensors.push_back(score_of(f));
  CHECK(mentions(refusal(reward_config(f), tensors), "lm_head.weight"));
}

TEST_CASE("a model of logits gets a new head, and its logits are left out", "[model][reward]") {
  const TemporaryDirectory directory(TemporaryDirectory::Where::memory);
  for (const char* name : {"llama", "qwen2-tied", "gpt2"}) {
    INFO(name);
    const test::Fixture f = test::read_fixture(name);
    test::write_model(directory.path(), f.config, f.tensors);
    model::ModelSpec spec = train::load_model_directory(directory.path());
    train::require_logits(spec, "generate", directory.path());
    model::use_scalar_head(spec);
    const model::ParameterList parameters = model::make_parameters(spec);
    std::vector<std::vector<float>> memory;
    std::vector<Tensor> weights;
    for (const model::Parameter& p : parameters.all) {
      memory.emplace_back(static_cast<size_t>(p.numel()), 7.0f);
      weights.push_back(p.view(memory.back().data(), DType::f32));
    }
    train::load_weights(directory.path(), spec, engine::whole_slices(parameters, weights));
    for (size_t p = 0; p < memory.size(); ++p) {
      INFO(parameters.all[p].name);
      const bool kept = std::all_of(memory[p].begin(), memory[p].end(), [](float x) { return x == 7.0f; });
      CHECK(kept == (static_cast<int>(p) == parameters.head));
    }
  }
}

TEST_CASE("commands that need logits refuse reward models", "[model][reward]") {
  const TemporaryDirectory directory(TemporaryDirectory::Where::memory);
  const test::Fixture f = test::read_fixture("llama");
  test::write_model(directory.path(), reward_config(f), reward_tensors(f, score_of(f)));
  const model::ModelSpec spec = train::load_model_directory(directory.path());
  const std::string text = failure([&] { train::require_logits(spec, "generate", directory.path()); });
  CHECK(mentions(text, "generate: " + directory.path()));
  CHECK(mentions(text, "reward model"));
}

TEST_CASE("a reward model knows its padding", "[model][reward]") {
  const test::Fixture f = test::read_fixture("llama");
  const auto pad_of = [&](const JsonValue& config, train::HfFiles hf) {
    const model::ModelSpec spec = model::parse_model_config(config.dump(2), "test");
    const JsonValue json = parse_json(train::hf_config_json(spec, "float32", hf), "config.json");
    const JsonValue* pad = json.find("pad_token_id");
    return pad && !pad->is_null() ? pad->as_int() : -1;
  };
  JsonValue config = reward_config(f), null = config, own = config;
  config.set("pad_token_id", JsonValue());
  own.set("pad_token_id", 5);
  for (const bool keep : {false, true}) {
    const train::HfFiles hf{.files = {}, .bos = {}, .eos = 2, .pad = 3, .keep_config_ids = keep};
    CHECK(pad_of(config, hf) == 3);
    CHECK(pad_of(null, hf) == 3);
    CHECK(pad_of(own, hf) == 5);
    CHECK(pad_of(f.config, hf) == pad_of(f.config, {}));
  }
  CHECK(pad_of(config, {}) == -1);
  train::HfFiles outside;
  outside.pad = 1 << 20;
  CHECK(pad_of(config, outside) == -1);
}

TEST_CASE("adapters with a head score as their merged weights", "[model][reward][lora]") {
  const TemporaryDirectory directory(TemporaryDirectory::Where::memory);
  const std::string base = directory / "base", adapter = directory / "adapter";
  const test::Fixture f = test::read_fixture("llama");
  const StoredTensor other = test::stored("another score", {1, hidden_of(f)});
  StoredTensor of_base = other;
  of_base.name = "score.weight";
  for (const bool new_head : {true, false}) {
    INFO((new_head ? "of a causal language model" : "of a reward model"));
    if (new_head)
      test::write_model(base, f.config, f.tensors);
    else
      test::write_model(base, reward_config(f), reward_tensors(f, of_base));
    write_scoring_adapter(adapter, scoring_config(base, saved_modules()), scoring_adapter(f));
    const model::ModelSpec spec = train::load_model_directory(adapter);
    CHECK(spec.head == model::HeadKind::scalar);
    CHECK(spec.new_head == new_head);
    const JsonValue written = parse_json(train::adapter_config_json(spec, base), "adapter_config.json");
    CHECK(written.get_string("task_type") == "SEQ_CLS");
    CHECK(written.at("modules_to_save").dump() == R"(["score"])");
    const std::string merged = directory / (new_head ? "merged" : "merged again");
    train::merge_adapter(adapter, merged);
    const model::ModelSpec whole = train::load_model_directory(merged);
    CHECK(whole.head == model::HeadKind::scalar);
    CHECK(!whole.new_head);
    const SafetensorsSet files(merged);
    CHECK(!files.find("lm_head.weight"));
    const std::vector<double> got = scores(adapter, f.tokens);
    CHECK(score_difference(scores(merged, f.tokens), got) < 5e-6);
    // The head is the adapter's, the queries are changed.
    StoredTensor score = scoring_adapter(f).front();
    score.name = "score.weight";
    const std::vector<StoredTensor> tensors = reward_tensors(f, score);
    test::write_model(directory / "plain", reward_config(f), tensors);
    const std::vector<double> plain = scores(directory / "plain", f.tokens);
    CHECK(score_difference(got, plain) > 1e-3);
    CHECK(score_difference(got, plain) < 1);
  }
}

TEST_CASE("a new head is merged into several files", "[model][reward][lora]") {
  const TemporaryDirectory directory(TemporaryDirectory::Where::memory);
  const std::string base = directory / "base", adapter = directory / "adapter", merged = directory / "merged";
  const test::Fixture f = test::read_fixture("llama");
  test::write_model(base, f.config, f.tensors);
  write_scoring_adapter(adapter, scoring_config(base, saved_modules()), scoring_adapter(f));
  const std::vector<double> want = scores(adapter, f.tokens);
  std::filesystem::remove(base + "/model.safetensors");
  JsonValue map = JsonValue::object();
  std::vector<StoredTensor> parts[2];
  for (const auto& [name, shape] : f.tensors) {
    const bool second = name == "lm_head.weight" || name == "model.norm.weight";
    parts[second ? 1 : 0].push_back(test::stored(name, shape));
    map.set(name, second ? "model-2.safetensors" : "model-1.safetensors");
  }
  test::write_tensors(base + "/model-1.safetensors", parts[0]);
  test::write_tensors(base + "/model-2.safetensors", parts[1]);
  write_file_atomic(base + "/model.safetensors.index.json",
                    JsonValue::object({{"metadata", JsonValue::object()}, {"weight_map", map}}).dump(2));
  train::merge_adapter(adapter, merged);
  CHECK(score_difference(scores(merged, f.tokens), want) < 5e-6);
  const SafetensorsSet files(merged);
  CHECK(files.find("score.weight"));
  CHECK(!files.find("lm_head.weight"));
}

TEST_CASE("adapters whose head does not fit are refused by name", "[model][reward][lora]") {
  const TemporaryDirectory directory(TemporaryDirectory::Where::memory);
  const std::string base = directory / "base", adapter = directory / "adapter";
  const test::Fixture f = test::read_fixture("llama");
  test::write_model(base, f.config, f.tensors);
  const auto refusal = [&](JsonValue saved, const std::vector<StoredTensor>& tensors) {
    write_scoring_adapter(adapter, scoring_config(base, std::move(saved)), tensors);
    return failure([&] { (void)train::load_model_directory(adapter); });
  };
  const std::vector<StoredTensor> all = scoring_adapter(f);
  const std::vector<StoredTensor> headless(all.begin() + 1, all.end());
  CHECK(mentions(refusal(saved_modules(), headless), "base_model.model.score.weight"));
  CHECK(mentions(refusal(JsonValue(), all), "base_model.model.score.weight"));
  CHECK(mentions(refusal(JsonValue::array({"classifier"}), all), "modules_to_save"));
  CHECK(mentions(refusal(JsonValue::array({"score", "embed_tokens"}), all), "modules_to_save"));
  CHECK(mentions(refusal(JsonValue::array({1}), all), "modules_to_save"));
  CHECK(mentions(refusal("score", all), "modules_to_save"));
  std::vector<StoredTensor> larger = all;
  larger.front() = test::stored(peft_prefix + "score.weight", {2, hidden_of(f)});
  CHECK(mentions(refusal(saved_modules(), larger), "score.weight"));
  // A reward model whose adapter has no head.
  test::write_model(base, reward_config(f), reward_tensors(f, score_of(f)));
  CHECK(mentions(refusal(JsonValue(), headless), "base_model.model.score.weight"));
}
