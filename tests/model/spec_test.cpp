#include <numeric>

#include "apps/model/families/hf_config.h"
#include "apps/model/spec/parameters.h"
#include "core/base/error.h"
#include "core/io/json.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::model;

namespace {
std::string error_of(const std::string& json) {
  try {
    parse_model_config(json, "config.json");
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}
}  // namespace

TEST_CASE("GPT-2's parameters are counted exactly", "[spec]") {
  const auto m = parse_model_config(
      R"({"model_type":"gpt2","vocab_size":50257,"n_embd":768,"n_layer":12,"n_head":12,"n_positions":1024,"attn_pdrop":0})",
      "c");
  REQUIRE(make_parameters(m).total() == 124439808);
  // The published figures of performance.md: 0.7556 and 0.7981 GFLOP per token at vocabulary 50304.
  auto padded = m;
  padded.vocab_size = 50304;
  REQUIRE(training_flops_per_token(padded, 256) / 1e9 == Approx(0.7556).epsilon(1e-4));
  REQUIRE(training_flops_per_token(padded, 1024) / 1e9 == Approx(0.7981).epsilon(1e-4));
}

TEST_CASE("Llama 3 8B's parameters and FLOPs", "[spec]") {
  const auto m = parse_model_config(
      R"({"model_type":"llama","vocab_size":128256,"hidden_size":4096,"intermediate_size":14336,"num_hidden_layers":32,
          "num_attention_heads":32,"num_key_value_heads":8,"rope_theta":500000.0,"max_position_embeddings":8192})",
      "c");
  REQUIRE(make_parameters(m).total() == 8030261248);
  REQUIRE(training_flops_per_token(m, 8192) / 1e9 == Approx(51.47).epsilon(1e-3));
}

TEST_CASE("names of Hugging Face files", "[spec]") {
  const auto m =
      parse_model_config(R"({"model_type":"qwen3","vocab_size":64,"hidden_size":32,"intermediate_size":48,
      "num_hidden_layers":1,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":16})",
                         "c");
  std::vector<std::string> names;
  for (const auto& p : make_parameters(m).all)
    for (const auto& part : p.parts) names.push_back(part.name);
  REQUIRE(names == std::vector<std::string>{
                       "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight",
                       "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight",
                       "model.layers.0.self_attn.v_proj.weight", "model.layers.0.self_attn.q_norm.weight",
                       "model.layers.0.self_attn.k_norm.weight", "model.layers.0.self_attn.o_proj.weight",
                       "model.layers.0.post_attention_layernorm.weight",
                       "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight",
                       "model.layers.0.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"});
}

TEST_CASE("what changes the mathematics and is not built is refused", "[spec]") {
  const std::string llama = R"({"model_type":"llama","vocab_size":64,"hidden_size":32,"intermediate_size":48,
      "num_hidden_layers":1,"num_attention_heads":4)";
  REQUIRE(error_of(llama + "}").empty());
  REQUIRE(error_of(llama + R"(,"attention_dropout":1.0})").find("dropout") != std::string::npos);
  REQUIRE(error_of(llama + R"(,"num_key_value_heads":3})").find("multiple") != std::string::npos);
  REQUIRE(error_of(llama + R"(,"rope_scaling":{"rope_type":"longrope"}})").find("longrope") !=
          std::string::npos);
  REQUIRE(error_of(llama + R"(,"hidden_act":"relu"})").find("relu") != std::string::npos);
  REQUIRE(error_of(llama + R"(,"head_dim":7})").find("rotary") != std::string::npos);
  REQUIRE(error_of(R"({"model_type":"mamba"})").find("mamba") != std::string::npos);
  REQUIRE(error_of(R"({"model_type":"llama","vocab_size":-3})").find("between") != std::string::npos);
  // Two spellings of one key, which would otherwise hide each other.
  const std::string gpt2 = R"({"model_type":"gpt2","vocab_size":64,"n_embd":32,"n_layer":1,"n_head":4)";
  REQUIRE(error_of(gpt2 + R"(,"hidden_size":32})").empty());
  REQUIRE(error_of(gpt2 + R"(,"hidden_size":64})").find("hidden_size (64) and n_embd (32) are aliases") !=
          std::string::npos);
  REQUIRE(error_of(gpt2 + R"(,"scale_attn_weights":true})").empty());
  REQUIRE(error_of(gpt2 + R"(,"attention_bias":true,"mlp_bias":true})").empty());
  REQUIRE(error_of(gpt2 + R"(,"scale_attn_weights":false})").find("scale_attn_weights") != std::string::npos);
  REQUIRE(error_of("[]").find("object") != std::string::npos);
  REQUIRE(error_of("{").size() > 5);
}

