#include "parallel/comm/world/world.h"

#include <cstdlib>
#include <exception>
#include <utility>

#include "core/base/output.h"
#include "core/base/process.h"
#include "parallel/comm/self/self_comm.h"

namespace nrl::comm {

namespace {

/// Value of a whole-number environment variable; -1 when it is absent or no number.
long env_number(const char* name) {
  const char* text = std::getenv(name);
  if (!text || !*text) return -1;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  return *end ? -1 : value;
}

}  // namespace

bool launched_with_peers() {
  // Set by launchers: mpirun (Open MPI), Hydra and srun's PMI, Slurm's steps.
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const long n = env_number(name);
    if (n > 1) return true;
    if (n == 1) return false;
  }
  // A bare PMIx server sets only the rank.
  return std::getenv("PMIX_RANK") != nullptr || std::getenv("PMI_RANK") != nullptr;
}

int launched_rank() {
  if (!launched_with_peers()) return 0;
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"})
    if (const long rank = env_number(name); rank >= 0) return static_cast<int>(rank);
  return 0;
}

std::unique_ptr<World> World::init(const WorldOptions& options) {
  std::unique_ptr<World> w(new World);
  w->log_ = std::make_unique<CollectiveLog>();
  if (!options.always_mpi && !launched_with_peers()) {
    w->hosts_ = {host_name()};
    w->comm_ = make_self("world", 0, w->log_.get());
    return w;
  }
  w->mpi_ = std::make_unique<MpiSession>(options.mpi, w->log_.get());
  w->take_ranks();
  const long expected = env_number("SLURM_STEP_NUM_TASKS");
  if (w->size_ == 1 && env_number("OMPI_COMM_WORLD_SIZE") < 0 && expected > 1) {
    w->mark_failed();
    fail(Exit::unavailable,
         "srun started {} processes that do not find each other. Fix: start them with srun --mpi=pmix",
         expected);
  }
  w->comm_ = w->mpi_->make_world();
  return w;
}

void World::take_ranks() {
  rank_ = mpi_->rank();
  size_ = mpi_->size();
  local_rank_ = mpi_->local_rank();
  local_size_ = mpi_->local_size();
  hosts_ = mpi_->hosts();
  launched_ = mpi_->launched();
  const std::vector<int>& first = mpi_->host_of();
  nodes_.assign(first.size(), 0);
  for (size_t r = 1; r < first.size(); ++r) nodes_[r] = nodes_[r - 1] + (first[r] != first[r - 1] ? 1 : 0);
}

void World::reorder(std::span<const int> order) {
  if (!mpi_) return;
  comm_.reset();
  mpi_->reorder(order);
  take_ranks();
  comm_ = mpi_->make_world();
}

void World::wrap(const std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>)>& wrapper) {
  comm_ = wrapper(std::move(comm_));
}

World::~World() {
  if (finalized_) return;
  if (std::uncaught_exceptions() > 0 && mpi_ && size_ > 1) abort(Exit::internal);
  try {
    finalize();
  } catch (const std::exception&) {  // already reported when the communicator was destroyed
  }
}

void World::mark_failed() {
  if (mpi_) mpi_->mark_failed();
}

void World::finalize() {
  if (finalized_) return;
  finalized_ = true;
  comm_.reset();
  if (mpi_) mpi_->finish();
  if (leaked_communicators() > 0)
    fail(Exit::internal, "{} communicators were destroyed with operations never waited for",
         leaked_communicators());
}

void World::abort(Exit code) {
  output::flush();
  if (mpi_) mpi_->abort(static_cast<int>(code));
  std::_Exit(static_cast<int>(code));
}

}  // namespace nrl::comm
