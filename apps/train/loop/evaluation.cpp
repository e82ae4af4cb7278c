#include "apps/train/loop/evaluation.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "apps/data/tokenizer.h"
#include "apps/plan/forward_plan.h"
#include "apps/state/checkpoint.h"
#include "apps/state/model_source.h"
#include "apps/state/run_state.h"
#include "apps/train/launch/launch.h"
#include "apps/train/start/run_data.h"
#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "core/ops/kernel_table.h"
#include "parallel/grid/nodes.h"

namespace nrl::train {
namespace {

int64_t pieces(int64_t n, int64_t most) {
  return (n + most - 1) / most;
}

// The documents of a token file as one stream.
class TokenStream {
 public:
  TokenStream(const IndexedDataset& data, int64_t vocab_size) : data_(data), vocab_size_(vocab_size) {
    starts_.reserve(data.lengths().size() + 1);
    for (int32_t length : data.lengths()) starts_.push_back(starts_.back() + length);
  }
  void read(int64_t begin, std::span<int32_t> out) const {
    auto sequence = std::upper_bound(starts_.begin(), starts_.end(), begin) - starts_.begin() - 1;
    while (!out.empty()) {
      const int64_t offset = begin - starts_[sequence];
      const int64_t left = starts_[static_cast<size_t>(sequence) + 1] - begin;
      const auto count = static_cast<size_t>(std::min<int64_t>(left, static_cast<int64_t>(out.size())));
      if (count > 0) data_.read(sequence, offset, out.first(count), vocab_size_);
      out = out.subspan(count);
      begin += static_cast<int64_t>(count);
      ++sequence;
    }
  }

 private:
  const IndexedDataset& data_;
  int64_t vocab_size_;
  std::vector<int64_t> starts_{0};
};

// The windows of the first `total` tokens of a stream. All ranks have the same number of microbatches, so
// that they can communicate in each; the last ones may be empty.
class WindowSource final : public StepSource {
 public:
  WindowSource(const TokenStream& stream, int64_t total, const plan::RunPlan& plan)
      : stream_(stream),
        total_(total),
        plan_(plan),
        windows_(windows_of(total, plan.sequence_length)),
        window_(static_cast<size_t>(plan.sequence_length + 1)) {}

  int64_t begin() override {
    first_ = plan_.position.at.dp * plan_.batch.micro;
    const int64_t at_once = plan_.tensors->shape().microbatches;
    return pieces(pieces(windows_, plan_.batch.global), at_once) * at_once;
  }

  Item next() override {
    const int64_t length = plan_.sequence_length, micro = plan_.batch.micro;
    batch_.tokens.assign(static_cast<size_t>(micro * length), 0);
    batch_.targets.assign(static_cast<size_t>(micro * length), -1);  // no target: no loss
    for (int64_t w = first_; w < std::min(first_ + micro, windows_); ++w) {
      const std::span<const int32_t> tokens = read(w);
      const auto at = static_cast<std::ptrdiff_t>((w - first_) * length);
      std::copy(tokens.begin(), tokens.end() - 1, batch_.tokens.begin() + at);
      std::copy(tokens.begin() + 1, tokens.end(), batch_.targets.begin() + at);
    }
    first_ += plan_.batch.global;
    return {.batch = batch_};
  }

  Totals totals() override { return {.tokens = total_ - 1, .loss_tokens = total_ - 1}; }

  /// Reads every `ranks`-th window from `rank` on. Fails (65) for tokens outside the vocabulary. While ranks
  /// communicate, it would be too late.
  void check(int rank, int ranks) {
    for (int64_t w = rank; w < windows_; w += ranks) read(w);
  }

 private:
  /// The tokens of a window and the one after it.
  std::span<const int32_t> read(int64_t w) {
    const int64_t begin = w * plan_.sequence_length,
                  count = std::min(plan_.sequence_length + 1, total_ - begin);
    const auto out = std::span(window_).first(static_cast<size_t>(count));
    stream_.read(begin, out);
    return out;
  }

  const TokenStream& stream_;
  const int64_t total_;
  const plan::RunPlan& plan_;
  const int64_t windows_;
  std::vector<int32_t> window_;
  int64_t first_ = 0;
  data::HostMicroBatch batch_;
};

// One sequence of each example.
class OneOfSeveral final : public data::Examples {
 public:
  OneOfSeveral(std::shared_ptr<const data::Examples> all, int sequence)
      : all_(std::move(all)), sequence_(sequence) {}
  int64_t size() const override { return all_->size(); }
  int sequences_per_example() const override { return 1; }
  data::SequenceLength length(int64_t example, int) const override {
    return all_->length(example, sequence_);
  }
  std::span<const int32_t> ids(int64_t example, int) const override { return all_->ids(example, sequence_); }
  bool in_loss(int64_t example, int, int64_t token) const override {
    return all_->in_loss(example, sequence_, token);
  }
  std::string where(int64_t example) const override { return all_->where(example); }
  bool rendered() const override { return all_->rendered(); }
  std::string describe() const override { return all_->describe(); }

