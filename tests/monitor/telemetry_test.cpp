// Telemetry: the kernel's files, samples of a node, and what ranks send.

#include "apps/monitor/telemetry.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

namespace nrl::monitor {
namespace {

using TempDir = test::TemporaryDirectory;

void put(const std::string& root, const std::string& path, const std::string& text) {
  const std::filesystem::path file = root + "/" + path;
  std::filesystem::create_directories(file.parent_path());
  std::ofstream(file) << text;
}

std::optional<double> value_of(const Values& values, const std::string& name) {
  for (const auto& [key, value] : values)
    if (key == name) return value;
  return {};
}

constexpr const char* stat_text = "cpu  100 20 30 800 50 1 2 3 0 0\ncpu0 1 2 3 4\nintr 7\n";
constexpr const char* meminfo_text =
    "MemTotal:       16000 kB\nMemFree:         100 kB\nMemAvailable:    4000 kB\n";
constexpr const char* net_text =
    "Inter-|   Receive                    |  Transmit\n"
    " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets\n"
    "    lo: 999 1 0 0 0 0 0 0 999 1 0 0 0 0 0 0\n"
    "  eth0:1000 1 0 0 0 0 0 0 500 1 0 0 0 0 0 0\n"
    "  eth1: 20 1 0 0 0 0 0 0 30 1 0 0 0 0 0 0\n";

}  // namespace

TEST_CASE("the kernel's files are read as they are defined", "[telemetry]") {
  const auto cpu = parse_proc_stat(stat_text);
  REQUIRE(cpu);
  CHECK(cpu->total == 1006);
  CHECK(cpu->busy == 156);  // without idle and iowait
  CHECK_FALSE(parse_proc_stat("cpu  1 2 3"));
  CHECK_FALSE(parse_proc_stat("cpu0 1 2 3 4"));
  CHECK(parse_field(meminfo_text, "MemTotal") == 16000u * 1024);
  CHECK_FALSE(parse_field(meminfo_text, "Mem"));
  CHECK_FALSE(parse_field("MemTotal: 18446744073709551615 kB", "MemTotal"));
  CHECK(parse_field("Threads:\t7\n", "Threads") == 7u);
  const auto net = parse_net_dev(net_text);
  REQUIRE(net);
  CHECK(net->received == 1020);
  CHECK(net->sent == 530);
  CHECK_FALSE(parse_net_dev("Inter-|\n lo: 1 1 0 0 0 0 0 0 1 1\n"));
  CHECK_FALSE(parse_net_dev(" eth0: 1 2\n"));
  CHECK(parse_number("12\n") == 12u);
  CHECK_FALSE(parse_number("12 a\n"));
  CHECK_FALSE(parse_number(""));
  CHECK(energy_difference(10, 25, 100) == 15);
  CHECK(energy_difference(90, 5, 100) == 15);  // the counter wrapped
  CHECK(energy_difference(90, 5, 50) == 0);
}

TEST_CASE("no text makes a parser of telemetry fail", "[telemetry][fuzz]") {
  const std::string texts[] = {stat_text, meminfo_text, net_text, "12\n"};
  for (int i = 0; i < test::fuzz_iterations(); ++i) {
    const std::string text = test::mutated(texts[i % 4], i);
    parse_proc_stat(text);
    parse_field(text, "MemTotal");
    parse_net_dev(text);
    parse_number(text);
  }
}

TEST_CASE("a node is sampled, and what it does not have is absent", "[telemetry]") {
  const TempDir root;
  put(root.path(), "proc/stat", stat_text);
  put(root.path(), "proc/meminfo", meminfo_text);
  put(root.path(), "proc/net/dev", net_text);
  put(root.path(), "sys/class/powercap/intel-rapl:0/energy_uj", "9000000\n");
  put(root.path(), "sys/class/powercap/intel-rapl:0/max_energy_range_uj", "10000000\n");
  put(root.path(), "sys/class/powercap/intel-rapl:0:0/energy_uj", "1\n");  // a part of the package
  put(root.path(), "sys/class/powercap/intel-rapl:0:0/max_energy_range_uj", "10000000\n");
  for (const char* controller : {"mc0", "mc1"}) {
    const std::string edac = std::string("sys/devices/system/edac/mc/") + controller + "/";
    put(root.path(), edac + "ce_count", "3\n");
    put(root.path(), edac + "ue_count", "1\n");
  }
  const std::string counters = "sys/class/infiniband/mlx5_0/ports/1/counters/";
  put(root.path(), counters + "port_rcv_data", "100\n");
  put(root.path(), counters + "port_xmit_data", "200\n");
  HostStats host(root.path(), root.path());
  const Values first = host.node(5);
  CHECK(value_of(first, "mem_bytes") == 12000.0 * 1024);
  CHECK(value_of(first, "energy_joules") == 0.0);
  CHECK(value_of(first, "memory_corrected_errors") == 6.0);
  CHECK(value_of(first, "memory_uncorrected_errors") == 2.0);
  CHECK(value_of(first, "disk_free_bytes").value_or(0) > 0);
  CHECK_FALSE(value_of(first, "cpu"));  // there is no time that it could be about
  CHECK_FALSE(value_of(first, "net_received_bytes_per_s"));

  put(root.path(), "proc/stat", "cpu  160 20 30 830 60 1 2 3 0 0\n");
  put(root.path(), "proc/net/dev", " eth0:2020 1 0 0 0 0 0 0 530 1\n");
  put(root.path(), "sys/class/powercap/intel-rapl:0/energy_uj", "500000\n");
  put(root.path(), counters + "port_rcv_data", "150\n");
  const Values second = host.node(7);
  CHECK(*value_of(second, "cpu") == Approx(0.6));
  CHECK(value_of(second, "net_received_bytes_per_s") == 500.0);
  CHECK(value_of(second, "net_sent_bytes_per_s") == 0.0);
  CHECK(value_of(second, "ib_received_bytes_per_s") == 100.0);  // words of 4 bytes
  CHECK(*value_of(second, "energy_joules") == Approx(1.5));

  const TempDir bare;
  HostStats none("", bare.path());
  none.node(1);
  CHECK(none.node(2).empty());
  CHECK(none.process().empty());
  const Values own = HostStats("").process();
  CHECK(*value_of(own, "rss_bytes") > 1e5);
  CHECK(*value_of(own, "threads") >= 1);
  CHECK(*value_of(own, "open_files") >= 3);
}

TEST_CASE("telemetry of several ranks has scores and survives its file", "[telemetry]") {
  const NodeSample a{.host = "a", .values = {{"cpu", 0.5}, {"mem_bytes", 2e9}}, .notes = {"gpu 0: \"hot\""}};
  const NodeSample b{.host = "b", .values = {}, .notes = {}};
  const std::vector<std::string> texts = {
      contribution({.rank = 0, .node = 0, .own_ms = 80, .waiting_ms = 40}, &a),
      contribution({.rank = 1, .node = 0, .own_ms = 120, .values = {{"open_files", 9}}}, nullptr),
      contribution({.rank = 2, .node = 1}, &b)};
  const Telemetry t = joined_telemetry(7, 100.5, texts);
  REQUIRE(t.ranks.size() == 3);
  CHECK(t.ranks[0].score == 1);
  CHECK(t.ranks[1].score == Approx(80.0 / 120));
  CHECK(t.ranks[2].score == 1);  // it reported no work
  REQUIRE(t.nodes.size() == 2);
  CHECK(t.nodes[0].notes == a.notes);

  const Telemetry back = telemetry_from(parse_json(to_json(t).dump(), "file"));
  CHECK(to_json(back).dump() == to_json(t).dump());
  const Values names = flat(back);
  CHECK(value_of(names, "node.0.cpu") == 0.5);
  CHECK(value_of(names, "node.0.mem_gb") == 2.0);
  CHECK(*value_of(names, "rank.1.score") == Approx(80.0 / 120));
  CHECK(value_of(names, "rank.1.open_files") == 9.0);

  const std::string text = to_json(t).dump();
  for (int i = 0; i < test::fuzz_iterations() / 4; ++i) {
    try {
      telemetry_from(parse_json(test::mutated(text, i), "telemetry.jsonl"));
    } catch (const Error& e) {
      REQUIRE(e.code() == Exit::data);
    }
  }
  const std::vector<std::string> negative = {R"({"rank": -1, "node": 0, "values": {}})"};
  CHECK_THROWS_AS(joined_telemetry(1, 1, negative), Error);
}

TEST_CASE("a thread samples the GPUs of a node", "[telemetry]") {
  NodeSampler sampler(
      {.interval = 0.01, .gpus = {"GPU-other", "GPU-fake"}, .host = "h", .directory = "", .nvml = FAKE_NVML});
  NodeSample node;
  for (int i = 0; i < 500 && node.values.empty(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    node = sampler.latest();
  }
  CHECK(node.host == "h");
  CHECK_FALSE(value_of(node.values, "gpu.0.util"));  // NVML does not know it
  CHECK(*value_of(node.values, "gpu.1.util") == Approx(0.97));
  CHECK(value_of(node.values, "gpu.1.mem_bytes") == 40.0);
  CHECK(value_of(node.values, "gpu.1.throttled") == 1.0);
  CHECK(node.notes == std::vector<std::string>{"gpu 1: clock 1980 MHz: temperature"});
}

}  // namespace nrl::monitor
