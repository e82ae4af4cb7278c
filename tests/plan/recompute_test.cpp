// What is recomputed: configured rules, the bytes that they leave, and what policy.recompute: auto chooses.
#include "apps/model/families/hf_config.h"
#include "apps/plan/run_plan.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::plan;

namespace {

constexpr int64_t layers = 8, hidden = 64, ffn = 256, heads = 2, tokens = 1024;
const std::string llama =
    R"({"model_type":"llama","vocab_size":512,"hidden_size":64,"intermediate_size":256,
    "num_hidden_layers":8,"num_attention_heads":2,"max_position_embeddings":2048})";

std::unique_ptr<RunPlan> plan_for(DeviceType device, size_t memory,
                                  const std::vector<std::string>& overrides = {}) {
  const ConfigResult result = load_config_text(
      "policy: {model: {model_type: llama}, train_global_batch_size: 8, train_micro_batch_size: 1}\n"
      "pretrain: {max_num_steps: 10}\n"
      "data: {train: {data_path: corpus}}\n",
      "t.yaml", overrides);
  INFO(render(result.diagnostics));
  REQUIRE(result.ok());
  const Config& c = result.config;
  return make_run_plan(c, model::parse_model_config(llama, "test"), resolve_batch(c, 1),
                       grid_position(c, 1, 0), device, 2, {}, memory);
}

constexpr DeviceType host = DeviceType::cpu, gpu = DeviceType::cuda;

std::string configured(const std::vector<std::string>& overrides) {
  return recompute_text(*plan_for(host, 0, overrides));
}

/// Bytes on the device of the blocks, and of the head's input, that are alive when the forward pass of
/// training has reached the head.
int64_t kept_bytes(const RunPlan& plan) {
  int head = -1;
  for (const auto& b : plan.memory.buffers())
    if (head < 0 && b.name == "loss_computation logits of a chunk") head = b.lifetimes.front().first;
  REQUIRE(head >= 0);
  int64_t bytes = 0;
  for (const auto& b : plan.memory.buffers())
    for (const memory::Lifetime& life : b.lifetimes)
      if (b.tier == memory::Tier::device &&
          (b.name.starts_with("layer_") || b.name.starts_with("embedding")) && life.first <= head &&
          head <= life.last)
        bytes += b.bytes;
  return bytes;
}

}  // namespace

TEST_CASE("the keys of recomputation say what is recomputed", "[plan][recompute]") {
  CHECK(configured({}) == "norm, activation");
  CHECK(configured({"policy.recompute.granularity=none"}).empty());
  CHECK(configured({"policy.gradient_checkpointing=true"}) == "everything");
  CHECK(configured({"policy.recompute.granularity=full"}) == "everything");
  CHECK(configured({"policy.checkpoint_ratio=1"}) == "everything");
  CHECK(configured({"policy.checkpoint_ratio=0.5"}) ==
        "everything in layers 0, 2, 4, 6; norm, activation in layers 1, 3, 5, 7");
  CHECK(configured({"policy.checkpoint_ratio=0.3"})
            .starts_with("everything in layers 0, 3, 6;"));  // 2.4 layers
  CHECK(configured({"policy.checkpoint_ratio=0.125"}).starts_with("everything in layer 0;"));
  CHECK(configured({"policy.checkpoint_ratio=0.126"}).starts_with("everything in layers 0, 4;"));
  CHECK(configured({"policy.checkpoint_layers=[0, 1, 5]"}) ==
        "everything in layers 0-1, 5; norm, activation in layers 2-4, 6-7");
  // policy.recompute says what is recomputed of the other layers.
  CHECK(configured({"policy.checkpoint_layers=[0, 1, 5]", "policy.recompute.granularity=none"}) ==
        "everything in layers 0-1, 5");
  CHECK(configured({"policy.checkpoint_ratio=0.5", "policy.recompute.modules=[core_attn]"}) ==
        "everything in layers 0, 2, 4, 6; core_attn in layers 1, 3, 5, 7");
  CHECK(configured({"policy.checkpoint_every=1"}) == "everything");
  CHECK(configured({"policy.checkpoint_every=3"}) ==
        "everything in layers 0-2 | 3-5 | 6-7, each from its first input");
  CHECK(configured({"policy.recompute.granularity=full", "policy.recompute.method=uniform",
                    "policy.recompute.num_layers=4"}) ==
        "everything in layers 0-3 | 4-7, each from its first input");
  CHECK(configured({"policy.recompute.granularity=full", "policy.recompute.method=block",
                    "policy.recompute.num_layers=3"}) ==
        "everything in layers 0-2; norm, activation in layers 3-7");
  CHECK(configured({"policy.recompute.modules=[layernorm, moe_act, core_attn, mlp]"}) ==
        "norm, activation, core_attn, mlp");
}

