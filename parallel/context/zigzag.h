#pragma once
// Which tokens a context-parallel rank holds. A sample of T tokens is cut into 2c chunks of equal length;
// rank r of c holds chunk r (its low chunk) and chunk 2c - 1 - r (its high chunk), so that causal attention
// is the same work on every rank. Samples, not documents, are cut: packed documents may have any length, and
// attention is restricted to documents by sequence boundaries (bounds.h). No token is padding.
//
// The local rows are the samples in order, each as its low chunk followed by its high chunk.

#include <cstdint>

#include "core/base/error.h"

namespace nrl::parallel {

/// The share of rank `rank` of `size` in `samples` samples of `length` tokens each.
class ZigZag {
 public:
  /// `length` must be a multiple of 2 * size.
  ZigZag(int64_t samples, int64_t length, int size, int rank)
      : samples_(samples), length_(length), chunk_(length / (2 * size)), size_(size), rank_(rank) {
    NRL_CHECK(size >= 1 && rank >= 0 && rank < size && samples >= 0 && length % (2 * size) == 0,
              "samples of {} tokens cannot be cut for rank {} of {}", length, rank, size);
  }

  int64_t samples() const { return samples_; }
  int64_t length() const { return length_; }
  int size() const { return size_; }
  int rank() const { return rank_; }
  /// Tokens of a chunk.
  int64_t chunk() const { return chunk_; }
  /// Local rows of a sample.
  int64_t sample_rows() const { return 2 * chunk_; }
  int64_t rows() const { return samples_ * sample_rows(); }

  /// First token of this rank's chunk `half` (0: low, 1: high) in its sample.
  int64_t first_token(int half) const { return chunk_begin(rank_, half); }
  /// First token of chunk `half` of another rank.
  int64_t chunk_begin(int rank, int half) const { return (half == 0 ? rank : 2 * size_ - 1 - rank) * chunk_; }
  /// The row among all samples' tokens, samples * length, that a local row holds.
  int64_t global_row(int64_t row) const {
    const int64_t sample = row / sample_rows(), at = row % sample_rows();
    return sample * length_ + first_token(at < chunk_ ? 0 : 1) + at % chunk_;
  }
  /// Calls body(first local row, first row among all samples, rows) for each chunk in local order.
  template <class Body>
  void for_each_chunk(const Body& body) const {
    for (int64_t s = 0; s < samples_; ++s)
      for (int half = 0; half < 2; ++half)
        body(s * sample_rows() + half * chunk_, s * length_ + first_token(half), chunk_);
  }

 private:
  int64_t samples_, length_, chunk_;
  int size_, rank_;
};

}  // namespace nrl::parallel
