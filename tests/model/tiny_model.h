#pragma once
// A decoder on its own memory plan, for tests.

#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "apps/model/decoder.h"
#include "apps/model/families/hf_config.h"
#include "apps/model/spec/trained_part.h"
#include "core/ops/dry_run.h"
#include "core/ops/kernel_table.h"
#include "core/ops/libraries.h"
#include "tests/sim/ops.h"
#include "tests/sim/sim.h"

namespace nrl::test {

/// config.json texts of tiny models of every family, with every switch on somewhere.
inline std::vector<std::pair<std::string, std::string>> tiny_configs() {
  return {
      {"gpt2", R"({"model_type":"gpt2","vocab_size":61,"n_embd":24,"n_layer":2,"n_head":3,"n_positions":32,
                   "resid_pdrop":0,"embd_pdrop":0,"attn_pdrop":0})"},
      {"gpt2 with dropout",
       R"({"model_type":"gpt2","vocab_size":61,"n_embd":24,"n_layer":2,"n_head":3,"n_positions":32,
                   "resid_pdrop":0.2,"embd_pdrop":0.1,"attn_pdrop":0.3})"},
      {"llama",
       R"({"model_type":"llama","vocab_size":67,"hidden_size":32,"intermediate_size":48,"num_hidden_layers":2,
                   "num_attention_heads":4,"num_key_value_heads":2,"max_position_embeddings":64})"},
      {"llama3 rope, odd head_dim",
       R"({"model_type":"llama","vocab_size":67,"hidden_size":30,"intermediate_size":44,
                   "num_hidden_layers":1,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":18,
                   "max_position_embeddings":64,"attention_bias":true,"mlp_bias":true,"tie_word_embeddings":true,
                   "rope_scaling":{"rope_type":"llama3","factor":4,"low_freq_factor":1,"high_freq_factor":4,
                   "original_max_position_embeddings":16}})"},
      {"mistral",
       R"({"model_type":"mistral","vocab_size":67,"hidden_size":32,"intermediate_size":48,"num_hidden_layers":2,
                   "num_attention_heads":4,"num_key_value_heads":2,"max_position_embeddings":64,"sliding_window":5,
                   "attention_dropout":0.2})"},
      {"qwen2",
       R"({"model_type":"qwen2","vocab_size":67,"hidden_size":32,"intermediate_size":40,"num_hidden_layers":2,
                   "num_attention_heads":4,"num_key_value_heads":2,"max_position_embeddings":64,"tie_word_embeddings":true})"},
      {"qwen3",
       R"({"model_type":"qwen3","vocab_size":67,"hidden_size":32,"intermediate_size":40,"num_hidden_layers":2,
                   "num_attention_heads":4,"num_key_value_heads":2,"head_dim":12,"max_position_embeddings":64})"},
      {"gemma3_text, one layer of three without a window",
       R"({"model_type":"gemma3_text","vocab_size":67,"hidden_size":32,"intermediate_size":40,
                   "num_hidden_layers":3,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":12,
                   "max_position_embeddings":64,"sliding_window":3,"sliding_window_pattern":3,
                   "query_pre_attn_scalar":7,"rope_local_base_freq":100,
                   "rope_scaling":{"rope_type":"linear","factor":8}})"},
      {"mixtral",
       R"({"model_type":"mixtral","vocab_size":67,"hidden_size":32,"intermediate_size":24,"num_hidden_layers":2,
                   "num_attention_heads":4,"num_key_value_heads":2,"max_position_embeddings":64,
                   "num_local_experts":4,"num_experts_per_tok":2,"sliding_window":5,"rope_theta":10000})"},
      {"qwen2_moe with a dense layer, shared experts and router losses",
       R"({"model_type":"qwen2_moe","vocab_size":67,"hidden_size":32,"intermediate_size":40,"num_hidden_layers":3,
                   "num_attention_heads":4,"num_key_value_heads":2,"max_position_embeddings":64,"num_experts":6,
                   "num_experts_per_tok":2,"moe_intermediate_size":20,"shared_expert_intermediate_size":28,
                   "mlp_only_layers":[1],"moe_aux_loss_coeff":0.3,"moe_z_loss_coeff":0.05})"},
      {"qwen3_moe with capacity",
       R"({"model_type":"qwen3_moe","vocab_size":67,"hidden_size":32,"intermediate_size":40,"num_hidden_layers":2,
                   "num_attention_heads":4,"num_key_value_heads":2,"head_dim":12,"max_position_embeddings":64,
                   "num_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":16,"norm_topk_prob":true,
                   "moe_expert_capacity_factor":1.1,"moe_pad_expert_input_to_capacity":true,
                   "moe_token_drop_policy":"position"})"},
  };
}

struct TinyOptions {
  precision::Recipe recipe = precision::float32;
  DeviceType device = DeviceType::cpu;
  model::RecomputePolicy recompute = {};
  pipeline::Schedule schedule = pipeline::make_schedule({}, 0);
  int64_t head_chunk_tokens = 0;  ///< see DecoderOptions
  bool overwrite = true;          ///< false: all gradients are zeroed and accumulated
  model::OffloadPolicy offload = {};
  model::TrainedPart trained = {};
  model::LossNeeds loss = {};
};

