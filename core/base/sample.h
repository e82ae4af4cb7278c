#pragma once
// Statistics of a few measurements. All are pure functions: equal samples give equal results on every
// machine.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace nrl {

/// The q-quantile, q in [0, 1], between neighbors by linear interpolation (type 7 of Hyndman and Fan). There
/// must be at least one value.
double quantile(std::vector<double> values, double q);

/// The median; of an even number of values, the mean of the two in the middle. There must be at least one
/// value.
double median(std::vector<double> values);

/// The median of the distances from the median: a spread that outliers do not change.
double median_deviation(const std::vector<double>& values);

double mean(std::span<const double> values);
/// Standard deviation of a sample (n - 1); 0 for fewer than two values.
double deviation(std::span<const double> values);

struct Interval {
  double low = 0, high = 0;
  bool contains(double x) const { return low <= x && x <= high; }
  double width() const { return high - low; }
};

/// The 95 % interval of the mean by Student's t distribution; the mean itself for fewer than two values.
Interval mean_interval(std::span<const double> values);

/// The quantile q of Student's t distribution with `freedom` degrees of freedom.
double student_t(double q, int64_t freedom);

/// Samples whose neighbors depend on each other, as times of steps do, are resampled in blocks of
/// max(5, n^(1/3)) neighbors (Kuensch 1989); 10,000 times, from a fixed seed.
struct Resampling {
  int64_t block = 0;  ///< 0: the rule above; 1: for independent values
  int resamples = 10'000;
};

/// The 95 % interval of median(b) / median(a), both resampled independently. Both must have a value.
Interval ratio_interval(std::span<const double> a, std::span<const double> b, const Resampling& how = {});

/// The same for values measured in pairs, a[i] with b[i]: of the median of b[i] / a[i].
Interval paired_ratio_interval(std::span<const double> a, std::span<const double> b,
                               const Resampling& how = {.block = 1});

/// The 95 % interval of a statistic of one sample.
Interval bootstrap(std::span<const double> values,
                   const std::function<double(std::span<const double>)>& statistic,
                   const Resampling& how = {});

/// Mann and Kendall's test for a trend: the standard normal score, positive for a rising one; ties are
/// corrected for. 0 for fewer than four values.
double trend_score(std::span<const double> values);

}  // namespace nrl
