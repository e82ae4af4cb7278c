#include "apps/data/loader.h"

#include <algorithm>

#include <spdlog/fmt/ranges.h>

#include "core/base/error.h"
#include "core/base/threads.h"
#include "core/trace/trace.h"

namespace nrl::data {

int64_t first_sample(const LoaderOptions& o, int64_t step, int64_t micro_batch) {
  return o.consumed_samples + step * o.global_batch() + micro_batch * o.micro_batch * o.data_parallel_size +
         o.data_parallel_rank * o.micro_batch;
}

int64_t loader_slots(const LoaderOptions& options) {
  // One slot belongs to the caller of next(), the others are for prefetching.
  return options.threads == 0 ? 1 : std::max(options.prefetch, options.threads) + 1;
}

int64_t loader_bytes(const LoaderOptions& options, const DocumentRules& rules, int64_t length) {
  const int64_t rows = options.micro_batch * length;
  int64_t words = 2 * rows;  // tokens and targets
  if (rules.reset_position_ids) words += rows;
  if (rules.reset_attention_mask) words += rows + 1 + length;
  words += 4 * (length + 1);  // one sample: ids, and the inputs, targets and positions made from them
  return loader_slots(options) * (4 * words + 8 * options.micro_batch);
}

BatchLoader::BatchLoader(const TokenDataset& dataset, const LoaderOptions& options)
    : dataset_(dataset), options_(options), total_(options.accumulation * options.steps) {
  NRL_CHECK(options.micro_batch > 0 && options.data_parallel_size > 0 && options.accumulation > 0 &&
            options.data_parallel_rank >= 0 && options.data_parallel_rank < options.data_parallel_size &&
            options.consumed_samples >= 0 && options.steps >= 0 && options.threads >= 0);
  const int64_t end = options.consumed_samples + options.steps * options.global_batch();
  if (end > dataset.samples())
    fail(Exit::config,
         "data: too few samples: {} steps of {} samples after {} consumed samples need {}, but the dataset "
         "has "
         "{}",
         options.steps, options.global_batch(), options.consumed_samples, end, dataset.samples());
  const int64_t length = dataset.sequence_length();
  slots_.resize(static_cast<size_t>(loader_slots(options)));
  for (Slot& slot : slots_) {
    slot.batch.samples.resize(static_cast<size_t>(options.micro_batch));
    slot.batch.tokens.resize(static_cast<size_t>(options.micro_batch * length));
    slot.batch.targets.resize(static_cast<size_t>(options.micro_batch * length));
    if (dataset.documents().reset_position_ids)
      slot.batch.positions.resize(static_cast<size_t>(options.micro_batch * length));
    if (dataset.documents().reset_attention_mask) {
      slot.batch.bounds.reserve(static_cast<size_t>(options.micro_batch * length) + 1);
      slot.sample.segments.reserve(static_cast<size_t>(length));
    }
    slot.ids.resize(static_cast<size_t>(length) + 1);
  }
  try {
    for (int i = 0; i < options.threads; ++i) threads_.push_back(start_thread([this] { work(); }));
  } catch (...) {
    stop();
    throw;
  }
}

BatchLoader::~BatchLoader() {
  stop();
}

void BatchLoader::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  free_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void BatchLoader::fill(Slot& slot, int64_t number) {
  const trace::Range range(read_range, trace::Kind::data);
  HostMicroBatch& batch = slot.batch;
  batch.step = number / options_.accumulation;
  batch.index = number % options_.accumulation;
  const int64_t first = first_sample(options_, batch.step, batch.index);
  const auto length = static_cast<ptrdiff_t>(dataset_.sequence_length());
  const Sample& sample = slot.sample;
  batch.bounds.clear();
  for (int64_t k = 0; k < options_.micro_batch; ++k) {
    const auto begin = k * length;
    batch.samples[k] = first + k;
    dataset_.read(first + k, slot.ids);
    make_sample(slot.ids, dataset_.documents(), slot.sample);
    std::copy_n(sample.ids.begin(), length, batch.tokens.begin() + begin);
    std::copy_n(sample.targets.begin(), length, batch.targets.begin() + begin);
    if (!batch.positions.empty())
      std::copy_n(sample.positions.begin(), length, batch.positions.begin() + begin);
    for (const int32_t row : sample.segments) batch.bounds.push_back(static_cast<int32_t>(begin) + row);
  }
  batch.bounds.push_back(static_cast<int32_t>(options_.micro_batch * length));
  batch.loss_tokens =
      std::count_if(batch.targets.begin(), batch.targets.end(), [](int32_t target) { return target >= 0; });
}

void BatchLoader::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    const auto slots = static_cast<int64_t>(slots_.size());
    free_.wait(lock, [&] { return stop_ || claimed_ == total_ || claimed_ < released_ + slots; });
    if (stop_ || claimed_ == total_) return;
    const int64_t number = claimed_++;
    Slot& slot = slots_[number % slots];
    lock.unlock();
    std::exception_ptr error;
    try {
      fill(slot, number);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    slot.error = std::move(error);
    slot.ready = number;
    ready_.notify_one();
  }
}

const HostMicroBatch& BatchLoader::next() {
  NRL_CHECK(delivered_ < total_, "microbatch {} of {}", delivered_, total_);
  const int64_t number = delivered_++;
  Slot& slot = slots_[static_cast<size_t>(number) % slots_.size()];
  if (threads_.empty()) {
    fill(slot, number);
  } else {
    std::unique_lock lock(mutex_);
    released_ = number;  // the slots of earlier microbatches may be refilled
    free_.notify_all();
    ready_.wait(lock, [&] { return slot.ready == number; });
    if (slot.error) std::rethrow_exception(slot.error);
  }
  return slot.batch;
}

void show_samples(const TokenDataset& dataset, int64_t global_batch, int64_t first, int64_t last,
                  std::ostream& out) {
  if (first < 1 || first > last || global_batch <= 0 || last - 1 > dataset.samples() / global_batch)
    fail(Exit::usage, "data show: steps {} to {} are out of range: the dataset has {} steps of {} samples",
         first, last - 1, dataset.samples() / std::max<int64_t>(global_batch, 1), global_batch);
  std::vector<int32_t> tokens(static_cast<size_t>(dataset.sequence_length()) + 1);
  std::string line;
  const auto list = [&](std::string_view name, const std::vector<int32_t>& values) {
    line += fmt::format(",\"{}\":[{}]", name, fmt::join(values, ","));
  };
  const DocumentRules& rules = dataset.documents();
  Sample made;
  for (int64_t step = first; step < last; ++step) {
    for (int64_t sample = (step - 1) * global_batch; sample < step * global_batch; ++sample) {
      dataset.read(sample, tokens);
      line = fmt::format("{{\"step\":{},\"sample\":{}", step, sample);
      list("tokens", tokens);
      make_sample(tokens, rules, made);
      if (rules.reset_position_ids) list("positions", made.positions);
      if (rules.reset_attention_mask) list("segments", made.segments);
      if (rules.eod_mask_loss) list("no_loss", rows_without_loss(made));
      out << line << "}\n";
    }
  }
}

}  // namespace nrl::data
