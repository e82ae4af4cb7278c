#pragma once
// Continuous batching: which rows of which sequences the next forward pass has. Host bookkeeping only,
// without a model: the caller runs the passes and says which sequences go on.
//
// A pass has at most `tokens` rows: first one for every sequence that has only its newest token outside of
// the cache, then prompts in chunks. Sequences of a group share a prompt, which is computed once. A group
// starts when its prompt's pages and one more for each of its sequences are free. When a sequence needs a
// page and none is free, the youngest sequence loses its pages and is computed again later, from all its
// tokens.

#include <cstdint>
#include <map>
#include <vector>

#include "apps/rollout/pages.h"

namespace nrl::rollout {

struct SchedulerLimits {
  int64_t tokens = 512;    ///< rows of a pass
  int64_t sequences = 64;  ///< sequences with pages, at most `tokens`
};

/// Consecutive rows of a sequence in a pass.
struct PassRows {
  int64_t sequence = 0;          ///< whose tokens they are
  int64_t first = 0, count = 0;  ///< positions
  std::vector<int64_t> sampled;  ///< sequences whose next token follows the last row; empty: more rows follow
  PageList pages;                ///< of positions [0, first + count), at least
};

struct Pass {
  std::vector<PageCopy> copies;  ///< to be executed first, in this order
  std::vector<PassRows> rows;    ///< empty: no sequence is left
};

class Scheduler {
 public:
  Scheduler(const SchedulerLimits& limits, int64_t pages, int64_t page_tokens);

  /// Adds sequences first, first + 1, ... (the return value is `first`) that begin with the same `tokens`
  /// tokens (at least 1) and never have more than `most`, for which there must be enough pages.
  int64_t add(int64_t tokens, int64_t most, int64_t samples);

  /// The next pass. Between two calls the caller must call grow() or finish() for each sampled sequence.
  Pass next();
  /// The sequence has another token.
  void grow(int64_t sequence);
  /// The sequence is over, in whatever state it is. Frees its pages.
  void finish(int64_t sequence);

  bool idle() const { return active_.empty() && waiting_.empty(); }
  const Pages& pages() const { return pages_; }
  int64_t running() const;                            ///< sequences with pages
  int64_t preemptions() const { return preempted_; }  ///< sequences that lost their pages so far

 private:
  /// Sequences with the same tokens: a prompt that is not complete in the cache yet, or a single sequence.
  struct Unit {
    std::vector<int64_t> members = {};  ///< ascending
    int64_t tokens = 0, most = 0;       ///< of each member, now and at the end
    int64_t cached = 0;                 ///< tokens in the cache
    PageList pages = {};
    int64_t left() const { return tokens - cached; }
  };
  using Units = std::map<int64_t, Unit>;  ///< by their first member: in the order of age

  /// Gives the oldest waiting unit its pages; the end of active_ if it must wait.
  Units::iterator admit();
  /// Pages that the next token of each running sequence needs.
  int64_t promised() const;
  void preempt(Units::iterator unit);
  /// Adds `count` rows of the unit to the pass, and splits the unit if its prompt is complete.
  void add_rows(Units::iterator unit, int64_t count, Pass& pass);
  static Units::iterator find(Units& units, int64_t sequence);

  SchedulerLimits limits_;
  Pages pages_;
  Units waiting_, active_;
  int64_t next_sequence_ = 0, preempted_ = 0;
};

}  // namespace nrl::rollout
