// Barriers and warp operations of CUDA threads.

#include <cstring>
#include <thread>

#include "tests/sim/engine/block.h"

namespace nrl::sim {
namespace {

bool same(const Site& a, const Site& b) {
  return a.line() == b.line() &&
         (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

}  // namespace

// --- barrier -------------------------------------------------------------------------------------

void ThreadBlock::open_barrier() {
  barrier_result_ = barrier_sum_;
  barrier_sum_ = barrier_count_ = 0;
  ++barriers_;
  for (int i = 0; i < count_; ++i) {
    Lane& lane = lanes_[i];
    if (lane.state == State::in_barrier) lane.state = State::ready;
  }
}

[[gnu::always_inline]] inline int ThreadBlock::barrier(int value, const Site& at) {
  Lane& me = here();
  if (barrier_count_ > 0 && !same(barrier_site_, at)) {
    fail(fmt::format("divergent __syncthreads: other threads of the block are in the one of {}:{}",
                     barrier_site_.file_name(), barrier_site_.line()),
         at);
  }
  barrier_site_ = me.site = at;
  barrier_sum_ += value;
  // Two objects in turn: a thread that wakes late must not see arrivals at the next barrier.
  char* passed = &barrier_passed_[barriers_ % 2];
  sanitizer::release(passed);
  if (++barrier_count_ == alive_) {
    open_barrier();
  } else {
    me.state = State::in_barrier;
    suspend();
  }
  sanitizer::acquire(passed);
  return barrier_result_;
}

// --- warp operations -----------------------------------------------------------------------------

/// Carries out the operation that `arrived` waits in when no lane of its mask is missing. To the thread
/// sanitizer the caller is `arrived`.
bool ThreadBlock::try_complete(Lane& arrived) {
  const int w = arrived.number / warp_size;
  Warp& warp = warp_[w];
  const unsigned mask = arrived.mask;
  if (mask & warp.alive & ~warp.waiting) return false;
  void* payloads[warp_size] = {};
  unsigned present = 0;
  for (int i = 0; i < lanes_of(w); ++i) {
    if (!(mask >> i & 1)) continue;
    Lane& lane = lanes_[w * warp_size + i];
    if (lane.state == State::done) continue;  // threads that have exited drop out, as on the hardware
    if (lane.state != State::in_warp_op || lane.mask != mask) return false;
    if (lane.op != arrived.op) {
      fail(fmt::format("lanes of mask {:08x} are in different operations: {} and, at {}:{}, {}", mask,
                       arrived.op->name, lane.site.file_name(), lane.site.line(), lane.op->name),
           arrived.site);
    }
    present |= 1u << i;
    payloads[i] = lane.payload;
    if (lane.op->orders_memory) sanitizer::acquire(&lane.mask);
  }
  if (arrived.op->whole_warp && present != ~0u) {
    fail(fmt::format("{} with the lanes {:08x} only; it needs a whole warp", arrived.op->name, present),
         arrived.site);
  }
  arrived.op->apply(payloads, present);
  char* completed = &arrived.completed[++arrived.completions % 2];
  if (arrived.op->orders_memory) sanitizer::release(completed);
  warp.waiting &= ~present;
  for (int i = 0; i < lanes_of(w); ++i) {
    if (!(present >> i & 1)) continue;
    Lane& lane = lanes_[w * warp_size + i];
    lane.resume_after = completed;
    lane.state = State::ready;
  }
  return true;
}

[[gnu::always_inline]] inline void ThreadBlock::collective(unsigned mask, const WarpOp& op, void* payload,
                                                           const Site& at) {
  Lane& me = here();
  if (!(mask >> me.lane & 1))
    fail(fmt::format("{}: lane {} is not in its mask {:08x}", op.name, me.lane, mask), at);
  me.mask = mask;
  me.op = &op;
  me.payload = payload;
  me.site = at;
  me.state = State::in_warp_op;
  warp_[me.number / warp_size].waiting |= 1u << me.lane;
  if (op.orders_memory) sanitizer::release(&me.mask);
  if (!try_complete(me)) suspend();
  if (op.orders_memory) sanitizer::acquire(me.resume_after);
}

/// A thread has returned from the kernel: others may have waited for it.
void ThreadBlock::ended(Lane& lane) {
  lane.state = State::done;
  const int w = lane.number / warp_size;
  Warp& warp = warp_[w];
  warp.alive &= ~(1u << lane.lane);
  if (--alive_ == barrier_count_ && barrier_count_ > 0) open_barrier();
  for (int i = 0; i < lanes_of(w) && warp.waiting != 0 && !failed_; ++i) {
    Lane& other = lanes_[w * warp_size + i];
    if (other.state != State::in_warp_op || !(other.mask >> lane.lane & 1)) continue;
    sanitizer::become(other.fiber);  // no access of this thread is ordered by an operation without it
    try_complete(other);
    sanitizer::become(lane.fiber);
  }
}

void ThreadBlock::wait_for_block(const Site& at) {
  Lane& me = here();
  me.site = at;
  me.state = State::in_block_wait;
  suspend();
  me.state = State::ready;
}

AsyncCopies& ThreadBlock::async_copies() {
  Lane& me = here();
  if (!me.copies) me.copies = new AsyncCopies;
  return *me.copies;
}

void* ThreadBlock::shared_array(const void* key, size_t bytes, size_t align, const Site& at) {
  std::string reason;
  std::byte* data = shared_.array(key, bytes, align, reason);
  if (!data) fail(std::move(reason), at);
  return data;
}

// --- called by kernels ---------------------------------------------------------------------------

namespace {
ThreadBlock& running_block() {
  if (!active_block) throw KernelError("a device function was called outside a kernel");
  return *active_block;
}
}  // namespace

void fail_thread(std::string text, const Site& at) {
  running_block().fail(std::move(text), at);
}
int barrier(int value, const Site& at) {
  return running_block().barrier(value, at);
}
void collective(unsigned mask, const WarpOp& op, void* payload, const Site& at) {
  running_block().collective(mask, op, payload, at);
}
void* shared_array(const void* key, size_t bytes, size_t align, const Site& at) {
  return running_block().shared_array(key, bytes, align, at);
}
bool in_shared_memory(const void* p, size_t bytes) {
  return running_block().shared().contains(p, bytes);
}
AsyncCopies& async_copies() {
  return running_block().async_copies();
}

void BlockWait::pause(const char* waited_for, const Site& at) {
  ThreadBlock& block = running_block();
  if (!block.runs_beside_others())
    fail_thread(
        fmt::format("waits for {}, the signal of a block that has not run or sends none; tickets must "
                    "order such blocks",
                    waited_for),
        at);
  if (block.runs_beside_threads()) {
    const auto now = std::chrono::steady_clock::now();
    if (first_ == std::chrono::steady_clock::time_point()) {
      first_ = now;
      most_seconds_ = options().block_wait_seconds;
    }
    if (std::chrono::duration<double>(now - first_).count() > most_seconds_)
      fail_thread(
          fmt::format("waited {:.3g} s for {}, the signal of another block", most_seconds_, waited_for), at);
    std::this_thread::yield();
  }
  block.wait_for_block(at);
}

}  // namespace nrl::sim
