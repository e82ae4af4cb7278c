#include "apps/plan/step_times.h"

#include <algorithm>

#include "apps/plan/dry_device.h"
#include "core/ops/kernel_table.h"
#include "parallel/pipeline/messages.h"

namespace nrl::plan {
namespace {

/// Rates that are usual, not measured: an H100 class GPU, and a core with AVX-512.
struct Rates {
  double gemm, attention;  ///< FLOP/s
  double bytes;            ///< per second
};
Rates rates_of(const PlannedRank& rank) {
  if (rank.device == DeviceType::cuda)
    return rank.recipe.activations() == DType::f32 ? Rates{200e12, 40e12, 2.4e12}
                                                   : Rates{600e12, 400e12, 2.4e12};
  return Rates{100e9 * rank.partials, 50e9 * rank.partials, 8e9 * rank.partials};
}

double seconds_of(const ops::Call& call, const Rates& rates) {
  const ops::Cost& cost = call.cost;
  const double flops = cost.work == ops::Work::attention ? rates.attention : rates.gemm;
  return std::max(cost.flops / flops, (cost.bytes() + cost.scratch) / rates.bytes);
}

std::vector<model::ParameterView> views_of(const PlannedRank& rank, std::byte* nowhere) {
  std::vector<model::ParameterView> views(rank.parameters.all.size());
  for (const ParamGroup& g : rank.groups)
    for (const int p : g.parameters) {
      const model::Parameter& parameter = rank.parameters.all[static_cast<size_t>(p)];
      views[static_cast<size_t>(p)] = {.weight = parameter.view(nowhere, g.read_type()),
                                       .grad = parameter.view(nowhere, g.gradient)};
    }
  return views;
}

}  // namespace

StepTimes forward_step_times(const PlannedRank& rank) {
  const DryDevice device = DryDevice::usual(rank.device, rank.partials, rank.recipe);
  ops::Exec exec = device.exec();
  memory::MemoryPlan inputs;
  BatchShape shape = rank.batch;
  shape.staged = exec.device != nullptr;
  BatchTensors tensors(inputs, shape);
  inputs.solve();
  const auto arenas_of = [&](const memory::MemoryPlan& plan) {
    return exec.device ? memory::Arenas(plan, *exec.device, nullptr) : memory::Arenas::unreserved(plan);
  };
  const memory::Arenas arenas = arenas_of(rank.memory), input_arenas = arenas_of(inputs);
  tensors.bind(inputs, input_arenas, exec);
  auto* const nowhere = static_cast<std::byte*>(arenas.at(rank.memory, 0));
  comm::Ledger ledger;
  const parallel::Groups groups(rank.grid, rank.group_ids, rank.channels, ledger);
  rank.decoder.bind(rank.memory, arenas, exec, views_of(rank, nowhere), {}, {}, &groups);
  std::optional<pipeline::StageMessages> messages;
  if (const parallel::GridPoint& sizes = rank.grid.dense().sizes(); sizes.pp > 1)
    rank.decoder.connect(
        messages.emplace(groups.channels(parallel::group::pp), sizes.pp, rank.grid.dense_point().pp));

  const Rates rates = rates_of(rank);
  StepTimes times;
  std::vector<ops::Call> calls;
  double* current = nullptr;
  const auto settle = [&] {
    if (current)
      for (const ops::Call& call : calls) *current += seconds_of(call, rates);
    calls.clear();
  };
  rank.decoder.watch_steps([&](const memory::LayerTable& table, size_t step) {
    settle();
    std::vector<double>& of_table = times[&table];
    of_table.resize(table.steps().size());
    current = &of_table[step];
  });
  ops::KernelSet needed;
  exec.needed = &needed;
  exec.calls = &calls;
  rank.decoder.evaluate(tensors.microbatches().front());
  settle();
  rank.decoder.watch_steps({});
  return times;
}

}  // namespace nrl::plan