// Megatron-LM counts within the chunks of a stage.
TEST_CASE("uniform and block count within each chunk", "[plan][recompute]") {
  const auto rules = [](const std::vector<std::string>& overrides, const model::ModelLayout& layout) {
    const ConfigResult result = load_config_text("policy: {}\n", "t.yaml", overrides);
    std::string text;
    for (const model::RecomputeRule& rule : configured_recompute(result.config.policy, layout, layers))
      text += rule.input ? 'i' : rule.all ? 'a' : '-';
    return text;
  };
  const model::ModelLayout interleaved{.stages = 2, .chunks = 2}, two{.stages = 2};
  const std::vector<std::string> uniform{"policy.recompute.granularity=full",
                                         "policy.recompute.method=uniform", "policy.recompute.num_layers=3"},
      block{"policy.recompute.granularity=full", "policy.recompute.method=block",
            "policy.recompute.num_layers=1"};
  CHECK(rules(uniform, {}) == "aiiaiiai");
  CHECK(rules(uniform, two) == "aiiaaiia");
  CHECK(rules(uniform, interleaved) == "aiaiaiai");
  CHECK(rules({"policy.checkpoint_every=3"}, two) == rules(uniform, two));
  CHECK(rules(block, {}) == "a-------");
  CHECK(rules(block, two) == "a---a---");
  CHECK(rules(block, interleaved) == "a-a-a-a-");
}

TEST_CASE("the activations that are kept are those of the formulas", "[plan][recompute]") {
  // fp32 by token of a block: both norms' input, statistic and output; q, k and v after RoPE; the output of
  // attention and its statistic by head; gate and up; the activation.
  constexpr int64_t word = 4, norms = 2 * hidden, input = hidden;
  constexpr int64_t all = 2 * (hidden + 1) + norms + 3 * hidden + hidden + heads + 2 * ffn + ffn;
  const auto kept = [](const std::vector<std::string>& overrides) {
    const int64_t bytes = kept_bytes(*plan_for(host, 0, overrides));
    CHECK(bytes % (word * tokens) == 0);
    return bytes / (word * tokens) - hidden;  // without the head's input
  };
  const auto modules = [&](const std::string& list) { return kept({"policy.recompute.modules=" + list}); };
  CHECK(kept({"policy.recompute.granularity=none"}) == layers * all);
  CHECK(kept({"policy.recompute.granularity=full"}) == layers * input);
  constexpr int64_t automatic = all - norms - ffn;
  CHECK(kept({}) == layers * automatic);
  CHECK(kept({"policy.checkpoint_ratio=0.5"}) == layers / 2 * (automatic + input));
  CHECK(kept({"policy.checkpoint_layers=[1, 6, 7]"}) == (layers - 3) * automatic + 3 * input);
  CHECK(kept({"policy.checkpoint_layers=[1, 6, 7]", "policy.recompute.granularity=none"}) ==
        (layers - 3) * all + 3 * input);
  CHECK(kept({"policy.checkpoint_every=4"}) == layers / 4 * input);
  CHECK(kept({"policy.checkpoint_every=8"}) == input);
  CHECK(modules("[norm]") == layers * (all - norms));
  CHECK(modules("[norm, activation]") == layers * (all - norms - ffn));
  CHECK(modules("[core_attn]") == layers * (all - hidden - heads));
  CHECK(modules("[mlp]") == layers * (all - 3 * ffn));
}

