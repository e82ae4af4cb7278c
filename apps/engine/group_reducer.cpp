#include "apps/engine/group_reducer.h"

#include "core/base/error.h"
#include "core/ops/optimizer.h"
#include "core/trace/trace.h"
#include "parallel/comm/ledger.h"

namespace nrl::engine {

using comm::Purpose, comm::PurposeScope;
using program::Step, program::StepKind;

namespace {

/// The weights that layers read, this rank's part.
const Tensor& read_weights(const GroupTensors& t) {
  return t.group->fp8 ? t.codes : t.weights;
}

/// FP8 travels as bytes.
comm::View bytes_or_numbers(const Tensor& t) {
  return {t.data, t.numel(), t.dtype == DType::e4m3 ? DType::u8 : t.dtype};
}

}  // namespace

GroupReducer::GroupReducer(std::span<const GroupTensors> groups, const parallel::Groups& ranks, bool overlap,
                           ops::Exec& exec)
    : groups_(groups.size()), exec_(exec) {
  for (size_t i = 0; i < groups.size(); ++i) {
    const GroupTensors& t = groups[i];
    const plan::ParamGroup& g = *t.group;
    if (!g.trainable && !g.weights_gathered) continue;
    for (size_t p = 0; p < g.parameters.size(); ++p) {
      const auto parameter = static_cast<size_t>(g.parameters[p]);
      if (locations_.size() <= parameter) locations_.resize(parameter + 1);
      locations_[parameter] = {static_cast<int>(i), static_cast<int>(p)};
    }
    Group& group = groups_[i];
    group.tensors = t;
    if (g.trainable)
      group.reducer = std::make_unique<parallel::GradReducer>(
          g.layout, parallel::GradMemory{t.gradients, t.bucket_gradients, t.staging, t.errors, t.sum_errors},
          parallel::ReduceGroup{&ranks[g.shard_group()],
                                g.replicas > 1 ? &ranks[g.replica_group()] : nullptr},
          // The copies of a tied embedding are complete at different times: their sums are issued in
          // finish().
          g.reduce_options(overlap && !g.reduce.ends), exec);
    if (!g.weights_gathered) continue;
    std::vector<comm::View> buckets;
    for (const Tensor& b : t.gathered) buckets.push_back(bytes_or_numbers(b));
    group.gather = std::make_unique<parallel::WeightGather>(g.layout, bytes_or_numbers(read_weights(t)),
                                                            std::move(buckets), ranks[g.gather_group()],
                                                            comm::StreamRef{exec.stream});
  }
}

void GroupReducer::start() {
  if (local_) return;
  for (Group& g : groups_)
    if (g.reducer) g.reducer->start();
}

void GroupReducer::ready(int parameter) {
  const auto p = static_cast<size_t>(parameter);
  NRL_CHECK(p < locations_.size() && locations_[p].group >= 0 && groups_[locations_[p].group].reducer,
            "parameter {} is not trained", parameter);
  const PurposeScope purpose(Purpose::gradients);
  groups_[locations_[p].group].reducer->ready(locations_[p].index);
}

void GroupReducer::finish() {
  if (local_) return;
  const PurposeScope purpose(Purpose::gradients);
  for (Group& g : groups_)
    if (g.reducer) g.reducer->finish();
}

void GroupReducer::start_gather(Group& g) {
  if (!g.reducer) return;
  const PurposeScope purpose(Purpose::weights);
  if (g.gather)
    g.gather->updated();
  else
    g.reducer->start_gather(bytes_or_numbers(read_weights(g.tensors)));
}

void GroupReducer::start_gather() {
  for (Group& g : groups_) start_gather(g);
}

void GroupReducer::gather_fp8() {
  for (Group& g : groups_)
    if (g.reducer && g.tensors.group->fp8) start_gather(g);
  wait_gathers();
}

void GroupReducer::wait_gather(int parameter) {
  const auto p = static_cast<size_t>(parameter);
  if (p >= locations_.size() || locations_[p].group < 0) return;  // frozen, and not in shards
  Group& g = groups_[locations_[p].group];
  const PurposeScope purpose(Purpose::weights);
  if (g.gather)
    g.gather->require(locations_[p].index);
  else
    g.reducer->wait_gather(locations_[p].index);
}

void GroupReducer::wait_gathers() {
  const PurposeScope purpose(Purpose::weights);
  for (Group& g : groups_)
    if (g.reducer) g.reducer->wait_gathers();
}

void GroupReducer::execute(const Step& step, std::span<const int> buckets) {
  Group& g = groups_[step.index];
  const bool waits = step.kind == StepKind::wait;
  const bool weights = step.subject() == StepKind::gather || step.kind == StepKind::release;
  const PurposeScope purpose(weights ? Purpose::weights : Purpose::gradients);
  if (step.kind == StepKind::gather) return g.gather->start(buckets);
  if (local_ && !weights) {
    if (step.kind == StepKind::open)
      for (const int b : buckets) clear(g, b);
    return;
  }
  if (step.kind == StepKind::reduce) return g.reducer->issue();
  for (const int b : buckets)
    if (step.kind == StepKind::open) {
      g.reducer->open(b, step.last, step.microbatches);
      clear(g, b);
    } else if (!weights)
      g.reducer->settle(b);
    else if (waits)
      g.gather->wait(b);
    else
      g.gather->release(b);
}

void GroupReducer::clear(Group& g, int bucket) {
  const trace::Range range("zero_gradients");
  const parallel::ElementRange elements = g.tensors.group->layout.range(bucket);
  for (const parallel::ElementRange& r : g.tensors.group->zeroed)
    if (r.begin >= elements.begin && r.end <= elements.end)
      ops::zero(exec_, {.x = g.tensors.bucket_gradients[bucket].rows(r.begin - elements.begin, r.size())});
}

}  // namespace nrl::engine
