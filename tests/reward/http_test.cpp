// Services that give rewards, kind and hostile.
#include "apps/reward/http.h"

#include <cstdlib>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <sys/socket.h>
#include <unistd.h>

#include <netinet/in.h>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/io/http_post.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::reward;
using test::contains;
using test::error_of;

namespace {

/// Answers each request on a port of this machine, one after the other: with what `reply` makes of its body.
class Service {
 public:
  explicit Service(std::function<std::string(const std::string& body)> reply)
      : reply_(std::move(reply)), socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REQUIRE(::bind(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    REQUIRE(::listen(socket_, 16) == 0);
    socklen_t size = sizeof address;
    ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size);
    url_ = fmt::format("http://127.0.0.1:{}/judge", ntohs(address.sin_port));
    thread_ = std::thread([this] {
      for (int client; (client = ::accept(socket_, nullptr, nullptr)) >= 0; ::close(client)) answer(client);
    });
  }
  ~Service() {
    ::shutdown(socket_, SHUT_RDWR);
    thread_.join();
    ::close(socket_);
  }
  const std::string& url() const { return url_; }
  int requests() {
    const std::lock_guard lock(mutex_);
    return requests_;
  }

 private:
  void answer(int client) {
    std::string text;
    char buffer[65536];
    size_t head = std::string::npos, wanted = 0;
    while (head == std::string::npos || text.size() < head + 4 + wanted) {
      const ssize_t n = ::read(client, buffer, sizeof buffer);
      if (n <= 0) return;
      text.append(buffer, static_cast<size_t>(n));
      if (head != std::string::npos) continue;
      head = text.find("\r\n\r\n");
      if (head == std::string::npos) continue;
      const size_t length = text.find("Content-Length: ");
      wanted = length < head ? std::stoul(text.substr(length + 16)) : 0;
      if (contains(text.substr(0, head), "Expect: 100-continue")) [[maybe_unused]]
        const ssize_t n = ::write(client, "HTTP/1.1 100 Continue\r\n\r\n", 25);
    }
    {
      const std::lock_guard lock(mutex_);
      ++requests_;
    }
    const std::string reply = reply_(text.substr(head + 4));
    [[maybe_unused]] const ssize_t n = ::write(client, reply.data(), reply.size());
  }

  std::function<std::string(const std::string&)> reply_;
  int socket_;
  std::string url_;
  std::thread thread_;
  std::mutex mutex_;
  int requests_ = 0;
};

std::string http(int status, const std::string& body) {
  return fmt::format("HTTP/1.1 {} X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}", status,
                     body.size(), body);
}

// The length of each completion, the last one first.
std::string lengths(const std::string& body) {
  JsonValue rewards = JsonValue::array();
  const JsonValue request = parse_json(body, "request");
  const auto& items = request.at("items").items();
  for (auto item = items.rbegin(); item != items.rend(); ++item)
    rewards.push_back(
        JsonValue::object({{"id", item->get_int("id")}, {"reward", item->get_string("completion").size()}}));
  return JsonValue::object({{"rewards", std::move(rewards)}}).dump();
}

const JsonValue record = JsonValue::object({{"answer", "a"}});

std::vector<Item> items(int count) {
  std::vector<Item> out;
  for (int i = 0; i < count; ++i)
    out.push_back({.record = &record,
                   .where = "f:1",
                   .prompt = "p\xff",
                   .completion = std::string(static_cast<size_t>(i % 7), 'x'),
                   .tokens = 1,
                   .ended = true});
  return out;
}

HttpOptions options(const std::string& url) {
  return {.url = url, .shown = url, .batch = 8, .workers = 3, .retries = 2, .time_limit_s = 5};
}

bool no_curl() {
  if (!contains(http_post("http://127.0.0.1:1/", "{}", 1, 100).problem, "libcurl4")) return false;
  WARN("no libcurl here");
  return true;
}

}  // namespace

TEST_CASE("a service judges completions in batches, in any order", "[http]") {
  if (no_curl()) return;
  Service service([](const std::string& body) { return http(200, lengths(body)); });
  HttpJudge judge(options(service.url()));
  const auto rewards = judge.judge(items(50));
  REQUIRE(rewards.size() == 50);
  for (size_t i = 0; i < rewards.size(); ++i) CHECK(rewards[i] == static_cast<double>(i % 7));
  CHECK(service.requests() == 7);
  CHECK(judge.failures() == 0);
  CHECK(judge.judge({}).empty());
}

TEST_CASE("null is no reward", "[http]") {
  if (no_curl()) return;
  Service service([](const std::string&) {
    return http(200, R"({"rewards": [{"id": 1, "reward": 0.5}, {"id": 0, "reward": null}]})");
  });
  HttpJudge judge(options(service.url()));
  const auto rewards = judge.judge(items(2));
  CHECK(!rewards[0]);
  CHECK(rewards[1] == 0.5);
  CHECK(judge.failures() == 0);
}

