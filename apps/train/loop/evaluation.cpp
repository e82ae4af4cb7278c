#include "apps/train/loop/evaluation.h"

#include <algorithm>

#include "apps/plan/forward_plan.h"
#include "apps/train/launch/launch.h"
#include "apps/train/state/checkpoint.h"
#include "apps/train/state/model_source.h"
#include "apps/train/state/run_state.h"
#include "core/device/cpu/features.h"
#include "core/ops/cpu_choice.h"

namespace nrl::train {
namespace {

constexpr int64_t longest_default = 1024;  // tokens, for models of other programs

// Windows that predict `tokens` tokens, of which there are at least 2, but for the first one.
int64_t windows_of(int64_t tokens, int64_t length) {
  return (tokens - 2) / length + 1;
}

// The sequence length of the training run of one of our checkpoints; 0 for other directories.
int64_t training_length(const std::string& directory) {
  const std::string path = join_path(directory, "nrl-train.yaml");
  if (!path_exists(path)) return 0;
  const ConfigResult saved = load_config(path, {});
  return saved.ok() ? saved.config.policy.max_total_sequence_length : 0;
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

}  // namespace

StoredModelEvaluator::StoredModelEvaluator(comm::World& world, const EvaluationOptions& options)
    : world_(world), options_(options) {
  KernelsConfig kernels;
  if (options_.threads > 0) kernels.num_threads = options_.threads;
  options_.threads = threads_for(kernels, world.local_size());
  device_ = open_rank_device(
      world, {.type = options_.device, .isa = ops::cpu_choice().isa, .threads = options_.threads});
  run_collectively(world, [&] { load(); });
}

void StoredModelEvaluator::load() {
  const std::string& directory = options_.directory;
  // The ranks of a node share the verification of its copy.
  model::ModelSpec spec = load_model_directory(directory, {world_.local_rank(), world_.local_size()});
  int64_t& length = options_.sequence_length;
  if (length == 0) length = training_length(directory);
  if (length == 0)
    length = std::min(longest_default, spec.max_positions > 0 ? spec.max_positions : longest_default);
  if (spec.learned_positions && length > spec.max_positions)
    fail(Exit::usage, "--sequence-length {}: the model has {} positions", length, spec.max_positions);
  options_.micro_batch =
      std::min(options_.micro_batch, windows_of(std::max<int64_t>(options_.tokens, 2), length));
  const DType dtype = stored_dtype(directory);
  engine_ = std::make_unique<engine::Engine>(
      plan::make_forward_plan(std::move(spec), {.micro_batch = options_.micro_batch,
                                                .sequence_length = length,
                                                .recipe = precision::recipe_for_weights(dtype),
                                                .device = options_.device,
                                                .threads = options_.threads,
                                                .products = device_.exec.kernels->bf16_products}),
      device_.exec);
  const plan::RunPlan& plan = engine_->plan();
  with_state(*engine_, [&](const TrainState& state) {
    load_weights(directory, plan.spec, state.weights, state.staging);
  });
}

EvaluationSums StoredModelEvaluator::run(const IndexedDataset& data, int64_t max_tokens) {
  const int64_t length = options_.sequence_length, micro = options_.micro_batch;
  const int64_t total = max_tokens > 0 ? std::min(max_tokens, data.tokens()) : data.tokens();
  double sum = 0;
  run_collectively(world_, [&] {
    if (total < 2) fail(Exit::data, "{}: {} tokens; expected at least 2", data.prefix(), total);
    const TokenStream stream(data, spec().vocab_size);
    const int64_t windows = windows_of(total, length), stride = world_.size() * micro;
    int64_t first = world_.rank() * micro;
    std::vector<int32_t> window(static_cast<size_t>(length + 1));
    data::HostMicroBatch batch;
    const auto next = [&]() -> const data::HostMicroBatch& {
      batch.tokens.assign(static_cast<size_t>(micro * length), 0);
      batch.targets.assign(static_cast<size_t>(micro * length), -1);  // no target: no loss
      for (int64_t w = first; w < std::min(first + micro, windows); ++w) {
        const auto count = static_cast<size_t>(std::min(length, total - 1 - w * length));
        stream.read(w * length, std::span(window).first(count + 1));
        const auto at = static_cast<std::ptrdiff_t>((w - first) * length);
        std::copy_n(window.begin(), count, batch.tokens.begin() + at);
        std::copy_n(window.begin() + 1, count, batch.targets.begin() + at);
      }
      first += stride;
      return batch;
    };
    const int64_t batches = first < windows ? (windows - first + stride - 1) / stride : 0;
    sum = engine_->evaluate(batches, next).front();
  });
  world_.comm().all_reduce(std::span(&sum, 1));
  return {-sum, total - 1};
}

}  // namespace nrl::train
