#include "apps/plan/step_times.h"

#include "apps/machine/call_time.h"
#include "apps/machine/collective_time.h"
#include "parallel/pipeline/messages.h"

namespace nrl::plan {
StepTimes forward_step_times(PlannedRank rank, const machine::DeviceModel& device,
                             const machine::Fabric& fabric) {
  rank.batch.positions = rank.batch.bounds = rank.batch.loss_weights = false;  // whole samples
  DryRank dry(rank);
  std::vector<ops::Call> calls;
  const ops::DryRun run(dry.exec(), &calls);
  rank.decoder.bind({}, memory::Arenas::nowhere(), dry.exec(), dry.views(), {}, {}, dry.groups());
  std::optional<pipeline::StageMessages> messages;
  if (const parallel::GridPoint& sizes = rank.grid.dense().sizes(); sizes.pp > 1)
    rank.decoder.connect(
        messages.emplace(dry.groups()->channels(parallel::group::pp), sizes.pp, rank.grid.dense_point().pp));

  const program::Program& program = rank.decoder.program(memory::evaluation);
  StepTimes times;
  const auto add = [&](int step, double seconds) {
    const program::Step& s = program.steps.at(static_cast<size_t>(step));
    if (s.kind != program::StepKind::compute) return;
    const memory::LayerTable& table = rank.decoder.layer(s).table();
    std::vector<double>& of_table = times[&table];
    of_table.resize(table.steps().size());
    of_table[s.index] += seconds;
  };
  for (size_t i = 0; i < program.steps.size(); ++i) add(static_cast<int>(i), 0);
  const std::vector<parallel::GroupId> ids =
      dry.groups() ? dry.groups()->ids() : std::vector<parallel::GroupId>();
  int step = -1;
  const auto add_operations = [&] {
    for (const comm::Ledger::Sum& sum : dry.ledger().sums())
      if (step >= 0)
        add(step, static_cast<double>(sum.count) *
                      collective_seconds(fabric, fabric.crossing(rank.grid, ids[sum.group]),
                                         machine::pattern_of(sum.op, sum.purpose),
                                         static_cast<double>(sum.bytes) / static_cast<double>(sum.count))
                          .value);
    dry.ledger().clear();
  };
  rank.decoder.watch_ticks([&](int) {
    add_operations();  // of the step before
    step = dry.exec().step;
  });
  rank.decoder.evaluate(dry.microbatch());
  add_operations();
  rank.decoder.watch_ticks({});
  for (const ops::Call& call : calls)
    if (call.step >= 0)  // Copies after the last step belong to none.
      add(call.step, machine::estimate(device, call, machine::likely).seconds());
  return times;
}

}  // namespace nrl::plan
