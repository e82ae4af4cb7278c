#pragma once
// Errors of the host's memory that its controllers have counted since the start of the system (Linux EDAC).

#include <cstdint>
#include <optional>
#include <string>

namespace nrl {

struct EdacCounts {
  int64_t corrected = 0, uncorrected = 0;
};
/// Sums over all memory controllers below ROOT/sys/devices/system/edac/mc. Nothing if the system shows none.
std::optional<EdacCounts> read_edac(const std::string& root = "");

}  // namespace nrl
