// What a run is checked against before it is set up.

#include <cstdlib>
#include <string>
#include <vector>

#include "apps/train/launch/device_choice.h"
#include "apps/train/start/run_config.h"
#include "core/base/text.h"
#include "core/device/cpu/memory.h"
#include "tests/catch.h"

using namespace nrl;

TEST_CASE("the ranks of a machine share its memory") {
  for (const int ranks : {1, 2, 4}) {
    ConfigResult result = load_config_text(
        "policy:\n"
        "  model: {model_type: llama, vocab_size: 272, hidden_size: 48, intermediate_size: 80,\n"
        "          num_hidden_layers: 2, num_attention_heads: 4}\n"
        "  train_global_batch_size: 1073741824\n"
        "pretrain: {max_num_steps: 10}\n"
        "data: {train: {data_path: corpus}}\n",
        "t.yaml", std::vector<std::string>{"device=cpu"});
    REQUIRE(result.ok());
    train::check_run(result, {.world = ranks, .local = ranks, .files = false});
    std::string shown = render(result.diagnostics);
    INFO(shown);
    for (char& c : shown)
      if (c == '\n') c = ' ';
    CHECK(result.exit_code() == Exit::out_of_memory);
    const std::string owner =
        ranks == 1 ? "this machine" : fmt::format("this machine (shared by {} ranks)", ranks);
    const uint64_t share = cpu::machine_memory() / static_cast<uint64_t>(ranks);
    CHECK(shown.find(fmt::format("of the {} that", human_bytes(share))) != std::string::npos);
    CHECK(shown.find(owner + " has for it") != std::string::npos);
  }
}

TEST_CASE("tensor-parallel ranks must divide the heads and the MLP") {
  const auto complaint = [](const std::string& ranks, const std::string& model) {
    ConfigResult result = load_config_text(
        "policy:\n"
        "  model: {vocab_size: 272, hidden_size: 48, num_hidden_layers: 2, num_attention_heads: 8, " +
            model +
            "}\n"
            "  train_global_batch_size: 8\n"
            "pretrain: {max_num_steps: 10}\n"
            "data: {train: {data_path: corpus}}\n",
        "t.yaml", std::vector<std::string>{"device=cpu", "distributed.tensor_parallel_size=" + ranks});
    REQUIRE(result.ok());
    train::check_run(result, {.world = 8, .local = 8, .files = false});
    CHECK((result.exit_code() == Exit::config || result.ok()));
    return result.ok() ? "" : render(result.diagnostics);
  };
  const std::string llama = "model_type: llama, intermediate_size: 80, num_key_value_heads: 4";
  CHECK(complaint("2", llama).empty());
  CHECK(complaint("4", llama).empty());
  const std::string heads = complaint("8", llama);
  INFO(heads);
  CHECK(
      heads.find("distributed.tensor_parallel_size is 8, which does not divide the model: it has 4 key/value "
                 "heads\n") != std::string::npos);
  CHECK(heads.find("fits: 1, 2, 4\n") != std::string::npos);
  const std::string ffn = complaint("4", "model_type: llama, intermediate_size: 82, num_key_value_heads: 2");
  INFO(ffn);
  CHECK(ffn.find("it has 2 key/value heads, 82 columns of the MLP") != std::string::npos);
  CHECK(ffn.find("fits: 1, 2\n") != std::string::npos);
}

