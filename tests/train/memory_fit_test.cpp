// Changes and smaller microbatches with which a run fits into memory.

#include "apps/train/start/memory_fit.h"

#include <algorithm>
#include <numeric>

#include "apps/state/model_source.h"
#include "apps/train/start/decide.h"
#include "apps/train/start/run_config.h"
#include "core/base/text.h"
#include "core/device/cpu/memory.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::train;

namespace {

const std::string yaml =
    "device: cpu\n"
    "policy:\n"
    "  model: {model_type: llama, vocab_size: 4096, hidden_size: 256, intermediate_size: 704,\n"
    "          num_hidden_layers: 4, num_attention_heads: 4}\n"
    "  train_global_batch_size: 64\n"
    "  train_micro_batch_size: 16\n"
    "  max_total_sequence_length: 256\n"
    "  recompute: {granularity: selective}\n"
    "pretrain: {max_num_steps: 10}\n"
    "data: {train: {data_path: corpus}}\n";

ConfigResult config(const std::vector<std::string>& overrides = {}) {
  ConfigResult result = load_config_text(yaml, "t.yaml", overrides);
  INFO(render(result.diagnostics));
  REQUIRE(result.ok());
  return result;
}

/// `memory`: of a rank, which recomputation of auto goes by; 0: enough.
double need(const ConfigResult& result, int world, double memory = 0) {
  return needed_memory(result.config, load_model_spec(result), resolve_batch(result.config, world), world,
                       DeviceType::cpu, 1, 1e18, static_cast<size_t>(memory));
}

std::vector<FittingChange> changes(const ConfigResult& result, int world, double capacity) {
  return changes_that_fit(result, world, DeviceType::cpu, 1, capacity, static_cast<size_t>(capacity));
}

/// The decision for one rank of this machine, of which `ranks` share the memory, with its messages.
struct Decided : Decision {
  Diagnostics messages;
};
Decided decided(const ConfigResult& result, int ranks) {
  const model::ModelSpec spec = load_model_spec(result);
  const DecisionFacts facts = planned_facts(result, spec, 1, ranks, 0);
  const Decision d = decide_alone(facts);
  return {d, explain(facts, d)};
}

}  // namespace

TEST_CASE("changes that are said to fit do fit", "[fit]") {
  for (const int world : {1, 2, 4}) {
    const ConfigResult result = config();
    const double all = need(result, world);
    for (const double share : {0.9, 0.6, 0.3}) {
      CAPTURE(world, share);
      const auto found = changes(result, world, share * all);
      if (share > 0.5) CHECK(found.size() == 3);
      for (const FittingChange& change : found) {
        const ConfigResult changed = config(change.overrides);
        const double bytes = need(changed, world, share * all);
        CAPTURE(change.overrides);
        CHECK(bytes == change.bytes);
        CHECK(bytes <= share * all);
      }
    }
    // The largest microbatch that fits comes first, and the next larger one does not fit.
    const auto first = changes(result, world, 0.7 * all).front();
    REQUIRE(first.overrides.size() == 1);
    CHECK(first.overrides.front() == "policy.train_micro_batch_size=8");
  }
  // Nothing makes a model fit into a kilobyte.
  CHECK(changes(config(), 2, 1024).empty());
}

