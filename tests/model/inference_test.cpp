// Inference with a cache against the decoder's forward pass: in chunks, token by token, and in bf16.

#include "apps/model/inference.h"

#include <algorithm>
#include <cmath>

#include "tests/catch.h"
#include "tests/model/tiny_model.h"

using namespace nrl;
using test::TinyModel;

namespace {

constexpr int length = 12;  // of the first sequence of TinyModel

model::Inference open(TinyModel& m, DType dtype) {
  std::vector<model::ParameterView> views;
  for (size_t i = 0; i < m.parameters_.all.size(); ++i) {
    const auto& shape = m.parameters_.all[i].shape;
    void* data = dtype == DType::f32 ? static_cast<void*>(m.weights_[i].data()) : m.low_[i].data();
    views.push_back({shape.size() == 1 ? make_tensor(data, dtype, {shape[0]})
                                       : make_tensor(data, dtype, {shape[0], shape[1]}),
                     {}});
  }
  return {m.spec_, m.parameters_, std::move(views), m.exec_, length};
}

std::vector<float> logits_after(TinyModel& m, DType dtype, int tokens, int chunk) {
  const auto* ids = m.batch().ids.ptr<int32_t>();
  model::Inference session = open(m, dtype);
  std::span<const float> logits;
  for (int i = 0; i < tokens; i += chunk)
    logits = session.append(std::span(ids + i, static_cast<size_t>(std::min(chunk, tokens - i))));
  return {logits.begin(), logits.end()};
}

}  // namespace

TEST_CASE("logits of inference are those of the training forward pass", "[model][inference]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    if (name.find("dropout") != std::string::npos) continue;
    INFO(name);
    TinyModel m(config, ops::cpu_kernels(cpu::best_isa()), 1);
    const model::MicroBatch batch = m.batch();
    const Tensor log_prob = m.decoder_.forward(batch, false);
    const std::vector<float> want(log_prob.ptr<float>(), log_prob.ptr<float>() + length);
    for (int t = 1; t <= length; ++t) {
      const int target = batch.target.ptr<int32_t>()[t - 1];
      if (target < 0) continue;
      for (int chunk : {1, 3, length}) {
        INFO("after " << t << " tokens in chunks of " << chunk);
        const std::vector<float> logits = logits_after(m, DType::f32, t, chunk);
        double sum = 0;
        for (float x : logits) sum += std::exp(static_cast<double>(x));
        const double got = static_cast<double>(logits[static_cast<size_t>(target)]) - std::log(sum);
        // fp32 sums in another order.
        REQUIRE(got ==
                Approx(static_cast<double>(want[static_cast<size_t>(t - 1)])).epsilon(1e-4).margin(1e-4));
      }
    }
  }
}

TEST_CASE("bf16 weights give the logits of fp32 up to the rounding of activations", "[model][inference]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    TinyModel m(config, ops::cpu_kernels(cpu::best_isa()), 1);
    const std::vector<float> full = logits_after(m, DType::f32, length, 1);
    for (int chunk : {1, length}) {
      const std::vector<float> half = logits_after(m, DType::bf16, length, chunk);
      // 8 bits of mantissa, rounded about ten times per layer.
      REQUIRE(test::relative_difference(half, full) < 0.05);
      REQUIRE(test::relative_difference(half, full) > 1e-5);
    }
  }
}
