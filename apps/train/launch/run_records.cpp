#include "apps/train/launch/run_records.h"

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <utility>

#include <unistd.h>

#include "apps/diagnosis/flight_files.h"
#include "apps/diagnosis/stacks.h"
#include "apps/diagnosis/stale_segments.h"
#include "apps/monitor/timers.h"
#include "apps/train/launch/agreed.h"
#include "apps/train/launch/faults.h"
#include "core/base/fatal_signals.h"
#include "core/base/log.h"
#include "core/base/process.h"
#include "core/base/status.h"
#include "core/base/threads.h"

namespace nrl::train {
namespace {

std::atomic<RunRecords*> the_records{nullptr};

}  // namespace

RunRecords* RunRecords::current() {
  return the_records.load();
}

RunRecords::RunRecords(comm::World& world, std::string log_dir, const std::string& run_id, int attempt)
    : world_(world), log_dir_(std::move(log_dir)) {
  std::string identity = fmt::format("{} {}", run_id, attempt);
  world.comm().broadcast_text(identity, 0);
  const size_t space = identity.find(' ');
  run_id_ = identity.substr(0, space);
  attempt_ = std::atoi(identity.c_str() + space + 1);
  const int node = world.nodes()[world.rank()];
  const std::vector<fault::Fault> faults = fault::requested();
  fault::arm(faults, world.rank(), node, attempt_);
  if (world.rank() == 0)
    for (const fault::Fault& f : faults) log::warn("NRL_FAULTS: this run will have {}", fault::describe(f));
  if (world.local_rank() == 0) {
    diagnosis::collect_flights(log_dir_, run_id_, attempt_);
    diagnosis::remove_stale_segments();
  }
  if (world.rank() == 0) try {
      monitor::reserve_failure_space(log_dir_);
    } catch (const Error& e) {
      log::warn("a failure on a full disk would not be recorded: {}", e.what());
    }
  comm::FlightIdentity self = comm::this_process();
  self.run_id = run_id_;
  self.attempt = attempt_;
  self.rank = world.rank();
  self.ranks = world.size();
  self.node = node;
  try {
    flight_ = std::make_unique<comm::FlightFile>(
        join_path(diagnosis::make_flight_directory(run_id_), diagnosis::flight_name(self.rank, attempt_)),
        self, world.collective_log());
  } catch (const Error& e) {
    if (world.local_rank() == 0)
      log::warn("the latest communication is not recorded for nrl-train diagnose: {}", e.what());
  }
  if (flight_) fatal_signals::install();
  the_records = this;
}

RunRecords::~RunRecords() {
  the_records = nullptr;
  if (!failed_ && world_.rank() == 0) monitor::release_failure_space(log_dir_);
  if (!flight_) return;
  if (!failed_) flight_->remove();
  flight_.reset();
  diagnosis::leave_flights(run_id_);
}

Exit RunRecords::keep(const std::function<Exit()>& run) {
  try {
    const Exit code = run();
    // All ranks leave with it.
    if (code != Exit::ok && code != Exit::stopped && world_.rank() == 0) {
      monitor::Failure failure =
          describe(code, fmt::format("the run ended with exit code {}", static_cast<int>(code)));
      failure.rank.reset();
      failed(std::move(failure));
    }
    return code;
  } catch (const AgreedExit& agreed) {
    if (world_.rank() == 0) {
      monitor::Failure failure = describe(agreed.code, agreed.text);
      failure.rank = agreed.rank;
      if (agreed.rank && agreed.rank != 0) {
        failure.host = world_.hosts()[static_cast<size_t>(*agreed.rank)];
        failure.pid = 0;
      }
      failed(std::move(failure));
    }
    throw;
  } catch (const std::exception& e) {
    const Error error = error_from(e);
    failed(describe(error.code(), error.what()));
    throw;
  }
}

void RunRecords::saved(const std::string& checkpoint) {
  const std::lock_guard lock(mutex_);
  checkpoint_ = checkpoint;
}

monitor::Failure RunRecords::describe(Exit code, const std::string& text) const {
  const status::Page& page = status::page();
  const std::lock_guard lock(mutex_);
  return {.kind = monitor::kind_of(code),
          .exit_code = static_cast<int>(code),
          .retryable = monitor::is_retryable(code),
          .text = text,
          .run_id = run_id_,
          .attempt = attempt_,
          .rank = world_.rank(),
          .host = host_name(),
          .pid = ::getpid(),
          .phase = std::string(status::name_of(page.phase.load())),
          .step = page.step.load(),
          .completed = page.completed.load(),
          .checkpoint = checkpoint_,
          .failed_at = monitor::wall_seconds()};
}

void RunRecords::keep_flights() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(failed_, true)) return;
  }
  if (world_.local_rank() == 0) save_flights();
}

void RunRecords::failed(monitor::Failure failure) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(failed_, true)) return;
  }
  bool written = false;
  try {
    written = monitor::write_failure(log_dir_, failure);
  } catch (const Error& e) {
    log::warn("{}", e.what());
  }
  save_flights();
  // Last: the launcher may kill this process before a slow disk has answered.
  if (written) try {
      monitor::sync_failure(log_dir_);
    } catch (const Error& e) {
      log::warn("{}", e.what());
    }
}

void RunRecords::keep_stacks(int rank, int64_t pid) const {
  try {
    const std::string directory = diagnosis::saved_flights(log_dir_, attempt_);
    make_directories(directory);
    diagnosis::save_stacks(join_path(directory, diagnosis::stacks_name(rank, attempt_)), rank, attempt_, pid);
  } catch (const Error&) {
  }
}

void RunRecords::save_flights() const {
  diagnosis::save_flights(log_dir_, run_id_, attempt_);
  diagnosis::leave_flights(run_id_);
}

}  // namespace nrl::train
