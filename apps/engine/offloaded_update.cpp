#include "apps/engine/offloaded_update.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/ops/kernel_table.h"
#include "core/ops/step.h"
#include "core/ops/transfer.h"
#include "core/trace/trace.h"

namespace nrl::engine {
namespace {

/// The tensors of the state, in memory::Tier::host.
template <class Visit>
void for_each_state(const ops::AdamW& a, const Visit& visit) {
  for (const Tensor* t : {&a.exp_avg, &a.exp_avg_sq, &a.remainder}) visit(*t, 1);
  if (a.param_bf16 && a.param) visit(a.param, 1);  // a master copy
  for (const Tensor* t : {&a.exp_avg_scales, &a.exp_avg_sq_scales}) visit(*t, ops::moment_block);
}

/// Elements [first, first + count) of the state; `per`: elements of the state per element of `t`.
template <class Use>
void with_range(const Tensor& t, int64_t per, int64_t first, int64_t count, const Use& use) {
  if (!t) return;
  const int64_t begin = first / per, end = (first + count + per - 1) / per;
  use(static_cast<const std::byte*>(t.data) + begin * size_of(t.dtype), (end - begin) * size_of(t.dtype));
}

void update_on_host(void* argument) {
  // The kernel without the op around it, whose trace range would call the device's runtime.
  auto* const update = static_cast<std::pair<ops::Exec*, const ops::AdamW*>*>(argument);
  update->first->kernels->adamw(*update->first, *update->second);
}

}  // namespace

void OffloadedUpdate::add(const GroupTensors& group, const plan::UpdateCall& call,
                          const ops::AdamW& arguments) {
  const std::vector<int64_t> chunks = ops::adamw_chunks(call.parts);
  const int64_t* row = chunks.data();
  for (int64_t c = 0; c < call.chunks;) {
    const int64_t first = c;
    Piece& piece = pieces_.emplace_back();
    piece.update = arguments;
    piece.first_state = row[1];
    piece.gradients = arguments.grad;
    piece.weights = arguments.param_bf16 ? arguments.param_bf16 : arguments.param;
    int64_t elements = 0;
    for (; c < call.chunks; ++c, row += 4) {
      const int64_t flat = row[0], count = row[2];
      const bool joins =
          !piece.runs.empty() && flat >= piece.runs.back().begin + piece.runs.back().count &&
          flat - (piece.runs.back().begin + piece.runs.back().count) < parallel::FlatBuckets::param_align;
      // The padding between parameters is copied along: it is zero and stays zero.
      const int64_t more = joins ? flat + count - (piece.runs.back().begin + piece.runs.back().count) : count;
      if (c > first && elements + more > plan::offload_piece) break;
      if (!joins) piece.runs.push_back({flat, 0, elements});
      Run& run = piece.runs.back();
      piece.table.insert(piece.table.end(), {run.staged + flat - run.begin, row[1], count, row[3]});
      run.count = flat + count - run.begin;
      elements = run.staged + run.count;
      piece.states = row[1] + count - piece.first_state;
    }
    piece.update.chunks = group.chunks.rows(call.first_chunk + first, c - first);
  }
}

void OffloadedUpdate::open(const Host& host) {
  if (pieces_.empty()) return;
  NRL_CHECK(host.kernels && host.kernels->adamw && staging_.data);
  host_exec_.kernels = host.kernels;
  host_exec_.threads = host.threads;
  device::Runtime& device = *exec_.device;
  for (device::Stream* stream : {&in_, &host_, &out_}) *stream = device::Stream(device);
  decided_ = device::Event(device);
  for (int s = 0; s < plan::offload_slots; ++s)
    for (device::Event* event : {&copied_in_[s], &updated_[s], &copied_out_[s]})
      *event = device::Event(device);
  scalars_ = pieces_.front().update.scalars;
  host_scalars_ =
      make_tensor(staging_.data + plan::offload_slots * staging_.slot_bytes, DType::f64, {scalars_.numel()});
  for (size_t i = 0; i < pieces_.size(); ++i)
    stage(pieces_[i], staging_.data + static_cast<int64_t>(i % plan::offload_slots) * staging_.slot_bytes);
}

// Makes the update one of the staging buffer at `slot`.
void OffloadedUpdate::stage(Piece& piece, std::byte* slot) {
  ops::AdamW& a = piece.update;
  const int64_t n = piece.runs.back().staged + piece.runs.back().count;
  const Tensor gradients = make_tensor(slot, piece.gradients.dtype, {n});
  constexpr int64_t unit = memory::MemoryPlan::alignment;
  const int64_t second = (gradients.bytes() + unit - 1) / unit * unit;
  const Tensor weights = make_tensor(slot + second, piece.weights.dtype, {n});
  NRL_CHECK(second + weights.bytes() <= staging_.slot_bytes, "{} elements in a buffer of {} bytes", n,
            staging_.slot_bytes);
  (a.param_bf16 ? a.param_bf16 : a.param) = weights;
  a.grad = gradients;
  a.scalars = host_scalars_;
  a.chunks = make_tensor(piece.table.data(), DType::i64, {static_cast<int64_t>(piece.table.size()) / 4, 4});
  piece.call = {&host_exec_, &piece.update};
}

void OffloadedUpdate::copy(const Piece& piece, bool to_host, device::StreamHandle stream) const {
  const ops::AdamW& a = piece.update;
  const auto copy_runs = [&](const Tensor& there, const Tensor& here) {
    const int64_t size = size_of(there.dtype);
    for (const Run& run : piece.runs) {
      std::byte* const on_device = static_cast<std::byte*>(there.data) + run.begin * size;
      std::byte* const on_host = static_cast<std::byte*>(here.data) + run.staged * size;
      const auto bytes = static_cast<size_t>(run.count * size);
      if (to_host)
        exec_.device->copy(on_host, on_device, bytes, device::CopyKind::device_to_host, stream);
      else
        exec_.device->copy(on_device, on_host, bytes, device::CopyKind::host_to_device, stream);
    }
  };
  if (to_host) copy_runs(piece.gradients, a.grad);
  // To the host too where the update overwrites them: a skipped step leaves what was copied.
  copy_runs(piece.weights, a.param_bf16 ? a.param_bf16 : a.param);
}

OffloadedUpdate::~OffloadedUpdate() {
  if (!host_.get()) return;
  try {
    // Host functions refer to the pieces; a replayed graph runs them in the stream of the step.
    exec_.device->synchronize(exec_.stream);
    host_.synchronize();
  } catch (const std::exception& e) {  // of the device: the next call reports it too
    log::warn("updating offloaded optimizer state: {}", e.what());
  }
}

void OffloadedUpdate::start() {
  if (pieces_.empty()) return;
  if (exec_.needed) {  // the CPU's part is no kernel of the device
    if (!exec_.device)
      for (const Piece& piece : pieces_) ops::adamw(exec_, piece.update);
    else if (observer_)
      report();
    return;
  }
  const trace::Range range(name_of(memory::HostWork::update));
  if (!exec_.device) {
    const auto each = [&](const Piece& piece, const auto& use) {
      for_each_state(piece.update, [&](const Tensor& t, int64_t per) {
        with_range(t, per, piece.first_state, piece.states, use);
      });
    };
    const auto prefetch = [&](const std::byte* p, int64_t bytes) { arenas_.prefetch(p, bytes); };
    const auto evict = [&](const std::byte* p, int64_t bytes) { arenas_.evict(p, bytes); };
    each(pieces_.front(), prefetch);
    for (size_t i = 0; i < pieces_.size(); ++i) {
      if (i + 1 < pieces_.size()) each(pieces_[i + 1], prefetch);
      ops::adamw(exec_, pieces_[i].update);
      each(pieces_[i], evict);
    }
    return;
  }
  device::Runtime& device = *exec_.device;
  decided_.record(exec_.stream);
  decided_.wait_in(in_.get());
  device.copy(host_scalars_.data, scalars_.data, static_cast<size_t>(scalars_.bytes()),
              device::CopyKind::device_to_host, in_.get());
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const size_t slot = i % plan::offload_slots;
    if (i >= plan::offload_slots) copied_out_[slot].wait_in(in_.get());
    copy(pieces_[i], true, in_.get());
    copied_in_[slot].record(in_.get());
    copied_in_[slot].wait_in(host_.get());
    device.call_host(update_on_host, &pieces_[i].call, host_.get());
    updated_[slot].record(host_.get());
    updated_[slot].wait_in(out_.get());
    copy(pieces_[i], false, out_.get());
    copied_out_[slot].record(out_.get());
  }
}

