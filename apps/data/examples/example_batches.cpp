#include "apps/data/examples/example_batches.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"

namespace nrl::data {

ExampleBatches::ExampleBatches(std::shared_ptr<const Examples> examples, const ExampleBatchOptions& options)
    : examples_(std::move(examples)),
      options_(options),
      position_(options.consumed_samples),
      order_(examples_->size(), options.shuffle, options.seed) {
  NRL_CHECK(examples_->size() > 0 && options.global_batch > 0 && options.most_rows > 0);
}

int64_t ExampleBatches::rows_of(SequenceLength length) const {
  return std::max(options_.scores ? length.tokens : length.tokens - 1, 1);
}

const ExampleStep& ExampleBatches::begin_step() {
  int64_t count = options_.global_batch;
  if (!options_.repeat) count = std::min(count, examples_->size() - position_);
  NRL_CHECK(count > 0, "no examples are left");
  chosen_.clear();
  step_ = {.examples = count};
  std::vector<PackUnit> units;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t example = order_.at(position_ + i);
    chosen_.push_back(example);
    PackUnit unit;
    for (int s = 0; s < examples_->sequences_per_example(); ++s) {
      const SequenceLength length = examples_->length(example, s);
      unit.rows += rows_of(length);
      unit.work += options_.work ? options_.work(rows_of(length)) : static_cast<double>(rows_of(length));
      step_.loss_tokens += options_.scores ? 1 : length.loss_tokens;
    }
    step_.rows += unit.rows;
    units.push_back(unit);
  }
  options_.packing.seed = options_.seed + static_cast<uint64_t>(position_);
  packing_ = pack(units, options_.packing);
  const auto microbatches = [&] { return static_cast<int64_t>(packing_.bins.front().size()); };
  if (microbatches() > options_.most_microbatches) {
    // More than for sequences of full length: those that follow each other.
    PackOptions plain = options_.packing;
    plain.algorithm = PackAlgorithm::none;
    packing_ = pack(units, plain);
  }
  if (options_.rounded_up)
    for (auto& bins : packing_.bins) bins.resize(static_cast<size_t>(options_.rounded_up(microbatches())));
  NRL_CHECK(microbatches() <= options_.most_microbatches, "{} microbatches, planned are {}", microbatches(),
            options_.most_microbatches);
  step_.microbatches = microbatches();
  step_.efficiency = packing_.efficiency;
  step_.imbalance = packing_.imbalance;
  position_ += count;
  next_bin_ = 0;
  if (options_.numbers) options_.numbers->begin_step(chosen_, step_);
  return step_;
}

void ExampleBatches::append(int64_t example, int sequence) {
  const std::span<const int32_t> ids = examples_->ids(example, sequence);
  const int64_t rows = rows_of(examples_->length(example, sequence));
  NRL_CHECK(rows <= options_.most_rows, "a sequence of {} rows", rows);
  for (int64_t t = 0; t < rows; ++t) {
    const bool last = t + 1 == std::ssize(ids);
    const bool has_target = options_.scores ? last : !last && examples_->in_loss(example, sequence, t + 1);
    batch_.tokens.push_back(ids[t]);
    batch_.targets.push_back(!has_target ? -1 : options_.scores ? 0 : ids[t + 1]);
    batch_.positions.push_back(static_cast<int32_t>(t));
    batch_.loss_tokens += has_target ? 1 : 0;
  }
  batch_.bounds.push_back(static_cast<int32_t>(batch_.tokens.size()));
  ++batch_.sequences;
  if (options_.numbers) options_.numbers->append(example, sequence, rows, batch_);
}

const HostMicroBatch& ExampleBatches::next() {
  const auto& bins = packing_.bins[static_cast<size_t>(options_.rank)];
  NRL_CHECK(next_bin_ < bins.size(), "the step has {} microbatches", bins.size());
  batch_.index = static_cast<int64_t>(next_bin_);
  for (auto* values : {&batch_.tokens, &batch_.targets, &batch_.positions, &batch_.bounds}) values->clear();
  batch_.bounds.push_back(0);
  batch_.loss_tokens = batch_.sequences = 0;
  batch_.sequence_values.clear();
  const std::vector<int64_t> widths = options_.numbers ? options_.numbers->widths() : std::vector<int64_t>();
  batch_.columns.resize(widths.size());
  for (auto& column : batch_.columns) column.clear();
  for (const int32_t unit : bins[next_bin_++])
    for (int s = 0; s < examples_->sequences_per_example(); ++s)
      append(chosen_[static_cast<size_t>(unit)], s);
  rows_ = static_cast<int64_t>(batch_.tokens.size());
  const int64_t unit = options_.pad_to_capacity ? options_.packing.capacity : options_.packing.row_unit;
  const int64_t all = std::max((rows_ + unit - 1) / unit, int64_t{1}) * unit;
  while (static_cast<int64_t>(batch_.tokens.size()) < all) {
    const int64_t rows = std::min(all - static_cast<int64_t>(batch_.tokens.size()), options_.most_rows);
    for (int64_t t = 0; t < rows; ++t) batch_.positions.push_back(static_cast<int32_t>(t));
    batch_.tokens.resize(batch_.positions.size(), 0);
    batch_.targets.resize(batch_.positions.size(), -1);
    batch_.bounds.push_back(static_cast<int32_t>(batch_.tokens.size()));
  }
  for (size_t c = 0; c < widths.size(); ++c)
    batch_.columns[c].resize(batch_.tokens.size() * static_cast<size_t>(widths[c]), 0);
  return batch_;
}

std::vector<std::pair<std::string, double>> ExampleBatches::metrics() const {
  return options_.numbers ? options_.numbers->metrics() : std::vector<std::pair<std::string, double>>();
}

}  // namespace nrl::data
