#include "apps/model/layers/sublayer.h"

namespace nrl::model {

void Sublayer::add_output(const LayerBuilder& b, std::string_view name, std::string_view gradient) {
  out_ = b.activation(name, b.spec.hidden, sequence_rows);
  d_y_ = b.spec.residual_dropout > 0 ? b.gradient(gradient, b.spec.hidden, sequence_rows) : ends_.d_out;
}

void Sublayer::add_amax(const LayerBuilder& b, const Linear& last) {
  if (last.measures(ends_.d_out))
    d_out_amax_ = b.number(ends_.port ? "d_out amax" : "d_residual amax", ends_.port);
}

Value Sublayer::output_gradient(Run& r, std::string_view step) const {
  const Slot d_out = ends_.d_out;
  if (d_y_.id != d_out.id)
    r.dgrad(step, reads(d_out), writes(d_y_),
            [&] { r.drop(r[d_out], {}, r[d_y_], spec_.residual_dropout, layer_, site_); });
  return {.slot = d_y_, .amax = d_out_amax_};
}

}  // namespace nrl::model
