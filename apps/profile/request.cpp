#include "apps/profile/request.h"

#include <filesystem>
#include <system_error>

#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::profile {

void write_request(const std::string& log_dir, int64_t steps) {
  NRL_CHECK(steps >= 1 && steps <= most_requested_steps);
  write_file_atomic(join_path(log_dir, request_file), JsonValue::object({{"steps", steps}}).dump() + "\n");
}

std::optional<int64_t> take_request(const std::string& log_dir) {
  const std::string path = join_path(log_dir, request_file);
  if (!path_exists(path)) return std::nullopt;
  constexpr uint64_t longest = 1024;
  std::optional<int64_t> steps;
  try {
    if (File::open_read(path).size() > longest) fail(Exit::data, "{}: no request", path);
    steps = read_json(path).get_int("steps");
    if (*steps < 1 || *steps > most_requested_steps)
      fail(Exit::data, "{}: steps is {}; expected 1 to {}", path, *steps, most_requested_steps);
  } catch (const Error&) {
    remove_request(log_dir);
    throw;
  }
  remove_request(log_dir);
  return steps;
}

void remove_request(const std::string& log_dir) {
  std::error_code ignored;
  std::filesystem::remove(join_path(log_dir, request_file), ignored);
}

}  // namespace nrl::profile
