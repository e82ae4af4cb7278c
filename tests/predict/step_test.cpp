// The estimated time of a step, from dry runs of real layouts.

#include <algorithm>
#include <map>
#include <set>

#include "apps/plan/pipeline.h"
#include "apps/predict/run_forecast.h"
#include "apps/predict/spread.h"
#include "apps/predict/step_time.h"
#include "apps/state/model_source.h"
#include "core/base/philox.h"
#include "tests/predict/planned.h"

using namespace nrl;
using namespace nrl::predict;
using namespace nrl::test;

namespace {

DryStages stages_of(int world, const std::vector<std::string>& overrides, const ModeledDevice& device,
                    const std::vector<ClusterNode>& nodes = {}) {
  const ConfigResult config = configured(world, overrides);
  return {config.config, plan_stages(config.config, train::load_model_spec(config), world, device, 70e9),
          device, nodes};
}

StepEstimate estimated(int world, const std::vector<std::string>& overrides,
                       const machine::DeviceModel& model = h100(),
                       const std::vector<ClusterNode>& nodes = {}) {
  const ModeledDevice device(model, false, 1);
  const StepEstimate e = stages_of(world, overrides, device, nodes).estimate();
  CHECK(e.step ==
        Approx(e.compute + e.layers + e.pipeline + e.data + e.offload + e.update + e.host + e.spread));
  CHECK(e.busy.most() <= e.step);
  return e;
}

/// Seconds that the operations of layers take on their links.
double layer_seconds(const DryStages& stages) {
  const auto& stage = stages.stages().front();
  const machine::CallTimes calls(h100(), nullptr);
  const StageItems items = stage_items(stage.step, *stage.engine->plan().decoder,
                                       stage.engine->plan().position.grid, stages.rates(calls));
  double sum = 0;
  for (const Item& item : items.items)
    if (item.kind == Item::Kind::start && item.purpose == comm::Purpose::layers) sum += item.seconds;
  // Not all microbatches were dry-run.
  return sum * static_cast<double>(stages.microbatches()) / stage.step.microbatches;
}

}  // namespace

TEST_CASE("Tensor-parallel communication overlaps as the mode says", "[predict]") {
  const ModeledDevice device(h100(), false, 1);
  const auto of = [&](const char* mode) {
    return stages_of(4,
                     {"distributed.tensor_parallel_size=4", "distributed.sequence_parallel=true",
                      "policy.train_micro_batch_size=4", std::string("distributed.tp_comm_overlap=") + mode},
                     device);
  };
  const DryStages none = of("none");
  const StepEstimate alone = none.estimate();
  CHECK(alone.layers == Approx(layer_seconds(none)).epsilon(0.001));
  for (const char* mode : {"bulk", "pipelined", "ring"}) {
    CAPTURE(mode);
    const DryStages overlapped = of(mode);
    const StepEstimate e = overlapped.estimate();
    const double seconds = layer_seconds(overlapped);
    // Between the longer of computation and communication, and both.
    const double computing = e.compute + e.host;
    CHECK(computing + e.layers >= std::max(computing, seconds));
    CHECK(e.layers < 0.9 * seconds);
    CHECK(e.layers > 0);
  }
  CHECK(of("bulk").estimate().layers < alone.layers);
}

TEST_CASE("Events of a step lie between its calls, and starts have their waits", "[predict]") {
  const ModeledDevice device(h100(), false, 1);
  for (const char* overlap : {"true", "false"}) {
    CAPTURE(overlap);
    const DryStages stages =
        stages_of(4,
                  {std::string("distributed.overlap_param_gather=") + overlap,
                   "distributed.shard_strategy=optim", "policy.train_micro_batch_size=4"},
                  device);
    const auto& stage = stages.stages().front();
    std::set<int> started, waited;
    size_t calls = 0, gathers_in_passes = 0, gradients = 0;
    int64_t bytes = 0;
    for (const plan::TrafficEvent& e : stage.step.events) {
      CHECK(e.calls >= calls);
      calls = e.calls;
      if (e.what.wait) {
        CHECK(started.contains(e.what.operation));
        CHECK(waited.insert(e.what.operation).second);
        continue;
      }
      CHECK(started.insert(e.what.operation).second);
      if (e.what.purpose == comm::Purpose::weights && e.microbatch == 0) ++gathers_in_passes;
      if (e.what.purpose == comm::Purpose::gradients) {
        ++gradients;
        bytes += e.what.bytes;
      }
    }
    CHECK(calls <= stage.step.calls.size());
    CHECK((gathers_in_passes > 0) == (overlap == std::string("true")));
    // Only gathers stay in flight for the next step.
    if (overlap == std::string("false")) CHECK(started == waited);
    const auto sum = std::find_if(stage.step.traffic.begin(), stage.step.traffic.end(),
                                  [](const auto& t) { return t.purpose == comm::Purpose::gradients; });
    REQUIRE(sum != stage.step.traffic.end());
    CHECK(sum->count == static_cast<int64_t>(gradients));
    CHECK(sum->bytes == bytes);
  }
}

