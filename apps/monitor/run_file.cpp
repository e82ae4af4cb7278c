#include "apps/monitor/run_file.h"

#include <algorithm>
#include <filesystem>
#include <limits>

#include "core/base/error.h"
#include "core/io/atomic_file.h"

namespace nrl::monitor {
namespace {

constexpr size_t max_bytes = size_t{16} << 20;

JsonValue optional_json(const auto& value) {
  return value ? JsonValue(*value) : JsonValue();
}

// `number`: of the session, from 1.
RunSession session_from(const JsonValue& json, int64_t number) {
  RunSession s;
  const int64_t attempt = json.get_int("attempt", number);  // absent in files of earlier versions
  if (attempt < number || attempt > std::numeric_limits<int>::max())
    fail(Exit::data, "{}attempt {} of session {}", json.where(), attempt, number);
  s.attempt = static_cast<int>(attempt);
  s.start = json.get_double("start");
  s.first_step = json.get_int("first_step");
  if (const JsonValue& end = json.at("end"); !end.is_null()) {
    s.end = end.as_double();
    s.last_step = json.get_int("last_step");
    s.exit = static_cast<int>(json.get_int("exit"));
  }
  return s;
}

std::string name_from(const std::string& log_dir) {
  std::filesystem::path path = std::filesystem::absolute(log_dir).lexically_normal();
  while (path.has_relative_path() && (path.filename().empty() || path.filename() == "logs"))
    path = path.parent_path();
  return path.filename().empty() ? "nrl-train" : path.filename().string();
}

void write(const std::string& log_dir, const RunFile& run) {
  write_file_atomic(join_path(log_dir, run_file), to_json(run).dump(2) + "\n");
}

}  // namespace

JsonValue to_json(const RunFile& run) {
  JsonValue sessions = JsonValue::array({});
  for (const RunSession& s : run.sessions)
    sessions.push_back(JsonValue::object({{"attempt", s.attempt},
                                          {"start", s.start},
                                          {"end", optional_json(s.end)},
                                          {"first_step", s.first_step},
                                          {"last_step", optional_json(s.last_step)},
                                          {"exit", optional_json(s.exit)}}));
  return JsonValue::object({{"run_id", run.run_id},
                            {"name", run.name},
                            {"created", run.created},
                            {"sessions", std::move(sessions)}});
}

RunFile run_file_from(const JsonValue& json, const std::string& where) {
  constexpr const char* fix = "Fix: remove the file; the run then gets a new id";
  RunFile run;
  try {
    run.run_id = json.get_string("run_id");
    run.name = json.get_string("name");
    run.created = json.get_double("created");
    for (const JsonValue& s : json.at("sessions").items())
      run.sessions.push_back(session_from(s, run.attempt() + 1));
  } catch (const Error& e) {
    fail(Exit::data, "{}: not the file of a run: {}. {}", where, e.what(), fix);
  }
  if (!is_run_id(run.run_id))
    fail(Exit::data, "{}: run_id must be 1 to 64 lower-case letters and digits. {}", where, fix);
  if (run.sessions.empty()) fail(Exit::data, "{}: sessions is empty. {}", where, fix);
  return run;
}

RunFile read_run_file(const std::string& log_dir) {
  const std::string path = join_path(log_dir, run_file);
  if (!path_exists(path))
    fail(Exit::no_input,
         "{}: is not the log directory of a run: it has no {}. Fix: name logger.log_dir of the run", log_dir,
         run_file);
  JsonLimits limits;
  limits.text_bytes = max_bytes;
  return run_file_from(parse_json(read_file(path, max_bytes), path, limits), path);
}

RunFile begin_session(const std::string& log_dir, int64_t step, double now, const RunIdentity& supervised) {
  const std::string path = join_path(log_dir, run_file);
  RunFile run;
  std::string id = supervised.run_id;
  int attempt = 1;
  if (path_exists(path)) {
    run = read_run_file(log_dir);
    attempt = run.attempt() + 1;
    const bool killed = !run.last().end;
    if (step == 0 && !killed) {
      if (id == run.run_id) id.clear();
      run = {};
      attempt = 1;
    }
  }
  if (run.run_id.empty())
    run = {
        .run_id = id.empty() ? random_nonce().substr(0, 8) : id, .name = name_from(log_dir), .created = now};
  run.sessions.push_back(
      {.attempt = std::max(attempt, supervised.attempt), .start = now, .first_step = step});
  write(log_dir, run);
  return run;
}

void end_session(const std::string& log_dir, RunFile& run, int64_t step, double now, int exit_code) {
  RunSession& s = run.sessions.back();
  s.end = now;
  s.last_step = step;
  s.exit = exit_code;
  write(log_dir, run);
}

}  // namespace nrl::monitor
