// Communicators that execute nothing, against the log of those that do.
#include <array>
#include <map>

#include "parallel/comm/dry/dry_comm.h"
#include "parallel/grid/groups.h"
#include "tests/catch.h"
#include "tests/comm/world_fixture.h"

using namespace nrl;
using namespace nrl::comm;

namespace {

/// Every kind of operation; all results are waited for.
void communicate(Communicator& c, float* data) {
  const auto n = static_cast<int64_t>(c.size());
  const auto view = [&](int64_t at, int64_t count) { return View(data + at, count, DType::f32); };
  c.all_reduce(view(0, 5));
  c.all_gather(view(c.rank() * 3, 3), view(0, 3 * n));
  c.reduce_scatter(view(0, 2 * n), view(2 * c.rank(), 2));
  c.all_to_all(view(0, n), view(n, n));
  const std::vector<int64_t> counts(static_cast<size_t>(n), 2);
  c.all_to_all_v_async(view(0, 2 * n), counts, view(2 * n, 2 * n), counts).wait();
  c.broadcast(view(0, 4), 0);
  const std::array gathers{Operands{view(c.rank(), 1), view(0, n)},
                           Operands{view(n + c.rank(), 1), view(n, n)}};
  c.all_gather_async(gathers).wait();
  const int next = (c.rank() + 1) % c.size(), previous = (c.rank() + c.size() - 1) % c.size();
  c.exchange({Message::send(view(0, 6), next), Message::recv(view(8, 6), previous)});
  if (n == 1) return;
  Handle sent = c.send_async(view(0, 7), next);
  c.recv(view(8, 7), previous);
  sent.wait();
  c.barrier();
}

using Counts = std::map<Op, std::array<int64_t, 2>>;  // operations and bytes

Counts counts_of(const Ledger& ledger) {
  Counts out;
  for (const Ledger::Sum& s : ledger.sums()) out[s.op] = {s.count, s.bytes};
  return out;
}

}  // namespace

TEST_CASE("a dry communicator counts what others log, and touches nothing", "[comm]") {
  Communicator& world = test_world().comm();
  std::vector<float> memory(64, 1.0f);
  world.collective_log()->reset_totals();
  communicate(world, memory.data());
  Counts logged;
  for (const LogTotal& t : world.collective_log()->totals()) logged[t.op] = {t.count, t.bytes};

  Ledger ledger;
  const auto dry = make_dry("dry", world.rank(), world.members(), ledger, 3);
  auto* const nowhere = reinterpret_cast<float*>(64);  // no memory
  communicate(*dry, nowhere);
  CHECK(counts_of(ledger) == logged);
  for (const Ledger::Sum& s : ledger.sums()) {
    CHECK(s.group == 3);
    CHECK(s.purpose == Purpose::layers);
  }
  CHECK(dry->outstanding() == 0);
}

TEST_CASE("a communicator that is dry for a time executes nothing meanwhile", "[comm]") {
  Communicator& world = test_world().comm();
  const auto own = world.split(0, world.rank(), "own");
  Ledger ledger;
  own->set_dry(true, &ledger);
  if (world.rank() == 0) own->all_reduce(View(reinterpret_cast<void*>(64), 8, DType::f32));  // alone
  own->set_dry(false);
  CHECK(ledger.sums().size() == (world.rank() == 0 ? 1 : 0));
  float one = 1;
  own->all_reduce(View(&one, 1, DType::f32));
  CHECK(one == static_cast<float>(world.size()));
}

TEST_CASE("purposes are counted apart and nest", "[comm]") {
  Ledger ledger;
  const auto dry = make_dry("dry", 0, {0, 1}, ledger, 0);
  float x = 0;
  {
    const PurposeScope gradients(Purpose::gradients);
    {
      const PurposeScope weights(Purpose::weights);
      dry->all_reduce(View(&x, 1, DType::f32));
    }
    dry->all_reduce(View(&x, 1, DType::f32));
    dry->all_reduce(View(&x, 1, DType::f32));
  }
  dry->all_reduce(View(&x, 1, DType::f32));
  std::map<Purpose, int64_t> counts;
  for (const Ledger::Sum& s : ledger.sums()) counts[s.purpose] = s.count;
  CHECK(counts ==
        std::map<Purpose, int64_t>{{Purpose::layers, 1}, {Purpose::gradients, 2}, {Purpose::weights, 1}});
}

TEST_CASE("dry groups are those of a run, with channels", "[comm]") {
  const parallel::ProcessGrid grid({.tp = 2, .pp = 2}, 8, 5);
  const std::array ids{parallel::group::all, parallel::group::tp, parallel::group::dp_cp,
                       parallel::group::pp};
  const int peer = grid.dense_point().pp == 0 ? 1 : 0;
  const std::array channels{parallel::GroupChannels{parallel::group::pp, {{peer, Direction::send}}}};
  Ledger ledger;
  const parallel::Groups groups(grid, ids, channels, ledger);
  CHECK(groups[parallel::group::tp].members() == grid.members(parallel::group::tp));
  CHECK(groups[parallel::group::tp].rank() == grid.dense_point().tp);
  float x = 0;
  groups.channels(parallel::group::pp).to(peer).send_async(View(&x, 1, DType::f32)).wait();
  REQUIRE(ledger.sums().size() == 1);
  CHECK(groups.ids()[ledger.sums()[0].group] == parallel::group::pp);
  CHECK(ledger.sums()[0].bytes == 4);
}
