#include "apps/machine/profile.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "core/base/error.h"
#include "core/base/sample.h"
#include "core/io/atomic_file.h"

namespace nrl::machine {
namespace {

struct Fact {
  const char* name;
  std::function<void(DeviceModel&, double)> set;
};

const std::vector<Fact>& fact_table() {
  using M = DeviceModel;
  static const std::vector<Fact> table = {
      {"multiprocessors", [](M& m, double v) { m.multiprocessors = static_cast<int>(v); }},
      {"memory", [](M& m, double v) { m.memory = v; }},
      {"copy", [](M& m, double v) { m.copy = v; }},
      {"f32_flops", [](M& m, double v) { m.f32_flops = v; }},
      {"tf32_flops", [](M& m, double v) { m.tf32_flops = v; }},
      {"bf16_flops", [](M& m, double v) { m.bf16_sheet = v; }},
      {"gemm", [](M& m, double v) { m.gemm = v; }},
      {"attention_forward_64", [](M& m, double v) { m.forward.d64 = v; }},
      {"attention_forward_128", [](M& m, double v) { m.forward.d128 = v; }},
      {"attention_forward_256", [](M& m, double v) { m.forward.d256 = v; }},
      {"attention_backward_64", [](M& m, double v) { m.backward.d64 = v; }},
      {"attention_backward_128", [](M& m, double v) { m.backward.d128 = v; }},
      {"attention_backward_256", [](M& m, double v) { m.backward.d256 = v; }},
      {"node_bandwidth", [](M& m, double v) { m.node.bandwidth = v; }},
      {"node_latency", [](M& m, double v) { m.node.latency = v; }},
      {"host_bandwidth", [](M& m, double v) { m.host.bandwidth = v; }},
      {"host_latency", [](M& m, double v) { m.host.latency = v; }},
      {"host_update", [](M& m, double v) { m.host_update = v; }},
      {"node_ranks", [](M& m, double v) { m.node_ranks = static_cast<int>(v); }},
      {"network_bandwidth", [](M& m, double v) { m.network.bandwidth = v; }},
      {"network_latency", [](M& m, double v) { m.network.latency = v; }},
      {"power_limit", [](M& m, double v) { m.power_limit = v; }},
      {"idle_power", [](M& m, double v) { m.idle_power = v; }},
  };
  return table;
}

/// The members of a JSON object; finish() refuses those that nothing asked for.
class Fields {
 public:
  Fields(const JsonValue& of, std::string name) : of_(of), name_(std::move(name)) { of.members(); }

  const JsonValue* find(std::string_view key) {
    asked_.emplace_back(key);
    return of_.find(key);
  }
  const JsonValue& at(std::string_view key) {
    if (const JsonValue* v = find(key)) return *v;
    fail(Exit::data, "{}{}has no {}", of_.where(), prefix(), key);
  }
  double positive(std::string_view key) { return checked(at(key), key, false); }
  double not_negative(std::string_view key, double otherwise) {
    const JsonValue* v = find(key);
    return v ? checked(*v, key, true) : otherwise;
  }
  int64_t count(std::string_view key, int64_t least) {
    const JsonValue& v = at(key);
    const int64_t n = v.as_int();
    if (n < least)
      fail(Exit::data, "{}{}{} is {}; at least {} is possible", v.where(), prefix(), key, n, least);
    return n;
  }
  std::string text(std::string_view key) {
    const JsonValue* v = find(key);
    return v ? v->as_string() : "";
  }
  double checked(const JsonValue& v, std::string_view key, bool zero) const {
    const double x = v.as_double();
    if (!std::isfinite(x) || x < 0 || (x == 0 && !zero))
      fail(Exit::data, "{}{}{} is {}; a positive finite number is needed", v.where(), prefix(), key, x);
    return x;
  }
  void finish() const {
    for (const JsonMember& m : of_.members())
      if (std::find(asked_.begin(), asked_.end(), m.key) == asked_.end())
        fail(Exit::data, "{}{}unknown field '{}'", m.value.where(), prefix(), m.key);
  }

 private:
  std::string prefix() const { return name_.empty() ? "" : name_ + ": "; }

