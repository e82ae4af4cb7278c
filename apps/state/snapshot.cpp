#include "apps/state/snapshot.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "apps/plan/snapshot.h"
#include "core/base/error.h"
#include "core/device/cpu/parallel.h"

namespace nrl::train {

void Snapshot::add(const Tensor& tensor, int64_t begin, int64_t bytes) {
  ranges_.push_back({static_cast<const std::byte*>(tensor.data) + begin, bytes, bytes_});
  bytes_ += (bytes + plan::snapshot_align - 1) / plan::snapshot_align * plan::snapshot_align;
}

Snapshot::Snapshot(engine::Engine& engine, bool optimizer) : engine_(engine) {
  const plan::RunPlan& p = engine.plan();
  // The first rank saves the scales of FP8 operands; they are few, and not in the plan of the snapshot.
  const model::DelayedScales& scales = p.decoder->fp8().delayed();
  for (const Tensor& t : {scales.scale, scales.amax})
    if (t && optimizer && p.position.grid.rank() == 0) add(t, 0, t.bytes());
  scales_ = ranges_.size();
  const bool adapters = static_cast<bool>(p.spec.trained.adapters);
  for (const engine::GroupTensors& t : engine.groups())
    for (const plan::SavedPart& part : plan::saved_parts(p.parameters, *t.group, adapters, optimizer)) {
      using Of = plan::SavedPart::Of;
      const Tensor& of = part.of == Of::weights  ? t.weights
                         : part.of == Of::state  ? t.state.at(part.state)
                         : part.of == Of::scales ? t.scales.at(part.state)
                         : part.of == Of::errors ? t.errors
                                                 : t.sum_errors;
      add(of, part.begin, part.bytes);
    }
  by_address_ = ranges_;
  std::sort(by_address_.begin(), by_address_.end(),
            [](const Range& a, const Range& b) { return std::less<>()(a.from, b.from); });
  if (device::Runtime* const device = engine.exec().device) {
    pinned_ = device::Memory(*device, device::Memory::Kind::pinned, static_cast<size_t>(bytes_));
    memory_ = pinned_.data();
    stream_ = device::Stream(*device);
    begun_ = device::Event(*device);
    copied_ = device::Event(*device);
    return;
  }
  host_ = cpu::HostMemory(static_cast<size_t>(bytes_));
  memory_ = host_.data();
  // Pages become resident here, not in the first save.
  cpu::parallel_for(engine.exec().threads, bytes_, int64_t{1} << 20, [&](int64_t begin, int64_t end) {
    std::memset(memory_ + begin, 0, static_cast<size_t>(end - begin));
  });
}

void Snapshot::take() {
  const ops::Exec& exec = engine_.exec();
  if (!exec.device) {
    for (const Range& r : ranges_)
      cpu::parallel_for(exec.threads, r.bytes, int64_t{1} << 20, [&](int64_t begin, int64_t end) {
        std::memcpy(memory_ + r.at + begin, r.from + begin, static_cast<size_t>(end - begin));
      });
    return;
  }
  begun_.record(exec.stream);
  begun_.wait_in(stream_.get());
  for (size_t i = 0; i < ranges_.size(); ++i) {
    const Range& r = ranges_[i];
    exec.device->copy(memory_ + r.at, r.from, static_cast<size_t>(r.bytes), device::CopyKind::device_to_host,
                      stream_.get());
    if (i + 1 == scales_) stream_.synchronize();
  }
  copied_.record(stream_.get());
  engine_.hold_update(copied_.get());
}

void Snapshot::wait() const {
  if (engine_.exec().device) copied_.synchronize();
}

void* Snapshot::at(const void* data, int64_t bytes) const {
  const auto* from = static_cast<const std::byte*>(data);
  auto r =
      std::upper_bound(by_address_.begin(), by_address_.end(), from,
                       [](const std::byte* p, const Range& range) { return std::less<>()(p, range.from); });
  NRL_CHECK(r != by_address_.begin(), "the snapshot does not have these bytes");
  --r;
  const int64_t offset = from - r->from;
  NRL_CHECK(offset + bytes <= r->bytes, "the snapshot does not have these bytes");
  return memory_ + r->at + offset;
}

void Snapshot::read_ahead(std::vector<MemoryRange> ranges) {
  reads_ = std::move(ranges);
  read_ = 0;
}

const void* Snapshot::next() {
  NRL_CHECK(read_ < reads_.size(), "all {} pieces were read", reads_.size());
  const MemoryRange& range = reads_[read_++];
  return at(range.data, static_cast<int64_t>(range.bytes));
}

void* Snapshot::buffer() {
  fail(Exit::internal, "a snapshot is read only");
}

void Snapshot::write(void*, size_t) {
  fail(Exit::internal, "a snapshot is read only");
}

}  // namespace nrl::train
