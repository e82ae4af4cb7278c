// Reward commands, kind and hostile.
#include "apps/reward/command.h"

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include <signal.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::reward;

namespace {

/// Answers with the length of the completion; special completions do harm.
const std::string worker = R"(while IFS= read -r line; do
  id=${line#*\"id\":}; id=${id%%,*}
  c=${line#*\"completion\":\"}; c=${c%%\"*}
  case $c in
    die) echo last words >&2; exit 3 ;;
    hang) sleep 100 ;;
    garbage) echo hello; continue ;;
    flood) yes ;;
    noise) i=0; while [ $i -lt 300 ]; do echo "a line of errors" >&2; i=$((i + 1)); done ;;
    null) printf '{"id": %s, "reward": null}\n' "$id"; continue ;;
    other) printf '{"id": 99, "reward": 1}\n'; continue ;;
    nan) printf '{"id": %s, "reward": 1e999}\n' "$id"; continue ;;
    twice) printf '{"id": %s, "reward": 1}\n{"id": %s, "reward": 1}\n' "$id" "$id"; continue ;;
  esac
  printf '{"id": %s, "reward": %s}\n' "$id" "${#c}"
done)";

const JsonValue record = JsonValue::object({{"answer", "a"}});

std::vector<Item> items(const std::vector<std::string>& completions) {
  std::vector<Item> out;
  for (const std::string& c : completions)
    out.push_back(
        {.record = &record, .where = "f:1", .prompt = "p", .completion = c, .tokens = 1, .ended = true});
  return out;
}

CommandOptions options(double limit = 5, int64_t workers = 2) {
  return {.command = worker,
          .workers = workers,
          .time_limit_s = limit,
          .memory_mib = 4096,
          .network = false,
          .log = {}};
}

}  // namespace

TEST_CASE("reward commands: answers in the order of the completions", "[reward]") {
  CommandWorkers command(options());
  std::vector<std::string> completions;
  for (int i = 0; i < 50; ++i) completions.emplace_back(static_cast<size_t>(i % 7 + 1), 'x');
  for (int round = 0; round < 2; ++round) {
    const auto rewards = command.judge(items(completions));
    REQUIRE(rewards.size() == completions.size());
    for (size_t i = 0; i < rewards.size(); ++i)
      CHECK(rewards[i] == static_cast<double>(completions[i].size()));
  }
  CHECK(command.failures() == 0);
  CHECK(command.judge({}).empty());
}

TEST_CASE("reward commands: harm costs the completion that does it, and no other", "[reward]") {
  CommandWorkers command(options(1));
  const std::vector<std::string> completions = {"xx",    "die",   "xxx", "hang", "garbage", "xx",  "flood",
                                                "noise", "other", "nan", "null", "twice",   "xxxx"};
  const auto rewards = command.judge(items(completions));
  for (size_t i = 0; i < completions.size(); ++i) {
    CAPTURE(completions[i]);
    if (completions[i].front() == 'x' || completions[i] == "noise")
      CHECK(rewards[i] == static_cast<double>(completions[i].size()));
    else
      CHECK_FALSE(rewards[i].has_value());
  }
  CHECK(command.failures() == 7);
}

TEST_CASE("reward commands: one that never answers ends the run with its last words", "[reward]") {
  CommandOptions failing = options();
  failing.command = "echo no module named judge >&2; exit 1";
  CommandWorkers command(failing);
  try {
    command.judge(items(std::vector<std::string>(20, "x")));
    FAIL("it went on");
  } catch (const Error& e) {
    CHECK(e.code() == Exit::unavailable);
    CHECK_THAT(e.what(), ContainsSubstring("no module named judge"));
  }
}

TEST_CASE("reward commands: nothing of ours is given to them, and nothing of them is left", "[reward]") {
  const nrl::test::TemporaryDirectory dir;
  const std::string pids = dir.path() + "/pids", environment = dir.path() + "/environment";
  CommandOptions leaving = options(2, 1);
  leaving.command = "env > " + environment + "; sleep 200 & echo $! > " + pids + "; " + worker;
  leaving.log = dir.path() + "/reward.log";
  setenv("NRL_SECRET", "hidden", 1);
  {
    CommandWorkers command(leaving);
    CHECK(command.judge(items({"x", "noise"}))[0] == 1.0);
    CHECK(kill(static_cast<pid_t>(std::stoi(read_file(pids, 1 << 20))), 0) == 0);
  }
  unsetenv("NRL_SECRET");
  const auto child = static_cast<pid_t>(std::stoi(read_file(pids, 1 << 20)));
  for (int i = 0; i < 100 && kill(child, 0) == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(kill(child, 0) != 0);
  CHECK_THAT(read_file(environment, 1 << 20), !ContainsSubstring("NRL_SECRET"));
  CHECK_THAT(read_file(leaving.log, 1 << 20), ContainsSubstring("a line of errors"));
}

TEST_CASE("reward commands: no network where the system can deny it", "[reward]") {
  if (!can_deny_network()) {
    WARN("this system does not let a user make a network namespace: not tested");
    return;
  }
  CommandOptions asking = options(5, 1);
  // /proc/net/dev has two lines of titles and one of the loopback device.
  asking.command =
      "n=$(wc -l < /proc/net/dev); while IFS= read -r line; do id=${line#*\\\"id\\\":}; "
      "printf '{\"id\": %s, \"reward\": %s}\\n' \"${id%%,*}\" \"$n\"; done";
  CommandWorkers command(asking);
  CHECK(command.without_network());
  CHECK(command.judge(items({"x"}))[0] == 3.0);
}