  const JsonValue& of_;
  std::string name_;
  std::vector<std::string> asked_;
};

constexpr std::string_view work_names[] = {"memory", "gemm", "attention"};

comm::Op parse_op(const JsonValue& v) {
  for (const comm::Op op : {comm::Op::all_reduce, comm::Op::all_gather, comm::Op::reduce_scatter,
                            comm::Op::all_to_all, comm::Op::all_to_all_v, comm::Op::broadcast, comm::Op::send,
                            comm::Op::recv, comm::Op::exchange, comm::Op::barrier})
    if (name_of(op) == v.as_string()) return op;
  fail(Exit::data, "{}unknown operation '{}'", v.where(), v.as_string());
}

DType parse_type(const JsonValue& v) {
  for (int i = 0; i <= static_cast<int>(DType::u8); ++i)
    if (name_of(static_cast<DType>(i)) == v.as_string()) return static_cast<DType>(i);
  fail(Exit::data, "{}unknown type '{}'", v.where(), v.as_string());
}

ops::Work parse_work(const JsonValue& v, std::string_view list) {
  const auto* const name = std::find(std::begin(work_names), std::end(work_names), v.as_string());
  if (name == std::end(work_names))
    fail(Exit::data, "{}{}: unknown work '{}'", v.where(), list, v.as_string());
  return static_cast<ops::Work>(name - std::begin(work_names));
}

void parse_device(const JsonValue& of, Profile& out) {
  Fields f(of, "device");
  const JsonValue& base = f.at("base");
  out.base = base.as_string();
  if (out.base != "cpu" && !has_device_model(out.base))
    fail(Exit::data, "{}device: unknown base '{}'; expected one of: cpu, {}", base.where(), out.base,
         device_model_names());
  for (const Fact& fact : fact_table())
    if (const JsonValue* v = f.find(fact.name)) out.facts[fact.name] = f.checked(*v, fact.name, false);
  f.finish();
}

MeasuredCall parse_call(const JsonValue& of) {
  Fields f(of, "calls");
  MeasuredCall c;
  c.key.op = f.at("op").as_string();
  if (const JsonValue* v = f.find("operands")) c.key.operands = parse_type(*v);
  if (const JsonValue* v = f.find("gemm")) {
    if (v->items().size() != 3) fail(Exit::data, "{}calls: gemm needs rows, columns, inner", v->where());
    for (size_t i = 0; i < 3; ++i)
      c.key.gemm[i] = static_cast<int64_t>(f.checked(v->items()[i], "gemm", false));
  }
  c.key.bytes = f.count("bytes", 0);
  c.key.head_dim = static_cast<int64_t>(f.not_negative("head_dim", 0));
  c.key.keys = static_cast<int64_t>(f.not_negative("keys", 0));
  for (const auto& [name, flag] : {std::pair("backward", &c.key.backward), std::pair("tf32", &c.key.tf32),
                                   std::pair("library", &c.library)})
    if (const JsonValue* v = f.find(name)) *flag = v->as_bool();
  c.flops = f.not_negative("flops", 0);
  c.work = parse_work(f.at("work"), "calls");
  c.seconds = f.positive("seconds");
  if (f.find("rounds")) c.rounds = static_cast<int>(f.count("rounds", 1));
  c.iqr = f.not_negative("iqr", 0);
  f.finish();
  return c;
}

MeasuredOperation parse_link(const JsonValue& of) {
  Fields f(of, "links");
  MeasuredOperation m;
  m.op = parse_op(f.at("op"));
  const JsonValue& ranks = f.at("ranks");
  m.ranks = static_cast<int>(f.count("ranks", 2));
  m.domains = static_cast<int>(f.count("nodes", 1));
  if (m.domains > m.ranks)
    fail(Exit::data, "{}links: {} ranks on {} nodes", ranks.where(), m.ranks, m.domains);
  m.bytes = f.not_negative("bytes", 0);
  m.seconds = f.positive("seconds");
  f.finish();
  return m;
}

MeasuredOverlap parse_overlap(const JsonValue& of) {
  Fields f(of, "overlap");
  MeasuredOverlap o;
  o.op = f.at("op").as_string();
  if (const JsonValue* v = f.find("work")) o.work = parse_work(*v, "overlap");
  o.comm = parse_op(f.at("comm"));
  f.at("slowdown");
  for (const auto& [name, factor] :
       {std::pair("slowdown", &o.slowdown), std::pair("comm_slowdown", &o.comm_slowdown)}) {
    const JsonValue* v = f.find(name);
    if (!v) continue;
    *factor = f.checked(*v, name, false);
    if (*factor < 0.5)
      fail(Exit::data, "{}overlap: {} is {}; it is the time together over the time alone", v->where(), name,
           *factor);
  }
  f.finish();
  return o;
}

double six_digits(double x) {
  return std::stod(fmt::format("{:.6g}", x));
}

JsonValue to_json(const CallKey& k) {
  JsonValue out = JsonValue::object({{"op", k.op}, {"operands", name_of(k.operands)}});
  if (k.gemm[0] > 0) out.set("gemm", JsonValue::array({k.gemm[0], k.gemm[1], k.gemm[2]}));
  out.set("bytes", k.bytes);
  if (k.head_dim > 0) out.set("head_dim", k.head_dim);
  if (k.keys > 0) out.set("keys", k.keys);
  if (k.backward) out.set("backward", true);
  if (k.tf32) out.set("tf32", true);
  return out;
}

}  // namespace

CallKey key_of(const ops::Call& call) {
  const ops::Cost& c = call.cost;
  return {.op = call.op,
          .operands = c.operands,
          .gemm = c.gemm,
          .bytes = std::llround(c.bytes() + c.scratch + c.epilogue),
          .head_dim = c.head_dim,
          .keys = std::llround(c.keys),
          .backward = c.backward,
          .tf32 = c.tf32};
}

ops::Cost cost_of(const CallKey& key, ops::Work work, double flops, bool library) {
  ops::Cost c;
  c.work = work;
  c.read = static_cast<double>(key.bytes);
  c.flops = flops;
  c.operands = key.operands;
  c.tf32 = key.tf32;
  c.gemm = key.gemm;
  c.head_dim = key.head_dim;
  c.keys = static_cast<double>(key.keys);
  c.backward = key.backward;
  c.library = library;
  return c;
}

std::string unsteady_clocks(const std::vector<double>& clocks) {
  constexpr double most = 0.15;
  if (clocks.empty()) return "";
  const double typical = median(clocks);
  for (const double c : clocks)
    if (std::abs(c - typical) > most * typical)
      return fmt::format(
          "{:.6g} is {:.0f} % away from the median {:.6g}: the device was not in a steady state. Fix: "
          "calibrate again",
          c, 100 * std::abs(c / typical - 1), typical);
  return "";
}

DeviceModel Profile::device(const DeviceModel& of) const {
  DeviceModel m = of;
  for (const Fact& fact : fact_table())
    if (const auto at = facts.find(fact.name); at != facts.end()) fact.set(m, at->second);
  m.busy_power = power_w;
  // Another power limit changes the clocks of arithmetic: power is proportional to f V^2, and V to f.
  if (of.power_limit > of.idle_power && m.power_limit != of.power_limit && !facts.contains("gemm")) {
    if (m.power_limit <= m.idle_power)
      fail(Exit::data, "device: power_limit {} is not above the idle power {}", m.power_limit, m.idle_power);
    const double factor = std::cbrt((m.power_limit - m.idle_power) / (of.power_limit - of.idle_power));
    m.gemm = std::min(m.gemm * factor, 1.0);
    for (AttentionRates* r : {&m.forward, &m.backward})
      for (double* rate : {&r->d64, &r->d128, &r->d256}) *rate = std::min(*rate * factor, 1.0);
  }
  return m;
}

Profile parse_profile(std::string_view text, std::string_view source) {
  const JsonValue json = parse_json(text, source);
  Profile p;
  Fields f(json, "");
  parse_device(f.at("device"), p);
  p.driver = f.text("driver");
  p.build = f.text("build");
  p.date = f.text("date");
  if (const JsonValue* v = f.find("clocks_mhz")) {
    for (const JsonValue& c : v->items()) p.clocks_mhz.push_back(f.checked(c, "clocks_mhz", false));
    if (const std::string problem = unsteady_clocks(p.clocks_mhz); !problem.empty())
      fail(Exit::data, "{}clocks_mhz: {}", v->where(), problem);
  }
  p.power_w = f.not_negative("power_w", 0);
  if (const JsonValue* v = f.find("calls"))
    for (const JsonValue& c : v->items()) p.calls.push_back(parse_call(c));
  if (const JsonValue* v = f.find("links"))
    for (const JsonValue& c : v->items()) p.links.push_back(parse_link(c));
  if (const JsonValue* v = f.find("overlap"))
    for (const JsonValue& c : v->items()) p.overlap.push_back(parse_overlap(c));
  if (const JsonValue* v = f.find("host_gap_s")) p.host_gap_s = f.checked(*v, "host_gap_s", true);
  if (const JsonValue* v = f.find("spread")) p.spread = f.checked(*v, "spread", true);
  f.finish();
  return p;
}

Profile read_profile(const std::string& path) {
  constexpr uint64_t most = uint64_t{64} << 20;
  return parse_profile(read_file(path, most), path);
}

std::string to_json(const Profile& p) {
  JsonValue device = JsonValue::object({{"base", p.base}});
  for (const Fact& fact : fact_table())
    if (const auto at = p.facts.find(fact.name); at != p.facts.end())
      device.set(fact.name, six_digits(at->second));
  JsonValue out = JsonValue::object({{"device", std::move(device)}});
  for (const auto& [name, text] :
       {std::pair("driver", p.driver), std::pair("build", p.build), std::pair("date", p.date)})
    if (!text.empty()) out.set(name, text);
  if (!p.clocks_mhz.empty()) out.set("clocks_mhz", p.clocks_mhz);
  if (p.power_w > 0) out.set("power_w", six_digits(p.power_w));
  const auto list = [&](const char* name, const auto& values, const auto& convert) {
    if (values.empty()) return;
    JsonValue::Array items;
    for (const auto& v : values) items.push_back(convert(v));
    out.set(name, std::move(items));
  };
  list("calls", p.calls, [](const MeasuredCall& c) {
    JsonValue v = to_json(c.key);
    v.set("work", work_names[static_cast<int>(c.work)]);
    if (c.flops > 0) v.set("flops", std::llround(c.flops));
    if (c.library) v.set("library", true);
    v.set("seconds", six_digits(c.seconds));
    v.set("rounds", c.rounds);
    v.set("iqr", six_digits(c.iqr));
    return v;
  });
  list("links", p.links, [](const MeasuredOperation& m) {
    return JsonValue::object({{"op", name_of(m.op)},
                              {"ranks", m.ranks},
                              {"nodes", m.domains},
                              {"bytes", std::llround(m.bytes)},
                              {"seconds", six_digits(m.seconds)}});
  });
  list("overlap", p.overlap, [](const MeasuredOverlap& o) {
    return JsonValue::object({{"op", o.op},
                              {"work", work_names[static_cast<int>(o.work)]},
                              {"comm", name_of(o.comm)},
                              {"slowdown", six_digits(o.slowdown)},
                              {"comm_slowdown", six_digits(o.comm_slowdown)}});
  });
  if (p.host_gap_s) out.set("host_gap_s", six_digits(*p.host_gap_s));
  if (p.spread) out.set("spread", six_digits(*p.spread));
  return out.dump(1, JsonValue::NonFinite::refuse) + "\n";
}

Profile merged(std::vector<Profile> profiles) {
  NRL_CHECK(!profiles.empty(), "no profile");
  std::stable_sort(profiles.begin(), profiles.end(),
                   [](const Profile& a, const Profile& b) { return a.date < b.date; });
  Profile out = profiles.front();
  std::map<CallKey, MeasuredCall> calls;
  std::map<std::tuple<comm::Op, int, int, double>, MeasuredOperation> links;
  std::map<std::pair<std::string, comm::Op>, MeasuredOverlap> overlap;
  for (const Profile& p : profiles) {
    if (p.base != out.base)
      fail(Exit::data, "profiles of different devices: {} and {}. Fix: merge profiles of one", out.base,
           p.base);
    for (const auto& [name, value] : p.facts) out.facts[name] = value;
    for (const auto& [to, from] :
         {std::pair(&out.driver, &p.driver), std::pair(&out.build, &p.build), std::pair(&out.date, &p.date)})
      if (!from->empty()) *to = *from;
    if (!p.clocks_mhz.empty()) out.clocks_mhz = p.clocks_mhz;
    if (p.power_w > 0) out.power_w = p.power_w;
    for (const MeasuredCall& c : p.calls) calls[c.key] = c;
    for (const MeasuredOperation& m : p.links) links[{m.op, m.ranks, m.domains, m.bytes}] = m;
    for (const MeasuredOverlap& o : p.overlap) overlap[{o.op, o.comm}] = o;
    if (p.host_gap_s) out.host_gap_s = p.host_gap_s;
    if (p.spread) out.spread = p.spread;
  }
  const auto values = [](const auto& map, auto& list) {
    list.clear();
    for (const auto& [key, value] : map) list.push_back(value);
  };
  values(calls, out.calls);
  values(links, out.links);
  values(overlap, out.overlap);
  return out;
}

}  // namespace nrl::machine
