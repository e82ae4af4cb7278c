// The text formats of Prometheus, and the server.

#include "apps/monitor/prometheus.h"

#include <map>
#include <set>
#include <sstream>
#include <string>

#include <sys/socket.h>
#include <unistd.h>

#include <arpa/inet.h>

#include "apps/monitor/http.h"
#include "core/base/error.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/monitor/sample.h"

namespace nrl::monitor {
namespace {

/// The samples of a scrape. Fails on lines that the format does not have, and on families in two parts.
std::map<std::string, double> samples(const std::string& text) {
  std::map<std::string, double> out;
  std::set<std::string> families;
  std::istringstream in(text);
  std::string line, family;
  while (std::getline(in, line)) {
    if (line == "# EOF") continue;
    if (line.starts_with("# HELP ")) {
      family = line.substr(7, line.find(' ', 7) - 7);
      CAPTURE(line);
      CHECK(families.insert(family).second);
      continue;
    }
    if (line.starts_with("# TYPE ")) {
      CHECK(line.substr(7, family.size() + 1) == family + " ");
      continue;
    }
    CAPTURE(line);
    const size_t space = line.rfind(' ');
    REQUIRE(space != std::string::npos);
    REQUIRE(line.starts_with(family.substr(0, family.rfind("_total"))));
    REQUIRE(out.emplace(line.substr(0, space), std::stod(line.substr(space + 1))).second);
  }
  return out;
}

MetricsState sample_state(int steps) {
  MetricsState state;
  StepFacts f = sample_step();
  for (int i = 0; i < steps; ++i) {
    f.step += 1;
    f.tokens += 524288;
    state.add(f);
  }
  state.alerts = {{"loss_spike", false}, {"train/loss > \"3\\\"", true}};
  state.telemetry.nodes = {{.host = "a",
                            .values = {{"cpu", 0.5},
                                       {"net_sent_bytes_per_s", 1e6},
                                       {"gpu.0.util", 0.9},
                                       {"gpu.1.util", 0.8},
                                       {"gpu.0.energy_joules", 7}}},
                           {.host = "b", .values = {{"gpu.0.util", 0.7}}}};
  state.telemetry.ranks = {{.rank = 0, .own_ms = 5}, {.rank = 1, .own_ms = 7}};
  return state;
}

std::string get(int port, const std::string& path, const std::string& accept = "") {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  REQUIRE(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  const std::string request = "GET " + path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" +
                              (accept.empty() ? "" : "Accept: " + accept + "\r\n") + "\r\n";
  REQUIRE(::write(fd, request.data(), request.size()) == static_cast<ssize_t>(request.size()));
  std::string reply;
  char text[4096];
  for (ssize_t n; (n = ::read(fd, text, sizeof text)) > 0;) reply.append(text, static_cast<size_t>(n));
  ::close(fd);
  return reply;
}

}  // namespace

TEST_CASE("the text format has every family once and counters that never fall", "[prometheus]") {
  const auto first = samples(metrics_text(sample_state(1), false)),
             later = samples(metrics_text(sample_state(3), false));
  for (const auto& [name, value] : first) {
    CAPTURE(name);
    if (name.find("_total") != std::string::npos || name.find("_bucket") != std::string::npos)
      CHECK(later.at(name) >= value);
  }
  CHECK(later.at("nrl_train_step") == 123);
  CHECK(later.at("nrl_train_loss") == 6.231);
  // The first step's tokens follow from its rate, since those before are of another process.
  CHECK(later.at("nrl_train_tokens_total") == Approx(412300 * 1.272 + 2 * 524288).epsilon(1e-6));
  CHECK(later.at("nrl_train_step_seconds_count") == 3);
  CHECK(later.at("nrl_train_step_seconds_sum") == Approx(3 * 1.272));
  CHECK(later.at("nrl_train_step_seconds_bucket{le=\"1\"}") == 0);
  CHECK(later.at("nrl_train_step_seconds_bucket{le=\"2.5\"}") == 3);
  CHECK(later.at("nrl_train_step_seconds_bucket{le=\"+Inf\"}") == 3);
  CHECK(later.at("nrl_train_gpu_util{node=\"a\",gpu=\"1\"}") == 0.8);
  CHECK(later.at("nrl_train_gpu_util{node=\"b\",gpu=\"0\"}") == 0.7);
  CHECK(later.at("nrl_train_host_net_sent_bytes_per_second{node=\"a\"}") == 1e6);
  CHECK(later.at("nrl_train_gpu_energy_joules_total{node=\"a\",gpu=\"0\"}") == 7);
  CHECK(later.at("nrl_train_rank_own_seconds{rank=\"1\"}") == Approx(0.007));
  CHECK(later.at("nrl_train_alerts_firing{rule=\"train/loss > \\\"3\\\\\\\"\"}") == 1);

  MetricsState one = sample_state(1);
  one.telemetry.nodes.pop_back();
  one.telemetry.ranks.pop_back();
  const auto alone = samples(metrics_text(one, false));
  CHECK(alone.count("nrl_train_host_cpu") == 1);  // labels only where they differ
  CHECK(alone.count("nrl_train_rank_own_seconds") == 1);
  CHECK_FALSE(metrics_text({}, false).empty());  // before the first step
  one.rollbacks = 2;
  CHECK(samples(metrics_text(one, false)).at("nrl_train_rollbacks_total") == 2);
}

TEST_CASE("OpenMetrics names counters without their suffix and ends with a mark", "[prometheus]") {
  CHECK(wants_open_metrics("application/openmetrics-text;version=1.0.0,text/plain;q=0.5"));
  CHECK_FALSE(wants_open_metrics("text/plain"));
  const std::string text = metrics_text(sample_state(2), true);
  CHECK(text.ends_with("# EOF\n"));
  CHECK_THAT(text, ContainsSubstring("# TYPE nrl_train_tokens counter\n"));
  CHECK_THAT(text, ContainsSubstring("\nnrl_train_tokens_total "));
  samples(text);
}

TEST_CASE("the server answers, and a busy port leads to the next", "[prometheus]") {
  const auto routes = [](const std::string& body) {
    return std::vector<HttpServer::Route>{{"/metrics", [body](const std::string& accept) {
                                             return HttpReply{body + accept, metrics_type(false)};
                                           }}};
  };
  const auto first = open_http_server("127.0.0.1", 0, routes("one "));
  REQUIRE(first->port() > 0);
  const std::string reply = get(first->port(), "/metrics", "text/x");
  CHECK_THAT(reply, ContainsSubstring("200 OK") && ContainsSubstring("text/plain; version=0.0.4") &&
                        ContainsSubstring("one text/x"));
  CHECK_THAT(get(first->port(), "/etc/passwd"), ContainsSubstring("404"));
  if (first->port() < 65500) {
    const auto second = open_http_server("127.0.0.1", first->port(), routes("two "));
    CHECK(second->port() > first->port());
    CHECK_THAT(get(second->port(), "/metrics"), ContainsSubstring("two "));
    CHECK_THAT(get(first->port(), "/metrics"), ContainsSubstring("one "));
  }
  const test::Caught wrong = test::error_of([&] { open_http_server("192.0.2.1", 8000, routes("")); });
  CHECK(wrong.code == static_cast<int>(Exit::unavailable));
  CHECK_THAT(wrong.text, ContainsSubstring("192.0.2.1"));
}

}  // namespace nrl::monitor
