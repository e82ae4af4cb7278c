// Models with experts as config.json describes them: sizes, names in files, FLOPs, capacities, refusals.

#include <algorithm>
#include <map>

#include "apps/model/families/config_problems.h"
#include "apps/model/families/hf_config.h"
#include "apps/model/spec/parameters.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::model;

namespace {

// As published.
const char* const mixtral_8x7b =
    R"({"architectures":["MixtralForCausalLM"],"attention_dropout":0.0,"bos_token_id":1,"eos_token_id":2,
        "hidden_act":"silu","hidden_size":4096,"initializer_range":0.02,"intermediate_size":14336,
        "max_position_embeddings":32768,"model_type":"mixtral","num_attention_heads":32,"num_experts_per_tok":2,
        "num_hidden_layers":32,"num_key_value_heads":8,"num_local_experts":8,"output_router_logits":false,
        "rms_norm_eps":1e-05,"rope_theta":1000000.0,"router_aux_loss_coef":0.02,"sliding_window":null,
        "tie_word_embeddings":false,"torch_dtype":"bfloat16","use_cache":true,"vocab_size":32000})";
const char* const qwen3_30b =
    R"({"architectures":["Qwen3MoeForCausalLM"],"attention_bias":false,"attention_dropout":0.0,
        "decoder_sparse_step":1,"head_dim":128,"hidden_act":"silu","hidden_size":2048,"initializer_range":0.02,
        "intermediate_size":6144,"max_position_embeddings":40960,"max_window_layers":48,"mlp_only_layers":[],
        "model_type":"qwen3_moe","moe_intermediate_size":768,"norm_topk_prob":true,"num_attention_heads":32,
        "num_experts":128,"num_experts_per_tok":8,"num_hidden_layers":48,"num_key_value_heads":4,
        "output_router_logits":false,"rms_norm_eps":1e-06,"rope_scaling":null,"rope_theta":1000000.0,
        "router_aux_loss_coef":0.001,"sliding_window":null,"tie_word_embeddings":false,
        "use_sliding_window":false,"vocab_size":151936})";
const char* const qwen15_moe =
    R"({"architectures":["Qwen2MoeForCausalLM"],"decoder_sparse_step":1,"hidden_act":"silu","hidden_size":2048,
        "intermediate_size":5632,"max_position_embeddings":8192,"max_window_layers":21,"model_type":"qwen2_moe",
        "moe_intermediate_size":1408,"norm_topk_prob":false,"num_attention_heads":16,"num_experts":60,
        "num_experts_per_tok":4,"num_hidden_layers":24,"num_key_value_heads":16,"rms_norm_eps":1e-06,
        "rope_theta":1000000.0,"shared_expert_intermediate_size":5632,"sliding_window":32768,
        "tie_word_embeddings":false,"use_sliding_window":false,"vocab_size":151936})";

std::string small(const std::string& family, const std::string& more) {
  return R"({"model_type":")" + family +
         R"(","vocab_size":32,"hidden_size":16,"intermediate_size":24,"num_hidden_layers":4,
            "num_attention_heads":4)" +
         (more.empty() ? "" : ",") + more + "}";
}

