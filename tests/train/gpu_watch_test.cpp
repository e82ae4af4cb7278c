#include "apps/train/launch/gpu_watch.h"

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

#include "apps/train/launch/faults.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::train;

namespace {

class Told {
 public:
  GpuWatch::Found take() {
    return [this](const std::string& text, bool fatal) {
      const std::lock_guard lock(mutex_);
      all_.emplace_back(text, fatal);
      changed_.notify_all();
    };
  }
  /// The first `count`, or fewer after 10 seconds.
  std::vector<std::pair<std::string, bool>> first(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(10), [&] { return all_.size() >= count; });
    return all_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::pair<std::string, bool>> all_;
};

using List = std::vector<std::pair<std::string, bool>>;

}  // namespace

TEST_CASE("errors that the driver tells are found, the fatal ones as such", "[gpu_watch]") {
  Told told;
  ::setenv("FAKE_NVML_XID", "79", 1);
  GpuWatch watch("GPU-fake", told.take(), FAKE_NVML);
  CHECK(told.first(1) == List{{"GPU GPU-fake: Xid 79 (it has fallen off the bus): restart the node", true}});
  watch.raise(63);
  CHECK(
      told.first(2).back() ==
      std::pair(std::string("GPU GPU-fake: Xid 63 (a row of memory is remapped at the next reset)"), false));
}

TEST_CASE("without the driver's library only planted errors are found", "[gpu_watch]") {
  Told told;
  {
    GpuWatch watch("GPU-none", told.take(), "libnone.so");
    watch.raise(31);
    CHECK(told.first(1) ==
          List{{"GPU GPU-none: Xid 31 (a kernel used an address that is not its own): start the "
                "run again",
                false}});
  }
  CHECK(told.first(1).size() == 1);
}
