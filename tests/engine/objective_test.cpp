// An objective whose gradient depends on the log-probabilities: preferences between pairs of sequences.
#include "apps/engine/objective.h"

#include <cmath>

#include "tests/engine/training.h"

using namespace nrl;
using namespace nrl::test;

namespace {

/// loss = log(1 + exp(-beta * margin)), margin = log P(first sequence) - log P(second sequence), for the two
/// sequences of each microbatch. In host memory.
class Preferences : public engine::Objective {
 public:
  std::span<const engine::MetricSpec> metrics() const override {
    static constexpr engine::MetricSpec specs[] = {{"loss"}, {"margin"}};
    return specs;
  }
  model::Dependence dependence() const override { return model::Dependence::batch; }
  void loss_weights(ops::Exec&, const model::MicroBatch& batch, const Tensor& log_prob) override {
    const double slope = -beta / (1 + std::exp(beta * margin(log_prob)));  // dloss/dmargin
    for (int64_t i = 0; i < 2 * T; ++i)
      batch.loss_weight.ptr<float>()[i] = static_cast<float>(i < T ? slope : -slope);
  }
  void add_metrics(ops::Exec&, const model::MicroBatch&, const model::HeadOutput& out,
                   const Tensor& sums) override {
    const Tensor& log_prob = out.log_prob;
    sums.ptr<double>()[0] += std::log1p(std::exp(-beta * margin(log_prob)));
    sums.ptr<double>()[1] += margin(log_prob);
  }

  static double margin(const Tensor& log_prob) {
    double sum = 0;
    for (int64_t i = 0; i < 2 * T; ++i) sum += (i < T ? 1 : -1) * log_prob.ptr<float>()[i];
    return sum;
  }
  static constexpr double beta = 0.4;
};

}  // namespace

TEST_CASE("an objective may need the log-probabilities before its weights", "[engine]") {
  const ConfigResult config = tiny_config("cpu");
  const auto world = comm::World::init();
  train::Placement placement(*world, config);
  // So large an eps makes AdamW's update gradient descent with the rate lr / eps.
  constexpr double eps = 1e3;
  engine::TrainingOptions options;
  options.optimizer.eps = eps;
  options.optimizer.weight_decay = 0;
  const auto engine =
      make_engine(placement, config, options, model::LossNeeds{.dependence = model::Dependence::batch});
  Preferences objective;
  int64_t number = 0;
  const auto step = [&](double lr) {
    for (int64_t m = 0; m < 2; ++m) engine->fill(m, random_batch(2 * T, static_cast<uint64_t>(m)), 2 * m);
    engine->step({.number = ++number, .learning_rate = lr, .loss_tokens = 1}, objective);
    return engine->collect();
  };
  const engine::StepResult before = step(0);
  double margin = 0;
  for (uint64_t m = 0; m < 2; ++m) margin += Preferences::margin(engine->log_probs(random_batch(2 * T, m)));
  CHECK(before.metrics[1] == margin);
  CHECK(before.metrics[0] > 0);

  // A step along the gradient lowers the loss by rate * |gradient|^2: the weights are its derivative.
  constexpr double drop = 2e-3;
  step(drop * eps / (before.grad_norm * before.grad_norm));
  const engine::StepResult after = step(0);
  CHECK(before.metrics[0] - after.metrics[0] == Approx(drop).epsilon(0.03));
}
