#pragma once
// Places of flight files (parallel/comm/flight.h): in shared memory while a run lives, and after a failure in
// its log directory.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nrl::diagnosis {

/// Attempts of which the files are kept in the log directory.
inline constexpr int kept_attempts = 5;

/// /dev/shm/nrl-UID/RUN_ID, of this host.
std::string flight_directory(std::string_view run_id);
/// The same, created with mode 0700. Error(Exit::io) if it cannot be created, or is not this user's alone.
std::string make_flight_directory(std::string_view run_id);
/// "rank-3.attempt-2.flight"
std::string flight_name(int rank, int attempt);
/// Inverse of flight_name().
bool parse_flight_name(std::string_view name, int& rank, int& attempt);

/// LOG_DIR/flight/attempt-K.
std::string saved_flights(const std::string& log_dir, int attempt);

/// Moves the files of this host of one attempt to the log directory; those that exist there stay. Returns
/// their number. Errors of single files are left out: these stay where they are.
int save_flights(const std::string& log_dir, std::string_view run_id, int attempt);
/// At the start of attempt `now`: moves what earlier ones left in shared memory to the log directory, of
/// which the newest kept_attempts stay, and removes directories of other runs of this user that no living
/// process has and that are older than a day.
void collect_flights(const std::string& log_dir, std::string_view run_id, int now);
/// Removes the directory of the run if it is empty.
void leave_flights(std::string_view run_id);

}  // namespace nrl::diagnosis
