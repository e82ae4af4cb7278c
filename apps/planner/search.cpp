#include "apps/planner/search.h"

#include <algorithm>
#include <future>
#include <map>
#include <queue>
#include <set>

#include "apps/plan/grid_position.h"
#include "apps/plan/nodes.h"
#include "apps/plan/recompute.h"
#include "apps/planner/price.h"
#include "apps/predict/run_forecast.h"
#include "apps/state/model_source.h"
#include "apps/train/start/run_check.h"
#include "core/base/text.h"

namespace nrl::planner {
namespace {

/// Prices are this close to full estimates: layouts that miss a limit by less are planned.
constexpr double time_margin = 0.02, memory_margin = 0.05;
/// Layouts whose variants() are planned, and rounds of it.
constexpr size_t refined = 3;
constexpr int refinements = 2;
/// Layouts that are planned to find one that fits without an axis.
constexpr int alternative_trials = 8;

struct Priced {
  Layout layout;
  Price price = {};
  double value = 0;    ///< Found::value
  bool sharp = false;  ///< false: Pricer::bound()

  /// The full estimate has at least this value.
  double least() const { return value * (sharp ? 1 - time_margin : 1); }
};

/// Layouts that differ in sharding, its overlap and recomputation only.
Layout family(Layout layout) {
  layout.strategy.clear();
  layout.recompute.clear();
  layout.replicas = 1;
  layout.param_gather = false;
  return layout;
}

bool better(const Found& a, const Found& b) {
  return a.value < b.value;
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
        nodes_(plan::configured_nodes(given_.config, request.world)),
        costs_(given_.config) {
    costs_.cluster.reliability.failures_per_rank_hour = 0;
  }

  Result run() {
    price_all();
    // Bounds of what is wanted move as layouts are planned.
    std::multiset<double> values;
    std::set<std::string> done;
    cheapest_first([&](const Layout& l) { return !done.contains(family(l).name(request_.world)); },
                   [&] { return values.empty() ? HUGE_VAL : limit(values); },
                   [&](const Layout& l) {
                     if (const Found* found = planned(l)) {
                       done.insert(family(l).name(request_.world));
                       values.insert(found->value);
                     }
                     return true;
                   });
    refine();
    if (fitting().empty()) plan_smallest();
    // A layout without an axis may turn out to be the best.
    for (const Found* first = best(); first;) {
      const Layout layout = first->layout;
      out_.alternatives.clear();
      for (const Axis& axis : axes)
        if (axis.has(layout, request_.world)) out_.alternatives.push_back(without(axis));
      if (best() == first) break;
      refine();
      first = best();
    }
    out_.dry_runs = pricer_ ? pricer_->dry_runs() : 0;
    for (const Found* found : fitting()) out_.found.push_back(*found);
    std::stable_sort(out_.found.begin(), out_.found.end(), better);
    return std::move(out_);
  }

 private:
  /// A layout has at most this value if it is wanted.
  double limit(const std::multiset<double>& values) const {
    const double within = *values.begin() * (1 + request_.within);
    if (values.size() < request_.best) return HUGE_VAL;
    return std::max(within, *std::next(values.begin(), static_cast<ptrdiff_t>(request_.best) - 1));
  }

  double value_of(double step, const predict::BusySeconds& busy) const {
    if (request_.objective == Objective::time) return step;
    const machine::DeviceModel& device = device_.model();
    const predict::RunFacts facts{.ranks = request_.world,
                                  .nodes = nodes_.empty() ? predict::usual_nodes(device, request_.world)
                                                          : static_cast<int>(nodes_.size()),
                                  .step = step,
                                  .tokens = 1,
                                  .busy = busy};
    const predict::Spent spent = predict::forecast_run(costs_, facts, device).per_token;
    return (request_.objective == Objective::cost ? spent.price : spent.kwh).value();
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
    const int node = !nodes_.empty()         ? nodes_.front().ranks
                     : device_.model().gpu() ? std::min(request_.world, device_.model().node_ranks)
                                             : request_.world;
    std::vector<Layout> layouts = candidates(given_.config, spec_, request_.world, node,
                                             plan::recompute_is_configured(given_.config.policy)
                                                 ? std::vector<std::string>{""}
                                                 : std::vector<std::string>{"none", "auto"});
    std::erase_if(layouts, [&](const Layout& l) { return !allowed(l); });
    pricer_.emplace(given_.config, spec_, request_.world, nodes_, device_, request_.capacity,
                    request_.expert_load, [this](const std::vector<std::string>& keys, int world) {
                      std::vector<std::string> all = keys;
                      for (const char* reset : {"cluster.num_nodes=null", "cluster.world_size=null",
                                                "cluster.gpus_per_node=null", "cluster.segment_size=null"})
                        all.emplace_back(reset);
                      return load(std::move(all), world, {});
                    });
    for (size_t i = 0; i < layouts.size(); ++i) {
      if (request_.progress) request_.progress(i, layouts.size());
      std::optional<Price> price = Price{};
      // Where keys name layers by their numbers, there are no prices, and every layout is planned. A layout
      // that has none while others have is refused.
      if (pricer_) try {
          price = pricer_->bound(layouts[i]);
        } catch (const Error&) {
          price.reset();
          if (out_.tried == 0) {
            pricer_.reset();
            price = Price{};
          }
        }
      if (!price) continue;
      ++out_.tried;
      if (price->memory > request_.capacity * (1 + memory_margin)) {
        ++out_.too_large;
        too_large_.push_back({layouts[i], *price});
      } else {
        priced_.push_back({layouts[i], *price, value_of(price->seconds, price->busy), !pricer_});
      }
    }
  }

  /// Plans the layout that needs least, of which bounds know the state only.
  void plan_smallest() {
    const auto less = [](const Priced& a, const Priced& b) { return a.price.memory < b.price.memory; };
    const auto least = std::min_element(too_large_.begin(), too_large_.end(), less);
    if (least == too_large_.end()) return;
    const double near = 1.2 * least->price.memory;
    const int64_t micro = least->layout.micro;
    std::erase_if(too_large_,
                  [&](const Priced& p) { return p.layout.micro > micro || p.price.memory > near; });
    for (Priced& p : too_large_) p.price = pricer_->price(p.layout).value_or(Price{.memory = HUGE_VAL});
    const auto smallest = std::min_element(too_large_.begin(), too_large_.end(), less);
    if (smallest != too_large_.end()) planned(smallest->layout);
  }

  /// Calls `use` with layouts that are `wanted`, the cheapest first, until they cost more than `most()` or it
  /// returns false. Prices are made sharp as far as that needs them.
  template <class Wanted, class Most, class Use>
  void cheapest_first(const Wanted& wanted, const Most& most, const Use& use) {
    const auto later = [&](size_t a, size_t b) {
      return std::pair(priced_[a].least(), a) > std::pair(priced_[b].least(), b);
    };
    std::priority_queue<size_t, std::vector<size_t>, decltype(later)> queue(later);
    for (size_t i = 0; i < priced_.size(); ++i) queue.push(i);
    while (!queue.empty()) {
      const size_t at = queue.top();
      Priced& p = priced_[at];
      if (p.least() > most()) return;
      queue.pop();
      if (!wanted(p.layout)) continue;
      if (p.sharp) {
        start(p.layout);
        const std::string own = family(p.layout).name(request_.world);
        plan_ahead([&](const Layout& l) { return family(l).name(request_.world) != own && wanted(l); },
                   most());
        if (!use(p.layout)) return;
        continue;
      }
      p.price = pricer_->price(p.layout).value();
      p.value = value_of(p.price.seconds, p.price.busy);
      p.sharp = true;
      queue.push(at);
    }
  }

  /// A layout that is being planned, or will be when its plans are asked for; of a refused one nothing.
  struct Ahead {
    std::unique_ptr<const Config> config;
    std::future<predict::StagePlans> plans;  // uses `config`: waits for them when it is destroyed
  };

  /// Begins to plan the layout, on a thread of its own if there are several.
  void start(const Layout& layout) {
    const auto [at, added] = ahead_.try_emplace(layout.name(request_.world));
    if (!added) return;
    std::optional<Config> config = load(layout.overrides(), request_.world, nodes_);
    if (!config) return;
    at->second.config = std::make_unique<const Config>(std::move(*config));
    at->second.plans =
        std::async(request_.threads > 1 ? std::launch::async : std::launch::deferred,
                   [this, of = at->second.config.get()] {
                     return predict::plan_stages(*of, spec_, request_.world, device_, request_.capacity);
                   });
  }

  /// Begins to plan the cheapest priced layouts that are `wanted`, as many as there are other threads.
  template <class Wanted>
  void plan_ahead(const Wanted& wanted, double most) {
    std::vector<const Priced*> next;
    if (request_.threads == 1) return;
    for (const Priced& p : priced_)
      if (p.sharp && p.least() <= most && !planned_.contains(p.layout.name(request_.world)) &&
          wanted(p.layout))
        next.push_back(&p);
    std::stable_sort(next.begin(), next.end(),
                     [](const Priced* a, const Priced* b) { return a->least() < b->least(); });
    std::set<std::string> families;
    size_t running = 0;
    for (const auto& [name, ahead] : ahead_) running += ahead.config ? 1 : 0;
    for (const Priced* p : next) {
      if (running + 1 >= static_cast<size_t>(request_.threads)) return;
      if (!families.insert(family(p->layout).name(request_.world)).second ||
          ahead_.contains(p->layout.name(request_.world)))
        continue;
      start(p->layout);
      ++running;
    }
  }

  /// The layout planned in full; null if it is refused or does not fit.
  const Found* planned(const Layout& layout) {
    const std::string name = layout.name(request_.world);
    if (const auto known = planned_.find(name); known != planned_.end())
      return known->second ? &*known->second : nullptr;
    std::optional<Found>& out = planned_[name];
    start(layout);
    Ahead ahead = std::move(ahead_.extract(name).mapped());
    const std::unique_ptr<const Config> config = std::move(ahead.config);
    if (!config) return nullptr;
    ++out_.planned;
    predict::StagePlans plans = ahead.plans.get();
    const int64_t memory = plans.memory();
    if (static_cast<double>(memory) > request_.capacity) {
      out_.least_memory = std::min(out_.least_memory, memory);
      return nullptr;
    }
    Found found{.layout = layout, .keys = layout.keys(given_.config, *config), .memory = memory};
    found.tokens = plans.plans.front()->batch.tokens_per_step;
    const predict::DryStages stages(*config, std::move(plans), device_, nodes_, request_.expert_load);
    found.estimate = stages.estimate();
    found.value = value_of(
        found.estimate.step,
        predict::run_facts(*config, stages, device_, static_cast<int>(nodes_.size()), found.estimate).busy);
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
  const Found* best() const {
    const std::vector<const Found*> all = fitting();
    const auto first = std::min_element(all.begin(), all.end(),
                                        [](const Found* a, const Found* b) { return better(*a, *b); });
    return first == all.end() ? nullptr : *first;
  }

  bool may_be_best(const Layout& layout) {
    if (!pricer_) return true;
    const std::optional<Price> price = pricer_->price(layout);
    return price && price->memory <= request_.capacity * (1 + memory_margin) &&
           value_of(price->seconds, price->busy) * (1 - time_margin) <= best()->value;
  }

  /// Plans variants of the best layouts.
  void refine() {
    Config config = given_.config;
    config.distributed.tp_comm_overlap = {};
    // The value that auto stands for is no variant of it.
    const std::string_view automatic = name_of(plan::tp_comm_overlap(config, device_.type()));
    for (int round = 0; round < refinements; ++round) {
      std::vector<const Found*> all = fitting();
      std::sort(all.begin(), all.end(), [](const Found* a, const Found* b) { return better(*a, *b); });
      all.resize(std::min(all.size(), refined));
      std::vector<Layout> layouts;
      for (const Found* found : all) layouts.push_back(found->layout);
      for (const Layout& layout : layouts)
        for (const Layout& variant : variants(layout, request_.world))
          if (allowed(variant) && variant.tp_overlap != automatic && may_be_best(variant)) planned(variant);
    }
  }

  /// The best layout without an axis: of the planned ones, else of the cheapest.
  Alternative without(const Axis& axis) {
    Alternative out{.without = axis.name};
    for (const Found* found : fitting())
      if (!axis.has(found->layout, request_.world) && (!out.found || better(*found, *out.found)))
        out.found = *found;
    if (out.found) return out;
    int trials = 0;
    cheapest_first([&](const Layout& l) { return !axis.has(l, request_.world); },
                   [&] { return out.found ? out.found->value : HUGE_VAL; },
                   [&](const Layout& l) {
                     const Found* found = planned(l);
                     if (found && (!out.found || better(*found, *out.found))) out.found = *found;
                     return ++trials < alternative_trials;
                   });
    return out;
  }

  const Request& request_;
  const predict::ModeledDevice& device_;
  ConfigResult given_;
  model::ModelSpec spec_;
  std::vector<ClusterNode> nodes_;
  Config costs_;  // given_ without failures
  std::optional<Pricer> pricer_;
  std::vector<Priced> priced_, too_large_;
  std::map<std::string, std::optional<Found>> planned_;  // by name
  std::map<std::string, Ahead> ahead_;                   // the same, before
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
    text += fmt::format("{:+.1f} %, {} {}: {}", 100 * (a.found->value / first.value - 1),
                        human_bytes(static_cast<uint64_t>(std::abs(more))), more < 0 ? "less" : "more",
                        a.found->layout.name(world));
  }
  return text;
}

}  // namespace

std::string objective_problem(Objective objective, const Config& config, const machine::DeviceModel& device) {
  const CostConfig& cost = config.cluster.cost;
  const bool power = device.gpu() || cost.node_watts;
  if (objective == Objective::cost && !cost.rank_hour && !cost.kwh)
    return "a step has no price: cluster.cost.rank_hour and cluster.cost.kwh are not set. Fix: set one of "
           "them";
  if (objective == Objective::cost && !cost.rank_hour && !power)
    return "the energy of a CPU is unknown: cluster.cost.node_watts is not set. Fix: set it, or "
           "cluster.cost.rank_hour";
  if (objective == Objective::energy && !power)
    return "the energy of a CPU is unknown: cluster.cost.node_watts is not set. Fix: set it";
  return "";
}

Result search_layouts(const Request& request, const predict::ModeledDevice& device) {
  return Search(request, device).run();
}

std::string table(const Result& result, const predict::ModeledDevice& device, int world,
                  double flops_per_token, size_t shown, Objective objective) {
  const machine::DeviceModel& model = device.model();
  const double peak = model.bf16_flops() * world;
  std::string text = fmt::format("search   {} of {} fit; {} planned in full; times are estimates {}\n",
                                 grouped(static_cast<int64_t>(result.tried - result.too_large)),
                                 counted(static_cast<int64_t>(result.tried), "layout"), result.planned,
                                 device.profile() ? "with the rates of the profile" : "at assumed rates");
  size_t width = 0;
  for (size_t i = 0; i < std::min(shown, result.found.size()); ++i)
    width = std::max(width, result.found[i].layout.name(world).size());
  const std::string unit = objective == Objective::time   ? ""
                           : objective == Objective::cost ? "   price / 10^9 tokens"
                                                          : "   kWh / 10^9 tokens";
  text += fmt::format("  {:<{}} {:>10} {:>10} {:>11} {:>5} {:>9} {:>8} {:>8} {:>8}{}\n", "layout", width,
                      "memory", "step ms", "tokens/s", "mfu", "compute", "layers", "bubble", "data", unit);
  for (size_t i = 0; i < std::min(shown, result.found.size()); ++i) {
    const Found& f = result.found[i];
    const double step = f.estimate.step, rate = static_cast<double>(f.tokens) / step;
    const auto share = [&](double seconds) { return fmt::format("{:.1f} %", 100 * seconds / step); };
    const std::string value =
        unit.empty()
            ? ""
            : fmt::format("{:>{}}", fmt::format("{:.4g}", 1e9 * f.value / static_cast<double>(f.tokens)),
                          unit.size());
    text += fmt::format("  {:<{}} {:>10} {:>10.1f} {:>11} {:>5.1f} {:>9} {:>8} {:>8} {:>8}{}\n",
                        f.layout.name(world), width, human_bytes(static_cast<uint64_t>(f.memory)), step * 1e3,
                        grouped(std::llround(rate)), 100 * rate * flops_per_token / peak,
                        share(f.estimate.computing()), share(f.estimate.layers), share(f.estimate.pipeline),
                        share(f.estimate.data), value);
  }
  text += "use      " + fmt::format("{}", fmt::join(result.found.front().keys, " "));
  return text + alternatives_text(result, world);
}

}  // namespace nrl::planner
