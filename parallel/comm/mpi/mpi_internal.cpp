#include "parallel/comm/mpi/mpi_internal.h"

#include <algorithm>

#include "core/base/error.h"

namespace nrl::comm {

namespace {

constexpr int64_t most_bytes = int64_t{1} << 30;

template <class Post>
void post(const Part& part, std::vector<MPI_Request>& requests, Post post_one) {
  for (int64_t begin = 0; begin < part.bytes; begin += most_bytes) {
    MPI_Request request = MPI_REQUEST_NULL;
    post_one(part.data + begin, static_cast<int>(std::min(most_bytes, part.bytes - begin)), &request);
    requests.push_back(request);
  }
}

}  // namespace

void mpi_check(int rc, const char* what) {
  if (rc == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(rc, text, &length);
  int kind = 0;
  MPI_Error_class(rc, &kind);
  fail(kind == MPI_ERR_TRUNCATE ? Exit::internal : Exit::peer_lost, "{} failed: {}", what, text);
}

void mpi_started(int rc, const char* what) {
  mpi_check(rc, what);
  ++mpi_counts().requests;
}

MpiCounts& mpi_counts() {
  static MpiCounts counts;
  return counts;
}

bool test_all(std::span<MPI_Request> requests, const char* what) {
  int over = 0;
  mpi_check(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &over, MPI_STATUSES_IGNORE),
            what);
  if (over) mpi_counts().requests -= static_cast<int64_t>(requests.size());
  return over != 0;
}

Task mpi_barrier(MPI_Comm comm) {
  MPI_Request request = MPI_REQUEST_NULL;
  mpi_started(MPI_Ibarrier(comm, &request), "MPI_Ibarrier");
  co_await until([&] { return test_all({&request, 1}, "MPI_Ibarrier"); });
}

void run_now(Task task) {
  Backoff backoff(nullptr, 0);
  while (task.resume() != Advance::done) backoff.pause();
}

void post_send(const Part& part, int tag, MPI_Comm comm, std::vector<MPI_Request>& requests) {
  post(part, requests, [&](std::byte* data, int n, MPI_Request* request) {
    mpi_started(MPI_Isend(data, n, MPI_BYTE, part.peer, tag, comm, request), "MPI_Isend");
  });
}

void post_recv(const Part& part, int tag, MPI_Comm comm, std::vector<MPI_Request>& requests) {
  post(part, requests, [&](std::byte* data, int n, MPI_Request* request) {
    mpi_started(MPI_Irecv(data, n, MPI_BYTE, part.peer, tag, comm, request), "MPI_Irecv");
  });
}

}  // namespace nrl::comm
