#pragma once
// The order in which Megatron-LM's GPTDataset and BlendedDataset draw samples from documents
// (megatron/core/datasets: gpt_dataset.py, helpers.cpp, blended_dataset.py), bit for bit.

#include <array>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace nrl::data {

/// The part of `numpy.random.RandomState` that orders data: seeding with one 32-bit number, and `shuffle`.
class NumpyRandomState {
 public:
  explicit NumpyRandomState(uint32_t seed) : engine_(seed) {}

  /// numpy's legacy Fisher-Yates from the end; the partner is drawn by masking and rejecting. At most 2^32
  /// values.
  template <class T>
  void shuffle(std::span<T> values) {
    for (uint64_t i = values.size(); i-- > 1;)
      std::swap(values[i], values[below_or_equal(static_cast<uint32_t>(i))]);
  }

 private:
  uint32_t below_or_equal(uint32_t bound) {
    uint32_t mask = bound;
    for (int shift = 1; shift < 32; shift *= 2) mask |= mask >> shift;
    uint32_t value;
    do value = static_cast<uint32_t>(engine_()) & mask;
    while (value > bound);
    return value;
  }

  std::mt19937 engine_;
};

enum class Split { train = 0, validation = 1, test = 2 };

/// Shares of the sequences that go to train, validation and test, in any scale. Throws Error (`config`)
/// unless all are finite and not negative and one is positive.
using SplitShares = std::array<double, 3>;

/// "969,30,1" or "1": missing shares are 0.
SplitShares parse_split(const std::string& text);

/// The sequences [first, second) of a split. Rounds half to even as Python does.
std::pair<int64_t, int64_t> split_bounds(const SplitShares& shares, Split split, int64_t sequences);

/// Where samples begin and in which order they come. Sample i is made of the tokens from start[shuffle[i]] to
/// start[shuffle[i] + 1], the first token of the next sample included.
struct GptIndex {
  int64_t epochs = 0;
  std::vector<int32_t> documents;       ///< sequence numbers, every epoch's in shuffled order
  std::vector<int64_t> start_document;  ///< [samples + 1] position in `documents`
  std::vector<int32_t> start_offset;    ///< [samples + 1] tokens skipped there
  std::vector<uint32_t> shuffle;        ///< [samples]
  int64_t samples() const { return static_cast<int64_t>(shuffle.size()); }
};

/// Builds the index for at least `samples` samples of `sequence_length` + 1 tokens (one token shared by
/// neighbours) out of the sequences [bounds.first, bounds.second) with these `lengths`. Throws Error (`data`)
/// where they hold no token,
/// (`config`) where more epochs are asked for than an index can hold.
GptIndex build_gpt_index(std::span<const int32_t> lengths, std::pair<int64_t, int64_t> bounds,
                         int64_t sequence_length, int64_t samples, uint32_t seed, const std::string& name);

/// Which dataset sample k of a blend comes from, and which of its samples.
struct BlendIndex {
  std::vector<int16_t> dataset;
  std::vector<int64_t> sample;
};

/// Weights as shares of one. Throws Error (`config`) unless all are finite and positive.
std::vector<double> normalised_weights(std::span<const double> weights);

/// Samples to ask of a dataset with this (normalised) weight for a blend of `samples`: half a percent more
/// than its share, because the greedy order below may overdraw a little.
int64_t blend_request(double weight, int64_t samples);

/// Greedy: each sample comes from the dataset that lags its share most, the first of equals.
BlendIndex build_blend_index(std::span<const double> weights, int64_t samples);

}  // namespace nrl::data
