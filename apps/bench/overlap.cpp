#include "apps/bench/overlap.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <utility>

#include "apps/bench/machine.h"
#include "core/base/clock.h"
#include "core/base/sample.h"
#include "core/ops/attention.h"
#include "core/ops/linear.h"
#include "core/ops/norm.h"
#include "core/ops/transfer.h"

namespace nrl::bench {
namespace {

/// The sizes of calls and bytes of operations: some ms of a core, and some 100 us of a GPU.
struct BesideSizes {
  int64_t tokens, width, sequences, heads, head_dim, bytes;
  double seconds;  // of the calls in a round
};
constexpr BesideSizes of_cpu{512, 512, 2, 6, 64, 2 << 20, 0.04},
    of_gpu{8192, 4096, 2, 32, 128, 64 << 20, 0.02}, of_quick{16, 16, 1, 2, 16, 1 << 10, 0};

struct BesideCall {
  const char* op;
  ops::Work work;
  std::function<void()> run;
};

/// The calls, with their operands.
class BesideCalls {
 public:
  BesideCalls(const ops::Exec& exec, const BesideSizes& s, bool quick)
      : machine_(exec, quick), memory_(machine_) {
    const DType type = machine_.gpu() ? DType::bf16 : DType::f32;
    const int64_t n = s.tokens, w = s.width;
    const int threads = exec.threads;
    if (machine_.gpu()) {
      machine_.need_workspace(std::max(ops::gpu_linear_workspace(w, exec.partials()),
                                       ops::attention_gpu_workspace(n, s.heads, s.heads, s.head_dim)));
    } else {
      machine_.need_workspace(
          std::max(ops::linear_workspace(n, w, w, type, threads, exec.kernels->bf16_products),
                   ops::attention_workspace(n, s.heads, s.heads, s.head_dim, n / s.sequences, threads)));
    }
    const ops::LinearForward linear{.x = memory_.normal(type, {n, w}),
                                    .weight = memory_.normal(type, {w, w}, 0.02),
                                    .out = memory_.normal(type, {n, w})};
    all.push_back({"linear_forward", ops::Work::gemm,
                   [this, linear] { ops::linear_forward(machine_.exec(), linear); }});
    ops::AttentionForward a;
    for (Tensor* t : {&a.q, &a.k, &a.v, &a.out}) *t = memory_.normal(type, {n, s.heads, s.head_dim});
    a.lse = memory_.constant(DType::f32, {s.heads, n}, 0);
    a.cu_q = a.cu_k = memory_.arithmetic(s.sequences + 1, 0, n / s.sequences);
    a.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
    a.lengths = {.longest = n / s.sequences, .equal = true};
    all.push_back({"attention_forward", ops::Work::attention,
                   [this, a] { ops::attention_forward(machine_.exec(), a); }});
    ops::NormForward norm;
    norm.x = memory_.normal(type, {n, w});
    norm.weight = memory_.constant(type, {w}, 1);
    norm.out = memory_.normal(type, {n, w});
    norm.rstd = memory_.constant(DType::f32, {n}, 1);
    all.push_back(
        {"norm_forward", ops::Work::memory, [this, norm] { ops::norm_forward(machine_.exec(), norm); }});
    from = memory_.constant(DType::f32, {s.bytes / 4}, 0);
    to = memory_.constant(DType::f32, {s.bytes / 4}, 0);
    finish();
  }

  void finish() { ops::synchronize(machine_.exec()); }

  std::vector<BesideCall> all;
  Tensor from, to;

