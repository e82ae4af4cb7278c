#include "apps/launch/state.h"

#include <algorithm>
#include <limits>

#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "core/io/run_lock.h"

namespace nrl::launch {
namespace {

constexpr size_t max_bytes = size_t{1} << 20;

int count_from(const JsonValue& json, std::string_view key, int64_t least = 0) {
  const int64_t value = json.get_int(key);
  if (value < least || value > std::numeric_limits<int>::max())
    fail(Exit::data, "{}{} is {}", json.where(), key, value);
  return static_cast<int>(value);
}

std::vector<std::string> names_from(const JsonValue& json) {
  std::vector<std::string> names;
  for (const JsonValue& name : json.items()) names.push_back(name.as_string());
  return names;
}

JsonValue to_json(const Ended& e) {
  return JsonValue::object({{"attempt", e.attempt},
                            {"code", e.code},
                            {"kind", e.kind},
                            {"host", e.host},
                            {"rank", e.rank ? JsonValue(*e.rank) : JsonValue()},
                            {"step", e.step},
                            {"saved", e.saved},
                            {"progress", e.progress},
                            {"time", e.time}});
}

Ended ended_from(const JsonValue& json) {
  Ended e;
  e.attempt = count_from(json, "attempt", 1);
  e.code = count_from(json, "code");
  e.kind = json.get_string("kind");
  e.host = json.get_string("host");
  if (!json.at("rank").is_null()) e.rank = count_from(json, "rank");
  e.step = json.get_int("step");
  e.saved = json.get_int("saved");
  e.progress = json.get_bool("progress");
  e.time = json.get_double("time");
  return e;
}

}  // namespace

JsonValue to_json(const LaunchState& s) {
  JsonValue history = JsonValue::array();
  for (const Ended& e : s.history) history.push_back(to_json(e));
  return JsonValue::object({{"format", 1},
                            {"run_id", s.run_id},
                            {"attempt", s.attempt},
                            {"running", s.running},
                            {"done", s.done},
                            {"restarts", s.restarts},
                            {"hosts", s.hosts},
                            {"spares", s.spares},
                            {"retired", s.retired},
                            {"barred", s.barred},
                            {"history", std::move(history)}});
}

LaunchState state_from(const JsonValue& json, const std::string& where) {
  LaunchState s;
  try {
    if (const int64_t format = json.get_int("format"); format != 1)
      fail(Exit::data, "{}format {}; expected 1", json.where(), format);
    s.run_id = json.get_string("run_id");
    if (!is_run_id(s.run_id)) fail(Exit::data, "{}run_id is no name of a run", json.where());
    s.attempt = count_from(json, "attempt");
    s.running = json.get_bool("running");
    s.done = json.get_bool("done");
    s.restarts = count_from(json, "restarts");
    s.hosts = names_from(json.at("hosts"));
    s.spares = names_from(json.at("spares"));
    s.retired = names_from(json.at("retired"));
    // Earlier versions did not take retired hosts back.
    const JsonValue* barred = json.find("barred");
    s.barred = barred ? names_from(*barred) : s.retired;
    for (const JsonValue& e : json.at("history").items()) s.history.push_back(ended_from(e));
    if (s.history.size() > max_history) fail(Exit::data, "{}history has too many attempts", json.where());
  } catch (const Error& e) {
    fail(Exit::data, "{}: not the state of nrl-train launch: {}. Fix: remove the file", where, e.what());
  }
  return s;
}

std::optional<LaunchState> read_state(const std::string& log_dir) {
  const std::string path = join_path(log_dir, state_file);
  if (!path_exists(path)) return {};
  JsonLimits limits;
  limits.text_bytes = max_bytes;
  JsonValue json;
  try {
    json = parse_json(read_file(path, max_bytes, File::Links::refuse), path, limits);
  } catch (const Error& e) {
    fail(Exit::data, "{}. Fix: remove the file; restarts then count from 0", e.what());
  }
  return state_from(json, path);
}

void write_state(const std::string& log_dir, const LaunchState& state) {
  LaunchState kept = state;
  if (kept.history.size() > max_history)
    kept.history.erase(kept.history.begin(), kept.history.end() - static_cast<std::ptrdiff_t>(max_history));
  write_file_atomic(join_path(log_dir, state_file), to_json(kept).dump(2) + "\n");
}

}  // namespace nrl::launch
