#pragma once
// Jobs of milliseconds and more on threads of their own. Unlike the loops of core/device/cpu/parallel.h they
// may fail, and use such loops.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <future>
#include <system_error>
#include <vector>

namespace nrl {

/// Calls work(0) on this thread and work(1) to work(count - 1) each on one of its own, and waits for them.
/// Calls whose thread the system refuses are left out: `work` must take what is to do from all of them.
/// Throws an error of one of the calls.
template <class Work>
void on_threads(size_t count, const Work& work) {
  std::vector<std::future<void>> others;
  try {
    for (size_t i = 1; i < count; ++i)
      others.push_back(std::async(std::launch::async, [&work, i] { work(i); }));
  } catch (const std::system_error&) {
  }
  work(size_t{0});
  for (std::future<void>& other : others) other.get();
}

/// Calls job(0) to job(count - 1) on at most `threads` threads, which take the next one when they are done.
template <class Job>
void run_jobs(size_t threads, size_t count, const Job& job) {
  std::atomic<size_t> next = 0;
  on_threads(std::min(threads, count), [&](size_t) {
    for (size_t i = next++; i < count; i = next++) job(i);
  });
}

}  // namespace nrl
