#pragma once
// The price of a layout: an approximation of its step and memory that decides which layouts are planned in
// full. It is composed of exact estimates (predict::estimate_step) of models with a few layers on one
// pipeline stage, so that it follows them; only the schedule, and the traffic of data-parallel ranks, are
// closed formulas here. Tests compare it with the full estimate.

#include <array>
#include <functional>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "apps/machine/fabric.h"
#include "apps/planner/layouts.h"
#include "apps/predict/step_time.h"

namespace nrl::planner {

struct Price {
  double seconds = 0;  ///< of a step
  double memory = 0;   ///< bytes of the rank that needs most
};

class Pricer {
 public:
  /// Returns the configuration of `overrides` beside the user's; unset if a check refuses it for
  /// `world` ranks.
  using Load = std::function<std::optional<Config>(const std::vector<std::string>& overrides, int world)>;

  /// `given`: without the keys of a layout. The arguments must outlive this object.
  Pricer(const Config& given, const model::ModelSpec& spec, int world, const std::vector<ClusterNode>& nodes,
         const predict::ModeledDevice& device, double capacity, double expert_load, Load load);

  /// Unset if the sizes within a layer do not suit the model. Throws Error if the model with fewer layers
  /// cannot be planned, as with keys that name layers by their numbers.
  std::optional<Price> price(const Layout& layout);

  int dry_runs() const { return dry_runs_; }

 private:
  /// Sums over some layers, or over the ends: embedding and head.
  struct Part {
    double seconds = 0;      ///< of a microbatch, its communication included
    double activations = 0;  ///< bytes kept for a microbatch; of the ends: all that is neither kept nor state
    double weights = 0, gradients = 0, optimizer = 0;  ///< bytes, not sharded
    double parameters = 0;
    double experts = 0;  ///< of these, which other ranks share
    Part& operator+=(const Part& o);
    Part operator*(double factor) const;
  };
  /// A model on one pipeline stage.
  struct Pieces {
    Part layers;  ///< all of the model
    Part ends;
    double update = 0;  ///< seconds per parameter
  };
  using Key = std::tuple<int, int, int, int64_t, std::string>;  ///< tp, cp, ep, micro, recompute

  const std::optional<Pieces>& pieces(const Layout& layout, const std::string& recompute);
  Part measure(const Config& config, const Layout& layout, int ranks, const std::vector<int64_t>& layers,
               int64_t microbatches);
  parallel::ProcessGrid grid_of(const Layout& layout) const;
  Price compose(const Layout& layout, const Pieces& pieces) const;
  double data_seconds(const Layout& layout, const Part& stage, double passes, double microbatches) const;

  const Config& given_;
  const model::ModelSpec& spec_;
  int world_;
  const std::vector<ClusterNode>& nodes_;
  const predict::ModeledDevice& device_;
  double capacity_, expert_load_;
  Load load_;
  machine::Fabric fabric_;
  std::map<Key, std::optional<Pieces>> pieces_;
  std::map<std::array<int, 2>, double> updates_;  ///< seconds per parameter, by tp and ep
  int dry_runs_ = 0;
};

}  // namespace nrl::planner