TEST_CASE("attention dropout is read under the names that Hugging Face has for it", "[spec]") {
  const std::string gpt2 = R"({"model_type":"gpt2","vocab_size":64,"n_embd":32,"n_layer":1,"n_head":4)";
  REQUIRE(parse_model_config(gpt2 + "}", "c").attention_dropout == 0.1f);  // what leaving it out means there
  REQUIRE(parse_model_config(gpt2 + R"(,"attn_pdrop":0.0})", "c").attention_dropout == 0);
  REQUIRE(parse_model_config(gpt2 + R"(,"attn_pdrop":0.25})", "c").attention_dropout == 0.25f);
  for (const char* type : {"llama", "mistral", "qwen2", "qwen3"}) {
    const std::string other =
        fmt::format(R"({{"model_type":"{}","vocab_size":64,"hidden_size":32,"intermediate_size":48,
                         "num_hidden_layers":1,"num_attention_heads":4)",
                    type);
    REQUIRE(parse_model_config(other + "}", "c").attention_dropout == 0);
    REQUIRE(parse_model_config(other + R"(,"attention_dropout":0.5})", "c").attention_dropout == 0.5f);
  }
}

TEST_CASE("every independent problem of a config.json is found at once", "[spec]") {
  std::vector<ModelProblem> problems;
  try {
    parse_model_config(R"({"model_type":"llama","vocab_size":0,"hidden_size":48,"num_hidden_layers":"two",
        "num_attention_heads":5,"num_key_value_heads":3,"rms_norm_eps":0,"hidden_act":"relu","mlp_bias":1,
        "initializer_range":-1,"rope_scaling":{"rope_type":"llama3","factor":8}})",
                       "c");
  } catch (const ModelConfigError& e) {
    problems = e.problems();
  }
  std::vector<std::string> keys;
  for (const ModelProblem& p : problems) keys.push_back(p.key);
  // The heads are complained about once: what else is wrong with them depends on it.
  REQUIRE(keys == std::vector<std::string>{"vocab_size", "num_hidden_layers", "intermediate_size",
                                           "hidden_act", "rms_norm_eps", "mlp_bias", "num_attention_heads",
                                           "rope_scaling.low_freq_factor", "rope_scaling.high_freq_factor",
                                           "rope_scaling.original_max_position_embeddings",
                                           "initializer_range"});
}

