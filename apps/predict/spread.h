#pragma once
// Stragglers: ranks that wait for each other in every step run at the pace of the slowest.

namespace nrl::predict {

/// Relative standard deviation of the step times of equal ranks, from silicon, temperature and host. Assumed,
/// of the order of what power-limited GPUs of one model show: 8 % between the whiskers of a box plot (Sinha
/// et al. 2022, arXiv:2208.11035).
inline constexpr double assumed_spread = 0.01;

/// The expected largest of n standard normal variables: Blom's approximation (1958),
/// Phi^-1((n - 0.375) / (n + 0.25)). 0 for one.
double expected_maximum(int n);

}  // namespace nrl::predict
