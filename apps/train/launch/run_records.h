#pragma once
// Records that a run leaves for a diagnosis if it fails: failure.json and the flight files of its ranks.

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "apps/monitor/failure.h"
#include "parallel/comm/flight.h"
#include "parallel/comm/world/world.h"

namespace nrl::train {

class RunRecords {
 public:
  /// Collective: agrees on the identity of the run, which rank 0 names, opens the flight file of this rank
  /// and arms NRL_FAULTS, and rank 0 reserves the space of failure.json. A host without room for flight files
  /// is a warning. `world` must outlive the object; one object at a time.
  RunRecords(comm::World& world, std::string log_dir, const std::string& run_id, int attempt);
  RunRecords(const RunRecords&) = delete;
  RunRecords& operator=(const RunRecords&) = delete;
  /// Removes the flight file and the space of failure.json, unless the run has failed.
  ~RunRecords();

  /// Runs the steps of the run. Records an exception of it, which goes on, and an exit code that is a
  /// failure.
  Exit keep(const std::function<Exit()>& run);

  /// For the record of a later failure. Thread-safe.
  void saved(const std::string& checkpoint);
  /// Writes failure.json, unless another rank has, and moves the flight files of this host to the log
  /// directory. Errors are left out: the process ends anyway. Thread-safe; only the first call counts.
  void failed(monitor::Failure failure);
  /// Moves the flight files of this host, as failed() does: another rank has the failure.
  void keep_flights();
  /// Keeps the threads of this process with their stacks, which stops them for good: the process must end
  /// without them. Another process, of this rank number: without stacks. Errors are left out.
  void keep_stacks(int rank, int64_t pid) const;
  /// The failure of this rank with this error.
  monitor::Failure describe(Exit code, const std::string& text) const;

  /// The object that exists, if any.
  static RunRecords* current();

 private:
  void save_flights() const;

  comm::World& world_;
  std::string log_dir_, run_id_;
  int attempt_ = 0;
  std::unique_ptr<comm::FlightFile> flight_;
  mutable std::mutex mutex_;
  std::string checkpoint_;
  bool failed_ = false;
};

}  // namespace nrl::train
