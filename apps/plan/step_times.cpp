#include "apps/plan/step_times.h"

#include <algorithm>

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

}  // namespace

StepTimes forward_step_times(PlannedRank rank) {
  rank.batch.positions = rank.batch.bounds = rank.batch.loss_weights = false;  // whole samples
  DryRank dry(rank);
  std::vector<ops::Call> calls;
  const ops::DryRun run(dry.exec(), &calls);
  rank.decoder.bind({}, memory::Arenas::nowhere(), dry.exec(), dry.views(), {}, {}, dry.groups());
  std::optional<pipeline::StageMessages> messages;
  if (const parallel::GridPoint& sizes = rank.grid.dense().sizes(); sizes.pp > 1)
    rank.decoder.connect(
        messages.emplace(dry.groups()->channels(parallel::group::pp), sizes.pp, rank.grid.dense_point().pp));

  const Rates rates = rates_of(rank);
  StepTimes times;
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
  rank.decoder.evaluate(dry.microbatch());
  settle();
  rank.decoder.watch_steps({});
  return times;
}

}  // namespace nrl::plan
