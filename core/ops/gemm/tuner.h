#pragma once
// Chooses GEMM algorithms by timing: the same for cuBLASLt and for the simulated device.

#include <functional>
#include <optional>
#include <vector>

#include "core/device/runtime.h"
#include "core/ops/gemm/engine.h"
#include "core/ops/gemm/tune_cache.h"

namespace nrl::ops::gemm {

/// Enqueues a GEMM with the library's algorithm number `candidate`; false if the library refuses it. Its
/// workspace has workspace_bytes.
using Launch = std::function<bool(int candidate, const GemmOperands& operands, Workspace workspace,
                                  device::StreamHandle stream)>;
/// Milliseconds that the device takes for what `enqueue` puts on `stream`.
using Timer = std::function<double(const std::function<void()>& enqueue, device::StreamHandle stream)>;

/// Median milliseconds of every candidate of `plan`; infinity for those that the library refuses or that take
/// more than twice as long as the fastest in the first round. Nullopt when the memory does not suffice.
///
/// On a stream of its own, after all other work of the process is done. The operands have the plan's types,
/// strides and alignments and normally distributed values: zeros draw less power and rank algorithms
/// differently. Calls rotate through several sets of operands, together larger than twice the L2 cache, and
/// rounds alternate between candidates. Memory, for the duration of the call: at most twice the L2 cache, one
/// set of operands and workspace_bytes. `timer`: events of the device by default.
std::optional<std::vector<double>> time_candidates(device::Runtime& runtime, const GemmPlan& plan, int count,
                                                   const Launch& launch, Timer timer = {});

class Tuner {
 public:
  using Algorithm = TuneCache::Algorithm;

  /// `library`: name and version, "cuBLASLt 13.1.0". `timer`: for tests.
  Tuner(device::Runtime& runtime, const LibraryOptions& options, const std::string& library,
        Timer timer = {});

  /// The choice of an earlier run.
  std::optional<Algorithm> known(const GemmPlan& plan) const { return cache_.find(plan.key()); }
  /// The library refuses the known choice: an error, except with autotuning, which makes a new one.
  void reject(const GemmPlan& plan) const;
  /// How many candidates choose() compares.
  int candidates() const { return autotune_ ? 16 : 1; }
  /// The number of the fastest of the algorithms, which the library recommends in this order and which are
  /// not empty; 0 without autotuning. The choice is kept in the tuning file. Must not be called while a
  /// graph is captured.
  int choose(const GemmPlan& plan, const std::vector<Algorithm>& algorithms, const Launch& launch);
  /// The GEMMs that choose() has timed.
  const std::vector<Timing>& timings() const { return timings_; }

 private:
  device::Runtime& runtime_;
  bool autotune_;
  TuneCache cache_;
  Timer timer_;
  bool warned_ = false;
  std::vector<Timing> timings_;
};

}  // namespace nrl::ops::gemm
