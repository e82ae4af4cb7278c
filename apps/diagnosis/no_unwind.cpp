// Without libdw: addresses only (stacks_text.cpp).
#include "apps/diagnosis/unwind.h"

namespace nrl::diagnosis {

bool can_unwind() {
  return false;
}
std::vector<std::vector<std::string>> unwind(const ProcessStacks& stacks) {
  return std::vector<std::vector<std::string>>(stacks.threads.size());
}
std::vector<std::vector<std::string>> unwind_live(int64_t, const std::vector<ThreadStack>& threads) {
  return std::vector<std::vector<std::string>>(threads.size());
}

}  // namespace nrl::diagnosis