TEST_CASE("the chunks of a pipeline must have the layers of the model") {
  const auto complaint = [](std::vector<std::string> keys) {
    for (std::string& key : keys) key = "distributed." + key;
    keys.emplace_back("device=cpu");
    ConfigResult result = load_config_text(
        "policy:\n"
        "  model: {model_type: llama, vocab_size: 272, hidden_size: 48, num_hidden_layers: 6,\n"
        "          num_attention_heads: 8, intermediate_size: 80}\n"
        "  train_global_batch_size: 8\n"
        "pretrain: {max_num_steps: 10}\n"
        "data: {train: {data_path: corpus}}\n",
        "t.yaml", keys);
    REQUIRE(result.ok());
    train::check_run(result, {.world = 8, .local = 8, .files = false});
    CHECK((result.exit_code() == Exit::config || result.ok()));
    return result.ok() ? "" : render(result.diagnostics);
  };
  const auto has = [](const std::string& text, const char* part) {
    INFO(text);
    CHECK(text.find(part) != std::string::npos);
  };
  const std::string four = "pipeline_parallel_size=4";
  CHECK(complaint({four}).empty());  // 1, 2, 1, 2
  CHECK(complaint(
            {four, "account_for_embedding_in_pipeline_split=true", "account_for_loss_in_pipeline_split=true"})
            .empty());
  CHECK(complaint({four, "pipeline_layout=[0,3,3,0]"}).empty());
  has(complaint({four, "virtual_pipeline_size=2"}),
      "distributed.virtual_pipeline_size does not fit the 6 layers of the model in 4 stages of 2 chunks");
  has(complaint({four, "pipeline_layout=[1,2,2]"}), "it has 3 numbers for 4 chunks");
  has(complaint({four, "pipeline_layout=[1,2,2,2]"}), "its chunks have 7 layers, the model 6");
  has(complaint({four, "pipeline_layout=[3,0,3,0]"}), "chunk 1 of 4 would have 0 of the 6 layers");
  has(complaint({four, "num_layers_in_first_pipeline_stage=5"}), "chunk 1 of 4 would have 0 of the 6 layers");
  has(complaint({"pipeline_parallel_size=2", "num_layers_in_first_pipeline_stage=2",
                 "num_layers_in_last_pipeline_stage=2"}),
      "its chunks have 4 layers, the model 6");
}

TEST_CASE("context parallelism is checked against the model") {
  const auto problems = [](const std::string& model, std::vector<std::string> overrides) {
    overrides.insert(overrides.begin(), "device=cpu");
    ConfigResult result = load_config_text("policy:\n  model: " + model +
                                               "\n  max_total_sequence_length: 32\n"
                                               "pretrain: {max_num_steps: 10}\n"
                                               "data: {train: {data_path: corpus}}\n",
                                           "t.yaml", overrides);
    INFO(render(result.diagnostics));
    REQUIRE(result.ok());
    train::check_run(result, {.world = 4, .local = 4, .files = false});
    return render(result.diagnostics);
  };
  const std::string llama =
      "{model_type: llama, vocab_size: 272, hidden_size: 48, intermediate_size: 80, num_hidden_layers: 2, "
      "num_attention_heads: 4, num_key_value_heads: 2}";
  const std::string windowed =
      "{model_type: mistral, vocab_size: 272, hidden_size: 48, intermediate_size: 80, num_hidden_layers: 2, "
      "num_attention_heads: 4, num_key_value_heads: 4, sliding_window: 8}";
  const std::string size = "distributed.context_parallel_size=4", both = "distributed.cp_comm_type=a2a+p2p",
                    sizes = "distributed.hierarchical_context_parallel_sizes=";
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  for (const char* type : {"p2p", "all_gather", "[p2p,all_gather]"}) {
    INFO(type);
    CHECK(problems(llama, {size, fmt::format("distributed.cp_comm_type={}", type)}).empty());
  }
  CHECK(has(problems(llama, {size, "distributed.cp_comm_type=a2a"}),
            "cp_comm_type a2a: 2 key/value heads cannot be divided among 4 ranks"));
  CHECK(has(problems(llama, {size, both, sizes + "[4,1]"}), "cannot be divided among 4 ranks"));
  CHECK(problems(llama, {size, both, sizes + "[2,2]"}).empty());
  CHECK(has(problems(llama, {size, "distributed.cp_comm_type=[p2p,p2p,p2p]"}),
            "lists 3 values, but the model has 2 layers"));
  CHECK(has(problems(windowed, {size}), "cp_comm_type p2p does not support the sliding window"));
  CHECK(has(problems(windowed, {size, both, sizes + "[2,2]"}), "does not support the sliding window"));
  CHECK(problems(windowed, {size, both, sizes + "[4,1]"}).empty());
  CHECK(problems(windowed, {size, "distributed.cp_comm_type=all_gather"}).empty());
  CHECK(problems("{model_type: gpt2, vocab_size: 272, n_embd: 48, n_layer: 2, n_head: 4}",
                 {size, "policy.model.attn_pdrop=0.1", "policy.model.resid_pdrop=0.1"})
            .empty());
}

