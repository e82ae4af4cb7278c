// Statistics of layers: every layout has the numbers of one rank, their sum is the gradient norm, and no bit
// of training changes.
#include "apps/engine/layer_statistics.h"

#include <cmath>
#include <string>
#include <vector>

#include "tests/engine/layouts.h"

using namespace nrl;
using namespace nrl::test;

namespace {

using Keys = std::vector<std::string>;

struct Looked {
  monitor::LayerTable table;
  double grad_norm = 0;

  double at(const std::string& layer, const std::string& column) const {
    for (const monitor::LayerTable::Column& c : table.columns)
      for (size_t l = 0; l < table.layers.size(); ++l)
        if (c.name == column && table.layers[l] == layer) return c.values[l];
    FAIL("no " + column + " of " + layer);
    return 0;
  }
};

/// A step with statistics.
Looked look(Trainee& trainee, comm::Communicator& ranks, engine::LayerStatistics& statistics) {
  statistics.begin();
  trainee.adjust = [&](engine::StepInput& step) {
    step.eager = true;
    step.gradients_reduced = [&] { statistics.gradients_reduced(); };
  };
  const engine::StepResult result = trainee.train_step();
  statistics.end();
  trainee.adjust = nullptr;
  REQUIRE(!result.skipped);
  std::vector<double> sums = statistics.sums();
  ranks.all_reduce(std::span(sums), comm::Reduce::sum);
  return {statistics.table(sums, result.used_loss_scale), result.grad_norm};
}

void require_sum(const Looked& looked) {
  double squares = 0;
  for (const double norm : looked.table.columns.front().values)
    if (!std::isnan(norm)) squares += norm * norm;
  CHECK(std::sqrt(squares) == Approx(looked.grad_norm).epsilon(1e-9));
}

/// Steps 1 and 3 have the same statistics on all ranks and on each alone; step 2 has none.
void require_same(const std::string& device, const std::string& model, const Keys& layout, double tolerance) {
  CAPTURE(device, model, layout);
  Keys common{"policy.precision=float32", "policy.train_global_batch_size=8", "policy.optimizer.eps=1e-3",
              "logger.layer_stats_period=2"};
  comm::Communicator& world = test_world().comm();
  const auto alone_ranks = world.split(world.rank(), 0, "alone");
  Trainee alone(*alone_ranks, device, tiny_config(device, common, model));
  common.insert(common.end(), layout.begin(), layout.end());
  Trainee together(world, device, tiny_config(device, common, model));
  engine::LayerStatistics one(alone.engine()), all(together.engine());
  for (int step = 1; step <= 3; ++step) {
    if (step == 2) {
      alone.train_step();
      together.train_step();
      continue;
    }
    const Looked want = look(alone, *alone_ranks, one), got = look(together, world, all);
    require_sum(want);
    require_sum(got);
    REQUIRE(got.table.layers == want.table.layers);
    REQUIRE(got.table.columns.size() == 5);
    for (size_t c = 0; c < got.table.columns.size(); ++c)
      for (size_t l = 0; l < got.table.layers.size(); ++l) {
        CAPTURE(step, got.table.layers[l], got.table.columns[c].name);
        const double a = got.table.columns[c].values[l], b = want.table.columns[c].values[l];
        const bool block = l > 0 && l + 1 < got.table.layers.size();
        CHECK(std::isnan(a) == std::isnan(b));
        CHECK((!std::isnan(b) || !block));  // blocks have all numbers
        if (!std::isnan(b)) CHECK(a == Approx(b).epsilon(tolerance));
      }
  }
}

}  // namespace

TEST_CASE("every layout has the statistics of one rank") {
  const int n = test_world().size();
  const std::string tp = "distributed.tensor_parallel_size=2", pp = "distributed.pipeline_parallel_size=2";
  if (n == 1) {
    require_same("cpu", small_llama, {"policy.recompute.granularity=full"}, 1e-12);
    require_same("cuda", small_gpt2, {}, 1e-6);
  } else if (n == 2) {
    for (const char* device : {"cpu", "cuda"}) require_same(device, small_llama, {tp}, 1e-5);
    require_same("cpu", small_gpt2, {tp, "distributed.sequence_parallel=true"}, 1e-5);
    require_same("cpu", small_gpt2, {pp}, 1e-5);
    require_same("cpu", small_qwen3, {"distributed.shard_strategy=optim"}, 1e-5);
    require_same("cpu", small_llama, {"distributed.shard_strategy=optim_grads_params"}, 1e-5);
    require_same("cpu", small_llama, {"distributed.context_parallel_size=2"}, 1e-5);
    require_same("cpu", small_qwen2_moe, {"distributed.expert_parallel_size=2"}, 1e-5);
  } else {
    require_same("cpu", small_llama, {pp, tp}, 1e-5);
    require_same("cpu", small_qwen3, {pp, "distributed.shard_strategy=optim_grads_params"}, 1e-5);
  }
}

TEST_CASE("statistics of layers agree with weights and activations") {
  if (test_world().size() > 1) return;
  comm::Communicator& world = test_world().comm();
  Trainee trainee(
      world, "cpu",
      tiny_config("cpu", {"policy.train_global_batch_size=4", "logger.layer_stats_period=1"}, small_llama));
  engine::Engine& engine = trainee.engine();
  double squares = 0, embedding = 0;
  const model::ParameterList& parameters = engine.plan().parameters;
  const std::vector<Tensor> weights = engine.weights();
  const auto sum = [](const Tensor& t, int64_t first, int64_t count) {
    double out = 0;
    for (int64_t i = first; i < first + count; ++i)
      out += std::pow(static_cast<double>(t.ptr<float>()[i]), 2);
    return out;
  };
  for (const int p : parameters.layers[1].all()) squares += sum(weights[p], 0, weights[p].numel());
  const Tensor& table = weights[static_cast<size_t>(parameters.embedding)];
  int64_t tokens = 0;
  for (const int32_t id : trainee.tokens_of_step(1)) {
    embedding += sum(table, id * table.dim(1), table.dim(1));
    ++tokens;
  }
  engine::LayerStatistics statistics(engine);
  const Looked looked = look(trainee, world, statistics);
  CHECK(looked.table.layers == Keys{"embedding", "0", "1", "head"});
  CHECK(looked.at("1", "weight_norm") == Approx(std::sqrt(squares)).epsilon(1e-9));
  CHECK(looked.at("0", "residual_rms") ==
        Approx(std::sqrt(embedding / static_cast<double>(tokens * table.dim(1)))).epsilon(1e-9));
  CHECK(std::isnan(looked.at("embedding", "mlp_rms")));
  CHECK(looked.at("1", "mlp_rms") > 0);
  CHECK(looked.at("1", "residual_rms") > looked.at("0", "residual_rms"));
}

TEST_CASE("statistics of layers change no bit of training, and are no memory without their key") {
  comm::Communicator& world = test_world().comm();
  const Keys keys{"policy.train_global_batch_size=8"};
  Keys with = keys;
  with.emplace_back("logger.layer_stats_period=1");
  Trainee plain(world, "cpu", tiny_config("cpu", keys, small_llama)),
      looked(world, "cpu", tiny_config("cpu", with, small_llama));
  CHECK(!plain.engine().layer_sums());
  CHECK(plain.engine().plan().layer_sums == -1);
  engine::LayerStatistics statistics(looked.engine());
  for (int step = 0; step < 3; ++step) {
    const double norm = plain.train_step().grad_norm;
    CHECK(look(looked, world, statistics).grad_norm == norm);
  }
}
