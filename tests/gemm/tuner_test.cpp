// Timing of GEMM algorithms on the simulated device, with a clock of the test.

#include "core/ops/gemm/tuner.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include <unistd.h>

#include "tests/catch.h"
#include "tests/sim/sim.h"

namespace nrl::ops::gemm {
namespace {

GemmPlan plan_of(DType in, DType out) {
  GemmPlan p;
  p.rows = 64;
  p.cols = 32;
  p.inner = 48;
  p.a = {in, 48, false, 16};
  p.b = {in, 48, true, 2};
  p.d = {out, 40, false, 256};
  return p;
}

/// Candidates whose launches take what a table says, on a clock that only they advance.
class Clock {
 public:
  /// Milliseconds of launch `call` of a candidate; negative: refused.
  std::function<double(int candidate, int call)> cost;
  std::vector<GemmOperands> operands;
  std::vector<int> order;  ///< candidates in order of their launches

  Launch launch() {
    return [this](int candidate, const GemmOperands& o, Workspace workspace, device::StreamHandle stream) {
      CHECK(workspace.size == workspace_bytes);
      const double ms = cost(candidate, calls_[candidate]++);
      if (ms < 0) return false;
      operands.push_back(o);
      order.push_back(candidate);
      device::sim_enqueue(stream, [this, ms] { now_ += ms; });
      return true;
    };
  }
  Timer timer(device::Runtime& runtime) {
    return [this, &runtime](const std::function<void()>& enqueue, device::StreamHandle stream) {
      runtime.synchronize(stream);
      const double begin = now_;
      enqueue();
      runtime.synchronize(stream);
      return now_ - begin;
    };
  }
  std::vector<double> time(device::Runtime& runtime, const GemmPlan& plan, int count) {
    return time_candidates(runtime, plan, count, launch(), timer(runtime)).value();
  }

