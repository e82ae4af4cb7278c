// Shares in the writing of checkpoints, and the snapshot of a rank's share.
#include "apps/plan/shares.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "apps/model/families/hf_config.h"
#include "apps/plan/memory_check.h"
#include "apps/plan/snapshot.h"
#include "core/io/safetensors.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::plan;

namespace {

std::vector<int64_t> bytes_by_rank(const Shares& shares, const std::vector<int64_t>& things,
                                   int64_t element_bytes) {
  std::vector<int64_t> out;
  for (size_t rank = 0; rank < shares.end.size(); ++rank) {
    int64_t bytes = (shares.end[rank] - (rank == 0 ? 0 : shares.end[rank - 1])) * element_bytes;
    for (size_t i = 0; i < things.size(); ++i)
      if (shares.thing[i] == static_cast<int>(rank)) bytes += things[i];
    out.push_back(bytes);
  }
  return out;
}

struct Grid {
  std::string strategy;
  int world, replicas = 1, tensor = 1, stages = 1;
  std::vector<std::string> more = {};
};

std::unique_ptr<RunPlan> plan_of(const Grid& grid, int rank, const ConfigResult& result) {
  return make_run_plan(
      result.config,
      model::parse_model_config(
          R"({"model_type":"llama","vocab_size":8192,"hidden_size":256,"intermediate_size":768,
      "num_hidden_layers":4,"num_attention_heads":8,"num_key_value_heads":4,"max_position_embeddings":2048,
      "tie_word_embeddings":true})",
          "test"),
      resolve_batch(result.config, grid.world), grid_position(result.config, grid.world, rank),
      DeviceType::cpu, 1);
}

ConfigResult config_of(const Grid& grid) {
  std::vector<std::string> overrides{"distributed.shard_strategy=" + grid.strategy,
                                     fmt::format("distributed.dp_replicate_size={}", grid.replicas),
                                     fmt::format("distributed.tensor_parallel_size={}", grid.tensor),
                                     fmt::format("distributed.pipeline_parallel_size={}", grid.stages)};
  overrides.insert(overrides.end(), grid.more.begin(), grid.more.end());
  ConfigResult result = load_config_text(
      "policy:\n"
      "  model: {model_type: llama}\n"
      "  train_micro_batch_size: 1\n"
      "  train_global_batch_size: 16\n"
      "  max_total_sequence_length: 64\n"
      "pretrain: {max_num_steps: 10}\n"
      "checkpointing: {save_period: 5}\n"
      "data: {train: {data_path: corpus}}\n",
      "t.yaml", overrides);
  INFO(render(result.diagnostics));
  REQUIRE(result.ok());
  return result;
}

}  // namespace

TEST_CASE("shares are about equal, cover everything, and none is smaller than the least", "[shares]") {
  const std::vector<int64_t> things{700, 20, 30, 300, 300, 40, 10, 100};
  const int64_t in_things = std::accumulate(things.begin(), things.end(), int64_t{0});
  for (const int holders : {1, 2, 3, 8, 64})
    for (const int64_t elements : {0, 64, 1000, 4096})
      for (const int64_t least : {int64_t{1}, int64_t{500}, int64_t{1} << 40}) {
        CAPTURE(holders, elements, least);
        const Shares shares = divide(things, elements, 8, holders, least, 1);
        REQUIRE(shares.end.size() == static_cast<size_t>(holders));
        REQUIRE(shares.end.back() == elements);
        REQUIRE(std::is_sorted(shares.end.begin(), shares.end.end()));
        const std::vector<int64_t> bytes = bytes_by_rank(shares, things, 8);
        const int64_t all = in_things + elements * 8;
        REQUIRE(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}) == all);
        const auto writers = std::min<int64_t>(std::max<int64_t>(all / least, 1), holders);
        const auto most = *std::max_element(bytes.begin(), bytes.end());
        // A thing is not cut; elements are.
        REQUIRE(most <= std::max<int64_t>(all / writers + 300, 700));
        if (elements == 4096 && holders == 8) REQUIRE(most <= all / writers + 8);
        REQUIRE(std::count_if(bytes.begin(), bytes.end(), [](int64_t b) { return b > 0; }) <= writers);
      }
  // Two of eight ranks, four apart: on two hosts of four.
  const Shares spread = divide({100, 100}, 0, 0, 8, 100, 1);
  CHECK(spread.thing == std::vector<int>{0, 4});
}

