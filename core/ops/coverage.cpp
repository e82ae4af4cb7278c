#include "core/ops/coverage.h"

#include <string>

namespace nrl::ops {

std::vector<KernelEntry> kernel_entries(const KernelTable& table) {
  return {
#define NRL_ENTRY(entry, Args) {#entry, table.entry != nullptr},
      NRL_KERNELS(NRL_ENTRY)
#undef NRL_ENTRY
  };
}

const char* name_of(Kernel kernel) {
  static constexpr const char* names[] = {
#define NRL_ENTRY(entry, Args) #entry,
      NRL_KERNELS(NRL_ENTRY)
#undef NRL_ENTRY
  };
  return names[static_cast<size_t>(kernel)];
}

void require_kernels(const KernelTable& table, const KernelSet& needed, std::string_view device) {
  std::string missing;
#define NRL_ENTRY(entry, Args)                        \
  if (needed.contains(Kernel::entry) && !table.entry) \
    missing += (missing.empty() ? "" : ", ") + std::string(#entry);
  NRL_KERNELS(NRL_ENTRY)
#undef NRL_ENTRY
  if (!missing.empty())
    fail(Exit::unavailable, "the model needs kernels that {} does not have: {}", device, missing);
}

}  // namespace nrl::ops
