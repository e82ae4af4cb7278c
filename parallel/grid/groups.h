#pragma once
// The communicators of a run, created once at start.

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/device/runtime.h"
#include "parallel/comm/channel.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/device_options.h"
#include "parallel/comm/ledger.h"
#include "parallel/grid/grid.h"

namespace nrl::parallel {

/// How to create groups for device memory.
struct DeviceGroups {
  comm::DeviceCommKind kind = comm::DeviceCommKind::staged;
  device::Runtime* runtime = nullptr;
  comm::DeviceCommOptions options = {};
  /// For tests: instead of make_device_communicator().
  std::function<std::unique_ptr<comm::Communicator>(comm::Communicator& host)> make = {};
};

/// The ends that this rank has of the channels of a group.
struct GroupChannels {
  GroupId group;
  std::vector<comm::ChannelEnd> ends;
};

/// A requested group, and the one whose communicator it uses: itself, or the first with the same members.
struct GroupAlias {
  GroupId id, made;
};
/// In the order in which groups are created, without duplicates, from the view of the grid's rank; groups
/// without this rank are left out.
std::vector<GroupAlias> group_aliases(const ProcessGrid& grid, std::span<const GroupId> ids);

/// All groups and channels that a plan uses, for host memory and, with a device, for device memory. Groups of
/// equal members and lane share one communicator, named after the first of them. They are made before a rank
/// allocates the memory of its plan: a rank that is out of memory goes to the agreement on that error, where
/// no other may be held up by a group or channel that is still to be made.
///
/// With nccl and group::all, every other group and channel is split from that one (one connection to the
/// network and one search of the topology for all), groups that only have channels get no communicator of
/// their own, and every group has run each kind of collective before the constructor returns: NCCL connects
/// and allocates at the first operation, so that the device's free memory is what is left for the plan.
///
///   const ProcessGrid grid(sizes, world.size(), world.rank());
///   const std::array used = {group::dp_cp, group::pp};
///   const Groups groups(grid, world.comm(), used, DeviceGroups{kind, &runtime});
///   groups[group::dp_cp].all_reduce_async(gradients, comm::Reduce::sum, stream);
class Groups {
 public:
  /// Collective over `world`, which must be the communicator of the grid's ranks; it and the device's runtime
  /// must outlive this object. All ranks must request the same set of groups, in any order (else
  /// Exit::internal on all of them): they are created in one canonical order, host groups before device
  /// groups before channels. `channels`: for the model's memory, of requested groups whose members are all
  /// ranks (no GroupId::ends); the same groups on all ranks. What fails on one rank fails on all with the
  /// same error.
  Groups(const ProcessGrid& grid, comm::Communicator& world, std::span<const GroupId> ids,
         const std::optional<DeviceGroups>& device = std::nullopt,
         std::span<const GroupChannels> channels = {});
  /// For a dry run of the grid's rank: the groups and channels execute nothing. `ledger` counts their
  /// operations under the indices of ids() and must outlive this object. Not collective.
  Groups(const ProcessGrid& grid, std::span<const GroupId> ids, std::span<const GroupChannels> channels,
         comm::Ledger& ledger);
  /// For one rank of the grid alone: the groups have their sizes, but no other rank exists (make_mute()).
  /// `device`: for its memory; null: for the host's. It must outlive this. Not collective.
  Groups(const ProcessGrid& grid, std::span<const GroupId> ids, std::span<const GroupChannels> channels,
         device::Runtime* device);
  /// Collective.
  ~Groups();
  Groups(const Groups&) = delete;
  Groups& operator=(const Groups&) = delete;

  /// The group for the model's memory: device memory if there is a device, else host memory. The group must
  /// have been requested and collective(), and this rank must be a member (else an internal error).
  comm::Communicator& operator[](const GroupId& id) const;
  /// False for a group that only has channels and no communicator of its own.
  bool collective(const GroupId& id) const;
  /// The channels that were requested for a group (else an internal error).
  comm::Channels& channels(const GroupId& id) const;
  /// The same ranks for host memory.
  comm::Communicator& host(const GroupId& id) const;
  /// True when this rank is a member; only groups with GroupId::ends have non-members.
  bool member(const GroupId& id) const;
  /// Where the memory that the groups communicate is allocated for register_memory() to be of use.
  const device::Allocator& allocator() const { return allocator_; }
  /// True if the device's options ask for register_memory().
  bool registers() const { return registers_; }
  /// Registers this rank's memory with the groups in which it is laid out alike on all ranks (`layout`: equal
  /// hashes), and with the channels; nothing unless the device's options ask for it. Collective. The
  /// registrations must be destroyed before the memory and the groups.
  std::vector<std::unique_ptr<comm::Registration>> register_memory(std::span<std::byte> memory,
                                                                   uint64_t layout) const;
  /// While they are dry, no group or channel executes anything (Communicator::set_dry()).
  void set_dry(bool dry) const;
  /// The groups that name the communicators, in creation order.
  std::vector<GroupId> ids() const;
  /// Labels of the communicators, in creation order.
  std::vector<std::string> labels() const;
  /// Throws the first asynchronous error of any group (Communicator::check()).
  void check() const;

 private:
  struct Made {
    GroupId id;                // the first of them
    std::vector<int> members;  // empty: this rank is none of them
    int first;                 // rank of the group, -1: of none
    bool channels_only;        // by all ids
    /// `host` is null if `device` has its own.
    std::unique_ptr<comm::Communicator> host = {}, device = {};
    comm::Communicator& on_host() const { return host ? *host : device->host(); }
  };
  struct Entry {
    GroupId id;
    size_t made;  // index into made_
  };
  struct MadeChannels {
    GroupId group;
    std::unique_ptr<comm::Channels> channels;
  };
  /// Fills entries_ and made_, without communicators.
  void list(const ProcessGrid& grid, const std::vector<GroupId>& ids,
            std::span<const GroupChannels> channels);
  /// Fills them for a rank without others: `make(made, rank, number)` for each group with this rank.
  template <class Make>
  void make_alone(const ProcessGrid& grid, std::span<const GroupId> ids,
                  std::span<const GroupChannels> channels, const Make& make);
  void make_host(comm::Communicator& world, Made& m);
  void make_with_device(comm::Communicator& world, const DeviceGroups& device,
                        std::span<const GroupChannels> channels);
  /// For the kernels of all groups and channels of any rank; the same on all. Collective.
  int agree_on_ctas(comm::Communicator& world, const DeviceGroups& device,
                    std::span<const GroupChannels> channels) const;
  const Entry& find(const GroupId& id) const;
  const Made& made(const GroupId& id) const;

  std::vector<Entry> entries_;
  std::vector<Made> made_;                    // the same on all ranks
  comm::Communicator* split_from_ = nullptr;  // the device group of all ranks, if others are split from it
  std::vector<MadeChannels> channels_;
  device::Allocator allocator_;
  bool registers_ = false;
};

/// While it lives, nothing is communicated in `groups`, unless that is null.
class DryGroups {
 public:
  explicit DryGroups(const Groups* groups) : groups_(groups) {
    if (groups) groups->set_dry(true);
  }
  ~DryGroups() {
    if (groups_) groups_->set_dry(false);
  }
  DryGroups(const DryGroups&) = delete;
  DryGroups& operator=(const DryGroups&) = delete;

 private:
  const Groups* const groups_;
};

}  // namespace nrl::parallel