TEST_CASE("what belongs to experts is refused for models without them, and the other way round") {
  const auto shown = [](const std::string& model, std::vector<std::string> overrides) {
    overrides.insert(overrides.begin(), {"device=cpu", "policy.model=" + model});
    ConfigResult result = load_config_text(
        "policy: {train_global_batch_size: 8}\n"
        "pretrain: {max_num_steps: 10}\n"
        "data: {train: {data_path: corpus}}\n",
        "t.yaml", overrides);
    train::check_run(result, {.world = 2, .files = false});
    return render(result.diagnostics);
  };
  const std::string sizes =
      "vocab_size: 272, hidden_size: 48, intermediate_size: 80, num_hidden_layers: 2, num_attention_heads: "
      "4}";
  const std::string dense = "{model_type: llama, " + sizes, experts = "{model_type: mixtral, " + sizes;
  const std::string recompute = "policy.recompute.modules=[norm, moe]";
  CHECK(shown(dense, {}).empty());
  CHECK(shown(experts, {recompute}).empty());
  CHECK(shown(dense, {recompute}).find("policy.recompute.modules: moe matches nothing") != std::string::npos);
  CHECK(shown(experts, {"policy.recompute.modules=[mlp]"}).find("mlp matches nothing") != std::string::npos);
  CHECK(shown(dense, {"policy.recompute.modules=[mlp, core_attn]"}).empty());
  CHECK(shown(dense, {"policy.checkpoint_layers=[0, 2]"})
            .find("policy.checkpoint_layers has layer 2, but the model has 2 layers: 0 to 1") !=
        std::string::npos);
  CHECK(shown(dense, {"policy.checkpoint_layers=[0, 1]"}).empty());
  CHECK(shown(dense, {"policy.checkpoint_layers=[0]", "policy.recompute.granularity=none"}).empty());
  CHECK(
      shown(dense, {"policy.checkpoint_layers=[0, 1]", "policy.recompute.granularity=none"})
          .find("policy.recompute.granularity has no effect: policy.checkpoint_layers names all 2 layers") !=
      std::string::npos);
  CHECK(shown(dense, {"policy.checkpoint_every=3"}).find("checkpoint_every is 3") != std::string::npos);
  CHECK(shown(dense, {"policy.recompute.granularity=full", "policy.recompute.method=block",
                      "policy.recompute.num_layers=3"})
            .find("policy.recompute.num_layers is 3, but the model has 2 layers") != std::string::npos);
  CHECK(shown(dense, {"policy.model.moe_aux_loss_coeff=0.1"}).find("policy.model.moe_aux_loss_coeff") !=
        std::string::npos);
  const std::string split = "distributed.expert_parallel_size=2",
                    parts = "distributed.expert_tensor_parallel_size=2";
  for (const std::string& key : {split, parts}) {
    CHECK(shown(experts, {key}).empty());
    CHECK(shown(dense, {key}).find("has no experts") != std::string::npos);
  }
  CHECK(shown(experts, {split, parts})
            .find("2 x expert_tensor_parallel_size 2 = 4 does not divide the 2 ranks") != std::string::npos);
  CHECK(shown(experts, {split, "policy.model.num_local_experts=3"}).find("does not divide the 3 experts") !=
        std::string::npos);
  CHECK(shown(experts, {parts, "policy.model.intermediate_size=81"})
            .find("does not divide the 81 columns of an expert") != std::string::npos);
  const std::string gather = "policy.model.moe_token_dispatcher_type=allgather",
                    capacity = "policy.model.moe_expert_capacity_factor=1.0";
  CHECK(shown(experts, {split, capacity}).empty());
  CHECK(shown(dense, {"policy.precision=float16"}).empty());
  CHECK(shown(experts, {"policy.precision=float16"}).empty());
  CHECK(shown(experts, {split, gather, capacity}).find("allgather does not drop tokens") !=
        std::string::npos);
  CHECK(shown(experts, {gather, capacity})
            .find("error: policy.model.moe_token_dispatcher_type: allgather has no "
                  "effect") != std::string::npos);
  CHECK(shown(experts, {gather, "distributed.expert_parallel_size=1"})
            .find("warning: policy.model.moe_token_dispatcher_type: allgather has no effect") !=
        std::string::npos);
  const std::string balance = "policy.model.moe_router_load_balancing_type=seq_aux_loss",
                    coefficient = "policy.model.moe_aux_loss_coeff=";
  CHECK(shown(experts, {balance})
            .find("error: policy.model.moe_router_load_balancing_type: seq_aux_loss has no "
                  "effect without policy.model.moe_aux_loss_coeff above 0") != std::string::npos);
  CHECK(shown(experts, {balance, coefficient + "0"}).starts_with("warning: "));
  CHECK(shown(experts, {balance, coefficient + "0.1"}).empty());
  CHECK(shown(experts, {"policy.model.moe_router_load_balancing_type=none"}).empty());
  CHECK(shown(experts, {split, "device=cuda", "policy.cuda_graph=true"})
            .find("the host waits for the numbers of tokens") != std::string::npos);
  CHECK(shown(experts, {split, gather, "device=cuda", "policy.cuda_graph=true"}).find("the host waits") ==
        std::string::npos);

  const std::string tensor = "distributed.tensor_parallel_size=2",
                    context = "distributed.context_parallel_size=2";
  CHECK(shown(experts, {tensor}).empty());
  CHECK(shown(experts, {tensor, "distributed.sequence_parallel=false"})
            .find("set distributed.sequence_parallel to true or auto") != std::string::npos);
  for (const std::string& ranks : {tensor, context})
    CHECK(shown(experts, {ranks, "policy.model.moe_expert_capacity_factor=1.0"})
              .find("moe_expert_capacity_factor drops tokens") != std::string::npos);
  CHECK(shown(experts, {tensor, "policy.model.moe_aux_loss_coeff=0.1"}).empty());
  const std::string bias = "policy.model.moe_router_enable_expert_bias=true";
  CHECK(shown(experts, {bias}).find("needs moe_router_score_function: sigmoid") != std::string::npos);
  CHECK(shown(experts, {bias, "policy.model.moe_router_score_function=sigmoid"}).empty());
  CHECK(shown(experts,
              {"policy.model.moe_router_bias_update_rate=0", "policy.model.moe_token_drop_policy=probs"})
            .empty());  // as where they are absent
  CHECK(shown(experts, {"policy.model.moe_router_bias_update_rate=0.1"}).find("has no effect without") !=
        std::string::npos);
  CHECK(shown(experts, {"policy.model.moe_router_num_groups=2"}).find("moe_router_group_topk is missing") !=
        std::string::npos);
  CHECK(shown(experts, {"policy.model.moe_router_num_groups=3", "policy.model.moe_router_group_topk=1"})
            .find("the experts must divide into the groups") != std::string::npos);
  // Columns of an MLP that no layer has need not divide; those of the shared expert must.
  const std::string qwen =
      "{model_type: qwen2_moe, vocab_size: 272, hidden_size: 48, intermediate_size: 81, num_hidden_layers: "
      "2, "
      "num_attention_heads: 4, num_key_value_heads: 4, moe_intermediate_size: 7, "
      "shared_expert_intermediate_size: ";
  CHECK(shown(qwen + "8}", {tensor}).empty());
  CHECK(shown(qwen + "9}", {tensor}).find("9 columns of the shared expert") != std::string::npos);
  CHECK(shown(qwen + "8, mlp_only_layers: [0]}", {tensor}).find("81 columns of the MLP") !=
        std::string::npos);
}