TEST_CASE("what fits is named in the order of what it costs", "[fit]") {
  // Where the user keeps everything, auto recomputes as little as will do.
  const std::vector<std::string> keeps{"policy.recompute.granularity=none",
                                       "policy.train_micro_batch_size=1"};
  const auto some = changes(config(keeps), 1, 0.9 * need(config(keeps), 1));
  REQUIRE(!some.empty());
  CHECK(some.front().overrides == std::vector<std::string>{"policy.recompute.granularity=auto"});
  // Gathered inputs are kept unless the modules name them.
  const std::vector<std::string> names{
      "policy.recompute.modules=[core_attn]", "policy.train_micro_batch_size=1",
      "distributed.tensor_parallel_size=2", "distributed.sequence_parallel=true"};
  const double whole = need(config(names), 2);
  const auto gathers = changes(config(names), 2, whole - 1);
  REQUIRE(!gathers.empty());
  CHECK(gathers.front().overrides ==
        std::vector<std::string>{"policy.recompute.modules=[core_attn, gather]"});
  CHECK(gathers.front().bytes < whole);
  // FP8 copies of weights: in place of weights, or where the recipe has none such, for each GEMM.
  for (const auto& [recipe, wanted] : {std::pair{"tensorwise", "policy.fp8_cfg.fp8_param=true"},
                                       {"mxfp8", "policy.fp8_cfg.cache_weights=false"}}) {
    CAPTURE(recipe);
    const std::vector<std::string> rounds{
        "policy.fp8_cfg.enabled=true",        std::string("policy.fp8_cfg.fp8_recipe=") + recipe,
        "policy.model.intermediate_size=768", "policy.precision=bfloat16",
        "policy.recompute.granularity=full",  "policy.train_micro_batch_size=1"};
    const double all = need(config(rounds), 1);
    const auto found = changes(config(rounds), 1, all - 1);
    REQUIRE(!found.empty());
    CHECK(found.front().overrides == std::vector<std::string>{wanted});
    CHECK(found.front().bytes < all);
  }
}

TEST_CASE("a problem with memory lists the plan, what is there and three changes", "[fit]") {
  ConfigResult result = config();
  const auto ranks = static_cast<int>(static_cast<double>(cpu::machine_memory()) / (0.65 * need(result, 4)));
  check_run(result, {.world = 4, .local = ranks, .files = false});
  CHECK(result.exit_code() == Exit::out_of_memory);
  const std::string text = render(result.diagnostics);
  INFO(text);
  CHECK(text.find("needed per rank: weights 20.4 MiB, gradients 20.4 MiB, optimizer 40.8") !=
        std::string::npos);
  CHECK(text.find("; available: ") != std::string::npos);
  size_t fits = 0;
  for (size_t at = text.find("fits: "); at != std::string::npos; at = text.find("fits: ", at + 1)) ++fits;
  CHECK(fits == 3);
}

TEST_CASE("reduce_batch takes the largest microbatch that fits", "[fit]") {
  for (const char* accumulation : {"null", "4"}) {
    ConfigResult result = config(
        {"memory.on_oom=reduce_batch", std::string("policy.gradient_accumulation_steps=") + accumulation});
    const auto ranks = static_cast<int>(static_cast<double>(cpu::machine_memory()) / (0.7 * need(result, 1)));
    check_run(result, {.world = 1, .local = ranks, .files = false});
    CHECK(result.diagnostics.empty());  // it fits
    const Decided d = decided(result, ranks);
    INFO(render(d.messages));
    REQUIRE(d.fits);
    REQUIRE(d.messages.size() == 1);
    CHECK(d.messages[0].message ==
          "memory.on_oom: a microbatch of 16 does not fit; the run takes 8 sequences and accumulates 8 "
          "microbatches instead of 4: steps have the same samples and tokens");
    CHECK(d.batch.micro == 8);
    CHECK(d.batch.accumulation == 8);
    CHECK(d.batch.global == 64);
    CHECK(resolve_batch(result.config, 1).micro == 16);  // the configuration stays as it is
    // A file that repeats the run has it.
    const ConfigResult again = load_config_text(dump_resolved(with_microbatch(result, d.batch)), "t.yaml");
    CHECK(resolve_batch(again.config, 1).micro == 8);
    CHECK(resolve_batch(again.config, 1).accumulation == 8);
  }
  ConfigResult none = config({"memory.on_oom=reduce_batch"});
  check_run(none, {.world = 1, .local = 1 << 20, .files = false});
  CHECK(none.exit_code() == Exit::out_of_memory);
  CHECK(render(none.diagnostics).find("A microbatch of one sequence cannot be made smaller") !=
        std::string::npos);
}

