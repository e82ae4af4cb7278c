// The replay of a rank: hand-computed times of every way in which layers communicate.

#include "apps/predict/replay.h"

#include <map>
#include <numeric>
#include <utility>

#include "apps/predict/spread.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::predict;
using comm::Purpose;
using machine::Link;

namespace {

/// A list of items; operations count from 0.
struct List {
  std::vector<Item> items;
  int operations = 0;

  List& call(double seconds) {
    items.push_back({.seconds = seconds});
    return *this;
  }
  int start(double seconds, Link link = Link::node, Purpose purpose = Purpose::layers, int after = -1) {
    items.push_back({.kind = Item::Kind::start,
                     .seconds = seconds,
                     .operation = operations,
                     .after = after,
                     .link = link,
                     .purpose = purpose});
    return operations++;
  }
  List& wait(int operation) {
    items.push_back({.kind = Item::Kind::wait, .operation = operation});
    return *this;
  }
  Replay replayed(double slowdown = 0, bool spans = false) const {
    return shared({.call = 1 + slowdown}, spans);
  }
  Replay shared(const machine::Sharing& sharing, bool spans = false) const {
    return replay(items, 1, machine::Overlap(sharing), spans);
  }
  double end(double slowdown = 0) const { return replayed(slowdown).end; }
};

}  // namespace

TEST_CASE("The time of a GEMM with its communication is that of the way in which they overlap", "[replay]") {
  const double x = GENERATE(0.5, 1.0, 3.0, 8.0);
  constexpr double c = 2;
  CAPTURE(x);
  SECTION("none: one after the other") {
    List l;
    l.call(c).wait(l.start(x));
    CHECK(l.end() == Approx(c + x));
    CHECK(l.end(0.25) == Approx(c + x));
    CHECK(l.replayed().slots[0].layers() == Approx(x));
  }
  SECTION("bulk: the sum of an input's gradient beside the weight's") {
    List l;
    l.call(c);
    const int sum = l.start(x);
    l.call(c).wait(sum);
    CHECK(l.end() == Approx(c + std::max(c, x)));
    // 25 % slower while the operation is in flight.
    CHECK(l.end(0.25) == Approx(c + (x >= 1.25 * c ? x : c + x * 0.2)));
    CHECK(l.replayed(0.25).slots[0].compute == Approx(2 * c));
  }
  SECTION("pipelined: pieces of the output are summed during the GEMM of the next") {
    for (const int pieces : {1, 2, 4}) {
      List l;
      std::vector<int> sums;
      for (int i = 0; i < pieces; ++i) {
        l.call(c / pieces);
        sums.push_back(l.start(x / pieces));
      }
      for (const int s : sums) l.wait(s);
      CHECK(l.end() == Approx(std::max(c, x) + std::min(c, x) / pieces));
    }
  }
  SECTION("ring: the GEMM on the rows of one rank after another, which arrive meanwhile") {
    constexpr int ranks = 4;
    List l;
    std::vector<int> hops;
    for (int i = 1; i < ranks; ++i)
      hops.push_back(l.start(x / (ranks - 1), Link::node, Purpose::layers, i > 1 ? hops.back() : -1));
    l.call(c / ranks);
    for (const int hop : hops) l.wait(hop).call(c / ranks);
    // The rows of hop i arrive at i hops; each GEMM comes after them and after the one before.
    const double hop = x / (ranks - 1);
    CHECK(l.end() == Approx(std::max(c, x + c / ranks)));
    CHECK(l.end() <= Approx(c / ranks + (ranks - 1) * std::max(c / ranks, hop)));
  }
  SECTION("ring of sums: every hop waits for the GEMM before it") {
    constexpr int ranks = 4;
    List l;
    int sent = -1;
    for (int i = 1; i <= ranks; ++i) {
      l.call(c / ranks);
      if (sent >= 0) l.wait(sent);
      if (i < ranks) sent = l.start(x / (ranks - 1));
    }
    CHECK(l.end() == Approx(c / ranks + (ranks - 1) * std::max(c / ranks, x / (ranks - 1))));
  }
  SECTION("context parallelism: the next block arrives during the attention of this one") {
    constexpr int blocks = 3;
    List l;
    for (int i = 0; i < blocks; ++i) {
      const int next = i + 1 < blocks ? l.start(x) : -1;
      l.call(c).wait(next);
    }
    CHECK(l.end() == Approx((blocks - 1) * std::max(c, x) + c));
  }
  SECTION("experts: exchanges count in full, but for a shared expert beside them") {
    List l;
    const int there = l.start(x, Link::adapter, Purpose::experts);
    l.call(0.75);  // shared expert
    l.wait(there).call(c).wait(l.start(x, Link::adapter, Purpose::experts));
    CHECK(l.end() == Approx(std::max(x, 0.75) + c + x));
    CHECK(l.replayed().slots[0].layers() == Approx(std::max(x - 0.75, 0.0) + x));
  }
}

