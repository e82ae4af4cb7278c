#pragma once
// Profiles as JSON: the aggregates that a rank sends to rank 0, and profile.json.

#include <string>

#include "apps/profile/profile.h"
#include "core/io/json.h"

namespace nrl::profile {

inline constexpr const char* profile_file = "profile.json";
inline constexpr int profile_version = 2;

/// The aggregates of one rank, complete.
JsonValue to_json(const RankProfile& rank);
/// Inverse of to_json(). Checks all names, kinds and ranges; fails with Exit::data and the position.
RankProfile rank_from(const JsonValue& json);

/// profile.json. Operations, groups, step times and the course of memory are written for at most 16 ranks:
/// all of a small run, else the first one, the one with most own work, and the one with most memory.
JsonValue to_json(const Profile& profile);
/// Inverse of to_json(), as strict as rank_from(); another version is refused with both numbers.
Profile profile_from(const JsonValue& json);

/// Reads profile.json at `path`: the file, its directory, or a log directory, whose last window is read.
/// Fails with Exit::no_input where there is none.
Profile load_profile(const std::string& path);
/// The same, or the steps of a file of `bench step --json`, of which a profile holds only the times, the
/// tokens and the planned memory.
Profile load_steps(const std::string& path);

}  // namespace nrl::profile
