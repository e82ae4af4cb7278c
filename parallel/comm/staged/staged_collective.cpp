#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "parallel/comm/staged/staged_work.h"

namespace nrl::comm {

namespace {

class StagedCollective final : public StagedWork {
 public:
  using StagedWork::StagedWork;

 private:
  Staging& staging() const { return group().staging; }

  Advance start() override {
    begin(staging().copies());
    task_ = call().more.empty() ? run_call(call()) : run_parts();
    return advance_task();
  }
  Advance poll() override {
    attach();
    return advance_task();
  }
  Doorbell* doorbell() override { return transport().doorbell(); }

  Advance advance_task() {
    try {
      const Advance result = task_.resume();
      if (result == Advance::done) finish_in(staging().copies().in());
      return result;
    } catch (...) {
      staging().copies().drain();
      throw;
    }
  }

  /// Pipelines `whole` elements of every block in chunks of at most `most`. The callbacks get the chunk's
  /// first element, its length and its staging buffer.
  template <class Out, class Exchange, class In>
  Task by_chunks(int64_t whole, int64_t most, Out out, Exchange exchange, In in) {
    const auto size = [=](int64_t k) { return std::min(most, whole - k * most); };
    return staging().pipeline((whole + most - 1) / most,
                              [=](int64_t k, std::byte* m) { out(k * most, size(k), m); },
                              [=](int64_t k, std::byte* m) { return exchange(size(k), m); },
                              [=](int64_t k, std::byte* m) { in(k * most, size(k), m); });
  }

  /// Runs the call on host memory for one chunk.
  Task on_host(const std::byte* in, std::byte* out, int64_t count) {
    Call c;
    c.op = call().op;
    c.reduce = call().reduce;
    c.dtype = call().dtype;
    c.in = in;
    c.out = out;
    c.count = count;
    c.peer = call().peer;
    co_await transport().execute(c);
  }

  Task run_parts() {
    const std::vector<Call> parts = call().parts();
    for (const Call& part : parts) co_await run_call(part);
  }

  Task run_call(const Call& c) {
    const int n = group().size, me = group().rank;
    const int64_t width = size_of(c.dtype), slot = staging().slot_bytes() / width, count = c.count;
    const auto* in = static_cast<const std::byte*>(c.in);
    auto* out = static_cast<std::byte*>(c.out);
    const CopyStreams& s = staging().copies();
    switch (c.op) {
      case Op::all_reduce:
        co_await by_chunks(
            count, slot,
            [&](int64_t at, int64_t m, std::byte* host) { s.to_host(host, in + at * width, m * width); },
            [&](int64_t m, std::byte* host) { return on_host(host, host, m); },
            [&](int64_t at, int64_t m, std::byte* host) { s.to_device(out + at * width, host, m * width); });
        break;
      case Op::broadcast:
        co_await by_chunks(
            count, slot,
            [&](int64_t at, int64_t m, std::byte* host) {
              if (me == c.peer) s.to_host(host, in + at * width, m * width);
            },
            [&](int64_t m, std::byte* host) { return on_host(host, host, m); },
            [&](int64_t at, int64_t m, std::byte* host) {
              if (me != c.peer) s.to_device(out + at * width, host, m * width);
            });
        break;
      case Op::all_gather:
        co_await by_chunks(
            count, slot / n,
            [&](int64_t at, int64_t m, std::byte* host) {
              s.to_host(host + me * m * width, in + at * width, m * width);
            },
            [&](int64_t m, std::byte* host) { return on_host(host + me * m * width, host, m); },
            [&](int64_t at, int64_t m, std::byte* host) {
              for (int r = 0; r < n; ++r) {
                std::byte* to = out + (r * count + at) * width;
                if (to != in + at * width) s.to_device(to, host + r * m * width, m * width);
              }
            });
        break;
      case Op::reduce_scatter:
        co_await by_chunks(
            count, slot / n,
            [&](int64_t at, int64_t m, std::byte* host) {
              for (int r = 0; r < n; ++r)
                s.to_host(host + r * m * width, in + (r * count + at) * width, m * width);
            },
            [&](int64_t m, std::byte* host) { return on_host(host, host + me * m * width, m); },
            [&](int64_t at, int64_t m, std::byte* host) {
              s.to_device(out + at * width, host + me * m * width, m * width);
            });
        break;
      case Op::all_to_all:
        co_await by_chunks(
            count, slot / 2 / n,
            [&](int64_t at, int64_t m, std::byte* host) {
              for (int r = 0; r < n; ++r)
                s.to_host(host + r * m * width, in + (r * count + at) * width, m * width);
            },
            [&](int64_t m, std::byte* host) { return on_host(host, host + n * m * width, m); },
            [&](int64_t at, int64_t m, std::byte* host) {
              for (int r = 0; r < n; ++r)
                s.to_device(out + (r * count + at) * width, host + (n + r) * m * width, m * width);
            });
        break;
      case Op::all_to_all_v:
        co_await all_to_all_v();
        break;
      case Op::barrier:
        co_await staging().pipeline(
            1, [](int64_t, std::byte*) {},
            [this](int64_t, std::byte*) { return on_host(nullptr, nullptr, 0); }, [](int64_t, std::byte*) {});
        break;
      default:
        NRL_CHECK(false, "{} is not a collective", name_of(c.op));
    }
  }

