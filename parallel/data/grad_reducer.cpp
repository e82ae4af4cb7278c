#include "parallel/data/grad_reducer.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/ops/fp8.h"
#include "core/ops/optimizer.h"

namespace nrl::parallel {

namespace {
constexpr int gathers_in_flight = 2;  // one that is waited for, and one that follows it at once
}

namespace {

comm::View view(const Tensor& t) {
  return {t.data, t.numel(), t.dtype};
}

Tensor matrix(const Tensor& t, int64_t rows) {
  return make_tensor(t.data, t.dtype, {rows, t.numel() / rows});
}

}  // namespace

int64_t ReduceOptions::wire_elements(const FlatBuckets& layout, int bucket) const {
  const int64_t size = layout.range(bucket).size();
  return fp8() ? layout.shards() * ops::fp8_row_bytes(size / layout.shards()) : size;
}

int64_t ReduceOptions::staging_elements(const FlatBuckets& layout) const {
  if (wire == DType::f32 || layout.shards() == 1) return 0;
  int64_t largest = 0;
  for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b)
    largest = std::max(largest, wire_elements(layout, b));
  return 2 * largest * (sums_parts() ? 2 : 1);
}

int64_t ReduceOptions::error_elements(const FlatBuckets& layout) const {
  return fp8() && error_feedback && layout.shards() > 1 ? layout.total() : 0;
}

int64_t ReduceOptions::sum_error_elements(const FlatBuckets& layout) const {
  return strategy.optimizer_state || error_elements(layout) == 0 ? 0 : layout.shard_total();
}

GradReducer::GradReducer(const FlatBuckets& layout, const GradMemory& memory, const ReduceGroup& group,
                         const ReduceOptions& options, ops::Exec& exec)
    : layout_(layout),
      memory_(memory),
      group_(group),
      options_(options),
      exec_(exec),
      slot_elements_(options.staging_elements(layout) / 2),
      states_(layout.buckets().size()) {
  const bool sharded = options.strategy.gradients;
  NRL_CHECK(group.shard != nullptr && group.shard->size() == layout.shards(),
            "the layout has {} shards, the group {} ranks", layout.shards(),
            group.shard ? group.shard->size() : 0);
  NRL_CHECK(memory.gradients.numel() == (sharded ? layout.shard_total() : layout.total()),
            "{} gradients for a layout of {} in {} shards", memory.gradients.numel(), layout.total(),
            layout.shards());
  NRL_CHECK(memory.gradients.dtype == DType::f32 || (in_buckets() && memory.gradients.dtype == DType::bf16),
            "gradients are {}", describe(memory.gradients));
  NRL_CHECK(in_buckets()
                ? memory.buckets.size() == layout.buckets().size() && options.strategy.optimizer_state
                : !sharded,
            "{} buffers for {} buckets of {}", memory.buckets.size(), layout.buckets().size(),
            options.strategy.name);
  NRL_CHECK(options.wire == DType::f32 || options.wire == DType::bf16 || options.fp8(), "gradients in {}",
            name_of(options.wire));
  NRL_CHECK(!in_buckets() || !options.fp8(),
            "gradients of {} in {}: one error per microbatch and bucket is not kept", options.strategy.name,
            name_of(options.wire));
  const auto expect = [](const char* what, const Tensor& t, int64_t elements) {
    const int64_t given = t ? t.numel() : 0;
    NRL_CHECK(given == elements, "{} elements of {}, expected {}", given, what, elements);
  };
  expect("staging", memory.staging, 2 * slot_elements_);
  expect("errors", memory.errors, options.error_elements(layout));
  expect("errors of sums", memory.sum_errors, options.sum_error_elements(layout));
  NRL_CHECK(group.replicas == nullptr || options.strategy.optimizer_state, "replicas of {} hold no shards",
            options.strategy.name);
}

GradReducer::~GradReducer() = default;

bool GradReducer::stays(int bucket) const {
  return alone() || (in_buckets() && !options_.strategy.gradients && !of_bucket(bucket).last);
}

Tensor GradReducer::kept(int bucket) const {
  const ElementRange r = layout_.range(bucket);
  return memory_.gradients.rows(r.begin, r.size());
}

