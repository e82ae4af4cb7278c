#include "apps/verify/layouts.h"

#include <spdlog/fmt/fmt.h>

#include "apps/model/spec/layout.h"
#include "apps/plan/recompute.h"
#include "core/config/fp8_recipes.h"
#include "core/config/load.h"

namespace nrl::verify {
namespace {

using Value = Layouts::Value;
using Choice = std::vector<Value>;  // one of these

std::vector<int> divisors(int n) {
  std::vector<int> out;
  for (int d = 1; d <= n; ++d)
    if (n % d == 0) out.push_back(d);
  return out;
}

// The values of a choice or flag; one value without overrides if the option table has no such key.
Choice values_of(const std::string& key, const std::string& flag = "") {
  Choice out;
  for (const std::string& value : allowed_values(key))
    out.push_back({flag.empty() ? value : value == "true" ? flag : "", {key + "=" + value}});
  if (out.empty()) out.push_back({});
  return out;
}

// Sharding strategies, with and without overlapped communication, in copies on `ranks`, and the types in
// which gradients travel.
Choice data_parallel_options(int ranks) {
  const auto overrides = [](const std::string& strategy, bool reduce, bool gather) {
    return std::vector<std::string>{"distributed.shard_strategy=" + strategy,
                                    fmt::format("distributed.overlap_grad_reduce={}", reduce),
                                    fmt::format("distributed.overlap_param_gather={}", gather)};
  };
  Choice out;
  for (const std::string& s : allowed_values("distributed.shard_strategy"))
    for (const int copies : divisors(ranks)) {
      const auto add = [&](const std::string& label, bool reduce, bool gather) {
        Value v{s + (copies > 1 ? fmt::format(" x {}", copies) : "") + label, overrides(s, reduce, gather)};
        v.overrides.push_back(fmt::format("distributed.dp_replicate_size={}", copies));
        out.push_back(std::move(v));
      };
      add("", false, false);
      add(" overlap", true, false);
      if (s != "ddp") add(" overlap gather", true, true);
      for (const std::string& type : allowed_values("distributed.grad_reduce_dtype")) {
        if (type == "fp32") continue;  // of those above
        add(" " + type, true, false);
        out.back().overrides.push_back("distributed.grad_reduce_dtype=" + type);
      }
    }
  return out;
}

Choice tensor_options() {
  Choice out;
  for (const Value& sequence : values_of("distributed.sequence_parallel", "sp"))
    for (const std::string& overlap : allowed_values("distributed.tp_comm_overlap")) {
      Value v = sequence;
      if (overlap != "none") v.label += (v.label.empty() ? "" : " ") + overlap;
      v.overrides.push_back("distributed.tp_comm_overlap=" + overlap);
      out.push_back(std::move(v));
    }
  return out;
}

Choice context_options(int ranks) {
  constexpr std::string_view both = "a2a+p2p";  // its all-to-all here of two ranks
  Choice out = values_of("distributed.cp_comm_type");
  for (Value& v : out)
    v.overrides.push_back("distributed.hierarchical_context_parallel_sizes=" +
                          (v.label == both ? fmt::format("[2,{}]", ranks / 2) : std::string("null")));
  return out;
}

// Blocks of `chunks` chunks of a model: nearly evenly spread, but one less in the first and one more in the
// last chunk.
std::string uneven_layout(int chunks, int64_t layers) {
  std::string sizes;
  for (int c = 0; c < chunks; ++c)
    sizes += fmt::format("{}{}", c > 0 ? "," : "",
                         model::even_part(layers, chunks, c).count + (c + 1 == chunks) - (c == 0));
  return "[" + sizes + "]";
}

// Schedules and numbers of chunks: auto on uneven chunks; the others plain, and with messages in advance and
// a larger group of microbatches.
Choice pipeline_options(int stages, int64_t layers) {
  Choice out, schedules = values_of("distributed.pipeline_schedule");
  schedules.insert(schedules.begin(), {"auto", {"distributed.pipeline_schedule=auto"}});
  for (const Value& schedule : schedules)
    for (const int chunks : {1, 2}) {
      const auto add = [&](const std::string& label, bool uneven, bool overlap, bool group) {
        Value v = schedule;
        if (chunks > 1) v.label += fmt::format("{}V {}", v.label.empty() ? "" : " ", chunks);
        v.label += label;
        const auto set = [&](const char* key, const std::string& value) {
          v.overrides.push_back(fmt::format("distributed.{}={}", key, value));
        };
        set("virtual_pipeline_size", chunks == 1 ? "null" : std::to_string(chunks));
        set("pipeline_layout", uneven ? uneven_layout(stages * chunks, layers) : "null");
        set("overlap_p2p_comm", overlap ? "true" : "false");
        set("microbatch_group_size_per_vp_stage", group ? std::to_string(stages + 1) : "null");
        out.push_back(std::move(v));
      };
      if (schedule.label == "auto") {
        add(" uneven", true, false, false);
        continue;
      }
      add("", false, false, false);
      add(chunks > 1 ? fmt::format(" overlap group {}", stages + 1) : " overlap", false, true, chunks > 1);
    }
  return out;
}

// The values, in place of what the configuration says about the keys.
Choice instead_of(std::span<const std::string_view> keys, Choice values) {
  const std::vector<std::string> defaults = default_overrides(keys);
  for (Value& value : values)
    value.overrides.insert(value.overrides.begin(), defaults.begin(), defaults.end());
  return values;
}

Choice recompute_options() {
  Choice out = values_of("policy.recompute.granularity");
  out.push_back({"core_attn, mlp", {"policy.recompute.modules=[core_attn,mlp]"}});
  out.push_back({"every 2", {"policy.checkpoint_every=2"}});
  out.push_back({"block of 1",
                 {"policy.recompute.granularity=full", "policy.recompute.method=block",
                  "policy.recompute.num_layers=1"}});
  for (Value& value : out) value.label = "recompute " + value.label;
  return instead_of(plan::recompute_keys, std::move(out));
}

// What is moved to the host's memory.
Choice offload_options() {
  const std::string optimizer = "policy.offload_optimizer=", activations = "policy.offload_activations=";
  return instead_of(plan::offload_keys,
                    {{"", {}},
                     {"offload optimizer", {optimizer + "true"}},
                     {"offload half of the optimizer", {optimizer + "0.5"}},
                     {"offload activations", {activations + "true"}},
                     {"offload optimizer and activations", {optimizer + "true", activations + "true"}},
                     {"offload half of the layers", {activations + "0.5"}},
                     {"offload input of layer 0",
                      {optimizer + "0.5", activations + "true", "policy.offload_layers=[0]",
                       "policy.offload_modules=[input]"}}});
}

// Ranks that split the experts, and that split every expert: their product divides `ranks`.
std::vector<std::pair<int, int>> expert_sizes(int ranks) {
  std::vector<std::pair<int, int>> out;
  for (const int ep : divisors(ranks))
    for (const int etp : divisors(ranks / ep)) out.emplace_back(ep, etp);
  return out;
}

Choice grid_value(int tp, int cp, int dp, int pp, int ep, int etp) {
  Value grid;
  for (const auto& [axis, key, size] :
       {std::tuple("tp", "distributed.tensor_parallel_size", tp),
        std::tuple("cp", "distributed.context_parallel_size", cp), std::tuple("dp", "", dp),
        std::tuple("pp", "distributed.pipeline_parallel_size", pp),
        std::tuple("ep", "distributed.expert_parallel_size", ep),
        std::tuple("etp", "distributed.expert_tensor_parallel_size", etp)}) {
    if (size > 1) grid.label += fmt::format("{}{} {}", grid.label.empty() ? "" : " x ", axis, size);
    if (*key) grid.overrides.push_back(fmt::format("{}={}", key, size));
  }
  grid.overrides.emplace_back("distributed.data_parallel_size=auto");
  return {grid};
}

}  // namespace

std::string Layouts::name(size_t i) const {
  std::string out;
  for (const int v : values(i))
    if (const std::string& label = values_[v].label; !label.empty()) out += (out.empty() ? "" : "  ") + label;
  return out;
}

std::vector<std::string> Layouts::overrides(size_t i) const {
  std::vector<std::string> out;
  for (const int v : values(i)) {
    const auto& own = values_[v].overrides;
    out.insert(out.end(), own.begin(), own.end());
  }
  return out;
}

void Layouts::add(const std::vector<Choice>& choices, const std::vector<Choice>& turns) {
  const auto numbers = [&](const std::vector<Choice>& of) {
    std::vector<std::vector<int>> out;
    for (const Choice& choice : of) {
      auto& own = out.emplace_back();
      for (const Value& value : choice) {
        const auto [at, added] = numbers_.try_emplace({value.label, value.overrides}, std::ssize(values_));
        if (added) values_.push_back(value);
        own.push_back(at->second);
      }
    }
    return out;
  };
  // One value of each, for every `i`.
  const auto take = [](const std::vector<std::vector<int>>& from, size_t i, std::vector<int>& layout) {
    for (const std::vector<int>& choice : from) {
      layout.push_back(choice[i % choice.size()]);
      i /= choice.size();
    }
  };
  const std::vector<std::vector<int>> all = numbers(choices), in_turn = numbers(turns);
  size_t combinations = 1;
  for (const auto& choice : all) combinations *= choice.size();
  for (size_t i = 0; i < combinations; ++i) {
    std::vector<int> layout;
    take(all, i, layout);
    take(in_turn, layouts_.size(), layout);
    layouts_.push_back(std::move(layout));
  }
}

Layouts all_layouts(const Config& config, int64_t layers, int ranks) {
  const Fp8Config& fp8 = config.policy.fp8_cfg;
  Choice weights{
      {"", {"policy.fp8_cfg.fp8_param=false"}},
      {"weights rounded for each GEMM",
       {"policy.fp8_cfg.fp8_param=false", "policy.fp8_cfg.cache_weights=false"}},
      {"weights rounded once", {"policy.fp8_cfg.fp8_param=false", "policy.fp8_cfg.cache_weights=true"}}};
  if (rules_of(fp8.fp8_recipe).transposes())
    weights.push_back(
        {"weights in FP8", {"policy.fp8_cfg.fp8_param=true", "policy.fp8_cfg.cache_weights=auto"}});
  const auto& micro = config.policy.train_micro_batch_size;
  // What a layer recomputes and moves does not depend on the ranks. There are seven values of each, so that
  // they meet all values of the choices, whose numbers are not multiples of seven.
  const std::vector<Choice> turns{recompute_options(), offload_options()};
  Layouts out;
  for (const int tp : divisors(ranks))
    for (const int pp : divisors(ranks / tp))
      for (const int cp : divisors(ranks / tp / pp))
        for (const auto& [ep, etp] : expert_sizes(ranks / pp)) {
          const int dp = ranks / tp / pp / cp;
          std::vector<Choice> choices{grid_value(tp, cp, dp, pp, ep, etp)};
          if (tp > 1) choices.push_back(tensor_options());
          if (pp > 1) choices.push_back(pipeline_options(pp, layers));
          if (cp > 1) choices.push_back(context_options(cp));
          if (dp * cp > 1) choices.push_back(data_parallel_options(dp * cp));
          if (ep * etp > 1) {
            choices.push_back(values_of("policy.model.moe_token_dispatcher_type"));
            // zb_h1 has no rounds.
            if (pp == 1) choices.back().push_back({"rows in rounds", {"policy.model.moe_row_slack=0.3"}});
          }
          if (fp8.enabled) choices.push_back(weights);
          if (micro.is_auto() || micro.value() != 1)
            choices.push_back({{"", {}}, {"micro 1", {"policy.train_micro_batch_size=1"}}});
          out.add(choices, turns);
        }
  return out;
}

}  // namespace nrl::verify
