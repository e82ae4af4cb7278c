#include "tests/reference/compare.h"

#include <algorithm>
#include <cmath>

namespace reference {
namespace {

double root_mean_square(const Tensor& t) {
  double sum = 0;
  for (const double x : t.values) sum += x * x;
  return std::sqrt(sum / static_cast<double>(t.size()));
}

}  // namespace

double relative(double a, double b) {
  return std::abs(a - b) / std::abs(b);
}

void Comparison::check(const std::string& what, const std::string& where, double difference,
                       double tolerance) {
  const bool good = difference <= tolerance;  // false for NaN
  if (!good && ++failures_ <= 20)
    std::printf("DIFFERS: %s, %s: %.3g, tolerance %.3g\n", what.c_str(), where.c_str(), difference,
                tolerance);
  Worst& worst = worst_[what];
  if (!(difference <= worst.difference)) worst = {difference, tolerance, where};
}

void Comparison::require(bool condition, const std::string& text) {
  if (condition) return;
  ++failures_;
  std::printf("WRONG: %s\n", text.c_str());
}

void Comparison::tensors(const std::string& what, const Tensors& product, const Tensors& reference,
                         const Tensors& size, double tolerance) {
  double mean = 0;
  for (const auto& [name, t] : size) mean += root_mean_square(t) / static_cast<double>(size.size());
  for (const auto& [name, expected] : reference) {
    Tensor difference = product.at(name);
    double largest = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      difference[i] -= expected[i];
      if (!(std::abs(difference[i]) <= largest)) largest = std::abs(difference[i]);
    }
    const double unit = std::max(root_mean_square(size.at(name)), 0.1 * mean);
    check(what, name, root_mean_square(difference) / unit, tolerance);
    check(what + ", one element", name, largest / unit, 10 * tolerance);
  }
}

int Comparison::report() const {
  std::printf("\n%-32s %12s %12s  %s\n", "compared", "worst", "tolerance", "where");
  for (const auto& [what, w] : worst_)
    std::printf("%-32s %12.3g %12.3g  %s\n", what.c_str(), w.difference, w.tolerance, w.where.c_str());
  if (failures_ > 0) std::printf("%d differences\n", failures_);
  return failures_ > 0 ? 1 : 0;
}

}  // namespace reference
