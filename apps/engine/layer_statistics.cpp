#include "apps/engine/layer_statistics.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "apps/model/decoder.h"
#include "core/base/error.h"
#include "core/ops/optimizer.h"
#include "core/ops/transfer.h"
#include "core/trace/trace.h"

namespace nrl::engine {
namespace {

enum Kind : int { gradients, weights, residual, attention, mlp };
static_assert(mlp + 1 == plan::layer_sum_kinds);

Kind kind_of(std::string_view slot) {
  if (slot == "residual") return residual;
  if (slot == "projection") return attention;
  return slot == "mlp_out" || slot == "moe" ? mlp : gradients;
}

// The number of a block's layer, "layer_3"; -1: another layer.
int block_of(std::string_view layer) {
  constexpr std::string_view prefix = "layer_";
  int block = -1;
  if (layer.starts_with(prefix))
    std::from_chars(layer.data() + prefix.size(), layer.data() + layer.size(), block);
  return block;
}

}  // namespace

LayerStatistics::LayerStatistics(Engine& engine) : engine_(engine), sums_(engine.layer_sums()) {
  const plan::RunPlan& plan = engine.plan();
  NRL_CHECK(sums_, "the plan has no memory for statistics of layers");
  layers_ = plan.spec.layers + 2;
  of_parameter_ = plan.parameters.units();
  // Which stage counts a tied embedding depends on the layout.
  if (plan.spec.tied && plan.parameters.head >= 0)
    of_parameter_[static_cast<size_t>(plan.parameters.head)] = 0;
  const program::Layers& all = plan.decoder->all_layers();
  of_slot_.assign(all.slots.size(), -1);
  std::vector<bool> known(static_cast<size_t>(layers_ * plan::layer_sum_kinds));
  for (size_t slot = 0; slot < all.slots.size(); ++slot) {
    const int block = block_of(all.of(all.slots[slot].layer).name);
    const Kind kind = kind_of(all.spec(static_cast<program::SlotId>(slot)).name);
    if (block < 0 || kind == gradients) continue;
    const auto index = static_cast<size_t>((block + 1) * plan::layer_sum_kinds + kind);
    // Both norms of a block have a slot of the residual stream; the one of attention comes first.
    if (!known[index]) of_slot_[slot] = static_cast<int>(index);
    known[index] = true;
  }
}

void LayerStatistics::add(const Tensor& x, int64_t layer, int kind) {
  ops::add_sum_of_squares(
      engine_.exec(),
      {.x = x, .out = sums_.rows(layer * plan::layer_sum_kinds + kind, 1), .accumulate = true});
}

void LayerStatistics::begin() {
  ops::zero(engine_.exec(), {.x = sums_});
  rows_.assign(static_cast<size_t>(layers_ * plan::layer_sum_kinds), 0);
  model::Decoder& decoder = *engine_.plan().decoder;
  before_ = decoder.watch_results({});
  decoder.watch_results([this](const model::StepResults& r) {
    if (before_) before_(r);
    if (r.mode != memory::training || r.step.backward || r.step.again) return;
    for (const model::SlotValue& written : r.written) {
      const int index = of_slot_[static_cast<size_t>(written.slot)];
      if (index < 0) continue;
      const trace::Range range("layer_statistics", trace::Kind::report);
      add(written.value, index / plan::layer_sum_kinds, index % plan::layer_sum_kinds);
      rows_[static_cast<size_t>(index)] += static_cast<double>(written.value.numel());
    }
  });
}

void LayerStatistics::gradients_reduced() {
  const trace::Range range("layer_statistics", trace::Kind::report);
  for (const GroupTensors& t : engine_.groups())
    for (const plan::OwnedRange& r : t.group->owned) {
      if (!r.counted || !t.gradients) continue;
      const int layer = of_parameter_[static_cast<size_t>(r.parameter)];
      add(t.gradients.rows(r.gradient, r.count), layer, gradients);
      add(t.weights.rows(r.weight, r.count), layer, weights);
    }
}

void LayerStatistics::end() {
  engine_.plan().decoder->watch_results(std::exchange(before_, {}));
}

std::vector<double> LayerStatistics::sums() {
  std::vector<double> out(2 * rows_.size());
  ops::download(engine_.exec(), sums_, out.data());
  std::copy(rows_.begin(), rows_.end(), out.begin() + std::ssize(rows_));
  return out;
}

monitor::LayerTable LayerStatistics::table(std::span<const double> sums, double loss_scale) const {
  const size_t half = sums.size() / 2;
  NRL_CHECK(half == rows_.size() && half > 0, "{} sums of {} layers", sums.size(), layers_);
  monitor::LayerTable out{
      .columns = {{"grad_norm"}, {"weight_norm"}, {"residual_rms"}, {"attention_rms"}, {"mlp_rms"}}};
  for (int64_t layer = 0; layer < layers_; ++layer) {
    out.layers.push_back(layer == 0             ? "embedding"
                         : layer + 1 == layers_ ? "head"
                                                : std::to_string(layer - 1));
    const auto at = [&](int kind) { return static_cast<size_t>(layer * plan::layer_sum_kinds + kind); };
    const bool trained = sums[at(weights)] != 0;
    for (const int kind : {gradients, weights})
      out.columns[static_cast<size_t>(kind)].values.push_back(
          trained ? std::sqrt(sums[at(kind)]) / (kind == gradients ? loss_scale : 1) : NAN);
    for (const int kind : {residual, attention, mlp})
      out.columns[static_cast<size_t>(kind)].values.push_back(
          std::sqrt(sums[at(kind)] / sums[half + at(kind)]));
  }
  return out;
}

}  // namespace nrl::engine
