#pragma once
// Training of a tiny model on all ranks of the test program, and by each of them alone: the same numbers.

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "apps/engine/step_traffic.h"
#include "apps/plan/dry_rank.h"
#include "apps/train/launch/accelerator.h"
#include "apps/train/start/placement.h"
#include "core/device/cpu/features.h"
#include "parallel/comm/world/make_device.h"
#include "tests/comm/world_fixture.h"
#include "tests/engine/training.h"

namespace nrl::test {

/// Models with everything that ranks divide or copy: biases, tied embeddings and learned positions; grouped
/// heads; QK norms.
inline const std::string small_gpt2 =
    "{model_type: gpt2, vocab_size: 61, n_embd: 16, n_layer: 2, n_head: 4, n_positions: 16, attn_pdrop: 0.1, "
    "resid_pdrop: 0.1, embd_pdrop: 0.1, initializer_range: 0.2}";
inline const std::string small_llama =
    "{model_type: llama, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
    "num_attention_heads: 8, num_key_value_heads: 4, head_dim: 4, max_position_embeddings: 64, "
    "initializer_range: 0.2, attention_bias: true, mlp_bias: true}";
inline const std::string small_qwen3 =
    "{model_type: qwen3, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 4, head_dim: 8, max_position_embeddings: 64, "
    "initializer_range: 0.2, tie_word_embeddings: true}";
/// With norms of outputs, and a window in the first of two layers.
inline const std::string small_gemma3 =
    "{model_type: gemma3_text, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 4, head_dim: 8, max_position_embeddings: 64, "
    "initializer_range: 0.2, sliding_window: 5, sliding_window_pattern: 2, query_pre_attn_scalar: 6}";
/// With a dense layer before one with experts and a shared one.
inline const std::string small_qwen2_moe =
    "{model_type: qwen2_moe, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 64, initializer_range: 0.2, "
    "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 12, shared_expert_intermediate_size: 8, "
    "norm_topk_prob: true, mlp_only_layers: [0]}";

/// Elements of logical tensors by their index: of "w/NAME" (weights) and of "g/NAME" (gradients).
using Elements = std::map<std::string, std::map<int64_t, float>>;

/// Relative to each number.
inline void require_near(const std::vector<double>& got, const std::vector<double>& want, double tolerance) {
  REQUIRE(got.size() == want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i, got[i], want[i]);
    REQUIRE(std::fabs(got[i] - want[i]) <= tolerance * std::fabs(want[i]));
  }
}

/// What training brought: per step the sum of log-probabilities and the gradient norm, last the sum of an
/// evaluation; the gradients of the first step and the weights after the last one, as far as a rank has them.
struct Learned {
  std::vector<double> numbers;
  Elements elements;
};

/// A device with an engine on it, in a group of ranks.
class Trainee {
 public:
  /// `ranks`: all of the layout that `result` configures.
  Trainee(comm::Communicator& ranks, const std::string& device, const ConfigResult& result)
      : ranks_(ranks), result_(result), position_(plan::grid_position(config_, ranks.size(), ranks.rank())) {
    std::optional<parallel::DeviceGroups> devices;
    if (device == "cuda") {
      accelerator_ = train::open_accelerator(0, {});
      exec_ = accelerator_.exec();
      devices = parallel::DeviceGroups{comm::DeviceCommKind::staged, accelerator_.runtime.get()};
    } else {
      exec_.kernels = &ops::cpu_kernels(plan::isa_for(config_.kernels));
      exec_.threads = 1;
    }
    groups_ =
        std::make_unique<parallel::Groups>(position_.grid, ranks, train::groups_of_run(result, position_),
                                           devices, plan::needed_channels(config_, position_));
    const DeviceType type = device == "cuda" ? DeviceType::cuda : DeviceType::cpu;
    engine_ = std::make_unique<engine::Engine>(
        plan::make_run_plan(config_, train::load_model_spec(result), resolve_batch(config_, ranks.size()),
                            position_, type, 1),
        engine::training_options(config_), *groups_, exec_);
    monitor::StartPhases phases;
    train::load_initial_weights(config_, *engine_, train::verify_none, 1, phases);
    // The plan allows for a router that sends all rows to one rank.
    const size_t needed = engine_->dry_step(objective_).workspace, planned = engine_->exec().workspace.size;
    const bool exact = engine_->plan().spec.moe.experts == 0;
    CHECK((exact ? needed == planned : needed <= planned));
  }

