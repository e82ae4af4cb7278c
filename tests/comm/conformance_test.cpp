// One suite for all backends: what comes out is compared with the same arithmetic done by hand.
#include "core/base/error.h"
#include "tests/catch.h"
#include "tests/comm/world_fixture.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <thread>

using namespace nrl;
using namespace nrl::comm;

namespace {

Communicator& world() {
  return test_world().comm();
}

/// Element i of rank r's input: small numbers that are not representable sums in bf16.
template <class T>
T value(int r, int64_t i) {
  const int64_t k = (i * 7 + r * 13) % 101 - (std::is_same_v<T, uint8_t> ? 0 : 40);
  if constexpr (std::is_same_v<T, bf16>) {
    return bf16(static_cast<float>(k) * 0.37f);
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(static_cast<double>(k) * 0.37);
  } else {
    return static_cast<T>(k);
  }
}

template <class T>
std::vector<T> input(int r, int64_t n) {
  std::vector<T> v(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) v[static_cast<size_t>(i)] = value<T>(r, i);
  return v;
}

/// The defined result: from rank 0 upwards, bf16 in fp32 with one rounding.
template <class T>
T reduced(Reduce op, int ranks, int64_t i) {
  using W = std::conditional_t<std::is_same_v<T, bf16>, float, T>;
  W acc = static_cast<W>(value<T>(0, i));
  for (int r = 1; r < ranks; ++r) {
    const W x = static_cast<W>(value<T>(r, i));
    acc = op == Reduce::sum   ? static_cast<W>(acc + x)
          : op == Reduce::max ? std::max(acc, x)
                              : std::min(acc, x);
  }
  return T(acc);
}

template <class T>
bool same(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

template <class T>
int64_t differences(const std::vector<T>& got, int64_t begin, int64_t n, Reduce op, int ranks, int64_t from) {
  int64_t bad = 0;
  for (int64_t i = 0; i < n; ++i)
    bad += !same(got[static_cast<size_t>(begin + i)], reduced<T>(op, ranks, from + i));
  return bad;
}

const int64_t kSizes[] = {0, 1, 7, 1000, 300007};

}  // namespace

TEMPLATE_TEST_CASE("all_reduce gives the sum in rank order, bit for bit", "[comm]", float, bf16, double,
                   int32_t, int64_t, uint8_t) {
  for (Reduce op : {Reduce::sum, Reduce::max, Reduce::min}) {
    for (int64_t n : kSizes) {
      std::vector<TestType> data = input<TestType>(world().rank(), n);
      world().all_reduce(data, op);
      INFO("op " << static_cast<int>(op) << " size " << n);
      REQUIRE(differences(data, 0, n, op, world().size(), 0) == 0);
    }
  }
}

TEMPLATE_TEST_CASE("reduce_scatter gives each rank its block", "[comm]", float, bf16, double, int32_t,
                   int64_t, uint8_t) {
  const int n = world().size(), me = world().rank();
  for (Reduce op : {Reduce::sum, Reduce::max, Reduce::min}) {
    for (int64_t each : kSizes) {
      const std::vector<TestType> in = input<TestType>(me, each * n);
      std::vector<TestType> out(static_cast<size_t>(each));
      world().reduce_scatter(in, out, op);
      INFO("op " << static_cast<int>(op) << " size " << each);
      REQUIRE(differences(out, 0, each, op, n, me * each) == 0);
      std::vector<TestType> both = in;
      world().reduce_scatter(
          both, std::span(both).subspan(static_cast<size_t>(me * each), static_cast<size_t>(each)), op);
      REQUIRE(differences(both, me * each, each, op, n, me * each) == 0);
      for (int64_t i = 0; i < each * n; ++i)  // the other blocks are untouched
        if (i / std::max<int64_t>(each, 1) != me &&
            !same(both[static_cast<size_t>(i)], in[static_cast<size_t>(i)]))
          FAIL("element " << i << " changed");
    }
  }
}

TEMPLATE_TEST_CASE("all_gather, broadcast and all_to_all move bytes", "[comm]", float, bf16, double, int64_t,
                   uint8_t, uint16_t) {
  const int n = world().size(), me = world().rank();
  for (int64_t each : kSizes) {
    INFO("size " << each);
    const auto in = input<TestType>(me, each);
    std::vector<TestType> out(static_cast<size_t>(each * n)), in_place = out;
    world().all_gather(in, out);
    std::copy(in.begin(), in.end(), in_place.begin() + me * each);
    world().all_gather(std::span<const TestType>(in_place).subspan(static_cast<size_t>(me * each), in.size()),
                       in_place);
    int64_t bad = 0;
    for (int r = 0; r < n; ++r)
      for (int64_t i = 0; i < each; ++i)
        bad += !same(out[static_cast<size_t>(r * each + i)], value<TestType>(r, i));
    REQUIRE(bad == 0);
    REQUIRE(std::equal(out.begin(), out.end(), in_place.begin(), same<TestType>));

    for (int root = 0; root < n; ++root) {
      auto data = input<TestType>(me, each);
      world().broadcast(data, root);
      for (int64_t i = 0; i < each; ++i) bad += !same(data[static_cast<size_t>(i)], value<TestType>(root, i));
    }
    REQUIRE(bad == 0);

    const auto all = input<TestType>(me, each * n);
    world().all_to_all(all, out);
    for (int r = 0; r < n; ++r)
      for (int64_t i = 0; i < each; ++i)
        bad += !same(out[static_cast<size_t>(r * each + i)], value<TestType>(r, me * each + i));
    REQUIRE(bad == 0);
  }
}

TEST_CASE("all_to_all_v moves blocks of different sizes, also empty ones", "[comm]") {
  const int n = world().size(), me = world().rank();
  const auto amount = [](int from, int to) { return static_cast<int64_t>((from * 5 + to * 3) % 4 * 1001); };
  std::vector<int64_t> to(static_cast<size_t>(n)), from(static_cast<size_t>(n));
  std::vector<int32_t> in, out, expected;
  for (int r = 0; r < n; ++r) {
    to[static_cast<size_t>(r)] = amount(me, r);
    from[static_cast<size_t>(r)] = amount(r, me);
    for (int64_t i = 0; i < amount(me, r); ++i)
      in.push_back(static_cast<int32_t>(me * 1000000 + r * 10000 + i));
    for (int64_t i = 0; i < amount(r, me); ++i)
      expected.push_back(static_cast<int32_t>(r * 1000000 + me * 10000 + i));
  }
  out.resize(expected.size());
  world().all_to_all_v(in, to, out, from);
  REQUIRE(out == expected);
}

TEST_CASE("messages keep their order per tag and groups of them cannot block", "[comm]") {
  const int n = world().size(), me = world().rank();
  const int next = (me + 1) % n, before = (me + n - 1) % n;
  for (int64_t size : {int64_t{1}, int64_t{300000}}) {  // above the eager limit both sides must be under way
    std::vector<float> a(static_cast<size_t>(size), static_cast<float>(me)), b = a, c = a, got_a = a,
                                                                             got_b = a;
    for (float& x : b) x += 100;
    world().exchange({Message::send(a, next, 1), Message::send(b, next, 2), Message::recv(got_b, before, 2),
                      Message::recv(got_a, before, 1)});
    REQUIRE(got_a == std::vector<float>(static_cast<size_t>(size), static_cast<float>(before)));
    REQUIRE(got_b == std::vector<float>(static_cast<size_t>(size), static_cast<float>(before) + 100));
    if (n == 1) continue;
    // A receive asked for early holds up neither sends nor collectives.
    Handle early = world().recv_async(got_a, before);
    std::vector<float> sum = {1};
    world().all_reduce(sum);
    REQUIRE(sum[0] == static_cast<float>(n));
    Handle first = world().send_async(a, next), second = world().send_async(b, next);
    early.wait();
    world().recv(got_b, before);
    first.wait();
    second.wait();
    REQUIRE(got_a[0] == static_cast<float>(before));
    REQUIRE(got_b.back() == static_cast<float>(before) + 100);
  }
}

TEST_CASE("asynchronous operations run in order and while others compute", "[comm]") {
  const int n = world().size();
  std::vector<std::vector<float>> data(20, std::vector<float>(50001, 1.0f));
  std::vector<Handle> handles;
  for (size_t i = 0; i < data.size(); ++i) {
    data[i][0] = static_cast<float>(i);
    handles.push_back(world().all_reduce_async(data[i]));
  }
  REQUIRE(world().outstanding() == 20);
  std::vector<double> late = {1};
  world().all_reduce(late);  // behind all of the above
  REQUIRE(late[0] == n);
  for (Handle& h : handles) REQUIRE(h.done());
  for (size_t i = 0; i < data.size(); ++i) {
    handles[i].wait();
    REQUIRE(data[i][0] == static_cast<float>(i) * static_cast<float>(n));
    REQUIRE(data[i][50000] == static_cast<float>(n));
  }
  REQUIRE(world().outstanding() == 0);

  // Finishes without anybody waiting.
  Handle alone = world().all_reduce_async(data[0]);
  for (int i = 0; i < 5000 && !alone.done(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  REQUIRE(alone.done());
  alone.wait();
}

TEST_CASE("max passes NaN on and integer sums wrap", "[comm]") {
  std::vector<float> x = {1.0f, 2.0f};
  if (world().rank() == world().size() - 1) x[0] = std::numeric_limits<float>::quiet_NaN();
  world().all_reduce(x, Reduce::max);
  REQUIRE(std::isnan(x[0]));
  REQUIRE(x[1] == 2.0f);
  std::vector<int32_t> big = {std::numeric_limits<int32_t>::max()};
  world().all_reduce(big);
  uint32_t expected = 0;
  for (int r = 0; r < world().size(); ++r) expected += 0x7fffffffu;
  REQUIRE(static_cast<uint32_t>(big[0]) == expected);
}

TEST_CASE("split and subgroup make groups with the right members", "[comm]") {
  const int n = world().size(), me = world().rank();
  // Odd and even ranks, in reverse order.
  const auto half = world().split(me % 2, -me, "half");
  REQUIRE(half);
  std::vector<int> members;
  for (int r = n - 1; r >= 0; --r)
    if (r % 2 == me % 2) members.push_back(r);
  REQUIRE(half->members() == members);
  std::vector<int32_t> sum = {me};
  half->all_reduce(sum);
  REQUIRE(sum[0] == std::accumulate(members.begin(), members.end(), 0));
  REQUIRE(half->label().substr(0, 5) == "half[");

  const auto none = world().split(me == 0 ? 0 : -1, 0, "first");
  REQUIRE((none != nullptr) == (me == 0));

  // Members only: the last rank stays away.
  if (me < n - 1 || n == 1) {
    std::vector<int> some(static_cast<size_t>(std::max(1, n - 1)));
    std::iota(some.begin(), some.end(), 0);
    const auto sub = world().subgroup(some, "sub");
    REQUIRE(sub->size() == static_cast<int>(some.size()));
    std::vector<double> big(200001, 1.0);
    sub->all_reduce(big);
    REQUIRE(big[200000] == sub->size());
    sub->barrier();
  }
}

TEST_CASE("the ledger counts calls, bytes and time", "[comm]") {
  const auto group = world().split(0, world().rank(), "counted");
  test_world().ledger().reset_totals();
  std::vector<float> data(1000, 1.0f);
  std::vector<float> all(1000 * static_cast<size_t>(world().size()));
  group->all_reduce(data);
  Handle h = group->all_reduce_async(data);
  h.wait();
  group->all_gather(data, all);
  int seen = 0;
  for (const LedgerTotal& t : test_world().ledger().totals()) {
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
  const auto latest = test_world().ledger().latest(1);
  REQUIRE(latest.size() == 1);
  REQUIRE(latest[0].op == Op::all_gather);
  REQUIRE(latest[0].seq == 2);
  REQUIRE(latest[0].progress == Progress::done);
  REQUIRE(latest[0].ended_ns >= latest[0].started_ns);
  REQUIRE(latest[0].started_ns >= latest[0].enqueued_ns);
  REQUIRE(test_world().ledger().group_label(latest[0].group) == group->label());
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
  for (int r = 0; r < n; ++r) REQUIRE(texts[static_cast<size_t>(r)].size() == static_cast<size_t>(r * 3));
  REQUIRE(agree_on_error(world(), Exit::ok, "unused").code == Exit::ok);
  const Verdict v =
      agree_on_error(world(), me == n - 1 ? Exit::config : Exit::ok, me == n - 1 ? "bad key" : "");
  REQUIRE(v.code == Exit::config);
  REQUIRE(v.rank == n - 1);
  REQUIRE(v.message == "bad key");
  REQUIRE(static_cast<int>(test_world().hosts().size()) == n);
  REQUIRE(test_world().local_size() >= 1);
}