std::string error_of(const std::string& config) {
  try {
    parse_model_config(config, "test");
  } catch (const ModelConfigError& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("the sizes of published models with experts", "[experts]") {
  struct Published {
    const char* config;
    double parameters;  // in billions, by the authors
    double active;      // FLOPs of the forward pass / 2 without attention scores and embedding, in billions
    bool normalize;
  };
  for (const auto& [config, parameters, active, normalize] : {Published{mixtral_8x7b, 46.70, 12.75, true},
                                                              {qwen3_30b, 30.53, 3.03, true},
                                                              {qwen15_moe, 14.32, 2.38, false}}) {
    const ModelSpec m = parse_model_config(config, "published");
    INFO(name_of(m.family));
    CHECK(static_cast<double>(make_parameters(m).total()) / 1e9 == Approx(parameters).epsilon(0.001));
    CHECK(approximate_parameters(m) / 1e9 == Approx(parameters).epsilon(0.001));
    CHECK(training_flops_of_token(m, 0) / 6e9 == Approx(active).epsilon(0.01));
    CHECK(m.expert_layers() == m.layers);
    CHECK(m.moe.rule.normalize == normalize);
    CHECK(m.moe.aux_loss == 0);
  }
}

TEST_CASE("experts in words", "[experts]") {
  CHECK(experts_text(parse_model_config(mixtral_8x7b, "published")) ==
        "8 in 32 of 32 layers, 2 per token: 12.9 B active parameters   no token dropped");
  CHECK(experts_text(parse_model_config(small("llama", ""), "test")).empty());
}

TEST_CASE("the tensors of experts have the names of Hugging Face", "[experts]") {
  const auto parts_of = [](const std::string& config) {
    const ModelSpec m = parse_model_config(config, "test");
    std::map<std::string, std::pair<std::vector<int64_t>, std::string>> parts;
    for (const Parameter& p : make_parameters(m).all) {
      int64_t elements = 0;
      for (const Part& part : p.parts) {
        CHECK(part.offset == elements);
        elements += part.numel();
        parts[part.name] = {part.global, p.group};
      }
      CHECK(elements == p.numel());
    }
    return parts;
  };
  using Shape = std::vector<int64_t>;
  auto mixtral = parts_of(small("mixtral", R"("num_local_experts":3)"));
  const std::string at = "model.layers.2.block_sparse_moe.";
  CHECK(mixtral[at + "gate.weight"] == std::pair(Shape{3, 16}, std::string("dense")));
  CHECK(mixtral[at + "experts.1.w1.weight"] == std::pair(Shape{24, 16}, std::string("expert")));
  CHECK(mixtral[at + "experts.1.w3.weight"] == std::pair(Shape{24, 16}, std::string("expert")));
  CHECK(mixtral[at + "experts.2.w2.weight"] == std::pair(Shape{16, 24}, std::string("expert")));
  CHECK(!mixtral.contains("model.layers.2.mlp.gate_proj.weight"));
  auto qwen = parts_of(small("qwen2_moe",
                             R"("num_experts":3,"num_experts_per_tok":2,"moe_intermediate_size":10,
                                "shared_expert_intermediate_size":12,"decoder_sparse_step":2)"));
  CHECK(qwen["model.layers.0.mlp.gate_proj.weight"].first == Shape{24, 16});
  CHECK(qwen["model.layers.1.mlp.gate.weight"].first == Shape{3, 16});
  CHECK(qwen["model.layers.1.mlp.experts.2.up_proj.weight"].first == Shape{10, 16});
  CHECK(qwen["model.layers.1.mlp.shared_expert.down_proj.weight"] ==
        std::pair(Shape{16, 12}, std::string("dense")));
  CHECK(qwen["model.layers.1.mlp.shared_expert_gate.weight"].first == Shape{1, 16});
  CHECK(qwen.contains("model.layers.2.mlp.up_proj.weight"));
}

TEST_CASE("a router that transformers does not have is written so that transformers refuses it",
          "[experts]") {
  const auto written = [](const std::string& more) {
    const ModelSpec m =
        parse_model_config(small("qwen3_moe", R"("num_experts":4,"num_experts_per_tok":2)" + more), "test");
    return hugging_face_config(m, "float32");
  };
  CHECK(written("").find(R"("model_type": "qwen3_moe")") != std::string::npos);
  CHECK(written(R"(,"moe_router_num_groups":2,"moe_router_group_topk":2)").find(R"("qwen3_moe")") !=
        std::string::npos);
  for (const char* key :
       {R"("moe_router_score_function":"sigmoid")", R"("moe_router_topk_scaling_factor":2.5)",
        R"("moe_router_num_groups":2,"moe_router_group_topk":1)",
        R"("moe_router_score_function":"sigmoid","moe_router_enable_expert_bias":true)"}) {
    const std::string text = written(std::string(",") + key);
    CHECK(text.find(R"("model_type": "nrl_qwen3_moe")") != std::string::npos);
    // It is read as it was.
    const ModelSpec again = parse_model_config(text, "test");
    CHECK(again.family == Family::qwen3_moe);
    CHECK(hugging_face_config(again, "float32") == text);
  }
  const ModelSpec m = parse_model_config(
      small("mixtral", R"("num_local_experts":8,"num_experts_per_tok":2,"moe_router_score_function":"sigmoid",
                          "moe_router_enable_expert_bias":true,"moe_router_bias_update_rate":0.01,
                          "moe_router_num_groups":4,"moe_router_group_topk":2,
                          "moe_router_topk_scaling_factor":2.5)"),
      "test");
  CHECK(m.moe.rule.score == ops::RouterScore::sigmoid);
  CHECK(m.moe.rule.scale == 2.5f);
  CHECK(m.moe.rule.groups == 4);
  CHECK(m.moe.rule.group_top_k == 2);
  CHECK(m.moe.bias_rate == 0.01f);
  const ParameterList list = make_parameters(m);
  const Parameter& bias = list.all[list.layers[1].router_bias];
  CHECK(bias.parts[0].name == "model.layers.1.block_sparse_moe.gate.e_score_correction_bias");
  CHECK((bias.numel() == 8 && !bias.trainable && bias.f32));
}

TEST_CASE("which layers have experts", "[experts]") {
  const auto layers = [](const std::string& more) {
    const ModelSpec m = parse_model_config(
        small("qwen3_moe", R"("num_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":8)" + more),
        "test");
    std::string text;
    for (int64_t i = 0; i < m.layers; ++i) text += m.has_experts(i) ? 'e' : 'd';
    return text;
  };
  CHECK(layers("") == "eeee");
  CHECK(layers(R"(,"decoder_sparse_step":2)") == "dede");
  CHECK(layers(R"(,"decoder_sparse_step":3)") == "dded");
  CHECK(layers(R"(,"mlp_only_layers":[0,3])") == "deed");
  CHECK(layers(R"(,"mlp_only_layers":[1,9],"decoder_sparse_step":2)") == "ddde");
}

TEST_CASE("the capacity of an expert", "[experts]") {
  MoeSpec m;
  m.experts = 8;
  m.rule.top_k = 2;
  CHECK(m.capacity(100, false) == 0);
  CHECK(m.rows(100, false) == 200);
  m.capacity_factor = 1.25;
  CHECK(m.capacity(100, false) == 32);  // 25 x 1.25, rounded up
  CHECK(m.capacity(1, false) == 1);
  CHECK(m.capacity(100, true) == 0);
  CHECK(m.rows(100, false) == 200);
  m.pad_to_capacity = true;
  CHECK(m.rows(100, false) == 256);
  CHECK(m.rows(100, true) == 200);
}

TEST_CASE("what experts cannot be is refused with the key", "[experts]") {
  const std::string sizes = R"("num_experts":4,"moe_intermediate_size":8)";
  const auto qwen3 = [&](const std::string& more) {
    return error_of(small("qwen3_moe", sizes + "," + more));
  };
  CHECK(qwen3(R"("num_experts_per_tok":2)").empty());
  for (const auto& [more, key] :
       {std::pair{R"("num_experts_per_tok":5)", "num_experts_per_tok"},
        {R"("num_experts_per_tok":2,"mlp_only_layers":[-1])", "mlp_only_layers"},
        {R"("num_experts_per_tok":2,"mlp_only_layers":[0.5])", "mlp_only_layers"},
        {R"("num_experts_per_tok":2,"moe_router_load_balancing_type":"sinkhorn")",
         "moe_router_load_balancing_type"},
        {R"("num_experts_per_tok":2,"moe_router_load_balancing_type":"none","moe_aux_loss_coeff":0.1)",
         "moe_aux_loss_coeff"},
        {R"("num_experts_per_tok":2,"moe_pad_expert_input_to_capacity":true)",
         "moe_pad_expert_input_to_capacity"},
        {R"("num_experts_per_tok":2,"moe_expert_capacity_factor":0)", "moe_expert_capacity_factor"},
        {R"("num_experts_per_tok":2,"moe_token_drop_policy":"position")", "moe_token_drop_policy"}}) {
    INFO(more);
    CHECK(qwen3(more).find(key) != std::string::npos);
  }
  CHECK(error_of(small("mixtral", R"("router_jitter_noise":0.1)")).find("router_jitter_noise") !=
        std::string::npos);
  CHECK(error_of(small("deepseek_v3", "")).find("latent attention") != std::string::npos);
}
