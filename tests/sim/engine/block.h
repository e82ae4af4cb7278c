#pragma once
// One block of CUDA threads on fibers; internal to the engine.
//
// The scheduler, on the OS thread's own stack, iterates over the warps. Threads that have not started share a
// stack, one after another, until one of them must wait: it keeps the stack, and the next thread gets
// another. Under the thread sanitizer each thread always has the same stack and sanitizer fiber.

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "core/base/philox.h"
#include "tests/sim/engine/engine.h"
#include "tests/sim/engine/sanitizers.h"
#include "tests/sim/engine/shared_memory.h"
#include "tests/sim/engine/stacks.h"

namespace nrl::sim {

/// Puts first, first + 1, ... into `out` in the order of `options`; `stream` tells several random ones apart.
template <class Int>
void permute(const Options& options, uint64_t stream, std::span<Int> out, Int first = 0) {
  std::iota(out.begin(), out.end(), first);
  if (options.order == Order::reverse) std::reverse(out.begin(), out.end());
  if (options.order != Order::random) return;
  PhiloxBlock draws{};
  for (size_t i = out.size(); i > 1; --i) {
    const size_t k = out.size() - i;
    if (k % draws.size() == 0) draws = philox4x32(k, stream, options.seed);
    std::swap(out[i - 1], out[draws[k % draws.size()] % i]);
  }
}

enum class State : uint8_t { fresh, ready, in_warp_op, in_barrier, in_block_wait, done };

/// State of a block after a step: some thread has moved on, all wait for other blocks, or all have returned.
enum class Progress : uint8_t { moved, waits, done };

/// One CUDA thread.
struct Lane : ThreadView {
  int number;  ///< in the block
  State state;
  Stack* stack;  ///< where it is suspended
  Site site;     ///< of the operation it waits in
  unsigned mask;
  const WarpOp* op;
  void* payload;
  void* resume_after;             ///< thread sanitizer: what to acquire when __syncwarp is done
  std::array<char, 2> completed;  ///< thread sanitizer: what the lanes of a __syncwarp it completed acquire
  int completions;
  void* fiber = nullptr;  ///< the thread sanitizer's
  AsyncCopies* copies = nullptr;
};

class ThreadBlock : public BlockView {
 public:
  ThreadBlock();
  ~ThreadBlock();
  ThreadBlock(const ThreadBlock&) = delete;
  ThreadBlock& operator=(const ThreadBlock&) = delete;

  /// Begins the block with this linear index; launch and arguments outlive it.
  void start(const Launch& launch, size_t block_index, const Options& options, void (*body)(void*),
             void* arguments);
  /// Runs each warp until it waits; KernelError.
  Progress step();
  /// No other block runs any more that this one could wait for.
  void alone() { beside_others_ = false; }
  /// The caller's accesses follow those of all blocks run so far; one that is not done is given up.
  void join();

  // Called by CUDA threads.
  [[noreturn]] void fail(std::string text, const Site& at);
  int barrier(int value, const Site& at);
  void collective(unsigned mask, const WarpOp& op, void* payload, const Site& at);
  void* shared_array(const void* key, size_t bytes, size_t align, const Site& at);
  const SharedMemory& shared() const { return shared_; }
  AsyncCopies& async_copies();
  void wait_for_block(const Site& at);
  bool runs_beside_others() const { return beside_others_; }
  bool runs_beside_threads() const { return beside_threads_; }

 private:
  struct Warp {
    unsigned alive, waiting;  ///< bits of lanes
  };

  static void enter();
  void run_fresh_lanes();
  void prepare(size_t block_index, const Options& options);
  bool run_warp(int warp);
  void resume(Stack& stack, Lane* lane);
  void suspend();
  void jump(Stack& from, Stack& to, bool for_good);
  void ended(Lane& lane);
  void open_barrier();
  bool try_complete(Lane& arrived);
  std::string place(const Lane* lane, const Site& at) const;
  std::string deadlock() const;
  void abandon();
  Lane& here() const { return *static_cast<Lane*>(const_cast<ThreadView*>(current_thread)); }
  int warps() const { return (count_ + warp_size - 1) / warp_size; }
  int lanes_of(int warp) const { return std::min(warp_size, count_ - warp * warp_size); }

  const Launch* launch_ = nullptr;
  void (*body_)(void*) = nullptr;
  void* arguments_ = nullptr;

  int count_ = 0, alive_ = 0;  ///< threads
  std::vector<Lane> lanes_;
  std::array<Warp, max_threads / warp_size> warp_{};
  std::array<int16_t, max_threads> order_{};  ///< of the lanes, warp by warp
  std::array<int16_t, max_threads / warp_size> warp_order_{};
  int next_ = 0, next_end_ = 0;  ///< fresh lanes to run, indices into order_

  StackPool stacks_;
  Stack scheduler_;
  Stack* running_ = nullptr;
  Stack* finished_ = nullptr;  ///< the stack that nothing runs on any more
  void* scheduler_fiber_ = nullptr;

  Site barrier_site_;
  int barrier_count_ = 0, barrier_sum_ = 0, barrier_result_ = 0, barriers_ = 0;

  SharedMemory shared_;

  int runs_ = 0;
  bool failed_ = false;
  bool moved_ = false;           ///< in this step
  bool beside_others_ = false;   ///< other blocks of this launch run at the same time
  bool beside_threads_ = false;  ///< on other OS threads
  std::string failure_;
  // Objects for the thread sanitizer; only their addresses matter.
  char start_ = 0;
  std::array<char, 2> end_{};  ///< of the blocks that ran here, in turn
  std::array<char, 2> barrier_passed_{};
};

/// The block that runs on this OS thread; null between blocks.
inline constinit thread_local ThreadBlock* active_block = nullptr;

// After a switch every return is predicted wrong: what lies between a kernel and the switch is inlined.
[[gnu::always_inline]] inline void ThreadBlock::jump(Stack& from, Stack& to, bool for_good) {
  if (sanitizer::address())
    __sanitizer_start_switch_fiber(for_good ? nullptr : &from.fake_stack, to.low, to.bytes);
  nrl_switch_context(&from.context, to.context);
  if (sanitizer::address()) __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
}

[[gnu::always_inline]] inline void ThreadBlock::suspend() {
  here().stack = running_;
  sanitizer::become(scheduler_fiber_);
  jump(*running_, scheduler_, false);
}

}  // namespace nrl::sim