TEST_CASE("Operations wait for their link and for what they come after", "[replay]") {
  List l;
  const int gather = l.start(2, Link::adapter, Purpose::weights),
            reduce = l.start(3, Link::adapter, Purpose::gradients),
            inside = l.start(1, Link::node, Purpose::layers),
            across = l.start(1, Link::adapter, Purpose::gradients, inside),
            behind = l.start(4, Link::node, Purpose::gradients, across);
  l.call(0.5).wait(inside).wait(gather);
  CHECK(l.end() == Approx(2));
  l.wait(reduce);
  CHECK(l.end() == Approx(5));
  l.wait(across).wait(behind);
  const Replay all = l.replayed();
  CHECK(all.end == Approx(10));
  CHECK(all.busy.processors == Approx(0.5));
  CHECK(all.busy.node() == Approx(5));
  CHECK(all.busy.adapter() == Approx(6));
  CHECK(all.slots[0].compute == Approx(0.5));
  CHECK(all.slots[0].layers() == Approx(0.5));
  CHECK(all.slots[0].of(Purpose::weights) == Approx(1));
  CHECK(all.slots[0].of(Purpose::gradients) == Approx(8));
  CHECK(all.slots[0].total() == Approx(all.end));
  // An operation that nothing waits for does not hold up the end.
  l.start(100);
  CHECK(l.end() == Approx(10));
}

TEST_CASE("An operation of a layer shares its link with data that is on it", "[replay]") {
  List l;
  const int reduce = l.start(10, Link::adapter, Purpose::gradients),
            next = l.start(4, Link::adapter, Purpose::gradients);
  l.call(1);
  const int hop = l.start(2, Link::adapter);  // from 1 to 5, beside 2 s of the reduction
  l.wait(hop);
  CHECK(l.end() == Approx(5));
  l.call(6);                                       // the reduction ends at 12
  const int long_hop = l.start(3, Link::adapter);  // from 11: 1 s of it beside the first, 2 s beside the next
  l.wait(long_hop);
  CHECK(l.end() == Approx(17));
  l.wait(reduce).wait(next);
  const Replay all = l.replayed(0, true);
  CHECK(all.end == Approx(19));
  CHECK(all.busy.adapter() == Approx(19));
  CHECK(all.slots[0].layers() == Approx(4 + 6));
  double busy = 0;
  for (const Span& s : all.spans)
    if (s.link == Link::adapter) busy += s.end - s.begin;
  CHECK(busy == Approx(19));
  // Data that comes later waits for operations of layers.
  List later;
  const int first = later.start(2), data = later.start(1, Link::node, Purpose::weights);
  later.wait(data);
  CHECK(later.end() == Approx(3));
  later.wait(first);
}

TEST_CASE("A rank on a CPU spends its own time to start an operation", "[replay]") {
  const std::vector<Item> items{
      {.seconds = 1, .host = 0.25},
      {.kind = Item::Kind::start, .seconds = 1, .host = 0.5, .operation = 0, .link = Link::node},
      {.slot = 1, .seconds = 3},
      {.kind = Item::Kind::wait, .slot = 1, .operation = 0}};
  const Replay r = replay(items, 2, machine::Overlap());
  CHECK(r.end == Approx(4.75));
  CHECK(r.slots[0].host == Approx(0.25));
  CHECK(r.slots[0].layers() == Approx(0.5));
  CHECK(r.slots[1].total() == Approx(3));
}

