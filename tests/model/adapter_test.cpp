// Adapters and frozen parameters in a whole decoder.

#include <algorithm>
#include <cmath>
#include <set>

#include "apps/model/families/hf_config.h"
#include "tests/catch.h"
#include "tests/model/tiny_model.h"
#include "tests/ops/reference/table.h"
#include "tests/sim/ops.h"

using namespace nrl;
using test::TinyModel;
using test::TinyOptions;

namespace {

model::TrainedPart lora(std::vector<std::string> targets = {"all-linear"}, float dropout = 0) {
  return {.adapters = {.rank = 3, .alpha = 4.5, .dropout = dropout, .targets = std::move(targets)}};
}

model::TrainedPart frozen(std::vector<std::string> patterns) {
  return {.adapters = {}, .frozen = std::move(patterns)};
}

const model::Parameter& named(const TinyModel& m, std::string_view name) {
  const auto at = std::find_if(m.parameters_.all.begin(), m.parameters_.all.end(),
                               [&](const model::Parameter& p) { return p.name == name; });
  REQUIRE(at != m.parameters_.all.end());
  return *at;
}

size_t index_of(const TinyModel& m, const std::string& name) {
  return static_cast<size_t>(&named(m, name) - m.parameters_.all.data());
}

std::set<std::string> trained(const TinyModel& m) {
  std::set<std::string> out;
  for (const model::Parameter& p : m.parameters_.all)
    if (p.trainable) out.insert(p.name);
  return out;
}

const ops::KernelTable& cpu_kernels() {
  return ops::cpu_kernels(cpu::best_isa());
}

/// Checks the largest element of every trained gradient, and one more, against differences of the loss.
void check_gradients(TinyModel& m) {
  m.gradients();
  const auto analytic = m.gradients_;
  std::set<std::string> ready;
  for (const int p : m.ready_) ready.insert(m.parameters_.all[p].name);
  REQUIRE(ready == trained(m));
  const bool train = m.needs_training();
  for (size_t p = 0; p < analytic.size(); ++p) {
    INFO(m.parameters_.all[p].name);
    const auto& g = analytic[p];
    if (!m.parameters_.all[p].trainable) {
      const bool touched = std::any_of(g.begin(), g.end(), [](float x) { return x != 0 && !std::isnan(x); });
      REQUIRE(!touched);
      continue;
    }
    const size_t largest = static_cast<size_t>(
        std::max_element(g.begin(), g.end(), [](float a, float b) { return std::abs(a) < std::abs(b); }) -
        g.begin());
    REQUIRE(g[largest] != 0);
    for (const size_t i : {largest, g.size() / 3}) {
      float& w = m.weights_[p][i];
      const float kept = w;
      // A smaller step where another expert may be chosen.
      const float h = m.spec_.moe.experts > 0 ? 1.0f / 2048 : 1.0f / 256;
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

/// Adds s B A to the weights that have adapters, and zeroes B.
void merge(TinyModel& m) {
  const float scale = m.spec_.trained.adapters.scale();
  for (const model::LayerParameters& l : m.parameters_.layers)
    for (const auto& [weight, adapter] :
         {std::pair(l.qkv, l.qkv_adapter), std::pair(l.o, l.o_adapter), std::pair(l.mlp_in, l.mlp_in_adapter),
          std::pair(l.mlp_out, l.mlp_out_adapter)}) {
      if (!adapter) continue;
      const int64_t in = m.parameters_.all[weight].shape[1], rank = m.spec_.trained.adapters.rank;
      std::vector<float>&w = m.weights_[weight], &a = m.weights_[adapter.a], &b = m.weights_[adapter.b];
      int64_t row = 0;
      for (const auto& piece : adapter.all_pieces())
        for (int64_t o = 0; o < piece.count; ++o, ++row)
          for (int64_t i = 0; i < in; ++i)
            for (int64_t k = 0; k < rank; ++k)
              w[(piece.column + o) * in + i] +=
                  scale * b[row * rank + k] * a[(piece.module * rank + k) * in + i];
      std::fill(b.begin(), b.end(), 0.0f);
    }
}

}  // namespace

TEST_CASE("patterns select modules by their last parts", "[model][lora]") {
  const std::string name = "model.layers.10.self_attn.q_proj";
  for (const char* pattern :
       {"q_proj", "self_attn.q_proj", "*.q_proj", "model.layers.10.*", "layers.1?.*", "*"})
    CHECK(model::selects(pattern, name));
  for (const char* pattern : {"proj", "q_pro", "layers.1.*", "self_attn", "", "q_proj.weight"})
    CHECK(!model::selects(pattern, name));
  const model::AdapterSpec some{.rank = 1, .targets = {"q_proj", "v_proj"}, .excludes = {"layers.10.*"}};
  CHECK(!some.selects(name));
  CHECK(some.selects("model.layers.1.self_attn.v_proj"));
  CHECK(!some.selects("model.layers.1.self_attn.k_proj"));
  CHECK(!model::AdapterSpec{.targets = {"*"}}.selects(name));
  const model::TrainedPart part = frozen({"embed_tokens", "*norm*"});
  CHECK(part.freezes("model.embed_tokens.weight"));
  CHECK(part.freezes("model.layers.3.input_layernorm.weight"));
  CHECK(!part.freezes("model.layers.3.self_attn.q_proj.weight"));
}

TEST_CASE("the scale is alpha over the rank or its root", "[model][lora]") {
  CHECK(model::AdapterSpec{.rank = 16, .alpha = 8}.scale() == 0.5f);
  CHECK(model::AdapterSpec{.rank = 16, .alpha = 8, .rank_stabilized = true}.scale() == 2.0f);
}

TEST_CASE("gradients of adapters are the derivatives of the loss", "[model][lora]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    TinyModel m(config, ops::reference_kernels(), 1, TinyOptions{.trained = lora()});
    if (m.spec_.moe.capacity_factor > 0) continue;  // not continuous
    check_gradients(m);
  }
}

TEST_CASE("gradients of some adapters, with dropout, are the derivatives of the loss", "[model][lora]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    const bool gpt2 = name.starts_with("gpt2");
    const std::vector<std::string> targets =
        gpt2 ? std::vector<std::string>{"c_attn"}
             : std::vector<std::string>{"k_proj", "v_proj", "layers.0.self_attn.o_proj"};
    TinyModel m(config, ops::reference_kernels(), 1, TinyOptions{.trained = lora(targets, 0.25f)});
    if (m.spec_.moe.capacity_factor > 0) continue;
    check_gradients(m);
  }
}

TEST_CASE("kernels of the CPU and of a GPU give the gradients of adapters", "[model][lora][sim]") {
  for (const auto& [name, config] : test::tiny_configs())
    for (const float dropout : {0.0f, 0.2f}) {
      INFO(name << " dropout " << dropout);
      const TinyOptions options{.trained = lora({"all-linear"}, dropout)};
      TinyModel reference(config, ops::reference_kernels(), 1, options),
          fast(config, cpu_kernels(), 2, options);
      TinyOptions on_gpu = options;
      on_gpu.device = DeviceType::cuda;
      TinyModel gpu(config, ops::sim_kernels(), ops::gpu_partials, on_gpu);
      REQUIRE(fast.loss() == Approx(reference.loss()).epsilon(1e-5));
      REQUIRE(gpu.loss() == Approx(reference.loss()).epsilon(1e-5));
      for (TinyModel* m : {&reference, &fast, &gpu}) m->gradients();
      for (size_t p = 0; p < reference.gradients_.size(); ++p) {
        INFO(reference.parameters_.all[p].name);
        if (!reference.parameters_.all[p].trainable) continue;
        REQUIRE(test::relative_difference(fast.gradients_[p], reference.gradients_[p]) < 2e-5);
        REQUIRE(test::relative_difference(gpu.gradients_[p], reference.gradients_[p]) < 2e-5);
      }
    }
}

TEST_CASE("an adapter that was not trained changes no bit of the loss", "[model][lora]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    TinyModel base(config, cpu_kernels(), 2, TinyOptions{}),
        with(config, cpu_kernels(), 2, TinyOptions{.trained = lora()});
    for (size_t p = 0; p < with.parameters_.all.size(); ++p) {
      const model::Parameter& q = with.parameters_.all[p];
      if (q.adapter && q.init == model::Init::zeros)
        std::fill(with.weights_[p].begin(), with.weights_[p].end(), 0.0f);
      else if (!q.adapter)  // its biases depend on how many parameters come before
        with.weights_[p] = base.weights_[index_of(base, q.name)];
    }
    REQUIRE(with.loss(false) == base.loss(false));
    // A sees no gradient until B has one.
    with.gradients();
    for (size_t p = 0; p < with.parameters_.all.size(); ++p) {
      const model::Parameter& q = with.parameters_.all[p];
      if (!q.adapter) continue;
      const bool zero =
          std::all_of(with.gradients_[p].begin(), with.gradients_[p].end(), [](float g) { return g == 0; });
      REQUIRE(zero == (q.init != model::Init::zeros));
    }
  }
}

