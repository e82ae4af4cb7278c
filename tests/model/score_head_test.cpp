// Models with a scalar head: what config.json says of them, their parameters, and their gradients.

#include <algorithm>
#include <cmath>

#include "apps/model/families/hf_config.h"
#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/model/tiny_model.h"
#include "tests/ops/reference/table.h"
#include "tests/sim/ops.h"

using namespace nrl;
using test::TinyModel;
using test::TinyOptions;

namespace {

/// config.json of the tiny models as reward models.
std::vector<std::pair<std::string, std::string>> reward_configs() {
  std::vector<std::pair<std::string, std::string>> out;
  for (auto [name, config] : test::tiny_configs()) {
    config.insert(1, R"("architectures":["AForSequenceClassification"],"num_labels":1,)");
    out.emplace_back(name, config);
  }
  return out;
}

const ops::KernelTable& cpu_kernels() {
  return ops::cpu_kernels(cpu::best_isa());
}

std::string refusal(const std::string& config) {
  try {
    (void)model::parse_model_config(config, "test");
  } catch (const model::ModelConfigError& e) {
    return e.what();
  }
  return "";
}

std::vector<std::string> names_of(const model::ModelSpec& spec) {
  std::vector<std::string> out;
  for (const model::Parameter& p : model::make_parameters(spec).all)
    for (const model::Part& part : p.parts) out.push_back(part.name);
  return out;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// The loss weights of the batch, copied when the head asks for them.
class WeightsOfBatch final : public model::LossRule {
 public:
  explicit WeightsOfBatch(model::Dependence dependence) : dependence_(dependence) {}
  model::Dependence dependence() const override { return dependence_; }
  void weights(ops::Exec&, const model::MicroBatch& batch, const model::HeadOutput& out, int64_t begin,
               int64_t count) override {
    ++calls;
    CHECK(begin == 0);
    CHECK(count == TinyModel::tokens);
    for (int64_t i = 0; i < count; ++i) {
      scores.push_back(out.log_prob.ptr<float>()[i]);
      out.weight.ptr<float>()[i] = batch.loss_weight.ptr<float>()[i];
    }
  }
  int calls = 0;
  std::vector<float> scores;

 private:
  model::Dependence dependence_;
};

void require_gradients(const TinyModel& got, const TinyModel& want, double tolerance) {
  for (size_t p = 0; p < want.gradients_.size(); ++p) {
    INFO(want.parameters_.all[p].name);
    REQUIRE(test::relative_difference(got.gradients_[p], want.gradients_[p]) < tolerance);
  }
}

}  // namespace

TEST_CASE("a class of sequence classification with one label has a scalar head", "[model][reward]") {
  const std::string sizes =
      R"("model_type":"llama","vocab_size":67,"hidden_size":32,"intermediate_size":48,"num_hidden_layers":2,
         "num_attention_heads":4,"tie_word_embeddings":true)";
  const auto parse = [&](const std::string& more) {
    return model::parse_model_config("{" + more + sizes + "}", "test");
  };
  const std::string classifier = R"("architectures":["LlamaForSequenceClassification"],)";
  for (const std::string labels : {R"("num_labels":1,)", R"("id2label":{"0":"LABEL_0"},)",
                                   R"("num_labels":1,"id2label":{"0":"A","1":"B"},)"}) {
    const model::ModelSpec spec = parse(classifier + labels);
    CHECK(spec.head == model::HeadKind::scalar);
    CHECK(!spec.new_head);
    CHECK(!spec.tied);
    CHECK(spec.unread_keys.empty());
  }
  // Older files of any class have two labels.
  const model::ModelSpec causal =
      parse(R"("architectures":["LlamaForCausalLM"],"id2label":{"0":"A","1":"B"},)");
  CHECK(causal.head == model::HeadKind::vocabulary);
  CHECK(causal.tied);
  for (const std::string labels :
       {"", R"("num_labels":3,)", R"("id2label":{"0":"A","1":"B"},)", R"("num_labels":2,)"}) {
    const std::string text = refusal("{" + classifier + labels + sizes + "}");
    CHECK(text.find("ForSequenceClassification") != std::string::npos);
    CHECK(text.find(labels.find('3') == labels.npos ? "2 labels" : "3 labels") != std::string::npos);
  }
  CHECK(refusal("{" + classifier + R"("num_labels":"one",)" + sizes + "}").find("num_labels") !=
        std::string::npos);
}