TEST_CASE("Calls and operations that share a core take the sum of their times", "[replay]") {
  constexpr machine::Sharing core{.call = 2, .operation = 2};
  List l;
  const int sum = l.start(2);
  l.call(4).wait(sum);
  CHECK(l.shared(core).end == Approx(6));  // to 4 both, the rest of the call alone
  CHECK(l.end(1) == Approx(5));            // the operation has a core of its own
  List longer;
  const int gather = longer.start(3, Link::node, Purpose::weights),
            next = longer.start(1, Link::node, Purpose::weights);
  longer.call(2).wait(gather).call(1).wait(next);
  // Both to 4, the rest of the gather alone to 5, the call beside the next one to 7.
  const Replay r = longer.replayed(0, true), s = longer.shared(core, true);
  CHECK(r.end == Approx(4));
  CHECK(s.end == Approx(7));
  CHECK(s.slots[0].compute == Approx(3));
  CHECK(s.slots[0].of(Purpose::weights) == Approx(4));
  CHECK(s.busy.node() == Approx(4));

  // Operations behind each other get a twentieth of a core until the call is over.
  List queue;
  std::vector<int> queued;
  for (int i = 0; i < 30; ++i) queued.push_back(queue.start(0.1, Link::node, Purpose::weights));
  queue.call(5);
  for (const int operation : queued) queue.wait(operation);
  CHECK(queue.shared({.call = 1.04, .operation = 20}).end == Approx(5.2 + 3 - 5.2 / 20));

  uint64_t state = 5;
  const auto random = [&](int n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int>((state >> 33) % static_cast<uint64_t>(n));
  };
  for (int round = 0; round < 300; ++round) {
    List list;
    std::vector<int> open;
    double work = 0;
    for (int i = 0; i < 60; ++i) {
      const double seconds = random(100) * 0.01;
      work += seconds;
      if (random(2) == 0)
        list.call(seconds);
      else
        open.push_back(list.start(seconds, Link::node, static_cast<Purpose>(random(6))));
      if (!open.empty() && random(3) == 0) {
        const size_t at = static_cast<size_t>(random(static_cast<int>(open.size())));
        list.wait(open[at]);
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(at));
      }
    }
    for (const int o : open) list.wait(o);
    const Replay both = list.shared(core, true);
    CHECK(both.end == Approx(work));
    CHECK(both.slots[0].total() == Approx(both.end));
    double free = 0;
    for (const Span& span : both.spans)
      if (span.link == Link::node && span.end - span.begin > 1e-12) {
        CHECK(span.begin >= free - 1e-9);
        free = span.end;
      }
    CHECK(list.shared({.call = 1.5, .operation = 1.5}).end <= both.end + 1e-9);
  }
}

TEST_CASE("GEMMs lose more than others beside an operation, and nothing beside one of layers that is apart",
          "[replay]") {
  const auto with = [](comm::Purpose purpose, ops::Work work, bool apart) {
    const machine::Overlap overlap({.call = 2}, {.call = 1.25}, apart);
    const std::vector<Item> items{{.kind = Item::Kind::start,
                                   .seconds = 4,
                                   .operation = 0,
                                   .op = comm::Op::all_gather,
                                   .link = machine::Link::node,
                                   .purpose = purpose},
                                  {.kind = Item::Kind::call, .seconds = 1, .row = overlap.row("op", work)}};
    return replay(items, 1, overlap, false).end;
  };
  using enum comm::Purpose;
  for (const bool apart : {false, true}) {
    CHECK(with(weights, ops::Work::gemm, apart) == Approx(2));
    CHECK(with(weights, ops::Work::memory, apart) == Approx(1.25));
    CHECK(with(weights, ops::Work::attention, apart) == Approx(1.25));
    CHECK(with(layers, ops::Work::gemm, apart) == Approx(apart ? 1 : 2));
    CHECK(with(layers, ops::Work::memory, apart) == Approx(apart ? 1 : 1.25));
  }
}

