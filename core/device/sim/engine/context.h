#pragma once
// Switching between stacks. context_x86_64.cpp saves the registers that the System V ABI says a function
// keeps; context_ucontext.cpp is for every other processor.

#include <cstddef>

namespace nrl::sim {

/// A flow of control that will start in `entry` on the given stack. `entry` must not return. The state lives
/// on that stack.
void* make_context(void* stack, size_t bytes, void (*entry)());

/// Leaves the running flow, whose state is put into *from, and goes on with `to`. Returns when somebody
/// switches back to *from.
extern "C" void nrl_switch_context(void** from, void* to);

}  // namespace nrl::sim
