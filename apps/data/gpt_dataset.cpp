#include "apps/data/gpt_dataset.h"

#include <algorithm>
#include <set>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::data {
namespace {

using Source = DatasetOptions::Source;
using OpenFile = std::shared_ptr<const IndexedDataset>;

OpenFile file_of(const Source& source) {
  return source.file ? source.file : std::make_shared<const IndexedDataset>(source.prefix);
}

int64_t one_epoch(const DatasetOptions& options, const IndexedDataset& file) {
  const SplitPart part = split_part(options.split, options.part, file.lengths());
  return std::max<int64_t>((part.tokens(file.lengths()) - 1) / options.sequence_length, 0);
}

GptPlan plan_for(const DatasetOptions& options, const IndexedDataset& file, int64_t samples) {
  return plan_gpt_index(file.lengths(), split_part(options.split, options.part, file.lengths()),
                        options.sequence_length, samples, file.prefix());
}

/// The number of samples from each source of a blend.
struct Blend {
  std::vector<double> shares;
  std::vector<int64_t> requests;
};

Blend plan_blend(const DatasetOptions& options) {
  const std::vector<Source>& sources = options.sources;
  if (sources.size() > INT16_MAX)
    fail(Exit::config, "data: a blend of {} sources; expected at most {}", sources.size(), INT16_MAX);
  std::vector<double> weights;
  std::vector<int64_t> epochs;
  int64_t available = 0;
  const auto weighted = static_cast<size_t>(
      std::count_if(sources.begin(), sources.end(), [](const Source& s) { return s.weight.has_value(); }));
  NRL_CHECK(weighted == 0 || weighted == sources.size(), "{} weights of {}", weighted, sources.size());
  for (const Source& source : sources) {
    if (weighted > 0) {
      weights.push_back(*source.weight);
      continue;
    }
    const OpenFile file = file_of(source);
    epochs.push_back(one_epoch(options, *file));
    if (epochs.back() == 0)
      fail(Exit::config,
           "data: {} is too small: no complete sample of {} tokens{}; a blend without weights needs at least "
           "one. Fix: remove it, or set weights",
           source.prefix, options.sequence_length + 1,
           options.part == Split::validation ? " for validation" : "");
    weights.push_back(static_cast<double>(epochs.back()));
    available += epochs.back();
  }
  Blend blend{normalized_weights(weights), epochs};
  if (weighted > 0 || options.samples > available) {
    blend.requests.clear();
    for (const double share : blend.shares) blend.requests.push_back(blend_request(share, options.samples));
  }
  // Checks the limits of each source before any order is built.
  for (size_t d = 0; d < sources.size(); ++d) plan_for(options, *file_of(sources[d]), blend.requests[d]);
  return blend;
}

class GptDataset final : public TokenDataset {
 public:
  GptDataset(const DatasetOptions& options, OpenFile file, int64_t samples)
      : TokenDataset(options.documents),
        file_(std::move(file)),
        vocab_size_(options.vocab_size),
        index_(plan_for(options, *file_, samples), file_->lengths(), options.seed, options.orders.get()) {}

  int64_t samples() const override { return index_.samples(); }
  int64_t sequence_length() const override { return index_.plan().sequence_length; }

  void read(int64_t i, std::span<int32_t> out) const override {
    NRL_CHECK(i >= 0 && i < samples() && static_cast<int64_t>(out.size()) == sequence_length() + 1,
              "sample {} of {}, room for {} tokens", i, samples(), out.size());
    const SplitPart& part = index_.plan().part;
    auto [document, offset] = index_.start(i);
    for (; !out.empty(); ++document, offset = 0) {
      const int32_t sequence = index_.sequence(document);
      const int64_t left = part.length(file_->lengths(), sequence) - offset;
      const auto count = static_cast<size_t>(std::min<int64_t>(left, static_cast<int64_t>(out.size())));
      const int64_t skip = sequence == part.first ? part.skip : 0;
      if (count > 0) file_->read(sequence, skip + offset, out.first(count), vocab_size_);
      out = out.subspan(count);
    }
  }

  std::string describe() const override {
    const GptPlan& plan = index_.plan();
    return fmt::format("{} ({} tokens, {} document{}, {} epoch{}{})", file_->prefix(),
                       human_count(static_cast<double>(file_->tokens())),
                       human_count(static_cast<double>(file_->documents())),
                       file_->documents() == 1 ? "" : "s", plan.epochs, plan.epochs == 1 ? "" : "s",
                       plan.part.by_tokens ? ", too few documents for data.split: split by tokens" : "");
  }

