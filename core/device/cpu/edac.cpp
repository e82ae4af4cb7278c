#include "core/device/cpu/edac.h"

#include <filesystem>
#include <fstream>

namespace nrl {
namespace {

std::optional<int64_t> number_in(const std::filesystem::path& file) {
  std::ifstream in(file);
  int64_t value = 0;
  if (!(in >> value) || value < 0) return std::nullopt;
  return value;
}

}  // namespace

std::optional<EdacCounts> read_edac(const std::string& root) {
  std::optional<EdacCounts> counts;
  std::error_code error;
  for (const auto& controller :
       std::filesystem::directory_iterator(root + "/sys/devices/system/edac/mc", error)) {
    const auto corrected = number_in(controller.path() / "ce_count"),
               uncorrected = number_in(controller.path() / "ue_count");
    if (!corrected || !uncorrected) continue;
    if (!counts) counts.emplace();
    counts->corrected += *corrected;
    counts->uncorrected += *uncorrected;
  }
  return counts;
}

}  // namespace nrl
