#include "apps/train/run_state.h"

#include <utility>
#include <vector>

#include "apps/train/launch.h"
#include "core/device/cpu/memory.h"
#include "core/ops/transfer.h"

namespace nrl::train {
namespace {

// The state in the memory of `groups`.
TrainState state_in(const plan::RunPlan& plan, std::vector<engine::GroupTensors> groups) {
  TrainState state;
  state.spec = &plan.spec;
  state.parameters = &plan.parameters;
  state.weights = engine::parameter_weights(plan.parameters, groups);
  state.groups = std::move(groups);
  return state;
}

// A copy of an engine's buffers in host memory.
class HostMirror {
 public:
  explicit HostMirror(engine::Engine& engine) : engine_(engine), groups_(engine.groups()) {}

  void allocate(bool optimizer) {
    for (engine::GroupTensors& group : groups_) {
      mirror(group.weights);
      if (optimizer)
        for (Tensor& t : group.state) mirror(t);
    }
  }
  void download() {
    for (const auto& [device, host] : copies_) ops::download(engine_.exec(), device, host.data);
  }
  void upload() {
    for (const auto& [device, host] : copies_) ops::upload(engine_.exec(), device, host.data);
  }
  TrainState state() const { return state_in(engine_.plan(), groups_); }

 private:
  void mirror(Tensor& t) {
    if (!t) return;
    const Tensor device = t;
    memory_.emplace_back(static_cast<size_t>(t.bytes()));
    t.data = memory_.back().data();
    copies_.emplace_back(device, t);
  }

  engine::Engine& engine_;
  std::vector<engine::GroupTensors> groups_;
  std::vector<cpu::HostMemory> memory_;
  std::vector<std::pair<Tensor, Tensor>> copies_;  // device, host
};

}  // namespace

void with_state_copy(comm::World& world, engine::Engine& engine,
                     const std::function<void(const TrainState&)>& work) {
  if (!engine.exec().device) {
    work(state_in(engine.plan(), engine.groups()));
    return;
  }
  HostMirror mirror(engine);
  const comm::ErrorConsensus consensus = attempt_collectively(world, [&] {
    mirror.allocate(true);
    mirror.download();
  });
  if (consensus.code != Exit::ok) throw Error(consensus.code, consensus.message);
  work(mirror.state());
}

void write_state(engine::Engine& engine, bool optimizer, const std::function<void(const TrainState&)>& work) {
  if (!engine.exec().device) {
    work(state_in(engine.plan(), engine.groups()));
    return;
  }
  HostMirror mirror(engine);
  mirror.allocate(optimizer);
  work(mirror.state());
  mirror.upload();
}

}  // namespace nrl::train
