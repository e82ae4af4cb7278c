#include "core/device/sim/engine/block.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "core/device/sim/engine/context.h"
#include "core/device/sim/engine/order.h"
#include "core/device/sim/engine/sanitizers.h"

namespace nrl::sim {
namespace {

// Instrumented code needs more stack: its arrays have guards.
size_t stack_bytes() {
  return (sanitizer::address() ? size_t{256} : size_t{64}) * 1024;
}

bool same(const Site& a, const Site& b) {
  return a.line() == b.line() &&
         (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

constinit thread_local Block* active = nullptr;

}  // namespace

Block::Block() : BlockView(), lanes_(max_threads) {
  for (int i = 0; i < max_threads; ++i) {
    lanes_[static_cast<size_t>(i)].number = i;
    lanes_[static_cast<size_t>(i)].lane = i % warp_size;
  }
  stacks_.reserve(max_threads);
  idle_.reserve(max_threads);
  dynamic_shared = shared_.dynamic();
}

Block::~Block() {
  for (Lane& lane : lanes_) {
    if (lane.fiber) __tsan_destroy_fiber(lane.fiber);
    delete lane.copies;
  }
  for (Stack& stack : stacks_) unmap_pages(stack.low, stack.bytes);
}

// ---- stacks
// ------------------------------------------------------------------------------------------------

Stack* Block::new_stack() {
  Stack& stack = stacks_.emplace_back();
  stack.bytes = stack_bytes();
  stack.low = map_pages(stack.bytes);
  return &stack;
}

/// A stack on which run_fresh_lanes() will start.
Stack* Block::take_stack(const Lane& lane) {
  Stack* stack = nullptr;
  if (sanitizer::thread()) {
    while (stacks_.size() <= static_cast<size_t>(lane.number)) new_stack();
    stack = &stacks_[static_cast<size_t>(lane.number)];
  } else if (idle_.empty()) {
    stack = new_stack();
  } else {
    stack = idle_.back();
    idle_.pop_back();
  }
  // Tops are staggered by cache lines: at equal offsets all stacks would fight for the same cache sets.
  const auto color = static_cast<size_t>(stack - stacks_.data());
  stack->context = make_context(stack->low, stack->bytes - color * 11 % 64 * 64, &Block::enter);
  stack->fake_stack = nullptr;
  return stack;
}

// After a switch every return is predicted wrong: what lies between a kernel and the switch is inlined.
[[gnu::always_inline]] inline void Block::jump(Stack& from, Stack& to, bool for_good) {
  if (sanitizer::address())
    __sanitizer_start_switch_fiber(for_good ? nullptr : &from.fake_stack, to.low, to.bytes);
  nrl_switch_context(&from.context, to.context);
  if (sanitizer::address()) __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
}

void Block::enter() {
  Block& self = *active;
  if (sanitizer::address()) {
    const void* low = nullptr;
    __sanitizer_finish_switch_fiber(nullptr, &low, &self.scheduler_.bytes);
    self.scheduler_.low = static_cast<std::byte*>(const_cast<void*>(low));
  }
  self.run_fresh_lanes();
  self.finished_ = self.running_;
  self.jump(*self.running_, self.scheduler_, true);
  std::abort();
}

[[gnu::always_inline]] inline void Block::resume(Stack& stack, Lane* lane) {
  current_thread = lane;
  running_ = &stack;
  finished_ = nullptr;
  if (lane) sanitizer::become(lane->fiber);
  jump(scheduler_, stack, false);
  if (finished_ && !sanitizer::thread()) idle_.push_back(finished_);
}

[[gnu::always_inline]] inline void Block::suspend() {
  here().stack = running_;
  sanitizer::become(scheduler_fiber_);
  jump(*running_, scheduler_, false);
}

// ---- scheduler
// ---------------------------------------------------------------------------------------------

/// On a fiber: runs lanes that have not started until one must wait or the warp has no more.
void Block::run_fresh_lanes() {
  while (next_ < next_end_ && !failed_) {
    Lane& lane = lanes_[static_cast<size_t>(order_[static_cast<size_t>(next_++)])];
    lane.state = State::ready;
    current_thread = &lane;
    sanitizer::become(lane.fiber);
    sanitizer::acquire(&start_);
    sanitizer::acquire(&end_[static_cast<size_t>((runs_ + 1) % 2)]);
    std::string thrown;
    try {
      body_(arguments_);
    } catch (const std::exception& e) {
      thrown = std::string("threw an exception: ") + e.what();
    }
    if (!thrown.empty()) fail(std::move(thrown), Site());
    ended(here());
    sanitizer::release(&end_[static_cast<size_t>(runs_ % 2)]);
    sanitizer::become(scheduler_fiber_);
    if (sanitizer::thread()) break;
  }
}

void Block::prepare(size_t block_index, const Options& options) {
  grid = launch_->grid;
  dim = launch_->block;
  index = {static_cast<unsigned>(block_index % grid.x), static_cast<unsigned>(block_index / grid.x % grid.y),
           static_cast<unsigned>(block_index / grid.x / grid.y)};
  count_ = alive_ = static_cast<int>(dim.x * dim.y * dim.z);
  barrier_count_ = barrier_sum_ = 0;
  failed_ = false;
  ++runs_;
  shared_.reset(launch_->shared);
  for (int i = 0; i < count_; ++i) {
    Lane& lane = lanes_[static_cast<size_t>(i)];
    const auto n = static_cast<unsigned>(i);
    lane.index = {n % dim.x, n / dim.x % dim.y, n / (dim.x * dim.y)};
    lane.state = State::fresh;
    lane.stack = nullptr;
    if (lane.copies) lane.copies->count = lane.copies->group = 0;
    if (sanitizer::thread() && !lane.fiber) lane.fiber = __tsan_create_fiber(0);
  }
  for (int w = 0; w < warps(); ++w) {
    const int lanes = lanes_of(w);
    warp_[static_cast<size_t>(w)] = {lanes == warp_size ? ~0u : (1u << lanes) - 1, 0};
  }
  const auto stream = static_cast<uint64_t>(block_index) * (max_threads / warp_size + 1);
  permute(options, stream, std::span(warp_order_.data(), static_cast<size_t>(warps())));
  for (int w = 0; w < warps(); ++w) {
    permute(options, stream + 1 + static_cast<uint64_t>(w),
            std::span(order_.data() + w * warp_size, static_cast<size_t>(lanes_of(w))),
            static_cast<int16_t>(w * warp_size));
  }
  scheduler_fiber_ = sanitizer::current_fiber();
  sanitizer::release(&start_);
}

/// Runs the lanes of a warp until none can go on; true if any ran.
bool Block::run_warp(int warp) {
  const int low = warp * warp_size, high = low + lanes_of(warp);
  auto lane_at = [this](int i) -> Lane& {
    return lanes_[static_cast<size_t>(order_[static_cast<size_t>(i)])];
  };
  bool any = false;
  if (lane_at(low).state == State::fresh) {
    next_ = low;
    next_end_ = high;
    while (next_ < next_end_ && !failed_) resume(*take_stack(lane_at(next_)), nullptr);
    any = true;
  }
  for (bool again = true; again && !failed_;) {
    again = false;
    for (int i = low; i < high && !failed_; ++i) {
      Lane& lane = lane_at(i);
      if (lane.state != State::ready) continue;
      resume(*lane.stack, &lane);
      any = again = true;
    }
  }
  return any;
}

void Block::run(const Launch& launch, size_t block_index, const Options& options, void (*body)(void*),
                void* arguments) {
  launch_ = &launch;
  body_ = body;
  arguments_ = arguments;
  active = this;
  current_block = this;
  prepare(block_index, options);
  while (alive_ > 0 && !failed_) {
    bool any = false;
    for (int w = 0; w < warps() && !failed_; ++w) any |= run_warp(warp_order_[static_cast<size_t>(w)]);
    if (!any && !failed_) {
      failed_ = true;
      failure_ = deadlock();
    }
  }
  active = nullptr;
  current_block = nullptr;
  current_thread = nullptr;
  if (failed_) {
    abandon();
    throw KernelError(failure_);
  }
}

void Block::join() {
  for (char& end : end_) sanitizer::acquire(&end);
}

/// After a failure: nothing that is suspended will go on.
void Block::abandon() {
  sanitizer::acquire(&failed_);
  for (char& passed : barrier_passed_) sanitizer::acquire(&passed);
  for (Lane& lane : lanes_) sanitizer::acquire(&lane.mask);
  idle_.clear();
  for (Stack& stack : stacks_) {
    idle_.push_back(&stack);
    sanitizer::unpoison(stack.low, stack.bytes);
  }
  for (Lane& lane : lanes_) {
    if (lane.fiber) __tsan_destroy_fiber(lane.fiber);
    lane.fiber = nullptr;
  }
}

// ---- what goes wrong
// ---------------------------------------------------------------------------------------

std::string Block::place(const Lane* lane, const Site& at) const {
  std::string text = fmt::format("kernel {}, block ({}, {}, {})", launch_->kernel, index.x, index.y, index.z);
  if (lane) text += fmt::format(", thread ({}, {}, {})", lane->index.x, lane->index.y, lane->index.z);
  if (at.line() > 0) text += fmt::format(", {}:{}", at.file_name(), at.line());
  return text + ": ";
}

void Block::fail(std::string text, const Site& at) {
  failed_ = true;
  failure_ = place(&here(), at) + text;
  std::string().swap(text);  // no destructor of this stack will run
  sanitizer::release(&failed_);
  suspend();
  std::abort();
}

std::string Block::deadlock() const {
  std::string text = place(nullptr, Site()) + fmt::format("deadlock; {} threads wait for others:", alive_);
  const Lane* last = nullptr;
  constexpr size_t long_enough = 1000;
  for (int i = 0; i < count_ && text.size() < long_enough; ++i) {
    const Lane& lane = lanes_[static_cast<size_t>(i)];
    if (lane.state == State::done) continue;
    const bool alike = last && last->site.line() == lane.site.line() && last->state == lane.state &&
                       (lane.state == State::in_barrier || last->mask == lane.mask);
    if (!alike) {
      text += fmt::format(" from ({}, {}, {}) on in {} at {}:{}", lane.index.x, lane.index.y, lane.index.z,
                          lane.state == State::in_barrier ? "__syncthreads" : lane.op->name,
                          lane.site.file_name(), lane.site.line());
      if (lane.state == State::in_warp_op) text += fmt::format(" with mask {:08x}", lane.mask);
      text += ";";
    }
    last = &lane;
  }
  return text;
}

// ---- barrier
// -----------------------------------------------------------------------------------------------

void Block::open_barrier() {
  barrier_result_ = barrier_sum_;
  barrier_sum_ = barrier_count_ = 0;
  ++barriers_;
  for (int i = 0; i < count_; ++i) {
    Lane& lane = lanes_[static_cast<size_t>(i)];
    if (lane.state == State::in_barrier) lane.state = State::ready;
  }
}

[[gnu::always_inline]] inline int Block::barrier(int value, const Site& at) {
  Lane& me = here();
  if (barrier_count_ > 0 && !same(barrier_site_, at)) {
    fail(fmt::format("divergent __syncthreads: other threads of the block are in the one of {}:{}",
                     barrier_site_.file_name(), barrier_site_.line()),
         at);
  }
  barrier_site_ = me.site = at;
  barrier_sum_ += value;
  // Two objects in turn: a thread that wakes late must not see arrivals at the next barrier.
  char* passed = &barrier_passed_[static_cast<size_t>(barriers_ % 2)];
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

// ---- warp operations
// ---------------------------------------------------------------------------------------

/// Carries out the operation that `arrived` waits in when no lane of its mask is missing.
bool Block::try_complete(const Lane& arrived) {
  const int w = arrived.number / warp_size;
  Warp& warp = warp_[static_cast<size_t>(w)];
  const unsigned mask = arrived.mask;
  if (mask & warp.alive & ~warp.waiting) return false;
  void* payloads[warp_size] = {};
  unsigned present = 0;
  for (int i = 0; i < lanes_of(w); ++i) {
    if (!(mask >> i & 1)) continue;
    Lane& lane = lanes_[static_cast<size_t>(w * warp_size + i)];
    if (lane.state == State::done) continue;  // threads that have exited drop out, as on the hardware
    if (lane.state != State::in_warp_op || lane.mask != mask) return false;
    if (lane.op != arrived.op) {
      fail(fmt::format("lanes of mask {:08x} are in different operations: {} and, at {}:{}, {}", mask,
                       arrived.op->name, lane.site.file_name(), lane.site.line(), lane.op->name),
           arrived.site);
    }
    present |= 1u << i;
    payloads[i] = lane.payload;
    sanitizer::acquire(&lane.mask);
  }
  if (arrived.op->whole_warp && present != ~0u) {
    fail(fmt::format("{} with the lanes {:08x} only; it needs a whole warp", arrived.op->name, present),
         arrived.site);
  }
  arrived.op->apply(payloads, present);
  Lane& me = here();
  char* completed = &me.completed[static_cast<size_t>(++me.completions % 2)];
  sanitizer::release(completed);
  warp.waiting &= ~present;
  for (int i = 0; i < lanes_of(w); ++i) {
    if (!(present >> i & 1)) continue;
    Lane& lane = lanes_[static_cast<size_t>(w * warp_size + i)];
    lane.resume_after = completed;
    lane.state = State::ready;
  }
  return true;
}

[[gnu::always_inline]] inline void Block::collective(unsigned mask, const WarpOp& op, void* payload,
                                                     const Site& at) {
  Lane& me = here();
  if (!(mask >> me.lane & 1))
    fail(fmt::format("{}: lane {} is not in its mask {:08x}", op.name, me.lane, mask), at);
  me.mask = mask;
  me.op = &op;
  me.payload = payload;
  me.site = at;
  me.state = State::in_warp_op;
  warp_[static_cast<size_t>(me.number / warp_size)].waiting |= 1u << me.lane;
  sanitizer::release(&me.mask);
  if (!try_complete(me)) suspend();
  sanitizer::acquire(me.resume_after);
}

/// A thread has returned from the kernel: others may have waited for it.
void Block::ended(Lane& lane) {
  lane.state = State::done;
  const int w = lane.number / warp_size;
  Warp& warp = warp_[static_cast<size_t>(w)];
  warp.alive &= ~(1u << lane.lane);
  if (--alive_ == barrier_count_ && barrier_count_ > 0) open_barrier();
  for (int i = 0; i < lanes_of(w) && warp.waiting != 0 && !failed_; ++i) {
    const Lane& other = lanes_[static_cast<size_t>(w * warp_size + i)];
    if (other.state == State::in_warp_op && (other.mask >> lane.lane & 1)) try_complete(other);
  }
}

AsyncCopies& Block::async_copies() {
  Lane& me = here();
  if (!me.copies) me.copies = new AsyncCopies;
  return *me.copies;
}

void* Block::shared_array(const void* key, size_t bytes, size_t align, const Site& at) {
  std::string refusal;
  std::byte* data = shared_.array(key, bytes, align, refusal);
  if (!data) fail(std::move(refusal), at);
  return data;
}

// ---- for kernels
// -------------------------------------------------------------------------------------------

namespace {
Block& running_block() {
  if (!active) throw KernelError("a device function was called outside a kernel");
  return *active;
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

void fence() {
  static char object;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  sanitizer::acquire(&object);
  sanitizer::release(&object);
}

}  // namespace nrl::sim
