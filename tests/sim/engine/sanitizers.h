#pragma once
// Calls by which the fiber engine informs the address and thread sanitizers. The functions are weak: one
// compiled engine serves programs with and without a sanitizer and detects at run time which is linked. The
// engine itself is never instrumented; kernels are.

#include <cstddef>

extern "C" {
// <sanitizer/asan_interface.h>, <sanitizer/common_interface_defs.h>
[[gnu::weak]] void __asan_poison_memory_region(const volatile void* p, size_t bytes);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void* p, size_t bytes);
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
// <sanitizer/tsan_interface.h>
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_destroy_fiber(void* fiber);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_acquire(void* object);
[[gnu::weak]] void __tsan_release(void* object);
}

namespace nrl::sim::sanitizer {

inline bool address() {
  return __asan_poison_memory_region != nullptr;
}
inline bool thread() {
  return __tsan_create_fiber != nullptr;
}

inline void poison(const void* p, size_t bytes) {
  if (address() && bytes > 0) __asan_poison_memory_region(p, bytes);
}
inline void unpoison(const void* p, size_t bytes) {
  if (address() && bytes > 0) __asan_unpoison_memory_region(p, bytes);
}

/// Everything done before release(object) happens before what follows a later acquire(object).
inline void acquire(void* object) {
  if (thread()) __tsan_acquire(object);
}
inline void release(void* object) {
  if (thread()) __tsan_release(object);
}

inline void* current_fiber() {
  return thread() ? __tsan_get_current_fiber() : nullptr;
}
/// Later accesses are the fiber's. No order between the two fibers follows from the switch.
inline void become(void* fiber) {
  constexpr unsigned no_sync = 1;
  if (thread()) __tsan_switch_to_fiber(fiber, no_sync);
}

}  // namespace nrl::sim::sanitizer