 private:
  OpenFile file_;
  int64_t vocab_size_;
  GptIndex index_;
};

// Stores what other processes of the node are not storing already, so that they share the work.
void prepare_orders(const DatasetOptions& options, const Blend& blend) {
  OrderFiles* const orders = options.orders.get();
  if (!orders) return;
  BlendIndex::prepare(blend.shares, blend.requests, options.samples, *orders);
  for (size_t d = 0; d < options.sources.size(); ++d) {
    const OpenFile file = file_of(options.sources[d]);
    GptIndex::prepare(plan_for(options, *file, blend.requests[d]), file->lengths(), options.seed, *orders);
  }
}

class BlendedDataset final : public TokenDataset {
 public:
  BlendedDataset(const DatasetOptions& options, const Blend& blend)
      : TokenDataset(options.documents),
        shares_(blend.shares),
        index_(blend.shares, blend.requests, options.samples, options.orders.get()) {
    for (size_t d = 0; d < shares_.size(); ++d)
      parts_.push_back(std::make_unique<GptDataset>(options, file_of(options.sources[d]), blend.requests[d]));
  }

  int64_t samples() const override { return index_.samples(); }
  int64_t sequence_length() const override { return parts_.front()->sequence_length(); }

  void read(int64_t i, std::span<int32_t> out) const override {
    NRL_CHECK(i >= 0 && i < samples(), "sample {} of {}", i, samples());
    const auto [dataset, sample] = index_.at(i);
    parts_[dataset]->read(sample, out);
  }

  std::string describe() const override {
    std::string text = fmt::format("{} sources", parts_.size());
    for (size_t d = 0; d < parts_.size(); ++d)
      text += fmt::format("{} {:.3g}% {}", d == 0 ? ":" : ",", 100 * shares_[d], parts_[d]->describe());
    return text;
  }

 private:
  std::vector<double> shares_;
  std::vector<std::unique_ptr<GptDataset>> parts_;
  BlendIndex index_;
};

void check(const DatasetOptions& options) {
  if (options.sources.empty()) fail(Exit::config, "data: no dataset is configured");
  if (options.sequence_length <= 0 || options.sequence_length >= INT32_MAX)
    fail(Exit::config, "data: sequence length {} is out of range", options.sequence_length);
  if (options.vocab_size <= 0 || options.vocab_size > INT32_MAX)
    fail(Exit::config, "data: vocabulary size {} is out of range", options.vocab_size);
  if (options.samples < 0) fail(Exit::config, "data: number of samples {} is negative", options.samples);
}

}  // namespace

void open_sources(DatasetOptions& options) {
  for (Source& source : options.sources) source.file = file_of(source);
}

int64_t samples_of_one_epoch(const DatasetOptions& options) {
  int64_t samples = 0;
  for (const Source& source : options.sources) samples += one_epoch(options, *file_of(source));
  return samples;
}

DatasetMemory plan_dataset_memory(std::span<const DatasetOptions> datasets) {
  DatasetMemory memory;
  std::set<OpenFile> files;
  const auto add = [&](const OrderFiles* orders, const OrderBytes& bytes, int64_t build_memory) {
    const bool shared = orders && bytes.arrays >= orders->smallest();
    memory.peak = std::max(memory.peak, memory.order + (shared ? build_memory : bytes.built));
    (shared ? memory.shared : memory.order) += bytes.arrays;
  };
  for (DatasetOptions options : datasets) {
    check(options);
    open_sources(options);
    const size_t count = options.sources.size();
    std::vector<int64_t> requests{options.samples};
    if (count > 1) {
      requests = plan_blend(options).requests;
      const int64_t bytes = BlendIndex::bytes(count, options.samples);
      add(options.orders.get(), {.arrays = bytes, .built = bytes}, 0);
    }
    for (size_t d = 0; d < count; ++d) {
      const OpenFile& file = options.sources[d].file;
      const GptPlan plan = plan_for(options, *file, requests[d]);
      add(options.orders.get(), plan.bytes(), plan.build_memory());
      if (files.insert(file).second) memory.files += file->memory_bytes();
    }
  }
  return memory;
}

std::unique_ptr<TokenDataset> open_token_dataset(const DatasetOptions& given) {
  check(given);
  DatasetOptions options = given;
  open_sources(options);
  if (options.sources.size() == 1)
    return std::make_unique<GptDataset>(options, options.sources[0].file, options.samples);
  const Blend blend = plan_blend(options);
  prepare_orders(options, blend);
  return std::make_unique<BlendedDataset>(options, blend);
}

}  // namespace nrl::data
