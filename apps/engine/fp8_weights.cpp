#include "apps/engine/fp8_weights.h"

#include <algorithm>
#include <numeric>

#include "core/base/error.h"
#include "core/ops/optimizer.h"
#include "core/ops/quantize.h"
#include "core/trace/trace.h"

namespace nrl::engine {

Fp8Weights::Fp8Weights(std::span<const GroupTensors> groups, const model::ParameterList& parameters,
                       const model::WeightScales& scales, int tensor, const parallel::Groups& ranks,
                       ops::Exec& exec)
    : scales_(scales), exec_(exec) {
  for (const GroupTensors& t : groups) {
    const plan::ParamGroup& g = *t.group;
    if (!g.fp8) continue;
    NRL_CHECK(!group_, "{} and {} are both in FP8", group_->name, g.name);
    group_ = &g;
    for (const plan::OwnedRange& r : g.owned) {
      const auto p = static_cast<size_t>(r.parameter);
      const auto place = std::find(g.parameters.begin(), g.parameters.end(), r.parameter);
      const int64_t codes =
          g.weights_gathered
              ? r.weight
              : g.layout.place(static_cast<int>(place - g.parameters.begin())).start + r.offset;
      const int64_t index = scales.index[p];
      const std::vector<int64_t>& shape = parameters.all[p].shape;
      // Rows that several threads share; shards begin at multiples of 64 elements.
      const int64_t columns = std::gcd(r.count, int64_t{1024});
      NRL_CHECK(index >= 0 && columns % 16 == 0 && r.offset % 16 == 0, "{}: {} elements from {} in FP8",
                parameters.all[p].name, r.count, r.offset);
      const auto part = [&](const Tensor& flat, int64_t first) {
        const Tensor elements = flat.rows(first, r.count);
        if (has_scale_blocks(scales.scaling)) return elements;
        return make_tensor(elements.data, elements.dtype, {r.count / columns, columns}, elements.device);
      };
      pieces_.push_back({.weights = part(t.weights, r.weight),
                         .codes = part(t.codes, codes),
                         .first = r.offset,
                         .columns = shape[1],
                         .scale = index,
                         .scales = scale_matrix(scales.scaling, shape[0], shape[1]).bytes / 4});
    }
  }
  // Delayed scales are agreed on in Fp8State::update().
  if (const auto agree =
          group_ && !scales.delayed ? group_->scale_group(tensor, scales.scaling) : std::nullopt)
    ranks_ = &ranks[*agree];
}

void Fp8Weights::measure(const Piece& p) const {
  const Tensor amax = scales_.amax.rows(p.scale, p.scales);
  if (has_scale_blocks(scales_.scaling))
    ops::block_magnitudes(exec_, {.part = {p.weights, p.first, p.columns}, .amax = amax});
  else
    ops::largest_magnitude(exec_, {.source = {p.weights}, .amax = amax});
}

void Fp8Weights::round(const Piece& p) const {
  const Tensor scale = scales_.scale.rows(p.scale, p.scales);
  if (has_scale_blocks(scales_.scaling)) {
    ops::quantize_part(exec_, {.part = {p.weights, p.first, p.columns}, .scale = scale, .out = p.codes});
    return;
  }
  Tensor codes = p.codes;
  codes.scales = {.data = scale.data, .kind = Scaling::tensor};
  if (scales_.delayed) codes.scales.amax = scales_.amax.ptr<float>() + p.scale;
  ops::quantize(exec_, {.source = {p.weights}, .row = codes});
}

void Fp8Weights::write() {
  if (!group_) return;
  const trace::Range range("fp8_weights");
  const Tensor& amax = scales_.amax;
  const int64_t n = amax.dim(0);
  if (scales_.delayed) {
    ops::zero(exec_, {.x = amax});
  } else {
    for (const Piece& p : pieces_) measure(p);
    if (ranks_)
      ranks_
          ->all_reduce_async(comm::View(amax.data, n, amax.dtype), comm::Reduce::max,
                             comm::StreamRef{exec_.stream})
          .wait();
    ops::update_scales(exec_, {.amax = make_tensor(amax.data, DType::f32, {1, n}, amax.device),
                               .scale = scales_.scale,
                               .format = group_->read_type(),
                               .margin = scales_.margin,
                               .blocks = has_scale_blocks(scales_.scaling)});
  }
  for (const Piece& p : pieces_) round(p);
}

}  // namespace nrl::engine
