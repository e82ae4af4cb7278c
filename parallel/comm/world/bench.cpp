#include "parallel/comm/world/bench.h"

#include <algorithm>
#include <functional>

#include "core/base/error.h"
#include "core/base/text.h"
#include "parallel/comm/mpi/mpi_session.h"

namespace nrl::comm {

namespace {

/// Median time of one call of `body`; equal on all ranks.
double time_of(Communicator& group, double budget, const std::function<void()>& body) {
  const auto measure = [&](int repetitions) {
    group.barrier();
    const int64_t begin = now_ns();
    for (int i = 0; i < repetitions; ++i) body();
    std::vector<double> slowest = {static_cast<double>(now_ns() - begin) * 1e-9 / repetitions};
    group.all_reduce(slowest, Reduce::max);
    return slowest[0];
  };
  body();
  const double first = measure(3);  // equal on all ranks, so they agree on the count below
  constexpr int batches = 5;
  const int each = std::clamp(static_cast<int>(budget / batches / std::max(first, 1e-9)), 1, 1000);
  std::vector<double> times;
  for (int i = 0; i < batches; ++i) times.push_back(measure(each));
  std::sort(times.begin(), times.end());
  return times[batches / 2];
}

}  // namespace

std::vector<CommTiming> comm_benchmark(Communicator& group, std::span<const int64_t> sizes_bytes,
                                       double seconds_each) {
  const int n = group.size();
  std::vector<CommTiming> out;
  for (int64_t bytes : sizes_bytes) {
    NRL_CHECK(bytes >= 0, "size {}", bytes);
    const int64_t block = std::max<int64_t>(1, bytes / 4 / n);
    const int64_t count = block * n;
    // Zeros: sums of repeated runs stay zero.
    std::vector<float> a(static_cast<size_t>(count)), b(static_cast<size_t>(count));
    const std::span<float> own =
        std::span(a).subspan(static_cast<size_t>(block * group.rank()), static_cast<size_t>(block));
    const auto add = [&](std::string op, double factor, const std::function<void()>& body) {
      const double t = time_of(group, seconds_each, body);
      const auto size = static_cast<double>(count * 4);
      out.push_back({std::move(op), count * 4, t, size * factor / t});
    };
    const double share = static_cast<double>(n - 1) / n;
    add("all_reduce", 2 * share, [&] { group.all_reduce(a); });
    if (plain_mpi_all_reduce(group, std::span(a).first(1)))
      add("MPI_Allreduce", 2 * share, [&] { plain_mpi_all_reduce(group, a); });
    add("reduce_scatter", share, [&] { group.reduce_scatter(a, own); });
    add("all_gather", share, [&] { group.all_gather(own, a); });
    add("all_to_all", share, [&] { group.all_to_all(a, b); });
    if (n > 1) {
      add("send+recv", 1, [&] {
        if (group.rank() > 1) return;
        const int peer = 1 - group.rank();
        group.exchange({Message::send(a, peer), Message::recv(b, peer)});
      });
    }
  }
  return out;
}

std::string format_timings(std::span<const CommTiming> timings) {
  std::string out = fmt::format("{:<16} {:>10} {:>12} {:>12}\n", "operation", "size", "us", "busbw GB/s");
  for (const CommTiming& t : timings)
    out +=
        fmt::format("{:<16} {:>10} {:>12.2f} {:>12.2f}\n", t.op, human_bytes(static_cast<uint64_t>(t.bytes)),
                    t.seconds * 1e6, t.bus_bytes_per_second * 1e-9);
  return out;
}

}  // namespace nrl::comm