// One microbatch, whose backward pass follows its forward pass: the last block stays where it is.
TEST_CASE("the activations that are moved to the host are those of the formulas", "[plan][recompute]") {
  constexpr int64_t word = 4, input = hidden;
  constexpr int64_t all = 2 * (hidden + 1) + 2 * hidden + 3 * hidden + hidden + heads + 2 * ffn + ffn;
  struct Moved {
    int64_t on_device, on_host;
    bool operator==(const Moved&) const = default;
  };
  const auto moved = [](std::vector<std::string> overrides) {
    overrides.emplace_back("policy.offload_activations=true");
    std::rotate(overrides.begin(), overrides.end() - 1, overrides.end());
    const auto plan = plan_for(host, 0, overrides);
    return Moved{kept_bytes(*plan) / (word * tokens) - hidden,
                 plan->memory.bytes(memory::Tier::host) / (word * tokens)};
  };
  const std::string none = "policy.recompute.granularity=none";
  const auto modules = [&](const std::string& list) {
    return moved({none, "policy.offload_modules=" + list});
  };
  CHECK(moved({none}) == Moved{all, (layers - 1) * all});
  CHECK(moved({none, "policy.offload_activations=0.5"}) == Moved{layers / 2 * all, layers / 2 * all});
  CHECK(moved({none, "policy.offload_layers=[1, 7]"}) == Moved{(layers - 1) * all, all});
  CHECK(moved({"policy.recompute.granularity=full"}) == Moved{input, (layers - 1) * input});
  CHECK(modules("[input]") == Moved{layers * all - (layers - 1) * 2 * hidden, (layers - 1) * 2 * hidden});
  CHECK(modules("[qkv]") == Moved{layers * all - (layers - 1) * 3 * hidden, (layers - 1) * 3 * hidden});
  CHECK(modules("[mlp]") == Moved{layers * all - (layers - 1) * 3 * ffn, (layers - 1) * 3 * ffn});
  // Two blocks are on the device at a time, one of them on its way.
  const auto total = [](const std::vector<std::string>& keys) {
    return plan_for(host, 0, keys)->memory.total_bytes();
  };
  CHECK(total({none}) - total({none, "policy.offload_activations=true"}) >=
        (layers - 3) * all * word * tokens);
  CHECK(offload_text(*plan_for(host, 0, {"policy.offload_activations=true"})) == "everything");
  CHECK(offload_text(
            *plan_for(host, 0, {"policy.offload_activations=0.25", "policy.offload_modules=[input]"})) ==
        "input in layers 0, 4");
  CHECK(recompute_text(*plan_for(
            host, 0, {"policy.offload_activations=true", "policy.offload_modules=[norm]"})) == "activation");
}

TEST_CASE("a plan that recomputes more is smaller", "[plan][recompute]") {
  int64_t before = std::numeric_limits<int64_t>::max();
  for (const std::string keys : {"policy.recompute.granularity=none", "policy.recompute.modules=[norm]",
                                 "policy.recompute.modules=[norm, activation]", "policy.checkpoint_ratio=0.5",
                                 "policy.recompute.granularity=full"}) {
    CAPTURE(keys);
    const int64_t bytes = plan_for(host, 0, {keys})->memory.total_bytes();
    CHECK(bytes < before);
    before = bytes;
  }
}

