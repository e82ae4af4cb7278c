#include "parallel/grid/groups.h"

#include <algorithm>
#include <array>

#include "core/base/error.h"
#include "parallel/comm/agreement.h"
#include "parallel/comm/dry/dry_comm.h"
#include "parallel/comm/mute/mute.h"
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

/// Numbers the partitions of the ranks, with their lanes, in the order in which ids ask for them. Members
/// alone do not identify one: several ids may leave out this rank.
class Partitions {
 public:
  explicit Partitions(const ProcessGrid& grid) : grid_(grid) {}
  /// Equal for ids with the same groups on every rank and the same lane.
  size_t index_of(const GroupId& id) {
    const Partition partition{id, grid_.digits(id)};
    const auto at = std::find_if(known_.begin(), known_.end(),
                                 [&](const Partition& other) { return equal(other, partition); });
    const auto index = static_cast<size_t>(at - known_.begin());
    if (at == known_.end()) known_.push_back(partition);
    return index;
  }

 private:
  struct Partition {
    GroupId id;
    std::optional<std::vector<GroupDigit>> digits;
  };
  bool equal(const Partition& a, const Partition& b) const {
    if (a.id.lane != b.id.lane) return false;
    if (a.digits && b.digits && a.id.ends == b.id.ends) return a.digits == b.digits;
    return grid_.groups(a.id) == grid_.groups(b.id);
  }
  const ProcessGrid& grid_;
  std::vector<Partition> known_;
};

/// Whether the ranks of a group send each other messages.
bool exchanges(const GroupId& id) {
  return id.axes.has(Axis::ep) || id.axes == Axis::cp;
}

/// Runs each kind of collective once per size: NCCL's choice of algorithm and protocol, and with it what it
/// connects and allocates, depends on the size. `messages`: exchanges of all pairs of ranks too.
void warm_up(comm::Communicator& group, device::Runtime& runtime, bool messages) {
  if (group.size() == 1) return;
  constexpr int64_t largest = int64_t{8} << 20;  // elements
  const int64_t most = std::max<int64_t>(largest / group.size(), 1) * group.size();
  const device::Memory memory(runtime, device::Memory::Kind::device, static_cast<size_t>(2 * most) * 4);
  const device::Stream stream(runtime);
  runtime.fill(memory.data(), 0, memory.size(), stream.get());
  stream.synchronize();
  auto* const values = reinterpret_cast<float*>(memory.data());
  for (const int64_t elements : {int64_t{256}, int64_t{256} << 10, largest}) {
    const int64_t block = std::max<int64_t>(elements / group.size(), 1), all = block * group.size();
    const comm::View whole(values, all, DType::f32), own(values + group.rank() * block, block, DType::f32);
    group.all_reduce(whole);
    group.reduce_scatter(whole, own);
    group.all_gather(own, whole);
    if (messages) group.all_to_all(whole, comm::View(values + most, all, DType::f32));
  }
}

}  // namespace

std::vector<GroupAlias> group_aliases(const ProcessGrid& grid, std::span<const GroupId> ids) {
  std::vector<GroupAlias> out;
  Partitions partitions(grid);
  std::vector<GroupId> made;
  for (const GroupId& id : canonical(ids)) {
    const size_t index = partitions.index_of(id);
    if (index == made.size()) made.push_back(id);
    if (!grid.members(id).empty()) out.push_back({id, made[index]});
  }
  return out;
}

Groups::Groups(const ProcessGrid& grid, comm::Communicator& world, std::span<const GroupId> ids,
               const std::optional<DeviceGroups>& device, std::span<const GroupChannels> channels) {
  NRL_CHECK(world.size() == grid.ranks() && world.rank() == grid.rank(),
            "{} does not match the grid of rank {} of {}", world.label(), grid.rank(), grid.ranks());
  const std::vector<GroupId> all = canonical(ids);
  require_same_groups(world, all);
  list(grid, all, channels);
  if (device && device->options.nccl_user_buffers) {
    registers_ = true;
    allocator_ = comm::device_allocator(device->kind);
  }
  if (device)
    make_with_device(world, *device, channels);
  else
    for (Made& m : made_) make_host(world, m);
  for (const GroupChannels& c : channels)
    comm::run_on_all(world, [&] {
      comm::Communicator& group = split_from_ ? host(c.group) : (*this)[c.group];
      channels_.push_back(
          {c.group, std::make_unique<comm::Channels>(group, c.ends, split_from_ ? *split_from_ : group)});
    });
}

void Groups::list(const ProcessGrid& grid, const std::vector<GroupId>& ids,
                  std::span<const GroupChannels> channels) {
  Partitions partitions(grid);
  for (const GroupId& id : ids) {
    const bool only =
        std::any_of(channels.begin(), channels.end(), [&](const GroupChannels& c) { return c.group == id; });
    const size_t index = partitions.index_of(id);
    entries_.push_back({id, index});
    if (index == made_.size()) {
      std::vector<int> members = grid.members(id);
      const int first = members.empty() ? -1 : members.front();
      made_.push_back({id, std::move(members), first, only});
    } else {
      made_[index].channels_only = made_[index].channels_only && only;
    }
  }
}

template <class Make>
void Groups::make_alone(const ProcessGrid& grid, std::span<const GroupId> ids,
                        std::span<const GroupChannels> channels, const Make& make) {
  list(grid, canonical(ids), channels);
  for (size_t i = 0; i < made_.size(); ++i) {
    Made& m = made_[i];
    const auto own = std::find(m.members.begin(), m.members.end(), grid.rank());
    if (own != m.members.end()) make(m, static_cast<int>(own - m.members.begin()), static_cast<int>(i));
  }
  for (const GroupChannels& c : channels)
    channels_.push_back({c.group, std::make_unique<comm::Channels>((*this)[c.group], c.ends)});
}

