#include "core/ops/coverage.h"

#include <algorithm>

namespace nrl::ops {

std::vector<KernelEntry> kernel_entries(const KernelTable& table) {
  std::vector<KernelEntry> entries;
#define NRL_ENTRY(entry, Args) entries.push_back({#entry, table.entry != nullptr});
  NRL_KERNELS(NRL_ENTRY)
#undef NRL_ENTRY
  entries.push_back({"sum_of_squares", table.sum_of_squares != nullptr});
  entries.push_back({"add", table.add != nullptr});
  entries.push_back({"convert", table.convert != nullptr});
  entries.push_back({"zero", table.zero != nullptr});
  return entries;
}

std::vector<std::string_view> missing_kernels(const KernelTable& table,
                                              std::span<const std::string_view> needed) {
  const std::vector<KernelEntry> entries = kernel_entries(table);
  std::vector<std::string_view> missing;
  for (std::string_view name : needed) {
    const auto it =
        std::find_if(entries.begin(), entries.end(), [&](const KernelEntry& e) { return e.name == name; });
    NRL_CHECK(it != entries.end(), "no kernel is called {}", name);
    if (!it->present) missing.push_back(it->name);
  }
  return missing;
}

void require_kernels(const KernelTable& table, std::span<const std::string_view> needed,
                     std::string_view device) {
  const std::vector<std::string_view> missing = missing_kernels(table, needed);
  if (missing.empty()) return;
  std::string list;
  for (std::string_view name : missing) list += (list.empty() ? "" : ", ") + std::string(name);
  fail(Exit::unavailable, "the model needs kernels that {} does not have: {}", device, list);
}

}  // namespace nrl::ops
