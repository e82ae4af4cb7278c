#include <cstdint>

#include "tests/sim/engine/stacks.h"

// The state of a suspended flow is its stack pointer: below it lie the six registers that a function must
// keep, then the address to resume at: a jump, because a return would be predicted to the wrong stack. x87
// and SSE control words are the same everywhere here.
__asm__(
    ".text\n"
    ".p2align 4\n"
    ".globl nrl_switch_context\n"
    ".hidden nrl_switch_context\n"
    ".type nrl_switch_context, @function\n"
    "nrl_switch_context:\n"
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
    "  pop %rcx\n"
    "  jmp *%rcx\n"
    ".size nrl_switch_context, . - nrl_switch_context\n");

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

}  // namespace nrl::sim
