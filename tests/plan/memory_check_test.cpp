#include "apps/plan/memory_check.h"

#include <map>

#include "apps/model/families/hf_config.h"
#include "apps/plan/host_memory.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::plan;
using memory::Category;

namespace {

const std::string yaml =
    "policy:\n"
    "  model: {model_type: llama}\n"
    "  train_global_batch_size: 64\n"
    "pretrain: {max_num_steps: 10}\n"
    "data: {train: {data_path: corpus}}\n";

const std::string llama =
    R"({"model_type":"llama","vocab_size":4096,"hidden_size":192,"intermediate_size":512,
    "num_hidden_layers":4,"num_attention_heads":6,"num_key_value_heads":2,"max_position_embeddings":2048})";
const std::string gpt2 = R"({"model_type":"gpt2","vocab_size":50304,"n_embd":256,"n_layer":3,"n_head":8,
    "n_positions":2048,"attn_pdrop":0})";

/// The key that is named when a rank has a byte less than it needs.
Diagnostic short_of_a_byte(const std::string& model, const std::vector<std::string>& overrides) {
  const ConfigResult result = load_config_text(yaml, "t.yaml", overrides);
  INFO(render(result.diagnostics));
  REQUIRE(result.ok());
  const model::ModelSpec spec = model::parse_model_config(model, "test");
  const BatchPlan batch = resolve_batch(result.config, 1);
  const CategoryBytes need = minimum_memory(result.config, spec, batch, DeviceType::cpu);
  double total = 0;
  for (double bytes : need) total += bytes;
  REQUIRE(!memory_shortage(result, spec, batch, need, total, "it"));
  const auto shortage = memory_shortage(result, spec, batch, need, total - 1, "it");
  REQUIRE(shortage);
  CHECK(shortage->exit == Exit::out_of_memory);
  return *shortage;
}

}  // namespace

TEST_CASE("the bound that is made without a plan is below every plan", "[plan]") {
  for (const std::string& model : {llama, gpt2})
    for (const DeviceType device : {DeviceType::cpu, DeviceType::cuda})
      for (const char* strategy : {"ddp", "optim", "optim_grads", "optim_grads_params"})
        for (const char* recompute : {"auto", "none", "full"})
          for (const char* precision : {"float32", "bfloat16"}) {
            const ConfigResult result = load_config_text(
                yaml, "t.yaml",
                std::vector<std::string>{std::string("distributed.shard_strategy=") + strategy,
                                         std::string("policy.recompute.granularity=") + recompute,
                                         std::string("policy.precision=") + precision});
            REQUIRE(result.ok());
            const model::ModelSpec spec = model::parse_model_config(model, "test");
            const BatchPlan batch = resolve_batch(result.config, 4);
            const auto planned =
                make_run_plan(result.config, spec, batch, grid_position(result.config, 4, 0), device, 2);
            const CategoryBytes least = minimum_memory(result.config, spec, batch, device),
                                exact = planned_memory(result.config, *planned);
            for (size_t c = 0; c < least.size(); ++c) {
              CAPTURE(strategy, recompute, precision, name_of(static_cast<Category>(c)));
              CHECK(least[c] <= exact[c]);
              // Of layers that may be recomputed it counts one, and not all of its gradients.
              const bool one =
                  std::string(recompute) != "none" && c == static_cast<size_t>(Category::activations);
              if (least[c] > 0) CHECK(least[c] > exact[c] / (one ? 32 : 16));
            }
            // The whole of what lies in flat buffers, but for padding.
            for (const Category c : {Category::weights, Category::gradients, Category::optimizer})
              CHECK(least[static_cast<size_t>(c)] > 0.9 * exact[static_cast<size_t>(c)]);
          }
}

TEST_CASE("the bound is below plans of weights in FP8", "[plan]") {
  for (const DeviceType device : {DeviceType::cpu, DeviceType::cuda})
    for (const char* strategy : {"ddp", "optim", "optim_grads", "optim_grads_params"})
      for (const char* precision : {"float32", "bfloat16"}) {
        const ConfigResult result = load_config_text(
            yaml, "t.yaml",
            std::vector<std::string>{std::string("distributed.shard_strategy=") + strategy,
                                     std::string("policy.precision=") + precision,
                                     "policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_param=true"});
        REQUIRE(result.ok());
        const model::ModelSpec spec = model::parse_model_config(llama, "test");
        const BatchPlan batch = resolve_batch(result.config, 4);
        const auto planned =
            make_run_plan(result.config, spec, batch, grid_position(result.config, 4, 0), device, 2);
        const CategoryBytes least = minimum_memory(result.config, spec, batch, device),
                            exact = planned_memory(result.config, *planned);
        for (size_t c = 0; c < least.size(); ++c) {
          CAPTURE(strategy, precision, name_of(static_cast<Category>(c)));
          CHECK(least[c] <= exact[c]);
        }
      }
}