TEST_CASE("Gradients and weights hide behind passes as far as their links allow", "[predict]") {
  const std::vector<ClusterNode> nodes{{"a", 1}, {"b", 1}, {"c", 1}, {"d", 1}};
  const auto of = [&](const char* reduce, const char* gather, const machine::DeviceModel& model) {
    return estimated(4,
                     {std::string("distributed.overlap_grad_reduce=") + reduce,
                      std::string("distributed.overlap_param_gather=") + gather,
                      "distributed.shard_strategy=optim", "policy.train_micro_batch_size=1"},
                     model, nodes);
  };
  const StepEstimate neither = of("false", "false", h100()), gradients = of("true", "false", h100()),
                     both = of("true", "true", h100());
  CHECK(gradients.data < neither.data);
  CHECK(both.data < gradients.data);
  // Microbatches that were not dry-run count as those between, to which gathers ahead may belong.
  CHECK(both.busy.adapter() == Approx(neither.busy.adapter()).epsilon(0.1));
  // Links that are too slow to hide anything limit the step, however much overlaps.
  machine::DeviceModel slow = h100();
  slow.network.bandwidth /= 50;
  const StepEstimate limited = of("true", "true", slow);
  CHECK(limited.step >= limited.busy.adapter());
  CHECK(limited.busy.adapter() > 0.7 * limited.step);
}

TEST_CASE("Activations on their way to the host and back hide behind passes as far as the link allows",
          "[predict]") {
  const std::vector<std::string> keys{"policy.offload_activations=true", "policy.train_micro_batch_size=1"};
  const ModeledDevice device(h100(), false, 1);
  const DryStages stages = stages_of(1, keys, device);
  const auto& stage = stages.stages().front();
  std::map<memory::HostWork, double> bytes;
  std::set<int> started, waited;
  for (const plan::TrafficEvent& e : stage.step.events) {
    (e.what.wait ? waited : started).insert(e.what.operation);
    if (e.host) bytes[*e.host] += static_cast<double>(e.what.bytes);
  }
  CHECK(started == waited);
  // All that layers keep, but what the backward pass after it needs at once.
  const auto blocks = stage.engine->plan().decoder->block_bytes();
  double planned = 0;
  for (const model::Decoder::BlockBytes& b : blocks) planned += static_cast<double>(b.offloaded);
  planned *= stage.step.microbatches;
  CHECK(bytes[memory::HostWork::to_host] == bytes[memory::HostWork::from_host]);
  CHECK(bytes[memory::HostWork::to_host] <= planned);
  CHECK(bytes[memory::HostWork::to_host] >= planned * (1 - 1.0 / static_cast<double>(blocks.size())));

  const auto with = [&](double factor) {
    machine::DeviceModel model = h100();
    model.host.bandwidth *= factor;
    return estimated(1, keys, model);
  };
  const StepEstimate without = estimated(1, {"policy.train_micro_batch_size=1"}), fast = with(1000),
                     usual = with(1), slow = with(0.02);
  CHECK(without.busy.of(machine::Link::to_host) == 0);
  CHECK(without.offload == 0);
  CHECK(fast.step == Approx(without.step).epsilon(0.01));
  CHECK(usual.offload > fast.offload);
  CHECK(usual.step >= without.step);
  // Copies that hide behind nothing: each way has to wait for the link.
  CHECK(slow.step > 0.9 * (slow.busy.of(machine::Link::to_host) + slow.busy.of(machine::Link::from_host)));
  CHECK(slow.offload > 0.8 * slow.step);
}

