// The head's pass for distillation: its gradients are the derivatives of the score of the rows, on every
// backend and in any number of chunks.
#include "core/ops/distillation.h"

#include "tests/catch.h"
#include "tests/model/derivatives.h"
#include "tests/model/tiny_model.h"
#include "tests/ops/reference/table.h"
#include "tests/sim/ops.h"

using namespace nrl;
using namespace nrl::test;

namespace {

constexpr int64_t k = 7;

model::LossNeeds needs(const ops::TopkKl::Options& options) {
  return {.entropy = options.zero_outside && options.type != KlDirection::forward,
          .inverse_temperature = 1 / options.temperature,
          .columns = {{DType::i32, k}, {DType::f32, k}},
          .divergence = options};
}

const ops::TopkKl::Options all_options[] = {
    {},
    {.type = KlDirection::mixed, .temperature = 2},
    {.zero_outside = true},
    {.type = KlDirection::mixed, .mixed_weight = 0.25, .temperature = 2, .zero_outside = true}};

std::string llama() {
  return tiny_configs()[2].second;
}

}  // namespace

TEST_CASE("the gradients of distillation are the derivatives of its loss", "[model]") {
  for (const ops::TopkKl::Options& options : all_options) {
    CAPTURE(name_of(options.type), options.zero_outside);
    TinyModel m(llama(), ops::reference_kernels(), 1, TinyOptions{.loss = needs(options)});
    require_derivatives(m);
  }
}

TEST_CASE("distillation has the same gradients on every backend and in chunks", "[model][sim]") {
  for (const ops::TopkKl::Options& options : all_options) {
    CAPTURE(name_of(options.type), options.zero_outside);
    TinyModel reference(llama(), ops::reference_kernels(), 1, TinyOptions{.loss = needs(options)});
    const double want = reference.loss();
    REQUIRE(want != 0);
    REQUIRE(reference.loss(false) == want);
    reference.gradients();
    const auto compare = [&](TinyModel& m, double tolerance) {
      REQUIRE(m.loss() == Approx(want).epsilon(tolerance));
      m.gradients();
      for (size_t p = 0; p < reference.gradients_.size(); ++p) {
        INFO(reference.parameters_.all[p].name);
        REQUIRE(relative_difference(m.gradients_[p], reference.gradients_[p]) < 2 * tolerance);
      }
    };
    const auto& cpu = ops::cpu_kernels(cpu::best_isa());
    for (const int64_t chunk : {4, 19}) {
      TinyModel m(llama(), cpu, 2, TinyOptions{.head_chunk_tokens = chunk, .loss = needs(options)});
      compare(m, 2e-5);
    }
    TinyModel gpu(llama(), ops::sim_kernels(), ops::gpu_partials,
                  TinyOptions{.device = DeviceType::cuda, .loss = needs(options)});
    compare(gpu, 2e-5);
    // A bf16 gradient in the first half of f32 logits.
    TinyModel half(
        llama(), ops::sim_kernels(), ops::gpu_partials,
        TinyOptions{.recipe = precision::bfloat16, .device = DeviceType::cuda, .loss = needs(options)});
    compare(half, 3e-2);
  }
}
