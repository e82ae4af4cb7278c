// Every key at the ends of its range through all that is checked and planned before a run starts: accepted,
// or refused with a reason at a key; what is accepted also makes a step. Under the sanitizers of CI this also
// finds sums and products that overflow.

#include "apps/plan/run_plan.h"
#include "apps/state/model_source.h"
#include "apps/train/start/run_config.h"
#include "apps/train/start/run_data.h"
#include "tests/catch.h"
#include "tests/config/key_needs.h"
#include "tests/train/training_run.h"

using namespace nrl;
using namespace nrl::test;
using namespace std::string_literals;
using config_detail::Kind;

namespace {

const std::pair<const char*, const char*> models[] = {
    {"gpt2",
     "{model_type: gpt2, resid_pdrop: 0, embd_pdrop: 0, vocab_size: 272, n_embd: 16, n_layer: "
     "2, n_head: 4, n_positions: 64, attn_pdrop: "
     "0}"},
    {"qwen3",
     "{model_type: qwen3, vocab_size: 272, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
     "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64}"},
    {"mistral",
     "{model_type: mistral, vocab_size: 272, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
     "num_attention_heads: 4, max_position_embeddings: 64, sliding_window: 4, "
     "rope_scaling: {rope_type: yarn, factor: 2}}"}};

void check_sizes(const Config& config, const plan::RunPlan& plan) {
  CHECK(plan.parameters.total() > 0);
  CHECK(plan.memory.total_bytes() > 0);
  for (const auto& buffer : plan.memory.buffers()) CHECK(buffer.bytes >= 0);
  CHECK(plan.batch.micro >= 1);
  CHECK(plan.batch.accumulation >= 1);
  CHECK(plan.batch.micro * plan.batch.accumulation == plan.batch.global);
  CHECK(plan.batch.tokens_per_step == plan.batch.global * example_tokens(config));
}

/// Whether the configuration would start, and in little memory; its problems are checked to have a code, a
/// key and a text.
bool starts(const Workbench& bench, const std::vector<std::string>& overrides) {
  ConfigResult result = load_config_text(bench.yaml("run"), "run.yaml", overrides);
  train::check_run(result, {.world = 1, .local = 1});
  INFO(render(result.diagnostics));
  for (const Diagnostic& d : result.diagnostics) {
    if (d.severity == Severity::warning) continue;
    CHECK((d.exit == Exit::config || d.exit == Exit::no_input || d.exit == Exit::out_of_memory));
    CHECK(config_detail::Schema::get().find(d.key));
    CHECK(d.message.size() > 20);
  }
  if (!result.ok()) return false;
  const Config& c = result.config;
  const BatchPlan batch = resolve_batch(c, 1);
  const auto plan = plan::make_run_plan(c, train::load_model_spec(result), batch,
                                        plan::grid_position(c, 1, 0), DeviceType::cpu, 1);
  check_sizes(c, *plan);
  try {
    if (trains_on_examples(c)) {
      const train::TrainData data = train::open_train_data(c, 272, batch.global);
      CHECK(data.examples->size() > 0);
    } else {
      const train::TrainData data = train::plan_train_data(c, 272, batch.global);
      CHECK(data.samples >= batch.global);
      CHECK(data.max_steps >= 0);
      train::plan_validation_data(c, data, batch.global);
    }
  } catch (const Error& e) {
    CHECK((e.code() == Exit::config || (trains_on_examples(c) && e.code() == Exit::data)));
  }
  return plan->memory.total_bytes() < (int64_t{64} << 20);
}

/// The algorithm that the keys name, or pretrain.
std::string algorithm_of(const std::vector<std::string>& keys) {
  constexpr std::string_view key = "algorithm=";
  const auto it = std::find_if(keys.begin(), keys.end(), [&](const auto& k) { return k.starts_with(key); });
  return it == keys.end() ? "pretrain" : it->substr(key.size());
}

/// Its data.
std::string data_of(const Workbench& bench, const std::string& algorithm) {
  return bench / (algorithm == "pretrain"  ? "corpus"
                  : algorithm == "sft"     ? "chat.jsonl"
                  : algorithm == "grpo"    ? "rollouts.jsonl"
                  : algorithm == "distill" ? "lessons.jsonl"
                                           : "pairs.jsonl");
}

/// Adds those whose keys are not there.
std::vector<std::string> with_others(std::vector<std::string> keys, const std::vector<std::string>& others) {
  for (const std::string& other : others)
    if (std::none_of(keys.begin(), keys.end(), [&](const std::string& key) {
          return key.starts_with(other.substr(0, other.find('=') + 1));
        }))
      keys.push_back(other);
  return keys;
}

/// The data of the algorithm.
std::vector<std::string> with_data(const Workbench& bench, const std::vector<std::string>& keys) {
  const std::string algorithm = algorithm_of(keys);
  if (algorithm == "pretrain") return keys;
  std::vector<std::string> data{"data.train.data_path=" + data_of(bench, algorithm),
                                "policy.tokenizer.name=bytes"};
  if (algorithm == "sft") data.push_back("policy.tokenizer.chat_template=" + bench / "chat.jinja");
  return with_others(keys, data);
}

/// One step and one evaluation, as far as `assignment` does not say otherwise.
std::vector<std::string> completed(const Workbench& bench, const std::vector<std::string>& keys) {
  const std::string algorithm = algorithm_of(keys), loop = algorithm + ".";
  return with_others(
      keys, {loop + "max_num_steps=1", loop + "val_at_end=true", loop + "val_batches=1",
             "data.validation.data_path=" + data_of(bench, algorithm), "checkpointing.enabled=false"});
}

}  // namespace

