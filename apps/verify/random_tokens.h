#pragma once
// Seeded random samples, for runs whose data files are not needed.

#include <memory>

#include "apps/data/gpt_dataset.h"
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

/// The samples of `steps` steps of a configuration. Where documents have rules, the last token of the
/// vocabulary ends them.
std::unique_ptr<data::TokenDataset> random_tokens(const ConfigResult& config, int64_t steps);

}  // namespace nrl::verify