TEST_CASE("naming layers takes no more memory than auto", "[plan][recompute]") {
  const auto activations = [](DeviceType device, size_t memory, const std::vector<std::string>& keys) {
    return plan_for(device, memory, keys)->memory.bytes(memory::Category::activations);
  };
  constexpr size_t plenty = size_t{1} << 40;
  for (const auto& [device, memory] : {std::pair(host, size_t{0}), {gpu, size_t{0}}, {gpu, plenty}}) {
    const int64_t automatic = activations(device, memory, {});
    for (const std::vector<std::string>& keys : std::vector<std::vector<std::string>>{
             {"policy.checkpoint_layers=[0]"},
             {"policy.checkpoint_layers=[0, 2, 4, 6]"},
             {"policy.checkpoint_ratio=0.125"},
             {"policy.recompute.granularity=full", "policy.recompute.method=block",
              "policy.recompute.num_layers=1"}}) {
      CAPTURE(keys, static_cast<int>(device), memory);
      CHECK(activations(device, memory, keys) <= automatic);
    }
  }
  // On a GPU auto recomputes of the layers that are not named as much as it takes to fit.
  const std::vector<std::string> named{"policy.checkpoint_layers=[3]", "memory.max_memory=1"};
  const auto none = plan_for(gpu, 0, {"policy.checkpoint_layers=[3]", "policy.recompute.granularity=none"});
  const auto need = static_cast<size_t>(none->memory.total_bytes());
  CHECK(recompute_text(*plan_for(gpu, need, named)).starts_with("everything in layer 3: within 100 %"));
  const auto less = plan_for(gpu, need - 1, named);
  CHECK(static_cast<size_t>(less->memory.total_bytes()) < need);
  CHECK(recompute_text(*less).find("keeping all else takes") != std::string::npos);
  for (size_t b = 0; b < less->recompute.size(); ++b) CHECK(less->recompute[b].all == (b == 3));
}

TEST_CASE("auto keeps everything on a GPU with memory for it", "[plan][recompute]") {
  const auto none = plan_for(gpu, 0, {"policy.recompute.granularity=none"});
  CHECK(recompute_text(*none).empty());
  const auto keeping = static_cast<size_t>(none->memory.total_bytes());
  // The smallest memory of which `keeping` is at most 90 %, and a byte less.
  const size_t enough = (keeping * 100 + 89) / 90;
  const auto fits = plan_for(gpu, enough), fits_not = plan_for(gpu, enough - 1);
  CHECK(static_cast<size_t>(fits->memory.total_bytes()) == keeping);
  CHECK(recompute_text(*fits).starts_with("nothing: within 90 % of the GPU's "));
  CHECK(static_cast<size_t>(fits_not->memory.total_bytes()) < keeping);
  CHECK(recompute_text(*fits_not).find("keeping everything takes ") != std::string::npos);
  CHECK(recompute_text(*fits_not).find(", more than 90 % of the GPU's ") != std::string::npos);
  const auto whole = plan_for(gpu, keeping, {"memory.max_memory=1"});
  CHECK(recompute_text(*whole).starts_with("nothing: within 100 % of the GPU's "));

  // Without a GPU norm and activation, with the memory from which on a run keeps everything.
  const auto unknown = plan_for(gpu, 0);
  CHECK(recompute_text(*unknown).starts_with("norm, activation: keeping everything takes "));
  CHECK(recompute_text(*unknown).find(", which a run does on a GPU of at least ") != std::string::npos);
  const auto shared = plan_for(gpu, 0, {"kernels.share_device=true"});
  CHECK(recompute_text(*shared).ends_with(", and ranks may share the GPU"));
}

TEST_CASE("auto recomputes as much as it takes to fit, the cheapest parts first", "[plan][recompute]") {
  for (const DeviceType device : {host, gpu}) {
    const std::vector<std::string> whole{"memory.max_memory=1"};
    const auto total = [&](const std::string& keys) {
      return static_cast<size_t>(plan_for(device, 0, {keys})->memory.total_bytes());
    };
    const size_t most = total(device == host ? "policy.recompute.granularity=selective"
                                             : "policy.recompute.granularity=none"),
                 least = total("policy.recompute.granularity=full");
    size_t again = 0;  // slots recomputed with a little more memory
    for (int i = 0; i <= 8; ++i) {
      const size_t memory = least + (most - least) * static_cast<size_t>(i) / 8;
      const auto plan = plan_for(device, memory, whole);
      CAPTURE(i, memory, recompute_text(*plan));
      CHECK(static_cast<size_t>(plan->memory.total_bytes()) <= memory);
      size_t recomputed = 0, modules = 0;
      for (const model::RecomputeRule& rule : plan->recompute) {
        recomputed += rule.all ? 10 : rule.modules.size();
        modules += rule.modules.size();
      }
      if (i > 0) CHECK(recomputed <= again);
      again = recomputed;
      if (i == 7) {  // little is missing: no matrix product is repeated
        CHECK(std::none_of(plan->recompute.begin(), plan->recompute.end(),
                           [](const model::RecomputeRule& r) { return r.all; }));
        CHECK(modules > 0);
      }
    }
    CHECK(again == (device == host ? 2 * layers : 0));
    // Too small for anything: all is recomputed, and it is said.
    const auto tiny = plan_for(device, 1000, whole);
    CHECK(recompute_text(*tiny).starts_with("everything: keeping "));
    CHECK(recompute_text(*tiny).find("so does recomputing everything") != std::string::npos);
  }
}