TEST_CASE("values that make no model are refused with their key", "[spec]") {
  const std::string llama = R"({"model_type":"llama","vocab_size":64,"hidden_size":32,"intermediate_size":48,
      "num_hidden_layers":1,"num_attention_heads":4)";
  const auto refused = [&](const std::string& member, const std::string& part) {
    const std::string text = error_of(llama + "," + member + "}");
    CAPTURE(member, text);
    REQUIRE(text.find(part) != std::string::npos);
  };
  for (const char* eps : {"0", "-1e-6", "1e-60", "1e300", "\"small\""})
    refused(R"("rms_norm_eps":)" + std::string(eps), "rms_norm_eps must be a finite number");
  REQUIRE(error_of(R"({"model_type":"gpt2","vocab_size":64,"n_embd":32,"n_layer":1,"n_head":4,"attn_pdrop":0,
      "layer_norm_epsilon":0})")
              .find("layer_norm_epsilon") != std::string::npos);
  const std::string factors =
      R"("low_freq_factor":1,"high_freq_factor":4,"original_max_position_embeddings":512)";
  REQUIRE(error_of(llama + R"(,"rope_scaling":{"rope_type":"llama3","factor":8,)" + factors + "}}").empty());
  refused(R"("rope_scaling":{"rope_type":"llama3",)" + factors + "}", "rope_scaling.factor is missing");
  refused(R"("rope_scaling":{"type":"llama3","factor":8})", "rope_scaling.low_freq_factor is missing");
  refused(R"("rope_parameters":{"rope_type":"yarn"})", "rope_parameters.factor is missing");
  refused(R"("rope_scaling":{"rope_type":"linear","factor":0.5})", "rope_scaling.factor must be at least 1");
  refused(R"("rope_scaling":{"rope_type":"linear","factor":0})", "rope_scaling.factor");
  refused(R"("rope_scaling":{"factor":2})", "rope_scaling.rope_type is missing");
  refused(R"("rope_scaling":"llama3")", "rope_scaling must be an object");
  refused(R"("rope_theta":1)", "rope_theta must be greater than 1");
  REQUIRE(error_of(llama + R"(,"hidden_act":")" + std::string(5000, 'x') + "\"}").size() < 300);
  // Sizes whose product no integer holds.
  const std::string huge = error_of(R"({"model_type":"llama","vocab_size":64,"hidden_size":1048576,
      "intermediate_size":16777216,"num_hidden_layers":4096,"num_attention_heads":16777216,"head_dim":16777216})");
  REQUIRE(huge.find("num_attention_heads") != std::string::npos);
  REQUIRE(huge.find("parameters") != std::string::npos);
}

TEST_CASE("the written config.json reads back to the same model", "[spec]") {
  const auto m =
      parse_model_config(R"({"model_type":"llama","vocab_size":64,"hidden_size":32,"intermediate_size":48,
      "num_hidden_layers":1,"num_attention_heads":4,"rope_theta":5000.0,"bos_token_id":1})",
                         "c");
  const auto again = parse_model_config(hugging_face_config(m, "float32"), "again");
  REQUIRE(again.head_dim == m.head_dim);
  REQUIRE(again.rope(0).theta == m.rope(0).theta);
  REQUIRE(again.norm_eps == m.norm_eps);
  REQUIRE(again.config_json.find("bos_token_id") != std::string::npos);
}