TEST_CASE("An update on the host takes the longest of its copies and of the host's memory", "[predict]") {
  const std::vector<std::string> keys{"policy.offload_optimizer=true", "policy.train_micro_batch_size=4"};
  const StepEstimate here = estimated(1, {"policy.train_micro_batch_size=4"}), there = estimated(1, keys);
  const double longest = std::max({there.busy.of(machine::Link::to_host), there.busy.of(machine::Link::host),
                                   there.busy.of(machine::Link::from_host)});
  CHECK(there.offload >= longest);
  CHECK(there.offload < 1.1 * longest);
  CHECK(there.compute == Approx(here.compute));
  CHECK(there.update < here.update);
  // 32-bit gradients and bf16 weights go there, weights come back; the host reads and writes all of it.
  const auto parameters = static_cast<double>(
      stages_of(1, keys, ModeledDevice(h100(), false, 1)).stages().front().engine->plan().parameters.total());
  CHECK(there.busy.of(machine::Link::from_host) ==
        Approx(2 * parameters / h100().host.bandwidth).epsilon(0.1));
  CHECK(there.busy.of(machine::Link::to_host) == Approx(6 * parameters / h100().host.bandwidth).epsilon(0.1));
  CHECK(there.busy.of(machine::Link::host) > 24 * parameters / h100().host_update);
  // Half of the state is half of the work.
  std::vector<std::string> half = keys;
  half.front() = "policy.offload_optimizer=0.5";
  CHECK(estimated(1, half).offload == Approx(there.offload / 2).epsilon(0.1));
}

TEST_CASE("Stages do not wait for each other's reductions one after another", "[predict]") {
  // Every stage has its gradients in shards of 4 ranks on 4 nodes, over adapters that reductions keep busy.
  std::vector<ClusterNode> nodes;
  for (int i = 0; i < 4; ++i) nodes.push_back({"node" + std::to_string(i), 4});
  const auto of = [&](const std::string& gbit) {
    return estimated(
        16,
        {"distributed.pipeline_parallel_size=4", "distributed.shard_strategy=optim_grads",
         "policy.train_micro_batch_size=1", "cluster.gpus_per_node=4", "cluster.fabric.adapter_gbit=" + gbit},
        h100(), nodes);
  };
  for (const char* gbit : {"400", "100", "50"}) {
    CAPTURE(gbit);
    const StepEstimate e = of(gbit);
    constexpr double stages = 4, microbatches = 8;
    // The bubble of 1F1B, and the head of the last stage.
    CHECK(e.pipeline < 2 * (stages - 1) / microbatches * (e.compute + e.layers + e.data));
  }
}

TEST_CASE("Faster resources and fewer layers never make a step slower", "[predict]") {
  const std::vector<std::vector<std::string>> layouts{
      {"distributed.tensor_parallel_size=2", "distributed.pipeline_parallel_size=2"},
      {"distributed.pipeline_parallel_size=4", "distributed.virtual_pipeline_size=2"},
      {"distributed.shard_strategy=optim_grads_params", "distributed.overlap_param_gather=true"},
      {"distributed.context_parallel_size=2", "distributed.shard_strategy=optim"}};
  const std::vector<ClusterNode> nodes{{"a", 2}, {"b", 2}, {"c", 2}, {"d", 2}};
  for (const auto& layout : layouts) {
    CAPTURE(fmt::format("{}", fmt::join(layout, " ")));
    const double step = estimated(8, layout, h100(), nodes).step;
    for (double machine::DeviceModel::*rate : {&machine::DeviceModel::copy, &machine::DeviceModel::gemm}) {
      machine::DeviceModel faster = h100();
      faster.*rate *= 1.3;
      CHECK(estimated(8, layout, faster, nodes).step <= step * (1 + 1e-9));
    }
    for (machine::LinkModel machine::DeviceModel::*link :
         {&machine::DeviceModel::node, &machine::DeviceModel::network}) {
      machine::DeviceModel faster = h100();
      (faster.*link).bandwidth *= 2;
      CHECK(estimated(8, layout, faster, nodes).step <= step * (1 + 1e-9));
    }
    std::vector<std::string> fewer = layout;
    fewer.emplace_back("policy.model.num_hidden_layers=8");
    std::vector<std::string> more = layout;
    more.emplace_back("policy.model.num_hidden_layers=16");
    CHECK(estimated(8, fewer, h100(), nodes).step < estimated(8, more, h100(), nodes).step);
    // One node instead of four.
    CHECK(estimated(8, layout, h100()).step <= step * (1 + 1e-9));
  }
}