Tensor GradReducer::whole(int bucket) const {
  return in_buckets() ? memory_.buckets[bucket] : kept(bucket);
}

Tensor GradReducer::own_part(int bucket) const {
  const ElementRange own = layout_.shard(bucket, group_.shard->rank());
  return whole(bucket).rows(own.begin - layout_.range(bucket).begin, own.size());
}

Tensor GradReducer::shard(int bucket) const {
  const ElementRange r =
      options_.strategy.gradients ? layout_.in_shards(bucket) : layout_.shard(bucket, group_.shard->rank());
  return memory_.gradients.rows(r.begin, r.size());
}

Tensor GradReducer::staged(int bucket, bool received) const {
  const int64_t part = slot_elements_ / (options_.sums_parts() ? 2 : 1);
  const Tensor t = memory_.staging.rows(of_bucket(bucket).slot * slot_elements_ + (received ? part : 0),
                                        options_.wire_elements(layout_, bucket));
  return options_.fp8() ? matrix(t, layout_.shards()) : t;
}

void GradReducer::start() {
  NRL_CHECK(!started_, "the gradient reducer was started twice in a step");
  started_ = true;
  next_ = 0;
  seen_.assign(layout_.params().size(), 0);
  for (size_t b = 0; b < states_.size(); ++b) {
    State& s = states_[b];
    s.missing = static_cast<int>(layout_.buckets()[b].params.size());
    s.open = s.accumulate = false;
    s.last = true;
    s.microbatches = 1;
  }
}

void GradReducer::open(int bucket, bool last, int microbatches) {
  State& s = of_bucket(bucket);
  NRL_CHECK(started_ && in_buckets(), "bucket {} is opened outside of a step", bucket);
  NRL_CHECK(!s.open && !s.in_flight, "bucket {} is opened while its gradients are in use", bucket);
  const std::vector<int>& params = layout_.buckets()[bucket].params;
  s.open = true;
  s.last = last;
  s.microbatches = microbatches;
  s.missing = static_cast<int>(params.size()) * microbatches;
  for (const int p : params) seen_[p] = 0;
}

void GradReducer::ready(int param) {
  NRL_CHECK(started_, "parameter {} is ready outside of a step", param);
  NRL_CHECK(param >= 0 && static_cast<size_t>(param) < seen_.size(), "no parameter {}", param);
  const std::string& name = layout_.params()[param].name;
  const int bucket = layout_.place(param).bucket;
  State& s = of_bucket(bucket);
  NRL_CHECK(seen_[param] < s.microbatches, "the gradient of {} was reported twice", name);
  NRL_CHECK(!in_buckets() || s.open, "the gradient of {} is reported, but its bucket is closed", name);
  ++seen_[param];
  --s.missing;
  if (in_buckets()) {
    if (s.missing > 0) return;
    s.open = false;
    launch(bucket);
  } else if (options_.overlap) {
    launch_complete();
  }
}

void GradReducer::launch_complete() {
  for (; next_ < static_cast<int>(states_.size()) && of_bucket(next_).missing == 0; ++next_) launch(next_);
}

void GradReducer::launch(int bucket) {
  State& s = of_bucket(bucket);
  NRL_CHECK(!s.in_flight && s.slot < 0, "bucket {} is summed twice", bucket);
  if (stays(bucket)) {
    s.in_flight = true;
    return;
  }
  if (in_buckets() && !options_.strategy.gradients && std::exchange(s.accumulate, false))
    ops::sum_parts(exec_, {.x = matrix(kept(bucket), 1), .out = whole(bucket), .accumulate = true});
  comm::Communicator& group = *group_.shard;
  const comm::StreamRef stream{exec_.stream};
  const bool scatter = options_.strategy.optimizer_state;
  if (slot_elements_ > 0) {
    s.slot = slots_used_++ % 2;
    if (const int other = slots_[s.slot]; other >= 0) release(other);
    slots_[s.slot] = bucket;
    s.in_flight = true;
    if (options_.fp8()) return send_encoded(bucket);
    const Tensor sent = staged(bucket, false);
    ops::convert(exec_, {.x = whole(bucket), .out = sent});
    if (options_.fp32_sums)
      s.sum = group.all_to_all_async(view(sent), view(staged(bucket, true)), stream);
    else if (scatter)
      s.sum = group.reduce_scatter_async(view(sent), view(matrix(sent, group.size()).rows(group.rank(), 1)),
                                         comm::Reduce::sum, stream);
    else
      s.sum = group.all_reduce_async(view(sent), comm::Reduce::sum, stream);
    return;
  }
  s.in_flight = true;
  if (!scatter) {
    s.sum = group.all_reduce_async(view(whole(bucket)), comm::Reduce::sum, stream);
    return;
  }
  complete_.push_back(bucket);
  if (!in_buckets()) issue();
}

