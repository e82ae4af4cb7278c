#pragma once
// Seeded random samples, for runs whose data files are not needed.

#include <string>
#include <vector>

#include "apps/data/examples/examples.h"
#include "apps/data/gpt_dataset.h"
#include "apps/train/start/run_data.h"
#include "core/config/load.h"

namespace nrl::verify {

/// Uniform random token ids: a pure function of (seed, sample, position). If the rules name an end token, one
/// of 16 positions has it, so that documents end within the samples.
class RandomTokens : public data::TokenDataset {
 public:
  RandomTokens(const data::DocumentRules& rules, int64_t samples, int64_t sequence_length, int64_t vocab_size,
               uint64_t seed)
      : TokenDataset(rules),
        samples_(samples),
        sequence_length_(sequence_length),
        vocab_size_(vocab_size),
        seed_(seed) {}

  int64_t samples() const override { return samples_; }
  int64_t sequence_length() const override { return sequence_length_; }
  void read(int64_t i, std::span<int32_t> out) const override;
  std::string describe() const override;

 private:
  int64_t samples_, sequence_length_, vocab_size_;
  uint64_t seed_;
};

/// Examples of 2 to `most` random tokens, most of them short, of which the second and some more have a loss.
/// Alone in their example they have advantages, and log-probabilities of a sampler.
/// `top_k`: each token with a loss has as many ids of a teacher, with random log-probabilities; 0: there is
/// none.
class RandomExamples : public data::Examples {
 public:
  RandomExamples(int64_t size, int sequences_per_example, int64_t most, int64_t vocab_size, uint64_t seed,
                 int64_t top_k = 0);

  int64_t size() const override { return std::ssize(ids_) / sequences_; }
  int sequences_per_example() const override { return sequences_; }
  data::SequenceLength length(int64_t example, int sequence) const override;
  std::span<const int32_t> ids(int64_t example, int sequence) const override;
  bool in_loss(int64_t example, int sequence, int64_t token) const override;
  std::string where(int64_t example) const override;
  bool rendered() const override { return false; }
  std::string describe() const override;
  data::ExampleColumns columns() const override;
  double value(int64_t example, data::ExampleValue value) const override;
  std::span<const float> log_probs(int64_t example, data::TokenLogProbs kind) const override;
  std::span<const int32_t> top_ids(int64_t example) const override {
    return teachers_.empty() ? std::span<const int32_t>() : teachers_[static_cast<size_t>(example)].ids;
  }
  std::span<const float> top_log_probs(int64_t example) const override {
    return teachers_.empty() ? std::span<const float>() : teachers_[static_cast<size_t>(example)].log_probs;
  }

 private:
  struct Teacher {
    std::vector<int32_t> ids;
    std::vector<float> log_probs;
  };

  int sequences_;
  std::vector<std::vector<int32_t>> ids_;      // [size * sequences_]
  std::vector<std::vector<float>> log_probs_;  // the same
  int32_t top_k_;
  std::vector<Teacher> teachers_;  // [size], with a teacher
};

/// The samples of `steps` steps of a configuration, or as many examples. Where documents have rules, the last
/// token of the vocabulary ends them.
train::TrainData random_tokens(const ConfigResult& config, int64_t steps);

}  // namespace nrl::verify
