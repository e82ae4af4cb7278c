#pragma once
// The file in which the examples of an input are kept: token ids, loss masks and an index.
//
// A page with the header, then, each aligned to 8 bytes: ids (i32) of all sequences one after another, mask
// bits (64 to a word), first tokens of the sequences and their end (u64), loss tokens of the sequences (i32),
// sources of the examples; the set's columns, in this order: margins, rewards, advantages (f64 of
// each example), groups (i64 of each example), log-probabilities of the sampling and of the old policy (f32
// of each token), and of a teacher the first rows of the examples and their end (u64), ids (i32) and
// log-probabilities (f32) of each row, one for each token with a loss; and a JSON text with key and counts.
// The header has a checksum of everything after it.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/examples/example_counts.h"
#include "apps/data/examples/example_numbers.h"
#include "apps/data/examples/spool.h"
#include "core/io/atomic_file.h"

namespace nrl::data {

/// The record that an example was made of.
struct ExampleSource {
  int64_t row = 0;  ///< among the records of all inputs
  int64_t line = 0;
  int32_t file = 0;
  int32_t unused = 0;
};

/// Consecutive examples.
struct ExampleBatch {
  std::vector<int32_t> ids;             ///< of all sequences
  std::vector<uint8_t> mask;            ///< 0 or 1 for each id
  std::vector<SequenceLength> lengths;  ///< of the sequences
  std::vector<ExampleSource> sources;   ///< `row` counts from the first record of the batch
  ExampleCounts counts;

  // Columns; empty if the set has none.
  std::array<std::vector<double>, example_values> values;     ///< of the examples
  std::array<std::vector<float>, token_log_probs> log_probs;  ///< of the ids; 0 without a loss
  std::vector<int64_t> groups;                                ///< of the examples, counted in the batch
  std::vector<int32_t> top_ids;                               ///< rows for the ids with a loss
  std::vector<float> top_log_probs;

  // Groups of the records, used or not.
  int64_t group_count = 0;
  std::string first_group, last_group;

  /// Counts the group of the next record. It is the group before if both have the same name.
  void begin_record(const std::string& group);

  size_t bytes() const;
};

/// The text of a cache.
struct ExampleCacheFacts {
  std::string key;    ///< a text that tells what the examples were made of
  int sequences = 1;  ///< per example
  ExampleColumns columns;
  ExampleCounts counts;
  std::vector<std::string> notes;
};

/// Writes a cache, which appears under its name at finish(). Memory is bounded, but for `notes`. Throws
/// Error: `cannot_create`, `io`.
class ExampleCacheWriter {
 public:
  /// Columns of tokens and groups need sequences == 1.
  ExampleCacheWriter(const std::string& path, int sequences, const ExampleColumns& columns);

  void add(const ExampleBatch& batch);
  const ExampleCounts& counts() const { return counts_; }
  /// Counts the duplicates and completes the file.
  void finish(const std::string& key);

 private:
  void append(const void* data, size_t bytes);
  void flush();
  void pad();
  template <class T>
  void append_all(const Spool<T>& numbers);
  void add_columns(const ExampleBatch& batch);
  int64_t count_duplicates() const;

  AtomicFile file_;
  const int sequences_;
  const ExampleColumns columns_;
  ExampleCounts counts_;
  uint64_t position_ = 0;  // bytes appended after the header
  uint32_t crc_ = 0;
  std::string buffer_;
  uint64_t word_ = 0;  // the last mask bits, incomplete
  Spool<uint64_t> mask_, ends_, hashes_;
  Spool<int32_t> loss_;
  Spool<ExampleSource> sources_;
  std::vector<Spool<double>> values_;    // by ExampleValue
  std::vector<Spool<float>> log_probs_;  // by TokenLogProbs
  Spool<int64_t> groups_;
  Spool<uint64_t> top_first_;
  Spool<int32_t> top_ids_;
  Spool<float> top_log_probs_;
  // Numbers of groups of records, and of groups that have examples; the name of the last record's.
  int64_t record_groups_ = 0, example_groups_ = 0;
  int64_t last_record_group_ = -1;  // of the last example
  std::string last_group_;
  uint64_t top_rows_ = 0;
};

/// A mapped cache.
class ExampleCache {
 public:
  /// Maps a cache and checks all of it with `threads` threads. Throws Error: `no_input`, `io`, and `data` if
  /// it is damaged, was not made of `key`, has ids outside [0, vocab_size), or numbers that are not finite.
  ExampleCache(const std::string& path, const std::string& key, int64_t vocab_size, int threads);
  ~ExampleCache();
  ExampleCache(const ExampleCache&) = delete;
  ExampleCache& operator=(const ExampleCache&) = delete;

  /// The arrays of the file. Columns that the set has not are empty.
  struct Arrays {
    std::span<const int32_t> ids;
    std::span<const uint64_t> mask;   ///< bit i % 64 of word i / 64 is id i's
    std::span<const uint64_t> first;  ///< first ids of the sequences, and their number
    std::span<const int32_t> loss;    ///< loss tokens of the sequences
    std::span<const ExampleSource> sources;
    std::array<std::span<const double>, example_values> values;     ///< of the examples
    std::array<std::span<const float>, token_log_probs> log_probs;  ///< of the ids
    std::span<const int64_t> groups;                                ///< of the examples
    std::span<const uint64_t> top_first;  ///< first rows of the examples, and their number
    std::span<const int32_t> top_ids;     ///< rows of top_k
    std::span<const float> top_log_probs;
  };

  const ExampleCacheFacts& facts() const { return facts_; }
  int64_t examples() const { return static_cast<int64_t>(arrays_.sources.size()); }
  const Arrays& arrays() const { return arrays_; }

 private:
  void check(const std::string& path, const std::string& key, int64_t vocab_size, int threads);
  bool index_is_consistent() const;

  void* map_ = nullptr;
  size_t bytes_ = 0;
  ExampleCacheFacts facts_;
  Arrays arrays_;
};

}  // namespace nrl::data
