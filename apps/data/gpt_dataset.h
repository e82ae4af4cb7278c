#pragma once
// Training samples out of token files: sample i is a pure function of the files, the options and i, whatever
// the number of ranks.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "apps/data/gpt_index.h"
#include "core/io/indexed_dataset.h"

namespace nrl::data {

/// A numbered list of samples of sequence_length() + 1 token ids each. Reading is safe from any number of
/// threads.
class TokenDataset {
 public:
  virtual ~TokenDataset() = default;
  virtual int64_t samples() const = 0;
  virtual int64_t sequence_length() const = 0;
  /// Fills out[0 .. sequence_length] with sample i, 0 <= i < samples(). Throws Error (`data`) naming file,
  /// position and document where a token id does not lie in [0, vocab_size).
  virtual void read(int64_t i, std::span<int32_t> out) const = 0;
  /// One line for the log: sources, tokens, epochs.
  virtual std::string describe() const = 0;
};

struct DatasetOptions {
  struct Source {
    std::string prefix;  ///< PREFIX.bin and PREFIX.idx
    double weight = 1;   ///< share of the samples, in any scale
  };
  std::vector<Source> sources;    ///< one, or several for a blend
  SplitShares split = {1, 0, 0};  ///< shares of every source's sequences
  Split part = Split::train;      ///< the part to draw from
  int64_t sequence_length = 0;    ///< T: samples hold T + 1 tokens
  int64_t samples = 0;            ///< wanted; sources are repeated (epochs) until there are as many
  uint32_t seed = 1234;
  int64_t vocab_size = 0;  ///< every id must be below
};

/// Opens the sources and builds their indices in memory. Throws Error: `no_input`, `data`, `config`.
std::unique_ptr<TokenDataset> open_token_dataset(const DatasetOptions& options);

}  // namespace nrl::data
