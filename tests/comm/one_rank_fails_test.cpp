// Run by abort.sh only: one rank fails while the others wait for it.
#include "tests/catch.h"
#include "tests/comm/world_fixture.h"

TEST_CASE("the last rank fails", "[.one_rank_fails]") {
  nrl::comm::Communicator& world = test_world().comm();
  const int rank = world.rank(), last = world.size() - 1;
  CAPTURE(rank);
  REQUIRE(rank != last);
  world.barrier();
}
