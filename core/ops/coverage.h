#pragma once
// Which kernels a run needs and whether the device has them; asked once before step 0.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/ops/kernel_table.h"

namespace nrl::ops {

/// One entry of KernelTable.
struct KernelEntry {
  std::string_view name;
  bool present = false;
};

/// All entries of the table, in its order.
std::vector<KernelEntry> kernel_entries(const KernelTable& table);

/// The needed entries that `table` lacks, in the order asked for. A name that is no entry of KernelTable is
/// our bug (exit 70).
std::vector<std::string_view> missing_kernels(const KernelTable& table,
                                              std::span<const std::string_view> needed);

/// Fails with exit 69 naming every missing entry and `device`; returns when all are there.
void require_kernels(const KernelTable& table, std::span<const std::string_view> needed,
                     std::string_view device);

}  // namespace nrl::ops