TEST_CASE("a written config.json has both dialects of rotary positions", "[spec]") {
  const std::string start = R"({"model_type":"llama","vocab_size":64,"hidden_size":32,"intermediate_size":48,
      "num_hidden_layers":1,"num_attention_heads":4,)";
  const auto written = [&](const std::string& rope) {
    return parse_json(hugging_face_config(parse_model_config(start + rope + "}", "c"), "float32"), "written");
  };
  for (const char* rope :
       {R"("rope_parameters":{"rope_type":"llama3","rope_theta":5e5,"factor":8.0,"low_freq_factor":1.0,
           "high_freq_factor":4.0,"original_max_position_embeddings":1024})",
        R"("rope_theta":5e5,"rope_scaling":{"type":"llama3","factor":8.0,"low_freq_factor":1.0,
           "high_freq_factor":4.0,"original_max_position_embeddings":1024})"}) {
    const JsonValue json = written(rope);
    CHECK(json.get_double("rope_theta") == 5e5);
    CHECK(json.at("rope_parameters").get_double("rope_theta") == 5e5);
    for (const char* dialect : {"rope_scaling", "rope_parameters"}) {
      CHECK(json.at(dialect).get_string("rope_type") == "llama3");
      CHECK(json.at(dialect).get_double("factor") == 8);
      CHECK(json.at(dialect).get_int("original_max_position_embeddings") == 1024);
      CHECK_FALSE(json.at(dialect).contains("type"));
    }
    CHECK_FALSE(json.at("rope_scaling").contains("rope_theta"));
    CHECK(parse_model_config(json.dump(), "again").rope(0).kind == ops::RopeKind::llama3);
  }
  // An override that would be ignored beside the file's rope_parameters.
  for (
      const char* rope :
      {R"("rope_scaling":null,"rope_parameters":{"rope_type":"linear","factor":2.0})",
       R"("rope_scaling":{"rope_type":"yarn","factor":2,"beta_fast":16},"rope_parameters":{"rope_type":"yarn","factor":2.0})",
       R"("partial_rotary_factor":0.5,"rope_parameters":{"partial_rotary_factor":1.0})"}) {
    INFO(rope);
    CHECK(error_of(start + rope + "}").find("differ") != std::string::npos);
  }
  CHECK(
      error_of(
          start +
          R"("rope_scaling":{"type":"linear","factor":2},"rope_parameters":{"rope_type":"linear","factor":2.0}})")
          .empty());
  const JsonValue plain = written(R"("rope_theta":7000.0,"partial_rotary_factor":0.5)");
  CHECK(plain.at("rope_scaling").is_null());
  CHECK(plain.at("rope_parameters").get_string("rope_type") == "default");
  CHECK(plain.at("rope_parameters").get_double("partial_rotary_factor") == 0.5);
  CHECK(plain.get_double("partial_rotary_factor") == 0.5);
  // An override of one dialect beside a file's other one.
  CHECK(error_of(start + R"("rope_theta":5e5,"rope_parameters":{"rope_theta":1e4}})").find("differ") !=
        std::string::npos);
  CHECK(error_of(start +
                 R"("rope_scaling":{"rope_type":"linear","factor":2},"rope_parameters":{"rope_theta":1e4}})")
            .find("differ") != std::string::npos);
}

// Where transformers (4 and 5) would compute other logits because of a key.
TEST_CASE("keys that are not built are refused by their names", "[spec]") {
  const auto refused = [](const std::string& family, const std::string& member) {
    const std::string sizes =
        family == "gpt2"
            ? R"("n_embd":32,"n_layer":2,"n_head":4)"
            : R"("hidden_size":32,"intermediate_size":48,"num_hidden_layers":2,"num_attention_heads":4,
                              "num_key_value_heads":4)";
    const std::string start = R"({"model_type":")" + family + R"(","vocab_size":64,)" + sizes;
    REQUIRE(error_of(start + "}").empty());
    const std::string key = member.substr(1, member.find('"', 1) - 1),
                      text = error_of(start + "," + member + "}");
    CAPTURE(family, member, text);
    CHECK(text.find(key) != std::string::npos);
  };
  for (const char* member :
       {R"("scale_attn_weights":false)", R"("scale_attn_by_inverse_layer_idx":true)",
        R"("reorder_and_upcast_attn":true)", R"("add_cross_attention":true)", R"("attention_bias":false)",
        R"("mlp_bias":false)", R"("activation_function":"relu")", R"("activation_function":"quick_gelu")",
        R"("hidden_size":64)", R"("num_hidden_layers":3)", R"("num_attention_heads":2)",
        R"("n_positions":8,"max_position_embeddings":16)"})
    refused("gpt2", member);
  for (
      const char* member :
      {R"("hidden_act":"relu")", R"("hidden_act":"relu2")", R"("num_local_experts":8)",
       R"("quantization_config":{"bits":4})",
       R"("original_max_position_embeddings":16,"rope_scaling":{"rope_type":"yarn","factor":2.0})",
       R"("original_max_position_embeddings":16,"rope_parameters":{"rope_type":"llama3","factor":2.0,"low_freq_factor":1,
           "high_freq_factor":4,"original_max_position_embeddings":32})",
       R"("layer_types":["full_attention","sliding_attention"])", R"("layer_types":["full_attention"])",
       R"("layer_types":"full_attention")", R"("rope_scaling":{"rope_type":"longrope","factor":2.0})",
       R"("rope_scaling":{"type":"mrope"})", R"("rope_parameters":{"full_attention":{"rope_theta":1e4}})"})
    refused("llama", member);
  for (const char* member :
       {R"("attention_bias":true)", R"("mlp_bias":true)", R"("sliding_window":0)", R"("sliding_window":-1)",
        R"("layer_types":["full_attention","full_attention"])"})
    refused("mistral", member);
  for (const char* family : {"qwen2", "qwen3"})
    for (
        const char* member :
        {R"("max_window_layers":1,"use_sliding_window":true,"sliding_window":8)",
         R"("max_window_layers":1,"use_sliding_window":true)",
         R"("max_window_layers":0,"use_sliding_window":true,"sliding_window":8)",
         R"("layer_types":["sliding_attention","sliding_attention"],"use_sliding_window":true,"sliding_window":8)",
         R"("mlp_bias":true)", R"("num_experts":8)"})
      refused(family, member);
}

