#pragma once
// Token files in Megatron-LM's indexed format: PREFIX.bin holds the token ids, PREFIX.idx the lengths and
// offsets of the sequences and the sequences of each document.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/io/atomic_file.h"

namespace nrl {

/// Most sequences of a dataset: orders hold their numbers in 32 bits, like Megatron-LM's.
inline constexpr int64_t max_sequences = INT32_MAX;

/// A dataset on disk, open for random access. The index is checked against the sizes of both files when it is
/// opened, so that no later read can leave them. Reads are pread and thread-safe.
class IndexedDataset {
 public:
  /// Opens PREFIX.idx and PREFIX.bin. Exit::no_input when a file is missing or unreadable, Exit::data when it
  /// is malformed (the message names file and field).
  explicit IndexedDataset(const std::string& prefix);

  const std::string& prefix() const { return prefix_; }
  int64_t sequences() const { return static_cast<int64_t>(lengths_.size()); }
  int64_t documents() const { return documents_; }
  int64_t tokens() const { return tokens_; }
  /// Bytes of one token on disk: 1, 2, 4 or 8.
  int token_bytes() const { return token_bytes_; }
  /// Tokens of every sequence; valid as long as the dataset.
  std::span<const int32_t> lengths() const { return lengths_; }
  /// Host memory of the index.
  int64_t memory_bytes() const {
    return static_cast<int64_t>(lengths_.capacity() * 4 + offsets_.capacity() * 8 +
                                document_index_.capacity() * 8);
  }
  /// The document that holds this sequence.
  int64_t document_of(int64_t sequence) const;

  /// Reads out.size() tokens of `sequence` starting at token `offset`; the range must lie inside the
  /// sequence. Ids that are negative or do not lie below `vocab_size` are an Error (`data`) that names the
  /// file, the position in it and the document.
  void read(int64_t sequence, int64_t offset, std::span<int32_t> out, int64_t vocab_size = INT32_MAX) const;

 private:
  void load_index(const File& file, int64_t bin_bytes);
  int64_t first_token(int64_t sequence) const;

  static constexpr int64_t index_stride = 32;

  std::string prefix_;
  File bin_;
  uint8_t dtype_ = 0;
  int token_bytes_ = 0;
  int64_t documents_ = 0, tokens_ = 0;
  std::vector<int32_t> lengths_;         // [sequences]
  std::vector<int64_t> offsets_;         // start of every index_stride-th sequence, in tokens
  std::vector<int64_t> document_index_;  // [documents + 1] sequence numbers; empty: one sequence a document
};

/// Writes a dataset as a stream. Nothing appears under the final names before finish(); without it the
/// temporary files are removed.
class IndexedDatasetWriter {
 public:
  /// Tokens are stored in 16 bits if `vocab_size` < 65500 (Megatron's rule), else in 32.
  IndexedDatasetWriter(const std::string& prefix, int64_t vocab_size);
  ~IndexedDatasetWriter();
  IndexedDatasetWriter(const IndexedDatasetWriter&) = delete;
  IndexedDatasetWriter& operator=(const IndexedDatasetWriter&) = delete;

  /// Appends one sequence to the current document. Every id must lie in [0, vocab_size).
  void add_sequence(std::span<const int32_t> tokens);
  /// Ends the current document.
  void end_document();
  /// Puts the documents written so far in a random order that depends on `seed` and on their number only.
  /// Copies the tokens on disk once; calls `poll` for every document, which may throw. Call it after
  /// end_document().
  void shuffle_documents(uint64_t seed, const std::function<void()>& poll = {});
  /// Makes the files durable and renames them, the index last. `before_index` runs when all data is on disk
  /// and the old index (if any) is removed: rename companions of the dataset there.
  void finish(const std::function<void()>& before_index = {});

  int64_t tokens() const { return tokens_; }
  int64_t documents() const { return static_cast<int64_t>(document_index_.size()) - 1; }

 private:
  void flush();
  void write_index();
  /// Bytes of one token on disk.
  uint64_t token_bytes() const { return wide_ ? 4 : 2; }
  /// Offset of every sequence in the token file, in bytes.
  std::vector<int64_t> byte_offsets() const;

  std::string prefix_, bin_tmp_, idx_tmp_;
  int64_t vocab_size_;
  bool wide_, finished_ = false;
  File bin_;
  uint64_t written_ = 0;
  int64_t tokens_ = 0;
  std::vector<char> buffer_;
  std::vector<int32_t> lengths_;
  std::vector<int64_t> document_index_{0};
};

}  // namespace nrl
