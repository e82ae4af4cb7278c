// Ranks beside each other: what a rank needs for its own work, without waiting for others.

#include <algorithm>
#include <span>

#include "apps/profile/analyses.h"
#include "core/base/sample.h"

namespace nrl::profile {

namespace {

// The ranks of each pipeline stage: they have the same work.
std::vector<std::span<const RankProfile>> stages_of(const Profile& profile) {
  std::span<const RankProfile> rest(profile.ranks);
  size_t stages = static_cast<size_t>(std::max(profile.facts.stages, 1));
  if (rest.size() % stages != 0) stages = 1;
  const size_t size = rest.size() / stages;
  std::vector<std::span<const RankProfile>> out;
  for (; !rest.empty(); rest = rest.subspan(size)) out.push_back(rest.first(size));
  return out;
}

void compare(std::span<const RankProfile> ranks, std::vector<Standing>& out) {
  double best = ranks.front().own_work();
  for (const RankProfile& r : ranks) best = std::min(best, r.own_work());
  // Time of own work only: a rank that waits longer is not slower.
  std::vector<std::pair<const char*, double Split::*>> own;
  std::vector<double> middle;
  for (const auto& [name, part] : split_parts) {
    if (part == &Split::late || part == &Split::wire || part == &Split::bubble || part == &Split::imbalance)
      continue;
    std::vector<double> values;
    for (const RankProfile& r : ranks) values.push_back(r.split.*part);
    own.emplace_back(name, part);
    middle.push_back(median(std::move(values)));
  }
  for (const RankProfile& r : ranks) {
    Standing s{.rank = r.rank};
    if (r.own_work() > 0) s.score = best / r.own_work();
    s.severity = s.score < 0.7 ? Severity::high : s.score < 0.9 ? Severity::medium : Severity::low;
    s.longer_s = 0.01 * r.split.wall;
    for (size_t i = 0; i < own.size(); ++i) {
      const double longer = r.split.*own[i].second - middle[i];
      if (longer <= s.longer_s) continue;
      s.longer_s = longer;
      s.longer = own[i].first;
    }
    if (!s.longer) s.longer_s = 0;
    out.push_back(s);
  }
}

}  // namespace

std::vector<Standing> standings(const Profile& profile) {
  std::vector<Standing> out;
  for (const auto& ranks : stages_of(profile)) compare(ranks, out);
  return out;
}

std::vector<double> stage_work(const Profile& profile) {
  std::vector<double> out;
  for (const auto& ranks : stages_of(profile)) {
    std::vector<double> seconds;
    for (const RankProfile& r : ranks) seconds.push_back(r.own_work());
    out.push_back(mean(seconds));
  }
  return out;
}

}  // namespace nrl::profile
