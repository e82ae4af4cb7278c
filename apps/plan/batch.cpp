#include "apps/plan/batch.h"

#include <algorithm>
#include <cstring>

#include "core/ops/transfer.h"

namespace nrl::plan {

using memory::Category;

namespace {

// The input block: the step's number, then ids and targets of each microbatch.
constexpr int64_t header_bytes = memory::MemoryPlan::alignment;

}  // namespace

BatchTensors::BatchTensors(memory::MemoryPlan& plan, int64_t microbatches, int64_t sequences, int64_t length,
                           float weight)
    : microbatches_(microbatches),
      sequences_(sequences),
      length_(length),
      weight_(weight),
      tensors_(static_cast<size_t>(microbatches)) {
  input_bytes_ = header_bytes + microbatches * tokens() * 2 * 4;
  input_ = plan.add("tokens and targets", Category::data, input_bytes_);
  positions_ = plan.add("positions", Category::data, tokens() * 4);
  cu_ = plan.add("sequence bounds", Category::data, (sequences + 1) * 4);
  weights_ = plan.add("token weights", Category::data, tokens() * 4);
}

void BatchTensors::bind(const memory::MemoryPlan& plan, const memory::Arenas& arenas, ops::Exec& exec) {
  exec_ = &exec;
  block_ = static_cast<std::byte*>(arenas.at(plan, input_));
  const int64_t n = tokens();
  std::vector<int32_t> positions(static_cast<size_t>(n)), cu(static_cast<size_t>(sequences_ + 1));
  for (int64_t i = 0; i < n; ++i) positions[static_cast<size_t>(i)] = static_cast<int32_t>(i % length_);
  for (int64_t s = 0; s <= sequences_; ++s) cu[static_cast<size_t>(s)] = static_cast<int32_t>(s * length_);
  const std::vector<float> weights(static_cast<size_t>(n), weight_);

  model::MicroBatch common;
  common.positions = make_tensor(arenas.at(plan, positions_), DType::i32, {n});
  common.cu_seqlens = make_tensor(arenas.at(plan, cu_), DType::i32, {sequences_ + 1});
  common.weight = make_tensor(arenas.at(plan, weights_), DType::f32, {n});
  common.lengths = {length_, true};
  common.step = make_tensor(block_, DType::i64, {1});
  ops::upload(exec, common.positions, positions.data());
  ops::upload(exec, common.cu_seqlens, cu.data());
  ops::upload(exec, common.weight, weights.data());
  std::byte* next = block_ + header_bytes;
  for (model::MicroBatch& m : tensors_) {
    m = common;
    m.ids = make_tensor(next, DType::i32, {n});
    m.target = make_tensor(next + n * 4, DType::i32, {n});
    next += n * 8;
  }
  if (!exec.device) return;
  pinned_ = device::Memory(*exec.device, device::Memory::Kind::pinned, static_cast<size_t>(2 * input_bytes_));
  for (device::Event& event : copied_) event = device::Event(*exec.device);
}

std::byte* BatchTensors::staging() const {
  return pinned_.data() ? pinned_.data() + turn_ * input_bytes_ : block_;
}

void BatchTensors::fill(int64_t microbatch, const data::MicroBatch& batch, int64_t first_sample) {
  const auto n = static_cast<size_t>(tokens());
  NRL_CHECK(microbatch >= 0 && microbatch < microbatches_ && batch.tokens.size() == n &&
            batch.targets.size() == n);
  if (microbatch == 0 && pinned_.data()) copied_[turn_].synchronize();
  std::byte* at = staging() + header_bytes + static_cast<size_t>(microbatch) * n * 8;
  std::memcpy(at, batch.tokens.data(), n * 4);
  std::memcpy(at + n * 4, batch.targets.data(), n * 4);
  tensors_[static_cast<size_t>(microbatch)].first_row = first_sample * length_;
}

void BatchTensors::commit(int64_t step) {
  std::memcpy(staging(), &step, sizeof step);
  if (!pinned_.data()) return;
  exec_->device->copy(block_, staging(), static_cast<size_t>(input_bytes_), device::CopyKind::host_to_device,
                      exec_->stream);
  copied_[turn_].record(exec_->stream);
  turn_ ^= 1;
}

}  // namespace nrl::plan