// The work of start() on a GPU.
void OffloadedUpdate::report() {
  using memory::HostWork;
  std::array<int, plan::offload_slots> copied_out;
  copied_out.fill(-1);
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const ops::AdamW& a = pieces_[i].update;
    const int64_t gradients = a.grad.bytes(), weights = (a.param_bf16 ? a.param_bf16 : a.param).bytes();
    int64_t state = 0;
    for_each_state(a, [&](const Tensor& t, int64_t per) {
      with_range(t, per, pieces_[i].first_state, pieces_[i].states,
                 [&](const std::byte*, int64_t bytes) { state += bytes; });
    });
    int& slot = copied_out[i % plan::offload_slots];
    const int in = observer_->start(HostWork::to_host, gradients + weights, slot),
              update = observer_->start(HostWork::update, gradients + 2 * (weights + state), in);
    slot = observer_->start(HostWork::from_host, weights, update);
  }
  reported_ = copied_out[(pieces_.size() - 1) % plan::offload_slots];
}

void OffloadedUpdate::finish() {
  if (pieces_.empty() || !exec_.device) return;
  if (exec_.needed) {
    if (observer_) observer_->wait(reported_);
    return;
  }
  copied_out_[(pieces_.size() - 1) % plan::offload_slots].wait_in(exec_.stream);
}

void initialize_offloaded_master(ops::Exec& exec, const GroupTensors& t, const memory::Arenas& arenas) {
  const Tensor master = t.find("master", true);
  if (!master || exec.needed) return;
  constexpr int64_t window = int64_t{1} << 20;
  std::vector<std::byte> copied;
  ops::Exec host;
  host.kernels = &ops::cpu_kernels(cpu::Isa::baseline);
  for (const plan::OwnedRange& r : t.group->owned) {
    if (!r.offloaded) continue;
    for (int64_t at = 0; at < r.count; at += window) {
      const int64_t count = std::min(window, r.count - at);
      const Tensor to = master.rows(r.state + at, count), from = t.weights.rows(r.weight + at, count);
      if (master.dtype == DType::u16) {  // remainders
        std::memset(to.data, 0, static_cast<size_t>(to.bytes()));
      } else if (!exec.device) {
        ops::convert(exec, {.x = from, .out = to});
      } else {
        copied.resize(static_cast<size_t>(from.bytes()));
        ops::download(exec, from, copied.data());
        ops::convert(host, {.x = make_tensor(copied.data(), from.dtype, {count}), .out = to});
      }
      arenas.evict(to.data, to.bytes());
    }
  }
}

}  // namespace nrl::engine
