#pragma once
// Advantages of sampled completions from their rewards, relative to the other completions of a prompt.

#include <cstdint>
#include <span>
#include <vector>

#include "core/config/example_enums.h"

namespace nrl::data {

/// The advantage of a completion with reward r in a group with n completions is (r - baseline) / divisor:
///
///   baseline  mean of the group; or, with leave_one_out, mean of the n - 1 others
///   divisor   none           1 (Dr. GRPO, Liu et al. 2025)
///             group          s + 1e-4, s of the rewards of the group (GRPO, Shao et al. 2024; TRL)
///             leave_one_out  s + 1e-6, s of the n - 1 others; 1 where s = 0 (NeMo RL)
///             batch          s + 1e-4, s of all rewards (TRL)
///
/// with s the standard deviation with divisor count - 1, 0 of a single reward. Equal rewards, and the reward
/// of a group of one, have the advantage 0.
struct AdvantageOptions {
  bool leave_one_out = true;  ///< the baseline (RLOO, Kool et al. 2019)
  AdvantageStd std = AdvantageStd::group;
};

struct Advantages {
  std::vector<double> values;  ///< of the completions, in their order
  int64_t groups = 0;
  int64_t groups_of_one = 0;  ///< nothing to compare with
  int64_t equal_groups = 0;   ///< several completions, all with the same reward: they train nothing
  /// AdvantageStd::leave_one_out: groups with unequal rewards in which s of the others of a completion is 0,
  /// so that its advantage is not divided, or less than a tenth of the group's, so that it is large.
  int64_t unstable_groups = 0;
  int64_t degenerate_groups() const { return groups_of_one + equal_groups + unstable_groups; }
};

/// The advantages of a global batch. `rewards`: finite; `groups`: a number for each, equal for completions of
/// one prompt, which need not be consecutive. With AdvantageStd::leave_one_out the time grows with the square
/// of the size of a group.
Advantages advantages(std::span<const double> rewards, std::span<const int64_t> groups,
                      const AdvantageOptions& options);

/// x = (x - mean) / sqrt(max(variance, 1e-8)), of all numbers: REINFORCE++ (Hu et al., 2025; NeMo RL).
void whiten(std::span<double> numbers);

}  // namespace nrl::data
