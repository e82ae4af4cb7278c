#include "core/ops/gemm_timings.h"

#include <map>
#include <utility>

#include "core/ops/gemm/engine.h"

namespace nrl::ops {

class GemmCounter::Engine final : public gemm::Engine {
 public:
  explicit Engine(gemm::Engine& inner) : inner_(inner) {}
  bool supports(const gemm::GemmPlan& plan) override { return inner_.supports(plan); }
  void run(const gemm::GemmPlan& plan, const gemm::GemmOperands& operands, Workspace workspace,
           device::StreamHandle stream) override {
    ++calls_[plan.key()];
    inner_.run(plan, operands, workspace, stream);
  }
  int64_t calls(const std::string& key) const {
    const auto found = calls_.find(key);
    return found == calls_.end() ? 0 : found->second;
  }

 private:
  gemm::Engine& inner_;
  std::map<std::string, int64_t> calls_;
};

GemmCounter::GemmCounter(Libraries& libraries)
    : libraries_(libraries), inner_(libraries.gemm), counting_(std::make_shared<Engine>(*inner_)) {
  libraries.gemm = counting_;
}

GemmCounter::~GemmCounter() {
  libraries_.gemm = inner_;
}

std::vector<GemmTiming> GemmCounter::timings() const {
  std::vector<GemmTiming> out;
  for (const gemm::Timing& t : inner_->timings())
    out.push_back({t.key, t.first_ms, t.best_ms, counting_->calls(t.key)});
  return out;
}

}  // namespace nrl::ops
