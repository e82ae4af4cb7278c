#pragma once
// A training run in double precision on one processor: AdamW on whole batches.

#include <functional>

#include "tests/reference/data.h"
#include "tests/reference/schedule.h"

namespace reference {

/// What a run's YAML says about the numbers it computes, defaults as in docs/configuration.md. Ranks, micro
/// batches and strategies change no number, so they are not read.
struct Run {
  int64_t steps = 0, batch = 32, seed = 42;
  Schedule schedule;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
  double max_grad_norm = 1;  ///< 0: gradients are not clipped
  DataSettings train, validation;
  int validation_part = 1;  ///< of `validation`: its second part, or its first where it has files of its own
  int64_t validation_samples = 0;  ///< of an evaluation; 0: there is none
};

Run read_run(const std::string& yaml);
/// policy.model of the same file: a config.json in YAML.
Config read_model(const std::string& yaml);

/// Weight decay applies to matrices and embeddings, not to norms and biases.
bool decays(const std::string& name);

/// Square root of the sum of the squares of all elements.
double global_norm(const Tensors& tensors);

/// Mean of -log p over all tokens of the samples that have a loss.
double mean_loss(const Config& config, const Tensors& weights, const DataSettings& data,
                 const std::vector<Tokens>& samples);

struct Step {
  double loss = 0, grad_norm = 0, lr = 0;
  bool skipped = false;
};

class Trainer {
 public:
  Trainer(const Config& config, const Run& run, Tensors weights);

  /// One step on a batch: sequence_length + 1 tokens a sample.
  Step step(const std::vector<Tokens>& batch);
  /// A step whose gradients are not finite: it counts for the schedule, and nothing else happens.
  Step skip();

  const Tensors& weights() const { return weights_; }
  const Tensors& exp_avg() const { return m_; }
  const Tensors& exp_avg_sq() const { return v_; }
  /// Replaces what the layers read by round(weights), as training in a shorter format does.
  void set_rounding(std::function<double(double)> round) { round_ = std::move(round); }

 private:
  void update(const Tensors& gradients, double lr);

  const Config& config_;
  const Run& run_;
  Tensors weights_, m_, v_;
  std::function<double(double)> round_;
  int64_t steps_ = 0, updates_ = 0;
};

}  // namespace reference