TEST_CASE("answers that are none leave completions without a reward, and are counted", "[http]") {
  if (no_curl()) return;
  const auto failure = [](const std::string& reply) {
    Service service([&](const std::string&) { return reply; });
    HttpJudge judge(options(service.url()));
    const auto rewards = judge.judge(items(2));
    CHECK(!rewards[0]);
    CHECK(!rewards[1]);
    CHECK(judge.failures() == 1);
    CHECK(service.requests() == 1);  // it does not pass by itself
    return judge.last_failure();
  };
  CHECK(contains(failure(http(200, "hello")), "no JSON: hello"));
  CHECK(contains(failure(http(200, "{}")), "\"rewards\""));
  CHECK(contains(failure(http(200, R"({"rewards": [{"id": 0, "reward": 1}]})")), "lacks rewards"));
  CHECK(contains(failure(http(200, R"({"rewards": [{"id": 0, "reward": 1}, {"id": 0, "reward": 1}]})")),
                 "two rewards of id 0"));
  CHECK(contains(failure(http(200, R"({"rewards": [{"id": 0, "reward": 1}, {"id": 2, "reward": 1}]})")),
                 "another id: 2"));
  CHECK(contains(failure(http(200, R"({"rewards": [{"id": 0, "reward": 1e999}, {"id": 1, "reward": 1}]})")),
                 "no JSON"));
  CHECK(contains(failure(http(200, R"({"rewards": [{"id": 0, "reward": "1"}, {"id": 1, "reward": 1}]})")),
                 "without a reward"));
  CHECK(contains(failure(http(404, "{}")), "HTTP status 404"));
  CHECK(contains(failure(http(200, std::string(size_t{17} << 20, 'x'))), "more than"));
}

TEST_CASE("what may pass is tried again", "[http]") {
  if (no_curl()) return;
  int asked = 0;
  Service service(
      [&](const std::string& body) { return ++asked < 3 ? http(503, "") : http(200, lengths(body)); });
  HttpJudge judge(options(service.url()));
  CHECK(judge.judge(items(2))[1] == 1.0);
  CHECK(service.requests() == 3);
  CHECK(judge.failures() == 0);
}

TEST_CASE("a service that hangs costs its time limit, one that is not there ends the run", "[http]") {
  if (no_curl()) return;
  Service hangs([](const std::string&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
    return std::string();
  });
  HttpOptions limited = options(hangs.url());
  limited.time_limit_s = 0.2;
  limited.retries = 0;
  HttpJudge judge(limited);
  const double begin = steady_seconds();
  CHECK(!judge.judge(items(1))[0]);
  CHECK(steady_seconds() - begin < 5);
  HttpOptions absent = options("http://127.0.0.1:1/");
  absent.retries = 0;
  HttpJudge nobody(absent);
  const auto caught = error_of([&] { nobody.judge(items(64)); });
  CHECK(caught.code == 69);
  CHECK(contains(caught.text, "the service http://127.0.0.1:1/ failed 5 times and never answered: "));
}

TEST_CASE("options of a service", "[http]") {
  const HttpOptions o =
      http_options(parse_specs({R"({"type": "http", "url": "https://judge/x", "batch": 4})"}).front());
  CHECK(o.url == "https://judge/x");
  CHECK(o.batch == 4);
  CHECK(o.workers == 4);
  CHECK(error_of([] { parse_specs({R"({"type": "http"})"}); }).code == 78);
  const auto caught =
      error_of([] { http_options(parse_specs({R"({"type": "http", "url": "ftp://x"})"}).front()); });
  CHECK(caught.code == 78);
  CHECK(contains(caught.text, "reward[0].url: expected http://"));
  // Addresses that are secrets stay out of configurations and messages.
  for (const char* url : {"https://user:hunter2@judge/", "https://judge/?key=hunter2"}) {
    const auto secret = error_of(
        [&] { http_options(parse_specs({fmt::format(R"({{"type": "http", "url": "{}"}})", url)}).front()); });
    CHECK(secret.code == 78);
    CHECK(contains(secret.text, "url: env:NAME"));
    CHECK(!contains(secret.text, "hunter2"));
  }
  ::setenv("NRL_TEST_JUDGE", "https://judge/?key=hunter2", 1);
  const HttpOptions named =
      http_options(parse_specs({R"({"type": "http", "url": "env:NRL_TEST_JUDGE"})"}).front());
  CHECK(named.url == "https://judge/?key=hunter2");
  CHECK(HttpJudge(named).note() == "the service env:NRL_TEST_JUDGE");
  ::setenv("NRL_TEST_JUDGE", "hunter2", 1);
  const auto no_url = error_of(
      [] { http_options(parse_specs({R"({"type": "http", "url": "env:NRL_TEST_JUDGE"})"}).front()); });
  CHECK(no_url.code == 66);
  CHECK(!contains(no_url.text, "hunter2"));
  ::unsetenv("NRL_TEST_JUDGE");
  CHECK(contains(error_of([] { url_named("env:NRL_TEST_JUDGE", "k"); }).text,
                 "k: the environment variable NRL_TEST_JUDGE is not set"));
  const test::TemporaryDirectory dir;
  std::ofstream(dir / "url") << "https://judge/secret\r\nsecond line\n";
  CHECK(url_named("file:" + (dir / "url"), "k") == "https://judge/secret");
  CHECK(error_of([&] { url_named("file:" + (dir / "none"), "k"); }).code == 66);
}