TEST_CASE("what has no effect in a run is said", "[effect]") {
  const auto shown = [](std::vector<std::string> overrides, const std::string& file = "") {
    ConfigResult result = load_config_text(
        "policy:\n"
        "  model: {model_type: llama, vocab_size: 272, hidden_size: 48, intermediate_size: 80,\n"
        "          num_hidden_layers: 2, num_attention_heads: 4}\n"
        "  train_global_batch_size: 8\n"
        "  recompute: none\n"
        "pretrain: {max_num_steps: 10}\n"
        "data: {train: {data_path: corpus}}\n"
        "device: cpu\n" +
            file,
        "t.yaml", overrides);
    const train::RunSetting setting{.world = 2, .local = 2, .files = false};
    train::check_run(result, setting);
    if (result.ok()) {  // and is not said again of the resolved configuration
      ConfigResult again = load_config_text(dump_resolved(result), "config.yaml", {});
      train::check_run(again, setting);
      CHECK(render(again.diagnostics).find("has no effect") == std::string::npos);
    }
    return render(result.diagnostics);
  };
  const std::string fixed = "policy.train_micro_batch_size=2", limit = "memory.max_memory=0.5",
                    idle = "memory.max_memory: 0.5 has no effect";
  CHECK(shown({limit}).empty());
  CHECK(shown({fixed}).empty());
  CHECK(shown({fixed, limit, "policy.recompute.granularity=auto"}).empty());
  CHECK(shown({fixed, limit}).starts_with("warning: " + idle));
  CHECK(shown({fixed, "memory.max_memory=1"}).empty());
  CHECK(shown({fixed}, "memory: {max_memory: 0.5}\n").starts_with("warning: " + idle));
  // Less than the 1024 elements that are moved at least.
  CHECK(shown({"policy.offload_optimizer=0.00001"})
            .starts_with("error: policy.offload_optimizer: 1e-05 moves nothing"));
  const std::string little = shown({"policy.offload_optimizer=0.005"});
  INFO(little);
  CHECK(little.find("rounded down to a multiple of 1024") != std::string::npos);
  const size_t at = little.find("Fix: ");
  REQUIRE(at != std::string::npos);
  CHECK(
      shown({"policy.offload_optimizer=" + little.substr(at + 5, little.find(" or more") - at - 5)}).empty());

  const char* const before = std::getenv("OMP_NUM_THREADS");
  const std::string saved = before ? before : "";
  for (const char* valid : {"1", " 3 ", "2,1", "4 , 2"}) {
    setenv("OMP_NUM_THREADS", valid, 1);
    CAPTURE(valid);
    CHECK(shown({}).empty());
    CHECK(train::threads_for({}, 1) == std::atoi(valid));
  }
  for (const char* invalid : {"", "0", "-1", "abc", "2x", "2,", ",2", "2,x", "4097", "99999999999", "1e3"}) {
    setenv("OMP_NUM_THREADS", invalid, 1);
    CAPTURE(invalid);
    CHECK(
        shown({}).starts_with(fmt::format("warning: OMP_NUM_THREADS is \"{}\", which is ignored", invalid)));
    CHECK(shown({"kernels.num_threads=1"}).empty());
  }
  unsetenv("OMP_NUM_THREADS");
  CHECK(shown({}).empty());
  if (before) setenv("OMP_NUM_THREADS", saved.c_str(), 1);
}

