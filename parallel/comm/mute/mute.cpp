#include "parallel/comm/mute/mute.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "parallel/comm/device_work.h"
#include "parallel/comm/executor.h"

namespace nrl::comm {

namespace {

constexpr int64_t pattern_elements = 1 << 16;

template <class T>
std::vector<std::byte> normals() {
  std::vector<std::byte> out(pattern_elements * sizeof(T));
  const PhiloxStream stream(1, "mute");
  for (uint64_t i = 0; i < pattern_elements / 4; ++i) {
    const auto four = stream.normals(i);
    for (uint64_t k = 0; k < 4; ++k) {
      const T value(static_cast<float>(four[k]));
      std::memcpy(out.data() + (i * 4 + k) * sizeof(T), &value, sizeof(T));
    }
  }
  return out;
}

/// Random elements; empty for types that are no activations.
const std::vector<std::byte>& pattern_of(DType type) {
  static const std::vector<std::byte> f32 = normals<float>(), half = normals<f16>(), brain = normals<bf16>(),
                                      none;
  return type == DType::f32 ? f32 : type == DType::f16 ? half : type == DType::bf16 ? brain : none;
}

/// copy(from, to, bytes) within one memory; fill(to, type, bytes) with random elements.
template <class Copy, class Fill>
void execute(const Call& call, int rank, int size, const Copy& copy_some, const Fill& fill) {
  const auto copy = [&](const void* in, void* out, int64_t bytes) {
    if (bytes > 0 && in != out) copy_some(in, out, bytes);
  };
  const auto at = [](const void* base, int64_t bytes) {
    return const_cast<std::byte*>(static_cast<const std::byte*>(base)) + bytes;
  };
  const auto buffers = [&](const auto& use) {
    use(call.in, call.out, call.count * size_of(call.dtype));
    for (const Call::Buffers& b : call.more) use(b.in, b.out, b.count * size_of(call.dtype));
  };
  switch (call.op) {
    case Op::all_gather:
      return buffers([&](const void* in, void* out, int64_t bytes) {
        // The own block first: the others are copies of it, where `in` may lie.
        copy(in, at(out, rank * bytes), bytes);
        for (int r = 0; r < size; ++r)
          if (r != rank) copy(at(out, rank * bytes), at(out, r * bytes), bytes);
      });
    case Op::reduce_scatter:
      return buffers(
          [&](const void* in, void* out, int64_t bytes) { copy(at(in, rank * bytes), out, bytes); });
    case Op::all_to_all:
      return buffers([&](const void* in, void* out, int64_t bytes) {
        copy(at(in, rank * bytes), at(out, rank * bytes), bytes);
      });
    case Op::all_to_all_v: {
      const auto before = [&](const std::vector<int64_t>& counts) {
        int64_t sum = 0;
        for (int r = 0; r < rank; ++r) sum += counts[r];
        return sum * size_of(call.dtype);
      };
      return copy(at(call.in, before(call.send_counts)), at(call.out, before(call.recv_counts)),
                  call.send_counts[rank] * size_of(call.dtype));
    }
    case Op::recv:
      return fill(call.messages.front().data.data, call.messages.front().data.dtype,
                  call.messages.front().data.bytes());
    case Op::exchange: {
      // By tag; the messages to oneself first.
      std::map<int, std::vector<const Message*>> sends;
      for (const bool own : {true, false})
        for (const Message& m : call.messages)
          if (m.kind == Message::Kind::send && (m.peer == rank) == own && m.data.bytes() > 0)
            sends[m.tag].push_back(&m);
      std::map<int, size_t> next;
      for (const Message& m : call.messages) {
        if (m.kind == Message::Kind::send) continue;
        const std::vector<const Message*>& from = sends[m.tag];
        if (from.empty()) continue;
        const Message& source = *from[m.peer == rank ? 0 : next[m.tag]++ % from.size()];
        copy(source.data.data, m.data.data, std::min(source.data.bytes(), m.data.bytes()));
      }
      return;
    }
    default:
      return;
  }
}

class MuteWork final : public Work {
 public:
  MuteWork(std::shared_ptr<std::atomic<int>> unwaited, Call call, int rank, int size)
      : Work(nullptr, {}, nullptr, std::move(unwaited)), call_(std::move(call)), rank_(rank), size_(size) {
    call_.previous = nullptr;
  }

 private:
  Advance start() override {
    execute(
        call_, rank_, size_,
        [](const void* in, void* out, int64_t bytes) { std::memmove(out, in, static_cast<size_t>(bytes)); },
        [](void* out, DType type, int64_t bytes) {
          const std::vector<std::byte>& pattern = pattern_of(type);
          if (pattern.empty()) return;
          for (int64_t done = 0; done < bytes; done += std::ssize(pattern))
            std::memcpy(static_cast<std::byte*>(out) + done, pattern.data(),
                        static_cast<size_t>(std::min<int64_t>(std::ssize(pattern), bytes - done)));
        });
    return Advance::done;
  }