TEST_CASE("the bound is below plans of attention with FP8 operands", "[plan]") {
  // Of which q, k and v are most that is kept.
  const char* heads =
      R"({"model_type":"llama","vocab_size":61,"hidden_size":16,"intermediate_size":16,"num_hidden_layers":8,
      "num_attention_heads":16,"num_key_value_heads":16,"head_dim":64,"max_position_embeddings":4096})";
  std::map<bool, double> least_of;
  for (const bool attention : {false, true}) {
    const ConfigResult result = load_config_text(
        yaml, "t.yaml",
        std::vector<std::string>{"policy.precision=bfloat16", "policy.recompute.granularity=none",
                                 "policy.fp8_cfg.enabled=true",
                                 fmt::format("policy.fp8_cfg.fp8_dot_product_attention={}", attention)});
    REQUIRE(result.ok());
    const model::ModelSpec spec = model::parse_model_config(heads, "test");
    const BatchPlan batch = resolve_batch(result.config, 4);
    const auto planned =
        make_run_plan(result.config, spec, batch, grid_position(result.config, 4, 0), DeviceType::cpu, 2);
    constexpr auto activations = static_cast<size_t>(Category::activations);
    const double least = minimum_memory(result.config, spec, batch, DeviceType::cpu)[activations],
                 exact = planned_memory(result.config, *planned)[activations];
    CAPTURE(attention, least, exact);
    CHECK(least <= exact);
    least_of[attention] = least;
  }
  CHECK(least_of[true] < 0.6 * least_of[false]);
}

TEST_CASE("a run that does not fit reports the key with the largest demand", "[plan]") {
  CHECK(short_of_a_byte(llama, {"policy.train_global_batch_size=1073741824"}).key ==
        "policy.train_global_batch_size");
  CHECK(short_of_a_byte(llama, {"policy.max_total_sequence_length=16777216"}).key ==
        "policy.max_total_sequence_length");
  CHECK(short_of_a_byte(llama, {"policy.train_global_batch_size=8192", "policy.train_micro_batch_size=8192"})
            .key == "policy.train_micro_batch_size");
  CHECK(
      short_of_a_byte(llama, {"policy.train_global_batch_size=65536", "policy.gradient_accumulation_steps=1"})
          .key == "policy.train_global_batch_size");
  CHECK(short_of_a_byte(llama, {"data.prefetch_batches=1024", "policy.train_micro_batch_size=64",
                                "policy.model.vocab_size=1", "policy.train_global_batch_size=64"})
            .key != "policy.train_global_batch_size");
  // Sizes of the model that nobody has written are not blamed: here head_dim is nearest to published ones.
  const std::string big_heads =
      R"({"model_type":"llama","vocab_size":512,"hidden_size":256,"intermediate_size":512,
      "num_hidden_layers":2,"num_attention_heads":1,"max_position_embeddings":2048})";
  const Diagnostic model = short_of_a_byte(big_heads, {});
  CHECK(model.key == "policy.model.model_type");
  CHECK(model.message.starts_with("policy.model.model_type: a llama model of 1."));
  CHECK(short_of_a_byte(big_heads, {"policy.model.hidden_size=256"}).key == "policy.model.hidden_size");
  CHECK(short_of_a_byte(big_heads, {"policy.model.head_dim=256"}).key == "policy.model.head_dim");
  std::string wide = gpt2;
  wide.replace(wide.find("50304"), 5, "9999999");
  const Diagnostic d = short_of_a_byte(wide, {"policy.model.vocab_size=9999999"});
  CHECK(d.key == "policy.model.vocab_size");
  CHECK(d.file == "command line: policy.model.vocab_size=9999999");
}

TEST_CASE("steps on random tokens have no loader, no probe of the peak and no checkpoints", "[plan]") {
  const ConfigResult result =
      load_config_text(yaml, "t.yaml", std::vector<std::string>{"kernels.isa=baseline"});
  REQUIRE(result.ok());
  const GridPosition position = grid_position(result.config, 1, 0);
  const auto planned = make_run_plan(result.config, model::parse_model_config(llama, "test"),
                                     resolve_batch(result.config, 1), position, DeviceType::cpu, 2);
  const auto names = [&](bool training) {
    std::string out;
    for (const HostPart& part :
         host_memory(result.config, *planned,
                     {.program = 1, .threads = 2, .documents = nullptr, .training = training}))
      out += part.name + ", ";
    return out;
  };
  CHECK(names(true) == "program, data loader, GEMM probe, checkpoints, ");
  CHECK(names(false) == "program, ");
}