TEST_CASE("auto recomputes the same parts of chunks with one pool, but for the last part",
          "[plan][recompute]") {
  const auto stage = [](size_t memory) {
    const ConfigResult result = load_config_text(
        "policy: {model: {model_type: llama}, train_global_batch_size: 8, train_micro_batch_size: 1,\n"
        "         max_total_sequence_length: 1024}\n"
        "distributed: {pipeline_parallel_size: 2, virtual_pipeline_size: 4}\n"
        "pretrain: {max_num_steps: 10}\n"
        "data: {train: {data_path: corpus}}\n",
        "t.yaml", {});
    INFO(render(result.diagnostics));
    REQUIRE(result.ok());
    const Config& c = result.config;
    return make_run_plan(c, model::parse_model_config(llama, "test"), resolve_batch(c, 2),
                         grid_position(c, 2, 0), gpu, 2, {}, memory);
  };
  const auto all = stage(size_t{1} << 36);
  const auto budget = 0.85 * static_cast<double>(all->memory.total_bytes());
  const auto plan = stage(static_cast<size_t>(budget / 0.9));
  CHECK(static_cast<double>(plan->memory.total_bytes()) <= budget);
  CHECK_FALSE(plan->recompute[0] == all->recompute[0]);
  // The last part is recomputed in the first chunks only, as far as that takes.
  size_t kinds = 1;
  for (const int block : {2, 4, 6}) {
    const bool same = plan->recompute[block] == plan->recompute[block - 2];
    kinds += same ? 0 : 1;
    if (!same) CHECK(plan->recompute[block].modules.size() + 1 == plan->recompute[block - 2].modules.size());
  }
  CHECK(kinds <= 2);
  CHECK(plan->decoder->options().training.stashes.counts().size() == kinds);
}

TEST_CASE("nothing is chosen where the configuration says it", "[plan][recompute]") {
  constexpr size_t plenty = size_t{1} << 50;
  CHECK(recompute_text(*plan_for(host, plenty)) == "norm, activation");
  CHECK(recompute_text(*plan_for(gpu, plenty, {"policy.recompute.granularity=selective"})) ==
        "norm, activation");
  CHECK(recompute_text(*plan_for(gpu, plenty, {"policy.recompute.modules=[norm]"})) == "norm");
  CHECK(recompute_text(*plan_for(gpu, plenty, {"policy.gradient_checkpointing=true"})) == "everything");
  CHECK(recompute_text(*plan_for(gpu, 1, {"policy.recompute.granularity=none"})).empty());
  // Whole layers are recomputed only if they may be.
  const auto parts = plan_for(gpu, 1, {"policy.gradient_checkpointing=false"});
  for (const model::RecomputeRule& rule : parts->recompute) CHECK(!rule.all);
}

namespace {

/// The plan of one of `world` ranks, of a model in bf16.
std::unique_ptr<RunPlan> plan_on(const std::string& model, int world, int rank, DeviceType device,
                                 size_t memory, std::vector<std::string> overrides) {
  overrides.insert(overrides.begin(), {"policy.precision=bfloat16", "memory.max_memory=1"});
  const ConfigResult result = load_config_text(
      "policy: {model: {model_type: llama}, train_global_batch_size: 8, train_micro_batch_size: 1}\n"
      "pretrain: {max_num_steps: 10}\n"
      "data: {train: {data_path: corpus}}\n",
      "t.yaml", overrides);
  INFO(render(result.diagnostics));
  REQUIRE(result.ok());
  const Config& c = result.config;
  return make_run_plan(c, model::parse_model_config(model, "test"), resolve_batch(c, world),
                       grid_position(c, world, rank), device, 2, {}, memory);
}

std::string tensor_parallel(int ranks) {
  return fmt::format("distributed.tensor_parallel_size={}", ranks);
}

}  // namespace

