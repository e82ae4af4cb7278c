#pragma once
// Sample orders in files that the processes of a node share through the page cache.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/order_space.h"

namespace nrl::data {

/// A read-only mapping of the arrays of an order. Move-only owner.
class MappedOrder {
 public:
  MappedOrder() = default;
  ~MappedOrder();
  MappedOrder(MappedOrder&& other) noexcept;
  MappedOrder& operator=(MappedOrder&& other) noexcept;

  /// The arrays one after the other, 8-byte aligned. Their content is checked by samples only: readers must
  /// check every index that they take from it.
  std::span<const std::byte> arrays() const;

 private:
  friend class OrderFiles;
  MappedOrder(void* map, size_t bytes) : map_(map), bytes_(bytes) {}

  void* map_ = nullptr;
  size_t bytes_ = 0;  // with the header
};

/// Builds each order once per node: the first process builds and stores it, those that come meanwhile wait,
/// and later ones, also of a resumed run, map the file. A file is named by a hash of the key, which describes
/// everything that the order depends on, and appears under its name when it is complete. Files that were not
/// used for 30 days are removed when another one is written.
class OrderFiles {
 public:
  /// Smaller orders stay in the memory of each process.
  static constexpr int64_t default_smallest = int64_t{16} << 20;

  /// `directories`: tried in this order; they are created with mode 0700 and must belong to this user.
  explicit OrderFiles(std::vector<std::string> directories, int64_t smallest = default_smallest)
      : directories_(std::move(directories)), smallest_(smallest) {}
  /// nrl-train-orders-UID in TMPDIR or /var/tmp (cpu::scratch_directory()), else in /dev/shm.
  static OrderFiles of_node();

  int64_t smallest() const { return smallest_; }

  /// Writes all arrays of an order to the space; called at most once for each directory. An Error `io` or
  /// `cannot_create` counts as a failure of the disk.
  using Build = std::function<void(const OrderSpace&)>;
  /// The order of `key`; unset if no directory can hold it, with the reasons in warnings(). Throws what
  /// `build` throws. Waits only for a process that holds the lock of this order, which ends with that
  /// process.
  std::optional<MappedOrder> open(std::string_view key, const OrderBytes& bytes, const Build& build) {
    return open(key, bytes, build, Wait::yes);
  }
  /// Builds the order unless it is stored or another process is building it: processes that prepare several
  /// orders one after another build them at the same time.
  void prepare(std::string_view key, const OrderBytes& bytes, const Build& build) {
    (void)open(key, bytes, build, Wait::no);
  }

  /// Problems so far, each with its consequence. Never an error: an order can be built in memory.
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  enum class Wait { no, yes };
  std::optional<MappedOrder> open(std::string_view key, const OrderBytes& bytes, const Build& build,
                                  Wait wait);

  std::vector<std::string> directories_;
  int64_t smallest_;
  std::vector<std::string> warnings_;
};

/// A key's text of any length in at most 40 characters.
std::string digest(std::string_view text);

}  // namespace nrl::data