TEST_CASE("a microbatch of auto stays within memory.max_memory", "[fit]") {
  const std::vector<std::string> automatic{"policy.train_micro_batch_size=auto"};
  const double usual = need(config(automatic), 1);  // of 32 sequences, by the rule of 8192 tokens
  const auto chosen = [&](double share, const std::string& max_memory,
                          const std::string& recompute = "selective") {
    ConfigResult result = config(
        {automatic[0], "memory.max_memory=" + max_memory, "policy.recompute.granularity=" + recompute});
    const auto ranks = static_cast<int>(static_cast<double>(cpu::machine_memory()) / (share * usual));
    const Decided d = decided(result, ranks);
    INFO(render(d.messages));
    CHECK(d.fits);
    const int64_t micro = d.batch.micro;
    CHECK(d.messages.size() == (micro == 32 ? 0U : 1U));
    if (micro == 32) return micro;
    CHECK(d.messages[0].key == "policy.train_micro_batch_size");
    CHECK(
        d.messages[0].message ==
        fmt::format("policy.train_micro_batch_size: auto takes {} sequences and accumulates {} microbatches, "
                    "because 32 sequences do not fit",
                    micro, 64 / micro));
    // The next larger one is too large.
    CHECK(need(config({fmt::format("policy.train_micro_batch_size={}", micro)}), 1) <= share * usual);
    CHECK(need(config({fmt::format("policy.train_micro_batch_size={}", 2 * micro)}), 1) >
          std::stod(max_memory) * share * usual * 0.99);
    return micro;
  };
  CHECK(chosen(1.2, "1") == 32);
  CHECK(chosen(1.2, "0.9") == 32);
  CHECK(chosen(1.2, "0.75") == 16);
  CHECK(chosen(0.7, "0.9") == 16);
  // What may be recomputed makes room first.
  CHECK(chosen(0.7, "0.9", "auto") == 32);
}

TEST_CASE("auto that does not fit names memory.max_memory and what fits into it", "[fit]") {
  const std::vector<std::string> overrides{"policy.train_micro_batch_size=auto", "memory.max_memory=0.5",
                                           "policy.recompute.granularity=selective"};
  const ConfigResult least = config({"policy.train_micro_batch_size=1"});
  ConfigResult result = config(overrides);
  // A share of 1.6 times what one sequence needs, of which half is allowed.
  const auto ranks = static_cast<int>(static_cast<double>(cpu::machine_memory()) / (1.6 * need(least, 1)));
  check_run(result, {.world = 1, .local = ranks, .files = false});
  const std::string text = render(result.diagnostics);
  INFO(text);
  CHECK(result.exit_code() == Exit::out_of_memory);
  REQUIRE(result.diagnostics.size() == 1);
  CHECK(result.diagnostics[0].key == "memory.max_memory");
  CHECK(result.diagnostics[0].file == "command line: memory.max_memory=0.5");
  CHECK(text.find("memory.max_memory: 0.5 leaves a rank ") != std::string::npos);
  CHECK(text.find("for a microbatch of 1 sequence, the least that policy.train_micro_batch_size: auto") !=
        std::string::npos);
  CHECK(text.find("num_attention_heads") == std::string::npos);
  const size_t at = text.find("fits: policy.");
  REQUIRE(at != std::string::npos);
  // With the first change the same configuration runs.
  std::string key = text.substr(at + 6, text.find(" (a rank", at) - at - 6);
  std::vector<std::string> changed = overrides;
  for (size_t begin = 0; begin < key.size();) {
    const size_t end = std::min(key.find(", ", begin), key.size());
    std::string one = key.substr(begin, end - begin);
    one.replace(one.find(": "), 2, "=");
    changed.push_back(one);
    begin = end + 2;
  }
  ConfigResult again = config(changed);
  check_run(again, {.world = 1, .local = ranks, .files = false});
  INFO(render(again.diagnostics));
  CHECK(again.ok());
}

TEST_CASE("a plan of microbatches that FP8 scales do not suit is a bug", "[fit]") {
  const ConfigResult result =
      config({"policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_recipe=mxfp8",
              "policy.model.intermediate_size=768", "policy.max_total_sequence_length=32"});
  const auto planned = [&](int64_t micro) {
    BatchPlan batch = resolve_batch(result.config, 1);
    batch.accumulation = batch.global / micro;
    batch.micro = micro;
    return plan::make_run_plan(result.config, load_model_spec(result), batch,
                               plan::grid_position(result.config, 1, 0), DeviceType::cpu, 1);
  };
  CHECK(planned(4));
  CHECK_THROWS(planned(2));
}

