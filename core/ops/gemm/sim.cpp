// GEMMs of the simulated device: plain loops on the host, in stream order, only for plans that a
// Hopper GPU supports.

#include "core/device/sim/sim.h"

#include "core/ops/gemm/engine.h"
#include "core/ops/libraries.h"
#include "core/ops/shared/reference.h"

namespace nrl::ops {
namespace gemm {
namespace {

float load(const void* p, DType t, int64_t i) {
  return t == DType::f32 ? static_cast<const float*>(p)[i]
                         : static_cast<float>(static_cast<const bf16*>(p)[i]);
}
void store(void* p, DType t, int64_t i, float v) {
  if (t == DType::f32)
    static_cast<float*>(p)[i] = v;
  else
    static_cast<bf16*>(p)[i] = bf16(v);
}

float gelu(float x) {
  return static_cast<float>(reference::activation_value(Activation::gelu_tanh, static_cast<double>(x)));
}
float gelu_slope(float x) {
  return static_cast<float>(reference::activation_slope(Activation::gelu_tanh, static_cast<double>(x)));
}

void multiply(const GemmPlan& p, const GemmOperands& o) {
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t c = 0; c < p.cols; ++c) {
      float sum = 0;
      for (int64_t i = 0; i < p.inner; ++i)
        sum += load(o.a, p.a.dtype, p.a.transposed ? i * p.a.ld + r : r * p.a.ld + i) *
               load(o.b, p.b.dtype, p.b.transposed ? c * p.b.ld + i : i * p.b.ld + c);
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

class SimEngine final : public Engine {
 public:
  bool supports(const GemmPlan& plan) override {
    return plan.validate(Architecture::sm90).empty() && !plan.fp8();
  }
  void run(const GemmPlan& plan, const GemmOperands& operands, Workspace workspace,
           device::StreamHandle stream) override {
    const std::string wrong = plan.validate(Architecture::sm90);
    NRL_CHECK(wrong.empty() && !plan.fp8(), "GEMM {}: {}", plan.key(), wrong);
    NRL_CHECK(workspace.size >= workspace_bytes, "a GEMM has {} bytes of workspace, needs {}", workspace.size,
              workspace_bytes);
    device::sim_enqueue(stream, [plan, operands] { multiply(plan, operands); });
  }
};

}  // namespace
}  // namespace gemm

std::unique_ptr<Libraries> open_sim_libraries(device::Runtime&, const LibraryOptions& options) {
  auto libraries = std::make_unique<Libraries>();
  libraries->tf32 = options.tf32;
  libraries->gemm = std::make_unique<gemm::SimEngine>();
  return libraries;
}

}  // namespace nrl::ops
