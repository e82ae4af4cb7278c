// GEMMs of the simulated device: plain loops on the host, in stream order, only for plans that a Hopper GPU
// supports. There are two algorithms with different bits: number 1 adds up the products backwards.

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "core/ops/gemm/engine.h"
#include "core/ops/gemm/tuner.h"
#include "core/ops/libraries.h"
#include "core/ops/shared/fp8.h"
#include "tests/ops/reference/reference.h"
#include "tests/sim/ops.h"
#include "tests/sim/sim.h"

namespace nrl::ops {
namespace gemm {
namespace {

float load(const void* p, DType t, int64_t i) {
  if (t == DType::e4m3) return fp8::decode_any<DType::e4m3>(static_cast<const uint8_t*>(p)[i]);
  if (t == DType::e5m2) return fp8::decode_any<DType::e5m2>(static_cast<const uint8_t*>(p)[i]);
  if (t == DType::f16) return static_cast<const f16*>(p)[i];
  return t == DType::f32 ? static_cast<const float*>(p)[i]
                         : static_cast<float>(static_cast<const bf16*>(p)[i]);
}
void store(void* p, DType t, int64_t i, float v) {
  if (t == DType::f32)
    static_cast<float*>(p)[i] = v;
  else if (t == DType::f16)
    static_cast<f16*>(p)[i] = f16(v);
  else
    static_cast<bf16*>(p)[i] = bf16(v);
}

float gelu(float x) {
  return static_cast<float>(reference::activation_value(Activation::gelu_tanh, static_cast<double>(x)));
}
float gelu_slope(float x) {
  return static_cast<float>(reference::activation_slope(Activation::gelu_tanh, static_cast<double>(x)));
}

/// The scales of an FP8 operand as stored, (rows, columns); 1 for other operands.
class OperandScales {
 public:
  OperandScales(const Operand& o, const void* data, int64_t rows, int64_t columns)
      : kind_(o.scaling), data_(data), steps_(scale_matrix(o.scaling, rows, columns)) {}
  float at(int64_t row, int64_t column) const {
    return data_ ? fp8::scale_at(kind_, data_, steps_.row_step, steps_.column_step, row, column) : 1.0f;
  }

 private:
  Scaling kind_;
  const void* data_;
  ScaleMatrix steps_;
};

constexpr int algorithms = 2;

/// Elements of an operand times their scales, which are powers of two where they belong to blocks: (outer,
/// inner), or (inner, outer) if `inner_first`. `inner_step`, `outer_step`: elements in memory from one to the
/// next.
std::vector<float> elements(const Operand& o, const void* data, const OperandScales& scales, int64_t outer,
                            int64_t outer_step, int64_t inner, int64_t inner_step, bool inner_first) {
  const bool in_blocks = has_scale_blocks(o.scaling);
  std::vector<float> out(static_cast<size_t>(outer * inner));
  for (int64_t j = 0; j < outer; ++j)
    for (int64_t i = 0; i < inner; ++i)
      out[inner_first ? i * outer + j : j * inner + i] =
          load(data, o.dtype, j * outer_step + i * inner_step) * (in_blocks ? scales.at(j, i) : 1.0f);
  return out;
}

// A plan with FP8 has operands (rows, inner) and (cols, inner) as stored.
void multiply(const GemmPlan& p, const GemmOperands& o, int algorithm) {
  const OperandScales a_scales(p.a, o.scale_a, p.rows, p.inner), b_scales(p.b, o.scale_b, p.cols, p.inner);
  const bool in_blocks = has_scale_blocks(p.a.scaling);
  const std::vector<float> a = elements(p.a, o.a, a_scales, p.rows, p.a.transposed ? 1 : p.a.ld, p.inner,
                                        p.a.transposed ? p.a.ld : 1, false);
  const std::vector<float> b = elements(p.b, o.b, b_scales, p.cols, p.b.transposed ? p.b.ld : 1, p.inner,
                                        p.b.transposed ? 1 : p.b.ld, true);
  std::vector<float> sums(static_cast<size_t>(p.cols));
  for (int64_t r = 0; r < p.rows; ++r) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t step = 0; step < p.inner; ++step) {
      const int64_t i = algorithm == 0 ? step : p.inner - 1 - step;
      const float x = a[r * p.inner + i];
      const float* y = b.data() + i * p.cols;
      for (size_t c = 0; c < sums.size(); ++c) sums[c] += x * y[c];
    }
    for (int64_t c = 0; c < p.cols; ++c) {
      float sum = sums[c] * o.alpha;
      if (!in_blocks) sum *= a_scales.at(r, 0) * b_scales.at(c, 0);
      if (p.accumulate) sum += load(o.d, p.d.dtype, r * p.d.ld + c);
      if (p.has_bias()) sum += load(o.bias, p.bias, c);
      if (p.epilogue == Epilogue::dgelu)
        sum *= gelu_slope(load(o.aux, p.aux.dtype, r * p.aux.ld + c));
      else if (p.has_aux())
        store(o.aux, p.aux.dtype, r * p.aux.ld + c, sum);
      if (p.epilogue != Epilogue::none && p.epilogue != Epilogue::bias && p.epilogue != Epilogue::dgelu)
        sum = gelu(sum);
      store(o.d, p.d.dtype, r * p.d.ld + c, sum);
    }
  }
}

class SimEngine final : public Engine {
 public:
  SimEngine(device::Runtime& runtime, const LibraryOptions& options) : tuner_(runtime, options, "sim 1") {}

