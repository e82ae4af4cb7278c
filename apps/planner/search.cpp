#include "apps/planner/search.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <queue>
#include <set>
#include <tuple>

#include "apps/plan/grid_position.h"
#include "apps/plan/nodes.h"
#include "apps/plan/recompute.h"
#include "apps/planner/price.h"
#include "apps/predict/run_forecast.h"
#include "apps/state/model_source.h"
#include "apps/train/start/run_check.h"
#include "core/base/jobs.h"
#include "core/base/text.h"

namespace nrl::planner {
namespace {

/// The memory of a price is this close to a plan's: layouts that miss the limit by less are planned.
constexpr double memory_margin = 0.02;
/// Layouts whose variants() are planned, and rounds of it.
constexpr size_t refined = 3;
constexpr int refinements = 2;
/// Layouts that are planned to find one that fits without an axis.
constexpr int alternative_trials = 8;

/// Layouts whose stages are timed at a time, divided among the threads, and layouts that are priced at a
/// time, of which plans ahead are chosen. At most so many are refined needlessly before a layout is planned.
constexpr size_t timed_together = 32, priced_together = 8;

struct Priced {
  Layout layout;
  Price price = {};
  double value = 0;  ///< Found::value
  /// The price was refined so far: Pricer::bound() of a layout, the one of its stages' times,
  /// Pricer::price().
  enum class Level : uint8_t { bound, timed, sharp } level = Level::bound;

  bool sharp() const { return level == Level::sharp; }
  /// The full estimate has at least this value.
  double least() const { return value * (level == Level::bound ? 1 : 1 - price.margin); }
};

/// Layouts that differ in sharding, its overlap and recomputation only.
Layout family(Layout layout) {
  layout.strategy.clear();
  layout.recompute.clear();
  layout.replicas = 1;
  layout.param_gather = false;
  return layout;
}

struct PricerOfThread {
  predict::ModeledDevice device;
  std::optional<Pricer> pricer = {};  // uses `device`
};

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
    if (fitting().empty() && smallest_)
      if (const std::optional<Config> config = load(smallest_->overrides(), request_.world, nodes_))
        out_.least_memory =
            predict::plan_stages(*config, spec_, request_.world, device_, request_.capacity).memory();
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
    over_ = true;
    for (const auto& of : pricers_) out_.dry_runs += of->pricer->dry_runs();
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

  std::optional<Config> load(std::vector<std::string> more, int world, const std::vector<ClusterNode>& nodes,
                             std::string* refused = nullptr) const {
    std::vector<std::string> overrides = request_.overrides;
    for (std::string& key : more) overrides.push_back(std::move(key));
    ConfigResult config = load_config(request_.config, overrides);
    if (config.ok()) train::check_but_memory(config, {.world = world, .nodes = nodes, .files = false});
    if (config.ok()) return std::move(config.config);
    if (refused && refused->empty()) *refused = render(config.diagnostics);
    return std::nullopt;
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
    const std::vector<std::optional<Price>> prices = bounds(layouts);
    for (size_t i = 0; i < layouts.size(); ++i) {
      const std::optional<Price>& price = prices[i];
      if (!price) continue;
      ++out_.tried;
      if (price->state_only || price->memory > request_.capacity * (1 + memory_margin)) {
        ++out_.too_large;
        too_large_.push_back({layouts[i], *price});
      } else {
        priced_.push_back({layouts[i], *price, value_of(price->seconds, price->busy),
                           pricers_.empty() ? Priced::Level::sharp : Priced::Level::bound});
      }
    }
  }

  /// Starts a pricer with a device of its own.
  Pricer& add_pricer() {
    PricerOfThread& of = *pricers_.emplace_back(std::make_unique<PricerOfThread>(device_.another()));
    of.pricer.emplace(given_.config, spec_, request_.world, nodes_, of.device, request_.capacity,
                      request_.expert_load, [this](const std::vector<std::string>& keys, int world) {
                        std::vector<std::string> all = keys;
                        for (const char* reset : {"cluster.num_nodes=null", "cluster.world_size=null",
                                                  "cluster.gpus_per_node=null", "cluster.segment_size=null"})
                          all.emplace_back(reset);
                        return load(std::move(all), world, {});
                      });
    return *of.pricer;
  }

  /// Layouts with equal sizes within their layers have one pricer, which knows the pieces of the first for
  /// the others.
  using Sizes = std::tuple<int, int, int>;
  static Sizes sizes(const Layout& l) { return {l.tp, l.cp, l.ep}; }
  Pricer& pricer(const Layout& l) { return *pricers_[pricer_of_.at(sizes(l))]->pricer; }

