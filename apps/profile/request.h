#pragma once
// Asks a running job to record a window of steps: a file in its log directory, which rank 0 looks for.

#include <cstdint>
#include <optional>
#include <string>

namespace nrl::profile {

inline constexpr const char* request_file = "profile-request.json";
inline constexpr int64_t requested_steps = 3;  ///< of a request without a number
inline constexpr int64_t most_requested_steps = 10'000;

/// `steps`: from 1 to most_requested_steps.
void write_request(const std::string& log_dir, int64_t steps);
/// The steps that are asked for, after which there is no request; unset: none. Throws Error (`data`) for a
/// file that is no request, which is removed too.
std::optional<int64_t> take_request(const std::string& log_dir);
/// Removes a request that was not taken.
void remove_request(const std::string& log_dir);

}  // namespace nrl::profile
