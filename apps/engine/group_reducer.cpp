#include "apps/engine/group_reducer.h"

#include "core/base/error.h"
#include "core/ops/optimizer.h"
#include "core/trace/trace.h"
#include "parallel/comm/ledger.h"

namespace nrl::engine {

using comm::Purpose, comm::PurposeScope;

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
                           ops::Exec& exec, const plan::StepTraffic* traffic)
    : groups_(groups.size()), exec_(exec), traffic_(traffic) {
  for (size_t i = 0; i < groups.size(); ++i) {
    const GroupTensors& t = groups[i];
    const plan::ParamGroup& g = *t.group;
    if (!g.trainable) continue;
    for (size_t p = 0; p < g.parameters.size(); ++p) {
      const auto parameter = static_cast<size_t>(g.parameters[p]);
      if (locations_.size() <= parameter) locations_.resize(parameter + 1);
      locations_[parameter] = {static_cast<int>(i), static_cast<int>(p)};
    }
    Group& group = groups_[i];
    group.tensors = t;
    group.reducer = std::make_unique<parallel::GradReducer>(
        g.layout, parallel::GradMemory{t.gradients, t.bucket_gradients, t.staging, t.errors, t.sum_errors},
        parallel::ReduceGroup{&ranks[g.shard_group()], g.replicas > 1 ? &ranks[g.replica_group()] : nullptr},
        // The copies of a tied embedding are complete at different times: their sums are issued in finish().
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
  for (Group& g : groups_)
    if (g.reducer) g.reducer->start();
}

void GroupReducer::ready(int parameter) {
  const auto p = static_cast<size_t>(parameter);
  NRL_CHECK(p < locations_.size() && locations_[p].group >= 0, "parameter {} is not trained", parameter);
  const PurposeScope purpose(Purpose::gradients);
  groups_[static_cast<size_t>(locations_[p].group)].reducer->ready(locations_[p].index);
}

void GroupReducer::finish() {
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
  if (p >= locations_.size() || locations_[p].group < 0) return;  // frozen
  Group& g = groups_[static_cast<size_t>(locations_[p].group)];
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

void GroupReducer::begin_program(memory::Mode mode) {
  program_ = nullptr;
  if (traffic_) program_ = mode == memory::training ? &traffic_->training : &traffic_->evaluation;
  visit_ = 0;
}

const plan::LayerTraffic* GroupReducer::current() const {
  if (program_ == nullptr || program_->empty()) return nullptr;
  NRL_CHECK(visit_ < program_->size(), "visit {} of {}", visit_, program_->size());
  return &(*program_)[visit_];
}

void GroupReducer::begin_layer() {
  const plan::LayerTraffic* const t = current();
  if (!t) return;
  const PurposeScope purpose(Purpose::weights);
  for (const auto* list : {&t->gather, &t->prefetch})
    for_each_group(*list, [&](int group, const std::vector<int>& buckets) {
      groups_[static_cast<size_t>(group)].gather->start(buckets);
    });
  for (const plan::BucketRef& b : t->gather) of(b).gather->wait(b.bucket);
  for (const plan::OpenBucket& b : t->open) open(b);
}

// Clears the gradients that the microbatches add to from their first contribution on.
void GroupReducer::open(const plan::OpenBucket& b) {
  const PurposeScope purpose(Purpose::gradients);
  Group& g = of(b);
  g.reducer->settle(b.bucket);
  g.reducer->open(b.bucket, b.last, b.microbatches);
  const trace::Range range("zero_gradients");
  const parallel::ElementRange bucket = g.tensors.group->layout.range(b.bucket);
  for (const parallel::ElementRange& r : g.tensors.group->zeroed)
    if (r.begin >= bucket.begin && r.end <= bucket.end)
      ops::zero(exec_, {.x = g.tensors.bucket_gradients[static_cast<size_t>(b.bucket)].rows(
                            r.begin - bucket.begin, r.size())});
}

void GroupReducer::end_layer() {
  if (const plan::LayerTraffic* const t = current()) {
    const PurposeScope purpose(Purpose::gradients);
    for_each_group(t->reduce, [&](int group, const std::vector<int>&) {
      groups_[static_cast<size_t>(group)].reducer->issue();
    });
    for (const plan::BucketRef& b : t->release) of(b).gather->release(b.bucket);
    for (const plan::BucketRef& b : t->settle) of(b).reducer->settle(b.bucket);
  }
  ++visit_;
}

}  // namespace nrl::engine
