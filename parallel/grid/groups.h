#pragma once
// The communicators of a run, made once at start.

#include "core/device/runtime.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/device_options.h"
#include "parallel/grid/grid.h"

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace nrl {

/// Where groups of device memory come from.
struct DeviceGroups {
  comm::DeviceCommKind kind = comm::DeviceCommKind::staged;
  device::Runtime* runtime = nullptr;
  comm::DeviceCommOptions options = {};
};

/// All groups that a plan uses, for host memory and, with a device, for device memory. Groups of equal
/// members and lane share one communicator, named after the first of them.
///
/// Example:
///   const ProcessGrid grid(sizes, world.size(), world.rank());
///   const Groups groups(grid, world.comm(), std::array{group::dp_cp, group::pp}, DeviceGroups{kind,
///   &runtime}); groups[group::dp_cp].all_reduce_async(gradients, comm::Reduce::sum, stream);
class Groups {
 public:
  /// Collective over `world`, which must be the communicator of the grid's ranks and outlive this object, as
  /// the device's runtime must. All ranks must ask for the same set of groups, in any order (else
  /// Exit::internal on all of them): they are made in one canonical order, host groups before device groups.
  /// A group that fails on one rank fails on all with the same error.
  Groups(const ProcessGrid& grid, comm::Communicator& world, std::span<const GroupId> ids,
         const std::optional<DeviceGroups>& device = std::nullopt);
  /// Collective.
  ~Groups();
  Groups(const Groups&) = delete;
  Groups& operator=(const Groups&) = delete;

  /// The group for the memory that the model lies in: device memory where there is a device, else host
  /// memory. Asking for a group that was not made, or that this rank is no member of, is an internal error.
  comm::Communicator& operator[](const GroupId& id) const;
  /// The same ranks for host memory.
  comm::Communicator& host(const GroupId& id) const;
  /// True when this rank is a member; only groups with GroupId::ends have ranks that are not.
  bool member(const GroupId& id) const;
  /// Labels of the communicators, in the order they were made.
  std::vector<std::string> labels() const;
  /// Throws the first error that came up in the background in any group (Communicator::check()).
  void check() const;

 private:
  struct Made {
    std::vector<int> members;
    int lane;
    std::unique_ptr<comm::Communicator> host, device;
  };
  struct Entry {
    GroupId id;
    int made;  // index into made_; -1: no member
  };
  const Entry& find(const GroupId& id) const;
  const Made& made(const GroupId& id) const;

  std::vector<Entry> entries_;
  std::vector<Made> made_;
};

}  // namespace nrl
