#include "apps/engine/group_tensors.h"

#include "core/ops/optimizer.h"
#include "core/ops/transfer.h"

namespace nrl::engine {

Tensor GroupTensors::find(std::string_view name) const {
  for (size_t i = 0; i < state.size(); ++i)
    if (group->state[i].name == name) return state[i];
  return {};
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
    t.weights = view(g.weights, g.weight, g.layout.total());
    if (!g.trainable) continue;
    t.gradients = view(g.gradients, g.gradient, g.layout.total());
    for (const plan::StateTensor& s : g.state) t.state.push_back(view(s.buffer, s.dtype, g.state_elements()));
    const auto chunks = static_cast<int64_t>(g.chunk_table.size()) / 4;
    t.chunks = make_tensor(arenas.at(plan, g.chunks), DType::i64, {chunks, 4});
    ops::upload(exec, t.chunks, g.chunk_table.data());
  }
  return out;
}

std::vector<model::ParameterView> parameter_views(const model::ParameterList& parameters,
                                                  std::span<const GroupTensors> groups) {
  std::vector<model::ParameterView> views(parameters.all.size());
  for (const GroupTensors& t : groups) {
    const plan::ParamGroup& g = *t.group;
    for (size_t i = 0; i < g.parameters.size(); ++i) {
      const auto p = static_cast<size_t>(g.parameters[i]);
      const int64_t start = g.layout.place(static_cast<int>(i)).start;
      const auto in = [&](const Tensor& flat) {
        if (!flat) return Tensor{};
        return parameters.all[p].view(static_cast<char*>(flat.data) + start * size_of(flat.dtype),
                                      flat.dtype);
      };
      views[p] = {in(t.weights), in(t.gradients), parameters.all[p].overwrites_gradient};
    }
  }
  return views;
}

std::vector<Tensor> parameter_weights(const model::ParameterList& parameters,
                                      std::span<const GroupTensors> groups) {
  std::vector<Tensor> out;
  for (const model::ParameterView& view : parameter_views(parameters, groups)) out.push_back(view.weight);
  return out;
}

void initialize_master_weights(ops::Exec& exec, std::span<const GroupTensors> groups) {
  for (const GroupTensors& t : groups)
    if (const Tensor master = t.find("master"))
      for (const plan::OwnedRange& r : t.group->owned)
        ops::convert(exec, {.x = t.weights.rows(r.flat, r.count), .out = master.rows(r.state, r.count)});
}

}  // namespace nrl::engine
