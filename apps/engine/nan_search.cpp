#include "apps/engine/nan_search.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "apps/model/decoder.h"
#include "core/ops/transfer.h"
#include "core/trace/trace.h"

namespace nrl::engine {
namespace {

constexpr int64_t after_layers = int64_t{1} << 40;  // depth of the results of the model
constexpr int64_t after_steps = int64_t{1} << 20;   // of a layer: the gradients of its parameters

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// `bits`: of an element. `exponent`: all bits set in values that are not finite.
template <class Bits, class Widen>
void add_row(const Bits* row, int64_t count, int64_t step, Bits exponent, const Widen& widen,
             TensorNumbers& sum) {
  for (int64_t i = 0; i < count; ++i) {
    const Bits bits = row[i * step];
    if ((bits & exponent) == exponent)
      ++sum.bad;
    else
      sum.largest = std::max<double>(sum.largest, std::abs(widen(bits)));
  }
}

double half(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const double fraction = bits & 1023;
  return exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25);
}

/// True for tensors that numbers_of() reads.
bool is_readable(const Tensor& t) {
  return t.rank > 0 && (t.dtype == DType::f32 || t.dtype == DType::bf16 || t.dtype == DType::f16);
}

/// Calls `row(pointer)` for every row of a tensor's last dimension.
template <class F>
void for_each_row(const Tensor& t, const char* data, int dim, const F& row) {
  if (dim >= t.rank - 1) return row(data);
  for (int64_t i = 0; i < t.dim(dim); ++i)
    for_each_row(t, data + i * t.step(dim) * size_of(t.dtype), dim + 1, row);
}

/// The search on one rank.
class Search {
 public:
  Search(Engine& engine, Objective& objective, NanCheck level) : engine_(engine) {
    Inspection inspection{.gradient = [this](int p, const Tensor& g) { gradient(p, g); },
                          .log_probs = [this](int m, const Tensor& t) { log_probs(m, t); }};
    if (level == NanCheck::all) inspection.results = [this](const model::StepResults& r) { results(r); };
    engine.inspect(objective, inspection);
  }
  std::optional<BadTensor> found;

 private:
  const model::Decoder& decoder() const { return *engine_.plan().decoder; }
  /// Depth in the whole model of a layer of this rank.
  int64_t depth(int layer) const {
    const program::Layers& all = decoder().all_layers();
    const int chunk = all.of(layer).chunk;
    return engine_.plan().layout.model_chunk(chunk) * after_steps + layer - all.begin(chunk);
  }
  void results(const model::StepResults& r);
  void gradient(int parameter, const Tensor& gradient);
  void log_probs(int microbatch, const Tensor& values);
  std::optional<TensorNumbers> numbers(const model::SlotValue& slot, int microbatch) const;

  Engine& engine_;
};

std::optional<TensorNumbers> Search::numbers(const model::SlotValue& slot, int microbatch) const {
  const memory::SlotSpec& spec = decoder().all_layers().spec(slot.slot);
  Tensor t = slot.value;
  if (!t || (spec.rows >= model::sent_rows && spec.rows <= model::dispatched_rows_by_128)) return {};
  if (spec.rows == model::head_chunk_rows) {
    const auto m = static_cast<size_t>(microbatch);
    t.shape[0] = std::min(t.shape[0], engine_.plan().tensors->microbatches()[m].ids.dim(0));
  }
  if (spec.unused > 0) t = t.columns(0, spec.width - spec.unused);
  return numbers_of(engine_.exec(), t);
}

void Search::results(const model::StepResults& r) {
  if (found) return;
  const program::Layers& all = decoder().all_layers();
  for (const model::SlotValue& slot : r.written) {
    const auto n = numbers(slot, r.microbatch);
    if (!n || n->bad == 0) continue;
    const bool trains = r.mode == memory::training, backward = r.step.backward || r.step.again;
    const int64_t layers = depth(all.slots[static_cast<size_t>(slot.slot)].layer);
    BadTensor bad{
        .order = {trains ? 2 : 1, r.microbatch, backward ? 1 : 0, backward ? -layers : layers, r.step.index},
        .name = all.name(slot.slot),
        .microbatch = r.microbatch,
        .pass = !trains    ? "evaluation"
                : backward ? "backward"
                           : "forward",
        .bad = n->bad,
        .count = n->count};
    if (r.step.kind == program::StepKind::compute) bad.operation = std::string(decoder().step(r.step).name);
    if (r.step.kind == program::StepKind::wait) bad.bad_input = "what another rank sent";
    for (const model::SlotValue& input : r.read) {
      const bool overwritten = std::any_of(r.written.begin(), r.written.end(),
                                           [&](const auto& w) { return w.value.data == input.value.data; });
      const auto of_input = overwritten ? std::nullopt : numbers(input, r.microbatch);
      if (!of_input) continue;
      if (of_input->bad > 0) bad.bad_input = all.name(input.slot);
      bad.largest_input = std::max(bad.largest_input.value_or(0), of_input->largest);
    }
    found = std::move(bad);
    return;
  }
}

void Search::gradient(int parameter, const Tensor& gradient) {
  if (found) return;
  const auto n = numbers_of(engine_.exec(), gradient);
  if (!n || n->bad == 0) return;
  const trace::Tag& at = trace::tag();
  const model::Parameter& p = engine_.plan().parameters.all[static_cast<size_t>(parameter)];
  found =
      BadTensor{.order = {2, at.microbatch, 1, at.layer >= 0 ? -depth(at.layer) : 0, after_steps + parameter},
                .name = "the gradient of " + p.parts.front().name,
                .microbatch = at.microbatch,
                .pass = "backward",
                .bad = n->bad,
                .count = n->count};
}

void Search::log_probs(int microbatch, const Tensor& values) {
  if (found) return;
  const auto n = numbers_of(engine_.exec(), values);
  if (!n || n->bad == 0) return;
  found = BadTensor{.order = {2, microbatch, 0, after_layers, 0},
                    .name = "the log-probabilities of the targets",
                    .microbatch = microbatch,
                    .pass = "forward",
                    .bad = n->bad,
                    .count = n->count};
}

}  // namespace

