#include "tests/reference/initial.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <stdexcept>

#include "core/io/safetensors.h"
#include "tests/reference/compare.h"
#include "tests/reference/decoder.h"

namespace reference {
namespace {

// Chance deviations beyond this many standard deviations: 1 in 2 million checks.
constexpr double sigmas = 5;

// What a matrix is drawn from. GPT-2 divides those that add to the residual stream by sqrt(2 * layers).
double standard_deviation(const Config& config, const std::string& name) {
  const bool residual = name.ends_with(".o.weight") || name.ends_with(".down.weight");
  return config.initializer_range /
         (config.gpt2() && residual ? std::sqrt(2 * static_cast<double>(config.layers)) : 1);
}

double correlation(const double* a, const double* b, size_t count) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < count; ++i) ab += a[i] * b[i], aa += a[i] * a[i], bb += b[i] * b[i];
  return ab / std::sqrt(aa * bb);
}

}  // namespace

int compare_initial_weights(const std::string& model, const std::string& other) {
  const Config config = read_config(model);
  const Tensors all = read_weights(config, model), others = read_weights(config, other);
  Comparison c;
  for (const auto& [name, t] : all) {
    const auto n = static_cast<double>(t.size());
    if (t.rows == 1) {
      const double expected = name.ends_with(".bias") || config.gemma() ? 0 : 1;
      for (const double x : t.values) c.check("biases 0, norms 1", name, std::abs(x - expected), 0);
      continue;
    }
    const double sigma = standard_deviation(config, name);
    double mean = 0, square = 0, fourth = 0, largest = 0;
    for (const double value : t.values) {
      const double x = value / sigma;
      mean += x / n;
      square += x * x / n;
      fourth += x * x * x * x / n;
      largest = std::max(largest, std::abs(x));
    }
    // Moments of a normal distribution, in standard deviations of their estimates.
    c.check("mean", name, std::abs(mean) * std::sqrt(n), sigmas);
    c.check("variance", name, std::abs(square - 1) * std::sqrt(n / 2), sigmas);
    c.check("fourth moment", name, std::abs(fourth - 3) * std::sqrt(n / 96), sigmas);
    c.check("largest element", name, largest, 6);
    // Independence: of neighbors, of other tensors, of the other seed.
    const double* values = t.values.data();
    c.check("neighbors in a row", name,
            std::abs(correlation(values, values + 1, t.size() - 1)) * std::sqrt(n), sigmas);
    const size_t rest = t.size() - t.columns;
    c.check("neighbors in a column", name,
            std::abs(correlation(values, values + t.columns, rest)) * std::sqrt(static_cast<double>(rest)),
            sigmas);
    c.check("another seed", name,
            std::abs(correlation(values, others.at(name).values.data(), t.size())) * std::sqrt(n), sigmas);
    for (const auto& [second, u] : all) {
      if (u.rows == 1 || second <= name) continue;
      const size_t common = std::min(t.size(), u.size());
      c.check("two tensors", name + " and " + second,
              std::abs(correlation(values, u.values.data(), common)) * std::sqrt(static_cast<double>(common)),
              sigmas);
    }
  }
  return c.report();
}

int poison_embedding(const std::string& model, int32_t token) {
  const std::string path = model + "/model.safetensors";
  const nrl::SafetensorsFile file(path);
  const nrl::TensorInfo* embedding = nullptr;
  for (const char* name : {"transformer.wte.weight", "model.embed_tokens.weight"})
    if (const nrl::TensorInfo* found = file.find(name)) embedding = found;
  if (!embedding || embedding->dtype != nrl::DType::f32)
    throw std::runtime_error(path + ": no f32 embedding");
  const std::vector<float> row(static_cast<size_t>(embedding->row_elements()), 3e38f);
  const uint64_t bytes = row.size() * sizeof(float);
  std::fstream out(path, std::ios::binary | std::ios::in | std::ios::out);
  out.seekp(static_cast<std::streamoff>(file.data_offset() + embedding->begin +
                                        static_cast<uint64_t>(token) * bytes));
  out.write(reinterpret_cast<const char*>(row.data()), static_cast<std::streamsize>(bytes));
  return out.flush() ? 0 : 1;
}

}  // namespace reference
