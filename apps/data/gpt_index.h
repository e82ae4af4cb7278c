#pragma once
// The sample order of Megatron-LM's GPTDataset and BlendedDataset (megatron/core/datasets: gpt_dataset.py,
// its C++ helpers, blended_dataset.py), reproduced exactly.

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "apps/data/block_shuffle.h"
#include "apps/data/order_file.h"
#include "core/device/cpu/memory.h"

namespace nrl::data {

enum class Split { train = 0, validation = 1, test = 2 };

/// Shares of the sequences for train, validation and test, in any scale.
using SplitShares = std::array<double, 3>;

/// The items [first, second) of a split of `count` items. Rounds half to even like Python. Throws Error
/// (`config`) unless all shares are finite and >= 0 and at least one is positive.
std::pair<int64_t, int64_t> split_bounds(const SplitShares& shares, Split split, int64_t count);

/// The part of a token file that belongs to a split: sequences [first, last), without the first `skip` tokens
/// of sequence `first` and the last `drop` tokens of sequence `last - 1`.
struct SplitPart {
  int64_t first = 0, last = 0;
  int64_t skip = 0, drop = 0;
  bool by_tokens = false;  ///< the boundaries may be within sequences

  /// Tokens of a sequence in [first, last) that belong to the part; `lengths`: of all sequences of the file.
  int64_t length(std::span<const int32_t> lengths, int64_t sequence) const {
    return lengths[sequence] - (sequence == first ? skip : 0) - (sequence + 1 == last ? drop : 0);
  }
  int64_t tokens(std::span<const int32_t> lengths) const;
};

/// Splits by whole sequences like Megatron-LM. If that leaves train or validation without tokens despite a
/// positive share (a file with very few documents), splits the tokens in file order instead.
SplitPart split_part(const SplitShares& shares, Split split, std::span<const int32_t> lengths);

/// Number of epochs and order of a part for a given number of samples.
struct GptPlan {
  SplitPart part;
  int64_t sequence_length = 0;
  int64_t tokens = 0;          ///< per epoch
  int64_t epochs = 0;          ///< minimum for the requested samples
  bool separate_last = false;  ///< the last epoch is shuffled separately
  int64_t first_samples = 0;   ///< samples that are shuffled together: all but those of a separate last epoch
  int64_t total = 0;           ///< samples of all epochs
  int64_t kept = 0;            ///< requested samples: the first of the shuffled order

  int64_t documents() const { return epochs * (part.last - part.first); }
  /// The arrays of the order, and what is needed to build them in a file. `built`: also the peak of the
  /// memory of an order that is built in memory.
  OrderBytes bytes(const ShuffleOptions& shuffle = {}) const;
  /// Anonymous memory of the process that builds the order in a file.
  int64_t build_memory(const ShuffleOptions& shuffle = {}) const;

 private:
  int64_t longest_shuffle() const;
};

/// A plan for at least `samples` samples of `sequence_length` + 1 tokens (adjacent samples share one token).
/// Throws Error (`data`) if the part has no tokens, (`config`) if an index cannot hold the samples or epochs.
/// `name`: the file, for messages.
GptPlan plan_gpt_index(std::span<const int32_t> lengths, const SplitPart& part, int64_t sequence_length,
                       int64_t samples, const std::string& name);
/// The same for a part with `tokens` tokens.
GptPlan plan_gpt_index(int64_t tokens, const SplitPart& part, int64_t sequence_length, int64_t samples,
                       const std::string& name);

/// The shuffled order of documents and samples. Sample i has sequence_length + 1 tokens from start(i) on; its
/// last token is the first of the next sample in the stream. Only the two shuffled orders are stored; the
/// start of a sample is computed from its position in the token stream.
class GptIndex {
 public:
  /// `lengths`: of all sequences of the file; must outlive the index.
  GptIndex(const GptPlan& plan, std::span<const int32_t> lengths, uint32_t seed);
  /// The order from `files` if it is as large as its smallest ones and can be stored there, else in memory.
  /// `files` may be null. The order does not depend on `shuffle`.
  GptIndex(const GptPlan& plan, std::span<const int32_t> lengths, uint32_t seed, OrderFiles* files,
           const ShuffleOptions& shuffle = {});
  /// Stores the order in `files` if it belongs there, unless another process is doing so.
  static void prepare(const GptPlan& plan, std::span<const int32_t> lengths, uint32_t seed,
                      OrderFiles& files);