TEST_CASE("microbatches shrink by their smallest factor", "[fit]") {
  const auto next = [](int64_t micro) {
    const auto batch = smaller_microbatch({.micro = micro, .global = 4 * micro, .accumulation = 4});
    if (!batch) return int64_t{0};
    CHECK(batch->micro * batch->accumulation == 4 * micro);
    return batch->micro;
  };
  CHECK(next(8) == 4);
  CHECK(next(6) == 3);
  CHECK(next(3) == 1);
  CHECK(next(15) == 5);
  CHECK(next(1) == 0);
  // To multiples of the unit.
  const auto next_of_4 = [](int64_t micro) {
    const auto batch =
        smaller_microbatch({.micro = micro, .global = 4 * micro, .accumulation = 4, .unit = 4});
    if (batch) CHECK(batch->micro * batch->accumulation == 4 * micro);
    return batch ? batch->micro : 0;
  };
  CHECK(next_of_4(16) == 8);
  CHECK(next_of_4(12) == 4);
  CHECK(next_of_4(20) == 4);
  CHECK(next_of_4(4) == 0);
  CHECK(next_of_4(6) == 0);
}

TEST_CASE("microbatches of FP8 shrink to whole blocks of scales", "[fit]") {
  for (const bool chosen : {false, true}) {
    const auto reduced = [&](int64_t length, double share) {
      const std::vector<std::string> overrides{
          "policy.fp8_cfg.enabled=true",
          "policy.fp8_cfg.fp8_recipe=mxfp8",
          "policy.model.intermediate_size=768",
          fmt::format("policy.max_total_sequence_length={}", length),
          chosen ? "policy.train_micro_batch_size=auto" : "memory.on_oom=reduce_batch",
          "memory.max_memory=1"};
      ConfigResult result = config(overrides);
      const auto ranks =
          static_cast<int>(static_cast<double>(cpu::machine_memory()) / (share * need(result, 1)));
      const Decided d = decided(result, ranks);
      INFO(render(d.messages));
      CHECK(d.batch.micro * length % 128 == 0);
      if (!d.fits) CHECK(exit_code(d.messages) == Exit::out_of_memory);
      return d.fits ? d.batch.micro : 0;
    };
    CAPTURE(chosen);
    CHECK(reduced(32, 0.99) == (chosen ? 32 : 8));
    CHECK(reduced(64, 0.8) < (chosen ? 64 : 16));
    CHECK(reduced(32, 0.1) == 0);  // four sequences are the least
  }
}

TEST_CASE("reduce_batch is refused where losses depend on the microbatch", "[fit]") {
  const std::string experts =
      "model_type=qwen3_moe num_experts=4 num_experts_per_tok=2 moe_intermediate_size=64";
  const auto exit_code = [&](const std::vector<std::string>& more) {
    std::vector<std::string> overrides{"memory.on_oom=reduce_batch"};
    for (size_t at = 0; at < experts.size();) {
      const size_t end = std::min(experts.find(' ', at), experts.size());
      overrides.push_back("policy.model." + experts.substr(at, end - at));
      at = end + 1;
    }
    overrides.insert(overrides.end(), more.begin(), more.end());
    ConfigResult result = config(overrides);
    check_run(result, {.world = 1, .files = false});
    INFO(render(result.diagnostics));
    return result.exit_code();
  };
  CHECK(exit_code({"policy.model.moe_aux_loss_coeff=0"}) == Exit::ok);
  CHECK(exit_code({"policy.model.moe_aux_loss_coeff=0.01"}) == Exit::config);
  CHECK(exit_code({"policy.model.moe_aux_loss_coeff=0.01",
                   "policy.model.moe_router_load_balancing_type=seq_aux_loss"}) == Exit::ok);
  CHECK(exit_code({"policy.model.moe_aux_loss_coeff=0", "policy.model.moe_expert_capacity_factor=1"}) ==
        Exit::config);
}