TEST_CASE("FP8 operands are checked against the model") {
  const auto shown = [](const std::string& model, std::vector<std::string> overrides) {
    overrides.insert(overrides.begin(),
                     {"device=cpu", "policy.model=" + model, "policy.fp8_cfg.enabled=true"});
    ConfigResult result = load_config_text(
        "policy: {train_global_batch_size: 8, train_micro_batch_size: 1, max_total_sequence_length: 128}\n"
        "pretrain: {max_num_steps: 10}\n"
        "data: {train: {data_path: corpus}}\n",
        "t.yaml", overrides);
    train::check_run(result, {.world = 2, .files = false});
    return render(result.diagnostics);
  };
  const auto refused = [&](const std::vector<std::string>& overrides, const std::string& message,
                           const std::string& model) {
    const std::string text = shown(model, overrides);
    CAPTURE(text);
    CHECK(text.find(message) != std::string::npos);
  };
  const std::string small =
                        "{model_type: llama, vocab_size: 272, hidden_size: 32, intermediate_size: 96, "
                        "num_hidden_layers: 2, num_attention_heads: 4, head_dim: 16}",
                    wide =
                        "{model_type: llama, vocab_size: 272, hidden_size: 128, intermediate_size: 256, "
                        "num_hidden_layers: 2, num_attention_heads: 4, head_dim: 64}",
                    experts =
                        "{model_type: mixtral, vocab_size: 272, hidden_size: 32, intermediate_size: 32, "
                        "num_hidden_layers: 2, num_attention_heads: 4, head_dim: 16}";
  const std::string blockwise = "policy.fp8_cfg.fp8_recipe=blockwise",
                    tensor = "distributed.tensor_parallel_size=2";
  CHECK(shown(small, {}).empty());
  CHECK(shown(small, {tensor}).empty());
  CHECK(shown(wide, {blockwise}).empty());
  CHECK(shown(wide, {blockwise, tensor}).empty());
  CHECK(shown(wide, {"policy.fp8_cfg.fp8_recipe=mxfp8"}).empty());
  CHECK(shown(experts, {}).empty());
  refused({"policy.fp8_cfg.fp8_param=true"}, "fp8_param: true does not support models with experts", experts);
  refused({"policy.model.intermediate_size=48", "distributed.expert_tensor_parallel_size=2"},
          "policy.model.intermediate_size: 24 columns of an expert on each of 2 expert-tensor-parallel ranks "
          "are not a multiple of 16",
          experts);
  const std::string qwen =
      "{model_type: qwen2_moe, vocab_size: 272, hidden_size: 128, num_hidden_layers: 2, num_attention_heads: "
      "4, head_dim: 32, num_key_value_heads: 4, num_experts: 4, intermediate_size: 50, "
      "moe_intermediate_size: 128, shared_expert_intermediate_size: 96}";
  CHECK(shown(qwen, {"policy.fp8_cfg.fp8_recipe=mxfp8"}).empty());
  refused({blockwise},
          "policy.model.shared_expert_intermediate_size: 96 columns of the shared expert are not a multiple "
          "of 128",
          qwen);
  refused({"policy.fp8_cfg.fp8_recipe=mxfp8", "policy.model.moe_intermediate_size=96"},
          "policy.model.moe_intermediate_size: 96 columns of an expert are not a multiple of 128", qwen);
  refused({blockwise},
          "policy.model.hidden_size: 32 columns of the residual stream are not a multiple of 128", small);
  refused(
      {tensor, "policy.model.intermediate_size=48"},
      "policy.model.intermediate_size: 24 columns of the MLP on each of 2 tensor-parallel ranks are not a "
      "multiple of 16",
      small);
  refused({"policy.max_total_sequence_length=24"}, "a microbatch of 1 x 24 tokens is not a multiple of 16",
          small);
  refused({blockwise, "policy.max_total_sequence_length=64"},
          "a microbatch of 1 x 64 tokens is not a multiple of 128", wide);
  // auto is judged by what it takes: of four sequences per rank.
  const std::string automatic = "policy.train_micro_batch_size=auto",
                    length = "policy.max_total_sequence_length=";
  CHECK(shown(wide, {blockwise, automatic, length + "64"}).empty());
  CHECK(shown(wide, {blockwise, automatic, length + "32"}).empty());
  refused({blockwise, automatic, length + "16"}, "a microbatch of 4 x 16 tokens is not a multiple of 128",
          wide);
  refused({blockwise, automatic, length + "16"}, "or microbatches of a multiple of 8 sequences", wide);
  refused({blockwise, automatic, "policy.gradient_accumulation_steps=4", length + "64"},
          "a microbatch of 1 x 64 tokens", wide);
  refused({"policy.fp8_cfg.num_first_layers_in_bf16=1", "policy.fp8_cfg.num_last_layers_in_bf16=1"},
          "no layer reads FP8", small);
  const std::string attention = "policy.fp8_cfg.fp8_dot_product_attention=true";
  CHECK(shown(small, {attention}).empty());
  CHECK(shown(small, {attention, tensor}).empty());
  refused({attention, "policy.model.head_dim=8", "policy.model.num_key_value_heads=1"},
          "policy.model.num_key_value_heads: 8 columns of the keys are not a multiple of 16", small);
  refused({attention, "policy.model.attention_dropout=0.1"},
          "fp8_dot_product_attention: true is not supported with dropout of probabilities, which is 0.1",
          small);
}
