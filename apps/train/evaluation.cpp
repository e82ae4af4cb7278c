#include "apps/train/evaluation.h"

#include <algorithm>

#include "apps/train/checkpoint.h"
#include "apps/train/model_source.h"
#include "apps/train/session.h"
#include "core/device/choose.h"
#include "core/device/cpu/features.h"
#include "core/device/cpu/threads.h"
#include "core/ops/step/step.h"
#include "core/ops/transfer.h"

namespace nrl::train {
namespace {

constexpr int64_t longest_default = 1024;  // tokens, for models of other programs

// The sequence length that our own checkpoint was trained with; 0 for other directories.
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
      const int64_t offset = begin - starts_[static_cast<size_t>(sequence)];
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

Evaluator::Evaluator(comm::World& world, const EvaluationOptions& options)
    : world_(world), options_(options) {
  std::string why_not;
  const auto seen =
      devices_of_node(world, options.device == DeviceType::cuda ? accelerator_backend().devices(why_not)
                                                                : std::vector<std::string>{});
  together(world, [&] { load(seen); });
}

void Evaluator::load(const std::vector<std::vector<std::string>>& seen) {
  const std::string& directory = options_.directory;
  spec_ = load_model_directory(directory);
  parameters_ = model::make_parameters(spec_);
  int64_t& length = options_.sequence_length;
  if (length == 0) length = training_length(directory);
  if (length == 0)
    length = std::min(longest_default, spec_.max_positions > 0 ? spec_.max_positions : longest_default);
  if (spec_.learned_positions && length > spec_.max_positions)
    fail(Exit::usage, "--sequence-length {}: this model has {} positions", length, spec_.max_positions);

  if (options_.device == DeviceType::cuda) {
    accelerator_ = open_accelerator(device::choose_ordinal(world_.local_rank(), seen, false), {});
    exec_ = accelerator_.exec();
  } else {
    exec_.kernels = &ops::cpu_kernels(cpu::best_isa());
    Config threads;
    if (options_.threads > 0) threads.kernels.num_threads = options_.threads;
    exec_.threads = threads_for(threads, world_.local_size());
    cpu::use_threads(exec_.threads);
  }
  recipe_ = stored_dtype(directory) == DType::bf16 ? precision::bfloat16 : precision::float32;

  std::vector<memory::BufferId> buffers;
  for (const model::Parameter& p : parameters_.all)
    buffers.push_back(memory_.add(p.name, memory::Category::weights, p.numel() * size_of(recipe_.weights)));
  const memory::BufferId sum = memory_.add("evaluation sum", memory::Category::data, 8);
  tensors_ = std::make_unique<plan::BatchTensors>(
      memory_, plan::BatchShape{.sequences = options_.micro_batch, .length = length});
  model::DecoderOptions decoder;
  decoder.tokens = options_.micro_batch * length;
  decoder.max_sequence = length;
  decoder.recipe = recipe_;
  decoder.threads = exec_.threads;
  decoder.device = options_.device;
  decoder_ = std::make_unique<model::Decoder>(spec_, parameters_, decoder, memory_);
  memory_.solve();
  arenas_ = exec_.device ? memory::Arenas(memory_, *exec_.device, exec_.stream) : memory::Arenas(memory_);

  std::vector<Tensor> weights;
  std::vector<cpu::HostMemory> staging;
  std::vector<model::ParameterView> views;
  for (size_t i = 0; i < parameters_.all.size(); ++i) {
    const model::Parameter& p = parameters_.all[i];
    auto view = [&](void* data) {
      return p.shape.size() == 1 ? make_tensor(data, recipe_.weights, {p.shape[0]})
                                 : make_tensor(data, recipe_.weights, {p.shape[0], p.shape[1]});
    };
    views.push_back({view(arenas_.at(memory_, buffers[i])), {}});
    if (exec_.device) staging.emplace_back(static_cast<size_t>(views.back().weight.bytes()));
    weights.push_back(exec_.device ? view(staging.back().data()) : views.back().weight);
  }
  load_weights(directory, spec_, parameters_, weights);
  if (exec_.device)
    for (size_t i = 0; i < weights.size(); ++i) ops::upload(exec_, views[i].weight, weights[i].data);
  sum_ = make_tensor(arenas_.at(memory_, sum), DType::f64, {1});
  tensors_->bind(memory_, arenas_, exec_);
  decoder_->bind(memory_, arenas_, exec_, std::move(views), [](int) {});
}

EvaluationSums Evaluator::run(const IndexedDataset& data, int64_t max_tokens) {
  const int64_t length = options_.sequence_length, micro = options_.micro_batch;
  const int64_t total = max_tokens > 0 ? std::min(max_tokens, data.tokens()) : data.tokens();
  double sum = 0;
  together(world_, [&] {
    if (total < 2) fail(Exit::data, "{}: {} tokens; two are needed for a loss", data.prefix(), total);
    const TokenStream stream(data, spec_.vocab_size);
    const int64_t windows = (total - 1 + length - 1) / length;
    ops::upload(exec_, sum_, &sum);
    std::vector<int32_t> window(static_cast<size_t>(length + 1));
    data::MicroBatch batch;
    for (int64_t first = world_.rank() * micro; first < windows; first += world_.size() * micro) {
      batch.tokens.assign(static_cast<size_t>(micro * length), 0);
      batch.targets.assign(static_cast<size_t>(micro * length), -1);  // no target: no loss
      for (int64_t w = first; w < std::min(first + micro, windows); ++w) {
        const auto count = static_cast<size_t>(std::min(length, total - 1 - w * length));
        stream.read(w * length, std::span(window).first(count + 1));
        const auto at = static_cast<std::ptrdiff_t>((w - first) * length);
        std::copy_n(window.begin(), count, batch.tokens.begin() + at);
        std::copy_n(window.begin() + 1, count, batch.targets.begin() + at);
      }
      tensors_->fill(0, batch, 0);
      tensors_->commit(0, 0);
      decoder_->evaluate(tensors_->microbatches().front());
      ops::add_sum(exec_, {decoder_->log_prob(), sum_});
    }
    ops::download(exec_, sum_, &sum);
  });
  world_.comm().all_reduce(std::span(&sum, 1));
  return {-sum, total - 1};
}

}  // namespace nrl::train
