#pragma once
// Numbers of stashes. A stash is the memory of all slots of a chunk for one microbatch in flight. Chunks with
// equal blocks take theirs from one pool, so that a stage holds as many stashes as it has microbatches in
// flight over all its chunks, not the sum of the most of every chunk: min(N, P - p) for 1F1B, and for
// interleaved 1F1B min(N V, 2 (P - p - 1) + (V - 1) P + 1). Chunks whose blocks differ have pools of their
// own.

#include <vector>

namespace nrl::pipeline {

/// The stash of every chunk and microbatch of a schedule. Two of them have the same stash only if their
/// chunks have the same pool, and never at the same time.
class Stashes {
 public:
  Stashes() = default;
  /// A pool for each chunk, whose microbatch m has stash m % counts[chunk].
  static Stashes in_turn(const std::vector<int>& counts, int microbatches);

  /// Adds a chunk. `numbers`: its stashes in the pool, by microbatch.
  void add(int pool, std::vector<int> numbers);

  int chunks() const { return static_cast<int>(chunks_.size()); }
  int pool(int chunk) const { return chunks_[chunk].pool; }
  /// Stashes of the chunk's pool.
  int count(int chunk) const { return counts_[pool(chunk)]; }
  /// By pool.
  const std::vector<int>& counts() const { return counts_; }
  int of(int chunk, int microbatch) const;
  /// By microbatch.
  const std::vector<int>& numbers(int chunk) const { return chunks_[chunk].numbers; }

  /// True if a schedule with these stashes and one of at most as many microbatches have the same pools, and
  /// the same stash for every microbatch of the other one.
  bool extends(const Stashes& fewer) const;

  bool operator==(const Stashes&) const = default;

 private:
  struct Chunk {
    int pool = 0;
    std::vector<int> numbers = {};
    bool operator==(const Chunk&) const = default;
  };
  std::vector<Chunk> chunks_;
  std::vector<int> counts_;
};

}  // namespace nrl::pipeline