JsonValue to_json(const BadTensor& b) {
  return JsonValue::object(
      {{"order", JsonValue::array({b.order[0], b.order[1], b.order[2], b.order[3], b.order[4]})},
       {"name", b.name},
       {"operation", b.operation},
       {"microbatch", b.microbatch},
       {"pass", b.pass},
       {"bad", b.bad},
       {"count", b.count},
       {"bad_input", b.bad_input},
       {"largest_input", b.largest_input ? JsonValue(*b.largest_input) : JsonValue()}});
}

BadTensor bad_tensor_from(const JsonValue& json) {
  BadTensor b{.name = json.get_string("name"),
              .operation = json.get_string("operation"),
              .microbatch = json.get_int("microbatch"),
              .pass = json.get_string("pass"),
              .bad = json.get_int("bad"),
              .count = json.get_int("count"),
              .bad_input = json.get_string("bad_input")};
  const auto& order = json.at("order").items();
  if (order.size() != b.order.size())
    fail(Exit::data, "{}order has {} numbers; expected {}", json.where(), order.size(), b.order.size());
  for (size_t i = 0; i < order.size(); ++i) b.order[i] = order[i].as_int();
  if (const JsonValue& largest = json.at("largest_input"); !largest.is_null())
    b.largest_input = largest.as_double();
  return b;
}

std::optional<TensorNumbers> numbers_of(const Tensor& t) {
  if (!is_readable(t)) return {};
  TensorNumbers sum{.count = t.numel()};
  const int64_t columns = t.dim(-1), step = t.step(-1);
  for_each_row(t, static_cast<const char*>(t.data), 0, [&](const char* row) {
    const auto* const narrow = reinterpret_cast<const uint16_t*>(row);
    if (t.dtype == DType::f32)
      add_row(reinterpret_cast<const uint32_t*>(row), columns, step, uint32_t{0x7f800000}, float_of, sum);
    else if (t.dtype == DType::bf16)
      add_row(
          narrow, columns, step, uint16_t{0x7f80},
          [](uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }, sum);
    else
      add_row(narrow, columns, step, uint16_t{0x7c00}, half, sum);
  });
  return sum;
}

std::optional<TensorNumbers> numbers_of(ops::Exec& exec, const Tensor& t) {
  if (!exec.device || !is_readable(t) || t.numel() == 0) return numbers_of(t);
  int64_t elements = 1;
  for (int d = 0; d < t.rank; ++d) elements += (t.dim(d) - 1) * t.step(d);
  std::vector<std::byte> bytes(static_cast<size_t>(elements * size_of(t.dtype)));
  ops::download(exec, make_tensor(t.data, t.dtype, {elements}, t.device), bytes.data());
  Tensor copy = t;
  copy.data = bytes.data();
  return numbers_of(copy);
}

std::optional<BadTensor> find_bad_weight(Engine& engine) {
  engine.finish_gathers();
  std::optional<BadTensor> first;
  for (const WeightSlice& slice : engine.weight_slices()) {
    if (first && first->order[3] <= slice.parameter) continue;
    const auto n = numbers_of(engine.exec(), slice.values);
    if (n && n->bad > 0)
      first = BadTensor{.order = {0, 0, 0, slice.parameter, 0},
                        .name = "the weights " + slice.part.name,
                        .bad = n->bad,
                        .count = n->count};
  }
  return first;
}

std::optional<BadTensor> find_bad_tensor(Engine& engine, Objective& objective, NanCheck level) {
  return Search(engine, objective, level).found;
}

}  // namespace nrl::engine
