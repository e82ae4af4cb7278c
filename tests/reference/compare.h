#pragma once
// Comparisons of numbers of the product with those of the reference; what differs is printed and counted.

#include <cstdio>
#include <map>
#include <sstream>
#include <string>

#include "tests/reference/tensor.h"

namespace reference {

/// |a - b| relative to b.
double relative(double a, double b);

class Comparison {
 public:
  /// Counts a difference beyond the tolerance (NaN included) and remembers the worst one of `what`.
  void check(const std::string& what, const std::string& where, double difference, double tolerance);
  /// Counts a failure with this text.
  void require(bool condition, const std::string& text);
  /// The same for two numbers that must be equal.
  template <class T>
  void require_equal(const std::string& what, T found, T expected) {
    std::ostringstream text;
    text.precision(17);
    text << what << " is " << found << " instead of " << expected;
    require(found == expected, text.str());
  }

  /// Compares tensors one by one: the root mean square of the difference over that of the tensor of this name
  /// in `size`, and the largest difference in the same unit with ten times the tolerance. Tensors in which
  /// hardly anything happens (the key bias of GPT-2 has no gradient in exact arithmetic) are measured by a
  /// tenth of the mean of all.
  void tensors(const std::string& what, const Tensors& product, const Tensors& reference, const Tensors& size,
               double tolerance);

  /// Prints the worst difference of everything that was compared. Exit code: 0 when nothing failed.
  int report() const;

 private:
  struct Worst {
    double difference = -1, tolerance = 0;
    std::string where;
  };
  std::map<std::string, Worst> worst_;
  int failures_ = 0;
};

}  // namespace reference
