// The head's passes for losses that depend on log-probabilities: whichever pass computes the weights, equal
// weights give equal gradients.
#include "apps/model/spec/loss_rule.h"

#include <cstring>

#include "tests/catch.h"
#include "tests/model/tiny_model.h"

using namespace nrl;
using namespace nrl::test;

namespace {

/// The loss weights of the batch, copied when the head asks for them.
class WeightsOfBatch final : public model::LossRule {
 public:
  WeightsOfBatch(model::Dependence dependence, int64_t rows) : dependence_(dependence), rows_(rows) {}
  model::Dependence dependence() const override { return dependence_; }
  void weights(ops::Exec&, const model::MicroBatch& batch, const model::HeadOutput& out, int64_t begin,
               int64_t count) override {
    calls.emplace_back(begin, count);
    for (int64_t i = begin; i < begin + count; ++i) {
      CHECK(std::isfinite(out.log_prob.ptr<float>()[i]));
      out.weight.ptr<float>()[i] = batch.loss_weight.ptr<float>()[i];
    }
    if (dependence_ == model::Dependence::sequence) CHECK(count == rows_);
  }
  std::vector<std::pair<int64_t, int64_t>> calls;

 private:
  model::Dependence dependence_;
  int64_t rows_;
};

struct Gradients {
  double loss = 0;
  std::vector<std::vector<float>> of;
};

Gradients gradients(const std::string& config, model::Dependence dependence, int64_t chunk,
                    const precision::Recipe& recipe, std::vector<std::pair<int64_t, int64_t>>* calls = {}) {
  TinyModel m(config, ops::cpu_kernels(cpu::best_isa()), 2,
              TinyOptions{.recipe = recipe,
                          .head_chunk_tokens = chunk,
                          .loss = {.dependence = dependence, .sequence_values = 0}});
  WeightsOfBatch rule(dependence, TinyModel::tokens);
  m.decoder_.set_rule(&rule);
  Gradients out{.loss = m.loss(), .of = m.gradients_};
  if (calls) *calls = rule.calls;
  return out;
}

}  // namespace

TEST_CASE("gradients do not depend on when the head knows its weights", "[model]") {
  using model::Dependence;
  const auto [name, config] = GENERATE(from_range(std::vector{tiny_configs()[0], tiny_configs()[2]}));
  const bool bf16 = GENERATE(false, true);
  const precision::Recipe& recipe = bf16 ? precision::bfloat16 : precision::float32;
  INFO(name << (bf16 ? ", bf16" : ", fp32"));
  for (const int64_t chunk : {4, 19}) {
    const Gradients want = gradients(config, Dependence::none, chunk, recipe);
    std::vector<std::pair<int64_t, int64_t>> calls;
    for (const Dependence dependence : {Dependence::token, Dependence::sequence}) {
      const Gradients got = gradients(config, dependence, chunk, recipe, &calls);
      CHECK(got.loss == want.loss);
      const size_t chunks = dependence == Dependence::token ? (19 + chunk - 1) / chunk : 1;
      CHECK(calls.size() == chunks);
      for (size_t p = 0; p < want.of.size(); ++p) {
        INFO("parameter " << p << ", chunk " << chunk << ", dependence " << static_cast<int>(dependence));
        // The fused kernel multiplies exponentials by weight / sum, the other one rounds exp(z - lse) first;
        // in bf16 a gradient may be rounded to the other neighbor.
        CHECK(relative_difference(got.of[p], want.of[p]) < (bf16 ? 4e-3 : 1e-6));
      }
    }
  }
}
