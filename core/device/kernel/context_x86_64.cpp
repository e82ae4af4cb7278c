#include <cstdint>

#include "core/device/kernel/context.h"

// The state of a suspended flow is its stack pointer: below it lie the six registers that a function must
// keep, then the address to go on at. x87 and SSE control words are the same everywhere here.
extern "C" void nrl_sim_switch(void** from, void* to);
__asm__(
    ".text\n"
    ".p2align 4\n"
    ".globl nrl_sim_switch\n"
    ".hidden nrl_sim_switch\n"
    ".type nrl_sim_switch, @function\n"
    "nrl_sim_switch:\n"
    "  push %rbp\n"
    "  push %rbx\n"
    "  push %r12\n"
    "  push %r13\n"
    "  push %r14\n"
    "  push %r15\n"
    "  mov %rsp, (%rdi)\n"
    "  mov %rsi, %rsp\n"
    "  pop %r15\n"
    "  pop %r14\n"
    "  pop %r13\n"
    "  pop %r12\n"
    "  pop %rbx\n"
    "  pop %rbp\n"
    "  ret\n"
    ".size nrl_sim_switch, . - nrl_sim_switch\n");

namespace nrl::sim {

void* make_context(void* stack, size_t bytes, void (*entry)()) {
  constexpr size_t kept_registers = 6;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15};
  // A function starts with the stack pointer 8 below a multiple of 16, where its caller's address would be.
  auto* top = reinterpret_cast<uintptr_t*>(end);
  *--top = 0;
  *--top = reinterpret_cast<uintptr_t>(entry);
  for (size_t i = 0; i < kept_registers; ++i) *--top = 0;
  return top;
}

void switch_context(void** from, void* to) {
  nrl_sim_switch(from, to);
}

}  // namespace nrl::sim