  /// Pricer::bound() of each, unset of those that are refused. If the first layout has none, no layout is
  /// priced: then pricers_ is empty.
  std::vector<std::optional<Price>> bounds(const std::vector<Layout>& layouts) {
    std::vector<std::optional<Price>> out(layouts.size());
    const auto bound = [&](Pricer& pricer, size_t i) {
      try {
        out[i] = pricer.bound(layouts[i]);
      } catch (const Error&) {
        return false;
      }
      return true;
    };
    if (layouts.empty()) return out;
    if (!bound(add_pricer(), 0)) {
      pricers_.clear();
      return std::vector<std::optional<Price>>(layouts.size(), Price{});
    }
    std::map<Sizes, std::vector<size_t>> by_sizes;
    for (size_t i = 0; i < layouts.size(); ++i) by_sizes[sizes(layouts[i])].push_back(i);
    std::vector<const std::vector<size_t>*> jobs;  // the largest first
    for (const auto& [of, members] : by_sizes) jobs.push_back(&members);
    std::stable_sort(jobs.begin(), jobs.end(),
                     [](const auto* a, const auto* b) { return a->size() > b->size(); });
    // The first pricer has the pieces of the first layout already.
    const auto known = std::find_if(jobs.begin(), jobs.end(), [](const auto* j) { return j->front() == 0; });
    std::rotate(jobs.begin(), known, known + 1);
    std::atomic<size_t> next_job = 1, done = 0;
    std::vector<size_t> numbers(jobs.size());  // of the pricers
    const auto work = [&](size_t number) {
      for (size_t job = number == 0 ? 0 : next_job++; job < jobs.size(); job = next_job++) {
        numbers[job] = number;
        for (const size_t i : *jobs[job]) {
          if (number == 0 && request_.progress) request_.progress(done, layouts.size());
          bound(*pricers_[number]->pricer, i);
          ++done;
        }
      }
    };
    while (pricers_.size() < std::min(static_cast<size_t>(request_.threads), jobs.size())) add_pricer();
    on_threads(pricers_.size(), work);
    for (size_t job = 0; job < jobs.size(); ++job)
      pricer_of_[sizes(layouts[jobs[job]->front()])] = numbers[job];
    return out;
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
    for (Priced& p : too_large_)
      p.price = pricer(p.layout).price(p.layout).value_or(Price{.memory = HUGE_VAL});
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
      if (p.sharp()) {
        start(p.layout);
        const std::string own = family(p.layout).name(request_.world);
        plan_ahead(p.price.memory <= request_.capacity ? own : "", wanted, most());
        if (!use(p.layout)) return;
        continue;
      }
      const bool timed = p.level == Priced::Level::timed;
      std::vector<size_t> some{at};
      for (; some.size() < (timed ? priced_together : timed_together) && !queue.empty(); queue.pop()) {
        const Priced& next = priced_[queue.top()];
        if (next.level != p.level || next.least() > most()) break;
        if (wanted(next.layout)) some.push_back(queue.top());
      }
      if (timed)
        price(some);
      else
        time(some);
      for (const size_t i : some) queue.push(i);
    }
  }

  /// Bounds these layouts by the times of their stages.
  void time(const std::vector<size_t>& some) {
    std::vector<Timed*> parts;
    for (const size_t i : some)
      parts.push_back(&(timed_[i] = {pricer(priced_[i].layout).compose(priced_[i].layout).value(), {}}));
    run_jobs(static_cast<size_t>(request_.threads), some.size(), [&](size_t i) {
      const Layout& layout = priced_[some[i]].layout;
      parts[i]->times = pricer(layout).times(layout, parts[i]->composition);
    });
    for (size_t i = 0; i < some.size(); ++i) {
      const Layout& layout = priced_[some[i]].layout;
      set_price(priced_[some[i]], pricer(layout).bound(layout, parts[i]->composition, parts[i]->times),
                Priced::Level::timed);
    }
  }

  /// Prices layouts whose stages are timed.
  void price(const std::vector<size_t>& some) {
    for (const size_t i : some) {
      const Timed parts = std::move(timed_.extract(i).mapped());
      const Layout& layout = priced_[i].layout;
      set_price(priced_[i], pricer(layout).price(layout, parts.composition, parts.times),
                Priced::Level::sharp);
    }
  }

  void set_price(Priced& p, const Price& price, Priced::Level level) const {
    p.price = price;
    p.value = value_of(price.seconds, price.busy);
    p.level = level;
  }

  /// A price whose schedule is not simulated.
  struct Timed {
    Pricer::Composition composition;
    std::vector<predict::StageTime> times;
  };

  /// A layout's full plan.
  struct Planned {
    int64_t memory = 0;               ///< of the first stage that does not fit, or the most of all
    std::optional<Found> found = {};  ///< unset: does not fit
  };

  Planned plan_in_full(const Layout& layout, const Config& config) const {
    if (over_) return {};
    const predict::ModeledDevice device = device_.another();
    plan::StagePlans plans = predict::plan_stages(config, spec_, request_.world, device, request_.capacity,
                                                  /*only_fitting=*/true);
    Planned out{.memory = plans.memory()};
    if (static_cast<double>(out.memory) > request_.capacity) return out;
    Found& found = out.found.emplace(
        Found{.layout = layout, .keys = layout.keys(given_.config, config), .memory = out.memory});
    found.tokens = plans.plans.front()->batch.tokens_per_step;
    const predict::DryStages stages(config, std::move(plans), device, nodes_, request_.expert_load);
    found.estimate = stages.estimate();
    const predict::RunFacts facts =
        predict::run_facts(config, stages, device, static_cast<int>(nodes_.size()), found.estimate);
    found.value = value_of(found.estimate.step, facts.busy);
    return out;
  }

