#include "apps/machine/profile.h"

#include "apps/machine/call_time.h"
#include "core/base/error.h"
#include "tests/catch.h"

using namespace nrl;
using machine::CallTimes;
using machine::DeviceModel;
using machine::Profile;

namespace {

const DeviceModel& h100() {
  return machine::find_device_model("--device", "h100");
}

ops::Call gemm(int64_t m, int64_t n, int64_t k, const char* op = "linear_forward") {
  ops::Cost c;
  c.work = ops::Work::gemm;
  c.operands = DType::bf16;
  c.gemm = {m, n, k};
  c.flops = 2.0 * static_cast<double>(m * n * k);
  c.read = static_cast<double>(2 * (m * k + n * k));
  c.written = static_cast<double>(2 * m * n);
  return {.op = op, .cost = c};
}
ops::Call copy(double bytes, const char* op = "add") {
  ops::Cost c;
  c.read = c.written = bytes / 2;
  return {.op = op, .cost = c};
}
double modeled(const ops::Call& call) {
  return machine::estimate(h100(), call, machine::likely).seconds();
}
machine::MeasuredCall measured(const ops::Call& call, double seconds) {
  return {.key = machine::key_of(call),
          .work = call.cost.work,
          .flops = call.cost.flops,
          .library = false,
          .seconds = seconds,
          .rounds = 5,
          .iqr = 0};
}
Profile with_calls() {
  Profile p;
  p.base = "h100";
  p.date = "2026-11-28T05:00:00Z";
  p.calls = {measured(gemm(4096, 4096, 4096), 0.25e-3), measured(copy(1e8), 1e-4)};
  p.links = {{comm::Op::all_reduce, 8, 1, 1 << 20, 5e-5}};
  p.overlap = {{"linear_forward", ops::Work::attention, comm::Op::all_gather, 1.125, 1.0625}};
  p.clocks_mhz = {1700, 1755, 1750};
  p.facts = {{"memory", 64e9}, {"power_limit", 500}};
  p.host_gap_s = 3e-6;
  p.spread = 0.015;
  return p;
}

std::string refusal(const std::string& text) {
  try {
    (void)machine::parse_profile(text, "p.json");
  } catch (const Error& e) {
    CHECK(e.code() == Exit::data);
    return e.what();
  }
  return "accepted";
}

}  // namespace

TEST_CASE("a profile survives its file", "[machine]") {
  const Profile p = with_calls();
  const std::string text = machine::to_json(p);
  CHECK(machine::parse_profile(text, "p.json") == p);
  CHECK(machine::to_json(machine::parse_profile(text, "p.json")) == text);
  Profile fine = p;
  fine.calls[0].seconds = 0.123456789;
  CHECK(machine::parse_profile(machine::to_json(fine), "p.json").calls[0].seconds == 0.123457);
}

TEST_CASE("measured calls replace the model, and correct it for others of their kind", "[machine]") {
  const Profile p = with_calls();
  const CallTimes assumed(h100(), nullptr), times(h100(), &p);
  const ops::Call same = gemm(4096, 4096, 4096), other = gemm(8192, 4096, 2048);
  CHECK(assumed.of(same).value == modeled(same));
  CHECK(assumed.of(same).source == machine::Source::assumed);
  CHECK(times.of(same).value == 0.25e-3);
  CHECK(times.of(same).source == machine::Source::profile);
  const double ratio = 0.25e-3 / modeled(same);
  CHECK(times.of(other).value == Approx(ratio * modeled(other)));
  // An op of its own has its own ratio, which others of the same work and type share if they have none.
  CHECK(times.of(gemm(8192, 4096, 2048, "linear_backward_data")).value == Approx(ratio * modeled(other)));
  CHECK(times.of(copy(4e8)).value == Approx(4e-4));
  ops::Call f32 = other;
  f32.cost.operands = DType::f32;
  CHECK(times.of(f32).value == modeled(f32));
  CHECK(times.gaps(f32) == 3e-6);
}

TEST_CASE("of several measured calls the median of the four nearest counts", "[machine]") {
  Profile p;
  p.base = "h100";
  const int64_t sizes[] = {1024, 2048, 4096, 8192, 16384, 32768};
  const double ratios[] = {9, 1.5, 1.1, 1.2, 1.3, 9};
  for (int i = 0; i < 6; ++i)
    p.calls.push_back(measured(gemm(sizes[i], 4096, 4096), ratios[i] * modeled(gemm(sizes[i], 4096, 4096))));
  const ops::Call between = gemm(5700, 4096, 4096);
  CHECK(CallTimes(h100(), &p).of(between).value == Approx(1.25 * modeled(between)));
}

TEST_CASE("halving the times of GEMMs changes sums by the GEMMs' share", "[machine]") {
  Profile p = with_calls();
  const std::vector<ops::Call> step{gemm(4096, 4096, 4096), copy(1e8), gemm(4096, 4096, 4096)};
  const auto sum = [&] {
    const CallTimes times(h100(), &p);
    double s = 0;
    for (const ops::Call& c : step) s += times.of(c).value;
    return s;
  };
  const double before = sum();
  p.calls[0].seconds /= 2;
  CHECK(before - sum() == Approx(0.25e-3));
}

