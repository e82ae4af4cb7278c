// Not instrumented by the thread sanitizer, whose threads change in the middle of these functions.

#include "tests/sim/stream_thread.h"

#include <cstdlib>

#include "tests/sim/engine/sanitizers.h"
#include "tests/sim/engine/shared_memory.h"
#include "tests/sim/engine/stacks.h"

namespace nrl::sim {
namespace {

constexpr size_t stack_bytes = size_t{1} << 20;

constinit thread_local StreamThread* entering = nullptr;

}  // namespace

StreamThread::StreamThread() {
  if (!sanitizer::thread()) return;
  fiber_ = __tsan_create_fiber(0);
  stack_ = map_pages(stack_bytes);
}

StreamThread::~StreamThread() {
  if (!fiber_) return;
  __tsan_destroy_fiber(fiber_);
  unmap_pages(stack_, stack_bytes);
}

void StreamThread::run(void (*function)(void*), void* argument) {
  if (!fiber_) {
    function(argument);
    return;
  }
  function_ = function;
  argument_ = argument;
  context_ = make_context(stack_, stack_bytes, &StreamThread::enter);
  entering = this;
  void* const host = sanitizer::current_fiber();
  sanitizer::become(fiber_);
  nrl_switch_context(&caller_, context_);
  sanitizer::become(host);
}

void StreamThread::enter() {
  StreamThread& self = *entering;
  self.function_(self.argument_);
  nrl_switch_context(&self.context_, self.caller_);
  std::abort();
}

}  // namespace nrl::sim