TEST_CASE("Calls lose what was measured for them beside that operation", "[replay]") {
  const std::vector<machine::MeasuredOverlap> measured{
      {.op = "linear_forward",
       .work = ops::Work::gemm,
       .comm = comm::Op::all_reduce,
       .slowdown = 2,
       .comm_slowdown = 3},
      {.op = "linear_forward", .work = ops::Work::gemm, .comm = comm::Op::all_gather, .slowdown = 1.5},
      {.op = "attention_forward",
       .work = ops::Work::attention,
       .comm = comm::Op::all_gather,
       .slowdown = 1.25},
      {.op = "rope", .work = ops::Work::memory, .comm = comm::Op::all_gather, .slowdown = 0.9}};
  const machine::Overlap overlap(measured);
  CHECK(overlap.any());
  const auto of = [&](const char* op, ops::Work work, comm::Op beside) {
    return overlap.of(overlap.row(op, work), beside);
  };
  CHECK(of("linear_forward", ops::Work::gemm, comm::Op::all_reduce) == machine::Sharing{2, 3});
  CHECK(of("linear_forward", ops::Work::gemm, comm::Op::all_gather).call == 1.5);
  // Beside an operation that was not measured, the median of the op's.
  CHECK(of("linear_forward", ops::Work::gemm, comm::Op::exchange).call == Approx(1.75));
  // Another op has the times of its kind.
  CHECK(of("linear_backward_data", ops::Work::gemm, comm::Op::all_reduce).call == 2);
  CHECK(of("attention_backward", ops::Work::attention, comm::Op::all_reduce).call == 1.25);
  CHECK(of("norm_forward", ops::Work::memory, comm::Op::all_gather).call == 1);  // faster together is noise
  // Without one of its kind, as all of them.
  const machine::Overlap gemms(std::span<const machine::MeasuredOverlap>(measured.data(), 2));
  CHECK(gemms.of(gemms.row("rope", ops::Work::memory), comm::Op::all_gather).call == 1.5);
  CHECK_FALSE(machine::Overlap().any());

  std::vector<Item> items{{.kind = Item::Kind::start,
                           .seconds = 4,
                           .operation = 0,
                           .op = comm::Op::all_reduce,
                           .link = Link::node},
                          {.seconds = 1, .row = overlap.row("linear_forward", ops::Work::gemm)},
                          {.kind = Item::Kind::wait, .operation = 0}};
  CHECK(replay(items, 1, overlap).end == Approx(2 + 4 - 2.0 / 3));
  items[0].op = comm::Op::all_gather;
  CHECK(replay(items, 1, overlap).end == Approx(4));
}

TEST_CASE("Any list keeps the bounds of its resources", "[replay]") {
  uint64_t state = 1;
  const auto random = [&](int n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int>((state >> 33) % static_cast<uint64_t>(n));
  };
  for (int round = 0; round < 300; ++round) {
    const double slowdown = random(3) * 0.1;
    List l;
    std::vector<int> open;
    double compute = 0, communication = 0;
    for (int i = 0; i < 60; ++i) {
      const double seconds = random(100) * 0.01;
      if (random(2) == 0) {
        l.call(seconds);
        compute += seconds;
      } else {
        const int link = random(static_cast<int>(machine::all_links.size()));
        open.push_back(l.start(seconds, machine::all_links[static_cast<size_t>(link)],
                               static_cast<Purpose>(random(static_cast<int>(comm::purpose_count))),
                               open.empty() ? -1 : open.front()));
        communication += seconds;
      }
      if (!open.empty() && random(3) == 0) {
        const size_t at = static_cast<size_t>(random(static_cast<int>(open.size())));
        l.wait(open[at]);
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(at));
      }
    }
    for (const int o : open) l.wait(o);
    const Replay r = l.replayed(slowdown, true);
    CHECK(r.end <= Approx(compute + communication));
    CHECK(r.end >= compute - 1e-9);
    CHECK(r.busy.most() <= r.end + 1e-9);
    CHECK(std::accumulate(r.busy.links.begin(), r.busy.links.end(), 0.0) == Approx(communication));
    CHECK(r.slots[0].total() == Approx(r.end));
    // No resource does two things at once.
    std::map<std::pair<Span::Resource, Link>, double> free;
    for (const Span& s : r.spans) {
      double& last = free[{s.resource, s.link}];
      CHECK(s.begin >= last - 1e-12);
      last = s.end;
    }
    // Calls that are slower never help.
    CHECK(l.end(slowdown) >= l.end(0) - 1e-9);
  }
}

