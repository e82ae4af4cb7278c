#include "apps/model/program/stage.h"

#include "core/trace/trace.h"
#include "parallel/program/lower.h"

namespace nrl::model {

using program::Program;

Stage::Stage(std::vector<Chunk> chunks, std::array<int64_t, row_domains> rows, ShardedParameters sharded)
    : chunks_(std::move(chunks)), sharded_(std::move(sharded)) {
  all_.rows = rows;
  const auto buckets_of = [](const std::map<int, program::BucketId>& buckets, const std::vector<int>& of) {
    program::Buckets out;
    for (const int parameter : of)
      if (const auto at = buckets.find(parameter); at != buckets.end()) out.insert(at->second);
    return out;
  };
  std::vector<program::Layer> layers;
  for (size_t c = 0; c < chunks_.size(); ++c)
    for (const auto& layer : chunks_[c]) {
      all_.layers.push_back(layer.get());
      all_.trace_names.push_back(trace::intern(layer->name()));
      layers.push_back({.name = layer->name(),
                        .table = &layer->table(),
                        .policy = &layer->policy(),
                        .later = &layer->policy(true),
                        .ports = layer->ports(),
                        .chunk = static_cast<int>(c)});
      for (const bool backward : {false, true}) {
        const ParameterUse use = layer->parameters(backward);
        layers.back().weights[backward] = buckets_of(sharded_.weights, use.weights);
        layers.back().gradients[backward] = buckets_of(sharded_.gradients, use.gradients);
      }
    }
  all_.list =
      program::Layers(std::move(layers), [this](const memory::SlotSpec& slot) { return bytes_of(slot); });
  all_.list.groups = sharded_.groups;
}

Program Stage::lowered(memory::Mode mode, const pipeline::Schedule& schedule,
                       const ModelLayout& layout) const {
  Program p = program::lower(schedule, all_.list, mode, layout.stages == 1, layout.last_stage());
  p = program::add_recompute(std::move(p), all_.list);
  p = program::add_offload(std::move(p), all_.list);
  if (!sharded_.any()) return p;
  p = program::gather_on_use(p, all_.list, sharded_.prefetch);
  return program::reduce_when_complete(p, all_.list, sharded_.overlap_reduce);
}

int Stage::add_program(memory::Mode mode, const pipeline::Schedule& schedule, const ModelLayout& layout) {
  NRL_CHECK(schedule.stashes.chunks() == static_cast<int>(chunks_.size()), "stashes of {} chunks for {}",
            schedule.stashes.chunks(), chunks_.size());
  return add_program(lowered(mode, schedule, layout));
}

int Stage::add_program(Program program) {
  Planned planned{.list = std::move(program)};
  planned.buffers = program::live_ranges(planned.list, all_.list, liveness_, last_tick_);
  if (sharded_.any())
    program::add_bucket_ranges(planned.list, all_.list, planned.buffers.first_tick, buckets_);
  programs_.push_back(std::move(planned));
  return static_cast<int>(programs_.size()) - 1;
}

void Stage::declare(memory::MemoryPlan& plan) {
  ids_ = liveness_.declare(plan);
}

void Stage::bind(const memory::MemoryPlan& plan, const memory::Arenas& arenas) {
  const auto at = [&](int buffer) { return arenas.at(plan, ids_[buffer]); };
  for (Planned& p : programs_) {
    p.memory.device.assign(p.buffers.device.size(), Tensor{});
    p.memory.host.assign(p.buffers.host.size(), nullptr);
    p.memory.first_tick = p.buffers.first_tick;
    const program::Places places(p.list, all_.list);
    for (program::SlotId s = 0; s < static_cast<program::SlotId>(all_.list.slots.size()); ++s) {
      const memory::SlotSpec& spec = all_.list.spec(s);
      for (int stash = 0; stash < p.list.stashes.count(all_.list.chunk_of(s)); ++stash) {
        const size_t i = places.index_in(s, stash);
        for (size_t b = 2 * i; b < 2 * i + 2; ++b)
          if (p.buffers.device[b] >= 0)
            p.memory.device[b] =
                make_tensor(at(p.buffers.device[b]), spec.dtype, {all_.rows[spec.rows], spec.width});
        if (p.buffers.host[i] >= 0) p.memory.host[i] = static_cast<std::byte*>(at(p.buffers.host[i]));
      }
    }
    p.memory.values.clear();
    for (int l = 0; l < static_cast<int>(all_.layers.size()); ++l)
      p.memory.values.emplace_back(static_cast<size_t>(p.list.stashes.count(all_.list.of(l).chunk)),
                                   std::vector<int32_t>(static_cast<size_t>(layer(l).host_values())));
  }
  const ops::Exec& e = exec();
  all_.copies = memory::HostCopies(e.device, e.stream, e.threads, arenas);
}

void Stage::execute(int program, const Execution& on) {
  execute(program, programs_[program].list, on);
}

void Stage::execute(int program, const Program& list, const Execution& on) {
  Executor(all_, programs_[program].memory, list, on).run();
}

int64_t Stage::bytes_of(const memory::SlotSpec& slot) const {
  return all_.rows[slot.rows] * slot.width * size_of(slot.dtype);
}

}  // namespace nrl::model