 private:
  double now_ = 0;
  std::map<int, int> calls_;
};

TEST_CASE("operands are random and have the plan's types and alignments", "[gemm]") {
  const auto runtime = device::open_sim();
  for (const DType type : {DType::f32, DType::bf16, DType::f16, DType::e4m3, DType::e5m2}) {
    GemmPlan plan = plan_of(type, size_of(type) == 1 ? DType::bf16 : type);
    if (size_of(type) == 1) plan.a.scaling = plan.b.scaling = Scaling::tensor;
    if (type == DType::bf16) {
      plan.epilogue = Epilogue::gelu_aux_bias;
      plan.aux = {DType::bf16, 48, false, 16};
    }
    CAPTURE(name_of(type));
    Clock clock;
    clock.cost = [](int, int) { return 1.0; };
    struct Seen {
      double values = 0, squares = 0;
      std::set<double> different;
    } a, d;
    bool looked = false, scales_are_one = true;
    const Launch counted = clock.launch();
    time_candidates(
        *runtime, plan, 1,
        [&](int candidate, const GemmOperands& o, Workspace w, device::StreamHandle stream) {
          CHECK(reinterpret_cast<uintptr_t>(o.a) % 32 == 16);
          CHECK(reinterpret_cast<uintptr_t>(o.b) % 4 == 2);
          CHECK(reinterpret_cast<uintptr_t>(o.d) % 256 == 0);
          CHECK((o.aux != nullptr) == plan.has_aux());
          CHECK((o.bias != nullptr) == plan.has_bias());
          CHECK((o.scale_a != nullptr) == plan.fp8());
          if (!looked)
            device::sim_enqueue(stream, [&, o] {
              const auto look = [](const void* p, DType t, int64_t n, Seen& seen) {
                for (int64_t i = 0; i < n; ++i) {
                  double v = 0;
                  if (t == DType::f32) v = static_cast<const float*>(p)[i];
                  if (t == DType::bf16) v = static_cast<const bf16*>(p)[i];
                  if (t == DType::f16) v = static_cast<const f16*>(p)[i];
                  if (size_of(t) == 1) {  // sign, exponent, mantissa
                    const int bits = static_cast<const uint8_t*>(p)[i], fraction = t == DType::e4m3 ? 3 : 2;
                    const int exponent = (bits & 0x7f) >> fraction, bias = t == DType::e4m3 ? 7 : 15;
                    v = exponent == 0
                            ? 0
                            : std::ldexp(1 + (bits & ((1 << fraction) - 1)) * std::ldexp(1, -fraction),
                                         exponent - bias);
                    if (bits & 0x80) v = -v;
                  }
                  seen.values += 1;
                  seen.squares += v * v;
                  seen.different.insert(v);
                }
              };
              look(o.a, plan.a.dtype, plan.rows * plan.a.ld, a);
              look(o.d, plan.d.dtype, plan.rows * plan.d.ld, d);
              if (plan.fp8())
                for (const void* scale : {o.scale_a, o.scale_b}) {
                  float one = 0;
                  std::memcpy(&one, scale, sizeof one);
                  scales_are_one = scales_are_one && one == 1;
                }
            });
          looked = true;
          return counted(candidate, o, w, stream);
        },
        clock.timer(*runtime));
    REQUIRE(looked);
    CHECK(scales_are_one);
    for (const Seen& seen : {a, d}) {
      // Unit variance; truncation to FP8 takes some of it.
      CHECK(seen.squares / seen.values > (size_of(type) == 1 ? 0.75 : 0.93));
      CHECK(seen.squares / seen.values < 1.07);
      CHECK(seen.different.size() > 50);
    }
  }
}

TEST_CASE("calls rotate through more operands than the cache holds", "[gemm]") {
  const auto runtime = device::open_sim();
  GemmPlan plan = plan_of(DType::bf16, DType::bf16);
  plan.rows = 2048;
  Clock clock;
  clock.cost = [](int, int) { return 0.25; };
  clock.time(*runtime, plan, 3);
  const int64_t bytes = 2048 * 48 * 2 + 32 * 48 * 2 + 2048 * 40 * 2;
  std::set<const void*> sets;
  for (size_t i = 0; i < clock.operands.size(); ++i) {
    sets.insert(clock.operands[i].a);
    if (i > 0) REQUIRE(clock.operands[i].a != clock.operands[i - 1].a);
  }
  const auto cache = static_cast<int64_t>(runtime->properties().l2_cache);
  REQUIRE(static_cast<int64_t>(sets.size()) * bytes > 2 * cache);
  REQUIRE(static_cast<int64_t>(sets.size() - 1) * bytes <= 2 * cache);  // no more memory than that
}

TEST_CASE("the median of alternating rounds decides", "[gemm]") {
  const auto runtime = device::open_sim();
  const GemmPlan plan = plan_of(DType::bf16, DType::bf16);
  Clock clock;
  // Launch 0 loads the kernels, launch 1 is the first round, then five rounds of 4 ms follow.
  clock.cost = [](int candidate, int call) {
    const bool first = call < 2;
    switch (candidate) {
      case 0:
        return 5.0;
      case 1:  // fastest but for one disturbance, which would decide a mean
        return call == 4 ? 900.0 : 4.0;
      case 2:  // slowest but for one round, which would decide a minimum
        return call == 5 ? 0.01 : 6.0;
      case 3:  // slow when the kernels are loaded, which must not count
        return call == 0 ? 5000.0 : 5.5;
      case 4:  // hopeless, although faster later
        return first ? 50.0 : 0.1;
      default:
        return -1.0;
    }
  };
  const std::vector<double> ms = clock.time(*runtime, plan, 6);
  REQUIRE(ms == std::vector<double>{5.0, 4.0, 6.0, 5.5, INFINITY, INFINITY});
  // One call each to load, one each for the first round, then rounds over those that are left.
  std::vector<int> expected{0, 1, 2, 3, 4, 0, 1, 2, 3, 4};
  for (int r = 0; r < 5; ++r)
    for (const int c : {0, 1, 2, 3}) expected.push_back(c);
  REQUIRE(clock.order == expected);
}

TEST_CASE("a choice is made once and kept in the file", "[gemm]") {
  const auto runtime = device::open_sim();
  const std::string file = "tuner-" + std::to_string(getpid()) + ".txt";
  const GemmPlan plan = plan_of(DType::bf16, DType::bf16);
  const std::vector<Tuner::Algorithm> algorithms{{10}, {11}, {12}};
  Clock clock;
  clock.cost = [](int candidate, int) { return candidate == 1 ? 1.0 : 1.5; };
  {
    Tuner tuner(*runtime, {.autotune = true, .gemm_tuning = file}, "test 1", clock.timer(*runtime));
    REQUIRE(tuner.candidates() == 16);
    REQUIRE_FALSE(tuner.known(plan));
    REQUIRE(tuner.choose(plan, algorithms, clock.launch()) == 1);
    REQUIRE(tuner.known(plan) == algorithms[1]);
    REQUIRE_NOTHROW(tuner.reject(plan));
    REQUIRE(tuner.timings().size() == 1);
    REQUIRE(tuner.timings()[0].key == plan.key());
    REQUIRE(tuner.timings()[0].first_ms == Approx(1.5));
    REQUIRE(tuner.timings()[0].best_ms == Approx(1.0));
  }
  const size_t launches = clock.order.size();
  Tuner fixed(*runtime, {.gemm_tuning = file}, "test 1");
  REQUIRE(fixed.candidates() == 1);
  REQUIRE(fixed.known(plan) == algorithms[1]);
  // Without autotuning nothing is timed or stored, and a choice that the library refuses is an error.
  GemmPlan other = plan;
  other.rows = 8;
  REQUIRE(fixed.choose(other, algorithms, clock.launch()) == 0);
  REQUIRE(clock.order.size() == launches);
  REQUIRE_FALSE(fixed.known(other));
  REQUIRE_THROWS_WITH(fixed.reject(plan), ContainsSubstring(file + ": the library refuses"));
  std::filesystem::remove(file);
}

TEST_CASE("without memory for the operands the library's choice stays", "[gemm]") {
  const auto runtime = device::open_sim({.memory = size_t{64} << 20});
  Clock clock;
  clock.cost = [](int candidate, int) { return candidate == 1 ? 1.0 : 2.0; };
  Tuner tuner(*runtime, {.autotune = true}, "test 1", clock.timer(*runtime));
  const GemmPlan plan = plan_of(DType::bf16, DType::bf16);
  REQUIRE(tuner.choose(plan, {{1}, {2}}, clock.launch()) == 0);
  REQUIRE(clock.order.empty());
  REQUIRE_FALSE(tuner.known(plan));  // not kept: the next run may have the memory
  REQUIRE(tuner.timings().empty());
}

TEST_CASE("events time the candidates, and accumulation does not spoil the operands", "[gemm]") {
  const auto runtime = device::open_sim();
  GemmPlan plan = plan_of(DType::f32, DType::f32);
  plan.accumulate = true;
  bool finite = true;
  const auto ms = time_candidates(
      *runtime, plan, 2, [&](int, const GemmOperands& o, Workspace, device::StreamHandle stream) {
        device::sim_enqueue(stream,
                            [&, o] { finite = finite && std::isfinite(*static_cast<const float*>(o.d)); });
        return true;
      });
  REQUIRE(ms);
  for (const double t : *ms) REQUIRE(t > 0);
  REQUIRE(finite);
}

}  // namespace
}  // namespace nrl::ops::gemm
