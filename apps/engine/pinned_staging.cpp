#include "apps/engine/pinned_staging.h"

#include <cstring>

#include "core/base/error.h"
#include "core/base/log.h"

namespace nrl::engine {

PinnedStaging::PinnedStaging(device::Runtime& device, device::StreamHandle stream,
                             std::span<std::byte> pinned, std::span<const std::byte> host)
    : device_(device),
      pinned_(pinned),
      host_(host),
      piece_(pinned.size() / 2),
      stream_(device),
      begun_(device) {
  NRL_CHECK(piece_ > 0);
  begun_.record(stream);
  for (device::Event& event : transferred_) event = device::Event(device);
  transferred_[0].record(stream);
  transferred_[0].wait_in(stream_.get());
}

PinnedStaging::~PinnedStaging() {
  try {
    finish();
  } catch (const std::exception& e) {  // of the device: the next call reports it too
    log::warn("copying through pinned memory: {}", e.what());
  }
}

bool PinnedStaging::on_host(const void* p) const {
  const auto* byte = static_cast<const std::byte*>(p);
  return byte >= host_.data() && byte < host_.data() + host_.size();
}

void PinnedStaging::read_ahead(std::vector<MemoryRange> ranges) {
  finish();  // transfers that will not be read
  ranges_ = std::move(ranges);
  read_ = fetched_ = 0;
  if (!ranges_.empty()) fetch(fetched_++);
}

void PinnedStaging::fetch(size_t piece) {
  const MemoryRange& range = ranges_[piece];
  NRL_CHECK(range.bytes <= piece_, "a piece of {} bytes, the buffers have {}", range.bytes, piece_);
  if (on_host(range.data)) return;
  device_.copy(buffer_of(piece), range.data, range.bytes, device::CopyKind::device_to_host, stream_.get());
  transferred_[piece % 2].record(stream_.get());
}

const void* PinnedStaging::next() {
  NRL_CHECK(read_ < ranges_.size(), "all {} pieces were read", ranges_.size());
  // The caller is done with the piece before this one, whose buffer the next one gets.
  if (fetched_ < ranges_.size()) fetch(fetched_++);
  const size_t piece = read_++;
  if (on_host(ranges_[piece].data)) {
    begun_.synchronize();
    return ranges_[piece].data;
  }
  transferred_[piece % 2].synchronize();
  return buffer_of(piece);
}

void* PinnedStaging::buffer() {
  transferred_[written_ % 2].synchronize();
  return buffer_of(written_);
}

void PinnedStaging::write(void* to, size_t bytes) {
  NRL_CHECK(bytes <= piece_, "a piece of {} bytes, the buffers have {}", bytes, piece_);
  if (on_host(to)) {
    begun_.synchronize();
    std::memcpy(to, buffer_of(written_), bytes);
    return;
  }
  device_.copy(to, buffer_of(written_), bytes, device::CopyKind::host_to_device, stream_.get());
  transferred_[written_ % 2].record(stream_.get());
  ++written_;
}

}  // namespace nrl::engine
