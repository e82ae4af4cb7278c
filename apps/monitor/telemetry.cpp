#include "apps/monitor/telemetry.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/threads.h"
#include "core/device/cuda/nvml.h"

namespace nrl::monitor {
namespace {

constexpr int most_ranks = 1 << 20;

JsonValue values_json(const Values& values) {
  JsonValue json = JsonValue::object();
  for (const auto& [name, value] : values) json.set(name, value);
  return json;
}

// Numbers that are not finite were written as null: absent.
Values values_from(const JsonValue& json) {
  Values values;
  for (const JsonMember& member : json.members())
    if (!member.value.is_null()) values.emplace_back(member.key, member.value.as_double());
  return values;
}

JsonValue node_json(const NodeSample& node) {
  return JsonValue::object(
      {{"host", node.host}, {"values", values_json(node.values)}, {"notes", node.notes}});
}

NodeSample node_from(const JsonValue& json) {
  NodeSample node{.host = json.get_string("host"), .values = values_from(json.at("values")), .notes = {}};
  for (const JsonValue& note : json.at("notes").items()) node.notes.push_back(note.as_string());
  return node;
}

JsonValue rank_json(const RankSample& rank) {
  return JsonValue::object({{"rank", rank.rank},
                            {"node", rank.node},
                            {"own_ms", rank.own_ms},
                            {"waiting_ms", rank.waiting_ms},
                            {"score", rank.score},
                            {"values", values_json(rank.values)}});
}

int small_int(const JsonValue& json, std::string_view key) {
  const int64_t value = json.get_int(key);
  if (value < 0 || value >= most_ranks)
    fail(Exit::data, "{}{} is {}; expected 0 to {}", json.where(), key, value, most_ranks - 1);
  return static_cast<int>(value);
}

RankSample rank_from(const JsonValue& json) {
  return {.rank = small_int(json, "rank"),
          .node = small_int(json, "node"),
          .own_ms = json.get_double("own_ms", 0),
          .waiting_ms = json.get_double("waiting_ms", 0),
          .score = json.get_double("score", 1),
          .values = values_from(json.at("values"))};
}

void add_flat(Values& out, const std::string& prefix, const Values& values) {
  constexpr std::string_view bytes = "_bytes";
  for (const auto& [name, value] : values) {
    if (name.ends_with(bytes)) {
      out.emplace_back(prefix + name.substr(0, name.size() - bytes.size()) + "_gb", value * 1e-9);
    } else {
      out.emplace_back(prefix + name, value);
    }
  }
}

// The power limit alone is no fault: a GPU at full load reaches it.
bool is_fault(std::string_view reason) {
  return reason.starts_with("temperature") || reason == "a slowdown by the hardware" ||
         reason == "the power brake";
}

void add_gpu(NodeSample& node, size_t number, const cuda::DeviceState& s) {
  const std::string prefix = fmt::format("gpu.{}.", number);
  const auto add = [&](const char* name, const auto& value) {
    if (value) node.values.emplace_back(prefix + name, static_cast<double>(*value));
  };
  add("util", s.utilization);
  add("mem_bytes", s.memory_used);
  add("mem_total_bytes", s.memory);
  add("power_watts", s.power);
  add("clock_mhz", s.clock);
  add("memory_clock_mhz", s.memory_clock);
  add("temperature_celsius", s.temperature);
  add("energy_joules", s.energy);
  add("ecc_errors", s.ecc_errors);
  std::string faults;
  for (const std::string& reason : s.throttled)
    if (is_fault(reason)) faults += (faults.empty() ? "" : ", ") + reason;
  if (s.clock) node.values.emplace_back(prefix + "throttled", faults.empty() ? 0 : 1);
  if (!faults.empty())
    node.notes.push_back(fmt::format("gpu {}: clock {}{} MHz: {}", number, s.clock.value_or(0),
                                     s.clock_limit ? fmt::format(" of {}", *s.clock_limit) : "", faults));
}

}  // namespace

JsonValue to_json(const Telemetry& t) {
  JsonValue nodes = JsonValue::array(), ranks = JsonValue::array();
  for (const NodeSample& node : t.nodes) nodes.push_back(node_json(node));
  for (const RankSample& rank : t.ranks) ranks.push_back(rank_json(rank));
  return JsonValue::object({{"step", t.step}, {"time", t.time}, {"nodes", nodes}, {"ranks", ranks}});
}

Telemetry telemetry_from(const JsonValue& json) {
  Telemetry t{.step = json.get_int("step"), .time = json.get_double("time"), .nodes = {}, .ranks = {}};
  for (const JsonValue& node : json.at("nodes").items()) t.nodes.push_back(node_from(node));
  for (const JsonValue& rank : json.at("ranks").items()) t.ranks.push_back(rank_from(rank));
  return t;
}

Values flat(const Telemetry& t) {
  Values out;
  for (size_t i = 0; i < t.nodes.size(); ++i) add_flat(out, fmt::format("node.{}.", i), t.nodes[i].values);
  for (const RankSample& rank : t.ranks) {
    const std::string prefix = fmt::format("rank.{}.", rank.rank);
    out.emplace_back(prefix + "own_ms", rank.own_ms);
    out.emplace_back(prefix + "waiting_ms", rank.waiting_ms);
    out.emplace_back(prefix + "score", rank.score);
    add_flat(out, prefix, rank.values);
  }
  return out;
}

std::string contribution(const RankSample& rank, const NodeSample* node) {
  JsonValue json = rank_json(rank);
  if (node) json.set("sample", node_json(*node));
  return json.dump();
}

Telemetry joined_telemetry(int64_t step, double time, std::span<const std::string> contributions) {
  Telemetry t{.step = step, .time = time, .nodes = {}, .ranks = {}};
  double least = 0;
  for (const std::string& text : contributions) {
    const JsonValue json = parse_json(text, "the telemetry of a rank");
    t.ranks.push_back(rank_from(json));
    if (const JsonValue* node = json.find("sample")) t.nodes.push_back(node_from(*node));
    const double own = t.ranks.back().own_ms;
    if (own > 0 && (least == 0 || own < least)) least = own;
  }
  for (RankSample& rank : t.ranks) rank.score = rank.own_ms > 0 ? least / rank.own_ms : 1;
  return t;
}

struct NodeSampler::State {
  explicit State(Options o) : options(std::move(o)), host(options.directory, options.root) {}

