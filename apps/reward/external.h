#pragma once
// Rewards that something outside of this process gives: a program, or a service.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/reward/spec.h"
#include "apps/reward/verifier.h"

namespace nrl::reward {

/// Not thread-safe: of one thread, which must live as long as the object.
class ExternalJudge {
 public:
  virtual ~ExternalJudge() = default;
  /// The rewards in order; absent: null, or no answer that counts. Throws Error (`unavailable`) with the last
  /// reason if it has failed several times and never answered.
  virtual std::vector<std::optional<double>> judge(std::span<const Item> items) = 0;
  /// A line for the user: what runs where, with which rights.
  virtual std::string note() const = 0;
  int64_t failures() const { return failures_; }
  int64_t lost() const { return lost_; }  ///< completions that have no reward because of them
  const std::string& last_failure() const { return last_failure_; }

 protected:
  /// Counts a failure, which leaves `completions` without a reward; throws once there were `failures_to_end`
  /// and no answer ever.
  void failed(std::string why, const std::string& fix, int64_t completions = 1);
  void answered() { answered_ = true; }

 private:
  bool answered_ = false;
  int64_t failures_ = 0, lost_ = 0;
  std::string last_failure_;
};

/// {"id": ID, "prompt": TEXT, "completion": TEXT, "ended": BOOL, "record": {...}}
JsonValue request_of(const Item& item, size_t id);

/// Reads {"id": ID, "reward": NUMBER or null} into `reward`. Returns why it is not that; empty: it is.
std::string read_answer(const JsonValue& answer, size_t id, std::optional<double>& reward);

}  // namespace nrl::reward