TEST_CASE("a merged adapter computes the same", "[model][lora]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    TinyModel m(config, cpu_kernels(), 2, TinyOptions{.trained = lora()});
    const double apart = m.loss(false);
    merge(m);
    REQUIRE(m.loss(false) == Approx(apart).epsilon(1e-5));
  }
}

TEST_CASE("recomputation changes no bit of adapters' gradients", "[model][lora]") {
  for (const auto& [name, config] : test::tiny_configs())
    for (const auto& recipe : {precision::float32, precision::bfloat16_storage})
      for (const float dropout : {0.0f, 0.2f}) {
        INFO(name << " " << name_of(recipe.weights()) << " dropout " << dropout);
        const auto make = [&](std::vector<std::string> modules) {
          return TinyModel(config, cpu_kernels(), 2,
                           TinyOptions{.recipe = recipe,
                                       .recompute = model::recompute_modules(std::move(modules)),
                                       .trained = lora({"all-linear"}, dropout)});
        };
        TinyModel kept = make({}), recomputed = make({"norm", "activation", "core_attn", "mlp"});
        kept.gradients();
        recomputed.gradients();
        for (size_t p = 0; p < kept.gradients_.size(); ++p)
          if (kept.parameters_.all[p].trainable) REQUIRE(kept.gradients_[p] == recomputed.gradients_[p]);
      }
}

