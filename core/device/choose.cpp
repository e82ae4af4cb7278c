#include "core/device/choose.h"

#include <map>

#include "core/base/error.h"

namespace nrl::device {
namespace {

const char* plural(size_t n) {
  return n == 1 ? "" : "s";
}

}  // namespace

int choose_ordinal(int local_rank, const std::vector<std::vector<std::string>>& seen, bool share) {
  NRL_CHECK(local_rank >= 0 && static_cast<size_t>(local_rank) < seen.size());
  std::map<std::string, int> takers;
  for (size_t r = 0; r < seen.size(); ++r) {
    if (seen[r].empty())
      fail(Exit::unavailable, "rank {} of the {} ranks on this node sees no GPU; give every rank one", r,
           seen.size());
    for (const std::string& id : seen[r]) takers[id];
  }
  int ordinal = 0;
  bool shared = false;
  for (size_t r = 0; r < seen.size(); ++r) {
    size_t best = 0;
    for (size_t d = 1; d < seen[r].size(); ++d)
      if (takers[seen[r][d]] < takers[seen[r][best]]) best = d;
    shared = shared || ++takers[seen[r][best]] > 1;
    if (r == static_cast<size_t>(local_rank)) ordinal = static_cast<int>(best);
  }
  if (shared && !share)
    fail(Exit::unavailable,
         "{} rank{} run{} on this node, which has {} GPU{}{}; start one rank per GPU, or let ranks share one "
         "with "
         "kernels.share_device: true",
         seen.size(), plural(seen.size()), seen.size() == 1 ? "s" : "", takers.size(), plural(takers.size()),
         takers.size() >= seen.size() ? ", and some ranks see only GPUs that others take" : "");
  return ordinal;
}

int choose_ordinal(int local_rank, int local_size, int devices, bool share) {
  NRL_CHECK(devices > 0 && local_rank >= 0 && local_rank < local_size);
  std::vector<std::string> ids;
  for (int d = 0; d < devices; ++d) ids.push_back(std::to_string(d));
  return choose_ordinal(local_rank, std::vector(static_cast<size_t>(local_size), ids), share);
}

}  // namespace nrl::device