 private:
  std::shared_ptr<const data::Examples> all_;
  int sequence_;
};

// Microbatches that pipeline stages take at once: their bubble is as long as (stages - 1) microbatches.
int64_t microbatches_at_once(const Config& config, const EvaluationOptions& options) {
  constexpr int64_t per_stage = 8;  // at most 1/9 is bubble
  const PolicyConfig& policy = config.policy;
  const int64_t stages = config.distributed.pipeline_parallel_size;
  // The number of examples is not known yet; a group that they do not fill has short microbatches.
  int64_t out = 2 * stages;
  if (!options.examples) {
    const int64_t windows =
        windows_of(std::max<int64_t>(options.tokens, 2), policy.max_total_sequence_length);
    const int64_t all = pieces(windows, policy.train_global_batch_size);
    out = pieces(all, pieces(all, per_stage * stages));
  }
  return config.distributed.virtual_pipeline_size.value_or(1) > 1 ? pieces(out, stages) * stages : out;
}

}  // namespace

StoredModelEvaluator::StoredModelEvaluator(comm::World& world, const EvaluationOptions& options)
    : world_(world), options_(options) {
  std::optional<model::ModelSpec> spec;
  std::optional<ConfigResult> config;
  run_collectively(world, [&] {
    // The ranks of a node share the verification of its copy.
    spec = load_model_directory(options_.directory, {world.local_rank(), world.local_size()});
    require_logits(*spec, "eval", options_.directory);
    config =
        evaluation_config(options_, *spec, world.size(), parallel::nodes_of(world.nodes(), world.hosts()));
  });
  placed_.emplace(world, std::move(*config));
  run_collectively(world, [&] { load(std::move(*spec)); });
}

void StoredModelEvaluator::load(model::ModelSpec spec) {
  const Config& config = placed_->config.config;
  const Placement& placement = placed_->placement;
  const ops::Exec& exec = placement.exec();
  engine_ = std::make_unique<engine::Engine>(
      plan::make_forward_plan(std::move(spec),
                              {.micro_batch = config.policy.train_micro_batch_size.value(),
                               .sequence_length = config.policy.max_total_sequence_length,
                               .packed = options_.examples,
                               .at_once = microbatches_at_once(config, options_),
                               .recipe = precision::recipe_for_weights(stored_dtype(options_.directory)),
                               .device = placement.device(),
                               .threads = placement.host_threads(),
                               .products = exec.kernels->bf16_products},
                              config, placement.grid_position()),
      placement.groups(), exec);
  with_state(*engine_, [&](const TrainState& state) {
    load_weights(options_.directory, plan().spec, state.weights, state.staging);
  });
}

EvaluationSums StoredModelEvaluator::run(const IndexedDataset& data, int64_t max_tokens) {
  NRL_CHECK(!options_.examples);
  const int64_t total = max_tokens > 0 ? std::min(max_tokens, data.tokens()) : data.tokens();
  std::optional<TokenStream> stream;
  std::optional<WindowSource> source;
  run_collectively(world_, [&] {
    if (total < 2) fail(Exit::data, "{}: {} tokens; expected at least 2", data.prefix(), total);
    stream.emplace(data, spec().vocab_size);
    source.emplace(*stream, total, plan());
    source->check(world_.rank(), world_.size());
  });
  return sum_of(*source, 1);
}

std::shared_ptr<const data::ExampleSet> StoredModelEvaluator::open_examples(const std::string& path) {
  std::shared_ptr<const data::ExampleSet> out;
  run_collectively(world_, [&] {
    const PolicyConfig& policy = config().policy;
    const auto has = [&](const char* name) { return path_exists(join_path(options_.directory, name)); };
    const bool own = has("tokenizer.json") || has("tokenizer.model");  // an adapter may have none
    const auto tokenizer = policy.tokenizer.name
                               ? data::make_tokenizer(*policy.tokenizer.name)
                               : data::tokenizer_in(own ? options_.directory : *policy.model_name);
    data::ExampleOptions options = example_options(config(), true, spec().vocab_size);
    options.inputs = {path};
    out = data::open_examples(options, *tokenizer, placed_->placement.host_threads());
  });
  return out;
}

EvaluationSums StoredModelEvaluator::run(const std::shared_ptr<const data::Examples>& examples,
                                         int sequence) {
  NRL_CHECK(options_.examples && sequence < examples->sequences_per_example());
  constexpr int64_t of_a_rank = 1024;  // examples: enough for full microbatches
  const int64_t at_once = std::min(of_a_rank * plan().position.sizes.dp, examples->size());
  std::unique_ptr<StepSource> source;
  run_collectively(world_, [&] {
    source =
        stored_examples_source(config(), std::make_shared<OneOfSeveral>(examples, sequence), plan(), at_once);
  });
  return sum_of(*source, pieces(examples->size(), at_once));
}

EvaluationSums StoredModelEvaluator::sum_of(StepSource& source, int64_t steps) {
  EvaluationSums out;
  double sum = 0;
  for (int64_t s = 0; s < steps; ++s) {
    sum +=
        engine_
            ->evaluate(
                source.begin(), [&]() -> const data::HostMicroBatch& { return source.next().batch; }, s == 0)
            .front();
    out.tokens += source.totals().loss_tokens;
  }
  world_.comm().all_reduce(std::span(&sum, 1));
  out.negative_log_prob = -sum;
  return out;
}

}  // namespace nrl::train