TEST_CASE("frozen parameters leave the other gradients as they are", "[model][lora]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    const bool gpt2 = name.starts_with("gpt2");
    const std::vector<std::vector<std::string>> choices =
        gpt2 ? std::vector<std::vector<std::string>>{{"wte", "wpe"},
                                                     {"wpe"},
                                                     {"h.0.*"},
                                                     {"*.weight"},
                                                     {"*.bias"}}
             : std::vector<std::vector<std::string>>{{"embed_tokens"},
                                                     {"*norm*"},
                                                     {"layers.0.*"},
                                                     {"self_attn.*", "gate*"},
                                                     {"lm_head", "model.norm"}};
    for (const auto& patterns : choices) {
      const model::TrainedPart part = frozen(patterns);
      model::ModelSpec spec = model::parse_model_config(config, "test");
      spec.trained = part;
      if (!model::trained_part_problems(spec).empty()) continue;  // tied, or without such a tensor
      INFO(patterns.front());
      TinyModel all(config, cpu_kernels(), 2, TinyOptions{}),
          some(config, cpu_kernels(), 2, TinyOptions{.trained = part});
      all.gradients();
      some.gradients();
      std::set<std::string> ready;
      for (const int p : some.ready_) ready.insert(some.parameters_.all[p].name);
      REQUIRE(ready == trained(some));
      REQUIRE(ready.size() < all.parameters_.all.size());
      for (size_t p = 0; p < all.gradients_.size(); ++p) {
        INFO(all.parameters_.all[p].name);
        if (some.parameters_.all[p].trainable) REQUIRE(some.gradients_[p] == all.gradients_[p]);
      }
    }
  }
}

