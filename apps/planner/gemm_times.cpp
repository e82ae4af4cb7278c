#include "apps/planner/gemm_times.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "apps/plan/run_plan.h"
#include "core/device/cpu/memory.h"
#include "core/device/cpu/threads.h"
#include "core/ops/cost.h"
#include "core/ops/kernel_table.h"
#include "core/ops/linear.h"

namespace nrl::planner {
namespace {

constexpr double most_flops = 5e8, most_seconds = 1;
/// Operands of this many bytes are used in turn: more than a core's own cache, less than what cores share.
constexpr int64_t turn_bytes = int64_t{16} << 20;
constexpr int rounds = 5;

enum class Pass { forward, data, weight, none };
Pass pass_of(const machine::CallKey& key) {
  if (key.operands != DType::f32 && key.operands != DType::bf16) return Pass::none;
  if (key.op == "linear_forward") return Pass::forward;
  if (key.op == "linear_backward_data") return Pass::data;
  return key.op == "linear_backward_weight" ? Pass::weight : Pass::none;
}

/// The tensors of a linear layer, several sets of them in one piece of memory.
class Operands {
 public:
  Operands(const machine::CallKey& key, Pass pass, ops::Exec& exec) : pass_(pass), exec_(exec) {
    // Rows, columns and the inner dimension of the result.
    const auto [r, c, i] = key.gemm;
    const int64_t n = pass == Pass::weight ? i : r;
    const int64_t m = pass == Pass::forward ? c : pass == Pass::data ? i : r;
    const int64_t k = pass == Pass::forward ? i : c;
    const auto size = static_cast<int64_t>(size_of(key.operands));
    const auto aligned = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int64_t x = aligned(n * k * size), w = aligned(m * k * (pass == Pass::weight ? 4 : size)),
                  y = aligned(n * m * size);
    count_ = static_cast<int>(std::clamp<int64_t>(turn_bytes / (x + w + y), 2, 64));
    memory_ = cpu::HostMemory(static_cast<size_t>(count_ * (x + w + y)));
    workspace_ = cpu::HostMemory(
        ops::linear_workspace(n, m, k, key.operands, exec.threads, exec.kernels->bf16_products));
    exec_.workspace = {workspace_.data(), workspace_.size()};
    std::byte* at = memory_.data();
    for (int set = 0; set < count_; ++set) {
      const auto take = [&](int64_t bytes, DType dtype, int64_t rows, int64_t columns) {
        return make_tensor(std::exchange(at, at + bytes), dtype, {rows, columns});
      };
      x_.push_back(take(x, key.operands, n, k));
      w_.push_back(take(w, pass == Pass::weight ? DType::f32 : key.operands, m, k));
      y_.push_back(take(y, key.operands, n, m));
    }
  }
  ~Operands() { exec_.workspace = {}; }
  Operands(const Operands&) = delete;
  Operands& operator=(const Operands&) = delete;

  int count() const { return count_; }
  void call(int set) {
    const Tensor &x = x_[set], &w = w_[set], &y = y_[set];
    switch (pass_) {
      case Pass::forward:
        return ops::linear_forward(exec_, {.x = x, .weight = w, .out = y});
      case Pass::data:
        return ops::linear_backward_data(exec_, {.dout = y, .weight = w, .dx = x});
      case Pass::weight:
        return ops::linear_backward_weight(exec_, {.dout = y, .x = x, .dweight = w});
      case Pass::none:
        return;
    }
  }

 private:
  Pass pass_;
  ops::Exec& exec_;
  int count_ = 0;
  cpu::HostMemory memory_, workspace_;  // of zeros
  std::vector<Tensor> x_, w_, y_;
};

}  // namespace

GemmTimes::GemmTimes(const KernelsConfig& kernels, int threads) {
  exec_.kernels = &ops::cpu_kernels(plan::isa_for(kernels));
  exec_.threads = threads;
  cpu::use_threads(threads);
}

double GemmTimes::of(const machine::CallKey& key) {
  const auto [at, added] = times_.try_emplace(key, 0);
  const Pass pass = pass_of(key);
  const double flops = 2.0 * static_cast<double>(key.gemm[0]) * static_cast<double>(key.gemm[1]) *
                       static_cast<double>(key.gemm[2]);
  if (!added || pass == Pass::none || flops <= 0 || flops > most_flops || spent_ > most_seconds)
    return at->second;
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto seconds = [](auto duration) { return std::chrono::duration<double>(duration).count(); };
  const auto begin = now();
  Operands operands(key, pass, exec_);
  std::vector<double> times;
  for (int round = 0; round <= rounds; ++round) {
    const auto from = now();
    for (int set = 0; set < operands.count(); ++set) operands.call(set);
    // The first one touches memory for the first time.
    if (round > 0) times.push_back(seconds(now() - from) / operands.count());
  }
  at->second = *std::min_element(times.begin(), times.end());
  spent_ += seconds(now() - begin);
  return at->second;
}

bool add_gemms(std::span<const ops::Call> calls, GemmTimes& times, machine::Profile& profile) {
  std::map<machine::CallKey, const ops::Call*> missing;
  for (const ops::Call& call : calls)
    if (const machine::CallKey key = machine::key_of(call); pass_of(key) != Pass::none) missing[key] = &call;
  for (const machine::MeasuredCall& m : profile.calls) missing.erase(m.key);
  std::vector<machine::MeasuredCall> added;
  for (const auto& [key, call] : missing) {
    double in_window = 0, alone = 0;
    for (const machine::MeasuredCall& m : profile.calls) {
      if (m.key.op != key.op || m.key.operands != key.operands) continue;
      const double seconds = times.of(m.key);
      if (seconds <= 0) continue;
      in_window += m.seconds;
      alone += seconds;
    }
    const double seconds = alone > 0 ? times.of(key) : 0;
    if (seconds <= 0) continue;
    added.push_back({.key = key,
                     .work = call->cost.work,
                     .flops = call->cost.flops,
                     .library = call->cost.library,
                     .seconds = seconds * in_window / alone,
                     .rounds = rounds});
  }
  profile.calls.insert(profile.calls.end(), added.begin(), added.end());
  return !added.empty();
}

}  // namespace nrl::planner
