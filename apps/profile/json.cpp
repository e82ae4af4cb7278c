#include "apps/profile/json.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <type_traits>

#include "apps/profile/summary.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"

namespace nrl::profile {
namespace {

constexpr size_t most_detailed = 16;  // ranks
constexpr const char* schema_name = "nrl-train-profile";

// The fields of a type, listed once for both directions: Writer and Reader are called with the name and the
// member of each.
template <class V, class S>
void describe(V& v, S& s, std::type_identity<Split>) {
  v("wall", s.wall);
  for (const auto& [name, part] : split_parts) v(name, s.*part);
}

template <class V, class O>
void describe(V& v, O& o, std::type_identity<Operation>) {
  v("name", o.name);
  v("part", o.part);
  v("calls", o.calls);
  v("seconds", o.seconds);
  v("shortest_s", o.shortest);
  v("longest_s", o.longest);
  v("flops", o.flops);
  v("bytes", o.bytes);
  v("attainable_s", o.attainable);
  v("arithmetic_s", o.arithmetic);
  v("bound", o.bound);
  v("written_bytes", o.written);
}

template <class V, class G>
void describe(V& v, G& g, std::type_identity<GroupTime>) {
  v("group", g.group);
  v("operation", g.operation);
  v("algorithm", g.algorithm);
  v("ranks", g.ranks);
  v("nodes", g.nodes);
  v("calls", g.calls);
  v("bytes", g.bytes);
  v("wire_bytes", g.wire_bytes);
  v("busy_s", g.busy);
  v("exposed_s", g.exposed);
  v("late_s", g.late);
  v("wire_s", g.wire);
  v("latency_s", g.latency);
  v("link", g.link);
}

template <class V, class A>
void describe(V& v, A& a, std::type_identity<Alive>) {
  v("name", a.name);
  v("category", a.category);
  v("bytes", a.bytes);
  v("from_s", a.from);
  v("to_s", a.to);
}

template <class V, class M>
void describe(V& v, M& m, std::type_identity<MemoryUse>) {
  v("arena_bytes", m.arena);
  v("peak_bytes", m.peak);
  v("mean_bytes", m.mean);
  v("peak_at_s", m.peak_at);
  v("curve", m.curve);
  v("at_peak", m.at_peak);
  v("buffers", m.buffers);
  v("intervals", m.intervals);
  v("interval_bytes", m.interval_bytes);
}

template <class V, class R>
void describe(V& v, R& r, std::type_identity<RankProfile>) {
  v("rank", r.rank);
  v("host", r.host);
  v("device", r.device);
  v("split", r.split);
  v("steps_s", r.step_s);
  v("operations", r.operations);
  v("layers", r.layers);
  v("groups", r.groups);
  v("memory", r.memory);
  v("cpu_s", r.cpu_seconds);
  v("starved_s", r.starved);
  v("read_s", r.read_seconds);
  v("involuntary_switches", r.involuntary_switches);
  v("migrations", r.migrations);
  v("resident_bytes", r.resident_bytes);
  v("cores", r.cores);
  v("arrived_last", r.arrived_last);
  v("caused_waiting_s", r.caused_waiting);
  v("clock_error_s", r.clock_error);
  v("dropped", r.dropped);
}

template <class V, class F>
void describe(V& v, F& f, std::type_identity<Finding>) {
  v("type", f.type);
  v("text", f.text);
  v("value", f.value);
  v("severity", f.severity);
  v("seconds", f.seconds);
  v("overrides", f.overrides);
  v("predicted_step_s", f.predicted_s);
  v("model_error", f.model_error);
  v("changes_numbers", f.changes_numbers);
}

template <class V, class F>
void describe(V& v, F& f, std::type_identity<RunFacts>) {
  v("version", f.version);
  v("command", f.command);
  v("started", f.started);
  v("world", f.world);
  v("nodes", f.nodes);
  v("threads", f.threads);
  v("stages", f.stages);
  v("first_step", f.first_step);
  v("last_step", f.last_step);
  v("tokens_per_step", f.tokens_per_step);
  v("flops_per_step", f.flops_per_step);
}

template <class V, class P>
void describe(V& v, P& p, std::type_identity<Profile>) {
  v("facts", p.facts);
  v("config", p.facts.config);
  v("split", p.split);
  v("operations", p.operations);
  v("layers", p.layers);
  v("ranks", p.ranks);
  v("bottlenecks", p.findings);
}

constexpr const char* bound_names[] = {"arithmetic", "memory", "launch"};
constexpr const char* severity_names[] = {"low", "medium", "high"};

template <class T>
JsonValue write(const T& value);

class Writer {
 public:
  template <class T>
  void operator()(const char* name, const T& value) {
    object_.set(name, write(value));
  }
  JsonValue take() { return JsonValue(std::move(object_)); }

