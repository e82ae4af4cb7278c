#include "apps/plan/batch.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "core/ops/transfer.h"

namespace nrl::plan {

using memory::Category;

namespace {

constexpr int64_t aligned(int64_t bytes) {
  constexpr int64_t unit = memory::MemoryPlan::alignment;
  return (bytes + unit - 1) / unit * unit;
}

// Computed in double and rounded once, so that it does not depend on how the batch is split.
float uniform_loss_weight(int64_t loss_tokens) {
  return static_cast<float>(-1.0 / static_cast<double>(loss_tokens));
}

// The sequence of every row; -1: padding.
std::vector<int32_t> segments_of(const data::HostMicroBatch& batch) {
  std::vector<int32_t> segments(batch.tokens.size(), -1);
  for (int64_t s = 0; s < batch.sequences; ++s)
    std::fill(segments.begin() + batch.bounds[s], segments.begin() + batch.bounds[s + 1],
              static_cast<int32_t>(s));
  return segments;
}

}  // namespace

BatchCounts count(const data::HostMicroBatch& batch, const model::ModelSpec& spec) {
  BatchCounts c;
  c.tokens = static_cast<int64_t>(batch.tokens.size());
  c.loss_tokens = batch.loss_tokens;
  for (size_t s = 0; s + 1 < batch.bounds.size(); ++s)
    c.pairs += model::attention_pairs(spec, batch.bounds[s + 1] - batch.bounds[s]);
  return c;
}

BatchCounts operator+(const BatchCounts& a, const BatchCounts& b) {
  return {.tokens = a.tokens + b.tokens,
          .loss_tokens = a.loss_tokens + b.loss_tokens,
          .pairs = a.pairs + b.pairs};
}

BatchTensors::BatchTensors(memory::MemoryPlan& plan, const BatchShape& shape)
    : shape_(shape), tensors_(static_cast<size_t>(shape.microbatches)) {
  if (shape.context > 1) {
    share_.emplace(shape.sequences, shape.length, shape.context, shape.context_rank);
    for (const model::ContextKind& kind : shape.context_kinds)
      context_bounds_.emplace_back(kind.exchange, *share_, kind.window, shape.dropout);
  }
  const int64_t n = shape.tokens();
  step_offset_ = aligned((shape.loss_weights ? shape.microbatches : 1) * n * 4);
  block_bytes_ = step_offset_ + aligned(8) + aligned(shape.microbatches * input_bytes());
  block_id_ = plan.add("loss weights, tokens and targets", Category::data, block_bytes_);
  if (!shape.positions) positions_id_ = plan.add("positions", Category::data, n * 4);
  if (share_ && shape.dropout) rows_id_ = plan.add("rows of dropout masks", Category::data, n * 4);
  if (shape.staged)
    staging_id_ = plan.add("batch staging buffers", Category::data, 2 * block_bytes_, memory::Tier::pinned);
  if (!shape.bounds) bounds_id_ = plan.add("sequence bounds", Category::data, bounds_elements() * 4);
}

int64_t BatchTensors::bounds_elements() const {
  if (!share_) return (shape_.bounds ? shape_.tokens() : shape_.sequences) + 1;
  int64_t elements = 0;
  for (const parallel::ContextBounds& bounds : context_bounds_) elements += bounds.capacity();
  return elements;
}

std::vector<int32_t> BatchTensors::whole_samples() const {
  std::vector<int32_t> bounds;
  for (int64_t s = 0; s <= shape_.sequences; ++s) bounds.push_back(static_cast<int32_t>(s * shape_.length));
  return bounds;
}

void BatchTensors::write_context_bounds(std::span<const int32_t> documents, int32_t* host, int32_t* device,
                                        model::MicroBatch& m) const {
  m.context_bounds.resize(context_bounds_.size());
  for (size_t i = 0; i < context_bounds_.size(); ++i) {
    const parallel::ContextBounds& bounds = context_bounds_[i];
    m.context_bounds[i].resize(static_cast<size_t>(bounds.calls()));
    bounds.write(documents, shape_.bounds, host, device, m.context_bounds[i]);
    host += bounds.capacity(), device += bounds.capacity();
  }
}

int64_t BatchTensors::values_bytes() const {
  return shape_.sequences * shape_.length * shape_.sequence_values * 8;  // as many sequences as tokens
}

int64_t BatchTensors::input_bytes() const {
  int64_t by_row = 2 + (shape_.positions ? 1 : 0) + (shape_.sequence_values > 0 ? 1 : 0);
  for (const model::ColumnSpec& column : shape_.columns) by_row += column.width;
  const int64_t elements = by_row * shape_.tokens() + (shape_.bounds ? bounds_elements() : 0);
  return values_bytes() + (4 * elements + 7) / 8 * 8;
}

int64_t BatchTensors::padded_sequences(int64_t sequences) const {
  const auto power = std::bit_ceil(static_cast<uint64_t>(std::max(sequences, 2 * shape_.sequences)));
  return std::min(static_cast<int64_t>(power), shape_.tokens());
}

void BatchTensors::bind(const memory::MemoryPlan& plan, const memory::Arenas& arenas, ops::Exec& exec) {
  exec_ = &exec;
  block_ = static_cast<std::byte*>(arenas.at(plan, block_id_));
  const int64_t n = shape_.tokens();
  model::MicroBatch common;
  common.step = make_tensor(block_ + step_offset_, DType::i64, {1});
  common.lengths = {.longest = shape_.longest(), .equal = !shape_.bounds};
  common.share = shape_.share;
  const auto by_token = [&](memory::BufferId id, const auto& value) {
    const Tensor to = make_tensor(arenas.at(plan, id), DType::i32, {n});
    if (exec.needed) return to;  // a dry run takes no memory for tokens, which may be too many
    std::vector<int32_t> values(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) values[i] = static_cast<int32_t>(value(i));
    ops::upload(exec, to, values.data());
    return to;
  };
  if (!shape_.positions)
    common.positions = by_token(
        positions_id_, [&](int64_t i) { return (share_ ? share_->global_row(i) : i) % shape_.length; });
  if (rows_id_ >= 0)
    common.dropout_rows = by_token(rows_id_, [&](int64_t i) { return share_->global_row(i); });
  if (!shape_.bounds) {
    const Tensor bounds = make_tensor(arenas.at(plan, bounds_id_), DType::i32, {bounds_elements()});
    std::vector<int32_t> values = whole_samples();
    if (share_) {
      values.resize(static_cast<size_t>(bounds_elements()));
      write_context_bounds(whole_samples(), values.data(), bounds.ptr<int32_t>(), common);
    } else {
      common.cu_seqlens = bounds;
    }
    ops::upload(exec, bounds, values.data());
  }
  std::byte *next = block_ + step_offset_ + aligned(8), *weights = block_;
  int index = 0;
  for (model::MicroBatch& m : tensors_) {
    m = common;
    m.index = index++;
    m.loss_weight = make_tensor(weights, DType::f32, {n});
    if (shape_.loss_weights) weights += n * 4;
    // fill() writes them in this order.
    if (shape_.sequence_values > 0)
      m.sequence_values = make_tensor(next, DType::f64, {0, shape_.sequence_values});
    std::byte* more = next + values_bytes();
    const auto rows = [&](DType dtype, int64_t width = 1) {
      std::byte* const at = std::exchange(more, more + n * width * 4);
      return width == 1 ? make_tensor(at, dtype, {n}) : make_tensor(at, dtype, {n, width});
    };
    m.ids = rows(DType::i32);
    m.target = rows(DType::i32);
    if (shape_.positions) m.positions = rows(DType::i32);
    if (shape_.sequence_values > 0) m.segment = rows(DType::i32);
    for (const model::ColumnSpec& column : shape_.columns)
      m.columns.push_back(rows(column.dtype, column.width));
    if (shape_.bounds && !share_) m.cu_seqlens = make_tensor(more, DType::i32, {padded_sequences(0) + 1});
    if (shape_.bounds && share_) {  // their shapes, which fill() changes
      std::vector<int32_t> scratch(static_cast<size_t>(bounds_elements()));
      write_context_bounds(whole_samples(), scratch.data(), reinterpret_cast<int32_t*>(more), m);
    }
    next += input_bytes();
  }
  if (shape_.packed > 0) largest_ = tensors_;
  NRL_CHECK(shape_.staged == (exec.device != nullptr));
  if (!shape_.staged) return;
  pinned_ = static_cast<std::byte*>(arenas.at(plan, staging_id_));
  for (device::Event& event : copied_) event = device::Event(*exec.device);
}

std::byte* BatchTensors::staging() const {
  return pinned_ ? pinned_ + staging_index_ * block_bytes_ : block_;
}

void BatchTensors::fill(int64_t microbatch, const data::HostMicroBatch& batch, int64_t first_sample,
                        float share) {
  const size_t n = batch.tokens.size();
  const auto most = static_cast<size_t>(shape_.sequences * shape_.length);
  NRL_CHECK(microbatch == filled_ && microbatch < shape_.microbatches &&
            (n == most || (shape_.packed > 0 && !share_ && n > 0 && n < most)) && batch.targets.size() == n &&
            batch.positions.size() == (shape_.positions ? n : 0) &&
            batch.columns.size() == shape_.columns.size());
  model::MicroBatch& m = tensors_[microbatch];
  m.first_row = first_sample * shape_.length;
  if (shape_.packed > 0) {
    m.share = share;
    if (!share_) {
      for (Tensor* t : {&m.ids, &m.target, &m.positions, &m.loss_weight, &m.segment})
        t->shape[0] = static_cast<int64_t>(n);
      for (Tensor& t : m.columns) t.shape[0] = static_cast<int64_t>(n);
    }
  }
  if (microbatch == 0 && pinned_) copied_[staging_index_].synchronize();
  std::byte* at = staging() + step_offset_ + aligned(8) + microbatch * input_bytes();
  if (shape_.sequence_values > 0) {
    NRL_CHECK(batch.sequence_values.size() == static_cast<size_t>(batch.sequences * shape_.sequence_values));
    m.sequence_values.shape[0] = batch.sequences;
    std::memcpy(at, batch.sequence_values.data(), batch.sequence_values.size() * 8);
    at += values_bytes();
  }
  // The rows of this rank; room for the most follows.
  const auto append_rows = [&](const std::vector<int32_t>& values, int64_t width = 1) {
    if (values.empty()) return;
    NRL_CHECK(values.size() == n * static_cast<size_t>(width));
    if (share_)
      share_->for_each_chunk([&](int64_t row, int64_t from, int64_t count) {
        std::memcpy(at + row * width * 4, values.data() + from * width,
                    static_cast<size_t>(count * width) * 4);
      });
    else
      std::memcpy(at, values.data(), values.size() * 4);
    at += shape_.tokens() * width * 4;
  };
  append_rows(batch.tokens);
  append_rows(batch.targets);
  append_rows(batch.positions);
  if (shape_.sequence_values > 0) append_rows(segments_of(batch));
  for (size_t c = 0; c < shape_.columns.size(); ++c) append_rows(batch.columns[c], shape_.columns[c].width);
  if (shape_.bounds) {
    const int64_t end = static_cast<int64_t>(n), count = static_cast<int64_t>(batch.bounds.size()) - 1;
    NRL_CHECK(count >= shape_.sequences && count <= end && batch.bounds.back() == end);
    if (share_) {
      write_context_bounds(batch.bounds, reinterpret_cast<int32_t*>(at),
                           reinterpret_cast<int32_t*>(block_ + (at - staging())), m);
      ++filled_;
      return;
    }
    m.cu_seqlens = make_tensor(m.cu_seqlens.data, DType::i32, {padded_sequences(count) + 1});
    std::memcpy(at, batch.bounds.data(), batch.bounds.size() * 4);
    at += batch.bounds.size() * 4;
    for (int64_t s = count; s < padded_sequences(count); ++s, at += 4) {
      const auto empty = static_cast<int32_t>(end);
      std::memcpy(at, &empty, 4);
    }
  }
  ++filled_;
}

std::span<const model::MicroBatch> BatchTensors::commit(int64_t step, int64_t loss_tokens) {
  std::byte* host = staging();
  std::memcpy(host + step_offset_, &step, sizeof step);
  const bool new_weights = loss_tokens > 0 && loss_tokens != weights_loss_tokens_;
  if (new_weights) {
    const float weight = uniform_loss_weight(loss_tokens);
    const int64_t count = (shape_.loss_weights ? shape_.microbatches : 1) * shape_.tokens();
    for (int64_t i = 0; i < count; ++i) std::memcpy(host + i * 4, &weight, 4);
    weights_loss_tokens_ = loss_tokens;
  }
  const int64_t begin = new_weights ? 0 : step_offset_,
                end = step_offset_ + aligned(8) + filled_ * input_bytes();
  const auto batches =
      std::span<const model::MicroBatch>(tensors_).first(static_cast<size_t>(std::exchange(filled_, 0)));
  if (!pinned_) return batches;
  exec_->device->copy(block_ + begin, host + begin, static_cast<size_t>(end - begin),
                      device::CopyKind::host_to_device, exec_->stream);
  copied_[staging_index_].record(exec_->stream);
  staging_index_ ^= 1;
  return batches;
}

}  // namespace nrl::plan
