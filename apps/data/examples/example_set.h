#pragma once
// Training examples of post-training: token ids and loss masks, made from records once and kept in a file.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "apps/data/examples/example_counts.h"
#include "apps/data/examples/example_options.h"
#include "apps/data/examples/examples.h"
#include "apps/data/tokenizer.h"

namespace nrl::data {

/// Immutable; any number of threads may use one concurrently. The data are a mapped file that was checked
/// when it was opened.
class ExampleSet final : public Examples {
 public:
  ~ExampleSet() override;
  ExampleSet(const ExampleSet&) = delete;
  ExampleSet& operator=(const ExampleSet&) = delete;

  int64_t size() const override;
  int sequences_per_example() const override;
  SequenceLength length(int64_t example, int sequence) const override;
  std::span<const int32_t> ids(int64_t example, int sequence) const override;
  bool in_loss(int64_t example, int sequence, int64_t token) const override;
  int64_t source_row(int64_t example) const;  ///< index of the record, counted over all inputs
  std::string where(int64_t example) const override;
  bool rendered() const override;
  std::string describe() const override;

  ExampleColumns columns() const override;
  double value(int64_t example, ExampleValue value) const override;
  std::span<const float> log_probs(int64_t example, TokenLogProbs kind) const override;
  int64_t group(int64_t example) const override;
  std::span<const int32_t> top_ids(int64_t example) const override;
  std::span<const float> top_log_probs(int64_t example) const override;

  const ExampleCounts& counts() const;
  ExampleFormat format() const;                                  ///< never automatic
  TrainOn train_on() const;                                      ///< never automatic
  const std::vector<std::string>& files() const;                 ///< the inputs
  std::string where(const RecordIncidents::Place& place) const;  ///< "FILE:line: text"
  /// Choices and facts for the user, each a sentence: the detected format, the chat
  /// template, a damaged cache.
  const std::vector<std::string>& notes() const;

  struct State;  ///< private to this directory
  explicit ExampleSet(std::unique_ptr<const State> state);

 private:
  std::unique_ptr<const State> state_;
};

struct ExampleProgress {
  enum class Phase { waiting, tokenizing } phase = Phase::tokenizing;  ///< waiting: for another process
  int64_t bytes_done = 0, bytes = 0;                                   ///< of the input files on disk
  int64_t records = 0, tokens = 0;
  double seconds = 0;  ///< since the beginning
};

/// Opens the examples of `options`: maps their cache, or makes it with `threads` threads (0: all cores) if it
/// does not exist, is damaged, or was made of other files, options or tokenizer. Of several processes that
/// make one cache, one works and the others wait where the file system has locks; else each makes its own,
/// with the same content. Memory does not grow with the input. `progress` is called a few times per second on
/// the calling thread; what it throws ends the work without a trace. Throws Error: `config` for options that
/// contradict each other, `no_input`, `data` "FILE:line: ..." for records that cannot be used or if no
/// example is left, `cannot_create` and `io` for the cache.
std::shared_ptr<const ExampleSet> open_examples(
    const ExampleOptions& options, const Tokenizer& tokenizer, int threads = 0,
    const std::function<void(const ExampleProgress&)>& progress = {});

}  // namespace nrl::data