// The default of transformers, whatever the number of layers.
TEST_CASE("without max_window_layers, windows begin at layer 28", "[spec]") {
  for (const char* family : {"qwen2", "qwen3"}) {
    CAPTURE(family);
    const auto text = [&](int layers) {
      return fmt::format(
          R"({{"model_type":"{}","vocab_size":64,"hidden_size":32,"intermediate_size":48,"num_attention_heads":4,
              "num_hidden_layers":{},"use_sliding_window":true,"sliding_window":8}})",
          family, layers);
    };
    CHECK(parse_model_config(text(28), "c").window(0) == 0);
    CHECK(error_of(text(29)).find("max_window_layers") != std::string::npos);
  }
}

// As they are published: transformers computes with none of these keys but those of the sizes, eps, rotary
// positions and windows.
TEST_CASE("the config.json of published models is read", "[spec]") {
  struct Published {
    const char* text;
    int64_t head_dim, ffn, window;
  };
  const Published models[] = {
      // gpt2
      {R"({"activation_function":"gelu_new","architectures":["GPT2LMHeadModel"],"attn_pdrop":0.1,"bos_token_id":50256,
           "embd_pdrop":0.1,"eos_token_id":50256,"initializer_range":0.02,"layer_norm_epsilon":1e-05,"model_type":"gpt2",
           "n_ctx":1024,"n_embd":768,"n_head":12,"n_layer":12,"n_positions":1024,"resid_pdrop":0.1,
           "summary_activation":null,"summary_first_dropout":0.1,"summary_proj_to_labels":true,"summary_type":"cls_index",
           "summary_use_proj":true,"task_specific_params":{"text-generation":{"do_sample":true,"max_length":50}},
           "vocab_size":50257})",
       64, 3072, 0},
      // A small one for tests of other programs, with keys of BERT.
      {R"({"activation_function":"gelu_new","attention_probs_dropout_prob":0.1,"attn_pdrop":0.1,"embd_pdrop":0.1,
           "gradient_checkpointing":false,"hidden_act":"gelu","hidden_dropout_prob":0.1,"hidden_dropout":0.1,
           "initializer_range":0.02,"intermediate_size":37,"layer_norm_eps":1e-12,"layer_norm_epsilon":1e-05,
           "model_type":"gpt2","n_ctx":1024,"n_embd":32,"n_head":4,"n_inner":null,"n_layer":5,"n_positions":512,
           "resid_pdrop":0.1,"scale_attn_weights":true,"type_vocab_size":16,"use_cache":true,"vocab_size":1000})",
       8, 128, 0},
      // Llama 2, in the first form that it was published in
      {R"({"architectures":["LlamaForCausalLM"],"bos_token_id":1,"eos_token_id":2,"hidden_act":"silu","hidden_size":4096,
           "initializer_range":0.02,"intermediate_size":11008,"max_length":4096,"max_position_embeddings":2048,
           "model_type":"llama","num_attention_heads":32,"num_hidden_layers":32,"num_key_value_heads":32,"pad_token_id":0,
           "pretraining_tp":1,"rms_norm_eps":1e-05,"rope_scaling":null,"tie_word_embeddings":false,
           "torch_dtype":"float16","transformers_version":"4.31.0.dev0","use_cache":true,"vocab_size":32000})",
       128, 11008, 0},
      // Llama 3.2
      {R"({"architectures":["LlamaForCausalLM"],"attention_bias":false,"attention_dropout":0.0,"bos_token_id":128000,
           "eos_token_id":[128001,128008,128009],"head_dim":64,"hidden_act":"silu","hidden_size":2048,
           "initializer_range":0.02,"intermediate_size":8192,"max_position_embeddings":131072,"mlp_bias":false,
           "model_type":"llama","num_attention_heads":32,"num_hidden_layers":16,"num_key_value_heads":8,"pretraining_tp":1,
           "rms_norm_eps":1e-05,"rope_scaling":{"factor":32.0,"high_freq_factor":4.0,"low_freq_factor":1.0,
           "original_max_position_embeddings":8192,"rope_type":"llama3"},"rope_theta":500000.0,
           "tie_word_embeddings":true,"torch_dtype":"bfloat16","use_cache":true,"vocab_size":128256})",
       64, 8192, 0},
      // SmolLM2
      {R"({"architectures":["LlamaForCausalLM"],"attention_bias":false,"bos_token_id":1,"hidden_act":"silu",
           "hidden_size":576,"initializer_range":0.041666666666666664,"intermediate_size":1536,"is_llama_config":true,
           "max_position_embeddings":8192,"mlp_bias":false,"model_type":"llama","num_attention_heads":9,
           "num_hidden_layers":30,"num_key_value_heads":3,"pad_token_id":2,"pretraining_tp":1,"rms_norm_eps":1e-05,
           "rope_interleaved":false,"rope_scaling":null,"rope_theta":100000,"tie_word_embeddings":true,
           "transformers.js_config":{"kv_cache_dtype":{"q4f16":"float16"}},"use_cache":true,"vocab_size":49152})",
       64, 1536, 0},
      // Mistral 7B v0.1 and v0.3
      {R"({"architectures":["MistralForCausalLM"],"hidden_act":"silu","hidden_size":4096,"intermediate_size":14336,
           "max_position_embeddings":32768,"model_type":"mistral","num_attention_heads":32,"num_hidden_layers":32,
           "num_key_value_heads":8,"rms_norm_eps":1e-05,"rope_theta":10000.0,"sliding_window":4096,
           "tie_word_embeddings":false,"vocab_size":32000})",
       128, 14336, 4096},
      {R"({"architectures":["MistralForCausalLM"],"attention_dropout":0.0,"hidden_act":"silu","hidden_size":4096,
           "intermediate_size":14336,"max_position_embeddings":32768,"model_type":"mistral","num_attention_heads":32,
           "num_hidden_layers":32,"num_key_value_heads":8,"rms_norm_eps":1e-05,"rope_theta":1000000.0,
           "sliding_window":null,"tie_word_embeddings":false,"vocab_size":32768})",
       128, 14336, 0},
      // Qwen2.5 and Qwen3
      {R"({"architectures":["Qwen2ForCausalLM"],"attention_dropout":0.0,"hidden_act":"silu","hidden_size":896,
           "intermediate_size":4864,"max_position_embeddings":32768,"max_window_layers":24,"model_type":"qwen2",
           "num_attention_heads":14,"num_hidden_layers":24,"num_key_value_heads":2,"rms_norm_eps":1e-06,
           "rope_theta":1000000.0,"sliding_window":32768,"tie_word_embeddings":true,"use_mrope":false,
           "use_sliding_window":false,"vocab_size":151936})",
       64, 4864, 0},
      {R"({"architectures":["Qwen3ForCausalLM"],"attention_bias":false,"attention_dropout":0.0,"head_dim":128,
           "hidden_act":"silu","hidden_size":1024,"intermediate_size":3072,"max_position_embeddings":40960,
           "max_window_layers":28,"model_type":"qwen3","num_attention_heads":16,"num_hidden_layers":28,
           "num_key_value_heads":8,"rms_norm_eps":1e-06,"rope_scaling":null,"rope_theta":1000000,"sliding_window":null,
           "tie_word_embeddings":true,"use_sliding_window":false,"vocab_size":151936})",
       128, 3072, 0}};
  for (const Published& model : models) {
    CAPTURE(model.text);
    REQUIRE(error_of(model.text) == "");
    const ModelSpec spec = parse_model_config(model.text, "c");
    CHECK(spec.head_dim == model.head_dim);
    CHECK(spec.ffn == model.ffn);
    CHECK(spec.window(0) == model.window);
  }
  CHECK(parse_model_config(models[1].text, "c").activation == ops::Activation::gelu_tanh);
}

