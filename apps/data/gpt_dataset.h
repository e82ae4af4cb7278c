#pragma once
// Training samples out of token files: sample i is a pure function of the files, the options and i, whatever
// the number of ranks.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/data/gpt_index.h"
#include "apps/data/sample.h"
#include "core/io/indexed_dataset.h"

namespace nrl::data {

/// A numbered list of samples of sequence_length() + 1 token ids each. Reading is safe from any number of
/// threads.
class TokenDataset {
 public:
  explicit TokenDataset(const DocumentRules& documents) : documents_(documents) {}
  virtual ~TokenDataset() = default;
  /// For what is made of the samples.
  const DocumentRules& documents() const { return documents_; }
  virtual int64_t samples() const = 0;
  virtual int64_t sequence_length() const = 0;
  /// Fills out[0 .. sequence_length] with sample i, 0 <= i < samples(). Throws Error (`data`) naming file,
  /// position and document where a token id does not lie in [0, vocab_size).
  virtual void read(int64_t i, std::span<int32_t> out) const = 0;
  /// One line for the log: sources, tokens, epochs.
  virtual std::string describe() const = 0;

 private:
  DocumentRules documents_;
};

struct DatasetOptions {
  struct Source {
    std::string prefix;            ///< PREFIX.bin and PREFIX.idx
    std::optional<double> weight;  ///< share of a blend's samples, in any scale: for all sources, or for none
    std::shared_ptr<const IndexedDataset> file = {};  ///< the open files; see open_sources
  };
  std::vector<Source> sources;    ///< one, or several for a blend
  SplitShares split = {1, 0, 0};  ///< shares of every source's sequences
  Split part = Split::train;      ///< the part to draw from
  int64_t sequence_length = 0;    ///< T: samples hold T + 1 tokens
  int64_t samples = 0;            ///< wanted; sources are repeated (epochs) until there are as many
  uint32_t seed = 1234;
  int64_t vocab_size = 0;  ///< every id must be below
  DocumentRules documents;
};

/// Opens the files of the sources that are not open yet, so that they are read once for all that follows.
/// Throws Error: `no_input`, `data`.
void open_sources(DatasetOptions& options);

/// Samples of one pass over the part that `options` draw from, whatever `options.samples` says.
int64_t samples_of_one_epoch(const DatasetOptions& options);

/// Host memory that the sample order and the indices of the files take in every process.
struct DatasetMemory {
  int64_t order = 0;  ///< for `options.samples` samples
  int64_t peak = 0;   ///< the same while the order is made
  int64_t files = 0;  ///< lengths and places of the documents
};

/// What these data sets will take in a process that opens all of them one after another, sharing the files
/// that several have open; no order is made.
DatasetMemory plan_dataset_memory(std::span<const DatasetOptions> datasets);

/// Opens the sources and makes the order of their samples in memory. A blend without weights is
/// Megatron-LM's: one epoch of every source, each in proportion to its samples; where more are wanted, these
/// numbers are the weights. Throws Error: `no_input`, `data`, `config`.
std::unique_ptr<TokenDataset> open_token_dataset(const DatasetOptions& options);

}  // namespace nrl::data