TEST_CASE("frozen weights have no weight gradient, nor what it reads", "[model][lora]") {
  const std::string config = test::tiny_configs()[2].second;
  TinyModel all(config, cpu_kernels(), 1, TinyOptions{}),
      adapters(config, cpu_kernels(), 1, TinyOptions{.trained = lora({"q_proj"})}),
      norms(config, cpu_kernels(), 1, TinyOptions{.trained = frozen({"*_proj", "embed_tokens", "lm_head"})});
  const auto wgrads = [](const TinyModel& m) {
    std::multiset<std::string> out;
    const model::Decoder::BlockTable block = m.decoder_.blocks().front();
    for (const memory::Step& s : block.table->steps())
      if (s.pass == memory::Pass::weight) out.emplace(s.name);
    return out;
  };
  CHECK(wgrads(all) == std::multiset<std::string>{"mlp_in", "mlp_out", "o_proj", "qkv"});
  CHECK(wgrads(adapters) == std::multiset<std::string>{"qkv_lora"});
  CHECK(wgrads(norms).empty());
  const auto kept = [](const TinyModel& m) { return m.decoder_.block_bytes().front().kept; };
  // The outputs of both norms and of the activation. Attention needs its output itself.
  const int64_t inputs = TinyModel::tokens * 4 * (2 * 32 + 48);
  CHECK(kept(all) - kept(norms) == inputs);
}

TEST_CASE("the FLOPs of a step leave out what is not computed", "[model][lora]") {
  const std::string config = test::tiny_configs()[2].second;  // llama
  const double full = model::training_flops_of_token(test::tiny_spec(config, {}), 7);
  // Matrices of a layer: q and o 32 x 32, k and v 16 x 32, three of 48 x 32; the head 67 x 32.
  const double layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32, head = 67 * 32;
  const double embeddings =
      model::training_flops_of_token(test::tiny_spec(config, frozen({"embed_tokens"})), 7);
  CHECK(embeddings == full);
  CHECK(model::training_flops_of_token(test::tiny_spec(config, frozen({"lm_head"})), 7) == full - 2 * head);
  // Rank 3 of q and v: 3 x 32 and 32 x 3, 3 x 32 and 16 x 3.
  const double adapters = 2 * (3 * (32 + 32) + 3 * (32 + 16));
  CHECK(model::training_flops_of_token(test::tiny_spec(config, lora({"q_proj", "v_proj"})), 7) ==
        full - 2 * (2 * layer + head) + 6 * adapters);
}

TEST_CASE("adapters are named as PEFT names them", "[model][lora]") {
  const TinyModel llama(test::tiny_configs()[2].second, cpu_kernels(), 1,
                        TinyOptions{.trained = lora({"q_proj", "v_proj", "up_proj"})});
  const model::Parameter &a = named(llama, "layers.0.qkv.lora_a.weight"),
                         &b = named(llama, "layers.0.qkv.lora_b.weight");
  REQUIRE(a.parts.size() == 2);
  CHECK(a.parts[1].name == "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight");
  CHECK(a.parts[1].global == std::vector<int64_t>{3, 32});
  CHECK(b.parts[1].name == "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight");
  CHECK(b.parts[1].global == std::vector<int64_t>{16, 3});
  CHECK(named(llama, "layers.1.mlp_in.lora_b.weight").parts.front().name ==
        "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight");
  const TinyModel gpt2(test::tiny_configs()[0].second, cpu_kernels(), 1, TinyOptions{.trained = lora()});
  CHECK(named(gpt2, "layers.1.qkv.lora_a.weight").parts.front().global == std::vector<int64_t>{3, 24});
  const model::Parameter& fused = named(gpt2, "layers.1.qkv.lora_b.weight");
  CHECK(fused.parts.front().name == "base_model.model.transformer.h.1.attn.c_attn.lora_B.weight");
  CHECK(fused.parts.front().global == std::vector<int64_t>{72, 3});
}