 private:
  JsonObject object_;
};

template <class T>
JsonValue write_list(const std::vector<T>& values) {
  JsonValue list = JsonValue::array();
  for (const T& v : values) list.push_back(write(v));
  return list;
}

template <class T>
struct IsVector : std::false_type {};
template <class T>
struct IsVector<std::vector<T>> : std::true_type {};

using Curve = decltype(MemoryUse::curve);

template <class T>
JsonValue write(const T& value) {
  if constexpr (std::is_same_v<T, Bound>) {
    return bound_names[static_cast<int>(value)];
  } else if constexpr (std::is_same_v<T, Severity>) {
    return severity_names[static_cast<int>(value)];
  } else if constexpr (std::is_same_v<T, memory::Category>) {
    return memory::name_of(value);
  } else if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, std::string>) {
    return value;
  } else if constexpr (std::is_same_v<T, Curve>) {
    JsonValue list = JsonValue::array();
    for (const auto& [time, bytes] : value) {
      JsonValue point = JsonValue::array({time});
      for (const int64_t b : bytes) point.push_back(b);
      list.push_back(std::move(point));
    }
    return list;
  } else if constexpr (IsVector<T>::value) {
    return write_list(value);
  } else {
    Writer writer;
    describe(writer, value, std::type_identity<T>{});
    return writer.take();
  }
}

template <class T>
void read(const JsonValue& json, T& value);

class Reader {
 public:
  explicit Reader(const JsonValue& from) : from_(from) { (void)from.members(); }
  template <class T>
  void operator()(const char* name, T& value) {
    read(from_.at(name), value);
    known_.insert(name);
  }
  /// A member that is computed from others.
  void skip(const char* name) {
    (void)from_.at(name);
    known_.insert(name);
  }
  void finish() const {
    for (const JsonMember& m : from_.members())
      if (!known_.contains(m.key))
        fail(Exit::data, "{}\"{}\" is no member of a profile of version {}", m.value.where(), m.key,
             profile_version);
  }

 private:
  const JsonValue& from_;
  std::set<std::string, std::less<>> known_;
};

template <class E, size_t n>
void read_name(const JsonValue& json, E& value, const char* const (&names)[n]) {
  const auto at = std::find(std::begin(names), std::end(names), json.as_string());
  if (at == std::end(names)) fail(Exit::data, "{}'{}' is no known value", json.where(), json.as_string());
  value = static_cast<E>(at - std::begin(names));
}

template <class T>
void read(const JsonValue& json, T& value) {
  if constexpr (std::is_same_v<T, Bound>) {
    read_name(json, value, bound_names);
  } else if constexpr (std::is_same_v<T, Severity>) {
    read_name(json, value, severity_names);
  } else if constexpr (std::is_same_v<T, memory::Category>) {
    for (int c = 0; c < memory::category_count; ++c) {
      value = static_cast<memory::Category>(c);
      if (memory::name_of(value) == json.as_string()) return;
    }
    fail(Exit::data, "{}'{}' is no category of memory", json.where(), json.as_string());
  } else if constexpr (std::is_same_v<T, bool>) {
    value = json.as_bool();
  } else if constexpr (std::is_integral_v<T>) {
    const int64_t n = json.as_int();
    if (n < 0 || n > std::numeric_limits<T>::max()) fail(Exit::data, "{}{} is out of range", json.where(), n);
    value = static_cast<T>(n);
  } else if constexpr (std::is_floating_point_v<T>) {
    value = json.as_double();
    if (!std::isfinite(value)) fail(Exit::data, "{}a number is out of range", json.where());
  } else if constexpr (std::is_same_v<T, std::string>) {
    value = json.as_string();
  } else if constexpr (std::is_same_v<T, Curve>) {
    for (const JsonValue& point : json.items()) {
      const JsonValue::Array& numbers = point.items();
      auto& [time, bytes] = value.emplace_back();
      if (numbers.size() != bytes.size() + 1)
        fail(Exit::data, "{}a point of memory has {} numbers; expected {}", point.where(), numbers.size(),
             bytes.size() + 1);
      read(numbers[0], time);
      for (size_t c = 0; c < bytes.size(); ++c) read(numbers[c + 1], bytes[c]);
    }
  } else if constexpr (IsVector<T>::value) {
    for (const JsonValue& item : json.items()) read(item, value.emplace_back());
  } else {
    Reader reader(json);
    describe(reader, value, std::type_identity<T>{});
    reader.finish();
  }
}

constexpr const char* computed[] = {"steps_s", "memory", "communication", "summary"};

// The number at the end of "step-12"; -1: another name.
int64_t step_of(const std::string& name) {
  constexpr std::string_view prefix = "step-";
  if (!name.starts_with(prefix) || name.size() > prefix.size() + 18) return -1;
  int64_t step = 0;
  for (const char c : name.substr(prefix.size())) {
    if (c < '0' || c > '9') return -1;
    step = 10 * step + (c - '0');
  }
  return step;
}

// The file itself, of its directory, or of the last window of a log directory.
std::string find_profile(const std::string& path) {
  if (path_exists(path) && !is_directory(path)) return path;
  if (const std::string file = join_path(path, profile_file); path_exists(file)) return file;
  for (const std::string& directory : {path, join_path(path, "profile")}) {
    if (!is_directory(directory)) continue;
    int64_t last = -1;
    std::string found;
    for (const std::string& name : list_directory(directory)) {
      const std::string file = join_path(join_path(directory, name), profile_file);
      if (step_of(name) <= last || !path_exists(file)) continue;
      last = step_of(name);
      found = file;
    }
    if (last >= 0) return found;
  }
  fail(Exit::no_input, "{}: no {}. Fix: give LOG_DIR/profile/step-N", path, profile_file);
}

// Without the lists that grow with the model.
RankProfile brief(const RankProfile& full) {
  RankProfile r = full;
  r.step_s.clear();
  r.operations.clear();
  r.layers.clear();
  r.groups.clear();
  r.memory.curve.clear();
  r.memory.at_peak.clear();
  return r;
}

}  // namespace

