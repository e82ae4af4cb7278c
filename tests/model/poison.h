#pragma once
// Fills planned buffers with NaN outside of their lives: a read there shows in the loss or in a gradient.

#include <algorithm>
#include <cstring>
#include <vector>

#include "memory/plan.h"

namespace nrl::test {

class Poison {
 public:
  using Buffer = memory::MemoryPlan::Buffer;
  /// Fills all that does not live always. `exec.workspace` lives no longer than one operation.
  Poison(const memory::MemoryPlan& plan, const memory::Arenas& arenas) : buffers_(plan.buffers()) {
    for (size_t i = 0; i < buffers_.size(); ++i) {
      data_.push_back(static_cast<std::byte*>(arenas.at(plan, static_cast<memory::BufferId>(i))));
      if (!buffers_[i].always()) fill(i);
    }
  }

  /// A tick begins: buffers that died since the tick before, and those that begin to live, are filled.
  void enter(int tick) {
    for (size_t i = 0; i < buffers_.size(); ++i) {
      const Buffer& b = buffers_[i];
      bool alive = b.always(), was_alive = alive, begins = false;
      for (const memory::Lifetime& life : b.lifetimes) {
        alive = alive || (life.first <= tick && tick <= life.last);
        was_alive = was_alive || (life.first <= last_tick_ && last_tick_ <= life.last);
        begins = begins || life.first == tick;
      }
      const bool workspace = b.category == memory::Category::workspace;
      if (workspace || (alive ? begins : was_alive)) fill(i);
    }
    last_tick_ = tick;
  }

  /// Lifetimes to change, for a plan that is wrong.
  std::vector<Buffer>& buffers() { return buffers_; }

 private:
  // All bits set: NaN in every floating-point type. Tiny models use no more of a GPU's workspace.
  void fill(size_t i) {
    std::memset(data_[i], 0xff, static_cast<size_t>(std::min<int64_t>(buffers_[i].bytes, 1 << 20)));
  }

  std::vector<Buffer> buffers_;
  std::vector<std::byte*> data_;
  int last_tick_ = -1;
};

}  // namespace nrl::test
