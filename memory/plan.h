#pragma once
// The memory plan is the allocator: every buffer of a run is declared with its lifetimes before anything is
// allocated, solve() computes the offsets, and one arena per tier is reserved at exactly the planned size.
// Nothing allocates in the step loop.
//
//   MemoryPlan plan;
//   const BufferId weights = plan.add("weights", Category::weights, bytes);
//   const BufferId qkv = plan.add("layer 0 qkv", Category::activations, bytes, {{3, 9}, {41, 47}});
//   plan.solve();
//   Arenas arenas(plan);
//   void* address = arenas.at(plan, qkv);

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/device/cpu/file_memory.h"
#include "core/device/cpu/memory.h"
#include "core/device/runtime.h"

namespace nrl::memory {

/// The memory that a buffer lies in; one arena each.
enum class Tier : uint8_t {
  device,  ///< memory that ops compute on: a GPU's, or the host's in a CPU run
  pinned,  ///< page-locked host memory; GPU runs only
  /// Host memory of what is offloaded: page-locked in a GPU run, an arena of its own; in a CPU run a file
  /// that is mapped into memory (cpu::FileMemory).
  host,
};
inline constexpr int tier_count = 3;

/// A label for reports; independent of the tier.
enum class Category : uint8_t { weights, gradients, optimizer, activations, workspace, data };
inline constexpr int category_count = 6;
constexpr std::string_view name_of(Category c) {
  constexpr std::string_view names[] = {"weights",     "gradients", "optimizer",
                                        "activations", "workspace", "data"};
  return names[static_cast<int>(c)];
}

/// An interval of schedule time in which a buffer is alive, both ends included. A tick is one point of
/// schedule time: the index of a layer's step in execution order.
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
    int64_t bytes;
    int64_t offset = 0;                    ///< in its tier's arena, once solved
    std::vector<Lifetime> lifetimes = {};  ///< ascending, disjoint; empty: always alive
    /// Intervals in which no other buffer that is alive may share its memory; empty: its lifetimes.
    std::vector<Lifetime> reserved = {};
    bool always() const { return lifetimes.empty(); }
  };

  /// Declares a buffer that is always alive; sizes are rounded up to `alignment`. Only before solve().
  BufferId add(std::string name, Category category, int64_t bytes, Tier tier = Tier::device);
  /// Declares a buffer that is alive in these intervals (at least one); its memory may be shared outside of
  /// them, or of `reserved`, which contains them if it is not empty.
  BufferId add(std::string name, Category category, int64_t bytes, std::vector<Lifetime> lifetimes,
               Tier tier = Tier::device, std::vector<Lifetime> reserved = {});

  /// Assigns offsets: always-alive buffers first, then the others, largest first, each at the lowest offset
  /// that is free during all of its lifetimes.
  void solve();

  int64_t offset(BufferId id) const { return buffers_[id].offset; }
  /// Bytes of the tier's arena.
  int64_t bytes(Tier tier) const { return arena_[static_cast<size_t>(tier)]; }
  /// Bytes by label in Tier::device; they add up to its arena. Memory shared by buffers that are not always
  /// alive counts as activations.
  int64_t bytes(Category c) const { return labeled_[static_cast<size_t>(c)]; }
  /// Bytes of Tier::device: what is offloaded does not count.
  int64_t total_bytes() const { return bytes(Tier::device); }

  const std::vector<Buffer>& buffers() const { return buffers_; }

 private:
  void place(Tier tier);

  std::vector<Buffer> buffers_;
  std::array<int64_t, tier_count> arena_{};
  std::array<int64_t, category_count> labeled_{};
  bool solved_ = false;
};

/// The memory of a solved plan: one zeroed block per tier, of fixed size.
class Arenas {
 public:
  Arenas() = default;
  /// In host memory. The plan must not use Tier::pinned. `offload_directory`: where the file of Tier::host is
  /// made and its space reserved; empty: in memory without a file. Fails as cpu::FileMemory does.
  explicit Arenas(const MemoryPlan& plan, const std::string& offload_directory = "");
  /// Host memory for a dry run, of any size, because hardly any of it is written.
  static Arenas unreserved(const MemoryPlan& plan);
  /// Addresses that must not be accessed, one for every buffer of any plan, which need not be solved: for dry
  /// runs that find out what else the plan must have.
  static Arenas nowhere();
  /// On a device, which must outlive the arenas; its memory comes from `allocator` and is zeroed in the order
  /// of `stream`. Fails with Exit::out_of_memory and the planned size when the device has less.
  Arenas(const MemoryPlan& plan, device::Runtime& device, device::StreamHandle stream,
         const device::Allocator& allocator = {});
  /// Address of a planned buffer.
  void* at(const MemoryPlan& plan, BufferId id) const;

  /// The arena of a tier.
  std::span<std::byte> memory(Tier tier) const {
    const Block& block = blocks_[static_cast<size_t>(tier)];
    return {block.data, static_cast<size_t>(block.size)};
  }

  /// Before and after a use of a part of Tier::host, which must lie in it: starts to read its pages, and
  /// takes them out of the memory of the process without losing their contents. Nothing where it is not a
  /// file.
  void prefetch(const void* begin, int64_t bytes) const;
  void evict(const void* begin, int64_t bytes) const;
  /// All of Tier::host.
  void evict() const;

 private:
  struct Block {
    std::byte* data = nullptr;
    int64_t size = 0;
  };
  bool nowhere_ = false;
  std::array<Block, tier_count> blocks_;
  cpu::HostMemory host_, offloaded_;
  cpu::FileMemory file_;
  std::array<device::Memory, tier_count> device_;
};

}  // namespace nrl::memory
