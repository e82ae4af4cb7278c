// GRPO under SIGKILL: a run that was killed while it generates, judges, scores, trains or saves continues
// from its last checkpoint with the texts, rewards, losses and weights of a run that was not.
#include <chrono>
#include <csignal>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/catch.h"
#include "tests/train/digits.h"

using namespace nrl;
using namespace nrl::test;

namespace {

class Killed : public Digits {
 public:
  /// Judges; kills the trainer at its completion number `kill-at` of the file of that name, if there is one.
  Killed() {
    std::ofstream(*this / "judge.sh") << R"sh(n=0
    while IFS= read -r line; do
      n=$((n + 1))
      if [ -e "$1/kill-at" ] && [ $n -ge "$(cat "$1/kill-at")" ]; then rm "$1/kill-at"; kill -KILL $PPID; fi
      id=${line#*\"id\":}; id=${id%%,*}
      case $line in *'"completion":"'[a-p]*) r=1 ;; *) r=0 ;; esac
      printf '{"id": %s, "reward": %s}\n' "$id" $r
    done)sh";
  }

  /// With scores of the old policy and of a reference, two steps on each batch of rollouts, and checkpoints.
  std::vector<std::string> keys() const {
    return overrides({"policy.train_global_batch_size=6", "loss_fn.reference_policy_kl_penalty=0.1",
                      "policy.optimizer.lr=0.05", "checkpointing.save_period=2", "loop.max_num_steps=8",
                      "reward=[{type: regex, name: letter, pattern: \"[a-z]\"}, {type: command, workers: 1, "
                      "network: true, command: \"exec sh " +
                          (*this / "judge.sh") + " " + path() + "\"}]"});
  }
  /// Runs the binary with `faults`; 137: it was killed.
  int start(const std::string& name, const std::string& faults) const {
    const std::string shell = "sh -c '\"$@\"; exit $?' sh env NRL_FAULTS=\"" + faults + "\" ";
    return static_cast<int>(run_ranks((faults.empty() ? "" : shell) + NRL_ONE_RANK, name, keys()).code);
  }
  void check_equal(const std::string& whole, const std::string& parts) const {
    CHECK(weights(whole, 8) == weights(parts, 8));
    for (const char* const field : {"loss", "grad_norm", "kl_penalty"})
      CHECK(values(whole, field) == values(parts, field));
    CHECK(texts(whole) == texts(parts));
  }

 private:
  std::vector<std::string> texts(const std::string& name) const {
    std::vector<std::string> all;
    for (const JsonValue& sample : samples(name)) all.push_back(sample.dump());
    return all;
  }
};

constexpr int killed = 128 + SIGKILL;

}  // namespace

TEST_CASE("a run that is killed in any phase continues bit for bit", "[grpo]") {
  const Killed bench;
  REQUIRE(bench.start("whole", "") == 0);
  REQUIRE(bench.steps("whole").size() == 8);
  // Before generation, before log-probabilities are scored, in training on new and on used rollouts, and in a
  // save.
  for (const char* const fault : {"step=5:phase=data", "step=5:phase=evaluation", "step=5:phase=computing",
                                  "step=6:phase=computing", "step=4:phase=checkpoint"}) {
    CAPTURE(fault);
    std::filesystem::remove_all(bench / "parts");
    CHECK(bench.start("parts", std::string("kill:rank=0@") + fault) == killed);
    CHECK(bench.steps("parts").size() < 8);
    REQUIRE(bench.start("parts", "") == 0);
    bench.check_equal("whole", "parts");
  }
  // While a completion of the third generation is judged.
  std::ofstream(bench / "kill-at") << 2 * 12 + 5;
  CHECK(bench.start("judged", "slow:rank=0@step=1:seconds=0.001") == killed);
  REQUIRE(bench.start("judged", "") == 0);
  bench.check_equal("whole", "judged");
}

TEST_CASE("a run that is killed at any moment, several times, continues bit for bit", "[grpo]") {
  const Killed bench;
  REQUIRE(bench.start("whole", "") == 0);
  using namespace std::chrono_literals;
  int kills = 0;
  for (int round = 0; round < 4; ++round) {
    std::vector<std::string> arguments{NRL_ONE_RANK, bench / "parts.yaml"};
    std::ofstream(bench / "parts.yaml") << bench.yaml("parts");
    for (const std::string& key : bench.keys()) arguments.push_back(key);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const std::string out = bench / "killed.txt";
    const pid_t child = fork();
    if (child == 0) {
      const int file = open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      dup2(file, 1);
      dup2(file, 2);
      execv(argv[0], argv.data());
      _exit(127);
    }
    REQUIRE(child > 0);
    // Once it trains: how far it comes differs from round to round. A run that ended before is reaped here,
    // and its process id may then be another process's.
    const size_t rows = bench.rows("parts").size();
    int status = 0;
    bool ended = false;
    for (int i = 0; i < 400 && !ended && bench.rows("parts").size() <= rows; ++i) {
      ended = waitpid(child, &status, WNOHANG) == child;
      if (!ended) std::this_thread::sleep_for(5ms);
    }
    if (!ended) {
      std::this_thread::sleep_for(std::chrono::milliseconds(7 * round));
      kill(child, SIGKILL);
      REQUIRE(waitpid(child, &status, 0) == child);
    }
    kills += WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL ? 1 : 0;
  }
  CHECK(kills > 0);
  REQUIRE(bench.start("parts", "") == 0);
  bench.check_equal("whole", "parts");
}
