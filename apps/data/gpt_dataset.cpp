#include "apps/data/gpt_dataset.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::data {
namespace {

class GptDataset final : public TokenDataset {
 public:
  GptDataset(const DatasetOptions& options, const std::string& prefix, int64_t samples)
      : file_(prefix),
        sequence_length_(options.sequence_length),
        vocab_size_(options.vocab_size),
        index_(build_gpt_index(file_.lengths(), split_bounds(options.split, options.part, file_.sequences()),
                               options.sequence_length, samples, options.seed, prefix)) {}

  int64_t samples() const override { return index_.samples(); }
  int64_t sequence_length() const override { return sequence_length_; }

  void read(int64_t i, std::span<int32_t> out) const override {
    NRL_CHECK(i >= 0 && i < samples() && static_cast<int64_t>(out.size()) == sequence_length_ + 1,
              "sample {} of {}, room for {} tokens", i, samples(), out.size());
    const size_t at = index_.shuffle[static_cast<size_t>(i)];
    int64_t offset = index_.start_offset[at];
    for (auto document = static_cast<size_t>(index_.start_document[at]); !out.empty();
         ++document, offset = 0) {
      const int32_t sequence = index_.documents[document];
      const int64_t left = file_.lengths()[static_cast<size_t>(sequence)] - offset;
      const auto count = static_cast<size_t>(std::min<int64_t>(left, static_cast<int64_t>(out.size())));
      if (count > 0) file_.read(sequence, offset, out.first(count), vocab_size_);
      out = out.subspan(count);
    }
  }

  std::string describe() const override {
    return fmt::format("{} ({} tokens, {} documents, {} epoch{})", file_.prefix(),
                       human_count(static_cast<double>(file_.tokens())),
                       human_count(static_cast<double>(file_.documents())), index_.epochs,
                       index_.epochs == 1 ? "" : "s");
  }

 private:
  IndexedDataset file_;
  int64_t sequence_length_, vocab_size_;
  GptIndex index_;
};

class BlendedDataset final : public TokenDataset {
 public:
  BlendedDataset(const DatasetOptions& options) {
    if (options.sources.size() > INT16_MAX)
      fail(Exit::config, "data: at most {} sources can be blended", INT16_MAX);
    std::vector<double> weights;
    for (const auto& source : options.sources) weights.push_back(source.weight);
    weights_ = normalised_weights(weights);
    for (size_t d = 0; d < weights_.size(); ++d)
      parts_.push_back(std::make_unique<GptDataset>(options, options.sources[d].prefix,
                                                    blend_request(weights_[d], options.samples)));
    index_ = build_blend_index(weights_, options.samples);
    std::vector<int64_t> used(parts_.size(), 0);
    for (const int16_t d : index_.dataset) ++used[static_cast<size_t>(d)];
    for (size_t d = 0; d < parts_.size(); ++d)
      if (used[d] > parts_[d]->samples())
        fail(Exit::config,
             "data: the blend draws {} samples from {}, which gives {}; use fewer or larger sources", used[d],
             options.sources[d].prefix, parts_[d]->samples());
  }

  int64_t samples() const override { return static_cast<int64_t>(index_.sample.size()); }
  int64_t sequence_length() const override { return parts_.front()->sequence_length(); }

  void read(int64_t i, std::span<int32_t> out) const override {
    NRL_CHECK(i >= 0 && i < samples(), "sample {} of {}", i, samples());
    const auto k = static_cast<size_t>(i);
    parts_[static_cast<size_t>(index_.dataset[k])]->read(index_.sample[k], out);
  }

  std::string describe() const override {
    std::string text = fmt::format("{} sources", parts_.size());
    for (size_t d = 0; d < parts_.size(); ++d)
      text += fmt::format("{} {:.3g}% {}", d == 0 ? ":" : ",", 100 * weights_[d], parts_[d]->describe());
    return text;
  }

 private:
  std::vector<double> weights_;
  std::vector<std::unique_ptr<GptDataset>> parts_;
  BlendIndex index_;
};

}  // namespace

std::unique_ptr<TokenDataset> open_token_dataset(const DatasetOptions& options) {
  if (options.sources.empty()) fail(Exit::config, "data: no dataset is given");
  if (options.sequence_length <= 0 || options.sequence_length >= INT32_MAX)
    fail(Exit::config, "data: sequence length {} is out of range", options.sequence_length);
  if (options.vocab_size <= 0 || options.vocab_size > INT32_MAX)
    fail(Exit::config, "data: vocabulary size {} is out of range", options.vocab_size);
  if (options.samples < 0) fail(Exit::config, "data: {} samples wanted", options.samples);
  if (options.sources.size() == 1)
    return std::make_unique<GptDataset>(options, options.sources[0].prefix, options.samples);
  return std::make_unique<BlendedDataset>(options);
}

}  // namespace nrl::data
