#include "parallel/comm/world/bench.h"

#include <algorithm>
#include <functional>

#include "core/base/error.h"
#include "core/base/sample.h"
#include "core/base/text.h"
#include "parallel/comm/mpi/mpi_session.h"

namespace nrl::comm {

namespace {

constexpr int most_rounds = 7, fewest_rounds = 3;
constexpr double longest_call = 1;  // seconds; sizes with calls that would take longer are left out
constexpr int64_t proportional_bytes = 1 << 20;  // from here on the time of a call grows with its bytes

/// Times of one call in alternating rounds, equal on all ranks. `mpi` may be null.
struct Times {
  double seconds = 0, mpi = 0, speedup = 0;

  Times(Communicator& group, double budget, const std::function<void()>& body,
        const std::function<void()>& mpi_body) {
    Communicator& host = group.host();
    const auto measure = [&](const std::function<void()>& f, int repetitions) {
      host.barrier();
      const int64_t begin = now_ns();
      for (int i = 0; i < repetitions; ++i) f();
      std::vector<double> slowest = {static_cast<double>(now_ns() - begin) * 1e-9 / repetitions};
      host.all_reduce(slowest, Reduce::max);
      return slowest[0];
    };
    int rounds = most_rounds;
    const auto repetitions = [&](const std::function<void()>& f) {
      double first = measure(f, 1);  // equal on all ranks, so they agree on the count
      if (first < budget)
        first = measure(f, 3);  // the first call connects the ranks
      else
        rounds = fewest_rounds;
      return std::clamp(static_cast<int>(budget / most_rounds / std::max(first, 1e-9)), 1, 1000);
    };
    const int each = repetitions(body), each_mpi = mpi_body ? repetitions(mpi_body) : 0;
    std::vector<double> ours, theirs, ratios;
    for (int i = 0; i < rounds; ++i) {
      ours.push_back(measure(body, each));
      if (!mpi_body) continue;
      theirs.push_back(measure(mpi_body, each_mpi));
      ratios.push_back(theirs.back() / ours.back());
    }
    seconds = median(ours);
    if (!mpi_body) return;
    mpi = median(theirs);
    speedup = median(ratios);
  }
};

// Zeros: sums of repeated runs stay zero.
class Buffer {
 public:
  Buffer(device::Runtime* device, int64_t bytes) {
    const auto size = static_cast<size_t>(bytes);
    if (!device) {
      host_.resize(size);
      return;
    }
    memory_ = device::Memory(*device, device::Memory::Kind::device, size);
    const device::Stream stream(*device);
    device->fill(memory_.data(), 0, size, stream.get());
    device->synchronize(stream.get());
  }
  std::byte* data() { return host_.empty() ? memory_.data() : host_.data(); }

 private:
  std::vector<std::byte> host_;
  device::Memory memory_;
};

}  // namespace

std::vector<CommTiming> comm_benchmark(Communicator& group, std::span<const int64_t> sizes_bytes,
                                       double seconds_each, device::Runtime* device) {
  const int n = group.size();
  std::vector<CommTiming> out;
  double slowest = 0;  // of the size before
  for (int64_t bytes : sizes_bytes) {
    NRL_CHECK(bytes >= 0, "size {}", bytes);
    const int64_t block_bytes = std::max<int64_t>(1, bytes / 4 / n) * 4, size = block_bytes * n;
    // Calls of fewer bytes take their latency, in whose measure a busy machine may have interfered.
    if (!out.empty() && size >= proportional_bytes &&
        slowest * static_cast<double>(size) / static_cast<double>(out.back().bytes) > longest_call)
      break;
    slowest = 0;
    Buffer a(device, size), b(device, size);
    const double share = static_cast<double>(n - 1) / n;
    const auto add = [&](std::string op, DType dtype, double factor, const std::function<void()>& body,
                         const std::function<void()>& mpi_body) {
      const Times t(group, seconds_each, body, mpi_body);
      slowest = std::max({slowest, t.seconds, t.mpi});
      out.push_back({.op = std::move(op),
                     .dtype = dtype,
                     .bytes = size,
                     .seconds = t.seconds,
                     .bus_bytes_per_second = static_cast<double>(size) * factor / t.seconds,
                     .mpi_seconds = t.mpi,
                     .speedup = t.speedup});
    };
    const auto all = [&](Buffer& v, DType t) { return View(v.data(), size / size_of(t), t); };
    const auto own = [&](Buffer& v, DType t) {
      return View(v.data() + group.rank() * block_bytes, block_bytes / size_of(t), t);
    };
    for (const DType t : {DType::f32, DType::bf16}) {
      const auto compare = [&](Op op, double factor, const ConstView& in, const View& to,
                               const std::function<void()>& body) {
        const bool mpi = plain_mpi(group, op, in, to);
        add(std::string(name_of(op)), t, factor, body,
            mpi ? std::function<void()>([&group, op, in, to] { plain_mpi(group, op, in, to); }) : nullptr);
      };
      compare(Op::all_reduce, 2 * share, {}, all(a, t), [&] { group.all_reduce(all(a, t)); });
      compare(Op::reduce_scatter, share, all(a, t), own(b, t),
              [&] { group.reduce_scatter(all(a, t), own(b, t)); });
      compare(Op::all_gather, share, own(a, t), all(b, t), [&] { group.all_gather(own(a, t), all(b, t)); });
    }
    const View in = all(a, DType::f32), to = all(b, DType::f32);
    add(
        "all_to_all", DType::f32, share, [&] { group.all_to_all(in, to); }, nullptr);
    if (n > 1) {
      add(
          "send+recv", DType::f32, 1,
          [&] {
            if (group.rank() > 1) return;
            const int peer = 1 - group.rank();
            group.exchange({Message::send(in, peer), Message::recv(to, peer)});
          },
          nullptr);
    }
  }
  return out;
}

std::string format_timings(std::span<const CommTiming> timings) {
  std::string out =
      fmt::format("{:<16} {:<5} {:>10} {:>12} {:>12}", "operation", "type", "size", "us", "busbw GB/s");
  const bool compared =
      std::any_of(timings.begin(), timings.end(), [](const CommTiming& t) { return t.mpi_seconds > 0; });
  if (compared) out += fmt::format(" {:>12} {:>9}", "MPI us", "MPI/ours");
  out += '\n';
  for (const CommTiming& t : timings) {
    out += fmt::format("{:<16} {:<5} {:>10} {:>12.2f} {:>12.2f}", t.op, name_of(t.dtype),
                       human_bytes(static_cast<uint64_t>(t.bytes)), t.seconds * 1e6,
                       t.bus_bytes_per_second * 1e-9);
    if (t.mpi_seconds > 0) out += fmt::format(" {:>12.2f} {:>9.2f}", t.mpi_seconds * 1e6, t.speedup);
    out += '\n';
  }
  return out;
}

}  // namespace nrl::comm