  /// Elements of a block that round k moves.
  static int64_t piece(int64_t whole, int64_t k, int64_t most) {
    return std::clamp<int64_t>(whole - k * most, 0, most);
  }

  /// Round k of all_to_all_v on host memory.
  Task exchange_round(int64_t k, int64_t most, const std::byte* in, std::byte* out) {
    Call part;
    part.op = Op::all_to_all_v;
    part.dtype = call().dtype;
    part.in = in;
    part.out = out;
    for (const int64_t n : call().send_counts) part.send_counts.push_back(piece(n, k, most));
    for (const int64_t n : call().recv_counts) part.recv_counts.push_back(piece(n, k, most));
    co_await transport().execute(part);
  }

  /// In round k each pair exchanges elements [k * most, (k + 1) * most) of its blocks, so that both ends
  /// split them alike; a rank takes part in as many rounds as its longest block needs.
  Task all_to_all_v() {
    const Call& c = call();
    const auto n = static_cast<size_t>(group().size);
    const int64_t width = size_of(c.dtype);
    const int64_t most = staging().slot_bytes() / 2 / group().size / width;
    int64_t longest = 0;
    for (size_t r = 0; r < n; ++r) longest = std::max({longest, c.send_counts[r], c.recv_counts[r]});
    std::byte* const device_in = static_cast<std::byte*>(const_cast<void*>(c.in));
    auto* device_out = static_cast<std::byte*>(c.out);
    const int64_t half = most * group().size * width;
    /// f(device, host, bytes) for every block's piece of round k.
    const auto pieces = [&](const std::vector<int64_t>& counts, int64_t k, std::byte* device, std::byte* host,
                            const auto& f) {
      for (size_t r = 0; r < n; ++r) {
        const int64_t m = piece(counts[r], k, most) * width;
        f(device + k * most * width, host, m);
        device += counts[r] * width;
        host += m;
      }
    };
    const CopyStreams& s = staging().copies();
    co_await staging().pipeline(
        (longest + most - 1) / most,
        [&](int64_t k, std::byte* host) {
          pieces(c.send_counts, k, device_in, host,
                 [&](std::byte* d, std::byte* h, int64_t bytes) { s.to_host(h, d, bytes); });
        },
        [&](int64_t k, std::byte* host) { return exchange_round(k, most, host, host + half); },
        [&](int64_t k, std::byte* host) {
          pieces(c.recv_counts, k, device_out, host + half,
                 [&](std::byte* d, std::byte* h, int64_t bytes) { s.to_device(d, h, bytes); });
        });
  }

  Task task_;
};

}  // namespace

std::shared_ptr<Work> make_staged_collective(std::shared_ptr<StagedGroup> group, const LogTicket& ticket,
                                             std::shared_ptr<std::atomic<int>> unwaited, Call call) {
  return std::make_shared<StagedCollective>(std::move(group), ticket, std::move(unwaited), std::move(call));
}

}  // namespace nrl::comm