inline model::ModelSpec tiny_spec(const std::string& config, const model::TrainedPart& trained) {
  model::ModelSpec spec = model::parse_model_config(config, "test");
  spec.trained = trained;
  model::count_trained(spec);
  return spec;
}

/// Microbatches of two sequences of unequal length, 19 tokens together.
class TinyModel {
 public:
  TinyModel(const std::string& config, const ops::KernelTable& kernels, int threads,
            std::vector<std::string> recompute = {}, precision::Recipe recipe = precision::float32,
            DeviceType device = DeviceType::cpu, int microbatches = 1)
      : TinyModel(config, kernels, threads,
                  TinyOptions{.recipe = recipe,
                              .device = device,
                              .recompute = model::recompute_modules(std::move(recompute)),
                              .schedule = pipeline::make_schedule({.microbatches = microbatches}, 0)}) {}

  TinyModel(const std::string& config, const ops::KernelTable& kernels, int threads, TinyOptions options)
      : spec_(tiny_spec(config, options.trained)),
        parameters_(model::make_parameters(spec_)),
        decoder_(spec_, parameters_,
                 {.tokens = tokens,
                  .max_sequence = 12,
                  .recipe = options.recipe,
                  .recompute = std::move(options.recompute),
                  .offload = std::move(options.offload),
                  .seed = 5,
                  .device = options.device,
                  .head_chunk_tokens = options.head_chunk_tokens,
                  .layout = {.chunks = options.schedule.stashes.chunks()},
                  .training = std::move(options.schedule),
                  .loss = options.loss},
                 plan_) {
    exec_.kernels = &kernels;
    (options.device == DeviceType::cuda ? exec_.reduction_blocks : exec_.threads) = threads;
    if (options.device == DeviceType::cuda) {  // the GPU's kernels, each run at once on host memory
      runtime_ = device::open_sim();
      libraries_ = ops::open_sim_libraries(*runtime_, {});
      exec_.multiprocessors = runtime_->properties().multiprocessors;
      exec_.libraries = libraries_.get();
    }
    std::vector<model::ParameterView> views;
    for (const model::Parameter& p : parameters_.all) {
      weights_.emplace_back(static_cast<size_t>(p.numel()));
      gradients_.emplace_back(static_cast<size_t>(p.numel()));
      overwritten_.push_back(options.overwrite && p.overwrites_gradient);
      for (const model::Part& part : p.parts)
        model::initial_values(spec_, p, part, 3, weights_.back().data() + part.offset, 1);
      // Ones and zeros would hide errors in norms and biases.
      if (p.shape.size() == 1)
        for (size_t i = 0; i < weights_.back().size(); ++i)
          weights_.back()[i] += 0.1f * std::sin(static_cast<float>(i * 7 + views.size()));
      else
        for (float& w : weights_.back()) w *= 6;      // larger than usual so that every path carries signal
      if (p.adapter && p.init == model::Init::zeros)  // nothing would reach A
        for (size_t i = 0; i < weights_.back().size(); ++i)
          weights_.back()[i] = 0.1f * std::cos(static_cast<float>(i * 5 + views.size()));
      low_.emplace_back(weights_.back().begin(), weights_.back().end());
      views.push_back(
          {view(options.recipe.weights(), p.shape), view(DType::f32, p.shape), overwritten_.back()});
      views.back().weight.data = options.recipe.weights() == DType::f32
                                     ? static_cast<void*>(weights_.back().data())
                                     : low_.back().data();
      views.back().grad.data = gradients_.back().data();
      if (!p.trainable) views.back().grad = {};
    }
    begin_gradients();
    for (int i = 0; i < tokens; ++i) {
      ids_.push_back(static_cast<int32_t>((i * 37 + 11) % spec_.vocab_size));
      targets_.push_back(i % 6 == 5 ? -1 : static_cast<int32_t>((i * 13 + 5) % spec_.vocab_size));
      positions_.push_back(i < 12 ? i : i - 12);
      weight_.push_back(i % 6 == 5 ? 0.0f : -0.05f - 0.01f * static_cast<float>(i));
    }
    if (options.loss.divergence) add_teacher(options.loss.columns[model::TeacherColumn::ids].width);
    const ops::DryDevice device = ops::DryDevice::like(exec_);
    ops::Exec dry = device.exec();
    decoder_.add_workspace(plan_, decoder_.needed_workspace(dry, views, batch()));
    plan_.solve();
    arenas_ = memory::Arenas(plan_);
    decoder_.bind(plan_, arenas_, exec_, views, [this](int p) { ready_.push_back(p); });
    if (spec_.moe.experts > 0) decoder_.add_router_metrics(make_tensor(router_.data(), DType::f64, {3}));
  }