TEST_CASE("every key at the ends of its range is accepted and runs, or is refused with a reason") {
  Workbench bench;
  for (int i = 0; i < 8; ++i)
    std::ofstream(bench / "chat.jsonl", std::ios::app)
        << R"({"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]})"
        << "\n";
  for (int i = 0; i < 8; ++i) {
    std::ofstream(bench / "pairs.jsonl", std::ios::app) << R"({"prompt":"a","chosen":"b","rejected":"cc"})"
                                                        << "\n";
    std::ofstream(bench / "rollouts.jsonl", std::ios::app)
        << R"({"prompt_ids":[65],"completion_ids":[66,67],"advantage":1,"logprobs":[-5,-5],"old_logprobs":[-5,-6]})"
        << "\n";
  }
  for (int i = 0; i < 8; ++i)
    std::ofstream(bench / "lessons.jsonl", std::ios::app)
        << R"({"prompt_ids":[65],"completion_ids":[66],"topk_ids":[[66,67]],"topk_logprobs":[[-1,-2]]})"
        << "\n";
  std::ofstream(bench / "chat.jinja") << "{% for m in messages %}{{ m.content }}{% endfor %}";
  for (const auto& [family, model] : models) {
    bench.model = model;
    CAPTURE(family);
    REQUIRE(starts(bench, {}));
    int started = 0, tried = 0;
    for (const auto& key : config_detail::Schema::get().keys()) {
      if (!key.built) continue;
      for (const std::string& value : ends_of(key).inside) {
        CAPTURE(key.path, value);
        ++tried;
        // With what the key needs, or it would be refused for that.
        std::vector<std::string> assignments = needed_by(key);
        if (!key.algorithms.empty() && !key.belongs_to(Algorithm::pretrain))
          assignments.push_back(fmt::format("algorithm={}", name_of(key.algorithms.front())));
        if (key.path.ends_with(".val_batches"))
          assignments.push_back("data.validation.data_path=" + data_of(bench, algorithm_of(assignments)));
        assignments.push_back(key.path + "=" + value);
        assignments = with_data(bench, assignments);
        if (!starts(bench, assignments)) continue;
        ++started;
        // Only numbers have ends that a kernel can stumble over; what does not belong to the model is tried
        // with one model; thousands of threads are not tried.
        const bool number = key.kind == Kind::integer || key.kind == Kind::number;
        if (!number || (!key.model && bench.model != models[0].second) || key.path == "kernels.num_threads")
          continue;
        // Examples are repeated for as many steps as are asked for.
        const bool length = key.leaf() == "max_num_steps" || key.leaf() == "max_num_epochs";
        if (length && !key.belongs_to(Algorithm::pretrain)) continue;
        const Finished run = bench.run("run", completed(bench, assignments));
        INFO(run.err);
        CHECK((run.code == Exit::ok || run.code == Exit::config || run.code == Exit::data ||
               run.code == Exit::unavailable || run.code == Exit::diverged));
      }
    }
    CHECK(tried > 250);
    CHECK(started > tried / 2);  // else the test tries one refusal again and again
  }
}
