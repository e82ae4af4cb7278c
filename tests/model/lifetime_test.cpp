// Training with every planned buffer full of NaN outside of its life gives the same bits.
#include <cmath>

#include "tests/catch.h"
#include "tests/model/poison.h"
#include "tests/model/tiny_model.h"
#include "tests/sim/ops.h"

using namespace nrl;
using test::Poison;
using test::TinyModel;

namespace {

struct Trained {
  std::vector<double> losses;
  std::vector<std::vector<float>> gradients, weights;
  bool operator==(const Trained&) const = default;
};

// Two steps of two microbatches each, with an evaluation between them.
Trained train(TinyModel& m) {
  Trained result;
  for (int step = 0; step < 2; ++step) {
    m.begin_gradients();
    m.decoder_.train(std::vector(2, m.batch()),
                     {.log_probs_ready = [&](int) { result.losses.push_back(m.loss_of_last()); }});
    for (size_t p = 0; p < m.weights_.size(); ++p)
      for (size_t i = 0; i < m.weights_[p].size(); ++i) {
        m.weights_[p][i] -= 0.01f * m.gradients_[p][i];
        m.low_[p][i] = bf16(m.weights_[p][i]);
      }
    result.losses.push_back(m.loss(false));
  }
  result.gradients = m.gradients_;
  result.weights = m.weights_;
  return result;
}

Trained train_poisoned(TinyModel& m, Poison& poison) {
  m.decoder_.watch_ticks([&](int tick) { poison.enter(tick); });
  return train(m);
}

void check(const std::string& config, const ops::KernelTable& kernels, int threads, precision::Recipe recipe,
           DeviceType device, const std::vector<std::string>& recompute) {
  CAPTURE(recompute);
  TinyModel plain(config, kernels, threads, recompute, recipe, device, 2);
  TinyModel poisoned(config, kernels, threads, recompute, recipe, device, 2);
  Poison poison(poisoned.plan_, poisoned.arenas_);
  const Trained want = train(plain);
  REQUIRE(std::isfinite(want.losses.back()));
  REQUIRE(train_poisoned(poisoned, poison) == want);
}

}  // namespace

TEST_CASE("no buffer is read outside of its planned life", "[model][memory]") {
  const ops::KernelTable& kernels = ops::cpu_kernels(cpu::best_isa());
  for (const auto& [name, config] : test::tiny_configs()) {
    CAPTURE(name);
    check(config, kernels, 1, precision::float32, DeviceType::cpu, {});
    check(config, kernels, 1, precision::bfloat16_storage, DeviceType::cpu, {"norm", "activation"});
  }
}

TEST_CASE("no buffer is read outside of its planned life on a GPU", "[model][memory][sim]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    CAPTURE(name);
    // With the activation kept, the device may make it together with mlp_in.
    for (const char* recompute : {"norm", "activation"})
      check(config, ops::sim_kernels(), ops::gpu_partials, precision::bfloat16, DeviceType::cuda,
            {recompute});
  }
}

TEST_CASE("a lifetime that ends early or begins late is noticed", "[model][memory]") {
  const std::string config = test::tiny_configs()[2].second;
  const ops::KernelTable& kernels = ops::cpu_kernels(cpu::best_isa());
  TinyModel plain(config, kernels, 1, {"activation"}, precision::float32, DeviceType::cpu, 2);
  const Trained want = train(plain);
  std::vector<std::string> unnoticed;
  for (size_t i = 0; i < plain.plan_.buffers().size(); ++i) {
    const auto& buffer = plain.plan_.buffers()[i];
    if (buffer.always() || buffer.bytes == 0) continue;
    for (size_t k = 0; k < buffer.lifetimes.size(); ++k) {
      if (buffer.lifetimes[k].first == buffer.lifetimes[k].last) continue;
      for (const bool late : {false, true}) {
        TinyModel m(config, kernels, 1, {"activation"}, precision::float32, DeviceType::cpu, 2);
        Poison poison(m.plan_, m.arenas_);
        memory::Lifetime& life = poison.buffers()[i].lifetimes[k];
        if (late)
          ++life.first;
        else
          --life.last;
        if (train_poisoned(m, poison) == want)
          unnoticed.push_back(fmt::format("{} {} {}", buffer.name, k, late ? "late" : "early"));
      }
    }
  }
  CHECK(unnoticed == std::vector<std::string>{});
}
