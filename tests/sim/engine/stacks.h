#pragma once
// Stacks of fibers and switching between them. context_x86_64.cpp saves the registers that the System V ABI
// says a function keeps; context_ucontext.cpp is for every other processor.

#include <cstddef>
#include <vector>

namespace nrl::sim {

/// A flow of control that will start in `entry` on the given stack. `entry` must not return. The state lives
/// on that stack.
void* make_context(void* stack, size_t bytes, void (*entry)());

/// Leaves the running flow, whose state is put into *from, and resumes `to`. Returns when *from is
/// switched back to.
extern "C" void nrl_switch_context(void** from, void* to);

/// A stack with what is needed to switch to and from it.
struct Stack {
  std::byte* low = nullptr;  ///< lowest address; null: the OS thread's own stack
  size_t bytes = 0;
  void* context = nullptr;     ///< where it resumes
  void* fake_stack = nullptr;  ///< the address sanitizer's
};

/// The stacks of one block's fibers. Owns their memory.
class StackPool {
 public:
  StackPool();
  ~StackPool();
  StackPool(const StackPool&) = delete;
  StackPool& operator=(const StackPool&) = delete;

  /// A stack on which `entry` will start. Under the thread sanitizer always the same one for a lane.
  Stack* take(int lane, void (*entry)());
  /// Nothing runs on `stack` any more.
  void give_back(Stack* stack) { idle_.push_back(stack); }
  /// Nothing will run any more on any stack.
  void give_back_all();

 private:
  Stack* new_stack();

  std::vector<Stack> stacks_;
  std::vector<Stack*> idle_;
};

}  // namespace nrl::sim