TEST_CASE("Removing a limit never makes a step slower", "[predict]") {
  constexpr const char* small =
      "{model_type: llama, vocab_size: 4096, hidden_size: 512, intermediate_size: 1024, num_hidden_layers: "
      "8, "
      "num_attention_heads: 8, num_key_value_heads: 4, max_position_embeddings: 2048}";
  const PhiloxStream random(11, "limits");
  uint64_t draws = 0;
  const auto choose = [&](std::initializer_list<int> from) {
    return from.begin()[random.bits(draws++) % from.size()];
  };
  const auto step = [&](int world, std::vector<std::string> keys, int node,
                        const machine::DeviceModel& model) {
    const ConfigResult config = configured(world, std::move(keys), small);
    const ModeledDevice device(model, false, 1);
    std::vector<ClusterNode> nodes;
    for (int i = 0; i < world / node; ++i) nodes.push_back({"node" + std::to_string(i), node});
    return estimate_step(config.config,
                         plan_stages(config.config, train::load_model_spec(config), world, device, 70e9),
                         device, nodes)
        .step;
  };
  int tried = 0, limited = 0;
  for (int attempt = 0; attempt < 400 && tried < 30; ++attempt) {
    const int tp = choose({1, 2, 4}), pp = choose({1, 2, 4}), dp = choose({1, 2, 4}), cp = choose({1, 1, 2});
    const int world = tp * pp * dp * cp, node = choose({1, 2, 4});
    if (world < 4 || world % node != 0) continue;
    std::vector<std::string> keys{fmt::format("policy.train_micro_batch_size={}", choose({1, 2})),
                                  fmt::format("distributed.tensor_parallel_size={}", tp),
                                  fmt::format("distributed.pipeline_parallel_size={}", pp),
                                  fmt::format("distributed.context_parallel_size={}", cp),
                                  fmt::format("distributed.sequence_parallel={}", tp > 1),
                                  fmt::format("distributed.overlap_grad_reduce={}", choose({0, 1}) == 1)};
    if (tp > 1 && choose({0, 1})) keys.emplace_back("distributed.tp_comm_overlap=pipelined");
    if (dp * cp > 1) {
      constexpr const char* strategies[] = {"ddp", "optim", "optim_grads", "optim_grads_params"};
      const int strategy = choose({0, 1, 2, 3});
      keys.push_back(std::string("distributed.shard_strategy=") + strategies[strategy]);
      if (strategy > 0 && choose({0, 1})) keys.emplace_back("distributed.overlap_param_gather=true");
    }
    if (pp == 2 && choose({0, 1})) keys.emplace_back("distributed.virtual_pipeline_size=2");
    std::vector<std::string> all = keys;
    all.emplace_back("policy.recompute.granularity=none");
    ConfigResult checked = load_config_text(yaml_of(small), "model.yaml", all);
    if (!checked.ok() || !validate_for_world(checked, world).empty()) continue;
    ++tried;
    CAPTURE(world, node, fmt::format("{}", fmt::join(keys, " ")));
    const std::vector<std::string> fabric{
        "cluster.fabric.oversubscription=4", fmt::format("cluster.fabric.leaf_ranks={}", node),
        "cluster.fabric.rail_optimized=true", "cluster.fabric.adapters_per_rank=0.5"};
    const auto with = [&](size_t without, const std::vector<std::string>& more) {
      std::vector<std::string> out = keys;
      for (size_t i = 0; i < fabric.size(); ++i)
        if (i != without) out.push_back(fabric[i]);
      out.insert(out.end(), more.begin(), more.end());
      return out;
    };
    const double bound = step(world, with(fabric.size(), {}), node, h100()) * (1 + 1e-9);
    // Without oversubscription, behind one leaf switch, without rails, with a whole adapter.
    for (size_t i = 0; i < fabric.size(); ++i) {
      CAPTURE(fabric[i]);
      const std::vector<std::string> removed =
          i == 2   ? std::vector<std::string>{"cluster.fabric.rail_optimized=false"}
          : i == 1 ? std::vector<std::string>{"cluster.fabric.leaf_ranks=4096"}
                   : std::vector<std::string>{};
      const double freed = step(world, with(i, removed), node, h100());
      CHECK(freed <= bound);
      limited += freed < bound * (1 - 1e-6) ? 1 : 0;
    }
    // In one NVLink domain, without a level of the network.
    CHECK(step(world, with(fabric.size(), {fmt::format("cluster.segment_size={}", world / node)}), node,
               h100()) <= bound);
    for (machine::LinkModel machine::DeviceModel::*link :
         {&machine::DeviceModel::node, &machine::DeviceModel::network}) {
      machine::DeviceModel faster = h100();
      (faster.*link).bandwidth *= 2;
      CHECK(step(world, with(fabric.size(), {}), node, faster) <= bound);
    }
    for (double machine::DeviceModel::*rate : {&machine::DeviceModel::copy, &machine::DeviceModel::gemm}) {
      machine::DeviceModel faster = h100();
      faster.*rate *= 1.3;
      CHECK(step(world, with(fabric.size(), {}), node, faster) <= bound);
    }
    // 8 layers in the model.
    CHECK(step(world, with(fabric.size(), {"policy.model.num_hidden_layers=16"}), node, h100()) >= bound);
  }
  CHECK(tried == 30);
  CHECK(limited > 30);
}

