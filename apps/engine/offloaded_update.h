#pragma once
// The update of optimizer state that is offloaded (memory::Tier::host).

#include <utility>
#include <vector>

#include "apps/engine/group_tensors.h"
#include "core/device/runtime.h"
#include "core/ops/optimizer.h"
#include "memory/host_copies.h"
#include "memory/plan.h"

namespace nrl::engine {

/// On a CPU the state is updated in place, in windows whose pages leave the memory of the process after use.
///
/// On a GPU the CPU updates it: gradients and weights are copied to page-locked staging buffers, updated
/// there with the state, and the weights copied back. Pieces follow each other through the staging buffers,
/// so that copies in both directions, the CPU's work and what the GPU does meanwhile overlap. Everything is
/// enqueued on streams of its own: the host waits for nothing, and the CPU's update, a host function in
/// stream order, reads the step's scalars. It can be captured in a graph.
class OffloadedUpdate {
 public:
  /// Page-locked memory of a GPU run, by plan::offload_staging_bytes().
  struct Staging {
    std::byte* data = nullptr;
    int64_t slot_bytes = 0;
  };
  /// The CPU that updates in a GPU run.
  struct Host {
    const ops::KernelTable* kernels = nullptr;
    int threads = 1;
  };

  /// `arguments(group, call)` returns an update as ops::adamw() takes it, in the memory of the groups. All
  /// must outlive this object.
  template <class Arguments>
  OffloadedUpdate(const std::vector<GroupTensors>& groups, const Arguments& arguments,
                  const memory::Arenas& arenas, const Staging& staging, const Host& host, ops::Exec& exec)
      : arenas_(arenas), staging_(staging), exec_(exec) {
    for (const GroupTensors& t : groups)
      for (const plan::UpdateCall& call : t.group->updates)
        if (call.offloaded && call.chunks > 0) add(t, call, arguments(t, call));
    if (exec.device) open(host);
  }

  /// Waits for the CPU's work.
  ~OffloadedUpdate();
  OffloadedUpdate(const OffloadedUpdate&) = delete;
  OffloadedUpdate& operator=(const OffloadedUpdate&) = delete;

  /// In dry runs for a GPU `observer` gets the copies and the CPU's work. Null: ends that.
  void observe(memory::HostObserver* observer) { observer_ = observer; }

  /// After the step is decided. On a GPU enqueues the work; on a CPU does it.
  void start();
  /// Before the updated weights are read or gradients overwritten, in the order of the exec's stream.
  void finish();

 private:
  /// Elements that are consecutive in the weights and gradients of the device.
  struct Run {
    int64_t begin, count;
    int64_t staged;  // first element in the staging buffer
  };
  /// The elements that are updated at once. On a GPU the tensors of `update` except the state are in a
  /// staging buffer.
  struct Piece {
    ops::AdamW update;
    int64_t first_state = 0, states = 0;
    std::vector<Run> runs;
    std::vector<int64_t> table;
    Tensor gradients, weights;                      // of the device
    std::pair<ops::Exec*, const ops::AdamW*> call;  // the host function's argument
  };

  void add(const GroupTensors& group, const plan::UpdateCall& call, const ops::AdamW& arguments);
  void open(const Host& host);
  void stage(Piece& piece, std::byte* slot);
  void copy(const Piece& piece, bool to_host, device::StreamHandle stream) const;
  void report();

  const memory::Arenas& arenas_;
  Staging staging_;
  ops::Exec& exec_;
  ops::Exec host_exec_;
  std::vector<Piece> pieces_;
  memory::HostObserver* observer_ = nullptr;
  int reported_ = -1;  // the last copy of start()
  Tensor scalars_, host_scalars_;
  device::Stream in_, host_, out_;
  device::Event decided_, copied_in_[plan::offload_slots], updated_[plan::offload_slots],
      copied_out_[plan::offload_slots];
};

/// Sets offloaded master weights to the weights that the layers read.
void initialize_offloaded_master(ops::Exec& exec, const GroupTensors& group, const memory::Arenas& arenas);

}  // namespace nrl::engine