namespace {

/// A student that a teacher scores: 8 prompts x 2 completions of 7 tokens, 16 numbers of each.
ConfigResult student(std::vector<std::string> more = {}) {
  more.emplace_back("policy.optimizer.lr=0.001");
  const ConfigResult result = load_config_text(
      "algorithm: distill\n"
      "policy:\n"
      "  model: {model_type: llama}\n"
      "  tokenizer: {name: bytes, chat_template: none}\n"
      "  train_global_batch_size: 16\n"
      "  train_micro_batch_size: 4\n"
      "  max_total_sequence_length: 64\n"
      "  generation: {max_new_tokens: 7}\n"
      "reference: {model_name: teacher}\n"
      "distill: {topk: 16, num_prompts_per_step: 8, num_generations_per_prompt: 2, max_num_steps: 4}\n"
      "data: {train: {data_path: p.jsonl, format: prompts}}\n",
      "t.yaml", more);
  INFO(render(result.diagnostics));
  REQUIRE(result.ok());
  return result;
}

constexpr int64_t of_completion = 7 * 16 * 8;

}  // namespace

TEST_CASE("a teacher's numbers of a validation are counted with those of training", "[plan]") {
  const auto counted = [](const ConfigResult& result, std::optional<int64_t> prompts) {
    const int64_t taught = taught_completions(result.config, prompts);
    CHECK(teacher_number_bytes(result.config, prompts) == taught * of_completion);
    return taught;
  };
  CHECK(counted(student(), std::nullopt) == 16);
  CHECK(counted(student(), 100) == 16);  // no evaluation
  const std::vector<std::string> validation{"data.validation={data_path: v.jsonl, format: prompts}",
                                            "distill.val_period=2",
                                            "distill.val_num_generations_per_prompt=3"};
  CHECK(counted(student(validation), std::nullopt) == 16);
  CHECK(counted(student(validation), 100) == 16 + 300);
  std::vector<std::string> few = validation;
  few.emplace_back("distill.max_val_samples=5");
  CHECK(counted(student(few), std::nullopt) == 16 + 15);
  CHECK(counted(student(few), 100) == 16 + 15);
  CHECK(counted(student(few), 2) == 16 + 6);
  // More than any memory, without an overflow.
  std::vector<std::string> most = validation;
  most.emplace_back("distill.max_val_samples=2000000000");
  most.emplace_back("distill.val_num_generations_per_prompt=1024");
  CHECK(teacher_number_bytes(student(most).config, std::nullopt) > int64_t{1} << 50);
}

TEST_CASE("a teacher's numbers have the host's memory that the plan and other parts leave", "[plan]") {
  constexpr int64_t share = int64_t{1} << 40, reference = 1000;
  const ConfigResult result = student({"policy.offload_optimizer=true"});
  const Config& c = result.config;
  const HostFacts facts{.program = 1000000, .threads = 2, .documents = nullptr};
  const auto planned = [&](DeviceType device) {
    return make_run_plan(c, model::parse_model_config(llama, "test"), resolve_batch(c, 1),
                         grid_position(c, 1, 0), device, 2);
  };
  const auto on_host = planned(DeviceType::cpu);
  CHECK(room_for_teacher_numbers(c, *on_host, facts, reference, share) ==
        share - on_host->memory.total_bytes() - reference);
  CHECK(bytes_beside_plan(c, *on_host, reference, std::nullopt) == reference + 16 * of_completion);
  const auto on_gpu = planned(DeviceType::cuda);
  CHECK(bytes_beside_plan(c, *on_gpu, reference, std::nullopt) == reference);
  const int64_t buffers =
      on_gpu->memory.bytes(memory::Tier::pinned) + on_gpu->memory.bytes(memory::Tier::host);
  REQUIRE(buffers > 0);
  int64_t others = 0;
  for (const HostPart& part : host_memory(c, *on_gpu, facts))
    if (part.name == "teacher's numbers")
      CHECK(part.bytes == 16 * of_completion);
    else
      others = part.passing ? others : others + part.bytes;
  REQUIRE(others >= facts.program);
  const int64_t room = room_for_teacher_numbers(c, *on_gpu, facts, reference, share);
  CHECK(room <= share - buffers - others);
  CHECK(room > share - buffers - others - (int64_t{64} << 20));  // a passing part
}