TEST_CASE("More memory never makes a step slower", "[predict]") {
  const ModeledDevice device(h100(), false, 1);
  const std::vector<std::string> keys{"policy.recompute.granularity=auto", "policy.train_micro_batch_size=2",
                                      "distributed.pipeline_parallel_size=2"};
  const ConfigResult config = load_config_text(yaml_of(llama), "model.yaml", keys);
  REQUIRE(config.ok());
  const auto planned = [&](double capacity) {
    plan::StagePlans plans = plan_stages(config.config, train::load_model_spec(config), 2, device, capacity);
    const auto bytes = static_cast<double>(plans.memory());
    return std::pair(bytes, estimate_step(config.config, std::move(plans), device, {}).step);
  };
  const auto [all, fastest] = planned(70e9);
  double last = 0;
  for (const double part : {1.1, 0.95, 0.85, 0.75, 0.65}) {
    CAPTURE(part);
    const double step = planned(part * all).second;
    CHECK(step >= last * (1 - 1e-9));
    last = step;
  }
  CHECK(last > fastest * 1.02);
}

TEST_CASE("Recomputation is chosen by times where copies belong to no step of a layer", "[predict]") {
  // Scales of delayed recipes, and of weights that are kept in FP8, are copied after the last step.
  const ModeledDevice device(h100(), false, 1);
  const auto planned = [&](const std::string& recompute, double capacity) {
    const std::vector<std::string> overrides{
        "policy.precision=bfloat16", "policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_recipe=delayed",
        "policy.recompute.granularity=" + recompute, "distributed.pipeline_parallel_size=2"};
    const ConfigResult config = load_config_text(yaml_of(llama), "model.yaml", overrides);
    REQUIRE(config.ok());
    return plan_stages(config.config, train::load_model_spec(config), 2, device, capacity).memory();
  };
  const auto all = static_cast<double>(planned("none", 70e9));
  CHECK(static_cast<double>(planned("auto", 0.98 * all)) <= 0.98 * all);
}

TEST_CASE("The slowest of many ranks is a part of its own", "[predict]") {
  const StepEstimate two = estimated(2, {"policy.train_micro_batch_size=4"});
  CHECK(estimated(1, {"policy.train_micro_batch_size=4"}).spread == 0);
  CHECK(two.spread / (two.step - two.spread) == Approx(assumed_spread * expected_maximum(2)));
}

TEST_CASE("Poor rates are slower than good ones", "[predict]") {
  const ModeledDevice device(h100(), false, 1);
  const DryStages stages = stages_of(4, {"distributed.pipeline_parallel_size=2"}, device);
  const double step = stages.estimate().step;
  CHECK(stages.estimate(machine::good).step < step);
  CHECK(stages.estimate(machine::poor).step > step);
}