TEST_CASE("patterns that make no sense are named", "[model][lora]") {
  const auto problem = [](const std::string& config, const model::TrainedPart& part) {
    model::ModelSpec spec = model::parse_model_config(config, "test");
    spec.trained = part;
    const auto all = model::trained_part_problems(spec);
    return all.empty() ? std::string() : all.front().key + "|" + all.front().text;
  };
  const auto configs = test::tiny_configs();
  const auto config = [&](std::string_view name) {
    const auto found =
        std::find_if(configs.begin(), configs.end(), [&](const auto& c) { return c.first == name; });
    REQUIRE(found != configs.end());
    return found->second;
  };
  const std::string gpt2 = config("gpt2"), llama = config("llama"), tied = config("qwen2"),
                    mixtral = config("mixtral");
  CHECK(problem(llama, lora()).empty());
  CHECK(problem(mixtral, lora()).empty());
  CHECK(problem(llama, lora({"q"})) ==
        "policy.lora.target_modules|policy.lora.target_modules: \"q\" selects no module of this model");
  CHECK(problem(llama, lora({"lm_head"})).find("lm_head, which cannot have an adapter") != std::string::npos);
  CHECK(problem(mixtral, lora({"w1"})).find("experts.0.w1, which cannot have an adapter") !=
        std::string::npos);
  CHECK(problem(llama, lora({})).find("no module has an adapter") != std::string::npos);
  model::TrainedPart none = lora();
  none.adapters.excludes = {"*"};
  CHECK(problem(llama, none).find("no module has an adapter") != std::string::npos);
  none.adapters.excludes = {"c_attn"};
  CHECK(problem(llama, none).find("exclude_modules: \"c_attn\" selects no module") != std::string::npos);
  CHECK(problem(llama, frozen({"wte"})).find("\"wte\" selects no tensor") != std::string::npos);
  CHECK(problem(llama, frozen({"q_proj"})).find("both are one matrix here") != std::string::npos);
  CHECK(problem(llama, frozen({"*"})).find("freezes the whole model") != std::string::npos);
  CHECK(problem(gpt2, frozen({"wte"})).find("computed together") != std::string::npos);
  CHECK(problem(gpt2, frozen({"wte", "wpe"})).empty());
  CHECK(problem(tied, frozen({"embed_tokens"})).empty());
}

TEST_CASE("the first factor begins as PEFT's and NeMo's do", "[model][lora]") {
  for (const bool xavier : {false, true}) {
    model::TrainedPart part = lora();
    part.adapters.xavier = xavier;
    const model::ModelSpec spec = test::tiny_spec(test::tiny_configs()[2].second, part);
    const model::ParameterList list = model::make_parameters(spec);
    double sum = 0, squares = 0, largest = 0;
    int64_t count = 0;
    for (const model::Parameter& p : list.all) {
      if (!p.adapter) continue;
      for (const model::Part& whole : p.parts) {
        std::vector<float> values(static_cast<size_t>(whole.numel())),
            rows(static_cast<size_t>(2 * whole.columns));
        model::initial_values(spec, p, whole, 7, values.data(), 1);
        if (p.init == model::Init::zeros) {
          CHECK(std::all_of(values.begin(), values.end(), [](float v) { return v == 0; }));
          continue;
        }
        // Any slice has the values that it has in the whole.
        model::Part slice = whole;
        slice.row = 1, slice.rows = 2;
        model::initial_values(spec, p, slice, 7, rows.data(), 1);
        CHECK(std::equal(rows.begin(), rows.end(), values.begin() + whole.columns));
        if (whole.width() != 32) continue;
        for (const float v : values) {
          const auto x = static_cast<double>(v);
          sum += x, squares += x * x, largest = std::max(largest, std::abs(x)), ++count;
        }
      }
    }
    const auto n = static_cast<double>(count);
    const double variance = xavier ? 2.0 / (32 + 3) : 1.0 / (3 * 32);
    CHECK(std::abs(sum / n) < 0.03);
    CHECK(squares / n == Approx(variance).epsilon(0.15));
    CHECK((largest < 1 / std::sqrt(32.0)) == !xavier);
  }
}
