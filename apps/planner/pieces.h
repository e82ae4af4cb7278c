#pragma once
// The pieces that the price of a layout is composed of (price.h): times and bytes of a model's layers and
// ends on a rank, from dry runs of models with few layers.

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "apps/predict/energy.h"
#include "apps/predict/step_time.h"

namespace nrl::planner {

/// Layers of the same kind have the same calls and buffers: window, RoPE, experts.
using LayerKind = std::tuple<int64_t, size_t, bool>;
LayerKind kind_of(const model::ModelSpec& spec, int64_t layer);

/// Seconds of the passes of a microbatch with communication within layers, without traffic of data-parallel
/// ranks.
struct Passes {
  double forward = 0, data = 0, weight = 0;

  double total() const { return forward + data + weight; }
  Passes& operator+=(const Passes& other);
};

/// The items of a visit of a layer. Slots are passes: 0 forward, 1 data, 2 weight. Operations are
/// numbered from 0.
struct VisitItems {
  std::vector<predict::Item> items = {};
  int operations = 0;
};

/// A layer, or an end of the model, for a microbatch.
struct LayerPiece {
  /// The visits of the first microbatch, whose gradients are written, and of others, whose gradients are
  /// added.
  std::array<VisitItems, 2> forward = {}, backward = {};
  std::array<VisitItems, 2> weight = {};  ///< of weight gradients that come later; else in `backward`
  Passes seconds = {};                    ///< the least of both
  /// The part of `seconds` in which the visit waits for copies to and from the host, which go on beside other
  /// layers; its items do not have it.
  Passes copies = {};
  predict::BusySeconds busy = {};
  double kept = 0;   ///< bytes of a microbatch in flight
  double later = 0;  ///< the same between its backward pass and weight gradients that come later
};

/// Changes the piece of a layer whose activations are moved to the host, for a model that moves this share of
/// its layers.
void move_share(LayerPiece& piece, double share);

struct Pieces {
  std::map<LayerKind, LayerPiece> layers;
  LayerPiece embedding = {}, head = {};  ///< nothing kept
  double update = 0;                     ///< seconds of an element of the optimizer state, once a step
  /// Bytes between stages, each way; also of a microbatch in flight beside its layers.
  double message = 0;
  /// Bytes that are neither kept nor state: at most, and while layers are computed.
  double with_head = 0, without_head = 0;
};

/// The sizes that the pieces depend on.
struct PieceSizes {
  int ranks = 1;      ///< of one pipeline stage
  int64_t micro = 1;  ///< sequences of a microbatch
  bool operator==(const PieceSizes&) const = default;
};

class PieceMaker {
 public:
  /// The arguments must outlive this object.
  PieceMaker(const model::ModelSpec& spec, const std::vector<ClusterNode>& nodes,
             const predict::ModeledDevice& device, double expert_load);

  /// The pieces of a model on stages of `sizes.ranks` ranks. `whole`: a configuration of one stage for so
  /// many ranks; `staged`: the same of `stages` stages. Throws Error if the model with fewer layers cannot be
  /// planned, as with keys that name layers by their numbers.
  static constexpr int stages = 3;
  Pieces make(const Config& whole, const Config& staged, const PieceSizes& sizes);
  /// The pieces with passes for weight gradients of their own. `staged`: with such a schedule.
  Pieces with_weights_later(Pieces of, const Config& staged, const PieceSizes& sizes);

  int dry_runs() const { return dry_runs_; }

 private:
  struct Small;
  Small plan(const Config& config, const model::ModelSpec& few, int ranks, int stage, const PieceSizes& sizes,
             int64_t microbatches);
  /// The pieces of all layers of the rank, the ends included. Sets the seconds of the update.
  std::vector<LayerPiece> pieces(const Config& config, Small small, int stages, double* update);

  const model::ModelSpec& spec_;
  const std::vector<ClusterNode>& nodes_;
  const predict::ModeledDevice& device_;
  double expert_load_;
  std::map<LayerKind, std::vector<size_t>> places_;  ///< of the kinds, in the model with few layers
  model::ModelSpec few_, fewer_;                     ///< every kind three times, and twice
  int dry_runs_ = 0;
};

}  // namespace nrl::planner