TEST_CASE("FLOPs of all ranks are those of the model's formula", "[predict]") {
  struct Family {
    const char* name;
    std::string model;
    bool experts = false;
  };
  const std::string sizes =
      "vocab_size: 96, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4, num_attention_heads: 4, "
      "num_key_value_heads: 4, max_position_embeddings: 64";
  const std::vector<Family> families{
      {"llama", "{model_type: llama, " + sizes + "}"},
      {"mistral", "{model_type: mistral, sliding_window: null, " + sizes + "}"},
      {"qwen2", "{model_type: qwen2, " + sizes + "}"},
      {"qwen3", "{model_type: qwen3, head_dim: 8, " + sizes + "}"},
      {"gemma3_text", "{model_type: gemma3_text, head_dim: 8, sliding_window: 512, " + sizes + "}"},
      {"gpt2",
       "{model_type: gpt2, vocab_size: 96, n_embd: 32, n_layer: 4, n_head: 4, n_positions: 64, attn_pdrop: "
       "0, "
       "resid_pdrop: 0, embd_pdrop: 0}"},
      {"qwen3_moe",
       "{model_type: qwen3_moe, head_dim: 8, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: "
       "16, " +
           sizes + "}",
       true}};
  const ModeledDevice device(h100(), false, 1);
  const PhiloxStream random(7, "layouts");
  uint64_t draws = 0;
  const auto choose = [&](std::initializer_list<int> from) {
    return from.begin()[random.bits(draws++) % from.size()];
  };
  int tried = 0;
  for (int attempt = 0; attempt < 1400 && tried < 200; ++attempt) {
    const Family& family = families[static_cast<size_t>(attempt) % families.size()];
    const int tp = choose({1, 2, 4}), pp = choose({1, 2, 4}), dp = choose({1, 2}), cp = choose({1, 1, 2});
    const int chunks = pp > 1 && pp < 4 ? choose({1, 2}) : 1;
    std::vector<std::string> overrides{
        "policy.recompute.granularity=none",
        "policy.max_total_sequence_length=16",
        "policy.train_global_batch_size=8",
        fmt::format("policy.train_micro_batch_size={}", choose({1, 2})),
        fmt::format("distributed.tensor_parallel_size={}", tp),
        fmt::format("distributed.pipeline_parallel_size={}", pp),
        fmt::format("distributed.context_parallel_size={}", cp),
        fmt::format("distributed.shard_strategy={}", dp * cp > 1 && choose({0, 1}) ? "optim_grads" : "ddp")};
    if (chunks > 1) overrides.push_back("distributed.virtual_pipeline_size=2");
    if (tp > 1 && choose({0, 1})) overrides.push_back("distributed.sequence_parallel=true");
    // Rings have no windows.
    if (cp > 1 && std::string_view(family.name) == "gemma3_text")
      overrides.push_back("distributed.cp_comm_type=all_gather");
    const int world = tp * pp * dp * cp;
    ConfigResult config = load_config_text(yaml_of(family.model), "model.yaml", overrides);
    if (!config.ok() || !validate_for_world(config, world).empty()) continue;
    CAPTURE(family.name, fmt::format("{}", fmt::join(overrides, " ")));
    ++tried;
    const Config& c = config.config;
    const model::ModelSpec spec = train::load_model_spec(config);
    const BatchPlan batch = resolve_batch(c, world);
    double gemms = 0, attention = 0;
    for (int rank = 0; rank < world; ++rank) {
      auto plan = plan::make_run_plan(c, spec, batch, plan::grid_position(c, world, rank), device.type(), 1);
      engine::Engine engine(std::move(plan), engine::training_options(c), device.exec());
      for (const ops::Call& call : engine.dry_step(engine.objective(), true).calls) {
        if (call.cost.work == ops::Work::gemm) gemms += call.cost.flops;
        // The formula has the backward pass as twice the forward pass; kernels compute scores again.
        if (call.cost.work == ops::Work::attention && !call.cost.backward) attention += 3 * call.cost.flops;
      }
    }
    const double formula = static_cast<double>(batch.tokens_per_step) *
                           model::training_flops_per_token(spec, c.policy.max_total_sequence_length);
    CHECK(gemms + attention == Approx(formula).epsilon(0.005));
  }
  CHECK(tried == 200);
}

TEST_CASE("the kinds of work of a run are those of its step", "[predict]") {
  const ModeledDevice device(h100(), false, 1);
  for (const char* keys : {"distributed.tensor_parallel_size=4", "distributed.shard_strategy=optim"}) {
    CAPTURE(keys);
    const std::vector<std::string> overrides{keys, "policy.train_micro_batch_size=1"};
    const DryStages stages = stages_of(4, overrides, device);
    const StepEstimate e = stages.estimate();
    const Config c = configured(4, overrides).config;
    const RunFacts facts = run_facts(c, stages, device, 0, e);
    // The first microbatch overwrites gradients, and the dry run has fewer of the others.
    CHECK(facts.busy.gemm + facts.busy.attention + facts.busy.memory ==
          Approx(e.compute + e.update).epsilon(5e-3));
    CHECK(facts.busy.gemm > facts.busy.memory);
    CHECK(facts.busy.links <= facts.step);
    CHECK(facts.step == e.step);
    CHECK(facts.nodes == 1);
    CHECK(facts.tokens == 32 * 2048);
    CHECK(facts.rank_checkpoint > 0);
    const RunForecast run = forecast_run(c, facts, h100());
    CHECK(run.steps == 4);
    CHECK(run.total.kwh.value() > 0);
  }
}
