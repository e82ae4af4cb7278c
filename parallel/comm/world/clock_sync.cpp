#include "parallel/comm/world/clock_sync.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <limits>
#include <span>
#include <system_error>
#include <vector>

#include "parallel/comm/collective_log.h"

namespace nrl::comm {
namespace {

void answer(Communicator& ranks, int peer, int rounds, const std::function<int64_t()>& now) {
  for (int i = 0; i < rounds; ++i) {
    int64_t message = 0;
    ranks.recv(std::span(&message, 1), peer);
    message = now();
    ranks.send(std::span<const int64_t>(&message, 1), peer);
  }
}

ClockOffset ask(Communicator& ranks, int rounds, const std::function<int64_t()>& now) {
  int64_t least = std::numeric_limits<int64_t>::min(), most = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < rounds; ++i) {
    int64_t message = 0;
    const int64_t asked = now();
    ranks.send(std::span<const int64_t>(&message, 1), 0);
    ranks.recv(std::span(&message, 1), 0);
    const int64_t answered = now();
    least = std::max(least, message - answered);
    most = std::min(most, message - asked);
  }
  // Drift within the measurement may leave nothing between the bounds.
  return {.ns = least / 2 + most / 2, .error_ns = std::max<int64_t>((most - least) / 2, 0) + 1};
}

}  // namespace

std::string clock_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::error_code none;
  return boot + " " + std::filesystem::read_symlink("/proc/self/ns/time", none).string();
}

ClockOffset clock_offset(Communicator& ranks, const std::string& identity,
                         const std::function<int64_t()>& now, int rounds) {
  const std::vector<std::string> all = ranks.gather_texts(identity);
  const auto first_with = [&](const std::string& clock) {
    return static_cast<int>(std::find(all.begin(), all.end(), clock) - all.begin());
  };
  const int own = first_with(identity);
  ClockOffset offset;
  bool several = false;
  for (int rank = 1; rank < ranks.size(); ++rank) {  // one after the other, so that none waits for another
    if (first_with(all[static_cast<size_t>(rank)]) != rank) continue;
    several = true;
    if (ranks.rank() == 0) answer(ranks, rank, rounds, now);
    if (ranks.rank() == rank) offset = ask(ranks, rounds, now);
  }
  if (!several) return offset;
  const std::array<int64_t, 2> mine{offset.ns, offset.error_ns};
  std::vector<int64_t> offsets(2 * all.size());
  ranks.all_gather(std::span<const int64_t>(mine), std::span(offsets));
  return {.ns = offsets[static_cast<size_t>(2 * own)], .error_ns = offsets[static_cast<size_t>(2 * own) + 1]};
}

}  // namespace nrl::comm