  /// Begins to plan a layout that was not planned, on a thread of its own if there are several.
  void start(const Layout& layout) {
    const std::string name = layout.name(request_.world);
    if (planned_.contains(name)) return;
    const auto [at, added] = ahead_.try_emplace(name);
    if (!added) return;
    std::optional<Config> config = load(layout.overrides(), request_.world, nodes_, &out_.refused);
    if (!config) return;
    at->second = std::async(request_.threads > 1 ? std::launch::async : std::launch::deferred,
                            [this, layout, of = std::move(*config)] { return plan_in_full(layout, of); });
  }

  /// As many layouts are being planned as there are threads.
  bool busy() const {
    int running = 0;
    for (const auto& [name, ahead] : ahead_)
      running +=
          ahead.valid() && ahead.wait_for(std::chrono::seconds(0)) == std::future_status::timeout ? 1 : 0;
    return running >= request_.threads;
  }

  /// Begins to plan the cheapest priced layouts that are `wanted`: of each family those up to the first one
  /// that probably fits, none of the family `fitting`.
  template <class Wanted>
  void plan_ahead(const std::string& fitting, const Wanted& wanted, double most) {
    if (request_.threads == 1 || busy()) return;
    std::vector<const Priced*> next;
    for (const Priced& p : priced_)
      if (p.sharp() && p.least() <= most && wanted(p.layout)) next.push_back(&p);
    std::stable_sort(next.begin(), next.end(),
                     [](const Priced* a, const Priced* b) { return a->least() < b->least(); });
    std::set<std::string> families{fitting};
    for (const Priced* p : next) {
      const std::string of = family(p->layout).name(request_.world);
      if (families.contains(of)) continue;
      if (p->price.memory <= request_.capacity) families.insert(of);
      start(p->layout);
      if (busy()) return;
    }
  }

  bool too_large(const Layout& layout) const { return larger_.contains(layout.name(request_.world)); }

  /// The layout planned in full; null if it is refused or does not fit.
  const Found* planned(const Layout& layout) {
    const std::string name = layout.name(request_.world);
    if (const auto known = planned_.find(name); known != planned_.end())
      return known->second ? &*known->second : nullptr;
    // Buffers of overlapped gathers, and activations that are kept, come to what does not fit without them.
    Layout less = layout;
    less.param_gather = false;
    if (layout.recompute == "none") less.recompute = "auto";
    for (const bool gathers : {false, layout.param_gather}) {
      less.param_gather = gathers;
      if (less != layout && too_large(less)) return nullptr;
    }
    start(layout);
    std::future<Planned> ahead = std::move(ahead_.extract(name).mapped());
    std::optional<Found>& out = planned_[name];
    if (!ahead.valid()) return nullptr;  // refused
    ++out_.planned;
    Planned made = ahead.get();
    if (!made.found) {
      larger_.insert(name);
      if (made.memory < out_.least_memory) smallest_ = layout;
      out_.least_memory = std::min(out_.least_memory, made.memory);
    }
    out = std::move(made.found);
    return out ? &*out : nullptr;
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
    if (pricers_.empty()) return true;
    const std::optional<Price> price = pricer(layout).price(layout);
    return price && price->memory <= request_.capacity * (1 + memory_margin) &&
           value_of(price->seconds, price->busy) * (1 - price->margin) <= best()->value;
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
      std::vector<Layout> all_variants;
      for (const Layout& layout : layouts)
        for (const Layout& variant : variants(layout, request_.world))
          if (allowed(variant) && variant.tp_overlap != automatic) all_variants.push_back(variant);
      for (size_t i = 0, ahead = 0; i < all_variants.size(); ++i) {
        if (!may_be_best(all_variants[i])) continue;
        start(all_variants[i]);
        for (ahead = std::max(ahead, i + 1); ahead < all_variants.size() && !busy(); ++ahead)
          if (request_.threads > 1 && may_be_best(all_variants[ahead])) start(all_variants[ahead]);
        planned(all_variants[i]);
      }
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
  std::vector<std::unique_ptr<PricerOfThread>> pricers_;
  std::map<Sizes, size_t> pricer_of_;
  std::vector<Priced> priced_, too_large_;
  std::map<size_t, Timed> timed_;                        // of priced_, with Level::timed
  std::atomic<bool> over_ = false;                       // plans ahead are not needed any more
  std::map<std::string, std::optional<Found>> planned_;  // by name
  std::optional<Layout> smallest_;                       // of these
  std::set<std::string> larger_;                         // of these, those that do not fit
  std::map<std::string, std::future<Planned>> ahead_;    // the same, before; invalid: refused
  Result out_;
};

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

}  // namespace nrl::planner