TEST_CASE("a plan takes the microbatch that a run takes on a GPU of known memory", "[fit]") {
  for (const char* key : {"policy.train_micro_batch_size=auto", "memory.on_oom=reduce_batch"}) {
    CAPTURE(key);
    const ConfigResult given = config({"device=cuda", key});
    const model::ModelSpec spec = load_model_spec(given);
    const BatchPlan batch = resolve_batch(given.config, 1);
    const auto need = [&](const BatchPlan& b) {
      return needed_memory(given.config, spec, b, 1, DeviceType::cuda, 1, 1e18);
    };
    const auto fitted = [&](size_t memory) {
      const DecisionFacts facts = planned_facts(given, spec, 1, 1, memory);
      const Decision d = decide_alone(facts);
      return Decided{d, explain(facts, d)};
    };
    ConfigResult unknown = given;  // before the GPU is open
    check_run(unknown, {.world = 1, .files = false});
    CHECK(unknown.diagnostics.empty());
    const auto memory = static_cast<size_t>(0.8 * need(batch));
    const Decided smaller = fitted(memory);
    CHECK(smaller.fits);
    CHECK(smaller.messages.size() == 1);
    CHECK(smaller.batch.micro < batch.micro);
    CHECK(need(smaller.batch) <= static_cast<double>(memory));
    const Decided refused = fitted(1 << 20);
    CHECK(exit_code(refused.messages) == Exit::out_of_memory);
    CHECK(render(refused.messages).find("the GPU has") != std::string::npos);
  }
}

TEST_CASE("a decision whose memory cannot be allocated goes on with less", "[fit]") {
  const ConfigResult result = config({"memory.on_oom=reduce_batch"});
  const model::ModelSpec spec = load_model_spec(result);
  const DecisionFacts facts = planned_facts(result, spec, 1, 1, 0);
  std::vector<int64_t> planned;
  const Planned plan = [&](const BatchPlan& batch) {
    planned.push_back(batch.micro);
    return Need{.capacity = facts.capacity};
  };
  std::optional<Decision> d = decide(facts, plan);
  CHECK(explain(facts, *d).empty());
  d = decide_below(facts, plan, *d, "rank 1: no pages");
  d = decide_below(facts, plan, *d, "rank 0: no pages either");
  REQUIRE(d);
  CHECK(planned == std::vector<int64_t>{16, 8, 4});
  const Diagnostics said = explain(facts, *d);
  REQUIRE(said.size() == 1);
  CHECK(said[0].message.find("a microbatch of 16 does not fit; the run takes 4") != std::string::npos);
  CHECK(said[0].notes == std::vector<std::string>{"rank 1: no pages"});
  for (int i = 0; i < 2; ++i) d = decide_below(facts, plan, *d, "");
  REQUIRE(d);
  CHECK(d->batch.micro == 1);
  CHECK(!decide_below(facts, plan, *d, ""));
  // Without the key there is nothing to take instead.
  const ConfigResult fixed = config();
  const DecisionFacts facts_of_fixed = planned_facts(fixed, spec, 1, 1, 0);
  CHECK(!decide_below(facts_of_fixed, plan, decide(facts_of_fixed, plan), ""));
}

TEST_CASE("a run needs what its largest pipeline stage needs", "[fit]") {
  for (const char* layers : {"[3,1]", "[1,3]"}) {
    const ConfigResult result = config(
        {"distributed.pipeline_parallel_size=2", fmt::format("distributed.pipeline_layout={}", layers)});
    const Config& c = result.config;
    const model::ModelSpec spec = load_model_spec(result);
    double most = 0;
    for (const int rank : {0, 1}) {
      const auto plan = plan::make_run_plan(c, spec, resolve_batch(c, 2), plan::grid_position(c, 2, rank),
                                            DeviceType::cpu, 1);
      most = std::max(most, plan::total(plan::planned_memory(c, *plan)));
    }
    CHECK(need(result, 2) == most);
  }
}
