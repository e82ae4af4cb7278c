#pragma once
// The order in which Megatron-LM's GPTDataset and BlendedDataset draw samples from documents
// (megatron/core/datasets: gpt_dataset.py, its C++ helpers, blended_dataset.py), bit for bit.

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/device/cpu/memory.h"

namespace nrl::data {

/// The part of `numpy.random.RandomState` that orders data: seeding with one 32-bit number, and `shuffle`.
class NumpyRandomState {
 public:
  explicit NumpyRandomState(uint32_t seed) : engine_(seed) {}

  /// numpy's legacy Fisher-Yates from the end; the partner is drawn by masking and rejecting. At most 2^32
  /// values.
  template <class T>
  void shuffle(std::span<T> values) {
    // The partners do not depend on the values: they are drawn in batches, so that the cache misses of a
    // batch overlap.
    std::array<uint32_t, 64> partners;
    for (uint64_t last = values.size(); last-- > 1;) {
      const uint64_t count = std::min<uint64_t>(partners.size(), last);
      for (uint64_t k = 0; k < count;) {
        const auto bound = static_cast<uint32_t>(last - k);
        const uint32_t value = static_cast<uint32_t>(engine_()) & (UINT32_MAX >> std::countl_zero(bound));
        partners[k] = value;
        k += value <= bound;
        __builtin_prefetch(values.data() + std::min(value, bound), 1);
      }
      for (uint64_t k = 0; k < count; ++k) std::swap(values[last - k], values[partners[k]]);
      last -= count - 1;
    }
  }

 private:
  std::mt19937 engine_;
};

enum class Split { train = 0, validation = 1, test = 2 };

/// Shares of the sequences that go to train, validation and test, in any scale. Throws Error (`config`)
/// unless all are finite and not negative and one is positive.
using SplitShares = std::array<double, 3>;

/// "969,30,1" or "1": missing shares are 0.
SplitShares parse_split(const std::string& text);

/// The items [first, second) of a split of `count` items. Rounds half to even as Python does.
std::pair<int64_t, int64_t> split_bounds(const SplitShares& shares, Split split, int64_t count);

/// The part of a token file that belongs to a split: the sequences [first, last), without the first `skip`
/// tokens of `first` and the last `drop` tokens of `last - 1`.
struct SplitPart {
  int64_t first = 0, last = 0;
  int64_t skip = 0, drop = 0;
  bool by_tokens = false;  ///< cut inside sequences

  /// Tokens of a sequence in [first, last) that belong to the part; `lengths` are those of the whole file.
  int64_t length(std::span<const int32_t> lengths, int64_t sequence) const {
    return lengths[static_cast<size_t>(sequence)] - (sequence == first ? skip : 0) -
           (sequence + 1 == last ? drop : 0);
  }
  int64_t tokens(std::span<const int32_t> lengths) const;
};

/// Whole sequences, as in Megatron-LM. Where that leaves train or validation without a token although it has
/// a share (a file of one document, or a few), the tokens themselves are split, in the order of the file.
SplitPart split_part(const SplitShares& shares, Split split, std::span<const int32_t> lengths);

/// How often and how the sequences of a part are gone through for a number of samples.
struct GptPlan {
  SplitPart part;
  int64_t sequence_length = 0;
  int64_t tokens = 0;          ///< of one epoch
  int64_t epochs = 0;          ///< the least that make the samples wanted
  bool separate_last = false;  ///< the last epoch is shuffled by itself
  int64_t first_samples = 0;   ///< samples that are shuffled together, those of a separate last epoch apart
  int64_t total = 0;           ///< samples of all epochs
  int64_t kept = 0;            ///< the first of them in the shuffled order, that can be asked for

  int64_t documents() const { return epochs * (part.last - part.first); }
  /// Host memory of the index: while it lives, and at most while it is built.
  int64_t bytes() const;
  int64_t peak_bytes() const;
};

/// Plans for at least `samples` samples of `sequence_length` + 1 tokens (one token shared by neighbors).
/// Throws Error (`data`) where the part holds no token, (`config`) where more samples or epochs are asked for
/// than an index can hold; `name` is the file's, for messages.
GptPlan plan_gpt_index(std::span<const int32_t> lengths, const SplitPart& part, int64_t sequence_length,
                       int64_t samples, const std::string& name);

/// Where samples begin and in which order they come. Sample i has the tokens from start(i) on, the first
/// token of the sample behind it in the stream included. Only the two shuffled orders are stored; a sample's
/// start follows from its position in the stream of tokens.
class GptIndex {
 public:
  /// `lengths` are those of the whole file; they must outlive the index.
  GptIndex(const GptPlan& plan, std::span<const int32_t> lengths, uint32_t seed);

  const GptPlan& plan() const { return plan_; }
  int64_t samples() const { return plan_.kept; }
  /// Sequence numbers, every epoch's in shuffled order: [plan().documents()].
  std::span<const int32_t> documents() const { return documents_; }
  /// The sample of the stream that comes as sample i: [samples()].
  std::span<const uint32_t> shuffle() const { return shuffle_; }

  struct Start {
    int64_t document;  ///< position in documents()
    int64_t offset;    ///< tokens skipped there
  };
  /// Where sample i begins, 0 <= i < samples(): O(log documents).
  Start start(int64_t i) const {
    return find(int64_t{shuffle_[static_cast<size_t>(i)]} * plan_.sequence_length);
  }
  /// The document that holds a token of the stream.
  Start find(int64_t token) const;

 private:
  void shuffle_documents(NumpyRandomState& random);
  void count_tokens();

  GptPlan plan_;
  std::span<const int32_t> lengths_;
  cpu::HostMemory document_memory_, shuffle_memory_, count_memory_;
  std::span<int32_t> documents_;
  std::span<uint32_t> shuffle_;
  std::span<int64_t> tokens_before_;  // every kStride-th document
};

/// Weights as shares of one. Throws Error (`config`) unless all are finite and positive.
std::vector<double> normalized_weights(std::span<const double> weights);

/// Samples to ask of a dataset with this (normalized) weight for a blend of `samples`: half a percent more
/// than its share, because the greedy order below may overdraw a little.
int64_t blend_request(double weight, int64_t samples);

/// Which dataset sample k of a blend comes from, and which of its samples. Greedy: each sample comes from the
/// dataset that lags its share most, the first of equals, as long as it has samples left.
class BlendIndex {
 public:
  /// `shares` as from normalized_weights; `available[d]`: samples of dataset d, whose sum must be `samples`
  /// at least.
  BlendIndex(std::span<const double> shares, std::span<const int64_t> available, int64_t samples);

  struct Sample {
    size_t dataset;
    int64_t sample;
  };
  /// 0 <= k < samples(); constant time.
  Sample at(int64_t k) const;
  int64_t samples() const { return static_cast<int64_t>(dataset_.size()); }
  /// Host memory of an index.
  static int64_t bytes(size_t datasets, int64_t samples);

 private:
  static int64_t stride(size_t datasets);

  size_t datasets_;
  std::vector<uint16_t> dataset_;  // [samples]
  std::vector<int64_t> taken_;     // [ceil(samples / stride), datasets]: samples drawn before
};

}  // namespace nrl::data
