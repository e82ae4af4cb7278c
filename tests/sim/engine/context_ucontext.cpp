#include <memory>
#include <new>

#include <ucontext.h>

#include "tests/sim/engine/stacks.h"

namespace nrl::sim {

void* make_context(void* stack, size_t bytes, void (*entry)()) {
  void* at = static_cast<char*>(stack) + bytes - sizeof(ucontext_t);
  size_t space = sizeof(ucontext_t);
  at = static_cast<char*>(at) - alignof(ucontext_t);
  space += alignof(ucontext_t);
  auto* context = new (std::align(alignof(ucontext_t), sizeof(ucontext_t), at, space)) ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size =
      static_cast<size_t>(reinterpret_cast<char*>(context) - static_cast<char*>(stack));
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}

extern "C" void nrl_switch_context(void** from, void* to) {
  ucontext_t here;  // on the stack that is left, which stays unchanged until it is resumed
  *from = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}

}  // namespace nrl::sim
