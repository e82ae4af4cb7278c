#pragma once
// Splitting work over the threads of this process, which are OpenMP's: the kernels that need barriers are its
// parallel regions, and two pools on the same cores would fight.

#include <algorithm>
#include <cstdint>

#include <omp.h>

namespace nrl::cpu {

/// Calls body(begin, end) on disjoint ranges that cover [0, n), one per thread, each at least `grain` items
/// (fewer threads are used for small n). The split depends only on n, grain and `threads`, never on timing.
template <class Body>
void parallel_for(int threads, int64_t n, int64_t grain, const Body& body) {
  if (n <= 0) return;
  const int64_t parts = std::clamp<int64_t>(n / std::max<int64_t>(grain, 1), 1, threads);
  if (parts == 1) {
    body(int64_t{0}, n);
    return;
  }
#pragma omp parallel num_threads(static_cast <int>(parts))
  {
    const int64_t me = omp_get_thread_num(), count = omp_get_num_threads();
    const int64_t begin = n * me / count, end = n * (me + 1) / count;
    if (begin < end) body(begin, end);
  }
}

/// Calls body(item, thread) for items [0, n), handed out one at a time: for items of unequal cost. An item's
/// result must not depend on which thread computes it; `thread` selects scratch memory only.
template <class Body>
void parallel_tasks(int threads, int64_t n, const Body& body) {
  if (threads <= 1 || n <= 1) {
    for (int64_t i = 0; i < n; ++i) body(i, 0);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t i = 0; i < n; ++i) body(i, omp_get_thread_num());
}

}  // namespace nrl::cpu
