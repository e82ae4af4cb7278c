#include "apps/plan/step_times.h"

#include "apps/machine/call_time.h"
#include "parallel/pipeline/messages.h"

namespace nrl::plan {
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

  rank.decoder.evaluate(dry.microbatch());

  const machine::DeviceModel device = machine::usual_model(rank.device, rank.partials, rank.recipe);
  const program::Program& program = rank.decoder.program(memory::evaluation);
  StepTimes times;
  const auto of_table = [&](const program::Step& s) -> std::vector<double>& {
    const memory::LayerTable& table = rank.decoder.layer(s).table();
    std::vector<double>& out = times[&table];
    out.resize(table.steps().size());
    return out;
  };
  for (const program::Step& s : program.steps)
    if (s.kind == program::StepKind::compute) of_table(s);
  for (const ops::Call& call : calls)
    if (const program::Step& s = program.steps.at(static_cast<size_t>(call.step));
        s.kind == program::StepKind::compute)
      of_table(s)[s.index] += machine::estimate(device, call, machine::likely).seconds();
  return times;
}

}  // namespace nrl::plan
