#pragma once
// The rewards of completions by all entries of the key `reward`.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/reward/verifier.h"

namespace nrl::reward {

/// A judged completion.
struct Judgement {
  /// sum of weight times part; absent if a part is.
  std::optional<double> total;
  std::vector<std::optional<double>> parts;  ///< by entry
};

class Rewards {
 public:
  /// `log_dir`: of the standard error of commands, LOG_DIR/reward-NAME.log; empty: it is not kept. Starts
  /// nothing. Throws Error (`config`).
  Rewards(const std::vector<Spec>& specs, const std::string& log_dir);
  ~Rewards();

  /// Throws Error (`data`) with file and line if a verifier cannot judge completions of this record.
  void check(const JsonValue& record, const std::string& where) const;
  /// Not thread-safe, see ExternalJudge.
  std::vector<Judgement> judge(std::span<const Item> items);

  const std::vector<std::string>& names() const { return names_; }
  /// How commands and services are used, for the user; a line each.
  std::vector<std::string> notes() const;
  /// Failures of commands and services since the last call, with the last reason: "12 of NAME: no answer in
  /// 10 s"; empty.
  std::string take_failures();

 private:
  struct Entry;
  std::vector<Entry> entries_;
  std::vector<std::string> names_;
};

}  // namespace nrl::reward
