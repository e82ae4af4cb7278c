// The libraries of a GPU that is not there: for dry runs, in which ops only ask what would run.

#include "core/ops/attention_engine.h"
#include "core/ops/gemm/engine.h"
#include "core/ops/libraries.h"

namespace nrl::ops {
namespace {

class DryGemm final : public gemm::Engine {
 public:
  explicit DryGemm(gemm::Architecture architecture) : architecture_(architecture) {}
  bool supports(const gemm::GemmPlan& plan) override { return plan.validate(architecture_).empty(); }
  void run(const gemm::GemmPlan& plan, const gemm::GemmOperands&, Workspace, device::StreamHandle) override {
    NRL_CHECK(false, "GEMM {} in a dry run", plan.key());
  }

 private:
  gemm::Architecture architecture_;
};

class DryAttention final : public attention::Engine {
 public:
  explicit DryAttention(int major) : major_(major) {}
  std::string name() const override { return "cuDNN, assumed"; }
  const std::string& no_plan_reason(const attention::Problem& p, size_t) override {
    reason_ = p.dtype == DType::e4m3 ? fp8_attention_refusal(major_, p.result, p.d) : "";
    if (reason_.empty()) reason_ = attention::assumed_defect_reason(p, major_);
    return reason_;
  }
  void forward(Exec&, const AttentionForward&) override { NRL_CHECK(false, "attention in a dry run"); }
  void backward(Exec&, const AttentionBackward&) override { NRL_CHECK(false, "attention in a dry run"); }

 private:
  int major_;
  std::string reason_;
};

}  // namespace

std::unique_ptr<Libraries> open_dry_run_libraries(int major, const LibraryOptions& options) {
  auto libraries = std::make_unique<Libraries>();
  libraries->tf32 = options.tf32;
  libraries->gemm = std::make_shared<DryGemm>(gemm::architecture_of(major));
  libraries->attention = std::make_shared<DryAttention>(major);
  return libraries;
}

std::string fp8_gemm_refusal(int major, Scaling input, Scaling weight) {
  constexpr int64_t size = 256;  // suits all scalings
  gemm::GemmPlan plan;
  plan.rows = plan.cols = plan.inner = size;
  plan.a = {.dtype = DType::e4m3, .ld = size, .scaling = input};
  plan.b = {.dtype = DType::e4m3, .ld = size, .transposed = true, .scaling = weight};
  plan.d = {.dtype = DType::bf16, .ld = size};
  return plan.validate(gemm::architecture_of(major));
}

}  // namespace nrl::ops
