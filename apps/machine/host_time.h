#pragma once
// The time of work between a device and its host: copies, and the update of optimizer state there.

#include "apps/machine/device_models.h"
#include "apps/machine/fabric.h"
#include "memory/host_copies.h"

namespace nrl::machine {

constexpr Link link_of(memory::HostWork work) {
  return work == memory::HostWork::to_host     ? Link::to_host
         : work == memory::HostWork::from_host ? Link::from_host
                                               : Link::host;
}

/// Seconds of work alone on its link.
constexpr double host_seconds(const DeviceModel& device, memory::HostWork work, double bytes) {
  const bool copies = work != memory::HostWork::update;
  return device.host.latency + bytes / (copies ? device.host.bandwidth : device.host_update);
}

}  // namespace nrl::machine
