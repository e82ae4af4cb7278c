#pragma once
// The flight file of a rank: its status page and the log of its latest communication, in memory that outlives
// the process, even one that is killed. Written in place, without system calls.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "parallel/comm/collective_log.h"

namespace nrl::comm {

/// The process that a flight file is of.
struct FlightIdentity {
  std::string run_id;  ///< of run.json
  int attempt = 0;     ///< session of the run, from 1
  int rank = 0, ranks = 1, node = 0;
  std::string host;     ///< at most 63 bytes are kept
  std::string boot_id;  ///< of the kernel: a pid means something on this boot only
  int64_t pid = 0, start_ticks = 0;
};

/// Identity of this process, but for run, attempt and ranks.
FlightIdentity this_process();

/// Owns the mapping, not the file, which stays when the process dies.
class FlightFile {
 public:
  /// Creates the file (mode 0600; one with this name is replaced) with its memory reserved, and continues
  /// status page and log in it. Error(Exit::io) if the system refuses: the caller goes on without.
  /// `log` must outlive the file.
  FlightFile(std::string path, const FlightIdentity& identity, CollectiveLog& log);
  FlightFile(const FlightFile&) = delete;
  FlightFile& operator=(const FlightFile&) = delete;
  /// Continues page and log in the memory of the process. The file stays mapped until the process ends:
  /// threads that work may still write to the page, as those that read data ahead do at the end of a run.
  ~FlightFile();

  const std::string& path() const { return path_; }
  /// Removes the file: the process ends as it should.
  void remove();

 private:
  std::string path_;
  CollectiveLog& log_;
  void* memory_ = nullptr;
};

/// A flight file as it was read. The entries of a live process may be incomplete.
struct Flight {
  FlightIdentity identity;
  double created = 0;      ///< seconds since the epoch
  int64_t created_ns = 0;  ///< the same instant on the steady clock
  uint64_t progress = 0;
  int64_t step = 0, completed = 0, phase_since_ns = 0, wait_since_ns = 0;
  uint64_t wait_id = 0;
  status::Phase phase = status::Phase::starting;
  int microbatch = -1, layer = -1;
  bool backward = false;  ///< the pass through that layer
  int signal = 0;         ///< that ended the process, if it was a fatal one; with status::Page's fields:
  bool signal_sent = false;
  uint64_t signal_at = 0;
  std::vector<LogGroup> groups;
  std::vector<LogEntry> entries;  ///< by id; every one names a group of the list
};

/// Largest file that is read.
inline constexpr uint64_t most_flight_bytes = uint64_t{4} << 20;

/// Reads a file that may come from anywhere. Error(Exit::data), naming the file, for anything else than a
/// flight file of this version; Exit::no_input where it cannot be read.
Flight read_flight(const std::string& path);

}  // namespace nrl::comm
