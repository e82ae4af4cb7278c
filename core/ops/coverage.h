#pragma once
// Whether the device has the kernels that a run needs (Exec::needed); asked once before step 0.

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

/// Fails with exit 69 naming every needed entry that `table` lacks, and `device`; returns when all are there.
void require_kernels(const KernelTable& table, const KernelSet& needed, std::string_view device);

}  // namespace nrl::ops
