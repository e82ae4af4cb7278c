#pragma once
// One block of CUDA threads on fibers; internal to the engine.
//
// The scheduler, on the OS thread's own stack, goes round the warps. Threads that have not started share a
// stack, one after another, until one of them must wait: then the stack stays with it and the next gets
// another. Under the thread sanitizer each thread keeps a stack and a sanitizer fiber of its own for good.

#include <array>
#include <string>
#include <vector>

#include "core/device/sim/engine/engine.h"
#include "core/device/sim/engine/shared_memory.h"

namespace nrl::sim {

/// A stack with what is needed to switch to and from it. Owns its memory.
struct Stack {
  std::byte* low = nullptr;  ///< lowest address; null: the OS thread's own stack
  size_t bytes = 0;
  void* context = nullptr;     ///< where it goes on (context.h)
  void* fake_stack = nullptr;  ///< the address sanitizer's
};

enum class State : uint8_t { fresh, ready, in_warp_op, in_barrier, done };

/// One CUDA thread.
struct Lane : ThreadView {
  int number;  ///< in the block
  State state;
  Stack* stack;  ///< where it is suspended
  Site site;     ///< of the operation it waits in
  unsigned mask;
  const WarpOp* op;
  void* payload;
  void* resume_after;             ///< thread sanitizer: what to acquire when the warp operation is done
  std::array<char, 2> completed;  ///< thread sanitizer: what the lanes of an operation it completed acquire
  int completions;
  void* fiber = nullptr;  ///< the thread sanitizer's
  AsyncCopies* copies = nullptr;
};

class Block : public BlockView {
 public:
  Block();
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  /// Runs the block with this linear index.
  void run(const Launch& launch, size_t block_index, const Options& options, void (*body)(void*),
           void* arguments);
  /// The caller's accesses follow those of all blocks run so far.
  void join();

  // Called by CUDA threads.
  [[noreturn]] void fail(std::string text, const Site& at);
  int barrier(int value, const Site& at);
  void collective(unsigned mask, const WarpOp& op, void* payload, const Site& at);
  void* shared_array(const void* key, size_t bytes, size_t align, const Site& at);
  const SharedMemory& shared() const { return shared_; }
  AsyncCopies& async_copies();

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
  Stack* take_stack(const Lane& lane);
  Stack* new_stack();
  void ended(Lane& lane);
  void open_barrier();
  bool try_complete(const Lane& arrived);
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

  std::vector<Stack> stacks_;
  std::vector<Stack*> idle_;
  Stack scheduler_;
  Stack* running_ = nullptr;
  Stack* finished_ = nullptr;  ///< the stack that nothing runs on any more
  void* scheduler_fiber_ = nullptr;

  Site barrier_site_;
  int barrier_count_ = 0, barrier_sum_ = 0, barrier_result_ = 0, barriers_ = 0;

  SharedMemory shared_;

  int runs_ = 0;
  bool failed_ = false;
  std::string failure_;
  // Objects for the thread sanitizer; only their addresses matter.
  char start_ = 0;
  std::array<char, 2> end_{};  ///< of the blocks that ran here, in turn
  std::array<char, 2> barrier_passed_{};
};

}  // namespace nrl::sim
