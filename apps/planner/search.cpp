#include "apps/planner/search.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <set>

#include "apps/plan/nodes.h"
#include "apps/plan/recompute.h"
#include "apps/state/model_source.h"
#include "apps/train/start/run_check.h"
#include "core/base/text.h"

namespace nrl::planner {
namespace {

constexpr int64_t least_context_tokens = 2048, most_micro = 16;
constexpr int most_chunks = 4;

std::vector<int> divisors(int n) {
  std::vector<int> out;
  for (int i = 1; i <= n; ++i)
    if (n % i == 0) out.push_back(i);
  return out;
}

/// Calls `use` with every layout but for what is only tried where less does not fit.
void for_each_layout(const Config& config, const model::ModelSpec& spec, int world, int node,
                     const std::function<void(const Layout&)>& use) {
  const int64_t length = config.policy.max_total_sequence_length,
                global = config.policy.train_global_batch_size;
  for (const int tp : divisors(world))
    for (const int pp : divisors(world / tp))
      for (const int cp : divisors(world / tp / pp))
        for (const int ep : divisors(spec.moe.experts > 0 ? world / pp : 1)) {
          const int dp = world / tp / pp / cp;
          if (tp > node || pp > spec.layers || global % dp != 0 ||
              (cp > 1 && length / cp < least_context_tokens) || (ep > 1 && spec.moe.experts % ep != 0))
            continue;
          for (int64_t micro = 1; micro <= std::min(most_micro, global / dp); micro *= 2) {
            if (global / dp % micro != 0) continue;
            Layout layout{.tp = tp, .cp = cp, .ep = ep, .pp = pp, .micro = micro};
            use(layout);
            if (pp == 1) continue;
            layout.schedule = "zb_h1";
            use(layout);
            layout.schedule = "auto";
            for (layout.chunks = 2; layout.chunks <= most_chunks && pp * layout.chunks <= spec.layers;
                 layout.chunks *= 2)
              use(layout);
          }
        }
}

}  // namespace

std::string Layout::name(int world) const {
  std::string grid;
  for (const auto& [axis, size] :
       {std::pair("tp", tp), std::pair("cp", cp), std::pair("dp", world / tp / cp / pp), std::pair("pp", pp),
        std::pair("ep", ep)})
    if (size > 1) grid += fmt::format("{}{} {}", grid.empty() ? "" : " x ", axis, size);
  if (grid.empty()) grid = "1 rank";
  if (schedule != "auto") grid += "  " + schedule;
  if (chunks > 1) grid += fmt::format("  {} chunks", chunks);
  return fmt::format("{}  {}  micro {}{}", grid, strategy, micro,
                     recompute.empty() || recompute == "none" ? "" : "  recompute " + recompute);
}

namespace {

// The keys that a layout sets.
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
                                  "distributed.pipeline_layout=null",
                                  "distributed.num_layers_in_first_pipeline_stage=null",
                                  "distributed.num_layers_in_last_pipeline_stage=null",
                                  "distributed.microbatch_group_size_per_vp_stage=null",
                                  "distributed.hierarchical_context_parallel_sizes=null",
                                  "policy.gradient_accumulation_steps=null"};

std::string key_of(std::string_view setting) {
  return std::string(setting.substr(0, setting.find('=')));
}

}  // namespace

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

Result search_layouts(const Request& request, const predict::ModeledDevice& device) {
  Result out;
  const ConfigResult given = load_config(request.config, request.overrides);
  const model::ModelSpec spec = train::load_model_spec(given);
  const std::vector<ClusterNode> nodes = plan::configured_nodes(given.config, request.world);
  const int node = nodes.empty() ? request.world : nodes.front().ranks;
  const std::vector<std::string> recomputes = plan::recompute_is_configured(given.config.policy)
                                                  ? std::vector<std::string>{""}
                                                  : std::vector<std::string>{"none", "auto"};
  const auto attempt = [&](const Layout& layout) {
    std::vector<std::string> overrides = request.overrides;
    for (std::string& key : layout.overrides()) overrides.push_back(std::move(key));
    ConfigResult config = load_config(request.config, overrides);
    if (config.ok())
      train::check_but_memory(config, {.world = request.world, .nodes = nodes, .files = false});
    if (!config.ok()) return false;
    ++out.tried;
    predict::StagePlans plans =
        predict::plan_stages(config.config, spec, request.world, device, request.capacity);
    Found found{.layout = layout, .keys = layout.keys(given.config, config.config), .memory = plans.memory()};
    if (static_cast<double>(found.memory) > request.capacity) {
      ++out.too_large;
      out.least_memory = std::min(out.least_memory, found.memory);
      return false;
    }
    found.tokens = plans.plans.front()->batch.tokens_per_step;
    found.estimate =
        predict::estimate_step(config.config, std::move(plans), device, nodes, request.expert_load);
    out.found.push_back(std::move(found));
    return true;
  };
  size_t done = 0, total = 0;
  for_each_layout(given.config, spec, request.world, node, [&](const Layout&) { ++total; });
  for_each_layout(given.config, spec, request.world, node, [&](Layout layout) {
    if (request.progress) request.progress(done, total);
    ++done;
    const int copies = request.world / layout.tp / layout.pp;
    const std::vector<const char*> strategies =
        copies == 1 ? std::vector<const char*>{"ddp"}
                    : std::vector<const char*>{"optim", "optim_grads", "optim_grads_params"};
    for (const std::string& recompute : recomputes)
      for (const char* strategy : strategies) {
        layout.recompute = recompute;
        layout.strategy = strategy;
        if (attempt(layout)) return;
      }
  });
  std::stable_sort(out.found.begin(), out.found.end(),
                   [](const Found& a, const Found& b) { return a.estimate.step < b.estimate.step; });
  return out;
}

std::string table(const Result& result, const predict::ModeledDevice& device, int world,
                  double flops_per_token, size_t shown) {
  const machine::DeviceModel& model = device.model();
  const double peak = model.bf16_flops() * world;
  std::string text = fmt::format("search   {} of {} fit; times are estimates at assumed rates\n",
                                 result.found.size(), counted(result.tried, "layout"));
  size_t width = 0;
  for (size_t i = 0; i < std::min(shown, result.found.size()); ++i)
    width = std::max(width, result.found[i].layout.name(world).size());
  text += fmt::format("  {:<{}} {:>10} {:>10} {:>11} {:>5} {:>9} {:>8} {:>8} {:>8}\n", "layout", width,
                      "memory", "step ms", "tokens/s", "mfu", "compute", "layers", "bubble", "data");
  for (size_t i = 0; i < std::min(shown, result.found.size()); ++i) {
    const Found& f = result.found[i];
    const double step = f.estimate.step, rate = static_cast<double>(f.tokens) / step;
    const auto share = [&](double seconds) { return fmt::format("{:.1f} %", 100 * seconds / step); };
    text += fmt::format("  {:<{}} {:>10} {:>10.1f} {:>11} {:>5.1f} {:>9} {:>8} {:>8} {:>8}\n",
                        f.layout.name(world), width, human_bytes(static_cast<uint64_t>(f.memory)), step * 1e3,
                        grouped(std::llround(rate)), 100 * rate * flops_per_token / peak,
                        share(f.estimate.computing()), share(f.estimate.layers), share(f.estimate.pipeline),
                        share(f.estimate.data));
  }
  text += "use      " + fmt::format("{}", fmt::join(result.found.front().keys, " "));
  return text;
}

}  // namespace nrl::planner
