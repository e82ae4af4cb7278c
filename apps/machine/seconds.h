#pragma once
// Predicted times with the source of their rates.

#include <algorithm>
#include <cstdint>
#include <string_view>

namespace nrl::machine {

/// How a rate is known, from the strongest source to the weakest: measured on this device by this build, read
/// from a profile that was measured elsewhere, or assumed (device_models.cpp, collective_time.cpp).
enum class Source : uint8_t { measured, profile, assumed };

constexpr std::string_view name_of(Source source) {
  constexpr std::string_view names[] = {"measured", "profile", "assumed"};
  return names[static_cast<int>(source)];
}
/// The source of a sum or of another combination of two numbers.
constexpr Source weakest(Source a, Source b) {
  return std::max(a, b);
}

struct Seconds {
  double value = 0;
  Source source = Source::assumed;
};

}  // namespace nrl::machine
