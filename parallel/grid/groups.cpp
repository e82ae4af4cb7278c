#include "parallel/grid/groups.h"

#include <algorithm>

#include "core/base/error.h"
#include "parallel/comm/agreement.h"
#include "parallel/comm/world/make_device.h"

namespace nrl::parallel {

namespace {

/// Sorted, without duplicates.
std::vector<GroupId> canonical(std::span<const GroupId> ids) {
  std::vector<GroupId> out(ids.begin(), ids.end());
  std::sort(out.begin(), out.end(), canonical_less);
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

void require_same_groups(comm::Communicator& world, const std::vector<GroupId>& ids) {
  std::string own;
  for (const GroupId& id : ids) own += (own.empty() ? "" : ", ") + name_of(id);
  const std::vector<std::string> all = world.gather_texts(own);
  for (size_t r = 1; r < all.size(); ++r)
    if (all[r] != all[0])
      fail(Exit::internal, "ranks request different groups: rank 0: {}; rank {}: {}", all[0], r, all[r]);
}

}  // namespace

std::vector<GroupAlias> group_aliases(const ProcessGrid& grid, std::span<const GroupId> ids) {
  std::vector<GroupAlias> out;
  for (const GroupId& id : canonical(ids)) {
    const std::vector<int> members = grid.members(id);
    if (members.empty()) continue;
    const auto same = std::find_if(out.begin(), out.end(), [&](const GroupAlias& a) {
      return a.made.lane == id.lane && grid.members(a.made) == members;
    });
    out.push_back({id, same == out.end() ? id : same->made});
  }
  return out;
}

Groups::Groups(const ProcessGrid& grid, comm::Communicator& world, std::span<const GroupId> ids,
               const std::optional<DeviceGroups>& device, std::span<const GroupChannels> channels) {
  NRL_CHECK(world.size() == grid.ranks() && world.rank() == grid.rank(),
            "{} does not match the grid of rank {} of {}", world.label(), grid.rank(), grid.ranks());
  const std::vector<GroupId> all = canonical(ids);
  require_same_groups(world, all);
  // Groups are created by their members only. One order on all ranks excludes deadlock.
  for (const GroupId& id : all) {
    std::vector<int> members = grid.members(id);
    if (members.empty()) {
      entries_.push_back({id, -1});
      continue;
    }
    const auto same = std::find_if(made_.begin(), made_.end(),
                                   [&](const Made& m) { return m.members == members && m.lane == id.lane; });
    entries_.push_back({id, static_cast<int>(same - made_.begin())});
    if (same != made_.end()) continue;
    auto host = world.subgroup(members, name_of(id));
    made_.push_back({std::move(members), id.lane, std::move(host), nullptr});
  }
  if (device) {
    comm::DeviceCommOptions options = device->options;
    options.nccl_max_ctas = agree_on_ctas(world, *device, channels);
    for (const Entry& entry : entries_)
      comm::run_on_all(world, [&] {
        if (entry.made < 0) return;
        Made& m = made_[static_cast<size_t>(entry.made)];
        if (m.device) return;
        m.device = comm::make_device_communicator(device->kind, *m.host, *device->runtime, options);
      });
  }
  for (const GroupChannels& c : channels)
    comm::run_on_all(world, [&] {
      channels_.push_back({c.group, std::make_unique<comm::Channels>((*this)[c.group], c.ends)});
    });
}

int Groups::agree_on_ctas(comm::Communicator& world, const DeviceGroups& device,
                          std::span<const GroupChannels> channels) const {
  if (device.kind != comm::DeviceCommKind::nccl || device.options.nccl_max_ctas > 0)
    return device.options.nccl_max_ctas;
  int32_t kernels = 0, multiprocessors = device.runtime->properties().multiprocessors;
  for (const Made& m : made_) kernels += m.members.size() > 1;
  for (const GroupChannels& c : channels) kernels += static_cast<int32_t>(c.ends.size());
  world.all_reduce(std::span(&kernels, 1), comm::Reduce::max);
  world.all_reduce(std::span(&multiprocessors, 1), comm::Reduce::min);
  return comm::nccl_ctas(multiprocessors, std::max(kernels, 1));
}

Groups::~Groups() {
  // In creation order, which is the same on all members; channels use the groups.
  for (MadeChannels& c : channels_) c.channels.reset();
  for (Made& m : made_) {
    m.device.reset();
    m.host.reset();
  }
}

const Groups::Entry& Groups::find(const GroupId& id) const {
  const auto at = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.id == id; });
  NRL_CHECK(at != entries_.end(), "group {} was not requested at start", name_of(id));
  return *at;
}

const Groups::Made& Groups::made(const GroupId& id) const {
  const int at = find(id).made;
  NRL_CHECK(at >= 0, "this rank is not a member of group {}", name_of(id));
  return made_[static_cast<size_t>(at)];
}

comm::Communicator& Groups::operator[](const GroupId& id) const {
  const Made& m = made(id);
  return m.device ? *m.device : *m.host;
}

comm::Channels& Groups::channels(const GroupId& id) const {
  const auto at =
      std::find_if(channels_.begin(), channels_.end(), [&](const MadeChannels& c) { return c.group == id; });
  NRL_CHECK(at != channels_.end(), "channels of group {} were not requested at start", name_of(id));
  return *at->channels;
}

comm::Communicator& Groups::host(const GroupId& id) const {
  return *made(id).host;
}

bool Groups::member(const GroupId& id) const {
  return find(id).made >= 0;
}

std::vector<std::string> Groups::labels() const {
  std::vector<std::string> out;
  for (const Made& m : made_) out.push_back(m.host->label());
  return out;
}

void Groups::check() const {
  for (const Made& m : made_) {
    m.host->check();
    if (m.device) m.device->check();
  }
}

}  // namespace nrl::parallel
