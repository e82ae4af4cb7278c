// An engine's numbers depend on nothing but its plan, its options and its batches.
#include "apps/engine/engine.h"

#include "apps/plan/forward_plan.h"
#include "tests/engine/training.h"

using namespace nrl;
using namespace nrl::test;

namespace {

/// An engine that makes steps, and everything they brought.
class Learner {
 public:
  Learner(train::Placement& placement, const ConfigResult& config)
      : engine_(make_engine(placement, config)) {}

  void step() {
    const BatchPlan& batch = engine_->plan().batch;
    ++step_;
    for (int64_t m = 0; m < batch.accumulation; ++m)
      engine_->fill(m, next(static_cast<uint64_t>(step_ * 10 + m)), m * batch.micro);
    engine_->step({.number = step_, .learning_rate = 1e-2, .loss_tokens = batch.tokens_per_step}, objective_);
    const engine::StepResult result = engine_->collect();
    numbers.insert(numbers.end(), {result.metrics[0], result.grad_norm});
  }
  void evaluate() {
    uint64_t seed = 100;
    numbers.push_back(engine_
                          ->evaluate(2,
                                     [&]() -> const data::HostMicroBatch& {
                                       batch_ = next(seed++);
                                       return batch_;
                                     })
                          .front());
  }
  void finish() { weights = bytes_of(*engine_, engine_->groups().front().weights); }

  engine::Engine& engine() { return *engine_; }

  std::vector<double> numbers;
  std::vector<char> weights;

 private:
  data::HostMicroBatch next(uint64_t seed) const {
    return random_batch(engine_->plan().batch.micro * engine_->plan().sequence_length, seed);
  }

  std::unique_ptr<engine::Engine> engine_;
  engine::LanguageModeling objective_;
  data::HostMicroBatch batch_;
  int64_t step_ = 0;
};

void teach(Learner& learner) {
  learner.step();
  learner.evaluate();
  learner.step();
  learner.step();
  learner.finish();
}

const std::vector<std::string> other_model{
    "policy.model.hidden_size=24",        "policy.model.num_hidden_layers=3",
    "policy.model.num_attention_heads=3", "policy.model.attention_dropout=0.2",
    "policy.train_micro_batch_size=4",    "policy.precision=bfloat16",
    "distributed.shard_strategy=optim"};

}  // namespace

TEST_CASE("two engines that take turns compute the bits that each computes alone", "[engine]") {
  for (const std::string device : {"cpu", "cuda"}) {
    const ConfigResult first = tiny_config(device);
    for (const std::vector<std::string>& overrides :
         {std::vector<std::string>{}, std::vector<std::string>{"pretrain.seed=8"}, other_model}) {
      CAPTURE(device, overrides);
      const ConfigResult second = tiny_config(device, overrides);
      const auto world = comm::World::init();
      train::Placement placement(*world, first);
      Learner a_alone(placement, first), b_alone(placement, second);
      teach(a_alone);
      teach(b_alone);

      Learner b(placement, second), a(placement, first);
      CHECK(a.engine().exec().workspace.data != b.engine().exec().workspace.data);
      for (Learner* learner : {&a, &b}) learner->step();
      for (Learner* learner : {&b, &a}) learner->evaluate();
      for (Learner* learner : {&a, &b, &b, &a}) learner->step();
      a.finish();
      b.finish();
      CHECK(a.numbers == a_alone.numbers);
      CHECK(b.numbers == b_alone.numbers);
      CHECK(a.weights == a_alone.weights);
      CHECK(b.weights == b_alone.weights);
      CHECK((a.numbers == b.numbers) == overrides.empty());
    }
  }
}

TEST_CASE("a step needs zeros only in the gradients that it accumulates into", "[engine]") {
  for (const std::string device : {"cpu", "cuda"})
    for (const std::string strategy : {"ddp", "optim"})
      for (const bool tied : {false, true}) {
        CAPTURE(device, strategy, tied);
        const ConfigResult config =
            tiny_config(device, {"distributed.shard_strategy=" + strategy,
                                 fmt::format("policy.model.tie_word_embeddings={}", tied)});
        const auto world = comm::World::init();
        train::Placement placement(*world, config);
        Learner plain(placement, config), spoiled(placement, config);
        for (int step = 0; step < 3; ++step) {
          plain.step();
          spoiled.step();
          const engine::GroupTensors& t = spoiled.engine().groups().front();
          const std::vector<char> bytes = bytes_of(spoiled.engine(), t.gradients);
          std::vector<float> gradients(bytes.size() / sizeof(float));
          std::memcpy(gradients.data(), bytes.data(), bytes.size());
          for (const parallel::ElementRange& r : t.group->zeroed)
            CHECK(std::all_of(gradients.begin() + r.begin, gradients.begin() + r.end,
                              [](float g) { return g == 0; }));
          int64_t overwritten = 0;
          for (size_t i = 0; i < t.group->parameters.size(); ++i) {
            const model::Parameter& p = spoiled.engine().plan().parameters.all[t.group->parameters[i]];
            if (!p.overwrites_gradient) continue;
            const int64_t begin = t.group->layout.place(static_cast<int>(i)).start;
            std::fill_n(gradients.begin() + begin, p.numel(), NAN);
            overwritten += p.numel();
          }
          CHECK(overwritten > spoiled.engine().plan().parameters.total() / 2);
          ops::upload(spoiled.engine().exec(), t.gradients, gradients.data());
        }
        plain.finish();
        spoiled.finish();
        CHECK(plain.numbers == spoiled.numbers);
        CHECK(plain.weights == spoiled.weights);
      }
}

TEST_CASE("an engine for forward passes only has the log-probabilities of one that trains", "[engine]") {
  for (const std::string device : {"cpu", "cuda"}) {
    CAPTURE(device);
    const ConfigResult config = tiny_config(device);
    const auto world = comm::World::init();
    train::Placement placement(*world, config);
    const auto training = make_engine(placement, config);
    const plan::RunPlan& p = training->plan();
    engine::Engine forward(
        plan::make_forward_plan(p.spec, {.micro_batch = p.batch.micro,
                                         .sequence_length = p.sequence_length,
                                         .recipe = p.recipe,
                                         .device = p.device,
                                         .threads = 1,
                                         .products = placement.exec().kernels->bf16_products}),
        placement.exec());
    CHECK(forward.plan().memory.bytes(memory::Category::gradients) == 0);
    CHECK(forward.plan().memory.bytes(memory::Category::optimizer) == 0);
    for (size_t i = 0; i < training->weights().size(); ++i)
      ops::upload(forward.exec(), forward.weights()[i], bytes_of(*training, training->weights()[i]).data());
    const data::HostMicroBatch batch = random_batch(2 * T, 5);
    CHECK(bytes_of(forward, forward.log_probs(batch)) == bytes_of(*training, training->log_probs(batch)));
    const std::vector<char> bytes = bytes_of(forward, forward.log_probs(batch));
    double sum = 0;
    for (size_t i = 0; i < bytes.size(); i += sizeof(float)) {
      float value = 0;
      std::memcpy(&value, bytes.data() + i, sizeof value);
      sum += value;
    }
    for (int64_t count = 1; count <= 3; ++count)
      CHECK(forward.evaluate(count, [&]() -> const data::HostMicroBatch& { return batch; }).front() ==
            Approx(static_cast<double>(count) * sum).epsilon(1e-9));
    engine::LanguageModeling objective;
    CHECK_THROWS_AS(forward.step({.number = 1, .learning_rate = 0, .loss_tokens = 1}, objective), Error);
  }
}