TEST_CASE("a scalar head replaces logits, tied or not", "[model][reward]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    model::ModelSpec spec = model::parse_model_config(config, "test");
    const model::ModelSpec causal = spec;
    model::use_scalar_head(spec);
    CHECK(spec.new_head);
    const std::vector<std::string> names = names_of(spec), before = names_of(causal);
    CHECK(names.size() == before.size() + (causal.tied ? 1 : 0));
    CHECK(contains(names, "score.weight"));
    CHECK(!contains(names, "lm_head.weight"));
    const double removed = causal.tied ? 0 : static_cast<double>(spec.vocab_size * spec.hidden);
    const auto total = [](const model::ModelSpec& m) {
      return static_cast<double>(model::make_parameters(m).total());
    };
    CHECK(total(causal) - total(spec) == removed - static_cast<double>(spec.hidden));
    CHECK(model::training_flops_of_token(causal, 7) - model::training_flops_of_token(spec, 7) ==
          6.0 * static_cast<double>((spec.vocab_size - 1) * spec.hidden));
    // It begins with normal numbers of the model's standard deviation.
    const model::ParameterList list = model::make_parameters(spec);
    const model::Parameter& head = list.all[list.head];
    CHECK(head.shape == std::vector<int64_t>{1, spec.hidden});
    std::vector<float> values(static_cast<size_t>(spec.hidden));
    model::initial_values(spec, head, head.parts.front(), 3, values.data(), 1);
    double squares = 0;
    for (const float v : values) squares += static_cast<double>(v) * static_cast<double>(v);
    const double deviation = std::sqrt(squares / static_cast<double>(spec.hidden));
    CHECK(deviation > 0.5 * static_cast<double>(spec.initializer_range));
    CHECK(deviation < 2 * static_cast<double>(spec.initializer_range));
    model::use_scalar_head(spec);
    CHECK(names_of(spec) == names);
  }
}

TEST_CASE("the config.json of a scalar head is that of a class with one label", "[model][reward]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    model::ModelSpec spec = model::parse_model_config(config, "test");
    model::use_scalar_head(spec);
    const std::string text = model::hugging_face_config(spec, "float32");
    const JsonValue json = parse_json(text, "config.json");
    std::string expected(model::rules_of(spec.family).architecture);
    expected =
        expected.substr(0, expected.find(spec.family == model::Family::gpt2 ? "LMHead" : "ForCausal")) +
        "ForSequenceClassification";
    if (spec.family == model::Family::gemma3_text) expected = "Gemma3TextForSequenceClassification";
    CHECK(json.at("architectures").items().at(0).as_string() == expected);
    CHECK(json.get_int("num_labels") == 1);
    CHECK(json.at("id2label").members().size() == 1);
    CHECK(json.at("id2label").get_string("0") == "LABEL_0");
    CHECK(json.at("label2id").get_int("LABEL_0") == 0);
    const model::ModelSpec again = model::parse_model_config(text, "test");
    CHECK(again.head == model::HeadKind::scalar);
    CHECK(!again.new_head);
    CHECK(names_of(again) == names_of(spec));
    CHECK(model::hugging_face_config(again, "float32") == text);
  }
}

TEST_CASE("gradients of a scalar head are the derivatives of the loss", "[model][reward]") {
  for (const auto& [name, config] : reward_configs()) {
    INFO(name);
    TinyModel m(config, ops::reference_kernels(), 1);
    if (m.spec_.moe.capacity_factor > 0) continue;  // not continuous
    m.gradients();
    CHECK(std::count(m.ready_.begin(), m.ready_.end(), m.parameters_.head) == 1);
    const auto analytic = m.gradients_;
    const bool train = m.needs_training();
    for (size_t p = 0; p < analytic.size(); ++p) {
      INFO(m.parameters_.all[p].name);
      const auto& g = analytic[p];
      const auto largest = static_cast<size_t>(
          std::max_element(g.begin(), g.end(), [](float a, float b) { return std::abs(a) < std::abs(b); }) -
          g.begin());
      REQUIRE(g[largest] != 0);
      for (const size_t i : {largest, g.size() / 3}) {
        float& w = m.weights_[p][i];
        const float kept = w, h = m.spec_.moe.experts > 0 ? 1.0f / 2048 : 1.0f / 256;
        double at[4];
        const float steps[4] = {-2 * h, -h, h, 2 * h};
        for (int s = 0; s < 4; ++s) {
          w = kept + steps[s];
          at[s] = m.loss(train);
        }
        w = kept;
        const double numeric = (at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * static_cast<double>(h));
        const double tolerance =
            2e-3 * std::abs(static_cast<double>(g[largest])) + (m.spec_.moe.experts > 0 ? 8e-3 : 1e-3);
        INFO("element " << i << " analytic " << g[i] << " numeric " << numeric);
        REQUIRE(std::abs(numeric - static_cast<double>(g[i])) < tolerance);
      }
    }
  }
}

TEST_CASE("kernels of the CPU and of a GPU give the gradients of a scalar head", "[model][reward][sim]") {
  for (const auto& [name, config] : reward_configs()) {
    INFO(name);
    TinyModel reference(config, ops::reference_kernels(), 1), fast(config, cpu_kernels(), 2);
    TinyModel gpu(config, ops::sim_kernels(), ops::gpu_partials, {}, precision::float32, DeviceType::cuda);
    REQUIRE(fast.loss() == Approx(reference.loss()).epsilon(1e-5));
    REQUIRE(gpu.loss() == Approx(reference.loss()).epsilon(1e-5));
    for (TinyModel* m : {&reference, &fast, &gpu}) m->gradients();
    require_gradients(fast, reference, 2e-5);
    require_gradients(gpu, reference, 2e-5);
    TinyModel half(config, cpu_kernels(), 1, {}, precision::bfloat16_storage);
    TinyModel gpu_half(config, ops::sim_kernels(), ops::gpu_partials, {}, precision::bfloat16,
                       DeviceType::cuda);
    half.gradients();
    gpu_half.gradients();
    require_gradients(gpu_half, half, 0.06);
  }
}

