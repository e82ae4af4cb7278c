#include "apps/plan/batch.h"

#include <algorithm>

namespace nrl::plan {

using memory::Category;

BatchTensors::BatchTensors(memory::MemoryPlan& plan, int64_t sequences, int64_t length)
    : sequences_(sequences), length_(length) {
  const int64_t bytes = sequences * length * 4;
  ids_ = plan.add("token ids", Category::data, bytes);
  target_ = plan.add("targets", Category::data, bytes);
  positions_ = plan.add("positions", Category::data, bytes);
  cu_ = plan.add("sequence bounds", Category::data, (sequences + 1) * 4);
  weight_ = plan.add("token weights", Category::data, bytes);
}

void BatchTensors::bind(const memory::MemoryPlan& plan, const memory::Arenas& arenas) {
  const int64_t n = sequences_ * length_;
  auto tensor = [&](memory::BufferId id, DType dtype, int64_t count) {
    return make_tensor(arenas.at(plan, id), dtype, {count});
  };
  tensors_.ids = tensor(ids_, DType::i32, n);
  tensors_.target = tensor(target_, DType::i32, n);
  tensors_.positions = tensor(positions_, DType::i32, n);
  tensors_.cu_seqlens = tensor(cu_, DType::i32, sequences_ + 1);
  tensors_.weight = tensor(weight_, DType::f32, n);
  for (int64_t i = 0; i < n; ++i) tensors_.positions.ptr<int32_t>()[i] = static_cast<int32_t>(i % length_);
  for (int64_t s = 0; s <= sequences_; ++s)
    tensors_.cu_seqlens.ptr<int32_t>()[s] = static_cast<int32_t>(s * length_);
}

const model::MicroBatch& BatchTensors::fill(const data::MicroBatch& batch, float weight, int64_t first_sample,
                                            int64_t step) {
  NRL_CHECK(static_cast<int64_t>(batch.tokens.size()) == tensors_.ids.numel() &&
            batch.targets.size() == batch.tokens.size());
  std::copy(batch.tokens.begin(), batch.tokens.end(), tensors_.ids.ptr<int32_t>());
  std::copy(batch.targets.begin(), batch.targets.end(), tensors_.target.ptr<int32_t>());
  std::fill_n(tensors_.weight.ptr<float>(), tensors_.weight.numel(), weight);
  tensors_.first_row = first_sample * length_;
  tensors_.step = step;
  return tensors_;
}

}  // namespace nrl::plan
