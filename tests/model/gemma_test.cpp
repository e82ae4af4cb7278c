// Gemma 3: what its config.json says of each layer, and what is refused.

#include <cmath>

#include "apps/model/families/hf_config.h"
#include "apps/model/spec/parameters.h"
#include "core/io/json.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::model;

namespace {

// As published, without keys that change nothing.
const std::string gemma_1b =
    R"({"architectures":["Gemma3ForCausalLM"],"attention_bias":false,"attention_dropout":0.0,
        "attn_logit_softcapping":null,"bos_token_id":2,"cache_implementation":"hybrid","eos_token_id":[1,106],
        "final_logit_softcapping":null,"head_dim":256,"hidden_activation":"gelu_pytorch_tanh","hidden_size":1152,
        "initializer_range":0.02,"intermediate_size":6912,"max_position_embeddings":32768,
        "model_type":"gemma3_text","num_attention_heads":4,"num_hidden_layers":26,"num_key_value_heads":1,
        "pad_token_id":0,"query_pre_attn_scalar":256,"rms_norm_eps":1e-06,"rope_local_base_freq":10000,
        "rope_scaling":null,"rope_theta":1000000,"sliding_window":512,"sliding_window_pattern":6,
        "torch_dtype":"bfloat16","use_cache":true,"vocab_size":262144})";
const std::string gemma_4b =
    R"({"architectures":["Gemma3ForConditionalGeneration"],"boi_token_index":255999,"eoi_token_index":256000,
        "eos_token_id":[1,106],"image_token_index":262144,"initializer_range":0.02,"mm_tokens_per_image":256,
        "model_type":"gemma3","text_config":{"hidden_size":2560,"intermediate_size":10240,
        "model_type":"gemma3_text","num_hidden_layers":34,"rope_scaling":{"factor":8.0,"rope_type":"linear"},
        "sliding_window":1024},"torch_dtype":"bfloat16","vision_config":{"hidden_size":1152,
        "model_type":"siglip_vision_model","num_hidden_layers":27}})";

const std::string small =
    R"({"model_type":"gemma3_text","vocab_size":64,"hidden_size":32,"intermediate_size":48,
        "num_hidden_layers":4,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":8)";
