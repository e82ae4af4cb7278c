#include "tests/sim/engine/stacks.h"

#include "tests/sim/engine/engine.h"
#include "tests/sim/engine/sanitizers.h"
#include "tests/sim/engine/shared_memory.h"

namespace nrl::sim {
namespace {

// Instrumented code needs more stack: its arrays have guards.
size_t stack_bytes() {
  return (sanitizer::address() ? size_t{256} : size_t{64}) * 1024;
}

}  // namespace

StackPool::StackPool() {
  stacks_.reserve(max_threads);
  idle_.reserve(max_threads);
}

StackPool::~StackPool() {
  for (Stack& stack : stacks_) unmap_pages(stack.low, stack.bytes);
}

Stack* StackPool::new_stack() {
  Stack& stack = stacks_.emplace_back();
  stack.bytes = stack_bytes();
  stack.low = map_pages(stack.bytes);
  return &stack;
}

Stack* StackPool::take(int lane, void (*entry)()) {
  Stack* stack = nullptr;
  if (sanitizer::thread()) {
    while (stacks_.size() <= static_cast<size_t>(lane)) new_stack();
    stack = &stacks_[lane];
  } else if (idle_.empty()) {
    stack = new_stack();
  } else {
    stack = idle_.back();
    idle_.pop_back();
  }
  // Tops are staggered by cache lines: at equal offsets all stacks would compete for the same cache sets.
  const auto color = static_cast<size_t>(stack - stacks_.data());
  stack->context = make_context(stack->low, stack->bytes - color * 11 % 64 * 64, entry);
  stack->fake_stack = nullptr;
  return stack;
}

void StackPool::give_back_all() {
  idle_.clear();
  for (Stack& stack : stacks_) {
    idle_.push_back(&stack);
    sanitizer::unpoison(stack.low, stack.bytes);
  }
}

}  // namespace nrl::sim
