// The stability guard in whole runs.
#include <algorithm>

#include "tests/catch.h"
#include "tests/train/training_run.h"

using namespace nrl;
using namespace nrl::test;

namespace {

/// Runs on a corpus of one repeated pattern, which is learned soon, with other tokens in one place.
class Spiky : public Workbench {
 public:
  static constexpr int64_t steps = 40, windows = steps * global;

  explicit Spiky() {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i <= windows * sequence; ++i) tokens.push_back(static_cast<int32_t>(i % 4));
    write_tokens("corpus", tokens);
    for (int64_t i = 0; i < sequence; ++i) {
      const int64_t at = planted * sequence + i;
      tokens[static_cast<size_t>(at)] = static_cast<int32_t>(100 + 31 * i % 100);
    }
    write_tokens("spiky", tokens);
  }
  static constexpr int64_t planted = 70;  // window

  Finished train(const std::string& name, const std::string& data, std::vector<std::string> keys) const {
    keys.insert(keys.begin(), {"data.train.data_path=" + *this / data, "pretrain.max_num_steps=40",
                               "monitoring.stability.window=10"});
    return run(name, keys);
  }
  /// Steps whose loss is far above the ones before them.
  std::vector<int64_t> jumps(const std::string& name) const {
    const auto loss = values(name, "loss");
    std::vector<int64_t> out;
    for (size_t i = 10; i < loss.size(); ++i)
      if (loss[i] > 2 * loss[i - 1]) out.push_back(static_cast<int64_t>(i) + 1);
    return out;
  }
};

}  // namespace

TEST_CASE("a spike of the loss is a warning and an alert, and a healthy run has neither") {
  const Spiky bench;
  const std::vector<std::string> warn{"monitoring.stability.on_instability=warn",
                                      "monitoring.alerting.enabled=true"};
  const Finished spiky = bench.train("spiky", "spiky", warn);
  INFO(spiky.out + spiky.err);
  REQUIRE(spiky.code == Exit::ok);
  const auto jumps = bench.jumps("spiky");
  REQUIRE(!jumps.empty());
  const std::string expected = fmt::format("step {}: loss ", jumps.front());
  CHECK(contains(spiky.out + spiky.err, expected));
  const std::string alerts = bench.read("spiky/logs/alerts.jsonl");
  CHECK(contains(alerts, "\"rule\":\"loss_spike\""));
  CHECK(contains(alerts, "loss_spike: " + expected));

  const Finished healthy = bench.train("healthy", "corpus", warn);
  INFO(healthy.out + healthy.err);
  CHECK(healthy.code == Exit::ok);
  CHECK(bench.jumps("healthy").empty());
  CHECK(!contains(healthy.out + healthy.err, "by the trend"));
}