TEST_CASE("a scalar head is the same in training and evaluation, with any memory", "[model][reward]") {
  for (const auto& [name, config] : reward_configs()) {
    INFO(name);
    TinyModel kept(config, cpu_kernels(), 2), recomputed(config, cpu_kernels(), 2, {"norm", "activation"});
    // Weights that are accumulated begin with zeros.
    TinyModel added(config, cpu_kernels(), 2, TinyOptions{.overwrite = false});
    for (TinyModel* m : {&kept, &recomputed, &added}) m->gradients();
    REQUIRE(kept.gradients_ == recomputed.gradients_);
    REQUIRE(kept.gradients_ == added.gradients_);
    if (!kept.needs_training()) REQUIRE(kept.loss(true) == kept.loss(false));
  }
}

TEST_CASE("a scalar head is trained beside adapters, or frozen", "[model][reward][lora]") {
  for (const auto& [name, config] : reward_configs()) {
    INFO(name);
    const model::TrainedPart lora{.adapters = {.rank = 3, .alpha = 4.5, .targets = {"all-linear"}}};
    TinyModel m(config, ops::reference_kernels(), 1, TinyOptions{.trained = lora});
    const model::Parameter& head = m.parameters_.all[m.parameters_.head];
    CHECK(head.trainable);
    CHECK(head.adapter);
    CHECK(head.parts.front().name == model::adapted_score_name);
    if (m.spec_.moe.capacity_factor > 0) continue;
    TinyModel whole(config, ops::reference_kernels(), 1);
    // The products of the adapters only come on top of a model whose other matrices are frozen.
    CHECK(model::training_flops_of_token(m.spec_, 7) == model::training_flops_of_token(whole.spec_, 7) -
                                                            2 * m.spec_.trained.frozen_products +
                                                            6 * m.spec_.trained.adapter_products);
    m.gradients();
    CHECK(std::count(m.ready_.begin(), m.ready_.end(), m.parameters_.head) == 1);
    const std::vector<float>& g = m.gradients_[m.parameters_.head];
    CHECK(std::any_of(g.begin(), g.end(), [](float x) { return x != 0; }));
    TinyModel frozen(config, ops::reference_kernels(), 1,
                     TinyOptions{.trained = {.adapters = {}, .frozen = {"score"}}});
    frozen.gradients();
    whole.gradients();
    CHECK(std::count(frozen.ready_.begin(), frozen.ready_.end(), frozen.parameters_.head) == 0);
    for (size_t p = 0; p < whole.gradients_.size(); ++p)
      if (static_cast<int>(p) != whole.parameters_.head) {
        INFO(whole.parameters_.all[p].name);
        CHECK(frozen.gradients_[p] == whole.gradients_[p]);
      }
  }
}

TEST_CASE("a scalar head takes the weights of a rule that has seen all scores", "[model][reward]") {
  for (const auto& [name, config] : reward_configs())
    for (const auto dependence : {model::Dependence::token, model::Dependence::sequence}) {
      INFO(name);
      TinyModel of_batch(config, cpu_kernels(), 2);
      TinyModel of_rule(config, cpu_kernels(), 2,
                        TinyOptions{.loss = {.dependence = dependence, .sequence_values = 0}});
      WeightsOfBatch rule(dependence);
      of_rule.decoder_.set_rule(&rule);
      CHECK(of_rule.loss() == of_batch.loss());
      CHECK(rule.calls == 1);
      const Tensor scores = of_batch.decoder_.log_prob(of_batch.batch());
      for (int i = 0; i < TinyModel::tokens; ++i) CHECK(rule.scores[i] == scores.ptr<float>()[i]);
      of_batch.gradients();
      of_rule.gradients();
      CHECK(of_rule.gradients_ == of_batch.gradients_);
    }
}

TEST_CASE("a loss scale multiplies the gradients of a scalar head", "[model][reward][sim]") {
  const std::string config = reward_configs()[2].second;
  for (const bool gpu : {false, true}) {
    const ops::KernelTable& kernels = gpu ? ops::sim_kernels() : cpu_kernels();
    const TinyOptions options{.device = gpu ? DeviceType::cuda : DeviceType::cpu};
    const int threads = gpu ? ops::gpu_partials : 2;
    TinyModel plain(config, kernels, threads, options), scaled(config, kernels, threads, options);
    double scale = 1024;
    scaled.decoder_.scale_loss(make_tensor(&scale, DType::f64, {1}));
    plain.gradients();
    scaled.gradients();
    for (size_t p = 0; p < plain.gradients_.size(); ++p) {
      INFO(plain.parameters_.all[p].name);
      for (float& g : plain.gradients_[p]) g *= 1024;
      CHECK(scaled.gradients_[p] == plain.gradients_[p]);
    }
  }
}