  Call call_;
  int rank_, size_;
};

class MuteCommunicator final : public Communicator {
 public:
  MuteCommunicator(std::string_view name, int rank, std::vector<int> members)
      : Communicator(std::string(name), rank, std::move(members), nullptr) {}

  std::unique_ptr<Communicator> split(int, int, std::string_view) override {
    NRL_CHECK(false, "{} is mute and cannot be divided", label());
    return nullptr;
  }
  std::unique_ptr<Communicator> subgroup(std::span<const int>, std::string_view name) override {
    return split(0, 0, name);
  }

 private:
  std::shared_ptr<Work> submit(Call call, bool) override {
    auto work = std::make_shared<MuteWork>(unwaited(), std::move(call), rank(), size());
    work->run_now();
    return work;
  }
};

/// Patterns in the memory of a device.
class DevicePatterns {
 public:
  explicit DevicePatterns(device::Runtime& device) {
    const device::Stream stream(device);
    for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
      const std::vector<std::byte>& pattern = pattern_of(type);
      device::Memory& memory =
          memory_.emplace_back(type, device::Memory(device, device::Memory::Kind::device, pattern.size()))
              .second;
      device.copy(memory.data(), pattern.data(), pattern.size(), device::CopyKind::host_to_device,
                  stream.get());
    }
    device.synchronize(stream.get());
  }
  const std::byte* of(DType type) {
    for (auto& [t, memory] : memory_)
      if (t == type) return memory.data();
    return nullptr;
  }

 private:
  std::vector<std::pair<DType, device::Memory>> memory_;
};

class DeviceMuteWork final : public DeviceWork {
 public:
  DeviceMuteWork(std::shared_ptr<std::atomic<int>> unwaited, const Call& call, device::Runtime& device,
                 EventPool& events, device::StreamHandle own_stream, DevicePatterns& patterns, int rank,
                 int size)
      : DeviceWork(nullptr, {}, nullptr, std::move(unwaited), call, events, events),
        device_(device),
        stream_(call.stream.native ? call.stream.native : own_stream),
        patterns_(patterns),
        call_(call),
        rank_(rank),
        size_(size) {
    call_.previous = nullptr;
  }

 private:
  Advance start() override {
    order_behind({stream_});
    const auto copy = [this](const void* in, void* out, int64_t bytes) {
      device_.copy(out, in, static_cast<size_t>(bytes), device::CopyKind::device_to_device, stream_);
    };
    execute(call_, rank_, size_, copy, [&](void* out, DType type, int64_t bytes) {
      const std::byte* const pattern = patterns_.of(type);
      if (!pattern) return;
      const int64_t each = pattern_elements * size_of(type);
      for (int64_t done = 0; done < bytes; done += each)
        copy(pattern, static_cast<std::byte*>(out) + done, std::min(each, bytes - done));
    });
    finish_in(stream_);
    return Advance::done;
  }

  device::Runtime& device_;
  device::StreamHandle stream_;
  DevicePatterns& patterns_;
  Call call_;
  int rank_, size_;
};

class DeviceMuteCommunicator final : public Communicator {
 public:
  DeviceMuteCommunicator(std::unique_ptr<Communicator> host, device::Runtime& device)
      : Communicator(host->name(), host->rank(), host->members(), nullptr),
        host_(std::move(host)),
        device_(device),
        stream_(device),
        events_(std::make_shared<EventPool>(device, device::EventKind::order)),
        patterns_(device) {}

  std::unique_ptr<Communicator> split(int color, int key, std::string_view name) override {
    return host_->split(color, key, name);
  }
  std::unique_ptr<Communicator> subgroup(std::span<const int> ranks, std::string_view name) override {
    return host_->subgroup(ranks, name);
  }
  Communicator& host() override { return *host_; }

 private:
  std::shared_ptr<Work> submit(Call call, bool) override {
    auto work = std::make_shared<DeviceMuteWork>(unwaited(), call, device_, *events_, stream_.get(),
                                                 patterns_, rank(), size());
    work->run_now();
    return work;
  }

  std::unique_ptr<Communicator> host_;
  device::Runtime& device_;
  device::Stream stream_;  // for operations without one
  std::shared_ptr<EventPool> events_;
  DevicePatterns patterns_;
};

}  // namespace

std::unique_ptr<Communicator> make_mute(std::string_view name, int rank, std::vector<int> members) {
  return std::make_unique<MuteCommunicator>(name, rank, std::move(members));
}

std::unique_ptr<Communicator> make_mute(std::string_view name, int rank, std::vector<int> members,
                                        device::Runtime& device) {
  return std::make_unique<DeviceMuteCommunicator>(make_mute(name, rank, std::move(members)), device);
}

}  // namespace nrl::comm
