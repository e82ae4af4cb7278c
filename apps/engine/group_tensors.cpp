#include "apps/engine/group_tensors.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/ops/optimizer.h"
#include "core/ops/transfer.h"

namespace nrl::engine {

namespace {

Tensor named(const GroupTensors& t, const std::vector<Tensor>& tensors, std::string_view name) {
  for (size_t i = 0; i < tensors.size(); ++i)
    if (t.group->state[i].name == name) return tensors[i];
  return {};
}

}  // namespace

Tensor GroupTensors::find(std::string_view name, bool of_offloaded) const {
  return named(*this, of_offloaded ? offloaded : state, name);
}

Tensor GroupTensors::find_scales(std::string_view name, bool of_offloaded) const {
  return named(*this, of_offloaded ? offloaded_scales : scales, name);
}

std::vector<GroupTensors> bind_groups(std::span<const plan::ParamGroup> groups,
                                      const memory::MemoryPlan& plan, const memory::Arenas& arenas,
                                      ops::Exec& exec) {
  std::vector<GroupTensors> out;
  for (const plan::ParamGroup& g : groups) {
    const auto view = [&](memory::BufferId id, DType dtype, int64_t n) {
      return make_tensor(arenas.at(plan, id), dtype, {n});
    };
    GroupTensors& t = out.emplace_back();
    t.group = &g;
    t.weights = view(g.weights, g.weight, g.weight_elements());
    if (g.fp8) t.codes = view(g.codes, g.read_type(), g.code_elements());
    const auto by_bucket = [&](const std::vector<memory::BufferId>& ids, DType dtype) {
      std::vector<Tensor> buffers;
      for (size_t b = 0; b < ids.size(); ++b)
        buffers.push_back(view(ids[b], dtype, g.layout.buckets()[b].size));
      return buffers;
    };
    t.gathered = by_bucket(g.gathered, g.read_type());
    if (!g.trainable) continue;
    t.gradients = view(g.gradients, g.main_gradient, g.gradient_elements());
    t.bucket_gradients = by_bucket(g.bucket_gradients, g.gradient);
    const parallel::ReduceOptions reduction = g.reduce_options(true);
    if (g.staging >= 0)
      t.staging = view(g.staging, reduction.fp8() ? DType::u8 : g.wire, reduction.staging_elements(g.layout));
    if (g.errors >= 0) t.errors = view(g.errors, DType::f32, reduction.error_elements(g.layout));
    if (g.sum_errors >= 0)
      t.sum_errors = view(g.sum_errors, DType::f32, reduction.sum_error_elements(g.layout));
    for (const plan::StateTensor& s : g.state) {
      const auto add = [&](memory::BufferId values, memory::BufferId scales, int64_t n,
                           std::vector<Tensor>& into, std::vector<Tensor>& scales_into) {
        into.push_back(view(values, s.dtype, n));
        scales_into.push_back(scales < 0 ? Tensor{} : view(scales, DType::u8, ops::moment_blocks(n)));
      };
      add(s.buffer, s.scales, g.resident_state_elements(), t.state, t.scales);
      if (s.offloaded >= 0)
        add(s.offloaded, s.offloaded_scales, g.offloaded_elements, t.offloaded, t.offloaded_scales);
    }
    t.chunks = make_tensor(arenas.at(plan, g.chunks), DType::i64, {g.chunk_count(), 4});
    if (!exec.needed) ops::upload(exec, t.chunks, g.chunk_rows().data());  // not in a dry run
  }
  return out;
}

namespace {

/// A parameter of a group, the `index`-th, in a flat buffer from `start` on.
Tensor parameter_in(const model::ParameterList& parameters, const plan::ParamGroup& g, size_t index,
                    const Tensor& buffer, int64_t start) {
  if (!buffer) return {};
  return parameters.all[g.parameters[index]].view(
      static_cast<char*>(buffer.data) + start * size_of(buffer.dtype), buffer.dtype);
}

}  // namespace

std::vector<model::ParameterView> parameter_views(const model::ParameterList& parameters,
                                                  std::span<const GroupTensors> groups) {
  std::vector<model::ParameterView> views(parameters.all.size());
  for (const GroupTensors& t : groups) {
    const plan::ParamGroup& g = *t.group;
    for (size_t i = 0; i < g.parameters.size(); ++i) {
      const auto p = static_cast<size_t>(g.parameters[i]);
      const parallel::ParamPlace& place = g.layout.place(static_cast<int>(i));
      const auto bucket = static_cast<size_t>(place.bucket);
      const auto of = [&](const Tensor& flat, bool by_bucket, const std::vector<Tensor>& buckets) {
        return by_bucket ? parameter_in(parameters, g, i, buckets.at(bucket), place.offset)
                         : parameter_in(parameters, g, i, flat, place.start);
      };
      views[p] = {.weight = of(g.fp8 ? t.codes : t.weights, g.weights_gathered, t.gathered),
                  .grad = of(t.gradients, g.gradient_buckets, t.bucket_gradients),
                  .overwrites_gradient = parameters.all[p].overwrites_gradient && !g.adds_microbatches,
                  .grad_per_microbatch = g.gradient_buckets};
    }
  }
  return views;
}

std::vector<Tensor> parameter_weights(const model::ParameterList& parameters,
                                      std::span<const GroupTensors> groups) {
  std::vector<Tensor> out(parameters.all.size());
  for (const GroupTensors& t : groups) {
    const plan::ParamGroup& g = *t.group;
    NRL_CHECK(!g.weights_sharded, "{}: the weights are sharded", g.name);
    for (size_t i = 0; i < g.parameters.size(); ++i)
      out[g.parameters[i]] =
          parameter_in(parameters, g, i, t.weights, g.layout.place(static_cast<int>(i)).start);
  }
  return out;
}

std::vector<WeightSlice> whole_slices(const model::ParameterList& parameters,
                                      std::span<const Tensor> weights) {
  std::vector<WeightSlice> out;
  for (size_t p = 0; p < weights.size(); ++p) {
    const Tensor flat = make_tensor(weights[p].data, weights[p].dtype, {weights[p].numel()});
    for (const model::Part& part : parameters.all[p].parts)
      out.push_back({static_cast<int>(p), part, flat.rows(part.offset, part.numel())});
  }
  return out;
}

namespace {

// Elements [begin, end) of a part as rectangles; the first of them is at `at` in `weights`.
void add_slices(int parameter, const model::Part& part, int64_t begin, int64_t end, const Tensor& weights,
                int64_t at, std::vector<WeightSlice>& out) {
  const int64_t c = part.columns;
  part.for_each_rows(begin, end, [&](int64_t first, int64_t last) {
    WeightSlice slice{parameter, part, weights.rows(at + first - begin, last - first)};
    slice.part.row += first / c;
    slice.part.rows = std::max<int64_t>((last - first) / c, 1);
    slice.part.column += first % c;
    slice.part.columns = std::min(last - first, c);
    slice.part.offset += first;
    out.push_back(std::move(slice));
  });
}

}  // namespace

std::vector<WeightSlice> weight_slices(const model::ParameterList& parameters,
                                       std::span<const GroupTensors> groups) {
  std::vector<WeightSlice> out;
  for (const GroupTensors& t : groups) {
    const plan::ParamGroup& g = *t.group;
    if (g.weights_sharded) continue;
    for (size_t i = 0; i < g.parameters.size(); ++i)
      for (const model::Part& part : parameters.all[g.parameters[i]].parts)
        add_slices(g.parameters[i], part, 0, part.numel(), t.weights,
                   g.layout.place(static_cast<int>(i)).start + part.offset, out);
  }
  std::stable_sort(out.begin(), out.end(),
                   [](const WeightSlice& a, const WeightSlice& b) { return a.parameter < b.parameter; });
  for (const GroupTensors& t : groups) {
    if (!t.group->weights_sharded) continue;
    for (const plan::OwnedRange& r : t.group->owned)
      parameters.all[r.parameter].for_each_part(r.offset, r.count,
                                                [&](const model::Part& part, int64_t begin, int64_t end) {
                                                  add_slices(r.parameter, part, begin, end, t.weights,
                                                             r.weight + part.offset + begin - r.offset, out);
                                                });
  }
  return out;
}

void initialize_master_weights(ops::Exec& exec, std::span<const GroupTensors> groups) {
  for (const GroupTensors& t : groups) {
    const Tensor master = t.find("master");
    if (!master) continue;
    if (master.dtype == DType::u16) {
      ops::zero(exec, {.x = master});  // remainders
      continue;
    }
    for (const plan::OwnedRange& r : t.group->owned)
      if (!r.offloaded)
        ops::convert(exec, {.x = t.weights.rows(r.weight, r.count), .out = master.rows(r.state, r.count)});
  }
}

}  // namespace nrl::engine