JsonValue to_json(const RankProfile& rank) {
  return write(rank);
}

RankProfile rank_from(const JsonValue& json) {
  RankProfile rank;
  read(json, rank);
  return rank;
}

JsonValue to_json(const Profile& full) {
  Profile profile = full;
  if (full.ranks.size() > most_detailed) {
    const RankProfile &slow = slowest(full), &large = largest(full);
    for (size_t i = 1; i < full.ranks.size(); ++i)
      if (&full.ranks[i] != &slow && &full.ranks[i] != &large) profile.ranks[i] = brief(full.ranks[i]);
  }
  Writer writer;
  writer("schema", std::string(schema_name));
  writer("version", profile_version);
  describe(writer, profile, std::type_identity<Profile>{});
  JsonValue json = writer.take();
  json.set("steps_s", write(slowest(full).step_s));
  json.set("memory", memory_json(full));
  json.set("communication", write(slowest(full).groups));
  json.set("summary", summary_json(full));
  return json;
}

Profile profile_from(const JsonValue& json) {
  if (json.get_string("schema") != schema_name)
    fail(Exit::data, "{}schema is '{}'; expected {}. Fix: give a profile of nrl-train", json.where(),
         json.get_string("schema"), schema_name);
  if (json.get_int("version") != profile_version)
    fail(Exit::data,
         "{}the profile has version {}; this nrl-train reads version {}. Fix: read it with the version that "
         "wrote it, or profile again",
         json.where(), json.get_int("version"), profile_version);
  Profile profile;
  Reader reader(json);
  reader.skip("schema");
  reader.skip("version");
  describe(reader, profile, std::type_identity<Profile>{});
  for (const char* name : computed) reader.skip(name);
  reader.finish();
  if (profile.ranks.empty()) fail(Exit::data, "{}the profile has no ranks", json.where());
  return profile;
}

Profile load_profile(const std::string& path) {
  const std::string file = find_profile(path);
  return profile_from(read_json(file));
}

namespace {

Profile profile_of_bench(const JsonValue& json, const std::string& path) {
  if (json.get_string("bench") != "step")
    fail(Exit::data, "{}: results of bench {}; expected of bench step", path,
         clipped(json.get_string("bench")));
  RankProfile rank;
  rank.device = json.at("device").get_string("name");
  rank.memory.peak = json.get_int("planned_bytes");
  const JsonValue::Array& rows = json.at("rows").items();
  const int64_t timed = json.get_int("timed_steps");
  if (timed < 1 || timed > std::ssize(rows))
    fail(Exit::data, "{}: timed_steps is {}; expected 1 to {}, the number of rows", path, timed, rows.size());
  for (size_t i = rows.size() - static_cast<size_t>(timed); i < rows.size(); ++i) {
    const double seconds = rows[i].get_double("step_ms") * 1e-3;
    if (!std::isfinite(seconds) || seconds <= 0) fail(Exit::data, "{}: a step takes {} s", path, seconds);
    rank.step_s.push_back(seconds);
    rank.split.wall += seconds / static_cast<double>(timed);
  }
  rank.split.unattributed = rank.split.wall;
  Profile profile;
  profile.facts.version = json.get_string("program");
  profile.facts.tokens_per_step = json.get_int("tokens_per_step");
  if (profile.facts.tokens_per_step < 1) fail(Exit::data, "{}: tokens_per_step is below 1", path);
  profile.split = rank.split;
  profile.ranks = {std::move(rank)};
  return profile;
}

}  // namespace

Profile load_steps(const std::string& path) {
  if (!path_exists(path) || is_directory(path)) return load_profile(path);
  const JsonValue json = read_json(path);
  return json.contains("bench") ? profile_of_bench(json, path) : profile_from(json);
}

}  // namespace nrl::profile