// Korthikanti et al. 2022 (arXiv:2205.05198), table 2, with tensor and sequence parallelism: 34/t bytes for
// each number of the hidden size and token, of which 2/t are dropout masks, and without 5 a s / h, since
// attention keeps no scores. Inputs of the first matrices that are kept as they were gathered are not
// divided.
TEST_CASE("activations of tensor-parallel ranks follow the closed form", "[plan][recompute]") {
  const std::string gpt2 =
      R"({"model_type":"gpt2","vocab_size":512,"n_embd":128,"n_layer":4,"n_head":8,"n_positions":1024,
      "attn_pdrop":0,"resid_pdrop":0,"embd_pdrop":0})";
  constexpr int64_t h = 128, a = 8, blocks = 4;
  for (const int t : {1, 2, 4, 8}) {
    CAPTURE(t);
    const auto kept = [&](const std::string& keys) {
      const int64_t bytes = kept_bytes(*plan_on(gpt2, t, 0, host, 0, {tensor_parallel(t), keys}));
      CHECK(bytes % tokens == 0);
      return bytes / tokens - 2 * h / t;  // without the head's input
    };
    const int64_t statistics = 4 * a / t + 2 * 8 / t;  // of attention by head, and of two norms
    CHECK(kept("policy.recompute.granularity=none") ==
          blocks * (t == 1 ? 32 * h + statistics : 28 * h / t + 4 * h + statistics));
    if (t == 1) continue;
    CHECK(kept("policy.recompute.modules=[gather]") == blocks * (32 * h / t + statistics));
    CHECK(kept("policy.recompute.modules=[norm, gather]") == blocks * (28 * h / t + statistics));
  }
}

TEST_CASE("auto gathers inputs again where that is the cheapest way to fit", "[plan][recompute]") {
  const std::string large =
      R"({"model_type":"llama","vocab_size":32000,"hidden_size":4096,"intermediate_size":14336,
      "num_hidden_layers":8,"num_attention_heads":32,"num_key_value_heads":8,"max_position_embeddings":8192})";
  constexpr int world = 16, t = 8;
  const std::vector<std::string> keys{tensor_parallel(t), "policy.max_total_sequence_length=8192"};
  const auto plan = [&](int rank, size_t memory, const std::string& more) {
    std::vector<std::string> all = keys;
    all.push_back(more);
    return plan_on(large, world, rank, gpu, memory, all);
  };
  const auto need =
      static_cast<double>(plan(0, 0, "policy.recompute.granularity=none")->memory.total_bytes());
  const auto memory = static_cast<size_t>(0.9 * need);  // 10 % too small
  const auto recomputes = [](const RunPlan& p, const std::string& module) {
    return std::any_of(p.recompute.begin(), p.recompute.end(), [&](const model::RecomputeRule& r) {
      return std::find(r.modules.begin(), r.modules.end(), module) != r.modules.end();
    });
  };
  const auto inside = plan(0, memory, "cluster.gpus_per_node=8");
  CAPTURE(recompute_text(*inside));
  CHECK(static_cast<size_t>(inside->memory.total_bytes()) <= memory);
  CHECK(recomputes(*inside, "gather"));
  CHECK_FALSE(recomputes(*inside, "mlp"));
  for (const model::RecomputeRule& r : inside->recompute) CHECK_FALSE(r.all);
  for (int rank = 1; rank < world; ++rank)
    CHECK(plan(rank, memory, "cluster.gpus_per_node=8")->recompute == inside->recompute);
  // Over the network the same bytes take longer than the MLP's first GEMM.
  const auto across = plan(0, memory, "cluster.gpus_per_node=1");
  CAPTURE(recompute_text(*across));
  CHECK(static_cast<size_t>(across->memory.total_bytes()) <= memory);
  CHECK_FALSE(recomputes(*across, "gather"));
  CHECK(recomputes(*across, "mlp"));
}
