#pragma once
// Placement of a rank: its device, its position in the process grid and its groups. Created from the
// configuration and the world, before the plan.

#include <memory>
#include <string>
#include <vector>

#include "apps/plan/grid_position.h"
#include "apps/train/launch/accelerator.h"
#include "apps/train/launch/device_choice.h"
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
  bool share = false;  ///< several ranks may share a GPU
  ops::LibraryOptions libraries = {};
};

/// The open device of a rank.
struct RankDevice {
  DeviceType type = DeviceType::cpu;
  int ordinal = 0, visible = 0;  ///< GPU ordinal, number of visible GPUs
  Accelerator accelerator;       ///< GPU only; must outlive everything that uses the device
  ops::Exec exec;                ///< without workspace
};
/// Collective: assigns different GPUs to the ranks of a node (unless `share`) and opens them. Sets the number
/// of CPU threads of the process. Errors end in AgreedExit on all ranks.
RankDevice open_rank_device(comm::World& world, const DeviceRequest& request);

class Placement {
 public:
  /// Collective. Settings that the device does not support are printed once, with their location in the
  /// configuration, and end in AgreedExit. `world` must outlive the placement.
  Placement(comm::World& world, const ConfigResult& config);

  DeviceType device() const { return device_.type; }
  /// The device's exec, without workspace.
  const ops::Exec& exec() const { return device_.exec; }
  const Accelerator& accelerator() const { return device_.accelerator; }
  /// CPU threads of this rank.
  int host_threads() const { return host_threads_; }
  const plan::GridPosition& grid_position() const { return grid_position_; }

  /// memory_for_rank(), the least of all ranks: they must choose the same. Of a GPU, that of capacity().
  size_t memory() const { return memory_; }
  /// Bytes that this rank's plan may use: on a GPU what is free after its context, libraries and groups have
  /// taken theirs, else memory().
  size_t capacity() const { return capacity_; }

  /// The groups of ranks that the run communicates in (plan::needed_groups()), and their channels.
  const parallel::Groups& groups() const { return *groups_; }

  /// The device, for the banner. `kernels`: number of kernels that the run needs.
  std::string describe(int kernels) const;

 private:
  void choose(comm::World& world, const Config& config);

  plan::GridPosition grid_position_;
  DeviceFacts facts_;
  DeviceRequest request_;
  int host_threads_ = 1;
  size_t memory_ = 0, capacity_ = 0;
  bool clocks_ = false;  // are described
  std::string why_no_gpu_, comm_text_, bound_;
  RankDevice device_;
  std::unique_ptr<parallel::Groups> groups_;
};

/// plan::needed_groups() of a configuration; reads its model if that decides.
std::vector<parallel::GroupId> groups_of_run(const ConfigResult& config, const plan::GridPosition& position);

/// The communicators of rank 0 with other ranks, which take memory of a GPU.
int communicators_of_run(const ConfigResult& config, int world);

/// Peak FLOP/s of a rank, the denominator of MFU: the measured fp32 matmul rate of a CPU, times
/// native_factor(), or the data sheet of a GPU; 0: unknown.
double peak_of(const Placement& placement, DType operands);
/// How much faster than fp32 this CPU's kernels multiply operands of that type, by its registers' peaks.
double native_factor(const ops::Exec& exec, DType operands);

}  // namespace nrl::train
