#pragma once
// The ranges of ops. In a header of its own because kernels are compiled without it, once per instruction
// set.

#include <vector>

#include "core/ops/kernel_table.h"
#include "core/trace/trace.h"

namespace nrl::ops {

namespace detail {
/// Where the costs of this thread's calls are added; null: nowhere.
inline thread_local constinit std::vector<Cost>* collected_costs = nullptr;
}  // namespace detail

/// From now on, ops that this thread calls add their costs to `costs`, which must outlive this, and their
/// ranges have the indices (trace::Event::call). Null: no more.
inline void collect_costs(std::vector<Cost>* costs) {
  detail::collected_costs = costs;
}

/// The range of a call of `op`, with its cost while costs are collected.
trace::Range traced(const char* op, const Cost& cost);

/// The range of an op, around its kernels; beside noted(), which is for dry runs.
template <class Arguments>
trace::Range traced(const Exec& exec, Kernel kernel, const Arguments& a) {
  if (!detail::collected_costs) return trace::Range(name_of(kernel), trace::Kind::op);
  return traced(name_of(kernel), cost(exec, a));
}

}  // namespace nrl::ops
