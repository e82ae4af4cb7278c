#pragma once
// The gradients of a layout on one rank, for tests of their reduction.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

#include "core/device/cpu/features.h"
#include "core/ops/kernel_table.h"
#include "parallel/data/grad_reducer.h"

namespace nrl::test {

inline ops::Exec cpu_exec() {
  ops::Exec exec;
  exec.kernels = &ops::cpu_kernels(cpu::best_isa());
  return exec;
}

inline Tensor flat(std::vector<float>& v) {
  return make_tensor(v.data(), DType::f32, {static_cast<int64_t>(v.size())});
}

/// How a rank keeps gradients; those in shards are in buckets anyway.
struct Kept {
  bool in_buckets = false;
  DType dtype = DType::f32;
};

/// The gradients of a layout on this rank, with a reducer. Buffers of buckets alternate between two, as in a
/// plan where at most two are in use.
struct Gradients {
  Gradients(const parallel::FlatBuckets& layout, const parallel::ReduceGroup& group,
            const parallel::ReduceOptions& options, const Kept& kept = {})
      : layout(layout),
        group(group),
        sharded(options.strategy.gradients),
        in_buckets(sharded || kept.in_buckets),
        values(static_cast<size_t>(sharded ? layout.shard_total() : layout.total()), NAN),
        values_bf16(kept.dtype == DType::bf16 ? values.size() : 0, bf16(NAN)),
        staging(static_cast<size_t>(options.staging_elements(layout))),
        errors(static_cast<size_t>(options.error_elements(layout))),
        sum_errors(static_cast<size_t>(options.sum_error_elements(layout))) {
    int64_t largest = 0;
    for (const parallel::Bucket& b : layout.buckets()) largest = std::max(largest, b.size);
    memory.gradients =
        make_tensor(kept.dtype == DType::bf16 ? static_cast<void*>(values_bf16.data()) : values.data(),
                    kept.dtype, {static_cast<int64_t>(values.size())});
    for (auto& buffer : buffers) buffer.assign(in_buckets ? static_cast<size_t>(largest) : 0, NAN);
    for (size_t b = 0; in_buckets && b < layout.buckets().size(); ++b)
      memory.buckets.push_back(flat(buffers[b % 2]).rows(0, layout.buckets()[b].size));
    memory.staging = make_tensor(staging.data(), options.fp8() ? DType::u8 : DType::bf16,
                                 {static_cast<int64_t>(staging.size())});
    memory.errors = flat(errors);
    memory.sum_errors = flat(sum_errors);
    reducer.emplace(layout, memory, group, options, exec);
  }

  /// A step: gradient(microbatch, element of the flat layout) on this rank; parameters from the last on, or
  /// in the order given.
  template <class F>
  void step(int microbatches, const F& gradient, std::vector<int> order = {}) {
    if (order.empty()) {
      order.resize(layout.params().size());
      std::iota(order.rbegin(), order.rend(), 0);
    }
    reducer->start();
    if (!in_buckets) {
      for (int64_t i = 0; i < layout.total(); ++i) {
        float sum = 0;
        for (int m = 0; m < microbatches; ++m) sum += gradient(m, i);
        values[i] = sum;
      }
      for (const int p : order) reducer->ready(p);
    }
    for (int m = 0; in_buckets && m < microbatches; ++m)
      for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
        if (b >= 2) reducer->settle(b - 2);
        if (b < 2) reducer->settle(static_cast<int>(layout.buckets().size()) - 2 + b);
        reducer->settle(b);
        reducer->open(b, m + 1 == microbatches);
        const parallel::Bucket& bucket = layout.buckets()[b];
        const Tensor& to = memory.buckets[b];
        for (int64_t i = 0; i < bucket.size; ++i) to.ptr<float>()[i] = gradient(m, bucket.start + i);
        for (const int p : bucket.params) reducer->ready(p);
        if (b % 3 == 2) reducer->settle(b);
      }
    reducer->finish();
  }

  /// The sum of an element that this rank holds.
  float at(int bucket, int64_t element) const {
    const int64_t i =
        sharded ? layout.in_shards(bucket).begin + element - layout.shard(bucket, group.shard->rank()).begin
                : element;
    return values_bf16.empty() ? values[i] : static_cast<float>(values_bf16[i]);
  }
  /// The elements of a bucket whose sums this rank holds.
  parallel::ElementRange held(int bucket, const parallel::ShardingStrategy& strategy) const {
    return strategy.optimizer_state ? layout.shard(bucket, group.shard->rank()) : layout.range(bucket);
  }

  const parallel::FlatBuckets& layout;
  parallel::ReduceGroup group;
  bool sharded, in_buckets;
  std::vector<float> values;
  std::vector<bf16> values_bf16;
  std::vector<float> buffers[2];
  std::vector<bf16> staging;
  std::vector<float> errors, sum_errors;
  parallel::GradMemory memory;
  ops::Exec exec = cpu_exec();
  std::optional<parallel::GradReducer> reducer;
};

}  // namespace nrl::test
