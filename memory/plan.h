#pragma once
// The plan is the allocator: every buffer of a run is declared with its lifetime before anything is
// allocated, offsets follow from the lifetimes, and one arena per tier is then reserved at exactly the
// planned size. Nothing allocates in the step loop.
//
//   MemoryPlan plan;
//   const BufferId weights = plan.add("weights", Category::weights, bytes);
//   const BufferId qkv = plan.add("layer 0 qkv", Category::activations, bytes, {{3, 9}, {41, 47}});
//   plan.solve();
//   Arenas arenas(plan);
//   void* address = arenas.at(plan, qkv);

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/device/cpu/memory.h"
#include "core/device/runtime.h"

namespace nrl::memory {

/// Which memory a buffer lies in; one arena each.
enum class Tier : uint8_t {
  device,  ///< what the ops work on: a GPU's memory, or on a CPU the host's
  pinned,  ///< page-locked host memory of a GPU run; not used on a CPU
};
inline constexpr int tier_count = 2;

/// A label for people; says nothing about where a buffer lies.
enum class Category : uint8_t { weights, gradients, optimizer, activations, workspace, data };
inline constexpr int category_count = 6;
constexpr std::string_view name_of(Category c) {
  constexpr std::string_view names[] = {"weights",     "gradients", "optimizer",
                                        "activations", "workspace", "data"};
  return names[static_cast<int>(c)];
}

/// Ticks number the work of a step in its order. A buffer is alive from `first` to `last`, both included.
struct Lifetime {
  int first = 0, last = 0;
  bool operator==(const Lifetime&) const = default;
};

using BufferId = int;

class MemoryPlan {
 public:
  static constexpr int64_t alignment = 256;  ///< of every offset: FP8 and vector slices stay legal

  struct Buffer {
    std::string name;
    Category category;
    Tier tier;
    int64_t bytes, offset;
    std::vector<Lifetime> lifetimes;  ///< ascending, without overlap; empty: alive all the time
    bool always() const { return lifetimes.empty(); }
  };

  /// Declares a buffer that is alive all the time; sizes are rounded up to `alignment`. Only before solve().
  BufferId add(std::string name, Category category, int64_t bytes, Tier tier = Tier::device);
  /// One that is alive in these intervals (at least one) and may share memory with others outside of them.
  BufferId add(std::string name, Category category, int64_t bytes, std::vector<Lifetime> lifetimes,
               Tier tier = Tier::device);

  /// Chooses offsets: what lives always first, then the rest, largest first, each at the lowest place that
  /// is free during its whole life.
  void solve();

  int64_t offset(BufferId id) const { return buffers_[static_cast<size_t>(id)].offset; }
  /// Bytes of the tier's arena.
  int64_t bytes(Tier tier) const { return arena_[static_cast<size_t>(tier)]; }
  /// Bytes by label in Tier::device; they add up to its arena. What is shared by buffers that do not live
  /// always counts as activations.
  int64_t bytes(Category c) const { return labeled_[static_cast<size_t>(c)]; }
  /// Bytes of Tier::device.
  int64_t total_bytes() const { return bytes(Tier::device); }

  const std::vector<Buffer>& buffers() const { return buffers_; }

 private:
  void place(Tier tier);

  std::vector<Buffer> buffers_;
  std::array<int64_t, tier_count> arena_{};
  std::array<int64_t, category_count> labeled_{};
  bool solved_ = false;
};

/// The memory of a solved plan, zeroed, one block per tier. Sealed from the start: it cannot grow.
class Arenas {
 public:
  Arenas() = default;
  /// In host memory. The plan has nothing in other tiers than `device`.
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
  std::array<Block, tier_count> blocks_;
  cpu::HostMemory host_;
  std::array<device::Memory, tier_count> device_;
};

}  // namespace nrl::memory