TEST_CASE("every element is saved by exactly one rank, and the bytes are balanced", "[shares]") {
  const Grid grids[] = {{"ddp", 1},
                        {"ddp", 4},
                        {"optim", 4},
                        {"optim", 4, 2},
                        {"optim_grads", 4},
                        {"optim_grads_params", 4},
                        {"optim_grads_params", 4, 2},
                        {"ddp", 4, 1, 2},
                        {"optim", 8, 2, 2},
                        {"ddp", 4, 1, 1, 2},
                        {"ddp", 4, 1, 1, 1, {"policy.offload_optimizer=0.4"}},
                        {"ddp", 2, 1, 1, 1, {"policy.precision=bfloat16"}}};
  for (const Grid& grid : grids) {
    CAPTURE(grid.strategy, grid.world, grid.replicas, grid.tensor, grid.stages);
    const ConfigResult result = config_of(grid);
    std::map<std::string, std::vector<int>> weights, state;  // times that an element of a tensor is saved
    std::vector<int64_t> bytes;
    for (int rank = 0; rank < grid.world; ++rank) {
      const auto plan = plan_of(grid, rank, result);
      const auto count = [&](auto& times, const OwnedRange& r) {
        plan->parameters.all[r.parameter].for_each_part(
            r.offset, r.count, [&](const model::Part& part, int64_t begin, int64_t end) {
              std::vector<int>& of = times[part.name];
              of.resize(static_cast<size_t>(*checked_product(part.global)));
              for (int64_t i = begin; i < end; ++i) ++of[part.element(i)];
            });
      };
      for (const ParamGroup& g : plan->groups) {
        for (const OwnedRange& r : g.saved) count(state, r);
        for (size_t i = 0; i < g.parameters.size(); ++i) {
          const int p = g.parameters[i];
          if (!std::binary_search(g.saved_weights.begin(), g.saved_weights.end(), p)) continue;
          if (!g.weights_sharded)
            count(weights, {.parameter = p, .count = plan->parameters.all[p].numel()});
          else
            for (const OwnedRange& r : g.owned)
              if (r.parameter == p) count(weights, r);
        }
      }
      bytes.push_back(snapshot_bytes(result.config, *plan));
    }
    for (const auto& times : {weights, state}) {
      REQUIRE(times.size() == 4 * 9 + 2);
      for (const auto& [name, of] : times) {
        CAPTURE(name);
        REQUIRE(std::all_of(of.begin(), of.end(), [](int n) { return n == 1; }));
      }
    }
    // None has more than its part and what the least shares of weights and state make of it.
    const int64_t sum = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
    const auto [least, most] = std::minmax_element(bytes.begin(), bytes.end());
    if (grid.stages == 1) CHECK(*most <= sum / grid.world + 2 * GroupOptions().least_saved);
    // Replicas that hold all, which is the case of most bytes to divide.
    if (grid.strategy == "ddp" && grid.tensor == 1 && grid.stages == 1 && grid.more.empty())
      CHECK(static_cast<double>(*most) < 1.05 * static_cast<double>(*least));
  }
}

TEST_CASE("a run takes snapshots if it is told to, or by itself where they fit", "[shares]") {
  const auto takes = [](const std::vector<std::string>& keys, double capacity) {
    const Grid grid{"ddp", 1, 1, 1, 1, keys};
    const ConfigResult result = config_of(grid);
    return takes_snapshot(result.config, *plan_of(grid, 0, result), capacity);
  };
  const Grid grid{"ddp", 1};
  const ConfigResult result = config_of(grid);
  const auto plan = plan_of(grid, 0, result);
  const double needed = total(planned_memory(result.config, *plan)),
               snapshot = static_cast<double>(snapshot_bytes(result.config, *plan));
  // Weights and two moments of fp32.
  CHECK(snapshot == Approx(12.0 * static_cast<double>(plan->whole().total())).epsilon(0.001));
  CHECK(takes({}, 0));
  CHECK(takes({}, needed + snapshot));
  CHECK(!takes({}, needed + snapshot - 1));
  CHECK(takes({"checkpointing.is_async=true"}, 1));
  CHECK(!takes({"checkpointing.is_async=false"}, 0));
  CHECK(!takes({"checkpointing.save_period=10"}, 0));
  CHECK(!takes({"checkpointing.save_period=0"}, 0));
  CHECK(!takes({"checkpointing.enabled=false"}, 0));
  CHECK(!takes({"policy.offload_optimizer=0.5"}, 0));
  const ConfigResult told = config_of({"ddp", 1, 1, 1, 1, {"checkpointing.is_async=true"}});
  CHECK(total(planned_memory(told.config, *plan)) == needed + snapshot);
  const ConfigResult weights_only = config_of({"ddp", 1, 1, 1, 1, {"checkpointing.save_optimizer=false"}});
  CHECK(static_cast<double>(snapshot_bytes(weights_only.config, *plan)) ==
        Approx(4.0 * static_cast<double>(plan->whole().total())).epsilon(0.001));
}