  bool supports(const GemmPlan& plan) override { return plan.validate(Architecture::sm90).empty(); }
  void run(const GemmPlan& plan, const GemmOperands& operands, Workspace workspace,
           device::StreamHandle stream) override {
    const std::string wrong = plan.validate(Architecture::sm90);
    NRL_CHECK(wrong.empty(), "GEMM {}: {}", plan.key(), wrong);
    NRL_CHECK(workspace.size >= workspace_bytes, "a GEMM has {} bytes of workspace, needs {}", workspace.size,
              workspace_bytes);
    launch(plan, operands, algorithm_of(plan), stream);
  }
  std::vector<Timing> timings() const override { return tuner_.timings(); }

 private:
  static bool launch(const GemmPlan& plan, const GemmOperands& operands, int algorithm,
                     device::StreamHandle stream) {
    device::sim_enqueue(stream, [=] { multiply(plan, operands, algorithm); });
    return true;
  }

  int algorithm_of(const GemmPlan& plan) {
    const auto [entry, is_new] = chosen_.try_emplace(plan);
    if (is_new) entry->second = choose(plan);
    return entry->second;
  }

  int choose(const GemmPlan& plan) {
    if (const auto known = tuner_.known(plan)) {
      if ((*known)[0] < algorithms) return static_cast<int>((*known)[0]);
      tuner_.reject(plan);
    }
    std::vector<Tuner::Algorithm> found;
    for (int i = 0; i < std::min(algorithms, tuner_.candidates()); ++i)
      found.push_back({static_cast<uint64_t>(i)});
    return tuner_.choose(plan, found,
                         [&](int candidate, const GemmOperands& o, Workspace, device::StreamHandle stream) {
                           return launch(plan, o, candidate, stream);
                         });
  }

  Tuner tuner_;
  std::unordered_map<GemmPlan, int, PlanHash> chosen_;
};

}  // namespace
}  // namespace gemm

std::unique_ptr<Libraries> open_sim_libraries(device::Runtime& runtime, const LibraryOptions& options) {
  auto libraries = std::make_unique<Libraries>();
  libraries->tf32 = options.tf32;
  libraries->why_no_attention = "the simulated device has no cuDNN";
  libraries->gemm = std::make_unique<gemm::SimEngine>(runtime, options);
  return libraries;
}

}  // namespace nrl::ops
