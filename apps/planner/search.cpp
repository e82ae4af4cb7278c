#include "apps/planner/search.h"

#include <algorithm>
#include <map>
#include <set>

#include "apps/plan/grid_position.h"
#include "apps/plan/nodes.h"
#include "apps/plan/recompute.h"
#include "apps/planner/price.h"
#include "apps/state/model_source.h"
#include "apps/train/start/run_check.h"
#include "core/base/text.h"

namespace nrl::planner {
namespace {

/// Prices are this close to full estimates: layouts that miss a limit by less are planned.
constexpr double time_margin = 0.05, memory_margin = 0.1;
/// Layouts whose variants() are planned, and rounds of it.
constexpr size_t refined = 3;
constexpr int refinements = 2;
/// Layouts that are planned to find one that fits without an axis.
constexpr int alternative_trials = 8;

struct Priced {
  Layout layout;
  Price price;
};

/// Layouts that differ in sharding, its overlap and recomputation only.
Layout family(Layout layout) {
  layout.strategy.clear();
  layout.recompute.clear();
  layout.replicas = 1;
  layout.param_gather = false;
  return layout;
}

bool faster(const Found& a, const Found& b) {
  return a.estimate.step < b.estimate.step;
}

/// A property of the first layout, and the layouts that have it.
struct Axis {
  const char* name;
  bool (*has)(const Layout&, int world);
};
constexpr Axis axes[] = {
    {"tensor parallelism", [](const Layout& l, int) { return l.tp > 1; }},
    {"context parallelism", [](const Layout& l, int) { return l.cp > 1; }},
    {"expert parallelism", [](const Layout& l, int) { return l.ep > 1; }},
    {"pipeline stages", [](const Layout& l, int) { return l.pp > 1; }},
    {"data parallelism", [](const Layout& l, int world) { return l.data_parallel(world) > 1; }},
    {"chunks of stages", [](const Layout& l, int) { return l.chunks > 1; }},
    {"recomputation", [](const Layout& l, int) { return !l.recompute.empty() && l.recompute != "none"; }},
    {"sharded gradients", [](const Layout& l, int) { return l.strategy != "ddp" && l.strategy != "optim"; }},
};

class Search {
 public:
  Search(const Request& request, const predict::ModeledDevice& device)
      : request_(request),
        device_(device),
        given_(load_config(request.config, request.overrides)),
        spec_(train::load_model_spec(given_)),
        nodes_(plan::configured_nodes(given_.config, request.world)) {}

  Result run() {
    price_all();
    // Bounds of what is wanted move as layouts are planned.
    std::multiset<double> steps;
    std::vector<Layout> done;
    for (const Priced& p : priced_) {
      if (!steps.empty() && p.price.seconds * (1 - time_margin) > limit(steps)) break;
      const Layout of = family(p.layout);
      if (std::find(done.begin(), done.end(), of) != done.end()) continue;
      if (const Found* found = planned(p.layout)) {
        done.push_back(of);
        steps.insert(found->estimate.step);
      }
    }
    refine();
    if (fitting().empty() && smallest_) planned(*smallest_);
    // A layout without an axis may turn out to be the fastest.
    for (const Found* first = fastest(); first;) {
      const Layout layout = first->layout;
      out_.alternatives.clear();
      for (const Axis& axis : axes)
        if (axis.has(layout, request_.world)) out_.alternatives.push_back(without(axis));
      if (fastest() == first) break;
      refine();
      first = fastest();
    }
    for (const Found* found : fitting()) out_.found.push_back(*found);
    std::stable_sort(out_.found.begin(), out_.found.end(), faster);
    return std::move(out_);
  }

 private:
  /// A layout takes at most this long if it is wanted.
  double limit(const std::multiset<double>& steps) const {
    const double within = *steps.begin() * (1 + request_.within);
    if (steps.size() < request_.best) return HUGE_VAL;
    return std::max(within, *std::next(steps.begin(), static_cast<ptrdiff_t>(request_.best) - 1));
  }

  std::optional<Config> load(std::vector<std::string> more, int world,
                             const std::vector<ClusterNode>& nodes) const {
    std::vector<std::string> overrides = request_.overrides;
    for (std::string& key : more) overrides.push_back(std::move(key));
    ConfigResult config = load_config(request_.config, overrides);
    if (config.ok()) train::check_but_memory(config, {.world = world, .nodes = nodes, .files = false});
    if (!config.ok()) return std::nullopt;
    return std::move(config.config);
  }

  bool allowed(const Layout& layout) const {
    if (request_.fixed.empty()) return true;
    const std::vector<std::string> keys = layout.overrides();
    return std::all_of(request_.fixed.begin(), request_.fixed.end(), [&](const std::string& fixed) {
      const std::string key = fixed.substr(0, fixed.find('=') + 1);
      const auto last =
          std::find_if(keys.rbegin(), keys.rend(), [&](const std::string& k) { return k.starts_with(key); });
      return last == keys.rend() || *last == fixed;
    });
  }

