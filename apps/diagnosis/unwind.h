#pragma once
// Names of the functions on a copied stack. unwind.cpp with libdw (package libdw-dev), else no_unwind.cpp.

#include <string>
#include <vector>

#include "apps/diagnosis/stacks.h"

namespace nrl::diagnosis {

/// True if unwind() and unwind_live() name functions.
bool can_unwind();
/// For every thread the functions from the innermost one; empty where nothing is known. The mapped files must
/// not have changed.
std::vector<std::vector<std::string>> unwind(const ProcessStacks& stacks);
/// The same of a living process, by ptrace: its threads stop for a moment. Empty where that is not permitted.
std::vector<std::vector<std::string>> unwind_live(int64_t pid, const std::vector<ThreadStack>& threads);

}  // namespace nrl::diagnosis
