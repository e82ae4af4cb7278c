#include "parallel/program/program.h"

#include <algorithm>
#include <map>

#include <spdlog/fmt/fmt.h>

#include "core/base/error.h"

namespace nrl::program {

using memory::Slot;

std::string Layers::name(SlotId slot) const {
  return fmt::format("{} {}", of(slots[slot].layer).name, spec(slot).name);
}

std::string Layers::name(BucketId bucket) const {
  return fmt::format("{} bucket {}", groups[bucket.group], bucket.bucket);
}

void Layers::link() {
  begins_ = {0};
  for (size_t l = 0; l < layers.size(); ++l) {
    Layer& layer = layers[l];
    if (l > 0 && layer.chunk != layers[l - 1].chunk) begins_.push_back(static_cast<int>(l));
    const auto share = [&](Slot port, const Layer& other, Slot slot) {
      if (port && slot) layer.slots[port.id] = other.slots[slot.id];
    };
    const memory::Ports& own = layer.ports;
    if (l > 0 && layers[l - 1].chunk == layer.chunk) {
      share(own.x, layers[l - 1], layers[l - 1].ports.out);
      share(own.residual, layers[l - 1], layers[l - 1].ports.sum);
    }
    if (l + 1 < layers.size() && layers[l + 1].chunk == layer.chunk) {
      share(own.d_out, layers[l + 1], layers[l + 1].ports.d_x);
      share(own.d_out_amax, layers[l + 1], layers[l + 1].ports.d_x_amax);
    }
  }
  begins_.push_back(static_cast<int>(layers.size()));
}

void Program::add(Step step, std::span<const Use> reads, std::span<const Use> writes,
                  std::span<const int> of_group) {
  step.uses = static_cast<uint32_t>(uses.size());
  step.reads = static_cast<uint16_t>(reads.size());
  step.writes = static_cast<uint16_t>(writes.size());
  uses.insert(uses.end(), reads.begin(), reads.end());
  uses.insert(uses.end(), writes.begin(), writes.end());
  step.first_bucket = static_cast<uint32_t>(buckets.size());
  step.buckets = static_cast<uint16_t>(of_group.size());
  buckets.insert(buckets.end(), of_group.begin(), of_group.end());
  steps.push_back(step);
}

Step wait_for(Step step) {
  step.of = std::exchange(step.kind, StepKind::wait);
  return step;
}

namespace {

/// The slot of chunk `to` that has the place of `slot` in its own chunk, and its size; -1: none.
SlotId counterpart(const Layers& layers, SlotId slot, int to) {
  const SlotInfo& info = layers.slots[slot];
  const int chunk = layers.of(info.layer).chunk;
  const int layer = layers.begin(to) + info.layer - layers.begin(chunk);
  if (layer >= layers.end(to) || layers.end(to) - layers.begin(to) != layers.end(chunk) - layers.begin(chunk))
    return -1;
  const Layer &own = layers.of(info.layer), &other = layers.of(layer);
  const auto id = static_cast<size_t>(info.slot.id);
  if (id >= other.table->slots().size() || other.table->slots()[id].port) return -1;
  const memory::SlotSpec &a = own.table->slots()[id], &b = other.table->slots()[id];
  // The input of a chunk is embedded in one and received in another.
  const bool inputs = info.layer == layers.begin(chunk) && own.ports.out.bit() == info.slot.bit() &&
                      other.ports.out.bit() == info.slot.bit();
  const bool equal = (a.name == b.name || inputs) && a.width == b.width && a.dtype == b.dtype &&
                     a.rows == b.rows && info.bytes == layers.slots[other.slots[id]].bytes;
  return equal ? other.slots[id] : -1;
}

}  // namespace

Places::Places(const Program& program, const Layers& layers) : stashes_(program.stashes) {
  std::map<int, int> first;  // chunk of each pool
  for (int chunk = 0; chunk < stashes_.chunks(); ++chunk) first.try_emplace(stashes_.pool(chunk), chunk);
  size_t next = 0;
  for (SlotId s = 0; s < static_cast<SlotId>(layers.slots.size()); ++s) {
    const int chunk = layers.chunk_of(s), shares = first.at(stashes_.pool(chunk));
    const SlotId other = shares == chunk ? -1 : counterpart(layers, s, shares);
    entries_.push_back({other >= 0 ? entries_[other].first : next, chunk});
    if (other < 0) next += static_cast<size_t>(stashes_.count(chunk));
  }
  second_.assign(next, 0);
}

void Places::enter(const Program& program, const Step& step, int shift) {
  for (const Use& use : program.writes(step)) {
    uint8_t& second = second_[index(use.slot(), step.microbatch + shift)];
    if (use.second())
      second = 1;
    else if (!step.again && !step.backward)
      second = 0;
  }
}

namespace {

std::string_view name_of(StepKind kind) {
  static constexpr std::array<std::string_view, 15> names{
      "visit", "compute", "carry",  "copy",    "send",           "receive", "offload", "fetch",
      "wait",  "report",  "gather", "release", "open gradients", "reduce",  "update"};
  static_assert(names.size() == static_cast<size_t>(StepKind::update) + 1);
  return names[static_cast<size_t>(kind)];
}

std::string line(const Program& program, const Layers& layers, const Step& s) {
  const auto list = [&](std::span<const Use> uses) {
    std::string out;
    for (const Use& u : uses) out += fmt::format(" [{}]", layers.name(u.slot()));
    return out;
  };
  const Layer& layer = layers.of(s.layer);
  if (s.kind == StepKind::visit) {
    const char* const pass = !s.backward          ? s.again ? "forward again" : "forward"
                             : s.dgrad && s.wgrad ? "backward"
                             : s.dgrad            ? "backward, dgrad"
                                                  : "backward, wgrad";
    return fmt::format("{}microbatch {}, {}: {}", s.nested ? "    " : "", s.microbatch, layer.name, pass);
  }
  std::string out = s.within_visit() ? "  " : "";
  if (s.again && s.nested) out += "    ";
  if (s.kind == StepKind::compute) {
    const memory::Step& step = layer.table->steps()[s.index];
    out += step.name;
    if (step.pass != memory::Pass::forward) out += step.pass == memory::Pass::data ? " dgrad" : " wgrad";
  } else if (s.kind == StepKind::wait)
    out += fmt::format("wait for {}", name_of(s.of));
  else
    out += name_of(s.kind);
  if (!s.within_visit() && s.of_microbatch()) out += fmt::format(", microbatch {}", s.microbatch);
  if (s.microbatches > 1) out += fmt::format(", {} microbatches", s.microbatches);
  if (s.round > 0) out += fmt::format(" (round {})", s.round);
  const auto reads = program.reads(s), writes = program.writes(s);
  if (!reads.empty() || !writes.empty()) out += ":" + list(reads);
  if (!writes.empty()) out += " ->" + list(writes);
  if (s.buckets > 0) out += ":";
  for (const int b : program.buckets_of(s)) out += fmt::format(" [{}]", layers.name(BucketId{s.index, b}));
  return out;
}

}  // namespace

std::string text(const Program& program, const Layers& layers) {
  std::string out;
  const Period& period = program.period;
  for (size_t i = 0; i < program.steps.size(); ++i) {
    if (period.times > 0 && i == period.begin)
      out += fmt::format(
          "{} times, {} each:\n", period.times + 1,
          period.microbatches == 1 ? "a microbatch" : fmt::format("{} microbatches", period.microbatches));
    if (period.times > 0 && i == period.end) out += "end\n";
    out += line(program, layers, program.steps[i]) + "\n";
  }
  return out;
}

Program unrolled(const Program& program) {
  Program out{.mode = program.mode, .stashes = program.stashes};
  const Period& period = program.period;
  period.for_each_part(program.steps.size(), [&](size_t begin, size_t end, int repetition) {
    for (size_t i = begin; i < end; ++i) {
      Step s = program.steps[i];
      if (s.of_microbatch() || s.buckets > 0) s.microbatch += repetition * period.microbatches;
      out.take(program, s);
    }
  });
  return out;
}

}  // namespace nrl::program