Groups::Groups(const ProcessGrid& grid, std::span<const GroupId> ids, std::span<const GroupChannels> channels,
               comm::Ledger& ledger) {
  make_alone(grid, ids, channels, [&](Made& m, int rank, int number) {
    m.host = comm::make_dry(name_of(m.id), rank, m.members, ledger, number);
  });
}

Groups::Groups(const ProcessGrid& grid, std::span<const GroupId> ids, std::span<const GroupChannels> channels,
               device::Runtime* device) {
  make_alone(grid, ids, channels, [&](Made& m, int rank, int) {
    if (device)
      m.device = comm::make_mute(name_of(m.id), rank, m.members, *device);
    else
      m.host = comm::make_mute(name_of(m.id), rank, m.members);
  });
}

// By its members only: one order on all ranks excludes deadlock.
void Groups::make_host(comm::Communicator& world, Made& m) {
  if (!m.host && !m.members.empty()) m.host = world.subgroup(m.members, name_of(m.id));
}

void Groups::make_with_device(comm::Communicator& world, const DeviceGroups& device,
                              std::span<const GroupChannels> channels) {
  comm::DeviceCommOptions options = device.options;
  options.nccl_max_ctas = agree_on_ctas(world, device, channels);
  const auto make_device = [&](Made& m) {
    comm::run_on_all(world, [&] {
      if (m.device || m.members.empty()) return;
      m.device = device.make ? device.make(*m.host)
                             : comm::make_device_communicator(device.kind, *m.host, *device.runtime, options);
    });
  };
  const auto root = std::find_if(made_.begin(), made_.end(), [&](const Made& m) {
    return m.members.size() == static_cast<size_t>(world.size()) && m.id.lane == 0;
  });
  if (root != made_.end()) {
    make_host(world, *root);
    make_device(*root);
    if (root->device->single_fifo()) split_from_ = root->device.get();
  }
  if (!split_from_) {
    for (Made& m : made_) make_host(world, m);
    for (Made& m : made_) make_device(m);
    return;
  }
  for (Made& m : made_)
    comm::run_on_all(world, [&] {
      if (m.channels_only) return make_host(world, m);
      if (!m.device) m.device = split_from_->split(m.first, world.rank(), name_of(m.id));
      if (m.device) warm_up(*m.device, *device.runtime, exchanges(m.id));
    });
}

int Groups::agree_on_ctas(comm::Communicator& world, const DeviceGroups& device,
                          std::span<const GroupChannels> channels) const {
  if (device.kind != comm::DeviceCommKind::nccl || device.options.nccl_max_ctas > 0)
    return device.options.nccl_max_ctas;
  int32_t kernels = 0, multiprocessors = device.runtime->properties().multiprocessors;
  for (const Made& m : made_) kernels += m.members.size() > 1 && !m.channels_only;
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
  const Made& m = made_[find(id).made];
  NRL_CHECK(!m.members.empty(), "this rank is not a member of group {}", name_of(id));
  return m;
}

comm::Communicator& Groups::operator[](const GroupId& id) const {
  NRL_CHECK(collective(id), "group {} has channels only", name_of(id));
  const Made& m = made(id);
  return m.device ? *m.device : *m.host;
}

bool Groups::collective(const GroupId& id) const {
  return !split_from_ || made(id).device;
}

comm::Channels& Groups::channels(const GroupId& id) const {
  const auto at =
      std::find_if(channels_.begin(), channels_.end(), [&](const MadeChannels& c) { return c.group == id; });
  NRL_CHECK(at != channels_.end(), "channels of group {} were not requested at start", name_of(id));
  return *at->channels;
}

comm::Communicator& Groups::host(const GroupId& id) const {
  return made(id).on_host();
}

bool Groups::member(const GroupId& id) const {
  return !made_[find(id).made].members.empty();
}

std::vector<std::unique_ptr<comm::Registration>> Groups::register_memory(std::span<std::byte> memory,
                                                                         uint64_t layout) const {
  std::vector<std::unique_ptr<comm::Registration>> out;
  if (!registers_) return out;
  for (const Made& m : made_) {
    if (!m.device || m.device->size() == 1) continue;
    // The largest and the complement of the smallest.
    const std::array own{static_cast<int64_t>(layout), static_cast<int64_t>(~layout)};
    std::array most = own;
    m.on_host().all_reduce(std::span(most), comm::Reduce::max);
    if (most == own) out.push_back(m.device->register_memory(memory.data(), memory.size()));
  }
  for (const MadeChannels& c : channels_) c.channels->register_memory(memory.data(), memory.size(), out);
  return out;
}

void Groups::set_dry(bool dry) const {
  for (const Made& m : made_) {
    if (m.host) m.host->set_dry(dry);
    if (m.device) m.device->set_dry(dry);
  }
  for (const MadeChannels& c : channels_) c.channels->set_dry(dry);
}

std::vector<GroupId> Groups::ids() const {
  std::vector<GroupId> out;
  for (const Made& m : made_) out.push_back(m.id);
  return out;
}

std::vector<std::string> Groups::labels() const {
  std::vector<std::string> out;
  for (const Made& m : made_)
    if (!m.members.empty()) out.push_back(m.on_host().label());
  return out;
}

void Groups::check() const {
  for (const Made& m : made_) {
    if (m.host) m.host->check();
    if (m.device) m.device->check();
  }
}

}  // namespace nrl::parallel
