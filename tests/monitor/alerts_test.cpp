// Alerts: hysteresis, rules, healthy runs, and sending them.

#include "apps/monitor/alerts.h"

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <sys/socket.h>
#include <unistd.h>

#include <netinet/in.h>

#include "apps/monitor/notify.h"
#include "core/base/clock.h"
#include "core/base/spawn.h"
#include "core/base/threads.h"
#include "core/config/alert_rule.h"
#include "core/io/http_post.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/monitor/sample.h"

namespace nrl::monitor {
namespace {

using test::contains;

std::vector<std::string> shell(const std::string& command) {
  return {"/bin/sh", "-c", command};
}

MonitoringConfig alerting(double interval = 1) {
  MonitoringConfig c;
  c.interval = interval;
  c.alerting.enabled = true;
  return c;
}

/// Steps of a run of a second each, with a loss that falls and noise of every number.
struct SyntheticRun {
  explicit SyntheticRun(unsigned seed) : random(seed) {}
  StepFacts next() {
    StepFacts f;
    f.step = ++step;
    f.max_steps = 2000;
    f.time = 1e9 + static_cast<double>(step);
    const auto at = static_cast<double>(step);
    f.loss = (2 + 8 * std::exp(-at / 200)) * (1 + 0.03 * noise(random));
    f.grad_norm = (0.5 + 4 * std::exp(-at / 50)) * std::exp(0.2 * noise(random));
    f.lr = 1e-4;
    f.step_ms = 1000 * std::exp(0.03 * noise(random));
    f.data_ms = 10;
    f.tokens_per_s = 4096e3 / f.step_ms;
    f.tokens = step * 4096;
    return f;
  }
  std::mt19937 random;
  std::normal_distribution<double> noise;
  int64_t step = 0;
};

/// Names of the rules that fire while `change` alters the steps from 300 on.
std::vector<std::string> fired(const MonitoringConfig& config,
                               const std::function<void(StepFacts&)>& change) {
  Alerts alerts(config, false);
  SyntheticRun run(5);
  std::vector<std::string> names;
  for (int i = 0; i < 700; ++i) {
    StepFacts f = run.next();
    if (f.step >= 300) change(f);
    for (const Alert& alert : alerts.step(f))
      if (!alert.cleared) names.push_back(alert.rule);
  }
  return names;
}

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Listens on a port of this machine; answers with `reply`, or never.
class Listener {
 public:
  explicit Listener(std::string reply) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REQUIRE(::bind(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    REQUIRE(::listen(socket_, 4) == 0);
    socklen_t size = sizeof address;
    ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size);
    port = ntohs(address.sin_port);
    thread_ = std::thread([this, reply = std::move(reply)] {
      for (int client; (client = ::accept(socket_, nullptr, nullptr)) >= 0; ::close(client)) {
        char text[4096];
        ssize_t n = 0;
        do {
          n = ::read(client, text, sizeof text);
          if (n > 0) {
            const std::lock_guard lock(mutex_);
            received_.append(text, static_cast<size_t>(n));
          }
        } while (n > 0 && (reply.empty() || !contains(received(), "\"text\"")));
        [[maybe_unused]] const ssize_t ignored = ::write(client, reply.data(), reply.size());
      }
    });
  }
  ~Listener() {
    ::shutdown(socket_, SHUT_RDWR);
    thread_.join();
    ::close(socket_);
  }
  std::string received() {
    const std::lock_guard lock(mutex_);
    return received_;
  }
  std::string url() const { return fmt::format("http://127.0.0.1:{}/hook", port); }
  int port = 0;