// Sums are rounded to bf16 shards by settle().
bool GradReducer::sums_in_place(int bucket) const {
  return !of_bucket(bucket).accumulate && shard(bucket).dtype == whole(bucket).dtype;
}

void GradReducer::issue() {
  if (complete_.empty()) return;
  const comm::StreamRef stream{exec_.stream};
  std::vector<comm::Operands> operands;
  for (const int b : complete_)
    operands.push_back({view(whole(b)), view(sums_in_place(b) ? shard(b) : own_part(b))});
  const auto sum =
      std::make_shared<comm::Handle>(group_.shard->reduce_scatter_async(operands, comm::Reduce::sum, stream));
  for (const int b : std::exchange(complete_, {})) {
    of_bucket(b).joint_sum = sum;
    // Without an addition in between, the host need not wait for the first sum.
    if (sums_in_place(b) && of_bucket(b).last) sum_replicas(b, {stream, *sum});
  }
}

void GradReducer::send_encoded(int bucket) {
  const int shards = layout_.shards();
  const ElementRange r = layout_.range(bucket);
  const Tensor sent = staged(bucket, false);
  ops::fp8_encode(
      exec_, {.x = matrix(whole(bucket), shards),
              .error = memory_.errors ? matrix(memory_.errors.rows(r.begin, r.size()), shards) : Tensor{},
              .out = sent,
              .format = options_.wire});
  of_bucket(bucket).sum =
      group_.shard->all_to_all_async(view(sent), view(staged(bucket, true)), comm::StreamRef{exec_.stream});
}

void GradReducer::settle_encoded(int bucket) {
  const Tensor sum = matrix(shard(bucket), 1);
  ops::fp8_decode(exec_, {.x = staged(bucket, true), .out = sum, .format = options_.wire});
  if (options_.strategy.optimizer_state) return;
  const ElementRange r = layout_.in_shards(bucket);
  const Tensor sent = staged(bucket, false), own = sent.rows(group_.shard->rank(), 1);
  ops::fp8_encode(
      exec_, {.x = sum,
              .error = memory_.sum_errors ? matrix(memory_.sum_errors.rows(r.begin, r.size()), 1) : Tensor{},
              .out = own,
              .format = options_.wire});
  of_bucket(bucket).whole =
      group_.shard->all_gather_async(view(own), view(sent), comm::StreamRef{exec_.stream});
}

void GradReducer::sum_replicas(int bucket, const comm::After& after) {
  if (group_.replicas)
    of_bucket(bucket).replicas =
        group_.replicas->all_reduce_async(view(shard(bucket)), comm::Reduce::sum, after);
}