 private:
  Machine machine_;
  Tensors memory_;
};

/// Starts an operation of the group.
nrl::comm::Handle start_operation(nrl::comm::Communicator& group, nrl::comm::Op op,
                                  const BesideCalls& calls) {
  const int64_t block = calls.from.numel() / group.size();
  const auto view = [](const Tensor& t, int64_t first, int64_t count) {
    return nrl::comm::View(static_cast<float*>(t.data) + first, count, DType::f32);
  };
  const nrl::comm::View from = view(calls.from, 0, block * group.size()),
                        to = view(calls.to, 0, block * group.size());
  if (op == nrl::comm::Op::all_reduce) return group.all_reduce_async(to);
  if (op == nrl::comm::Op::all_gather) return group.all_gather_async(view(calls.from, 0, block), to);
  return group.reduce_scatter_async(from, view(calls.to, 0, block));
}

/// Rounds of one call beside one operation.
class Beside {
 public:
  Beside(nrl::comm::Communicator& group, BesideCalls& calls, const BesideCall& call, nrl::comm::Op op,
         double seconds)
      : group_(group), calls_(calls), call_(call), op_(op) {
    // All ranks start as many operations, enough for all calls while both take three times as long.
    run(1);
    communicate(1);
    const double of_call = run(1), of_operation = communicate(1);
    std::vector<double> slowest{of_call, -of_operation};
    group_.host().all_reduce(slowest, nrl::comm::Reduce::max);
    repetitions_ = std::clamp(static_cast<int>(seconds / std::max(slowest[0], 1e-7)), 1, 200);
    operations_ = std::clamp(
        static_cast<int>(std::ceil(3 * repetitions_ * slowest[0] / std::max(-slowest[1], 1e-7))), 2, 400);
  }

  void round() {
    group_.host().barrier();
    const double call = run(repetitions_);
    group_.host().barrier();
    const double operation = communicate(operations_);
    group_.host().barrier();
    std::vector<nrl::comm::Handle> handles;
    for (int i = 0; i < operations_; ++i) handles.push_back(start_operation(group_, op_, calls_));
    const double together = run(repetitions_), rest = wait(handles);
    ours_.push_back(together / std::max(call, 1e-9));
    // The part of the operations that is over after the calls.
    const double done = operation - rest;
    theirs_.push_back(together / std::max(done, together / most));
  }

  machine::MeasuredOverlap result() const {
    std::vector<double> both{median(ours_), median(theirs_)};
    group_.host().all_reduce(both);
    const auto factor = [&](double sum) { return std::clamp(sum / group_.size(), least, most); };
    return {.op = call_.op,
            .work = call_.work,
            .comm = op_,
            .slowdown = factor(both[0]),
            .comm_slowdown = factor(both[1])};
  }

 private:
  // Beyond these a round was disturbed.
  static constexpr double least = 0.5, most = 20;

  static double seconds_of(const std::function<void()>& work) {
    const double begin = steady_seconds();
    work();
    return steady_seconds() - begin;
  }
  double run(int count) {
    return seconds_of([&] {
      for (int i = 0; i < count; ++i) call_.run();
      calls_.finish();
    });
  }
  static double wait(std::vector<nrl::comm::Handle>& handles) {
    return seconds_of([&] {
      for (nrl::comm::Handle& h : handles) h.wait();
    });
  }
  double communicate(int count) {
    return seconds_of([&] {
      std::vector<nrl::comm::Handle> handles;
      for (int i = 0; i < count; ++i) handles.push_back(start_operation(group_, op_, calls_));
      wait(handles);
    });
  }

  nrl::comm::Communicator& group_;
  BesideCalls& calls_;
  const BesideCall& call_;
  nrl::comm::Op op_;
  int repetitions_ = 1, operations_ = 2;
  std::vector<double> ours_, theirs_;
};

}  // namespace

std::vector<machine::MeasuredOverlap> measure_overlap(nrl::comm::Communicator& group, const ops::Exec& exec,
                                                      int rounds, bool quick) {
  if (group.size() == 1) return {};
  const BesideSizes& sizes = quick ? of_quick : exec.device ? of_gpu : of_cpu;
  BesideCalls calls(exec, sizes, quick);
  std::vector<Beside> pairs;
  for (const BesideCall& call : calls.all)
    for (const nrl::comm::Op op :
         {nrl::comm::Op::all_reduce, nrl::comm::Op::all_gather, nrl::comm::Op::reduce_scatter})
      pairs.emplace_back(group, calls, call, op, sizes.seconds);
  for (int i = 0; i < rounds; ++i)
    for (Beside& pair : pairs) pair.round();
  std::vector<machine::MeasuredOverlap> out;
  for (const Beside& pair : pairs) out.push_back(pair.result());
  return out;
}

}  // namespace nrl::bench