  void price_all() {
    const int node = nodes_.empty() ? request_.world : nodes_.front().ranks;
    std::vector<Layout> layouts = candidates(given_.config, spec_, request_.world, node,
                                             plan::recompute_is_configured(given_.config.policy)
                                                 ? std::vector<std::string>{""}
                                                 : std::vector<std::string>{"none", "auto"});
    std::erase_if(layouts, [&](const Layout& l) { return !allowed(l); });
    Pricer pricer(given_.config, spec_, request_.world, nodes_, device_, request_.capacity,
                  request_.expert_load, [&](const std::vector<std::string>& keys, int world) {
                    std::vector<std::string> all = keys;
                    for (const char* reset : {"cluster.num_nodes=null", "cluster.world_size=null",
                                              "cluster.gpus_per_node=null", "cluster.segment_size=null"})
                      all.emplace_back(reset);
                    return load(std::move(all), world, {});
                  });
    bool prices = true;  // false: keys name layers by their numbers, and every layout is planned
    double least = HUGE_VAL;
    for (size_t i = 0; i < layouts.size(); ++i) {
      if (request_.progress) request_.progress(i, layouts.size());
      std::optional<Price> price = Price{};
      if (prices) try {
          price = pricer.price(layouts[i]);
        } catch (const Error&) {
          prices = false;
        }
      if (!price) continue;
      ++out_.tried;
      if (price->memory < least) {
        least = price->memory;
        smallest_ = layouts[i];
      }
      if (price->memory > request_.capacity * (1 + memory_margin))
        ++out_.too_large;
      else
        priced_.push_back({layouts[i], *price});
    }
    out_.dry_runs = pricer.dry_runs();
    std::stable_sort(priced_.begin(), priced_.end(),
                     [](const Priced& a, const Priced& b) { return a.price.seconds < b.price.seconds; });
  }

  /// The layout planned in full; null if it is refused or does not fit.
  const Found* planned(const Layout& layout) {
    const std::string name = layout.name(request_.world);
    if (const auto known = planned_.find(name); known != planned_.end())
      return known->second ? &*known->second : nullptr;
    std::optional<Found>& out = planned_[name];
    const std::optional<Config> config = load(layout.overrides(), request_.world, nodes_);
    if (!config) return nullptr;
    ++out_.planned;
    predict::StagePlans plans =
        predict::plan_stages(*config, spec_, request_.world, device_, request_.capacity);
    const int64_t memory = plans.memory();
    if (static_cast<double>(memory) > request_.capacity) {
      out_.least_memory = std::min(out_.least_memory, memory);
      return nullptr;
    }
    Found found{.layout = layout, .keys = layout.keys(given_.config, *config), .memory = memory};
    found.tokens = plans.plans.front()->batch.tokens_per_step;
    found.estimate = predict::estimate_step(*config, std::move(plans), device_, nodes_, request_.expert_load);
    out = std::move(found);
    return &*out;
  }

  std::vector<const Found*> fitting() const {
    std::vector<const Found*> out;
    for (const auto& [name, found] : planned_)
      if (found) out.push_back(&*found);
    return out;
  }

  /// Null if none fits.
  const Found* fastest() const {
    const std::vector<const Found*> all = fitting();
    const auto first = std::min_element(all.begin(), all.end(),
                                        [](const Found* a, const Found* b) { return faster(*a, *b); });
    return first == all.end() ? nullptr : *first;
  }

  /// Plans what the prices leave alone for the best layouts.
  void refine() {
    Config config = given_.config;
    config.distributed.tp_comm_overlap = {};
    // The value that auto stands for is no variant of it.
    const std::string_view automatic = name_of(plan::tp_comm_overlap(config, device_.type()));
    for (int round = 0; round < refinements; ++round) {
      std::vector<const Found*> best = fitting();
      std::sort(best.begin(), best.end(), [](const Found* a, const Found* b) { return faster(*a, *b); });
      best.resize(std::min(best.size(), refined));
      std::vector<Layout> layouts;
      for (const Found* found : best) layouts.push_back(found->layout);
      for (const Layout& layout : layouts)
        for (const Layout& variant : variants(layout, request_.world))
          if (allowed(variant) && variant.tp_overlap != automatic) planned(variant);
    }
  }

  /// The fastest layout without an axis: of the planned ones, else of the cheapest.
  Alternative without(const Axis& axis) {
    Alternative out{.without = axis.name};
    for (const Found* found : fitting())
      if (!axis.has(found->layout, request_.world) && (!out.found || faster(*found, *out.found)))
        out.found = *found;
    int trials = 0;
    for (const Priced& p : priced_) {
      if (out.found || trials == alternative_trials) break;
      if (axis.has(p.layout, request_.world)) continue;
      ++trials;
      if (const Found* found = planned(p.layout)) out.found = *found;
    }
    return out;
  }

  const Request& request_;
  const predict::ModeledDevice& device_;
  ConfigResult given_;
  model::ModelSpec spec_;
  std::vector<ClusterNode> nodes_;
  std::vector<Priced> priced_;  // cheapest first
  std::optional<Layout> smallest_;
  std::map<std::string, std::optional<Found>> planned_;  // by name
  Result out_;
};

std::string alternatives_text(const Result& result, int world) {
  const Found& first = result.found.front();
  std::string text;
  for (const Alternative& a : result.alternatives) {
    text += fmt::format("\nwithout  {}: ", a.without);
    if (!a.found) {
      text += "no layout fits";
      continue;
    }
    const int64_t more = a.found->memory - first.memory;
    text += fmt::format("{:+.1f} %, {} {}: {}", 100 * (a.found->estimate.step / first.estimate.step - 1),
                        human_bytes(static_cast<uint64_t>(std::abs(more))), more < 0 ? "less" : "more",
                        a.found->layout.name(world));
  }
  return text;
}

}  // namespace

Result search_layouts(const Request& request, const predict::ModeledDevice& device) {
  return Search(request, device).run();
}

std::string table(const Result& result, const predict::ModeledDevice& device, int world,
                  double flops_per_token, size_t shown) {
  const machine::DeviceModel& model = device.model();
  const double peak = model.bf16_flops() * world;
  std::string text =
      fmt::format("search   {} of {} fit; {} planned in full; times are estimates at assumed rates\n",
                  grouped(static_cast<int64_t>(result.tried - result.too_large)),
                  counted(static_cast<int64_t>(result.tried), "layout"), result.planned);
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
  return text + alternatives_text(result, world);
}

}  // namespace nrl::planner
