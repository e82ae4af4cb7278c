#include "apps/engine/replica_hashes.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/ops/hash.h"
#include "core/ops/optimizer.h"
#include "core/ops/transfer.h"

namespace nrl::engine {
namespace {

using parallel::GroupId;

class Collector {
 public:
  explicit Collector(const Engine& engine) : plan_(engine.plan()) {
    for (const WeightSlice& slice : engine.weight_slices())
      add(slice.part.name, slice.values, false,
          groups_of(group_of(slice.parameter), group_of(slice.parameter).weights_sharded, slice.parameter));
    for (const GroupTensors& t : engine.groups()) {
      const plan::ParamGroup& g = *t.group;
      for (const plan::StateTensor& state : g.state) {
        for (const plan::OwnedRange& r : g.owned) {
          const Tensor values = t.find(state.name, r.offloaded);
          plan_.parameters.all[static_cast<size_t>(r.parameter)].for_each_part(
              r.offset, r.count, [&](const model::Part& part, int64_t begin, int64_t end) {
                add(state.name + "/" + part.name,
                    values.rows(r.state + part.offset + begin - r.offset, end - begin), r.offloaded,
                    groups_of(g, g.sharded(), r.parameter));
              });
        }
        for (const bool offloaded : {false, true})
          if (const Tensor scales = t.find_scales(state.name, offloaded))
            add(state.name + " scales of " + g.name, scales, offloaded, groups_of(g, g.sharded(), -1));
      }
    }
  }

  std::vector<KeptTensor> take() { return std::move(tensors_); }

 private:
  void add(const std::string& name, const Tensor& values, bool on_host, std::vector<GroupId> groups) {
    if (values.numel() == 0) return;
    const auto [at, is_new] = index_.try_emplace({name, on_host}, tensors_.size());
    if (is_new) tensors_.push_back({name, {}, on_host, std::move(groups)});
    tensors_[at->second].parts.push_back(values);
  }

  const plan::ParamGroup& group_of(int parameter) const {
    for (const plan::ParamGroup& g : plan_.groups)
      if (std::find(g.parameters.begin(), g.parameters.end(), parameter) != g.parameters.end()) return g;
    NRL_CHECK(false, "parameter {} is in no group", parameter);
  }

  // Replicas of a whole tensor are in all slices of a group, replicas of a shard in one place of each slice.
  std::vector<GroupId> groups_of(const plan::ParamGroup& g, bool sharded, int parameter) const {
    std::vector<GroupId> out;
    if (!sharded) out.push_back(g.shard_group());
    if (g.replicas > 1) out.push_back(g.replica_group());
    if (parameter >= 0 && plan_.parameters.all[static_cast<size_t>(parameter)].copies == model::Copies::tp)
      out.push_back(parallel::group::tp);
    std::erase_if(out, [&](const GroupId& id) { return plan_.position.grid.group_size(id) == 1; });
    return out;
  }

  const plan::RunPlan& plan_;
  std::vector<KeptTensor> tensors_;
  std::map<std::pair<std::string, bool>, size_t> index_;
};

}  // namespace

std::vector<KeptTensor> kept_tensors(const Engine& engine) {
  return Collector(engine).take();
}

std::vector<int64_t> hashes_of(Engine& engine, std::span<const KeptTensor> tensors) {
  ops::Exec& exec = engine.exec();
  std::vector<int64_t> hashes(tensors.size());
  const Tensor spare = engine.spare_sums();
  const Tensor sums = make_tensor(spare.data, DType::i64, {spare.numel()}, spare.device);
  const auto at_once = static_cast<size_t>(sums.numel());
  for (size_t begin = 0; begin < tensors.size(); begin += at_once) {
    const size_t end = std::min(begin + at_once, tensors.size());
    ops::zero(exec, {.x = sums});
    for (size_t i = begin; i < end; ++i) {
      int64_t first = 0;
      if (tensors[i].on_host) continue;
      for (const Tensor& part : tensors[i].parts) {
        ops::add_hash(exec,
                      {.x = part, .out = sums.rows(static_cast<int64_t>(i - begin), 1), .first = first});
        first += part.numel();
      }
    }
    std::vector<int64_t> some(at_once);
    ops::download(exec, sums, some.data());
    std::copy_n(some.begin(), end - begin, hashes.begin() + static_cast<std::ptrdiff_t>(begin));
  }
  const bool any_on_host =
      std::any_of(tensors.begin(), tensors.end(), [](const KeptTensor& t) { return t.on_host; });
  if (!any_on_host) return hashes;
  // In pieces, because offloaded memory may be larger than the host's.
  const std::unique_ptr<Staging> staging = engine.staging();
  ops::Exec host;
  host.kernels = exec.device ? &ops::cpu_kernels(engine.plan().host_isa) : exec.kernels;
  host.threads = exec.device ? engine.plan().host_threads : exec.threads;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].on_host) continue;
    int64_t first = 0;
    for (const Tensor& part : tensors[i].parts) {
      std::vector<MemoryRange> pieces;
      append_pieces(*staging, part.data, static_cast<size_t>(part.bytes()), pieces);
      staging->read_ahead(pieces);
      for (const MemoryRange& piece : pieces) {
        const int64_t n = static_cast<int64_t>(piece.bytes) / size_of(part.dtype);
        ops::add_hash(host, {.x = make_tensor(const_cast<void*>(staging->next()), part.dtype, {n}),
                             .out = make_tensor(&hashes[i], DType::i64, {1}),
                             .first = first});
        first += n;
      }
    }
  }
  return hashes;
}

}  // namespace nrl::engine