  /// Sum of weight * log_prob: what the gradients differentiate when `train`.
  double loss(bool train = true) {
    router_.fill(0);
    if (train)
      decoder_.train(std::vector{batch()}, {});
    else
      decoder_.evaluate(batch());
    return loss_of_last() + router_loss();
  }
  /// Of the training passes since loss().
  double router_loss() const {
    const model::MoeSpec& moe = spec_.moe;
    return static_cast<double>(spec_.expert_layers()) *
           (static_cast<double>(moe.aux_loss) * router_[0] + static_cast<double>(moe.z_loss) * router_[1]);
  }
  /// Whether the loss has parts that only training passes compute.
  bool needs_training() const {
    return spec_.residual_dropout > 0 || spec_.attention_dropout > 0 || spec_.trained.adapters.dropout > 0 ||
           spec_.moe.aux_loss > 0 || spec_.moe.z_loss > 0;
  }
  double loss_of_last() { return weighted(decoder_.log_prob(batch())); }
  double weighted(const Tensor& log_prob) const {
    double sum = 0;
    for (int i = 0; i < tokens; ++i)
      sum += static_cast<double>(weight_[i]) * static_cast<double>(log_prob.ptr<float>()[i]);
    return sum;
  }
  /// Zeroes the gradients that are accumulated. The others may hold anything.
  void begin_gradients() {
    for (size_t p = 0; p < gradients_.size(); ++p)
      std::fill(gradients_[p].begin(), gradients_[p].end(), overwritten_[p] ? NAN : 0.0f);
  }
  void gradients() {
    begin_gradients();
    ready_.clear();
    decoder_.train(std::vector{batch()}, {});
  }

  /// Every microbatch has tokens and dropout masks of its own.
  std::vector<model::MicroBatch> batches(int count) {
    std::vector<model::MicroBatch> all;
    more_ids_.resize(static_cast<size_t>(count));
    for (int m = 0; m < count; ++m) {
      auto& ids = more_ids_[m];
      for (int i = 0; i < tokens; ++i)
        ids[i] = static_cast<int32_t>((i * 37 + m * 5 + 11) % spec_.vocab_size);
      all.push_back(batch());
      all.back().ids.data = ids.data();
      all.back().first_row = m * tokens;
    }
    return all;
  }
  model::MicroBatch batch() {
    model::MicroBatch b;
    b.ids = make_tensor(ids_.data(), DType::i32, {tokens});
    b.target = make_tensor(targets_.data(), DType::i32, {tokens});
    b.positions = make_tensor(positions_.data(), DType::i32, {tokens});
    b.cu_seqlens = make_tensor(cu_.data(), DType::i32, {3});
    b.loss_weight = make_tensor(weight_.data(), DType::f32, {tokens});
    b.step = make_tensor(&step_, DType::i64, {1});
    b.lengths = {12, false};
    b.columns = columns_;
    return b;
  }

  static constexpr int tokens = 19;
  std::unique_ptr<device::Runtime> runtime_;
  std::unique_ptr<ops::Libraries> libraries_;
  model::ModelSpec spec_;
  model::ParameterList parameters_;
  memory::MemoryPlan plan_;
  model::Decoder decoder_;
  memory::Arenas arenas_;
  ops::Exec exec_;
  std::vector<std::vector<float>> weights_, gradients_;
  std::vector<bool> overwritten_;
  std::vector<std::vector<bf16>> low_;
  std::vector<int> ready_;
  std::array<double, 3> router_{};

 private:
  static Tensor view(DType t, const std::vector<int64_t>& shape) {
    return shape.size() == 1 ? make_tensor(nullptr, t, {shape[0]})
                             : make_tensor(nullptr, t, {shape[0], shape[1]});
  }
  /// k distinct ids for each token, and a teacher's logits.
  void add_teacher(int64_t k) {
    teacher_ids_.resize(static_cast<size_t>(tokens * k));
    teacher_.resize(teacher_ids_.size());
    for (size_t i = 0; i < teacher_.size(); ++i) {
      const auto row = static_cast<int64_t>(i) / k, j = static_cast<int64_t>(i) % k;
      teacher_ids_[i] = static_cast<int32_t>((row * 5 + j * (spec_.vocab_size / k)) % spec_.vocab_size);
      teacher_[i] = 2 * std::sin(static_cast<float>(i));
    }
    columns_ = {make_tensor(teacher_ids_.data(), DType::i32, {tokens, k}),
                make_tensor(teacher_.data(), DType::f32, {tokens, k})};
  }

  std::vector<int32_t> ids_, targets_, positions_, cu_{0, 12, 19}, teacher_ids_;
  std::vector<float> teacher_;
  std::vector<Tensor> columns_;
  std::vector<float> weight_;
  std::vector<std::array<int32_t, tokens>> more_ids_;
  int64_t step_ = 4;
};

/// Worst |a - b| over the norm of b.
inline double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double diff = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    diff += d * d;
    norm += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return norm == 0 ? std::sqrt(diff) : std::sqrt(diff / norm);
}

}  // namespace nrl::test
