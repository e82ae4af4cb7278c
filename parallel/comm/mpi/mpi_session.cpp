#include "parallel/comm/mpi/mpi_session.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string_view>
#include <utility>

#include <sched.h>

#include "core/base/error.h"
#include "parallel/comm/mpi/mpi_comm.h"
#include "parallel/comm/mpi/mpi_internal.h"
#include "parallel/comm/reduce.h"
#include "parallel/comm/self/self_comm.h"

namespace nrl::comm {

namespace {

/// Polls before yielding: 0 when the ranks of this host outnumber its cores.
int spins_for(MPI_Comm local, int local_size) {
  cpu_set_t own;
  CPU_ZERO(&own);
  if (sched_getaffinity(0, sizeof(own), &own) != 0) return 0;
  std::vector<cpu_set_t> all(static_cast<size_t>(local_size));
  mpi_check(MPI_Allgather(&own, sizeof(own), MPI_BYTE, all.data(), sizeof(own), MPI_BYTE, local),
            "MPI_Allgather");
  cpu_set_t any;
  CPU_ZERO(&any);
  for (const cpu_set_t& one : all) CPU_OR(&any, &any, &one);
  return CPU_COUNT(&any) >= local_size ? 60 : 0;
}

/// Parameters of Open MPI, which reads them in MPI_Init; values set by the user win.
void set_mpi_defaults() {
  // For its own waits, mainly in MPI_Init and MPI_Finalize.
  setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
  // On one host it need not look for a network, which takes 0.2 s with UCX.
  const char *ranks = std::getenv("OMPI_COMM_WORLD_SIZE"), *local = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  if (ranks && local && std::string_view(ranks) == local) setenv("OMPI_MCA_pml", "ob1", 0);
}

}  // namespace

MpiSession::MpiSession(const MpiOptions& options, CollectiveLog* log) : state_(std::make_shared<MpiState>()) {
  NRL_CHECK(options.shared_slot_bytes >= 4096 && options.shared_slot_bytes % 64 == 0, "shared_slot_bytes {}",
            options.shared_slot_bytes);
  MpiState& s = *state_;
  s.options = options;
  s.log = log;
  set_mpi_defaults();
  int provided = MPI_THREAD_SINGLE;
  if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided) != MPI_SUCCESS)
    fail(Exit::unavailable, "MPI_Init_thread failed. Fix: start with mpirun or srun --mpi=pmix");
  if (provided < MPI_THREAD_SERIALIZED)
    fail(Exit::unavailable, "the MPI library has no thread support; MPI_THREAD_SERIALIZED is required");
  mpi_check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  mpi_check(MPI_Comm_rank(MPI_COMM_WORLD, &s.rank), "MPI_Comm_rank");
  mpi_check(MPI_Comm_size(MPI_COMM_WORLD, &s.size), "MPI_Comm_size");

  run_now(mpi_barrier(MPI_COMM_WORLD));
  MPI_Comm local = MPI_COMM_NULL;
  mpi_check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, s.rank, MPI_INFO_NULL, &local),
            "MPI_Comm_split_type");
  if (!options.hosts.empty()) {
    NRL_CHECK(options.hosts.size() == static_cast<size_t>(s.size), "{} ranks, but hosts of {}", s.size,
              options.hosts.size());
    MPI_Comm machine = std::exchange(local, MPI_COMM_NULL);
    mpi_check(MPI_Comm_split(machine, options.hosts[s.rank], s.rank, &local), "MPI_Comm_split");
    mpi_check(MPI_Comm_free(&machine), "MPI_Comm_free");
  }
  mpi_check(MPI_Comm_rank(local, &s.local_rank), "MPI_Comm_rank");
  mpi_check(MPI_Comm_size(local, &s.local_size), "MPI_Comm_size");
  int first = s.rank;
  mpi_check(MPI_Bcast(&first, 1, MPI_INT, 0, local), "MPI_Bcast");
  s.executor.set_spins(spins_for(local, s.local_size));
  mpi_check(MPI_Comm_free(&local), "MPI_Comm_free");

  s.host_of.resize(static_cast<size_t>(s.size));
  mpi_check(MPI_Allgather(&first, 1, MPI_INT, s.host_of.data(), 1, MPI_INT, MPI_COMM_WORLD), "MPI_Allgather");
  constexpr size_t name_bytes = MPI_MAX_PROCESSOR_NAME;
  char name[name_bytes] = {};
  int length = 0;
  mpi_check(MPI_Get_processor_name(name, &length), "MPI_Get_processor_name");
  std::vector<char> names(name_bytes * static_cast<size_t>(s.size));
  mpi_check(MPI_Allgather(name, name_bytes, MPI_CHAR, names.data(), name_bytes, MPI_CHAR, MPI_COMM_WORLD),
            "MPI_Allgather");
  for (size_t r = 0; r < s.host_of.size(); ++r)
    s.hosts.emplace_back(names.data() + r * name_bytes, strnlen(names.data() + r * name_bytes, name_bytes));
  s.launched.resize(s.host_of.size());
  std::iota(s.launched.begin(), s.launched.end(), 0);
  mpi_check(MPI_Comm_dup(MPI_COMM_WORLD, &s.ordered), "MPI_Comm_dup");
  // A launcher may deal ranks to hosts in turn (mpirun --map-by node).
  std::vector<int> by_host = s.launched;
  std::stable_sort(by_host.begin(), by_host.end(), [&](int a, int b) { return s.host_of[a] < s.host_of[b]; });
  reorder(by_host);
}