// Refused where a user gives them (check_model), and harmless in a file.
TEST_CASE("keys without effect in the model's family are listed", "[spec]") {
  const auto unread = [](const std::string& family, const std::string& member) {
    const std::string sizes = family == "gpt2" ? R"("n_embd":32,"n_layer":2,"n_head":4,"n_positions":64)"
                                               : R"("hidden_size":32,"intermediate_size":48,)"
                                                 R"("num_hidden_layers":2,"num_attention_heads":4)";
    const std::string text =
        R"({"model_type":")" + family + R"(","vocab_size":64,)" + sizes + "," + member + "}";
    CAPTURE(text);
    REQUIRE(error_of(text) == "");
    return parse_model_config(text, "c").unread_keys;
  };
  const auto key_of = [](const std::string& member) { return member.substr(1, member.find('"', 1) - 1); };
  for (const std::string member :
       {R"("n_ctx":32)", R"("hidden_act":"gelu")", R"("intermediate_size":16)", R"("attention_dropout":0.1)",
        R"("hidden_dropout":0.1)", R"("layer_norm_eps":1e-5)", R"("sliding_window":4)"})
    CHECK(unread("gpt2", member) == std::vector{key_of(member)});
  for (const std::string member :
       {R"("hidden_dropout":0.1)", R"("layer_norm_eps":1e-5)", R"("hidden_activation":"gelu")",
        R"("attn_logit_softcapping":50.0)", R"("final_logit_softcapping":30.0)",
        R"("query_pre_attn_scalar":256)", R"("n_embd":16)", R"("original_max_position_embeddings":16)"})
    CHECK(unread("llama", member) == std::vector{key_of(member)});
  // Of kinds of scaling that do not read them.
  for (const auto& [scaling, key] :
       {std::pair(R"("rope_type":"linear","factor":2,"low_freq_factor":1)", "low_freq_factor"),
        std::pair(R"("rope_type":"yarn","factor":2,"high_freq_factor":4)", "high_freq_factor"),
        std::pair(R"("rope_type":"linear","factor":2,"beta_fast":16)", "beta_fast"),
        std::pair(R"("rope_type":"linear","factor":2,"original_max_position_embeddings":16)",
                  "original_max_position_embeddings"),
        std::pair(R"("rope_type":"linear","factor":2,"attention_factor":2)", "attention_factor"),
        std::pair(R"("rope_type":"yarn","factor":2,"mscale":2)", "mscale"),
        std::pair(R"("rope_type":"default","factor":2)", "factor")})
    CHECK(unread("llama", std::string(R"("rope_scaling":{)") + scaling + "}") ==
          std::vector{std::string("rope_scaling.") + key});
  CHECK(unread("llama", R"("rope_scaling":{"rope_type":"yarn","factor":2,"mscale":2,"mscale_all_dim":1,
                           "beta_fast":16,"beta_slow":2,"truncate":true,"original_max_position_embeddings":16})")
            .empty());
  // A window of Qwen, which use_sliding_window turns on.
  CHECK(unread("qwen3", R"("sliding_window":4)") == std::vector<std::string>{"sliding_window"});
  CHECK(unread("qwen3", R"("max_window_layers":1)") == std::vector<std::string>{"max_window_layers"});
  CHECK(unread("qwen3", R"("sliding_window":4,"use_sliding_window":false)").empty());
  for (const char* member :
       {R"("n_ctx":64)", R"("hidden_dropout":0)", R"("use_cache":true)", R"("n_inner":null)"})
    CHECK(unread("gpt2", member).empty());
  // Files for Megatron-LM have the defaults of keys of experts in every model.
  const char* const dense = R"("moe_router_load_balancing_type":"none","moe_token_dispatcher_type":"alltoall",
                               "moe_router_score_function":"softmax","moe_token_drop_policy":"probs",
                               "moe_router_bias_update_rate":0)";
  CHECK(unread("llama", dense).empty());
  CHECK(unread("llama", R"("moe_router_load_balancing_type":"aux_loss","moe_router_bias_update_rate":0.001)")
            .empty());
  CHECK(unread("llama", R"("moe_token_dispatcher_type":"allgather")") ==
        std::vector<std::string>{"moe_token_dispatcher_type"});
}

