#pragma once
// What a dry run writes down: at which ticks each buffer is used, and which outputs may take over the memory
// of an input. From it come the lifetimes of the plan; no formula of ticks is written by hand.

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "memory/plan.h"

namespace nrl::memory {

class Liveness {
 public:
  /// A buffer that will be used. Returns its number.
  int add(std::string name, int64_t bytes, Category category, Tier tier = Tier::device);

  /// The work at `tick` uses the buffer. `begins`: it writes new contents, and what was there before is dead.
  /// Ticks must not descend.
  void use(int buffer, int tick, bool begins);

  /// At `tick`, where `output` begins, it may take over the memory of `input`.
  void may_take_over(int output, int input, int tick);

  /// Declares all buffers, those that share memory as one. An output takes over its input where at every such
  /// tick the input is used for the last time and both need the same bytes. Returns the plan's ids by number.
  std::vector<BufferId> declare(MemoryPlan& plan) const;

 private:
  struct Buffer {
    std::string name;
    int64_t bytes;
    Category category;
    Tier tier;
    std::vector<Lifetime> lifetimes;
  };
  std::vector<Buffer> buffers_;
  std::map<std::pair<int, int>, std::vector<int>> takeovers_;  // (output, input) -> ticks
};

}  // namespace nrl::memory