void MpiSession::reorder(std::span<const int> order) {
  MpiState& s = *state_;
  NRL_CHECK(std::is_permutation(order.begin(), order.end(), s.launched.begin(), s.launched.end()),
            "the new order of {} ranks is no permutation", s.size);
  if (std::is_sorted(order.begin(), order.end())) return;  // as they are
  const auto permuted = [&](const auto& by_rank) {
    auto out = by_rank;
    for (size_t r = 0; r < order.size(); ++r) out[r] = by_rank[order[r]];
    return out;
  };
  s.hosts = permuted(s.hosts);
  s.launched = permuted(s.launched);
  std::vector<int> hosts = permuted(s.host_of);
  for (size_t r = 0; r < hosts.size(); ++r)
    s.host_of[r] = static_cast<int>(std::find(hosts.begin(), hosts.end(), hosts[r]) - hosts.begin());
  s.rank = static_cast<int>(std::find(order.begin(), order.end(), s.rank) - order.begin());
  NRL_CHECK(s.executor.release_finished(10), "operations are in flight while ranks are reordered");
  run_now(mpi_barrier(s.ordered));
  MPI_Comm ordered = MPI_COMM_NULL;
  mpi_check(MPI_Comm_split(s.ordered, 0, s.rank, &ordered), "MPI_Comm_split");
  mpi_check(MPI_Comm_free(&s.ordered), "MPI_Comm_free");
  s.ordered = ordered;
}

MpiSession::~MpiSession() = default;

int MpiSession::rank() const {
  return state_->rank;
}
int MpiSession::size() const {
  return state_->size;
}
int MpiSession::local_rank() const {
  return state_->local_rank;
}
int MpiSession::local_size() const {
  return state_->local_size;
}
const std::vector<std::string>& MpiSession::hosts() const {
  return state_->hosts;
}
const std::vector<int>& MpiSession::host_of() const {
  return state_->host_of;
}
const std::vector<int>& MpiSession::launched() const {
  return state_->launched;
}

std::unique_ptr<Communicator> MpiSession::make_world() {
  MPI_Comm comm = MPI_COMM_NULL;
  run_now(mpi_barrier(state_->ordered));
  mpi_check(MPI_Comm_dup(state_->ordered, &comm), "MPI_Comm_dup");
  return make_mpi(state_, comm, "world");
}

MpiObjects live_mpi_objects() {
  const MpiCounts& counts = mpi_counts();
  return {counts.communicators, counts.windows, counts.requests};
}

void MpiSession::mark_failed() {
  state_->failed = true;
}

void MpiSession::finish() {
  if (state_->finished) return;
  state_->finished = true;
  if (!state_->failed) {
    run_now(mpi_barrier(MPI_COMM_WORLD));
    mpi_check(MPI_Comm_free(&state_->ordered), "MPI_Comm_free");
  }
  mpi_check(MPI_Finalize(), "MPI_Finalize");
}

void MpiSession::abort(int code) {
  MPI_Abort(MPI_COMM_WORLD, code);
  std::_Exit(code);
}

namespace {

// MPI 3.1 has no bf16: an operation of its own on the bits, with the sums that shared memory has.
void add_bf16(void* in, void* inout, int* count, MPI_Datatype*) {
  const void* parts[] = {inout, in};
  reduce_into(inout, parts, *count, DType::bf16, Reduce::sum);
}

}  // namespace

bool plain_mpi(Communicator& communicator, Op op, const ConstView& in, const View& out) {
  const MPI_Comm comm = raw_mpi(communicator);
  if (comm == MPI_COMM_NULL) return false;
  NRL_CHECK(out.count < (int64_t{1} << 31) && (out.dtype == DType::f32 || out.dtype == DType::bf16),
            "plain {} of {} elements of {}", name_of(op), out.count, name_of(out.dtype));
  static MPI_Op bf16_sum = MPI_OP_NULL;
  if (bf16_sum == MPI_OP_NULL) mpi_check(MPI_Op_create(add_bf16, 1, &bf16_sum), "MPI_Op_create");
  const bool wide = out.dtype == DType::f32;
  const MPI_Datatype type = wide ? MPI_FLOAT : MPI_UINT16_T;
  const MPI_Op sum = wide ? MPI_SUM : bf16_sum;
  const auto count = static_cast<int>(out.count);
  switch (op) {
    case Op::all_reduce:
      mpi_check(MPI_Allreduce(MPI_IN_PLACE, out.data, count, type, sum, comm), "MPI_Allreduce");
      return true;
    case Op::reduce_scatter:
      mpi_check(MPI_Reduce_scatter_block(in.data, out.data, count, type, sum, comm),
                "MPI_Reduce_scatter_block");
      return true;
    case Op::all_gather:
      mpi_check(MPI_Allgather(in.data, static_cast<int>(in.count), type, out.data, static_cast<int>(in.count),
                              type, comm),
                "MPI_Allgather");
      return true;
    default:
      return false;
  }
}

}  // namespace nrl::comm
