// A rank alone in groups of several: what its operations leave in memory.
#include "parallel/comm/mute/mute.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "parallel/grid/groups.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::comm;

TEST_CASE("operations of a mute group are complete and use the own part", "[comm]") {
  const auto group = make_mute("dp", 1, {4, 5, 6});
  CHECK(group->size() == 3);
  CHECK(group->rank() == 1);
  std::vector<float> v(12, 0);
  const auto view = [&](int64_t at, int64_t n) { return View(v.data() + at, n, DType::f32); };

  v = {1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0};
  group->all_reduce(view(0, 6));
  CHECK(v[5] == 6);
  group->reduce_scatter(view(0, 6), view(6, 2));
  CHECK((v[6] == 3 && v[7] == 4));
  group->all_to_all(view(0, 6), view(6, 6));
  CHECK((v[8] == 3 && v[9] == 4 && v[10] == 0));
  // Every block of a gather is the own one, also where it is gathered in place.
  v = {7, 8, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6};
  group->all_gather(view(0, 2), view(6, 6));
  CHECK(std::vector<float>(v.begin() + 6, v.end()) == std::vector<float>{7, 8, 7, 8, 7, 8});
  v = {0, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0};
  Handle gathered = group->all_gather_async(view(2, 2), view(0, 6));
  CHECK(gathered.done());
  gathered.wait();
  CHECK(std::vector<float>(v.begin(), v.begin() + 6) == std::vector<float>{7, 8, 7, 8, 7, 8});
  const std::array counts{int64_t{1}, int64_t{2}, int64_t{1}}, received{int64_t{3}, int64_t{2}, int64_t{1}};
  v = {1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0};
  group->all_to_all_v_async(view(0, 4), counts, view(4, 6), received).wait();
  CHECK((v[7] == 2 && v[8] == 3 && v[6] == 0 && v[9] == 0));
  // Messages to oneself arrive; other messages bring the data that this rank sends.
  v = {1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0};
  group->exchange({Message::send(view(0, 1), 1), Message::send(view(1, 2), 2), Message::recv(view(4, 1), 1),
                   Message::recv(view(6, 2), 0)});
  CHECK(v[4] == 1);
  CHECK((v[6] == 1 && v[7] == 0));
  CHECK(group->outstanding() == 0);
}

TEST_CASE("a mute group receives random activations", "[comm]") {
  const auto group = make_mute("pp", 0, {0, 8});
  std::vector<float> v(200'000, 0);
  group->recv(v, 1);
  double sum = 0, squares = 0;
  for (const float x : v) sum += x, squares += static_cast<double>(x) * x;
  CHECK(std::abs(sum) < 4000);
  CHECK(squares / 200'000 == Approx(1).epsilon(0.05));
  std::vector<bf16> b(1000);
  group->recv(b, 1);
  CHECK(std::count_if(b.begin(), b.end(), [](bf16 x) { return static_cast<float>(x) == 0; }) < 10);
  std::vector<int32_t> counts{5};
  group->recv(counts, 1);
  CHECK(counts[0] == 5);
}

TEST_CASE("a rank of a large grid has its groups and channels alone", "[comm]") {
  using namespace parallel;
  const ProcessGrid grid({.tp = 4, .pp = 4}, 256, 70);
  const std::array ids{group::tp, group::dp_cp, group::pp};
  const std::array channels{GroupChannels{group::pp, {{0, Direction::receive}, {2, Direction::send}}}};
  const Groups groups(grid, ids, channels, static_cast<device::Runtime*>(nullptr));
  CHECK(groups[group::tp].size() == 4);
  CHECK(groups[group::dp_cp].size() == 16);
  CHECK(groups[group::pp].members() == grid.members(group::pp));
  std::vector<float> v(3, 0);
  groups.channels(group::pp).from(0).receive_async(v).wait();
  CHECK(v[0] != 0);
  groups.channels(group::pp).to(2).send_async(v).wait();
}