  Trainee(const Trainee&) = delete;
  Trainee& operator=(const Trainee&) = delete;

  Learned learn(int steps) {
    Learned out;
    for (int i = 0; i < steps; ++i) {
      const engine::StepResult result = train_step();
      out.numbers.insert(out.numbers.end(), {result.metrics[0], result.grad_norm});
      out.numbers.insert(out.numbers.end(), result.router.begin(), result.router.end());
      if (i == 0) add_state("exp_avg", "g/", out.elements);
    }
    out.numbers.push_back(evaluate());
    engine_->finish_gathers();
    for (const engine::WeightSlice& s : weight_slices(engine_->plan().parameters, engine_->groups())) {
      const std::vector<float> values = values_of(s.values);
      auto& elements = out.elements["w/" + s.part.name];
      for (int64_t i = 0; i < std::ssize(values); ++i) elements[s.part.element(i)] = values[i];
    }
    return out;
  }

  engine::StepResult train_step() {
    const BatchPlan& batch = engine_->plan().batch;
    ++step_;
    for (int64_t m = 0; m < batch.accumulation; ++m) {
      const int64_t first = (m * position_.sizes.dp + position_.at.dp) * batch.micro;
      engine_->fill(m, samples(step_, first), first);
    }
    engine::StepInput input{.number = step_, .learning_rate = 1e-2, .loss_tokens = batch.tokens_per_step};
    if (adjust) adjust(input);
    engine_->step(input, objective_);
    return engine_->collect();
  }

  std::function<void(engine::StepInput&)> adjust;  ///< of every step; may be null

  /// The tokens of a step, of this rank's samples.
  std::vector<int32_t> tokens_of_step(int64_t step) const {
    const BatchPlan& batch = engine_->plan().batch;
    std::vector<int32_t> out;
    for (int64_t m = 0; m < batch.accumulation; ++m) {
      const int64_t first = (m * position_.sizes.dp + position_.at.dp) * batch.micro;
      const std::vector<int32_t> tokens = samples(step, first).tokens;
      out.insert(out.end(), tokens.begin(), tokens.end());
    }
    return out;
  }

  /// engine::step_traffic() of a plan like the engine's.
  std::vector<plan::Traffic> planned_traffic() const {
    const ops::DryDevice device = plan::usual_device(engine_->plan().device, 1, engine_->plan().recipe);
    auto plan = plan::make_run_plan(config_, train::load_model_spec(result_),
                                    resolve_batch(config_, ranks_.size()), position_, device.type(), 1);
    return engine::step_traffic(plan, engine::training_options(config_), device);
  }

  /// The data of the next step are those after this many more.
  void skip_steps(int64_t count) { step_ += count; }

  const parallel::Groups& groups() const { return *groups_; }
  engine::Engine& engine() { return *engine_; }