TEST_CASE("a profile changes the facts of its base", "[machine]") {
  Profile p;
  p.base = "h100";
  p.facts = {{"memory", 64e9}, {"bf16_flops", 500e12}, {"node_ranks", 4}, {"copy", 2e12}};
  const DeviceModel m = p.device(h100());
  CHECK(m.memory == 64e9);
  CHECK(m.bf16_flops() == 500e12);
  CHECK(m.node_ranks == 4);
  CHECK(m.copy == 2e12);
  CHECK(m.gemm == h100().gemm);
  p.facts = {{"power_limit", 500}};
  const double factor = std::cbrt((500.0 - 105) / (700 - 105));
  CHECK(p.device(h100()).gemm == Approx(factor * h100().gemm));
  CHECK(p.device(h100()).forward.d128 == Approx(factor * h100().forward.d128));
  CHECK(p.device(h100()).copy == h100().copy);
}

TEST_CASE("the newest of several profiles counts", "[machine]") {
  Profile old = with_calls(), young;
  young.base = "h100";
  young.date = "2026-12-01T00:00:00Z";
  young.calls = {measured(copy(1e8), 2e-4), measured(copy(2e8), 4e-4)};
  young.spread = 0.02;
  const Profile both = machine::merged({young, old});
  CHECK(both.calls.size() == 3);
  CHECK(both.spread == 0.02);
  CHECK(both.host_gap_s == 3e-6);
  CHECK(both.date == young.date);
  CHECK(CallTimes(h100(), &both).of(copy(1e8)).value == 2e-4);
  young.base = "h200";
  CHECK_THROWS_WITH(machine::merged({old, young}), ContainsSubstring("different devices: h100 and h200"));
}

TEST_CASE("profiles are refused by the name of the field", "[machine]") {
  const std::string device = R"("device": {"base": "h100"})";
  const auto call = [&](const std::string& fields) {
    return refusal("{" + device + R"(, "calls": [{"op": "add", "work": "memory", "bytes": 8)" + fields +
                   "}]}");
  };
  CHECK(refusal("{" + device + "}") == "accepted");
  CHECK(refusal("{}") == "p.json:1:1: has no device");
  CHECK(refusal(R"({"device": {}})") == "p.json:1:12: device: has no base");
  CHECK(refusal(R"({"device": {"base": "v100"}})")
            .starts_with("p.json:1:21: device: unknown base 'v100'; expected "));
  CHECK_THAT(refusal(R"({"device": {"base": "h100", "speed": 1}})"),
             ContainsSubstring("device: unknown field 'speed'"));
  CHECK_THAT(refusal("{" + device + R"(, "clock": 1})"), ContainsSubstring("unknown field 'clock'"));
  CHECK_THAT(refusal("{" + device + ",\n \"clocks_mhz\": [1700, 1710, 1400]}"),
             ContainsSubstring("p.json:2:16: clocks_mhz: 1400 is 18 % away from the median 1700"));
  CHECK(call(R"(, "seconds": 1e-5)") == "accepted");
  CHECK_THAT(call(""), ContainsSubstring("calls: has no seconds"));
  CHECK_THAT(call(R"(, "seconds": -1)"), ContainsSubstring("calls: seconds is -1; a positive finite number"));
  CHECK_THAT(call(R"(, "seconds": 0)"), ContainsSubstring("calls: seconds is 0"));
  CHECK_THAT(call(R"(, "seconds": NaN)"), ContainsSubstring("p.json:1:"));
  CHECK_THAT(call(R"(, "seconds": 1e999)"), ContainsSubstring("p.json:1:"));
  CHECK_THAT(call(R"(, "seconds": 1, "operands": "f17")"), ContainsSubstring("unknown type 'f17'"));
  CHECK_THAT(refusal("{" + device +
                     R"(, "links": [{"op": "sum", "ranks": 2, "nodes": 1, "bytes": 1, "seconds": 1}]})"),
             ContainsSubstring("unknown operation 'sum'"));
  CHECK_THAT(refusal("{" + device +
                     R"(, "links": [{"op": "send", "ranks": 2, "nodes": 3, "bytes": 1, "seconds": 1}]})"),
             ContainsSubstring("links: 2 ranks on 3 nodes"));
  CHECK_THAT(refusal("{" + device + R"(, "overlap": [{"op": "add", "comm": "send", "slowdown": 0.1}]})"),
             ContainsSubstring("slowdown is 0.1; it is the time together over the time alone"));
  CHECK_THAT(refusal("{" + device +
                     R"(, "overlap": [{"op": "add", "comm": "send", "slowdown": 1, "comm_slowdown": 0.2}]})"),
             ContainsSubstring("comm_slowdown is 0.2; it is the time together over the time alone"));
  CHECK_THAT(refusal("{" + device +
                     R"(, "overlap": [{"op": "add", "work": "rest", "comm": "send", "slowdown": 1}]})"),
             ContainsSubstring("overlap: unknown work 'rest'"));
  CHECK_THAT(refusal("{" + device + R"(, "overlap": [{"op": "add", "comm": "send"}]})"),
             ContainsSubstring("has no slowdown"));
}
