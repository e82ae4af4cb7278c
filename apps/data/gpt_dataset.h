#pragma once
// Training samples from token files. Sample i is a pure function of the files, the options and i, independent
// of the number of ranks.

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

/// A list of samples of sequence_length() + 1 token ids each. Reading is thread-safe.
class TokenDataset {
 public:
  explicit TokenDataset(const DocumentRules& documents) : documents_(documents) {}
  virtual ~TokenDataset() = default;
  /// The rules for make_sample().
  const DocumentRules& documents() const { return documents_; }
  virtual int64_t samples() const = 0;
  virtual int64_t sequence_length() const = 0;
  /// Fills out[0 .. sequence_length] with sample i, 0 <= i < samples(). Throws Error (`data`) naming file,
  /// position and document if a token id is outside [0, vocab_size).
  virtual void read(int64_t i, std::span<int32_t> out) const = 0;
  /// One line for the log: sources, tokens, epochs.
  virtual std::string describe() const = 0;

 private:
  DocumentRules documents_;
};

struct DatasetOptions {
  struct Source {
    std::string prefix;            ///< PREFIX.bin and PREFIX.idx
    std::optional<double> weight;  ///< share of a blend's samples, in any scale; set for all sources or none
    std::shared_ptr<const IndexedDataset> file = {};  ///< the open files; see open_sources
  };
  std::vector<Source> sources;    ///< one, or several for a blend
  SplitShares split = {1, 0, 0};  ///< shares of every source's sequences
  Split part = Split::train;      ///< the part to draw from
  int64_t sequence_length = 0;    ///< T: samples hold T + 1 tokens
  int64_t samples = 0;            ///< requested number; sources are repeated (epochs) as needed
  uint32_t seed = 1234;
  int64_t vocab_size = 0;  ///< exclusive upper bound of token ids
  DocumentRules documents;
  std::shared_ptr<OrderFiles> orders = {};  ///< null: every process keeps the order in its memory
};

/// Opens the files of the sources that are not open yet, so that they are read only once. Throws
/// Error: `no_input`, `data`.
void open_sources(DatasetOptions& options);

/// Samples per epoch of the part that `options` select, regardless of `options.samples`.
int64_t samples_of_one_epoch(const DatasetOptions& options);

/// Host memory of the sample order and the file indices in every process.
struct DatasetMemory {
  int64_t order = 0;   ///< for `options.samples` samples, without `shared`
  int64_t shared = 0;  ///< orders in files, which the processes of a node share in the page cache
  int64_t peak = 0;    ///< of `order` while orders are built, with the memory of the process that builds them
  int64_t files = 0;   ///< lengths and offsets of the documents
};

/// The memory of these datasets in a process that opens them one after another and shares open files. Does
/// not build the orders.
DatasetMemory plan_dataset_memory(std::span<const DatasetOptions> datasets);

/// Opens the sources and builds the sample order. A blend without weights is Megatron-LM's: one epoch of
/// every source, in proportion to its samples; if more samples are requested, these numbers are the weights.
/// Throws Error: `no_input`, `data`, `config`.
std::unique_ptr<TokenDataset> open_token_dataset(const DatasetOptions& options);

}  // namespace nrl::data
