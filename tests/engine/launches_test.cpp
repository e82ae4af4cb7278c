// What the ranks of a layout issue in two steps and an evaluation can come to its end under NCCL's rules.
#include <cstdlib>

#include "apps/train/start/run_check.h"
#include "apps/verify/layouts.h"
#include "parallel/comm/recording/recording.h"
#include "tests/engine/layouts.h"

using namespace nrl;
using namespace nrl::test;
using Order = comm::LaunchRules::Order;

namespace {

/// Layers for as many stages as there are ranks, of two chunks.
int layers() {
  return 2 * test_world().comm().size();
}

std::string deeper(std::string model) {
  const std::string key = "num_hidden_layers: 2";
  return model.replace(model.find(key), key.size(), fmt::format("num_hidden_layers: {}", layers()));
}

struct Outcome {
  int streams = 0;
  bool free = true, issued = true;  // comes to its end under this order
};

Outcome run(const ConfigResult& result) {
  comm::Communicator& world = test_world().comm();
  const auto recorder = std::make_shared<comm::Recorder>();
  const auto all = world.split(0, world.rank(), "world");
  const auto ranks =
      comm::make_recording(all->split(0, all->rank(), "layout"), recorder, comm::RecordingMode::log);
  Outcome out;
  Trainee trainee(*ranks, "cpu", result);
  recorder->clear();
  trainee.learn(2);
  const comm::LaunchModel model = comm::recorded_launches(world, *recorder);
  REQUIRE(model.operations() > 0);
  out.streams = model.streams();
  const std::string hang = model.hang({Order::free, model.streams()});
  INFO(hang);
  out.free = hang.empty();
  CHECK(out.free);
  out.issued = model.hang({Order::issued}).empty();
  return out;
}

/// `batch`: sequences of a step, each a microbatch.
void run_layouts(const std::string& model, int batch, int count) {
  const int ranks = test_world().comm().size();
  const std::vector<std::string> common{fmt::format("policy.train_global_batch_size={}", batch),
                                        "policy.train_micro_batch_size=1", "distributed.bucket_size_mb=0.005",
                                        "policy.optimizer.eps=1e-3"};
  const ConfigResult base = tiny_config("cpu", common, model);
  const verify::Layouts layouts = verify::all_layouts(base.config, layers(), ranks);
  const auto config = [&](size_t i) {
    std::vector<std::string> overrides = common;
    const std::vector<std::string> own = layouts.overrides(i);
    overrides.insert(overrides.end(), own.begin(), own.end());
    ConfigResult result = load_tiny("cpu", overrides, model);
    train::check_run(result, {.world = ranks, .local = ranks, .files = false});
    return result;
  };
  const verify::Sample sample = verify::take_sample(layouts, count, [&](size_t i) {
    try {
      return config(i).ok();
    } catch (const Error& e) {  // found while planning the memory
      if (e.code() == Exit::internal) throw;
      return false;
    }
  });
  int streams = 0, ordered = 0;
  for (const size_t i : sample.layouts) {
    INFO(layouts.name(i));
    const Outcome out = run(config(i));
    streams = std::max(streams, out.streams);
    ordered += !out.issued;
  }
  if (std::getenv("NRL_TEST_PRINT") && test_world().comm().rank() == 0)
    fmt::print(
        "{} ranks: {} layouts, up to {} groups and channels of a rank; {} would hang in order of issue\n",
        ranks, sample.layouts.size(), streams, ordered);
  CHECK(std::ssize(sample.layouts) == count);
}

}  // namespace

// Of uneven numbers of microbatches, which are the hard ones for pipelines; and of numbers that divide.
TEST_CASE("random layouts of a dense model end under NCCL's rules", "[launches]") {
  run_layouts(deeper(small_llama), 18, 100 / test_world().comm().size());
}

TEST_CASE("random layouts of a model with experts end under NCCL's rules", "[launches]") {
  run_layouts(deeper(small_qwen2_moe), 16, 100 / test_world().comm().size());
}
