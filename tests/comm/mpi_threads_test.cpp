// One thread at a time calls MPI, as MPI_THREAD_SERIALIZED requires. The calls below intercept the library's
// (MPI's profiling interface).
#include <atomic>
#include <chrono>
#include <thread>

#include <mpi.h>

#include "tests/catch.h"
#include "tests/comm/world_fixture.h"

namespace {

std::atomic<int> g_inside{0};
std::atomic<int> g_overlaps{0};
std::atomic<bool> g_slow{false};

/// One call; `slow`: it takes so long that any other thread which polls comes in between.
template <class Call>
int call(bool slow, Call body) {
  if (g_inside.fetch_add(1) > 0) g_overlaps.fetch_add(1);
  if (slow && g_slow) std::this_thread::sleep_for(std::chrono::milliseconds(3));
  const int rc = body();
  g_inside.fetch_sub(1);
  return rc;
}

}  // namespace

extern "C" {
int MPI_Testall(int count, MPI_Request* requests, int* flag, MPI_Status* statuses) {
  return call(false, [&] { return PMPI_Testall(count, requests, flag, statuses); });
}
int MPI_Comm_rank(MPI_Comm comm, int* rank) {
  return call(true, [&] { return PMPI_Comm_rank(comm, rank); });
}
int MPI_Comm_size(MPI_Comm comm, int* size) {
  return call(true, [&] { return PMPI_Comm_size(comm, size); });
}
int MPI_Comm_set_errhandler(MPI_Comm comm, MPI_Errhandler handler) {
  return call(true, [&] { return PMPI_Comm_set_errhandler(comm, handler); });
}
int MPI_Comm_free(MPI_Comm* comm) {
  return call(true, [&] { return PMPI_Comm_free(comm); });
}
}

TEST_CASE("making groups does not enter MPI beside the executor", "[progress]") {
  nrl::comm::Communicator& world = test_world().comm();
  const int n = world.size(), me = world.rank();
  if (n == 1) return;
  // The executor's thread polls for a message that comes at the end.
  std::vector<float> in(1), out(1);
  nrl::comm::Handle pending = world.recv_async(in, (me + 1) % n, 7);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  g_overlaps = 0;
  g_slow = true;
  for (int i = 0; i < 3; ++i) {
    world.split(0, me, "all");
    world.split(me, me, "alone");
  }
  g_slow = false;
  world.send(out, (me + n - 1) % n, 7);
  pending.wait();
  REQUIRE(g_overlaps == 0);
}
