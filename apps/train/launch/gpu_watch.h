#pragma once
// Errors of the GPU of a rank, as its driver tells them: those after which the GPU must be reset end the run,
// with the GPU as the culprit, before a call of the device fails or hangs.

#include <functional>
#include <memory>
#include <string>

namespace nrl::train {

/// A thread that waits for errors of one device. Without the driver's library it only takes errors from
/// raise().
class GpuWatch {
 public:
  /// `found` gets the text of an error, and true if the GPU cannot be used until it is reset; on the thread.
  using Found = std::function<void(const std::string& text, bool fatal)>;
  GpuWatch(const std::string& uuid, Found found, const char* library = "libnvidia-ml.so.1");
  /// Waits for the thread for at most 2 seconds; one that hangs in the driver is left behind.
  ~GpuWatch();
  GpuWatch(const GpuWatch&) = delete;
  GpuWatch& operator=(const GpuWatch&) = delete;

  /// Like an error with this number of the device (NRL_FAULTS).
  void raise(int xid);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// Watches the device of a rank for the run: a fatal error ends it on all ranks (Kind::gpu, exit code 80), or
/// is a warning where there is one rank; others are warnings.
std::unique_ptr<GpuWatch> watch_gpu(const std::string& uuid);

}  // namespace nrl::train
