#include "apps/planner/layouts.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "core/base/text.h"

namespace nrl::planner {
namespace {

constexpr int64_t least_context_tokens = 2048, most_micro = 16;

std::vector<int> divisors(int n) {
  std::vector<int> out;
  for (int i = 1; i <= n; ++i)
    if (n % i == 0) out.push_back(i);
  return out;
}

/// The keys that a layout sets.
std::vector<std::string> settings(const Layout& l) {
  std::vector<std::string> out;
  const auto set = [&](const char* key, const auto& value) {
    out.push_back(fmt::format("{}={}", key, value));
  };
  set("distributed.tensor_parallel_size", l.tp);
  set("distributed.pipeline_parallel_size", l.pp);
  if (l.cp > 1) set("distributed.context_parallel_size", l.cp);
  if (l.ep > 1) set("distributed.expert_parallel_size", l.ep);
  if (l.schedule != "auto") set("distributed.pipeline_schedule", l.schedule);
  if (l.chunks > 1) set("distributed.virtual_pipeline_size", l.chunks);
  set("distributed.shard_strategy", l.strategy);
  if (l.replicas > 1) set("distributed.dp_replicate_size", l.replicas);
  if (l.param_gather) set("distributed.overlap_param_gather", true);
  if (l.messages) set("distributed.overlap_p2p_comm", true);
  if (l.tp_overlap != "auto") set("distributed.tp_comm_overlap", l.tp_overlap);
  if (l.count_ends) {
    set("distributed.account_for_embedding_in_pipeline_split", true);
    set("distributed.account_for_loss_in_pipeline_split", true);
  }
  set("policy.train_micro_batch_size", l.micro);
  if (!l.recompute.empty()) set("policy.recompute.granularity", l.recompute);
  return out;
}

// Undo what is configured for another layout.
constexpr const char* resets[] = {"distributed.context_parallel_size=1",
                                  "distributed.expert_parallel_size=1",
                                  "distributed.pipeline_schedule=auto",
                                  "distributed.virtual_pipeline_size=null",
                                  "distributed.data_parallel_size=auto",
                                  "distributed.dp_replicate_size=1",
                                  "distributed.overlap_param_gather=false",
                                  "distributed.overlap_p2p_comm=false",
                                  "distributed.tp_comm_overlap=auto",
                                  "distributed.tp_comm_overlap_splits=null",
                                  "distributed.account_for_embedding_in_pipeline_split=false",
                                  "distributed.account_for_loss_in_pipeline_split=false",
                                  "distributed.pipeline_layout=null",
                                  "distributed.num_layers_in_first_pipeline_stage=null",
                                  "distributed.num_layers_in_last_pipeline_stage=null",
                                  "distributed.microbatch_group_size_per_vp_stage=null",
                                  "distributed.hierarchical_context_parallel_sizes=null",
                                  "policy.gradient_accumulation_steps=null"};

std::string key_of(std::string_view setting) {
  return std::string(setting.substr(0, setting.find('=')));
}

template <class E>
E value_of(std::string_view name) {
  const auto& names = EnumNames<E>::names;
  return static_cast<E>(std::find(std::begin(names), std::end(names), name) - std::begin(names));
}

/// Calls `use` with every way to run the blocks through the pipeline.
template <class Use>
void for_each_pipeline(Layout layout, int64_t layers, const Use& use) {
  use(layout);
  if (layout.pp == 1) return;
  const auto use_counted = [&](Layout l) {
    const int64_t parts = int64_t{l.pp} * l.chunks;
    if (l.chunks == 1 || layers % parts == 0) use(l);
    l.count_ends = true;
    if ((layers + 2) % parts == 0 && layers % parts != 0) use(l);
  };
  if (layers % layout.pp != 0 && (layers + 2) % layout.pp == 0) {
    layout.count_ends = true;
    use(layout);
    layout.count_ends = false;
  }
  for (layout.chunks = 2; int64_t{layout.pp} * layout.chunks <= layers + 2; ++layout.chunks)
    use_counted(layout);
  layout.chunks = 1;
  layout.schedule = "zb_h1";
  use_counted(layout);
}

}  // namespace

std::string Layout::name(int world) const {
  std::string grid;
  for (const auto& [axis, size] :
       {std::pair("tp", tp), std::pair("cp", cp), std::pair("dp", data_parallel(world)), std::pair("pp", pp),
        std::pair("ep", ep)})
    if (size > 1) grid += fmt::format("{}{} {}", grid.empty() ? "" : " x ", axis, size);
  if (grid.empty()) grid = "1 rank";
  if (schedule != "auto") grid += "  " + schedule;
  if (chunks > 1) grid += fmt::format("  {} chunks", chunks);
  if (count_ends) grid += "  ends counted";
  std::string out = fmt::format("{}  {}{}  micro {}{}", grid, strategy,
                                replicas > 1 ? fmt::format(" in {} slices", replicas) : "", micro,
                                recompute.empty() || recompute == "none" ? "" : "  recompute " + recompute);
  if (tp_overlap != "auto") out += "  tp " + tp_overlap;
  if (param_gather) out += "  gathers overlapped";
  if (messages) out += "  messages overlapped";
  return out;
}

std::vector<std::string> Layout::keys(const Config& given, const Config& config) const {
  std::vector<std::string> out = settings(*this);
  std::set<std::string> set;
  for (const std::string& setting : out) set.insert(key_of(setting));
  for (const char* reset : resets)
    if (const std::string key = key_of(reset);
        !set.contains(key) && value_text(given, key) != value_text(config, key))
      out.emplace_back(reset);
  return out;
}

std::vector<std::string> Layout::overrides() const {
  std::vector<std::string> out(std::begin(resets), std::end(resets));
  for (std::string& setting : settings(*this)) out.push_back(std::move(setting));
  return out;
}

Config Layout::applied(Config given) const {
  DistributedConfig& d = given.distributed;
  d.tensor_parallel_size = tp;
  d.pipeline_parallel_size = pp;
  d.context_parallel_size = cp;
  d.expert_parallel_size = ep;
  d.pipeline_schedule = {};
  if (schedule != "auto") d.pipeline_schedule = value_of<ScheduleKind>(schedule);
  d.virtual_pipeline_size = chunks > 1 ? std::optional<int64_t>(chunks) : std::nullopt;
  d.data_parallel_size = {};
  d.shard_strategy = value_of<ShardStrategy>(strategy);
  d.dp_replicate_size = replicas;
  d.overlap_param_gather = param_gather;
  d.overlap_p2p_comm = messages;
  d.tp_comm_overlap = {};
  if (tp_overlap != "auto") d.tp_comm_overlap = value_of<TpCommOverlap>(tp_overlap);
  d.tp_comm_overlap_splits.reset();
  d.account_for_embedding_in_pipeline_split = d.account_for_loss_in_pipeline_split = count_ends;
  d.pipeline_layout.reset();
  d.num_layers_in_first_pipeline_stage.reset();
  d.num_layers_in_last_pipeline_stage.reset();
  d.microbatch_group_size_per_vp_stage.reset();
  d.hierarchical_context_parallel_sizes.reset();
  given.policy.gradient_accumulation_steps.reset();
  given.policy.train_micro_batch_size = micro;
  return given;
}

std::vector<Layout> candidates(const Config& config, const model::ModelSpec& spec, int world, int node,
                               const std::vector<std::string>& recompute) {
  const int64_t length = config.policy.max_total_sequence_length,
                global = config.policy.train_global_batch_size;
  std::vector<Layout> out;
  const auto shard = [&](Layout layout) {
    const int dp = layout.data_parallel(world), copies = dp * layout.cp;
    std::vector<const char*> strategies{"optim", "optim_grads", "optim_grads_params"};
    // One rank has no shards. Of the two names gradients that are kept in bf16 go with one only.
    if (copies == 1) strategies = {config.policy.optimizer.main_grads_dtype == DType::f32 ? "ddp" : "optim"};
    // Slices of a node's ranks: weights and gradients do not leave it.
    const int slice = std::max(1, node / (layout.tp * layout.cp));
    const int experts =
        world / layout.pp / (layout.ep * static_cast<int>(config.distributed.expert_tensor_parallel_size));
    if (slice > 1 && dp % slice == 0 && dp > slice && (spec.moe.experts == 0 || experts % (dp / slice) == 0))
      strategies.push_back("hsdp");
    for (const char* strategy : strategies) {
      layout.strategy = strategy;
      layout.replicas = layout.strategy == "hsdp" ? dp / slice : 1;
      for (const std::string& r : recompute) {
        layout.recompute = r;
        for (const bool overlapped : {false, true}) {
          layout.param_gather = overlapped;
          if (!overlapped || copies > 1) out.push_back(layout);
        }
      }
    }
  };
  for (const int tp : divisors(world))
    for (const int pp : divisors(world / tp))
      for (const int cp : divisors(world / tp / pp))
        for (const int ep : divisors(spec.moe.experts > 0 ? world / pp : 1)) {
          const int dp = world / tp / pp / cp;
          if (tp > node || pp > spec.layers || global % dp != 0 ||
              (cp > 1 && length / cp < least_context_tokens) ||
              (ep > 1 && (spec.moe.experts % ep != 0 ||
                          world / pp % (ep * config.distributed.expert_tensor_parallel_size) != 0)))
            continue;
          for (int64_t micro = 1; micro <= std::min(most_micro, global / dp); ++micro)
            if (global / dp % micro == 0)
              for_each_pipeline({.tp = tp, .cp = cp, .ep = ep, .pp = pp, .micro = micro}, spec.layers, shard);
        }
  return out;
}

std::vector<Layout> variants(const Layout& layout, int world) {
  std::vector<Layout> out;
  const auto with = [&](const auto& change) {
    Layout l = layout;
    change(l);
    if (l != layout) out.push_back(l);
  };
  if (layout.data_parallel(world) * layout.cp > 1) {
    with([](Layout& l) { l.param_gather = !l.param_gather; });
    if (layout.strategy != "hsdp")
      for (const char* strategy : {"optim", "optim_grads", "optim_grads_params"})
        with([&](Layout& l) { l.strategy = strategy; });
  }
  if (layout.pp > 1) {
    with([](Layout& l) { l.messages = !l.messages; });
    with([](Layout& l) { l.count_ends = !l.count_ends; });
  }
  if (layout.tp > 1)
    for (const char* overlap : {"none", "bulk", "pipelined", "ring"})
      with([&](Layout& l) { l.tp_overlap = overlap; });
  return out;
}

}  // namespace nrl::planner
