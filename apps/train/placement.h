#pragma once
// Where a rank computes and with whom: its device, its place in the process grid, its groups. Made from the
// configuration and the world alone, before anything is planned.

#include <memory>
#include <string>
#include <vector>

#include "apps/plan/grid_place.h"
#include "apps/train/accelerator.h"
#include "apps/train/device_choice.h"
#include "core/config/load.h"
#include "core/device/cpu/features.h"
#include "core/tensor/tensor.h"
#include "parallel/comm/world/world.h"
#include "parallel/grid/groups.h"

namespace nrl::train {

struct DeviceRequest {
  DeviceType type = DeviceType::cpu;
  cpu::Isa isa = cpu::Isa::baseline;
  int threads = 1;     ///< CPU threads of this rank
  bool share = false;  ///< several ranks may take the same GPU
  ops::LibraryOptions libraries = {};
};

/// The device of a rank, open.
struct RankDevice {
  DeviceType type = DeviceType::cpu;
  int ordinal = 0, visible = 0;  ///< of GPUs
  Accelerator accelerator;       ///< of a GPU; outlives everything that uses the device
  ops::Exec exec;                ///< without workspace
};
/// Collective: the ranks of a node do not take the same GPU by accident. Sets the CPU threads of the process.
/// Errors are agreed on (AgreedExit).
RankDevice open_rank_device(comm::World& world, const DeviceRequest& request);

class Placement {
 public:
  /// Collective. Settings that the device cannot have are printed once, with their place in the
  /// configuration, and end in AgreedExit. `world` must outlive the placement.
  Placement(comm::World& world, const ConfigResult& config);

  DeviceType device() const { return device_.type; }
  /// What ops run on, without a workspace.
  const ops::Exec& exec() const { return device_.exec; }
  const Accelerator& accelerator() const { return device_.accelerator; }
  /// CPU threads of this rank.
  int host_threads() const { return host_threads_; }
  const plan::GridPlace& place() const { return place_; }

  /// The ranks that share the gradients and the optimizer state of dense parameters: the group for host
  /// memory, and the one for the memory that the ops work on.
  comm::Communicator& shard_group() { return groups_->host(group::dp_cp); }
  comm::Communicator& device_shard_group() { return (*groups_)[group::dp_cp]; }
  /// Throws what went wrong in the background in any group.
  void check_groups() { groups_->check(); }

  /// What the run computes on, for people. `kernels`: how many the run needs, all of which the device has.
  std::string describe(int kernels) const;

 private:
  void choose(comm::World& world, const Config& config);

  plan::GridPlace place_;
  DeviceFacts facts_;
  DeviceRequest request_;
  int host_threads_ = 1;
  std::string auto_why_, comm_why_;
  RankDevice device_;
  std::unique_ptr<Groups> groups_;
};

/// Floating-point operations per second of one rank's matmuls, the denominator of MFU: measured on a
/// CPU, by the data sheet on a GPU; 0: unknown.
double peak_of(const Placement& placement);

}  // namespace nrl::train
