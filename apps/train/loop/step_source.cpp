#include "apps/train/loop/step_source.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "apps/train/loop/example_numbers.h"
#include "core/base/error.h"

namespace nrl::train {

TokenSource::TokenSource(const data::TokenDataset& dataset, const data::LoaderOptions& loading,
                         const parallel::Groups& groups, const plan::RunPlan& plan)
    : loader_(dataset, loading), dataset_(dataset), loading_(loading), groups_(groups), plan_(plan) {}

int64_t TokenSource::begin() {
  next_ = 0;
  counts_ = {};
  return loading_.accumulation;
}

StepSource::Item TokenSource::next() {
  const data::HostMicroBatch& batch = loader_.next();
  counts_ = counts_ + plan::count(batch, plan_.spec);
  return {.batch = batch,
          .first_sample = data::first_sample(loading_, 0, next_++) - loading_.consumed_samples};
}

StepSource::Totals TokenSource::totals() {
  const int64_t tokens = loading_.global_batch() * plan_.sequence_length;
  return {.tokens = tokens,
          .loss_tokens = loss_tokens_of_all(dataset_, tokens, counts_, groups_, plan_.layout),
          .examples = loading_.global_batch()};
}

int64_t ExampleSource::begin() {
  step_ = batches_->begin_step();
  return step_.microbatches;
}

StepSource::Item ExampleSource::next() {
  const data::HostMicroBatch& batch = batches_->next();
  return {.batch = batch, .share = static_cast<float>(batches_->rows()) / static_cast<float>(step_.rows)};
}

StepSource::Totals ExampleSource::totals() {
  Totals totals{.tokens = step_.rows,
                .loss_tokens = step_.loss_tokens,
                .examples = step_.examples,
                .efficiency = step_.efficiency,
                .imbalance = step_.imbalance};
  for (const auto& [name, value] : batches_->metrics())
    totals.metrics.push_back({.name = name, .value = value});
  return totals;
}

namespace {

data::PackAlgorithm pack_algorithm(const PolicyConfig& policy) {
  if (policy.dynamic_batching.enabled) return data::PackAlgorithm::sorted;
  if (!policy.sequence_packing.enabled) return data::PackAlgorithm::none;
  switch (policy.sequence_packing.algorithm) {
    case PackingAlgorithm::modified_first_fit_decreasing:
      return data::PackAlgorithm::modified_first_fit_decreasing;
    case PackingAlgorithm::first_fit_decreasing:
      return data::PackAlgorithm::first_fit_decreasing;
    case PackingAlgorithm::first_fit_shuffle:
      return data::PackAlgorithm::first_fit_shuffle;
    case PackingAlgorithm::concatenative:
      return data::PackAlgorithm::concatenative;
  }
  NRL_CHECK(false);
}

data::ExampleBatchOptions batch_options(const Config& config, const plan::RunPlan& plan,
                                        data::ExampleBatchOptions options) {
  const model::ModelLayout& layout = plan.layout;
  const plan::BatchShape& shape = plan.tensors->shape();
  const bool gpu = plan.device == DeviceType::cuda;
  const int64_t fp8 = plan.recipe.quantizes_any() ? row_unit(plan.recipe.quantized().input.scaling) : 1;
  options.global_batch = plan.batch.global;
  options.packing = {.algorithm = pack_algorithm(config.policy),
                     .order = layout.stages > 1 ? data::BinOrder::small_ends : data::BinOrder::largest_first,
                     .capacity = shape.length,
                     .row_unit = std::lcm(fp8, layout.sequence_parallel ? layout.tensor : 1),
                     .ranks = plan.position.sizes.dp,
                     .bins_multiple = layout.chunks > 1 ? layout.stages : 1,
                     .micro_batch_size = plan.batch.micro};
  options.rank = plan.position.at.dp;
  options.most_microbatches = shape.microbatches;
  options.rounded_up = [&fewer = plan.decoder->options().fewer](int64_t microbatches) {
    while (microbatches <= std::ssize(fewer) && fewer[static_cast<size_t>(microbatches) - 1].actions.empty())
      ++microbatches;
    return microbatches;
  };
  options.most_rows = shape.packed;
  options.scores = config.algorithm == Algorithm::rm;
  // Libraries of a GPU choose their kernels for every shape; context-parallel ranks divide a fixed number of
  // rows.
  options.pad_to_capacity = gpu || layout.context > 1;
  options.work = [&spec = plan.spec](int64_t rows) {
    return static_cast<double>(rows) * model::training_flops_per_token(spec, rows);
  };
  return options;
}

}  // namespace

std::unique_ptr<StepSource> example_source(const Config& config,
                                           std::shared_ptr<const data::Examples> examples,
                                           const plan::RunPlan& plan, data::ExampleBatchOptions options) {
  return std::make_unique<ExampleSource>(std::make_unique<data::ExampleBatches>(
      std::move(examples), batch_options(config, plan, std::move(options))));
}

std::unique_ptr<StepSource> training_source(const Config& config, const TrainData& data,
                                            const plan::RunPlan& plan, const parallel::Groups& groups,
                                            int64_t consumed_samples, int64_t steps) {
  if (data.prompts)
    fail(Exit::config,
         "data.train.format: prompts: only training generates rollouts. Fix: give this command rollouts in "
         "files "
         "(data.train.format: rollouts)");
  if (data.examples)
    return example_source(config, data.examples, plan,
                          {.consumed_samples = consumed_samples,
                           .seed = static_cast<uint64_t>(data_seed(config)),
                           .numbers = example_numbers(config, data.examples, data.reference)});
  data::LoaderOptions loading = make_loader_options(config, plan.batch, plan.position);
  loading.consumed_samples = consumed_samples;
  loading.steps = steps;
  return std::make_unique<TokenSource>(*data.dataset, loading, groups, plan);
}

std::unique_ptr<StepSource> validation_source(const Config& config, const ValidationData& data,
                                              const plan::RunPlan& plan, const parallel::Groups& groups) {
  if (data.examples)
    return example_source(config, data.examples, plan,
                          {.shuffle = false,
                           .repeat = false,
                           .numbers = example_numbers(config, data.examples, data.reference)});
  data::LoaderOptions loading = make_loader_options(config, plan.batch, plan.position);
  loading.steps = data.batches;
  loading.prefetch = data::LoaderOptions{}.prefetch;  // small: allocated in addition to the training loader
  return std::make_unique<TokenSource>(*data.dataset, loading, groups, plan);
}

std::unique_ptr<StepSource> stored_examples_source(const Config& config,
                                                   std::shared_ptr<const data::Examples> examples,
                                                   const plan::RunPlan& plan, int64_t at_once) {
  data::ExampleBatchOptions options = batch_options(config, plan, {.shuffle = false, .repeat = false});
  options.global_batch = at_once;
  // Only microbatches that the stages take at once are in memory at a time.
  options.packing.bins_multiple = plan.tensors->shape().microbatches;
  options.most_microbatches = at_once + options.packing.bins_multiple;
  return std::make_unique<ExampleSource>(
      std::make_unique<data::ExampleBatches>(std::move(examples), options));
}

FilledStep fill_step(engine::Engine& engine, StepSource& source) {
  FilledStep out;
  plan::BatchCounts counts;
  const int64_t microbatches = source.begin();
  for (int64_t m = 0; m < microbatches; ++m) {
    const StepSource::Item item = source.next();
    engine.fill(m, item.batch, item.first_sample, item.share);
    counts = counts + plan::count(item.batch, engine.plan().spec);
  }
  out.totals = source.totals();
  out.keys = counts.pairs / static_cast<double>(counts.tokens);
  return out;
}

}  // namespace nrl::train