 private:
  int socket_;
  std::thread thread_;
  std::mutex mutex_;
  std::string received_;
};

Alert sample_alert() {
  return {.rule = "training_speed",
          .level = AlertLevel::critical,
          .step = 812,
          .time = 5,
          .value = 0.43,
          .threshold = 0.5,
          .message = "training_speed: \"slow\"; $(touch /nowhere)"};
}

}  // namespace

TEST_CASE("an alert fires after some evaluations in a row and clears a tenth below", "[alerts]") {
  using Change = AlertState::Change;
  AlertState state({.metric = "m", .above = true, .threshold = 10, .hold = 3});
  CHECK(state.evaluate(11, 0) == Change::none);
  CHECK(state.evaluate(11, 1) == Change::none);
  CHECK(state.evaluate(10, 2) == Change::none);  // not above: counts anew
  CHECK(state.evaluate(11, 3) == Change::none);
  CHECK(state.evaluate(NAN, 3.5) == Change::none);  // changes nothing
  CHECK(state.evaluate(11, 4) == Change::none);
  CHECK(state.evaluate(11, 5) == Change::fired);
  CHECK(state.firing());
  CHECK(state.evaluate(12, 6) == Change::none);
  CHECK(state.evaluate(9.5, 7) == Change::none);  // between: still firing
  CHECK(state.evaluate(12, 604.9) == Change::none);
  CHECK(state.evaluate(12, 605) == Change::fired);  // ten minutes after the last time
  CHECK(state.evaluate(9, 606) == Change::cleared);
  CHECK(state.evaluate(9, 607) == Change::none);
  AlertState low({.metric = "m", .above = false, .threshold = 10, .hold = 1});
  CHECK(low.evaluate(10, 0) == Change::none);
  CHECK(low.evaluate(9.9, 1) == Change::fired);
  CHECK(low.evaluate(10.9, 2) == Change::none);
  CHECK(low.evaluate(11, 3) == Change::cleared);
}

TEST_CASE("rules of the configuration are parsed, and typos have a place and a suggestion", "[alerts]") {
  const ParsedAlertRule full = parse_alert_rule("perf/tokens_per_s < 1000 for 5");
  CHECK(full.problem.empty());
  CHECK(full.rule.metric == "perf/tokens_per_s");
  CHECK_FALSE(full.rule.above);
  CHECK(full.rule.threshold == 1000);
  CHECK(full.rule.hold == 5);
  const ParsedAlertRule tight = parse_alert_rule("node.0.gpu.3.temperature_celsius>8.5e1");
  CHECK(tight.problem.empty());
  CHECK(tight.rule.above);
  CHECK(tight.rule.threshold == 85);
  CHECK(tight.rule.hold == 3);
  const std::pair<const char*, const char*> wrong[] = {
      {"", "at character 1: expected the name of a metric"},
      {"< 3", "at character 1: expected the name of a metric"},
      {"perf/token_per_s < 3",
       "at character 1: unknown metric 'perf/token_per_s'; did you mean 'perf/tokens_per_s'?"},
      {"train/los > 3", "did you mean 'train/loss'?"},
      {"speed > 3", "at character 1: unknown metric 'speed'; expected a name such as"},
      {"train/loss = 3", "at character 12: expected '<' or '>'"},
      {"train/loss", "at character 11: expected '<' or '>'"},
      {"train/loss >", "at character 13: expected a number"},
      {"train/loss > 3x", "at character 14: expected a number"},
      {"train/loss > nan", "at character 14: expected a number"},
      {"train/loss > 3 during 5", "at character 16: expected 'for N' or the end"},
      {"train/loss > 3 for 0", "at character 20: expected a number of evaluations"},
      {"train/loss > 3 for", "at character 19: expected a number of evaluations"},
      {"train/loss > 3 for 5 s", "at character 22: expected the end"}};
  for (const auto& [text, problem] : wrong) {
    CAPTURE(text);
    CHECK_THAT(parse_alert_rule(text).problem, ContainsSubstring(problem));
  }
  for (int i = 0; i < test::fuzz_iterations() / 4; ++i)
    parse_alert_rule(test::mutated("perf/tokens_per_s < 1000 for 5", i));
}

TEST_CASE("healthy runs raise no alert", "[alerts]") {
  MonitoringConfig config = alerting(30);
  config.analysis.trend_analysis = config.analysis.anomaly_detection = true;
  for (unsigned seed = 1; seed <= 5; ++seed) {
    Alerts alerts(config, true);
    SyntheticRun run(seed);
    for (int i = 0; i < 2000; ++i) {
      const StepFacts f = run.next();
      for (const Alert& alert : alerts.step(f)) FAIL_CHECK(alert.step << " " << alert.message);
      if (f.step % 10 == 0) {
        const NodeSample node{.host = "h",
                              .values = {{"cpu", 0.5},
                                         {"gpu.0.mem_bytes", 8e10},
                                         {"gpu.0.mem_total_bytes", 9e10},
                                         {"gpu.0.throttled", 0},
                                         {"gpu.0.ecc_errors", 3},
                                         {"disk_free_bytes", 1e12}}};
        Telemetry t{.step = f.step, .time = f.time, .nodes = {node}, .ranks = {}};
        for (int rank = 0; rank < 4; ++rank)
          t.ranks.push_back({.rank = rank, .own_ms = 900, .score = 0.97 - 0.01 * rank});
        alerts.set_checkpoint_bytes(1e11);
        for (const Alert& alert : alerts.telemetry(t)) FAIL_CHECK(alert.step << " " << alert.message);
        CHECK(alerts.idle(f.time + 5).empty());
      }
      if (f.step % 200 == 0)
        for (const Alert& alert :
             alerts.evaluation({.step = f.step, .time = f.time, .losses = {{"val_loss", f.loss}}}))
          FAIL_CHECK(alert.step << " " << alert.message);
    }
  }
}

TEST_CASE("every fault in the steps has its alert, and no other", "[alerts]") {
  const auto spike = fired(alerting(), [](StepFacts& f) {
    if (f.step == 350) f.loss *= 2;
  });
  CHECK(spike == std::vector<std::string>{"loss_spike"});
  const auto explosion = fired(alerting(), [](StepFacts& f) {
    if (f.step == 350) f.grad_norm *= 20;
  });
  CHECK(explosion == std::vector<std::string>{"gradient_explosion"});
  const auto skipped = fired(alerting(), [](StepFacts& f) {
    if (f.step == 350) {
      f.skipped = true;
      f.loss = NAN;
    }
  });
  CHECK(skipped == std::vector<std::string>{"non_finite"});
  const auto slow = fired(alerting(), [](StepFacts& f) { f.tokens_per_s *= 0.45; });
  CHECK(slow == std::vector<std::string>{"training_speed", "slower"});
  const auto slower = fired(alerting(), [](StepFacts& f) { f.tokens_per_s *= 0.6; });
  CHECK(slower == std::vector<std::string>{"slower"});
  const auto data = fired(alerting(), [](StepFacts& f) { f.data_ms = 0.2 * f.step_ms; });
  CHECK(data == std::vector<std::string>{"data_wait"});
  const auto rise =
      fired(alerting(), [](StepFacts& f) { f.loss *= 1 + static_cast<double>(f.step - 300) / 300; });
  CHECK(rise == std::vector<std::string>{"loss_increase"});

  MonitoringConfig statistical = alerting();
  statistical.analysis.trend_analysis = true;
  CHECK(has(fired(statistical, [](StepFacts& f) { f.loss *= 1 + static_cast<double>(f.step - 300) / 300; }),
            "loss_trend"));
  CHECK(has(fired(statistical,
                  [](StepFacts& f) { f.tokens_per_s *= 1 - static_cast<double>(f.step - 300) / 2000; }),
            "speed_trend"));
  statistical.analysis.trend_analysis = false;
  statistical.analysis.anomaly_detection = true;
  CHECK(has(fired(statistical,
                  [](StepFacts& f) {
                    if (f.step < 310) f.step_ms *= 1.5;
                  }),
            "step_ms_anomaly"));
  CHECK_FALSE(has(fired(alerting(),
                        [](StepFacts& f) {
                          if (f.step < 310) f.step_ms *= 1.5;
                        }),
                  "step_ms_anomaly"));

  MonitoringConfig own = alerting();
  own.alerting.rules = {"train/loss < 2.2 for 2", "perf/speed < 0.9"};
  CHECK(has(fired(own, [](StepFacts& f) { f.loss = 1; }), "train/loss < 2.2 for 2"));
  CHECK(has(fired(own, [](StepFacts& f) { f.tokens_per_s *= 0.8; }), "perf/speed < 0.9"));
}

TEST_CASE("gradient norms that rise by half for three steps are usual, threefold ones are not", "[alerts]") {
  // A healthy run had 2.7, 3.1 and 2.3 after norms around 1.62 with deviations of 9 %.
  MonitoringConfig config = alerting();
  config.analysis.anomaly_detection = true;
  const auto burst = [&](const std::vector<double>& norms) {
    Alerts alerts(config, false);
    SyntheticRun run(5);
    std::vector<std::string> names;
    for (size_t i = 0; i < 400; ++i) {
      StepFacts f = run.next();
      f.grad_norm = 1.62 * std::exp(0.094 * run.noise(run.random));
      if (i >= 300 && i - 300 < norms.size()) f.grad_norm = norms[i - 300];
      for (const Alert& alert : alerts.step(f))
        if (!alert.cleared) names.push_back(alert.rule);
    }
    return names;
  };
  CHECK(burst({2.69, 3.08, 2.3}).empty());
  CHECK(burst({5, 5, 5}) == std::vector<std::string>{"grad_norm_anomaly"});
  CHECK(burst({0.5, 0.5, 0.5}) == std::vector<std::string>{"grad_norm_anomaly"});
}

TEST_CASE("thresholds and the interval decide", "[alerts]") {
  MonitoringConfig high = alerting();
  high.alerting.thresholds = {.loss_increase = 10, .gpu_memory = 1, .cpu_usage = 1, .training_speed = 0.1};
  const auto slow = fired(high, [](StepFacts& f) {
    f.tokens_per_s *= 0.45;
    f.loss *= 1 + static_cast<double>(f.step - 300) / 300;
  });
  CHECK(slow == std::vector<std::string>{"slower"});
  Alerts alerts(high, true);
  const NodeSample node{.values = {{"cpu", 0.99}, {"gpu.0.mem_bytes", 99}, {"gpu.0.mem_total_bytes", 100}}};
  for (int i = 0; i < 5; ++i) CHECK(alerts.telemetry({.time = 1.0 + i, .nodes = {node}}).empty());
  // 400 slow steps of a second are not three evaluations.
  CHECK(fired(alerting(200), [](StepFacts& f) { f.tokens_per_s *= 0.45; }).empty());
  MonitoringConfig far = alerting();
  far.analysis = {.anomaly_detection = true, .anomaly_z = 1000};
  CHECK(fired(far, [](StepFacts& f) {
          if (f.step < 310) f.step_ms *= 1.5;
        }).empty());
}

TEST_CASE("telemetry raises alerts that name the place", "[alerts]") {
  Alerts alerts(alerting(), true);
  Telemetry t{.step = 9, .time = 100, .nodes = {}, .ranks = {}};
  t.nodes.push_back({.host = "a",
                     .values = {{"cpu", 0.99},
                                {"gpu.1.mem_bytes", 95},
                                {"gpu.1.mem_total_bytes", 100},
                                {"gpu.1.throttled", 1},
                                {"gpu.1.ecc_errors", 2},
                                {"disk_free_bytes", 15}},
                     .notes = {"gpu 1: clock 1095 of 1980 MHz: temperature"}});
  t.ranks = {{.rank = 0, .own_ms = 50, .score = 1}, {.rank = 1, .own_ms = 100, .score = 0.5}};
  alerts.set_checkpoint_bytes(10);
  std::map<std::string, std::string> messages;
  for (int i = 0; i < 3; ++i) {
    t.time += 10;
    if (i == 1) t.nodes[0].values[4].second = 3;
    for (const Alert& alert : alerts.telemetry(t)) {
      CHECK(messages.emplace(alert.rule, alert.message).second);
      if (i == 0) CHECK(alert.rule == "disk");
      if (i == 1) CHECK(alert.rule == "ecc_errors");
    }
  }
  CHECK(messages.size() == 6);
  CHECK_THAT(messages["straggler"],
             ContainsSubstring("rank 1 (a) needs 100.0 ms of its own per step, 2.00 times"));
  CHECK_THAT(messages["throttled"], ContainsSubstring("a, gpu 1: clock 1095 of 1980 MHz: temperature"));
  CHECK_THAT(messages["gpu_memory"], ContainsSubstring("95.0 % of gpu.1 of a"));
  CHECK_THAT(messages["ecc_errors"], ContainsSubstring("1 uncorrected errors"));
  Alerts on_cpu(alerting(), false);  // busy processors are as they should be
  for (int i = 0; i < 5; ++i)
    for (const Alert& alert : on_cpu.telemetry(t)) CHECK(alert.rule != "cpu_usage");
}

TEST_CASE("a run that stops making steps is noticed once", "[alerts]") {
  Alerts alerts(alerting(), false);
  SyntheticRun run(1);
  StepFacts f;
  for (int i = 0; i < 50; ++i) f = run.next(), alerts.step(f);
  CHECK(alerts.idle(f.time + 59).empty());
  const auto found = alerts.idle(f.time + 61);
  REQUIRE(found.size() == 1);
  CHECK(found[0].rule == "no_step");
  CHECK(alerts.idle(f.time + 700).empty());
  StepFacts late = run.next();
  late.time = f.time + 800;
  const auto over = alerts.step(late);
  REQUIRE_FALSE(over.empty());
  CHECK(over[0].cleared);
  const auto leak = alerts.event("memory_leak", AlertLevel::warning, 5, 10, "grows");
  REQUIRE(leak.size() == 1);
  CHECK(alerts.event("memory_leak", AlertLevel::warning, 6, 600, "grows").empty());
  CHECK(alerts.event("memory_leak", AlertLevel::warning, 7, 611, "grows").size() == 1);
  // Every rank has alerts of its own, and a higher level need not wait.
  CHECK(alerts.event("memory_leak", AlertLevel::warning, 7, 612, "grows", 3).size() == 1);
  CHECK(alerts.event("memory_leak", AlertLevel::warning, 8, 613, "grows", 3).empty());
  const auto critical = alerts.event("memory_leak", AlertLevel::critical, 8, 614, "grows", 3, 150, 100);
  REQUIRE(critical.size() == 1);
  CHECK(critical[0].value == 150);
  CHECK(critical[0].threshold == 100);
  CHECK(alerts.event("memory_leak", AlertLevel::warning, 8, 615, "grows", 3).empty());
  CHECK(alerts.event("memory_leak", AlertLevel::critical, 8, 616, "grows", 3).empty());
}

TEST_CASE("alerts survive their file", "[alerts]") {
  Alert alert = sample_alert();
  const std::string text = to_json(alert).dump();
  CHECK(to_json(alert_from(parse_json(text, "f"))).dump() == text);
  alert.cleared = true;
  CHECK(alert_from(parse_json(to_json(alert).dump(), "f")).cleared);
  CHECK_THROWS_AS(alert_from(parse_json(
                      R"({"step": 1, "time": 1, "rule": "r", "severity": "bad", "message": "m"})", "f")),
                  Error);
  for (int i = 0; i < test::fuzz_iterations() / 4; ++i) try {
      alert_from(parse_json(test::mutated(text, i), "alerts.jsonl"));
    } catch (const Error& e) {
      REQUIRE(e.code() == Exit::data);
    }
}

TEST_CASE("a command does not see the variables of the run, which may hold secrets", "[alerts]") {
  const test::TemporaryDirectory dir;
  ::setenv("NRL_TEST_SECRET", "x", 1);
  {
    Notifier notifier({.command = "env >" + (dir / "out"), .webhook = {}, .run = "logs", .warn = {}});
    notifier.send(sample_alert());
  }
  ::unsetenv("NRL_TEST_SECRET");
  const std::string text = read_file(dir / "out", 100000);
  CHECK_THAT(text, ContainsSubstring("PATH=") && ContainsSubstring("NRL_ALERT_STEP=812") &&
                       !ContainsSubstring("NRL_TEST_SECRET"));
}

TEST_CASE("a command gets the alert as data, never as shell text", "[alerts]") {
  const test::TemporaryDirectory dir;
  const std::string out = dir / "out";
  {
    Notifier notifier(
        {.command =
             "{ cat; echo \"$NRL_ALERT_RULE|$NRL_ALERT_SEVERITY|$NRL_ALERT_STEP|$NRL_ALERT_MESSAGE\"; } > " +
             out,
         .webhook = {},
         .run = "logs",
         .warn = {}});
    notifier.send(sample_alert());
  }
  const std::string text = read_file(out, 10000);
  CHECK_THAT(text,
             ContainsSubstring("training_speed|critical|812|training_speed: \"slow\"; $(touch /nowhere)\n"));
  const JsonValue json = parse_json(text.substr(0, text.find('\n')), "input");
  CHECK(json.get_string("rule") == "training_speed");
  CHECK(json.get_string("run") == "logs");
  CHECK_THAT(json.get_string("text"), ContainsSubstring("critical: training_speed"));
  CHECK(run_program(shell("exit 3"), "", {}, 5) == "exit status 3");
  CHECK(run_program(shell("kill -9 $$"), "", {}, 5) == "ended by signal 9");
  // It does not read: signals are blocked as in the notifier's thread.
  std::thread([] {
    const BlockedSignals blocked;
    CHECK(run_program(shell("exec <&-; exit 0"), std::string(1 << 20, 'x'), {}, 5).empty());
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    const timespec now{};
    ::sigtimedwait(&pipe, nullptr, &now);
  }).join();
}

TEST_CASE("a command that never ends is killed with its children", "[alerts]") {
  const test::TemporaryDirectory dir;
  const double begin = steady_seconds();
  const std::string problem =
      run_program(shell("sleep 60 & echo $! > " + (dir / "pid") + "; sleep 60"), "", {}, 0.5);
  CHECK(steady_seconds() - begin < 5);
  CHECK(problem == "killed after 0.5 s");
  const int child = std::stoi(read_file(dir / "pid", 100));
  bool gone = false;
  for (int i = 0; i < 200 && !gone; ++i) {
    // A zombie that init has not collected yet is gone as well.
    const std::string status = path_exists(fmt::format("/proc/{}/stat", child))
                                   ? read_file(fmt::format("/proc/{}/stat", child), 4096)
                                   : "";
    gone = status.empty() || contains(status, ") Z ");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK(gone);
}

TEST_CASE("a webhook gets JSON, and one that hangs holds nothing up", "[alerts]") {
  Listener hook("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
  const std::string sent = http_post(hook.url(), R"({"text": "hello"})", 5, 1000).problem;
  if (contains(sent, "libcurl")) {
    WARN("no libcurl here: " << sent);
    return;
  }
  CHECK(sent.empty());
  CHECK_THAT(hook.received(), ContainsSubstring("POST /hook") && ContainsSubstring("application/json") &&
                                  ContainsSubstring("hello"));
  Listener refuses("HTTP/1.1 500 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
  CHECK(http_post(refuses.url(), R"({"text": 1})", 5, 1000).problem == "HTTP status 500");
  CHECK_THAT(http_post("file:///etc/passwd", "{}", 5, 1000).problem, ContainsSubstring("neither http"));

  Listener hangs("");
  std::vector<std::string> warnings;
  double sending = 0;
  const double begin = steady_seconds();
  {
    Notifier notifier({.command = {},
                       .webhook = hangs.url(),
                       .run = "logs",
                       .webhook_s = 0.3,
                       .last_s = 5,
                       .warn = [&](const std::string& text) { warnings.push_back(text); }});
    for (int i = 0; i < 3; ++i) notifier.send(sample_alert());
    sending = steady_seconds() - begin;
  }
  CHECK(sending < 0.2);
  CHECK(steady_seconds() - begin < 4);
  REQUIRE(warnings.size() == 1);  // once, not for every alert
  CHECK_THAT(warnings[0], ContainsSubstring("monitoring.alerting.webhook: an alert was not sent"));
  Notifier idle({.command = {}, .webhook = {}, .run = "", .warn = {}});
  idle.send(sample_alert());  // nothing to send it to
}

}  // namespace nrl::monitor