ModelSpec small_with(const std::string& member) {
  return parse_model_config(small + (member.empty() ? "" : "," + member) + "}", "c");
}
std::vector<int64_t> windows_of(const ModelSpec& m) {
  std::vector<int64_t> windows;
  for (int64_t i = 0; i < m.layers; ++i) windows.push_back(m.window(i));
  return windows;
}
std::string error_of(const std::string& text) {
  try {
    parse_model_config(text, "c");
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("published configurations of Gemma 3", "[spec][gemma]") {
  const ModelSpec one = parse_model_config(gemma_1b, "c");
  CHECK(one.family == Family::gemma3_text);
  CHECK(approximate_parameters(one) / 1e9 == Approx(1.0).epsilon(0.01));
  CHECK(one.tied);
  CHECK(one.activation == ops::Activation::gelu_tanh);
  for (int64_t i = 0; i < 26; ++i) {
    CAPTURE(i);
    const bool slides = (i + 1) % 6 != 0;
    CHECK(one.window(i) == (slides ? 512 : 0));
    CHECK(one.rope(i).theta == (slides ? 1e4 : 1e6));
    CHECK(one.rope(i).kind == ops::RopeKind::standard);
  }
  CHECK(one.unread_keys == std::vector<std::string>{"cache_implementation"});

  // The text part alone, with the defaults of its class.
  const ModelSpec four = parse_model_config(gemma_4b, "c");
  CHECK(approximate_parameters(four) / 1e9 == Approx(3.88).epsilon(0.01));
  CHECK(four.vocab_size == 262208);
  CHECK((four.heads == 8 && four.kv_heads == 4 && four.head_dim == 256));
  CHECK(four.rope(5).kind == ops::RopeKind::linear);
  CHECK(four.rope(5).factor == 8);
  CHECK(four.rope(4).kind == ops::RopeKind::standard);
  CHECK(four.unread_keys.empty());
  // An override of a key of the text part, as policy.model gives it.
  JsonValue overridden = parse_json(gemma_4b, "c");
  overridden.set("sliding_window", 256);
  CHECK(parse_model_config(overridden.dump(), "c").window(0) == 256);

  const JsonValue written = parse_json(hugging_face_config(four, "bfloat16"), "written");
  CHECK(written.get_string("model_type") == "gemma3_text");
  CHECK(written.at("architectures").items().front().as_string() == "Gemma3ForCausalLM");
  CHECK_FALSE(written.contains("vision_config"));
  CHECK(written.at("eos_token_id").items().size() == 2);
  CHECK(written.at("layer_types").items()[5].as_string() == "full_attention");
  CHECK(written.at("layer_types").items()[6].as_string() == "sliding_attention");
  CHECK(written.get_double("query_pre_attn_scalar") == 256);
  const JsonValue& ropes = written.at("rope_parameters");
  CHECK(ropes.at("full_attention").get_double("factor") == 8);
  CHECK(ropes.at("full_attention").get_double("rope_theta") == 1e6);
  CHECK(ropes.at("sliding_attention").get_double("rope_theta") == 1e4);
  CHECK(ropes.at("sliding_attention").get_string("rope_type") == "default");
  const ModelSpec again = parse_model_config(written.dump(), "again");
  CHECK(again.layer_kinds == four.layer_kinds);
  CHECK(again.rope(5).factor == 8);
}

TEST_CASE("the kinds of layers of Gemma 3", "[spec][gemma]") {
  CHECK(windows_of(small_with(R"("sliding_window":7)")) == std::vector<int64_t>{7, 7, 7, 7});
  CHECK(windows_of(small_with(R"("sliding_window":7,"sliding_window_pattern":2)")) ==
        std::vector<int64_t>{7, 0, 7, 0});
  CHECK(windows_of(small_with("")) == std::vector<int64_t>{4096, 4096, 4096, 4096});
  const ModelSpec m = small_with(
      R"("sliding_window":7,"layer_types":["full_attention","sliding_attention","full_attention","full_attention"],
         "rope_parameters":{"full_attention":{"rope_type":"llama3","factor":4,"low_freq_factor":1,
         "high_freq_factor":4,"original_max_position_embeddings":16},"sliding_attention":{"rope_theta":50}})");
  CHECK(windows_of(m) == std::vector<int64_t>{0, 7, 0, 0});
  CHECK(m.rope(0).kind == ops::RopeKind::llama3);
  CHECK(m.rope(0).theta == 1e6);
  CHECK(m.rope(1).theta == 50);
  // FLOPs count each layer's pairs: of 10 tokens 55, and 49 within a window of 7.
  const ModelSpec full = small_with(R"("sliding_window":null)");
  const double per_pair = 3 * 4 * 4 * 8;
  CHECK(training_flops_per_token(full, 10) - training_flops_per_token(m, 10) ==
        Approx(per_pair * (55 - 49) / 10));
  CHECK(attention_pairs(m, 10) == Approx((3 * 55 + 49) / 4.0));
}

TEST_CASE("what a model of Gemma 3 must not ask for", "[spec][gemma]") {
  const auto refused = [&](const std::string& member, const std::string& key) {
    const std::string error = error_of(small + "," + member + "}");
    INFO(member << ": " << error);
    CHECK(error.find(key) != std::string::npos);
  };
  refused(R"("attn_logit_softcapping":50.0)", "attn_logit_softcapping");
  refused(R"("final_logit_softcapping":30.0)", "final_logit_softcapping");
  refused(R"("use_bidirectional_attention":true)", "use_bidirectional_attention");
  refused(R"("layer_types":["full_attention"])", "layer_types");
  refused(R"("layer_types":["full_attention","full_attention","full_attention","chunked_attention"])",
          "layer_types");
  refused(R"("layer_types":"full_attention")", "layer_types");
  refused(R"("sliding_window_pattern":0)", "sliding_window_pattern");
  refused(R"("rope_local_base_freq":1)", "rope_local_base_freq");
  refused(R"("rope_scaling":{"rope_type":"linear"})", "factor");
  refused(R"("rope_scaling":2)", "rope_scaling");
  refused(R"("rope_parameters":{"rope_type":"default","rope_theta":100})", "full_attention");
  refused(R"("rope_parameters":{"sliding_attention":7})", "rope_parameters.sliding_attention");
  refused(R"("rope_theta":100,"rope_parameters":{"full_attention":{"rope_theta":200}})", "rope_theta");
  refused(R"("rope_local_base_freq":100,"rope_parameters":{"sliding_attention":{"rope_theta":200}})",
          "rope_local_base_freq");
  refused(R"("query_pre_attn_scalar":0)", "query_pre_attn_scalar");
  refused(R"("num_experts":4)", "num_experts");
  CHECK(error_of(R"({"model_type":"gemma3","text_config":3})") != "");
  CHECK(error_of(R"({"model_type":"gemma2","vocab_size":8})").find("gemma2") != std::string::npos);
}

TEST_CASE("weights of norms begin as zeros and have transformers' names", "[spec][gemma]") {
  const ModelSpec m = small_with("");
  int norms = 0;
  for (const Parameter& p : make_parameters(m).all) {
    if (p.shape.size() > 1) continue;
    ++norms;
    CHECK(p.init == Init::zeros);
    CHECK_FALSE(p.decay);
  }
  CHECK(norms == 4 * 6 + 1);
  const ParameterList list = make_parameters(m);
  const auto name = [&](int parameter) {
    return list.all.at(static_cast<size_t>(parameter)).parts.at(0).name;
  };
  CHECK(name(list.layers[1].norm1) == "model.layers.1.input_layernorm.weight");
  CHECK(name(list.layers[1].post_norm1) == "model.layers.1.post_attention_layernorm.weight");
  CHECK(name(list.layers[1].norm2) == "model.layers.1.pre_feedforward_layernorm.weight");
  CHECK(name(list.layers[1].post_norm2) == "model.layers.1.post_feedforward_layernorm.weight");
}

TEST_CASE("names of tensors in multimodal files", "[spec][gemma]") {
  const FamilyRules& gemma = rules_of(Family::gemma3_text);
  CHECK(name_in_text_model(gemma, "language_model.model.norm.weight") == "model.norm.weight");
  CHECK(name_in_text_model(gemma, "model.language_model.norm.weight") == "model.norm.weight");
  CHECK(name_in_text_model(gemma, "language_model.lm_head.weight") == "lm_head.weight");
  CHECK(name_in_text_model(gemma, "model.norm.weight") == "model.norm.weight");
  CHECK(name_in_text_model(gemma, "vision_tower.a").empty());
  CHECK(name_in_text_model(gemma, "model.multi_modal_projector.a").empty());
  CHECK(name_in_text_model(rules_of(Family::llama), "vision_tower.a") == "vision_tower.a");
  CHECK(names_in_files(rules_of(Family::gpt2), "transformer.wte.weight") ==
        std::vector<std::string>{"transformer.wte.weight", "wte.weight"});
}
