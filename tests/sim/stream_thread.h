#pragma once
// A stream as the thread sanitizer sees it: a thread of its own, with its own stack. Without that sanitizer
// nothing but plain calls.

#include <cstddef>

namespace nrl::sim {

class StreamThread {
 public:
  StreamThread();
  ~StreamThread();
  StreamThread(const StreamThread&) = delete;
  StreamThread& operator=(const StreamThread&) = delete;

  /// Calls function(argument), which must not throw, as this thread. No order between it and the caller
  /// follows from the call.
  void run(void (*function)(void*), void* argument);

 private:
  static void enter();

  void* fiber_ = nullptr;
  std::byte* stack_ = nullptr;
  void (*function_)(void*) = nullptr;
  void* argument_ = nullptr;
  void *context_ = nullptr, *caller_ = nullptr;
};

}  // namespace nrl::sim
