#include "tests/sim/engine/block.h"

#include <cstdlib>
#include <exception>

namespace nrl::sim {

ThreadBlock::ThreadBlock() : BlockView(), lanes_(max_threads) {
  for (int i = 0; i < max_threads; ++i) {
    lanes_[i].number = i;
    lanes_[i].lane = i % warp_size;
  }
  dynamic_shared = shared_.dynamic();
}

ThreadBlock::~ThreadBlock() {
  for (Lane& lane : lanes_) {
    if (lane.fiber) __tsan_destroy_fiber(lane.fiber);
    delete lane.copies;
  }
}

void ThreadBlock::enter() {
  ThreadBlock& self = *active_block;
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

[[gnu::always_inline]] inline void ThreadBlock::resume(Stack& stack, Lane* lane) {
  current_thread = lane;
  running_ = &stack;
  finished_ = nullptr;
  if (lane) sanitizer::become(lane->fiber);
  jump(scheduler_, stack, false);
  if (finished_ && !sanitizer::thread()) stacks_.give_back(finished_);
}

// --- scheduler -----------------------------------------------------------------------------------

/// On a fiber: runs lanes that have not started until one must wait or the warp has no more.
void ThreadBlock::run_fresh_lanes() {
  while (next_ < next_end_ && !failed_) {
    Lane& lane = lanes_[order_[next_++]];
    lane.state = State::ready;
    current_thread = &lane;
    sanitizer::become(lane.fiber);
    sanitizer::acquire(&start_);
    sanitizer::acquire(&end_[(runs_ + 1) % 2]);
    std::string thrown;
    try {
      body_(arguments_);
    } catch (const std::exception& e) {
      thrown = std::string("threw an exception: ") + e.what();
    }
    if (!thrown.empty()) fail(std::move(thrown), Site());
    ended(here());
    sanitizer::release(&end_[runs_ % 2]);
    sanitizer::become(scheduler_fiber_);
    if (sanitizer::thread()) break;
  }
}

void ThreadBlock::prepare(size_t block_index, const Options& options) {
  grid = launch_->grid;
  dim = launch_->block;
  index = {static_cast<unsigned>(block_index % grid.x), static_cast<unsigned>(block_index / grid.x % grid.y),
           static_cast<unsigned>(block_index / grid.x / grid.y)};
  count_ = alive_ = static_cast<int>(dim.x * dim.y * dim.z);
  barrier_count_ = barrier_sum_ = 0;
  failed_ = false;
  beside_threads_ = options.threads > 1;
  beside_others_ = beside_threads_ || options.resident > 1;
  ++runs_;
  shared_.reset(launch_->shared);
  for (int i = 0; i < count_; ++i) {
    Lane& lane = lanes_[i];
    const auto n = static_cast<unsigned>(i);
    lane.index = {n % dim.x, n / dim.x % dim.y, n / (dim.x * dim.y)};
    lane.state = State::fresh;
    lane.stack = nullptr;
    if (lane.copies) lane.copies->count = lane.copies->group = 0;
    if (sanitizer::thread() && !lane.fiber) lane.fiber = __tsan_create_fiber(0);
  }
  for (int w = 0; w < warps(); ++w) {
    const int lanes = lanes_of(w);
    warp_[w] = {lanes == warp_size ? ~0u : (1u << lanes) - 1, 0};
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

/// Runs the lanes of a warp until none is ready; true if any ran.
bool ThreadBlock::run_warp(int warp) {
  const int low = warp * warp_size, high = low + lanes_of(warp);
  auto lane_at = [this](int i) -> Lane& { return lanes_[order_[i]]; };
  bool any = false;
  if (lane_at(low).state == State::fresh) {
    next_ = low;
    next_end_ = high;
    while (next_ < next_end_ && !failed_)
      resume(*stacks_.take(lane_at(next_).number, &ThreadBlock::enter), nullptr);
    any = moved_ = true;
  } else {
    for (int i = low; i < high && !failed_; ++i) {
      Lane& lane = lane_at(i);
      if (lane.state != State::in_block_wait) continue;
      resume(*lane.stack, &lane);
      moved_ |= lane.state != State::in_block_wait;
      any = true;
    }
  }
  for (bool again = true; again && !failed_;) {
    again = false;
    for (int i = low; i < high && !failed_; ++i) {
      Lane& lane = lane_at(i);
      if (lane.state != State::ready) continue;
      resume(*lane.stack, &lane);
      any = again = moved_ = true;
    }
  }
  return any;
}

void ThreadBlock::start(const Launch& launch, size_t block_index, const Options& options, void (*body)(void*),
                        void* arguments) {
  launch_ = &launch;
  body_ = body;
  arguments_ = arguments;
  prepare(block_index, options);
}

Progress ThreadBlock::step() {
  active_block = this;
  current_block = this;
  bool any = moved_ = false;
  for (int w = 0; w < warps() && !failed_; ++w) any |= run_warp(warp_order_[w]);
  if (!any && !failed_) {
    failed_ = true;
    failure_ = deadlock();
  }
  active_block = nullptr;
  current_block = nullptr;
  current_thread = nullptr;
  if (failed_) {
    abandon();
    throw KernelError(failure_);
  }
  return alive_ == 0 ? Progress::done : moved_ ? Progress::moved : Progress::waits;
}

void ThreadBlock::join() {
  if (alive_ > 0) abandon();
  for (char& end : end_) sanitizer::acquire(&end);
}

/// After a failure: suspended lanes will not be resumed. The caller's accesses follow theirs.
void ThreadBlock::abandon() {
  alive_ = 0;
  for (const Lane& lane : lanes_) {
    if (!lane.fiber) continue;
    sanitizer::become(lane.fiber);
    sanitizer::release(&failed_);
  }
  sanitizer::become(scheduler_fiber_);
  sanitizer::acquire(&failed_);
  stacks_.give_back_all();
  for (Lane& lane : lanes_) {
    if (lane.fiber) __tsan_destroy_fiber(lane.fiber);
    lane.fiber = nullptr;
  }
}

// --- errors --------------------------------------------------------------------------------------

std::string ThreadBlock::place(const Lane* lane, const Site& at) const {
  std::string text = fmt::format("kernel {}, block ({}, {}, {})", launch_->kernel, index.x, index.y, index.z);
  if (lane) text += fmt::format(", thread ({}, {}, {})", lane->index.x, lane->index.y, lane->index.z);
  if (at.line() > 0) text += fmt::format(", {}:{}", at.file_name(), at.line());
  return text + ": ";
}

void ThreadBlock::fail(std::string text, const Site& at) {
  failed_ = true;
  failure_ = place(&here(), at) + text;
  std::string().swap(text);  // no destructor of this stack will run
  suspend();
  std::abort();
}

std::string ThreadBlock::deadlock() const {
  std::string text = place(nullptr, Site()) + fmt::format("deadlock; {} threads wait for others:", alive_);
  const Lane* last = nullptr;
  constexpr size_t long_enough = 1000;
  for (int i = 0; i < count_ && text.size() < long_enough; ++i) {
    const Lane& lane = lanes_[i];
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

}  // namespace nrl::sim
