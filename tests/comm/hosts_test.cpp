// Groups on several hosts, whose ranks share memory inside a host and send messages between hosts. On one
// host (without NRL_TEST_HOSTS) the same cases run through its shared memory alone.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>

#include "parallel/comm/mpi/host_layout.h"
#include "parallel/comm/reduce.h"
#include "tests/catch.h"
#include "tests/comm/host_order.h"
#include "tests/comm/world_fixture.h"

using namespace nrl;
using namespace nrl::comm;

namespace {

Communicator& world() {
  return test_world().comm();
}

/// Element i of rank r: sums of floats differ in their last bits by the order.
template <class T>
T element(int r, int64_t i) {
  const int64_t k = (i * 11 + r * 29) % 211 - 100;
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(k);
  } else {
    return T(static_cast<float>(k) * 0.713f);
  }
}

template <class T>
std::vector<T> elements(int r, int64_t n) {
  std::vector<T> v(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) v[i] = element<T>(r, i);
  return v;
}

template <class T>
bool same(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

/// Orders of the world's ranks in which hosts alternate, lie in reverse, or lose their first rank.
std::vector<std::vector<int>> orders() {
  const int n = world().size();
  std::vector<int> straight(static_cast<size_t>(n));
  std::iota(straight.begin(), straight.end(), 0);
  std::vector<int> reversed(straight.rbegin(), straight.rend()), dealt;
  for (int first : {0, 1})
    for (int r = first; r < n; r += 2) dealt.push_back(r);
  std::vector<std::vector<int>> all = {straight, reversed, dealt};
  if (n > 2) all.push_back({reversed.begin(), reversed.end() - 1});
  return all;
}

template <class T>
void collectives(Communicator& group, const HostOrder& order, int64_t n) {
  const int ranks = group.size(), me = group.rank();
  INFO("group " << group.label() << " size " << n);
  const auto expected = [&](Reduce op, int64_t i) {
    return order.reduced<T>(op, [i](int r) { return element<T>(r, i); });
  };
  for (const Reduce op : {Reduce::sum, Reduce::max}) {
    std::vector<T> data = elements<T>(me, n);
    group.all_reduce(data, op);
    int64_t bad = 0;
    for (int64_t i = 0; i < n; ++i) bad += !same(data[i], expected(op, i));
    REQUIRE(bad == 0);
    const std::vector<T> in = elements<T>(me, n * ranks);
    std::vector<T> out(static_cast<size_t>(n)), both = in;
    group.reduce_scatter(in, out, op);
    group.reduce_scatter(both, std::span(both).subspan(static_cast<size_t>(me * n), static_cast<size_t>(n)),
                         op);
    for (int64_t i = 0; i < n * ranks; ++i) {
      const bool mine = i / n == me;
      const T& got = both[i];
      bad += !same(got, mine ? expected(op, i) : in[i]);
      if (mine) bad += !same(got, out[i - me * n]);
    }
    REQUIRE(bad == 0);
  }
  std::vector<T> own = elements<T>(me, n), all(static_cast<size_t>(n * ranks));
  for (const bool in_place : {false, true}) {
    const auto block = std::span(all).subspan(static_cast<size_t>(me * n), static_cast<size_t>(n));
    std::fill(all.begin(), all.end(), T{});
    if (in_place) std::copy(own.begin(), own.end(), block.begin());
    group.all_gather(in_place ? ConstView(block) : ConstView(own), all);
    int64_t bad = 0;
    for (int64_t i = 0; i < n * ranks; ++i) bad += !same(all[i], element<T>(static_cast<int>(i / n), i % n));
    REQUIRE(bad == 0);
  }
  for (int root = 0; root < ranks; ++root) {
    std::vector<T> data = elements<T>(me, n);
    group.broadcast(data, root);
    const std::vector<T> sent = elements<T>(root, n);
    REQUIRE(std::equal(data.begin(), data.end(), sent.begin(), same<T>));
  }
}

}  // namespace

