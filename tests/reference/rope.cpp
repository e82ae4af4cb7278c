// Rotary position embedding (Su et al. 2021) and the rescalings of its frequencies in config.json files.

#include <algorithm>
#include <numbers>

#include "tests/reference/decoder.h"

namespace reference {
namespace {

using std::numbers::pi;

// Llama 3.1: wavelengths above original / low_freq_factor are stretched by `factor`, those below
// original / high_freq_factor are kept, those between are interpolated.
double llama3(const Rope& r, double frequency) {
  const double wavelength = 2 * pi / frequency;
  if (wavelength > r.original_max_position / r.low_freq_factor) return frequency / r.factor;
  if (wavelength < r.original_max_position / r.high_freq_factor) return frequency;
  const double smooth =
      (r.original_max_position / wavelength - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor);
  return (1 - smooth) * frequency / r.factor + smooth * frequency;
}

// YaRN (Peng et al. 2023): the pair that turns `turns` times within the original context.
double pair_that_turns(const Rope& r, double turns) {
  const auto d = static_cast<double>(r.rotary_dim);
  return d * std::log(r.original_max_position / (turns * 2 * pi)) / (2 * std::log(r.theta));
}

// Fast pairs are kept, slow ones are stretched by `factor`, with a linear ramp between.
double yarn(const Rope& r, double frequency, double pair) {
  double low = pair_that_turns(r, r.beta_fast), high = pair_that_turns(r, r.beta_slow);
  if (r.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(r.rotary_dim) - 1);
  if (low == high) high += 0.001;
  const double ramp = std::clamp((pair - low) / (high - low), 0.0, 1.0);
  return frequency / r.factor * ramp + frequency * (1 - ramp);
}

}  // namespace

Tensor rope_table(const Rope& r, size_t length, size_t rope_length) {
  const size_t half = r.rotary_dim / 2;
  const auto d = static_cast<double>(r.rotary_dim);
  double base = r.theta;
  if (r.type == "dynamic") {
    const double longest = std::max(static_cast<double>(rope_length), r.original_max_position);
    base *= std::pow(r.factor * longest / r.original_max_position - (r.factor - 1), d / (d - 2));
  }
  double magnitude = 1;
  if (r.type == "yarn")
    magnitude = r.attention_factor > 0 ? r.attention_factor : 0.1 * std::log(r.factor) + 1;

  Tensor table(length, r.rotary_dim);
  for (size_t i = 0; i < half; ++i) {
    const auto pair = static_cast<double>(i);
    double frequency = std::pow(base, -2 * pair / d);
    if (r.type == "linear") frequency /= r.factor;
    if (r.type == "llama3") frequency = llama3(r, frequency);
    if (r.type == "yarn") frequency = yarn(r, frequency, pair);
    for (size_t t = 0; t < length; ++t) {
      table(t, i) = magnitude * std::cos(static_cast<double>(t) * frequency);
      table(t, half + i) = magnitude * std::sin(static_cast<double>(t) * frequency);
    }
  }
  return table;
}

}  // namespace reference
