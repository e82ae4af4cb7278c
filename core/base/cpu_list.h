#pragma once
// Lists of CPUs as taskset and cgroups write them.

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace nrl {

/// The numbers of "0-3,8" in their order: 0 1 2 3 8. None for any other text, a number above 1,048,575, a
/// range that falls, or a number that is there twice.
std::optional<std::vector<int>> parse_cpu_list(std::string_view text);

/// The text of such numbers, with ranges: "0-3,8".
std::string cpu_list_text(std::span<const int> cpus);

}  // namespace nrl
