// Generation on the GPU's kernels: the layers of training in the mode generation, with a cache.
#include <cmath>

#include "apps/model/inference.h"
#include "tests/catch.h"
#include "tests/model/tiny_model.h"
#include "tests/sim/ops.h"

using namespace nrl;
using test::TinyModel;

namespace {

std::vector<model::ParameterView> weights_of(TinyModel& m) {
  std::vector<model::ParameterView> views;
  for (size_t i = 0; i < m.weights_.size(); ++i) {
    const auto& shape = m.parameters_.all[i].shape;
    float* data = m.weights_[i].data();
    views.push_back({shape.size() == 1 ? make_tensor(data, DType::f32, {shape[0]})
                                       : make_tensor(data, DType::f32, {shape[0], shape[1]}),
                     {}});
  }
  return views;
}

}  // namespace

TEST_CASE("a GPU generates from the same logits as a CPU", "[model][inference][sim]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    TinyModel host(config, ops::cpu_kernels(cpu::best_isa()), 1);
    TinyModel gpu(config, ops::sim_kernels(), ops::gpu_partials, {}, precision::float32, DeviceType::cuda);
    model::Inference expected(host.spec_, host.parameters_, weights_of(host), host.exec_, 16);
    model::Inference session(gpu.spec_, gpu.parameters_, weights_of(gpu), gpu.exec_, 16);
    std::vector<int32_t> tokens{3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8};
    for (const size_t count : {5, 1, 1, 4, 1}) {
      const std::vector<int32_t> now(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(count));
      tokens.erase(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(count));
      const auto want = expected.append(now), got = session.append(now);
      float largest = 0, worst = 0;
      for (size_t v = 0; v < want.size(); ++v) {
        largest = std::max(largest, std::abs(want[v]));
        worst = std::max(worst, std::abs(want[v] - got[v]));
      }
      CHECK(worst < 2e-5f * largest);
    }
  }
}