TEST_CASE("The slowest of n ranks is as far from the mean as order statistics say", "[replay]") {
  CHECK(expected_maximum(1) == 0);
  // Expected maxima of n standard normal variables; Blom's formula is within 1 %.
  CHECK(expected_maximum(2) == Approx(0.5642).epsilon(0.05));
  CHECK(expected_maximum(10) == Approx(1.5388).epsilon(0.01));
  CHECK(expected_maximum(20) == Approx(1.8675).epsilon(0.01));
  CHECK(expected_maximum(1024) > expected_maximum(512));
  CHECK(expected_maximum(1 << 20) < 6);
}

TEST_CASE("Copies to and from the host go on beside each other and slow no call", "[replay]") {
  List l;
  const int out = l.start(3, Link::to_host, Purpose::offload),
            back = l.start(2, Link::from_host, Purpose::offload),
            behind = l.start(2, Link::to_host, Purpose::offload);
  l.call(4).wait(out).wait(back).wait(behind);
  const Replay r = l.replayed(0.25, true);
  CHECK(r.end == Approx(5));
  CHECK(r.slots[0].offload() == Approx(1));
  CHECK(r.busy.of(Link::to_host) == Approx(5));
  CHECK(r.busy.of(Link::from_host) == Approx(2));
  CHECK(r.busy.most() == Approx(5));
}

TEST_CASE("Pieces of an offloaded update take the time of the slowest of copies and processors", "[replay]") {
  const auto end = [](double in, double update, double out) {
    constexpr int pieces = 6, buffers = 3;
    List l;
    std::vector<int> copied_out;
    for (int i = 0; i < pieces; ++i) {
      const int from = i < buffers ? -1 : copied_out[static_cast<size_t>(i - buffers)];
      const int copied = l.start(in, Link::to_host, Purpose::offload, from);
      const int updated = l.start(update, Link::host, Purpose::offload, copied);
      copied_out.push_back(l.start(out, Link::from_host, Purpose::offload, updated));
    }
    l.wait(copied_out.back());
    return l.end();
  };
  CHECK(end(1, 2, 1) == Approx(1 + 6 * 2 + 1));
  CHECK(end(2, 1, 1) == Approx(6 * 2 + 1 + 1));
  CHECK(end(1, 1, 2) == Approx(1 + 1 + 6 * 2));
}

TEST_CASE("A host that waits for a result is late with what follows", "[replay]") {
  // Each item takes the host 2: the first call runs from 2 to 12, the next one from 14, the operation from
  // 16, the call beside it from 18 to 24; the last call is started at 20.
  List l;
  l.call(10);
  l.items.back().host_waits = true;
  l.call(1);
  const int operation = l.start(5);
  l.call(6).wait(operation).call(1);
  for (Item& item : l.items)
    if (item.kind != Item::Kind::wait) item.issue = 2;
  const Replay r = l.replayed();
  CHECK(r.slots[0].host == Approx(2 + 2 + 3));
  CHECK(r.slots[0].compute == Approx(18));
  CHECK(r.end == Approx(2 + 10 + 2 + 1 + 3 + 6 + 1));
  CHECK(r.slots[0].total() == Approx(r.end));
  // A host that is ahead costs nothing but its first item.
  l.items.front().host_waits = false;
  CHECK(l.replayed().slots[0].host == Approx(2));
}
