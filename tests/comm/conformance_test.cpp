// One suite for all backends, against the same arithmetic in plain loops.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <thread>

#include "core/base/error.h"
#include "parallel/comm/agreement.h"
#include "tests/catch.h"
#include "tests/comm/backends.h"
#include "tests/comm/host_order.h"
#include "tests/comm/world_fixture.h"

using namespace nrl;
using namespace nrl::comm;

namespace {

Communicator& world() {
  return test_world().comm();
}

template <class T>
constexpr bool is_16_bit = std::is_same_v<T, bf16> || std::is_same_v<T, f16>;

/// Element i of rank r's input: small numbers that are not representable sums in 16 bits.
template <class T>
T value(int r, int64_t i) {
  const int64_t k = (i * 7 + r * 13) % 101 - (std::is_same_v<T, uint8_t> ? 0 : 40);
  if constexpr (is_16_bit<T>) {
    return T(static_cast<float>(k) * 0.37f);
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(static_cast<double>(k) * 0.37);
  } else {
    return static_cast<T>(k);
  }
}

template <class T>
std::vector<T> input(int r, int64_t n) {
  std::vector<T> v(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) v[i] = value<T>(r, i);
  return v;
}

/// The defined result in the world.
template <class T>
T reduced(Reduce op, int64_t i) {
  static const HostOrder order(world().members());
  return order.reduced<T>(op, [i](int r) { return value<T>(r, i); });
}

template <class T>
bool same(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

/// Equal, for backends with an order of their own but for the rounding of one addition per rank.
template <class T>
bool agrees(const Backend& backend, const T& got, const T& expected, int ranks) {
  if (backend.strict || same(got, expected)) return same(got, expected);
  if constexpr (is_16_bit<T> || std::is_floating_point_v<T>) {
    const double unit = std::is_same_v<T, bf16>  ? 0x1p-8
                        : std::is_same_v<T, f16> ? 0x1p-11
                                                 : std::numeric_limits<T>::epsilon();
    const auto a = static_cast<double>(static_cast<std::conditional_t<is_16_bit<T>, float, T>>(got));
    const auto b = static_cast<double>(static_cast<std::conditional_t<is_16_bit<T>, float, T>>(expected));
    return std::abs(a - b) <= unit * ranks * 25 * ranks;  // inputs are below 25
  } else {
    return false;
  }
}

template <class T>
int64_t differences(const Backend& backend, const std::vector<T>& got, int64_t begin, int64_t n, Reduce op,
                    int ranks, int64_t from) {
  int64_t bad = 0;
  for (int64_t i = 0; i < n; ++i) bad += !agrees(backend, got[begin + i], reduced<T>(op, from + i), ranks);
  return bad;
}

/// Runs a case on every backend.
template <class F>
void on_all(F f) {
  for (const auto& backend : backends()) {
    INFO(backend->name());
    f(*backend);
  }
}

/// Elements; the largest takes at least three chunks of shared memory in every type.
template <class T>
std::vector<int64_t> sizes() {
  return {0, 1, 7, 1000, (2 * test_slot_bytes() + 15723) / static_cast<int64_t>(sizeof(T))};
}

}  // namespace

TEMPLATE_TEST_CASE("all_reduce gives the sum in the order of ranks and hosts, bit for bit", "[comm]", float,
                   bf16, f16, double, int32_t, int64_t, uint8_t) {
  on_all([](Backend& backend) {
    for (Reduce op : {Reduce::sum, Reduce::max, Reduce::min}) {
      for (int64_t n : sizes<TestType>()) {
        Data<TestType> data(backend, input<TestType>(world().rank(), n));
        backend.all_reduce(data, op);
        INFO("op " << static_cast<int>(op) << " size " << n);
        REQUIRE(differences(backend, data.read(), 0, n, op, world().size(), 0) == 0);
      }
    }
  });
}

TEMPLATE_TEST_CASE("reduce_scatter gives each rank its block", "[comm]", float, bf16, f16, double, int32_t,
                   int64_t, uint8_t) {
  on_all([](Backend& backend) {
    const int n = world().size(), me = world().rank();
    for (Reduce op : {Reduce::sum, Reduce::max, Reduce::min}) {
      for (int64_t each : sizes<TestType>()) {
        const std::vector<TestType> before = input<TestType>(me, each * n);
        Data<TestType> in(backend, before), out(backend, static_cast<size_t>(each)), both(backend, before);
        backend.reduce_scatter(in, out, op);
        INFO("op " << static_cast<int>(op) << " size " << each);
        REQUIRE(differences(backend, out.read(), 0, each, op, n, me * each) == 0);
        backend.reduce_scatter(both, both.part(me * each, each), op);
        const std::vector<TestType>& after = both.read();
        REQUIRE(differences(backend, after, me * each, each, op, n, me * each) == 0);
        for (int64_t i = 0; i < each * n; ++i)  // the other blocks are untouched
          if (i / std::max<int64_t>(each, 1) != me && !same(after[i], before[i]))
            FAIL("element " << i << " changed");
      }
    }
  });
}

TEMPLATE_TEST_CASE("all_gather, broadcast and all_to_all move bytes", "[comm]", float, bf16, f16, double,
                   int64_t, uint8_t, uint16_t) {
  on_all([](Backend& backend) {
    const int n = world().size(), me = world().rank();
    for (int64_t each : sizes<TestType>()) {
      INFO("size " << each);
      const auto own = input<TestType>(me, each);
      std::vector<TestType> blank(static_cast<size_t>(each * n));
      Data<TestType> in(backend, own), out(backend, blank);
      backend.all_gather(in, out);
      std::copy(own.begin(), own.end(), blank.begin() + me * each);
      Data<TestType> in_place(backend, blank);
      backend.all_gather(in_place.part(me * each, each), in_place);
      const auto gathered = out.read();
      int64_t bad = 0;
      for (int r = 0; r < n; ++r)
        for (int64_t i = 0; i < each; ++i) bad += !same(gathered[r * each + i], value<TestType>(r, i));
      REQUIRE(bad == 0);
      REQUIRE(std::equal(gathered.begin(), gathered.end(), in_place.read().begin(), same<TestType>));

      for (int root = 0; root < n; ++root) {
        Data<TestType> data(backend, own);
        backend.broadcast(data, root);
        const auto& got = data.read();
        for (int64_t i = 0; i < each; ++i) bad += !same(got[i], value<TestType>(root, i));
      }
      REQUIRE(bad == 0);

      Data<TestType> all(backend, input<TestType>(me, each * n));
      backend.all_to_all(all, out);
      const auto& got = out.read();
      for (int r = 0; r < n; ++r)
        for (int64_t i = 0; i < each; ++i) bad += !same(got[r * each + i], value<TestType>(r, me * each + i));
      REQUIRE(bad == 0);
    }
  });
}

TEST_CASE("several gathers and several reductions are one operation each", "[comm]") {
  on_all([](Backend& backend) {
    const int n = world().size(), me = world().rank();
    // One of them is in place, one is empty, and the largest takes several chunks.
    const std::vector<int64_t> all = sizes<float>();
    std::vector<std::unique_ptr<Data<float>>> in, out;
    std::vector<Operands> gathers, sums;
    for (const int64_t each : all) {
      in.push_back(std::make_unique<Data<float>>(backend, input<float>(me, each * n)));
      out.push_back(std::make_unique<Data<float>>(backend, static_cast<size_t>(each * n)));
      const View part = each == 7 ? in.back()->part(me * each, each) : out.back()->part(0, each);
      sums.push_back({*in.back(), part});
      gathers.push_back({part, each == 7 ? in.back()->view() : out.back()->view()});
    }
    CollectiveLog* const log = backend.comm().collective_log();
    if (log) log->reset_totals();
    Handle sum = backend.comm().reduce_scatter_async(sums, Reduce::sum, backend.stream());
    sum.wait();
    int64_t bad = 0;
    for (size_t i = 0; i < all.size(); ++i)
      bad += all[i] == 7 ? differences(backend, in[i]->read(), me * 7, 7, Reduce::sum, n, me * 7)
                         : differences(backend, out[i]->read(), 0, all[i], Reduce::sum, n, me * all[i]);
    REQUIRE(bad == 0);
    for (size_t i = 0; i < all.size(); ++i)  // the shard of rank 0 is in its place; others move it there
      if (all[i] != 7 && me != 0) gathers[i].in = in[i]->part(0, all[i]);
    Handle gather = backend.comm().all_gather_async(gathers, backend.stream());
    gather.wait();
    for (size_t i = 0; i < all.size(); ++i) {
      const std::vector<float>& got = all[i] == 7 ? in[i]->read() : out[i]->read();
      for (int r = 0; r < n; ++r)
        for (int64_t k = 0; k < all[i]; ++k) {
          const float whole = reduced<float>(Reduce::sum, r * all[i] + k), own = value<float>(r, k);
          const bool summed = all[i] == 7 || r == 0;
          bad += !(summed ? agrees(backend, got[r * all[i] + k], whole, n) : same(got[r * all[i] + k], own));
        }
    }
    REQUIRE(bad == 0);
    int64_t elements = 0;
    for (const int64_t each : all) elements += each * n;
    for (const LogTotal& t : log ? log->totals() : std::vector<LogTotal>{})
      if (t.group == backend.comm().name() && (t.op == Op::all_gather || t.op == Op::reduce_scatter))
        REQUIRE((t.count == 1 && t.bytes == elements * 4));
    REQUIRE_THROWS_AS(backend.comm().all_gather_async(std::vector<Operands>{}), Error);
  });
}

TEST_CASE("all_to_all_v moves blocks of different sizes, also empty ones", "[comm]") {
  on_all([](Backend& backend) {
    const int n = world().size(), me = world().rank();
    for (int64_t unit : {1001, 40007}) {
      const auto amount = [unit](int from, int to) {
        return static_cast<int64_t>((from * 5 + to * 3) % 4) * unit;
      };
      std::vector<int64_t> to(static_cast<size_t>(n)), from(static_cast<size_t>(n));
      std::vector<int32_t> sent, expected;
      for (int r = 0; r < n; ++r) {
        to[r] = amount(me, r);
        from[r] = amount(r, me);
        for (int64_t i = 0; i < amount(me, r); ++i)
          sent.push_back(static_cast<int32_t>(me * 10000000 + r * 1000000 + i));
        for (int64_t i = 0; i < amount(r, me); ++i)
          expected.push_back(static_cast<int32_t>(r * 10000000 + me * 1000000 + i));
      }
      Data<int32_t> in(backend, sent), out(backend, expected.size());
      backend.all_to_all_v(in, to, out, from);
      REQUIRE(out.read() == expected);
    }
  });
}

TEST_CASE("messages keep their order per tag and groups of them cannot block", "[comm]") {
  on_all([](Backend& backend) {
    const int n = world().size(), me = world().rank();
    const int next = (me + 1) % n, before = (me + n - 1) % n;
    for (size_t size : {size_t{1}, size_t{300000}}) {  // above the eager limit both sides must be in flight
      const auto all = [size](int x) { return std::vector<float>(size, static_cast<float>(x)); };
      Data<float> a(backend, all(me)), b(backend, all(me + 100)), got_a(backend, size), got_b(backend, size);
      backend.exchange({Message::send(a, next, 1), Message::send(b, next, 2), Message::recv(got_b, before, 2),
                        Message::recv(got_a, before, 1)});
      REQUIRE(got_a.read() == all(before));
      REQUIRE(got_b.read() == all(before + 100));
      if (n == 1 || !backend.strict) continue;
      // A receive posted early blocks neither sends nor collectives.
      Communicator& comm = backend.comm();
      Handle early = comm.recv_async(got_a, before, 0, backend.stream());
      Data<float> sum(backend, 1, 1.0f);
      backend.all_reduce(sum);
      REQUIRE(sum.read()[0] == static_cast<float>(n));
      Handle first = comm.send_async(a, next, 0, backend.stream());
      Handle second = comm.send_async(b, next, 0, backend.stream());
      early.wait();
      Handle late = comm.recv_async(got_b, before, 0, backend.stream());
      late.wait();
      first.wait();
      second.wait();
      REQUIRE(got_a.read()[0] == static_cast<float>(before));
      REQUIRE(got_b.read().back() == static_cast<float>(before) + 100);
    }
  });
}

TEST_CASE("asynchronous operations run in order and while others compute", "[comm]") {
  on_all([](Backend& backend) {
    const int n = world().size();
    Communicator& comm = backend.comm();
    std::vector<std::unique_ptr<Data<float>>> data;
    std::vector<Handle> handles;
    for (size_t i = 0; i < 20; ++i) {
      std::vector<float> values(50001, 1.0f);
      values[0] = static_cast<float>(i);
      data.push_back(std::make_unique<Data<float>>(backend, values));
      handles.push_back(comm.all_reduce_async(*data[i], Reduce::sum, backend.stream()));
    }
    REQUIRE(comm.outstanding() == 20);
    Data<double> late(backend, 1, 1.0);
    backend.all_reduce(late);  // behind all of the above
    REQUIRE(late.read()[0] == n);
    for (size_t i = 0; i < data.size(); ++i) {
      for (int tries = 0; tries < 5000 && !handles[i].done(); ++tries)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      REQUIRE(handles[i].done());
      handles[i].wait();
      const auto& got = data[i]->read();
      REQUIRE(got[0] == static_cast<float>(i) * static_cast<float>(n));
      REQUIRE(got[50000] == static_cast<float>(n));
    }
    REQUIRE(comm.outstanding() == 0);

    // Completes without a wait.
    Handle alone = comm.all_reduce_async(*data[0], Reduce::sum, backend.stream());
    for (int i = 0; i < 5000 && !alone.done(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    REQUIRE(alone.done());
    alone.wait();
  });
}

TEST_CASE("max propagates NaN and integer sums wrap", "[comm]") {
  on_all([](Backend& backend) {
    std::vector<float> x = {1.0f, 2.0f};
    if (world().rank() == world().size() - 1) x[0] = std::numeric_limits<float>::quiet_NaN();
    Data<float> data(backend, x), sum(backend, x);
    backend.all_reduce(data, Reduce::max);
    backend.all_reduce(sum, Reduce::sum);
    if (backend.strict) REQUIRE(std::isnan(data.read()[0]));
    REQUIRE(data.read()[1] == 2.0f);
    REQUIRE(std::isnan(sum.read()[0]));
    Data<int32_t> big(backend, 1, std::numeric_limits<int32_t>::max());
    backend.all_reduce(big);
    uint32_t expected = 0;
    for (int r = 0; r < world().size(); ++r) expected += 0x7fffffffu;
    REQUIRE(static_cast<uint32_t>(big.read()[0]) == expected);
  });
}

TEST_CASE("split and subgroup create groups with the right members", "[comm]") {
  on_all([](Backend& backend) {
    const int n = world().size(), me = world().rank();
    Communicator& comm = backend.comm();
    // Odd and even ranks, in reverse order.
    const auto half = comm.split(me % 2, -me, "half");
    REQUIRE(half);
    std::vector<int> members;
    for (int r = n - 1; r >= 0; --r)
      if (r % 2 == me % 2) members.push_back(r);
    REQUIRE(half->members() == members);
    Data<int32_t> sum(backend, 1, me);
    half->all_reduce_async(sum, Reduce::sum, backend.stream()).wait();
    REQUIRE(sum.read()[0] == std::accumulate(members.begin(), members.end(), 0));
    REQUIRE(half->label().substr(0, 5) == "half[");

    const auto none = comm.split(me == 0 ? 0 : -1, 0, "first");
    REQUIRE((none != nullptr) == (me == 0));

    // Members only: the last rank stays away.
    if (me < n - 1 || n == 1) {
      std::vector<int> some(static_cast<size_t>(std::max(1, n - 1)));
      std::iota(some.begin(), some.end(), 0);
      const auto sub = comm.subgroup(some, "sub");
      REQUIRE(sub->size() == static_cast<int>(some.size()));
      Data<double> big(backend, 200001, 1.0);
      sub->all_reduce_async(big, Reduce::sum, backend.stream()).wait();
      REQUIRE(big.read()[200000] == sub->size());
      sub->barrier_async(backend.stream()).wait();
      sub->barrier();
    }
  });
}

TEST_CASE("the collective log counts calls, bytes and time", "[comm]") {
  const auto group = world().split(0, world().rank(), "counted");
  test_world().collective_log().reset_totals();
  std::vector<float> data(1000, 1.0f);
  std::vector<float> all(1000 * static_cast<size_t>(world().size()));
  group->all_reduce(data);
  Handle h = group->all_reduce_async(data);
  h.wait();
  group->all_gather(data, all);
  int seen = 0;
  for (const LogTotal& t : test_world().collective_log().totals()) {
    if (t.group != "counted") continue;
    ++seen;
    REQUIRE(t.exposed_seconds > 0);
    if (t.op == Op::all_reduce) {
      REQUIRE(t.count == 2);
      REQUIRE(t.bytes == 8000);
    } else {
      REQUIRE(t.op == Op::all_gather);
      REQUIRE(t.bytes == 4000 * world().size());
    }
  }
  REQUIRE(seen == 2);
  const auto latest = test_world().collective_log().latest(1);
  REQUIRE(latest.size() == 1);
  REQUIRE(latest[0].op == Op::all_gather);
  REQUIRE(latest[0].seq == 2);
  REQUIRE(latest[0].progress == Progress::done);
  REQUIRE(latest[0].ended_ns >= latest[0].started_ns);
  REQUIRE(latest[0].started_ns >= latest[0].enqueued_ns);
  REQUIRE(test_world().collective_log().group_label(latest[0].group) == group->label());
}

TEST_CASE("wrong arguments are refused before anything is sent", "[comm]") {
  std::vector<float> a(3), b(4 * static_cast<size_t>(world().size()));
  REQUIRE_THROWS_AS(world().all_gather(a, b), Error);
  std::vector<uint16_t> u(3);
  REQUIRE_THROWS_AS(world().all_reduce(u), Error);
  REQUIRE_THROWS_AS(world().broadcast(a, world().size()), Error);
  REQUIRE_THROWS_AS(world().send(a, world().rank()), Error);
  REQUIRE_THROWS_AS(world().exchange({Message::send(a, world().rank())}), Error);
  REQUIRE_THROWS_AS(world().all_reduce_async(a, Reduce::sum, StreamRef{&a}), Error);
  REQUIRE(world().outstanding() == 0);
}

TEST_CASE("a message of another size than expected is an error", "[comm]") {
  if (world().size() < 2 || world().rank() > 1) return;
  std::vector<float> a(5), b(7);
  if (world().rank() == 0) {
    world().send(a, 1, 9);
  } else {
    REQUIRE_THROWS_AS(world().recv(b, 0, 9), Error);
  }
}

TEST_CASE("texts are gathered and broadcast; ranks agree on the first error", "[comm]") {
  const int n = world().size(), me = world().rank();
  const auto texts = world().gather_texts(std::string(static_cast<size_t>(me * 3), 'x'));
  for (int r = 0; r < n; ++r) REQUIRE(texts[r].size() == static_cast<size_t>(r * 3));
  for (const int root : {0, n - 1}) {
    // Long texts go as messages that wait for their receiver; an empty one sends none.
    const auto text_of = [&](int r) { return std::string(static_cast<size_t>(r * 100'000), 'a' + r % 26); };
    const auto at_root = world().gather_texts_to(text_of(me), root);
    REQUIRE(at_root.size() == (me == root ? static_cast<size_t>(n) : 0));
    for (size_t r = 0; r < at_root.size(); ++r) REQUIRE((at_root[r] == text_of(static_cast<int>(r))));
  }
  REQUIRE(agree_on_error(world(), Exit::ok, "unused").code == Exit::ok);
  const ErrorConsensus v =
      agree_on_error(world(), me == n - 1 ? Exit::config : Exit::ok, me == n - 1 ? "bad key" : "");
  REQUIRE(v.code == Exit::config);
  REQUIRE(v.rank == n - 1);
  REQUIRE(v.message == "bad key");
  REQUIRE(static_cast<int>(test_world().hosts().size()) == n);
  REQUIRE(test_world().local_size() >= 1);
}
