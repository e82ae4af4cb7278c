#pragma once
// Threads and their stacks for people.

#include <cstdint>
#include <string>
#include <vector>

#include "apps/diagnosis/stacks.h"

namespace nrl::diagnosis {

/// The threads of a process for people, one line each, the functions from the innermost one; `names`: by
/// thread (unwind.h).
std::string text_of(const ProcessStacks& stacks, const std::vector<std::vector<std::string>>& names);
std::string text_of(const ProcessStacks& stacks);
/// The threads of a living process. Error(Exit::no_input) if there is none with this number.
std::string describe_live(int64_t pid);

}  // namespace nrl::diagnosis