void GradReducer::settle(int bucket) {
  issue();
  State& s = of_bucket(bucket);
  if (!s.in_flight) return;
  s.in_flight = false;
  const comm::StreamRef stream{exec_.stream};
  const bool scatter = options_.strategy.optimizer_state;
  s.sum.wait();
  if (const auto sum = std::exchange(s.joint_sum, nullptr)) sum->wait();
  bool changed = true;  // the shard, by work in the stream
  if (stays(bucket)) {
    if (in_buckets())
      ops::sum_parts(exec_, {.x = matrix(whole(bucket), 1), .out = kept(bucket), .accumulate = s.accumulate});
  } else if (slot_elements_ > 0 && options_.fp8()) {
    settle_encoded(bucket);
  } else if (slot_elements_ > 0 && options_.fp32_sums) {
    const int ranks = group_.shard->size();
    ops::sum_parts(
        exec_, {.x = matrix(staged(bucket, true), ranks), .out = shard(bucket), .accumulate = s.accumulate});
    if (!scatter) {
      const Tensor sent = staged(bucket, false),
                   own = make_tensor(matrix(sent, ranks).rows(group_.shard->rank(), 1).data, DType::bf16,
                                     {sent.numel() / ranks});
      ops::convert(exec_, {.x = shard(bucket), .out = own});
      s.whole = group_.shard->all_gather_async(view(own), view(sent), stream);
    }
  } else if (slot_elements_ > 0) {
    const Tensor sent = staged(bucket, false);
    if (scatter)
      ops::sum_parts(exec_, {.x = matrix(sent, group_.shard->size()).rows(group_.shard->rank(), 1),
                             .out = shard(bucket),
                             .accumulate = s.accumulate});
    else
      ops::convert(exec_, {.x = sent, .out = whole(bucket)});
  } else if (s.accumulate || shard(bucket).dtype != whole(bucket).dtype) {
    ops::sum_parts(exec_,
                   {.x = matrix(own_part(bucket), 1), .out = shard(bucket), .accumulate = s.accumulate});
  } else {
    changed = false;  // summed in place; launch() went on to the replicas
  }
  if (changed && s.last) sum_replicas(bucket, stream);
  s.accumulate = in_buckets();
  if (s.whole.empty()) free_slot(s);
}

void GradReducer::free_slot(State& s) {
  if (s.slot >= 0) slots_[s.slot] = -1;
  s.slot = -1;
}

void GradReducer::release(int bucket) {
  settle(bucket);
  State& s = of_bucket(bucket);
  if (!s.whole.empty()) {
    s.whole.wait();
    if (options_.fp8())
      ops::fp8_decode(exec_, {.x = staged(bucket, false),
                              .out = matrix(whole(bucket), layout_.shards()),
                              .format = options_.wire});
    else
      ops::convert(exec_, {.x = staged(bucket, false), .out = whole(bucket)});
  }
  free_slot(s);
}

void GradReducer::finish() {
  NRL_CHECK(started_, "the gradient reducer was not started");
  for (size_t p = 0; p < seen_.size(); ++p)
    NRL_CHECK(seen_[p] > 0, "the gradient of {} was never reported", layout_.params()[p].name);
  for (size_t b = 0; in_buckets() && b < states_.size(); ++b)
    NRL_CHECK(states_[b].missing == 0, "bucket {} lacks {} of its gradients at the end of a step", b,
              states_[b].missing);
  if (!in_buckets()) launch_complete();
  for (size_t b = 0; b < states_.size(); ++b) release(static_cast<int>(b));
  for (State& s : states_) s.replicas.wait();
  group_.shard->check();
  if (group_.replicas) group_.replicas->check();
  started_ = false;
}

void GradReducer::start_gather(comm::View flat) {
  NRL_CHECK(flat.count == layout_.total(), "{} parameters for a layout of {}", flat.count, layout_.total());
  if (group_.shard->size() == 1 || !options_.strategy.optimizer_state) return;
  for (int b = 0; b < static_cast<int>(states_.size()); ++b)
    NRL_CHECK(b >= to_gather_ && of_bucket(b).gather.empty(), "bucket {} was not waited for", b);
  gathered_ = flat;
  to_gather_ = static_cast<int>(states_.size());
  for (int i = 0; i < gathers_in_flight; ++i) gather_next();
}

void GradReducer::gather_next() {
  if (to_gather_ == 0) return;
  const int bucket = --to_gather_;
  const auto part = [&](const ElementRange& r) {
    return comm::View(static_cast<std::byte*>(gathered_.data) + r.begin * size_of(gathered_.dtype), r.size(),
                      gathered_.dtype);
  };
  State& s = of_bucket(bucket);
  s.gather = group_.shard->all_gather_async(part(layout_.shard(bucket, group_.shard->rank())),
                                            part(layout_.range(bucket)), comm::StreamRef{exec_.stream});
}

void GradReducer::wait_gather_of(int bucket) {
  while (to_gather_ > bucket) gather_next();
  State& s = of_bucket(bucket);
  if (s.gather.empty()) return;
  s.gather.wait();
  gather_next();
}

void GradReducer::wait_gathers() {
  for (int b = static_cast<int>(states_.size()); b-- > 0;) wait_gather_of(b);
}

}  // namespace nrl::parallel
