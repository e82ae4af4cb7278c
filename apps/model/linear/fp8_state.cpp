#include "apps/model/linear/fp8_state.h"

#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"

namespace nrl::model {

using memory::Category;
using precision::Gemm;
using precision::Role;

int64_t quantized_bytes(Scaling scaling, int64_t rows, int64_t columns) {
  return rows * columns + (has_scale_blocks(scaling) ? scale_matrix(scaling, rows, columns).bytes : 0);
}

Tensor quantized_tensor(void* data, const precision::Format& format, int64_t rows, int64_t columns,
                        Device device) {
  Tensor t = make_tensor(data, format.dtype, {rows, columns}, device);
  const ScaleMatrix steps = scale_matrix(format.scaling, rows, columns);
  t.scales = {.kind = format.scaling, .row_step = steps.row_step, .column_step = steps.column_step};
  if (has_scale_blocks(format.scaling)) t.scales.data = static_cast<char*>(data) + rows * columns;
  return t;
}

int64_t Fp8State::Buffers::scales() const {
  return format.scaling == Scaling::tensor || kept ? scale_matrix(format.scaling, rows, columns).bytes / 4
                                                   : 0;
}

Fp8State::Fp8State(const ModelSpec& spec, const ModelLayout& layout, const precision::Recipe& recipe,
                   const ParameterList& parameters, memory::MemoryPlan& plan)
    : gemms_(recipe.quantized()), weights_(parameters.all.size()) {
  const auto layers = static_cast<int>(spec.layers);
  const precision::ScaleLayout scales = delayed_.layout = recipe.scales(layers, spec.expert_layers() > 0);
  for (int l = 0; l < layers; ++l)
    for (const auto& [gemm, parameter] : gemm_weights(parameters.layers[l])) {
      const precision::Format format = recipe.of(l, gemm, Role::weight);
      if (format.scaling == Scaling::none) continue;
      const Parameter& weight = parameters.all[parameter];
      const bool grouped = gemm == Gemm::experts_in || gemm == Gemm::experts_out;
      const int64_t experts = grouped ? expert_shape(spec, layout).local() : 1;
      const int64_t rows = weight.shape[0], columns = weight.shape[1];
      const auto add = [&](const char* what, int64_t m, int64_t k) {
        return recipe.caches_fp8(l, gemm)
                   ? plan.add(weight.name + what, Category::weights, quantized_bytes(format.scaling, m, k))
                   : -1;
      };
      buffers_.push_back({.parameter = parameter,
                          .format = format,
                          .rows = rows,
                          .columns = columns,
                          .experts = experts,
                          .scale = scales.layers > 0 ? scales.index(l, gemm, Role::weight) : -1,
                          .kept = recipe.keeps_fp8(l, gemm),
                          .row = add(" in FP8", rows, columns),
                          .column = add(" in FP8, transposed", columns * experts, rows / experts)});
    }
  // Scales and magnitudes of tensors, or of the blocks of weights that are kept in FP8. Delayed scales of
  // those: the magnitudes that the next update() takes.
  const int64_t numbers = scales.layers == 0 ? 2 * own_scales() + aligned_scale * aligned_scales()
                          : gemms_.primary   ? scales.of_role()
                                             : 0;
  if (numbers > 0) kept_buffer_ = plan.add("scales of FP8 weights", Category::weights, numbers * 4);
  if (scales.layers > 0) delayed_buffer_ = plan.add("FP8 scales", Category::optimizer, scales.bytes());
}

int64_t Fp8State::own_scales() const {
  int64_t sum = 0;
  for (const Buffers& b : buffers_) sum += b.scales();
  return sum;
}

int64_t Fp8State::aligned_scales() const {
  return has_scale_blocks(gemms_.weight.scaling) ? 0 : own_scales();
}

void Fp8State::bind(const memory::MemoryPlan& plan, const memory::Arenas& arenas, ops::Exec& exec,
                    std::span<const Tensor> weights) {
  bind_scales(plan, arenas, exec);
  kept_.index.assign(weights_.size(), -1);
  const int64_t first = int64_t{delayed_.layout.of_role()} * static_cast<int64_t>(Role::weight);
  int64_t next = 0;
  for (const Buffers& b : buffers_) {
    const auto p = static_cast<size_t>(b.parameter);
    QuantizedWeight& w = weights_[p];
    if (b.kept) {
      w.row = quantized_tensor(weights[p].data, b.format, b.rows, b.columns, weights[p].device);
    } else if (b.row >= 0) {
      w.row = quantized_tensor(arenas.at(plan, b.row), b.format, b.rows, b.columns, {});
      w.column = quantized_tensor(arenas.at(plan, b.column), b.format, b.columns * b.experts,
                                  b.rows / b.experts, {});
    }
    if (b.scales() == 0) continue;
    const int64_t index = kept_.delayed ? b.scale - first : next;
    next += b.scales();
    const Tensor& scale = kept_.delayed ? delayed_.aligned : kept_.aligned ? kept_.aligned : kept_.scale;
    w.row.scales.data = w.column.scales.data = scale.rows(kept_.delayed ? b.scale : index, 1).data;
    if (b.kept)
      kept_.index[p] = index;
    else if (!kept_.delayed)
      w.amax = kept_.amax.rows(index, 1);
  }
}

void Fp8State::bind_scales(const memory::MemoryPlan& plan, const memory::Arenas& arenas, ops::Exec& exec) {
  if (delayed_buffer_ >= 0) {
    auto* data = static_cast<float*>(arenas.at(plan, delayed_buffer_));
    const int64_t n = delayed_.layout.operands();
    delayed_.aligned = make_tensor(data, DType::f32, {n, aligned_scale});
    data += n * aligned_scale;
    delayed_.scale = make_tensor(data, DType::f32, {n});
    delayed_.amax = make_tensor(data + n, DType::f32, {delayed_.layout.history, n});
    const std::vector<float> ones(static_cast<size_t>(n), 1.0f);
    ops::upload(exec, delayed_.scale, ones.data());
  }
  kept_.delayed = delayed_.layout.layers > 0;
  kept_.margin = gemms_.margin;
  kept_.scaling = gemms_.weight.scaling;
  if (kept_buffer_ < 0) return;
  auto* data = static_cast<float*>(arenas.at(plan, kept_buffer_));
  if (kept_.delayed) {
    const int64_t n = delayed_.layout.of_role();
    kept_.scale = delayed_.scale.rows(n * static_cast<int64_t>(Role::weight), n);
    kept_.amax = make_tensor(data, DType::f32, {n});
    return;
  }
  const int64_t n = own_scales();
  if (aligned_scales() > 0) {
    kept_.aligned = make_tensor(data, DType::f32, {n, aligned_scale});
    data += n * aligned_scale;
  }
  kept_.scale = make_tensor(data, DType::f32, {n});
  kept_.amax = make_tensor(data + n, DType::f32, {n});
}

void Fp8State::align(ops::Exec& exec) const {
  const auto copy = [&](const Tensor& scale, const Tensor& aligned) {
    if (aligned)
      ops::copy(exec, make_tensor(scale.data, DType::f32, {scale.dim(0), 1}), aligned.columns(0, 1));
  };
  copy(delayed_.scale, delayed_.aligned);
  // Where GEMMs read copies of weights, these are made, and their scales written, in the first microbatch.
  if (gemms_.primary) copy(kept_.scale, kept_.aligned);
}

void Fp8State::update(ops::Exec& exec, const parallel::Groups* groups) const {
  const DelayedScales& s = delayed_;
  if (!s.scale) return;
  const int64_t n = s.layout.of_role();
  if (kept_.amax) {  // that this step has read
    float* const measured = s.amax.ptr<float>() + static_cast<int64_t>(Role::weight) * n;
    ops::copy(exec, make_tensor(kept_.amax.data, DType::f32, {1, n}),
              make_tensor(measured, DType::f32, {1, n}));
  }
  if (groups) {
    const Tensor own = s.amax.rows(0, 1);
    (*groups)[parallel::group::all]
        .all_reduce_async({own.data, own.numel(), own.dtype}, comm::Reduce::max, comm::StreamRef{exec.stream})
        .wait();
  }
  for (const Role role : precision::all_roles) {
    const int64_t first = static_cast<int64_t>(role) * n;
    const DType format = (role == Role::gradient ? gemms_.gradient : gemms_.input).dtype;
    ops::update_scales(exec, {.amax = s.amax.columns(first, n),
                              .scale = s.scale.rows(first, n),
                              .format = format,
                              .margin = gemms_.margin,
                              .most_recent = gemms_.most_recent,
                              .keep = true});
  }
}

}  // namespace nrl::model
