// The backends that need no device: host memory, the same under the weakest order rule, and staged memory of
// simulated devices that defer work and run it in different orders.
#include "parallel/comm/recording/recording.h"
#include "parallel/comm/world/make_device.h"
#include "tests/comm/backends.h"
#include "tests/comm/fifo_comm.h"
#include "tests/sim/sim.h"

using namespace nrl;
using namespace nrl::comm;

std::vector<std::unique_ptr<Backend>>& backends() {
  static std::vector<std::unique_ptr<Backend>> all;
  return all;
}

bool open_backends(World& world, std::string&) {
  backends().push_back(std::make_unique<Backend>("host", world.comm()));
  if (world.size() > 1) {
    auto inner = world.comm().split(0, world.rank(), "fifo");
    backends().push_back(
        std::make_unique<Backend>("host, one FIFO", std::make_unique<FifoCommunicator>(std::move(inner))));
    backends().back()->strict = false;
  }
  const auto add = [&](const std::string& name, uint64_t seed, bool deferred, bool recorded) {
    device::SimOptions options;
    options.seed = seed + static_cast<uint64_t>(world.rank()) * 1000;
    options.deferred = deferred;
    std::shared_ptr<device::Runtime> runtime = device::open_sim(options);
    DeviceCommOptions small;
    small.staged_slot_bytes = 1 << 17;  // so that vectors take several chunks
    auto comm = make_device_communicator(DeviceCommKind::staged, world.comm(), *runtime, small);
    if (recorded) comm = make_recording(std::move(comm), std::make_shared<Recorder>(), RecordingMode::check);
    backends().push_back(std::make_unique<Backend>(name, std::move(comm), std::move(runtime)));
  };
  add("staged, seed 1", 1, true, false);
  add("staged, seed 2", 2, true, false);
  add("staged, at once", 3, false, false);
  add("staged, recorded", 4, true, true);
  backends().back()->blocks = true;
  return true;
}