  NodeSample sample() {
    NodeSample node{.host = options.host, .values = host.node(steady_seconds()), .notes = {}};
    for (size_t i = 0; i < options.gpus.size(); ++i)
      if (const auto gpu = nvml ? nvml->state(options.gpus[i]) : std::nullopt) add_gpu(node, i, *gpu);
    return node;
  }

  void run() {
    if (!options.gpus.empty()) nvml = cuda::open_nvml(options.nvml.c_str());
    const std::chrono::duration<double> interval(options.interval);
    std::unique_lock lock(mutex);
    while (!stop) {
      lock.unlock();
      NodeSample node = sample();
      lock.lock();
      latest = std::move(node);
      changed.wait_for(lock, interval, [&] { return stop; });
    }
    lock.unlock();
    nvml.reset();
    lock.lock();
    ended = true;
    changed.notify_all();
  }

  const Options options;
  HostStats host;                    // of the thread
  std::unique_ptr<cuda::Nvml> nvml;  // of the thread
  std::thread thread;
  std::mutex mutex;
  std::condition_variable changed;
  NodeSample latest;
  bool stop = false, ended = false;
};

NodeSampler::NodeSampler(Options options) : state_(std::make_shared<State>(std::move(options))) {
  state_->latest.host = state_->options.host;
  const BlockedSignals blocked;
  state_->thread = start_thread([state = state_] { state->run(); });
}

NodeSampler::~NodeSampler() {
  std::unique_lock lock(state_->mutex);
  state_->stop = true;
  state_->changed.notify_all();
  const bool ended = state_->changed.wait_for(lock, std::chrono::seconds(1), [&] { return state_->ended; });
  lock.unlock();
  if (ended) {
    state_->thread.join();
  } else {
    state_->thread.detach();
  }
}

NodeSample NodeSampler::latest() const {
  const std::lock_guard lock(state_->mutex);
  return state_->latest;
}

}  // namespace nrl::monitor
