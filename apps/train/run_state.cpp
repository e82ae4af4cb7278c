#include "apps/train/run_state.h"

#include <utility>
#include <vector>

#include "apps/train/launch.h"
#include "core/device/cpu/memory.h"
#include "core/ops/transfer.h"

namespace nrl::train {
namespace {

// The state in the memory of `flat`.
TrainState state_in(const plan::RunPlan& plan, const engine::FlatState& flat) {
  TrainState state;
  state.spec = &plan.spec;
  state.parameters = &plan.parameters;
  state.owned = plan.owned;
  for (size_t i = 0; i < plan.parameters.all.size(); ++i)
    state.weights.push_back(plan.parameter(flat.weights, i));
  const auto values = [](const Tensor& t) { return t ? t.ptr<float>() : nullptr; };
  state.master = values(flat.master);
  state.exp_avg = values(flat.exp_avg);
  state.exp_avg_sq = values(flat.exp_avg_sq);
  return state;
}

// A copy of an engine's buffers in host memory.
class HostMirror {
 public:
  explicit HostMirror(engine::Engine& engine) : engine_(engine), flat_(engine.state()) {}

  void allocate(bool optimizer) {
    mirror(flat_.weights);
    if (optimizer)
      for (Tensor* t : {&flat_.master, &flat_.exp_avg, &flat_.exp_avg_sq}) mirror(*t);
  }
  void download() {
    for (const auto& [device, host] : copies_) ops::download(engine_.exec(), device, host.data);
  }
  void upload() {
    for (const auto& [device, host] : copies_) ops::upload(engine_.exec(), device, host.data);
  }
  TrainState state() const { return state_in(engine_.plan(), flat_); }

 private:
  void mirror(Tensor& t) {
    if (!t) return;
    const Tensor device = t;
    memory_.emplace_back(static_cast<size_t>(t.bytes()));
    t.data = memory_.back().data();
    copies_.emplace_back(device, t);
  }

  engine::Engine& engine_;
  engine::FlatState flat_;
  std::vector<cpu::HostMemory> memory_;
  std::vector<std::pair<Tensor, Tensor>> copies_;  // device, host
};

}  // namespace

void with_state_copy(comm::World& world, engine::Engine& engine,
                     const std::function<void(const TrainState&)>& work) {
  if (!engine.exec().device) {
    work(state_in(engine.plan(), engine.state()));
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
    work(state_in(engine.plan(), engine.state()));
    return;
  }
  HostMirror mirror(engine);
  mirror.allocate(optimizer);
  work(mirror.state());
  mirror.upload();
}

}  // namespace nrl::train