 private:
  data::HostMicroBatch samples(int64_t step, int64_t first) const {
    data::HostMicroBatch out;
    for (int64_t s = first; s < first + engine_->plan().batch.micro; ++s) {
      const data::HostMicroBatch one =
          random_batch(engine_->plan().sequence_length, static_cast<uint64_t>(step * 1000 + s));
      out.tokens.insert(out.tokens.end(), one.tokens.begin(), one.tokens.end());
      out.targets.insert(out.targets.end(), one.targets.begin(), one.targets.end());
    }
    return out;
  }
  /// Of one global batch.
  double evaluate() {
    const BatchPlan& batch = engine_->plan().batch;
    data::HostMicroBatch next;
    int64_t m = 0;
    double sum =
        engine_
            ->evaluate(batch.accumulation,
                       [&]() -> const data::HostMicroBatch& {
                         next = samples(500, (m++ * position_.sizes.dp + position_.at.dp) * batch.micro);
                         return next;
                       })
            .front();
    groups_->host(parallel::group::all).all_reduce(std::span(&sum, 1));
    return sum;
  }
  std::vector<float> values_of(const Tensor& t, bool on_host = false) {
    const std::vector<char> bytes = bytes_of(*engine_, t, on_host);
    std::vector<float> out(static_cast<size_t>(t.numel()));
    for (size_t i = 0; i < out.size(); ++i)
      out[i] = t.dtype == DType::bf16 ? static_cast<float>(reinterpret_cast<const bf16*>(bytes.data())[i])
                                      : reinterpret_cast<const float*>(bytes.data())[i];
    return out;
  }
  /// `values`: of elements [begin, ...) of the parameter.
  static void add(const model::Parameter& parameter, int64_t begin, const std::vector<float>& values,
                  const char* prefix, Elements& out) {
    for (const model::Part& part : parameter.parts)
      for (int64_t i = 0; i < std::ssize(values); ++i) {
        const int64_t e = begin + i - part.offset;
        if (e >= 0 && e < part.numel()) out[prefix + part.name][part.element(e)] = values[i];
      }
  }
  void add_state(const char* name, const char* prefix, Elements& out) {
    for (const engine::GroupTensors& t : engine_->groups()) {
      if (!t.group->trainable) continue;
      const std::vector<float> resident = values_of(t.find(name));
      const Tensor elsewhere = t.find(name, true);
      const std::vector<float> offloaded = elsewhere ? values_of(elsewhere, true) : std::vector<float>();
      for (const plan::OwnedRange& r : t.group->owned) {
        const std::vector<float>& values = r.offloaded ? offloaded : resident;
        add(engine_->plan().parameters.all[r.parameter], r.offset,
            {values.begin() + r.state, values.begin() + r.state + r.count}, prefix, out);
      }
    }
  }

  comm::Communicator& ranks_;
  const ConfigResult result_;
  const Config& config_ = result_.config;
  const plan::GridPosition position_;
  train::Accelerator accelerator_;
  ops::Exec exec_;
  std::unique_ptr<parallel::Groups> groups_;
  std::unique_ptr<engine::Engine> engine_;
  engine::LanguageModeling objective_;
  int64_t step_ = 0;
};

/// The largest difference between the elements that `got` has and those of `want`, relative to the root mean
/// square of the tensor in `want`; the tensor is named in `worst`.
inline double largest_difference(const Elements& got, const Elements& want, std::string& worst) {
  double largest = 0;
  for (const auto& [name, elements] : got) {
    REQUIRE(want.contains(name));
    const auto& wanted = want.at(name);
    double squares = 0;
    for (const auto& [element, value] : wanted) squares += static_cast<double>(value) * value;
    const double rms = std::sqrt(squares / static_cast<double>(wanted.size())) + 1e-12;
    for (const auto& [element, value] : elements) {
      const double difference = std::fabs(static_cast<double>(value) - wanted.at(element)) / rms;
      if (!(difference <= largest)) largest = difference, worst = name;
    }
  }
  return largest;
}

/// Trains with `layout` on all ranks and without on each alone. Log-probabilities and norms must agree within
/// `tolerance` (relative), gradients and weights by tensor within 10 times that.
inline void require_same_learning(const std::string& device, const std::string& model,
                                  const std::vector<std::string>& common,
                                  const std::vector<std::string>& layout, double tolerance, int steps = 3) {
  CAPTURE(device, model, common, layout);
  comm::Communicator& world = test_world().comm();
  // AdamW divides by the root of the second moment. With a large epsilon, updates depend smoothly on
  // gradients near zero, such as those of the biases of keys.
  std::vector<std::string> overrides{"policy.optimizer.eps=1e-3", "policy.train_global_batch_size=8"};
  overrides.insert(overrides.end(), common.begin(), common.end());
  const auto alone_ranks = world.split(world.rank(), 0, "alone");
  Learned want;
  {
    Trainee alone(*alone_ranks, device, tiny_config(device, overrides, model));
    want = alone.learn(steps);
  }
  overrides.insert(overrides.end(), layout.begin(), layout.end());
  Trainee together(world, device, tiny_config(device, overrides, model));
  const Learned got = together.learn(steps);
  require_near(got.numbers, want.numbers, tolerance);
  std::string worst;
  const double difference = largest_difference(got.elements, want.elements, worst);
  CAPTURE(worst, difference);
  REQUIRE(difference <= 10 * tolerance);
}

}  // namespace nrl::test
