#pragma once
// The price of a layout: an approximation of its step and memory that decides which layouts are planned in
// full. It is composed of pieces: dry runs of a model with few layers (pieces.h), the real parameter groups
// of the stages (stage_price.h) and the simulated schedule. Tests compare it with the full estimate.

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "apps/machine/fabric.h"
#include "apps/planner/layouts.h"
#include "apps/planner/stage_price.h"
#include "parallel/pipeline/simulate.h"

namespace nrl::planner {

struct Price {
  double seconds = 0;              ///< of a step
  double margin = 0.02;            ///< the full estimate has at least `seconds`, less this part of them
  double memory = 0;               ///< bytes of the rank that needs most
  bool state_only = false;         ///< the state alone exceeds the capacity; no other number is set
  predict::BusySeconds busy = {};  ///< of a rank in the passes of a step
};

class Pricer {
 public:
  /// Returns the configuration of `overrides` beside the user's; unset if a check refuses it for
  /// `world` ranks.
  using Load = std::function<std::optional<Config>(const std::vector<std::string>& overrides, int world)>;

  /// `given`: without the keys of a layout. The arguments must outlive this object.
  Pricer(const Config& given, const model::ModelSpec& spec, int world, const std::vector<ClusterNode>& nodes,
         const predict::ModeledDevice& device, double capacity, double expert_load, Load load);

  /// The memory of a layout, and seconds that its step takes at least: without exposed traffic of
  /// data-parallel ranks, messages, and all bubbles. Unset if the sizes within a layer do not suit the model.
  /// Throws Error as PieceMaker::make() does.
  std::optional<Price> bound(const Layout& layout);
  /// The price itself, which simulates the schedule.
  std::optional<Price> price(const Layout& layout);

  /// A stage of a layout. The stages after it, before the next one that is priced, are alike.
  struct Stage {
    int stage = 0;
    std::shared_ptr<const StageShape> shape;
    StagePieces pieces;
    StageOptions options;
    double memory = 0;
  };
  struct Composition {
    pipeline::ScheduleOptions schedule;
    StageOptions options;
    std::vector<Stage> stages;
  };
  /// price() in three parts, of which times() may run on several threads. A composition is unset as bound()
  /// is; it refers to this object.
  std::optional<Composition> compose(const Layout& layout);
  std::vector<predict::StageTime> times(const Layout& layout, const Composition& c) const;
  /// A closer bound: with the traffic of data-parallel ranks that these times expose, what calls lose beside
  /// it, and messages. Only the schedule is not simulated.
  Price bound(const Layout& layout, const Composition& c, const std::vector<predict::StageTime>& times) const;
  Price price(const Layout& layout, const Composition& c, const std::vector<predict::StageTime>& times);

  int dry_runs() const { return maker_.dry_runs(); }

 private:
  /// tp, cp, ep, micro, recompute, tp_overlap, weight gradients later.
  using Key = std::tuple<int, int, int, int64_t, std::string, std::string, bool, bool>;

  /// tp, cp, ep, pp, chunks, ends counted.
  using StageKey = std::tuple<int, int, int, int, int, bool>;

  const std::optional<Pieces>& pieces(const Layout& layout, const std::string& recompute);
  std::vector<std::pair<int, std::shared_ptr<const StageShape>>> shapes(const Layout& layout);
  /// The schedule of no more microbatches than memory depends on.
  const pipeline::Schedule& schedule_of(const pipeline::ScheduleOptions& options, int stage);
  /// Memory and busy seconds.
  Price summary(const Composition& c) const;
  double makespan(const pipeline::ScheduleOptions& schedule, const pipeline::MicrobatchCosts& costs);
  template <class Makespan>
  Price price_with(const Layout& layout, const Composition& c, const std::vector<predict::StageTime>& times,
                   const Makespan& makespan) const;
  double with_spread(double seconds) const;

  const Config& given_;
  const model::ModelSpec& spec_;
  int world_;
  const std::vector<ClusterNode>& nodes_;
  const predict::ModeledDevice& device_;
  double capacity_;
  Load load_;
  machine::Fabric fabric_;
  machine::Overlap overlap_;
  PieceMaker maker_;
  std::map<Key, std::optional<Pieces>> pieces_;
  std::map<Layout, std::vector<std::pair<int, std::shared_ptr<const StageShape>>>> shapes_;
  /// The first, an inner and the last stage of the layout whose shape was made last: layouts that differ
  /// in sharding follow each other.
  std::array<std::pair<StageKey, model::ParameterList>, 3> parameters_;
  std::map<std::pair<pipeline::ScheduleOptions, int>, pipeline::Schedule> schedules_;
  std::map<std::vector<double>, double> makespans_;
};

}  // namespace nrl::planner
