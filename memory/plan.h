#pragma once
// The plan is the allocator: every buffer of a run is declared with its lifetime before anything is
// allocated, offsets follow from the lifetimes, and one arena per category is then reserved at exactly the
// planned size. Nothing allocates in the step loop.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/device/cpu/memory.h"
#include "core/device/runtime.h"

namespace nrl::memory {

enum class Category : uint8_t { weights, gradients, optimizer, activations, workspace, data };
inline constexpr int category_count = 6;
constexpr std::string_view name_of(Category c) {
  constexpr std::string_view names[] = {"weights",     "gradients", "optimizer",
                                        "activations", "workspace", "data"};
  return names[static_cast<int>(c)];
}

/// Ticks are positions in the fine order of one step's work (every forward and backward step of every layer).
/// A buffer is alive from its first to its last tick, both included; `always` buffers are alive all the time.
struct Lifetime {
  int first = 0, last = 0;
};
inline constexpr Lifetime always{-(1 << 30), 1 << 30};

using BufferId = int;

class MemoryPlan {
 public:
  static constexpr int64_t alignment = 256;  ///< of every offset: FP8 and vector slices stay legal

  /// Declares a buffer; sizes are rounded up to `alignment`. Only before solve().
  BufferId add(std::string name, Category category, int64_t bytes, Lifetime lifetime = always);

  /// Chooses offsets: largest first, each at the lowest place free during its whole lifetime.
  void solve();

  int64_t offset(BufferId id) const { return buffers_[static_cast<size_t>(id)].offset; }
  /// Bytes of the category's arena.
  int64_t bytes(Category c) const { return bytes_[static_cast<size_t>(c)]; }
  int64_t total_bytes() const;
  /// Bytes the category would take if nothing shared memory.
  int64_t bytes_without_sharing(Category c) const;

  struct Buffer {
    std::string name;
    Category category;
    int64_t bytes, offset;
    Lifetime lifetime;
  };
  const std::vector<Buffer>& buffers() const { return buffers_; }

 private:
  std::vector<Buffer> buffers_;
  std::array<int64_t, category_count> bytes_{};
  bool solved_ = false;
};

/// The memory of a solved plan, zeroed: on the host one block per category, on a device one block for all.
/// Sealed from the start: it cannot grow.
class Arenas {
 public:
  Arenas() = default;
  explicit Arenas(const MemoryPlan& plan);
  /// On a device, which must outlive the arenas; zeroed in the order of `stream`. Fails with
  /// Exit::out_of_memory, naming the sum, when the device has less.
  Arenas(const MemoryPlan& plan, device::Runtime& device, device::StreamHandle stream);
  /// Address of a planned buffer.
  void* at(const MemoryPlan& plan, BufferId id) const;

 private:
  struct Block {
    std::byte* data = nullptr;
    int64_t size = 0;
  };
  std::array<Block, category_count> blocks_;
  std::array<cpu::HostMemory, category_count> host_;
  device::Memory device_;
};

}  // namespace nrl::memory
