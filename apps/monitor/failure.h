#pragma once
// failure.json: why the last attempt of a run ended, for people, supervisors and the next attempt. The file
// is there if and only if the last attempt failed.

#include <cstdint>
#include <optional>
#include <string>

#include "core/base/error.h"
#include "core/io/json.h"

namespace nrl::monitor {

inline constexpr const char* failure_file = "failure.json";
inline constexpr const char* failures_file = "failures.jsonl";  ///< of earlier attempts, a line each
/// Disk space that write_failure() takes, so that a failure is recorded on a full disk.
inline constexpr const char* failure_space_file = "failure.space";

struct Failure {
  std::string kind;  ///< kind_of(exit), or what a verdict found: "rank_killed", "rank_hung", ...
  int exit_code = 0;
  bool retryable = false;  ///< the same command again may succeed
  std::string text;        ///< the message that the terminal showed
  std::string run_id;
  int attempt = 0;
  std::optional<int> rank;  ///< to which it happened; unset: to all
  std::string host;
  int64_t pid = 0;
  std::string phase;                ///< of that rank
  int64_t step = 0, completed = 0;  ///< in progress, and the last one that all ranks have completed
  std::string checkpoint;           ///< the last one saved; empty: none
  double failed_at = 0;             ///< seconds since the epoch
};

/// The kind of an error with this code: "out_of_memory", "io", "diverged", "peer_lost", ...
std::string kind_of(Exit code);
/// True if the same command may succeed without any change: after lost ranks and errors of
/// hardware, files and memory; not after errors of the configuration or of the program.
bool is_retryable(Exit code);

JsonValue to_json(const Failure& failure);
/// Inverse. Error(Exit::data), naming `where`, for anything else.
Failure failure_from(const JsonValue& json, const std::string& where);

/// Reserves the space of a later failure.json. Error(Exit::io, Exit::cannot_create).
void reserve_failure_space(const std::string& log_dir);
/// Gives it back if no failure took it.
void release_failure_space(const std::string& log_dir);
/// Writes failure.json unless it exists: of several ranks the first one counts. Returns true if it was
/// written, without fsync. Error(Exit::io).
bool write_failure(const std::string& log_dir, const Failure& failure);
/// Brings failure.json to the disk. Error(Exit::no_input, Exit::io).
void sync_failure(const std::string& log_dir);
/// failure.json of a log directory, if there is one. Error(Exit::data) if it is malformed.
std::optional<Failure> read_failure(const std::string& log_dir);
/// Appends failure.json to failures.jsonl and removes it. A file that is no failure is removed only.
void put_failure_aside(const std::string& log_dir);

}  // namespace nrl::monitor