  const GptPlan& plan() const { return plan_; }
  int64_t samples() const { return plan_.kept; }
  /// Sequence numbers of all epochs in shuffled order: [plan().documents()].
  std::span<const int32_t> documents() const { return documents_; }
  /// Position in the stream of sample i: [samples()].
  std::span<const uint32_t> shuffle() const { return shuffle_; }

  struct Start {
    int64_t document;  ///< index into documents()
    int64_t offset;    ///< first token in the document
  };
  /// The start of sample i, 0 <= i < samples(), in O(log documents).
  Start start(int64_t i) const { return find(int64_t{shuffle_[i]} * plan_.sequence_length); }
  /// The document that contains a token of the stream.
  Start find(int64_t token) const;
  /// documents()[document]. Exit::data if it is not a sequence of the part: the file of the order is damaged.
  int32_t sequence(int64_t document) const {
    const int32_t s = documents_[document];
    if (s < plan_.part.first || s >= plan_.part.last) fail_damaged();
    return s;
  }

 private:
  [[noreturn]] void fail_damaged() const;
  void set_arrays(std::span<const std::byte> arrays);

  GptPlan plan_;
  std::span<const int32_t> lengths_;
  MappedOrder file_;  // of all three arrays, or else
  cpu::HostMemory memory_;
  std::span<const int64_t> tokens_before_;  // every index_stride-th document
  std::span<const int32_t> documents_;
  std::span<const uint32_t> shuffle_;
};

/// Weights scaled to the sum 1. Throws Error (`config`) unless all are finite and positive.
std::vector<double> normalized_weights(std::span<const double> weights);

/// Samples to request from a dataset with this (normalized) weight for a blend of `samples`: 0.5 % more than
/// its share, because the greedy order below may exceed it slightly.
int64_t blend_request(double weight, int64_t samples);

/// The dataset and sample of each sample of a blend. Greedy: each sample comes from the dataset that lags
/// most behind its share (the first of equals) and has samples left.
class BlendIndex {
 public:
  /// `shares`: from normalized_weights(). `available[d]`: samples of dataset d; the sum must be
  /// at least `samples`.
  BlendIndex(std::span<const double> shares, std::span<const int64_t> available, int64_t samples);
  /// The order from `files`, as for GptIndex.
  BlendIndex(std::span<const double> shares, std::span<const int64_t> available, int64_t samples,
             OrderFiles* files);
  /// As for GptIndex.
  static void prepare(std::span<const double> shares, std::span<const int64_t> available, int64_t samples,
                      OrderFiles& files);

  struct Sample {
    size_t dataset;
    int64_t sample;
  };
  /// 0 <= k < samples(); constant time.
  Sample at(int64_t k) const;
  int64_t samples() const { return static_cast<int64_t>(dataset_.size()); }
  /// Bytes of the arrays of an index.
  static int64_t bytes(size_t datasets, int64_t samples);

 private:
  static int64_t stride(size_t datasets);
  void set_arrays(std::span<const std::byte> arrays, int64_t samples);

  size_t datasets_;
  MappedOrder file_;  // of both arrays, or else
  cpu::HostMemory memory_;
  std::span<const int64_t> taken_;     // [ceil(samples / stride), datasets]: samples taken before each stride
  std::span<const uint16_t> dataset_;  // [samples]
};

}  // namespace nrl::data
