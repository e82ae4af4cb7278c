#pragma once
// Liveness recorded by a dry run: the ticks at which each buffer is used, and which outputs may reuse the
// memory of an input. The lifetimes of the memory plan are derived from it.

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "memory/plan.h"

namespace nrl::memory {

class Liveness {
 public:
  /// Adds a buffer and returns its index.
  int add(std::string name, int64_t bytes, Category category, Tier tier = Tier::device);
  /// Adds `count` buffers that may be exchanged for each other, like a slot's in all stashes of a pool:
  /// the recorded uses say which of them are in use together, but not which ones. Numbers of two families
  /// that are in use together by a microbatch belong together. Returns the index of the first; the others
  /// follow.
  int add_family(const std::string& name, int64_t bytes, Category category, Tier tier, int count);

  /// The work at `tick` uses the buffer. `begins`: it overwrites the contents, which are dead until then.
  /// Ticks must not descend.
  void use(int buffer, int tick, bool begins);

  /// `output`, which begins at `tick`, may take over the memory of `input` there.
  void may_take_over(int output, int input, int tick);

  /// Declares all buffers in the plan, those that share memory as one. An output takes over its input if the
  /// input has its last use at every such tick and both have the same size; a family takes over another one
  /// if each of its buffers does so. The memory of a family is reserved while one of it is alive; if that is
  /// never several at once, it has one buffer. Returns the plan's id per buffer.
  std::vector<BufferId> declare(MemoryPlan& plan) const;

 private:
  struct Buffer {
    std::string name;
    int64_t bytes;
    Category category;
    Tier tier;
    int first = 0, count = 1;  // of its family
    std::vector<Lifetime> lifetimes = {};
  };
  std::vector<Buffer> buffers_;
  std::map<std::pair<int, int>, std::vector<int>> takeovers_;  // (output, input) -> ticks
};

}  // namespace nrl::memory
