#pragma once
// The file in which the examples of an input are kept: token ids, loss masks and an index.
//
// A page with the header, then, each aligned to 8 bytes: ids (i32) of all sequences one after another, mask
// bits (64 to a word), first tokens of the sequences and their end (u64), loss tokens of the sequences (i32),
// sources of the examples, margins (f64; preferences only), and a JSON text with key and counts. The
// header has a checksum of everything after it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/examples/example_counts.h"
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
  std::vector<double> margins;
  ExampleCounts counts;

  size_t bytes() const {
    return ids.size() * (sizeof(int32_t) + 1) + lengths.size() * sizeof(SequenceLength) +
           sources.size() * (sizeof(ExampleSource) + sizeof(double));
  }
};

/// The text of a cache.
struct ExampleCacheFacts {
  std::string key;    ///< a text that tells what the examples were made of
  int sequences = 1;  ///< per example
  ExampleCounts counts;
  std::vector<std::string> notes;
};

/// Writes a cache, which appears under its name at finish(). Memory is bounded, but for `notes`. Throws
/// Error: `cannot_create`, `io`.
class ExampleCacheWriter {
 public:
  ExampleCacheWriter(const std::string& path, int sequences);

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
  int64_t count_duplicates() const;

  AtomicFile file_;
  const int sequences_;
  ExampleCounts counts_;
  uint64_t position_ = 0;  // bytes appended after the header
  uint32_t crc_ = 0;
  std::string buffer_;
  uint64_t word_ = 0;  // the last mask bits, incomplete
  Spool<uint64_t> mask_, ends_, hashes_;
  Spool<int32_t> loss_;
  Spool<ExampleSource> sources_;
  Spool<double> margins_;
};

/// A mapped cache.
class ExampleCache {
 public:
  /// Maps a cache and checks all of it with `threads` threads. Throws Error: `no_input`, `io`, and `data` if
  /// it is damaged, was not made of `key`, or has ids outside [0, vocab_size).
  ExampleCache(const std::string& path, const std::string& key, int64_t vocab_size, int threads);
  ~ExampleCache();
  ExampleCache(const ExampleCache&) = delete;
  ExampleCache& operator=(const ExampleCache&) = delete;

  const ExampleCacheFacts& facts() const { return facts_; }
  int64_t examples() const { return static_cast<int64_t>(sources_.size()); }
  std::span<const int32_t> ids() const { return ids_; }
  std::span<const uint64_t> mask() const { return mask_; }  ///< bit i % 64 of word i / 64 is id i's
  std::span<const uint64_t> first() const {
    return first_;
  }                                                        ///< first ids of the sequences, and their number
  std::span<const int32_t> loss() const { return loss_; }  ///< loss tokens of the sequences
  std::span<const ExampleSource> sources() const { return sources_; }
  std::span<const double> margins() const { return margins_; }  ///< empty without preferences

 private:
  void check(const std::string& path, const std::string& key, int64_t vocab_size, int threads);

  void* map_ = nullptr;
  size_t bytes_ = 0;
  ExampleCacheFacts facts_;
  std::span<const int32_t> ids_, loss_;
  std::span<const uint64_t> mask_, first_;
  std::span<const ExampleSource> sources_;
  std::span<const double> margins_;
};

}  // namespace nrl::data