// Too long for a fixture of logits: transformers has a window of 4096 where a file of mistral names none.
TEST_CASE("a missing window of mistral is 4096 tokens, null is none", "[spec]") {
  const std::string mistral =
      R"({"model_type":"mistral","vocab_size":64,"hidden_size":32,"intermediate_size":48,
      "num_hidden_layers":1,"num_attention_heads":4)";
  CHECK(parse_model_config(mistral + "}", "c").window(0) == 4096);
  CHECK(parse_model_config(mistral + R"(,"sliding_window":null})", "c").window(0) == 0);
  CHECK(parse_model_config(mistral + R"(,"sliding_window":7})", "c").window(0) == 7);
}

TEST_CASE("defaults are written where config.json has no value or null", "[spec]") {
  const auto written = [](const std::string& start, const std::string& member) {
    const ModelSpec spec = parse_model_config(start + member + "}", "c");
    return parse_json(hugging_face_config(spec, "float32"), "written");
  };
  const std::string gpt2 = R"({"model_type":"gpt2","vocab_size":64,"n_embd":32,"n_layer":1,"n_head":4)";
  for (const char* member :
       {"", R"(,"activation_function":null,"layer_norm_epsilon":null,"initializer_range":null)"}) {
    const JsonValue json = written(gpt2, member);
    CHECK(json.get_string("activation_function") == "gelu_new");
    CHECK(json.get_double("layer_norm_epsilon") == 1e-5);
    CHECK(json.get_double("initializer_range") == 0.02);
  }
  CHECK(written(gpt2, R"(,"activation_function":"silu")").get_string("activation_function") == "silu");
  const std::string llama = R"({"model_type":"llama","vocab_size":64,"hidden_size":32,"intermediate_size":48,
      "num_hidden_layers":1,"num_attention_heads":4)";
  for (const char* member : {"", R"(,"hidden_act":null,"rms_norm_eps":null)"}) {
    const JsonValue json = written(llama, member);
    CHECK(json.get_string("hidden_act") == "silu");
    CHECK(json.get_double("rms_norm_eps") == 1e-6);
  }
}

TEST_CASE("dropout of GPT-2 and the width of initial weights", "[spec]") {
  const std::string gpt2 = R"({"model_type":"gpt2","vocab_size":64,"n_embd":32,"n_layer":1,"n_head":4)";
  const ModelSpec missing = parse_model_config(gpt2 + "}", "c");
  CHECK(missing.residual_dropout == 0.1f);
  CHECK(missing.embedding_dropout == 0.1f);
  CHECK(missing.attention_dropout == 0.1f);
  CHECK(missing.initializer_range == 0.02f);
  CHECK(missing.max_positions == 1024);
  const ModelSpec given = parse_model_config(
      gpt2 + R"(,"resid_pdrop":0.25,"embd_pdrop":0.5,"attn_pdrop":0.75,"initializer_range":0.5})", "c");
  CHECK(given.residual_dropout == 0.25f);
  CHECK(given.embedding_dropout == 0.5f);
  CHECK(given.attention_dropout == 0.75f);
  CHECK(given.initializer_range == 0.5f);
}