TEST_CASE("a group's ranks are divided among hosts, and its blocks among their ranks", "[hosts]") {
  const HostLayout layout(std::vector<int>{7, 3, 3, 7, 5, 3});
  REQUIRE(layout.hosts == std::vector<std::vector<int>>{{0, 3}, {1, 2, 5}, {4}});
  REQUIRE(layout.index_of == std::vector<int>{0, 0, 1, 1, 0, 2});
  REQUIRE(layout.spans());
  for (int block = 0; block < layout.ranks(); ++block) {
    for (int host = 0; host < 3; ++host) {
      const int carrier = layout.carrier(block, host);
      REQUIRE(layout.host_of[carrier] == host);
      if (layout.host_of[block] == host) REQUIRE(carrier == block);
    }
  }
  REQUIRE(layout.carrier(5, 0) == 0);  // index 2 on a host of two ranks
  REQUIRE(layout.carrier(3, 1) == 2);
  REQUIRE(layout.most_carried() == 6);  // by the rank that is alone on its host
  REQUIRE_FALSE(HostLayout(std::vector<int>{1, 1, 1}).spans());
  REQUIRE_FALSE(HostLayout(std::vector<int>{1, 0, 2}).spans());
}

TEST_CASE("groups of parts are summed first and rounded", "[hosts]") {
  // In bf16 256 + 1 is 256 (8 bits), 1 + 1 + 256 is 258.
  const std::vector<bf16> big(5000, bf16(256.0f)), one(5000, bf16(1.0f));
  const std::vector<const void*> parts = {big.data(), one.data(), one.data()};
  std::vector<bf16> out(5000);
  const auto sum = [&](const std::vector<std::vector<int>>& groups) {
    reduce_by_group(out.data(), parts, groups, 5000, DType::bf16, Reduce::sum);
    REQUIRE(static_cast<float>(out[0]) == static_cast<float>(out[4999]));
    return static_cast<float>(out[4999]);
  };
  REQUIRE(sum({{0, 1}, {2}}) == 256.0f);
  REQUIRE(sum({{0}, {1, 2}}) == 258.0f);
  REQUIRE(sum({{0, 1, 2}}) == 258.0f);
}

TEMPLATE_TEST_CASE("ranks on hosts in any order give the defined results", "[hosts]", float, bf16, int64_t,
                   uint8_t) {
  if (world().size() == 1) return;
  for (const std::vector<int>& members : orders()) {
    if (std::find(members.begin(), members.end(), world().rank()) == members.end()) continue;
    const auto group = world().subgroup(members, "hosts");
    const HostOrder order(members);
    for (const int64_t n : {int64_t{1}, int64_t{1237}, int64_t{20'001}})
      collectives<TestType>(*group, order, n);
  }
}

TEST_CASE("collectives on several hosts run beside each other and beside messages", "[hosts]") {
  const int n = world().size(), me = world().rank();
  if (n == 1) return;
  const auto other = world().split(0, -me, "other");
  std::vector<float> a(300'000, 1.0f), b(300'000, 2.0f), sent(300'000, static_cast<float>(me)), got(300'000);
  std::vector<Handle> handles;
  for (int round = 0; round < 3; ++round) {
    // The two groups in another order on every second rank.
    const auto first = [&] { handles.push_back(world().all_reduce_async(a)); };
    const auto second = [&] { handles.push_back(other->all_reduce_async(b)); };
    if (me % 2) {
      first();
      second();
    } else {
      second();
      first();
    }
    world().exchange({Message::send(sent, (me + 1) % n), Message::recv(got, (me + n - 1) % n)});
    REQUIRE(got.back() == static_cast<float>((me + n - 1) % n));
    for (Handle& h : handles) h.wait();
    handles.clear();
  }
  const auto power = static_cast<float>(n * n * n);
  REQUIRE(a == std::vector<float>(300'000, power));
  REQUIRE(b == std::vector<float>(300'000, 2 * power));
}

TEST_CASE("the log names what carries a collective", "[hosts]") {
  const std::set<int> nodes(test_world().nodes().begin(), test_world().nodes().end());
  if (nodes.size() < 2 || nodes.size() == static_cast<size_t>(world().size())) return;
  const MpiObjects before = live_mpi_objects();
  {
    const auto group = world().split(0, world().rank(), "carried");
    std::vector<float> small(1), large(10'000);
    group->all_reduce(small);
    const auto algorithm = [] {
      for (const LogTotal& t : test_world().collective_log().totals())
        if (t.group == "carried" && t.op == Op::all_reduce) return t.algorithm;
      return std::string_view();
    };
    REQUIRE(algorithm() == "messages");
    group->all_reduce(large);
    group->all_reduce(small);  // the largest one counts
    REQUIRE(algorithm() == "shared memory and messages");
  }
  REQUIRE((live_mpi_objects() == before));
}
