#include "core/ops/gemm/tuner.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/philox.h"
#include "core/base/text.h"

namespace nrl::ops::gemm {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// A prime, so that rows of a matrix hold different parts of the pattern.
constexpr size_t pattern_elements = 262139;

const std::vector<float>& normals() {
  static const std::vector<float> pattern = [] {
    std::vector<float> values(pattern_elements);
    const PhiloxStream stream(1, "gemm tuning");
    for (size_t i = 0; i < values.size(); i += 4) {
      const auto four = stream.normals(i / 4);
      for (size_t k = 0; k < std::min<size_t>(4, values.size() - i); ++k)
        values[i + k] = static_cast<float>(four[k]);
    }
    return values;
  }();
  return pattern;
}

// FP8 by truncation; small values become zero, large ones the largest exponent below the special values.
uint8_t fp8_bits(float v, int exponent_bits, int mantissa_bits) {
  const auto u = std::bit_cast<uint32_t>(v);
  const int bias = (1 << (exponent_bits - 1)) - 1,
            exponent = std::min(static_cast<int>(u >> 23 & 0xff) - 127 + bias, (1 << exponent_bits) - 2);
  const uint32_t sign = u >> 31 << 7, mantissa = (u & 0x7fffffu) >> (23 - mantissa_bits);
  if (exponent <= 0) return static_cast<uint8_t>(sign);
  return static_cast<uint8_t>(sign | static_cast<uint32_t>(exponent) << mantissa_bits | mantissa);
}

void encode(DType type, float v, std::byte* to) {
  const auto put = [to](auto value) { std::memcpy(to, &value, sizeof value); };
  switch (type) {
    case DType::f32:
      return put(v);
    case DType::f16:
      return put(f16(v));
    case DType::bf16:
      return put(bf16(v));
    case DType::e4m3:
      return put(fp8_bits(v, 4, 3));
    case DType::e5m2:
      return put(fp8_bits(v, 5, 2));
    default:
      fail(Exit::internal, "a GEMM has no operands of type {}", name_of(type));
  }
}

/// Several sets of operands of a plan in one block of device memory, and a workspace.
class OperandSets {
 public:
  OperandSets(device::Runtime& runtime, const GemmPlan& plan) : plan_(plan) {
    const ColumnMajor c = column_major(plan);
    a_ = place(c.b_cols * plan.a.ld * size_of(plan.a.dtype), plan.a.alignment);
    b_ = place(c.a_cols * plan.b.ld * size_of(plan.b.dtype), plan.b.alignment);
    d_ = place(plan.rows * plan.d.ld * size_of(plan.d.dtype), plan.d.alignment);
    if (plan.has_aux()) aux_ = place(plan.rows * plan.aux.ld * size_of(plan.aux.dtype), plan.aux.alignment);
    if (plan.has_bias()) bias_ = place(plan.cols * size_of(plan.bias), 256);
    scale_a_ = place(scale_matrix(plan.a.scaling, c.b_cols, c.b_rows).bytes, 256);
    scale_b_ = place(scale_matrix(plan.b.scaling, c.a_cols, c.a_rows).bytes, 256);
    set_bytes_ = (set_bytes_ + 511) / 256 * 256;
    // Free memory beyond that is left to the library and the driver.
    constexpr size_t margin = size_t{64} << 20;
    const size_t free = runtime.free_memory(), fixed = workspace_bytes + margin;
    const size_t wanted = 2 * runtime.properties().l2_cache / set_bytes_ + 1,
                 fitting = free > fixed ? (free - fixed) / set_bytes_ : 0;
    count_ = std::min(wanted, fitting);
    if (count_ > 0)
      memory_ = device::Memory(runtime, device::Memory::Kind::device, count_ * set_bytes_ + workspace_bytes);
  }

  size_t count() const { return count_; }
  Workspace workspace() const { return {memory_.data() + count_ * set_bytes_, workspace_bytes}; }
  GemmOperands set(size_t i) const {
    std::byte* const base = memory_.data() + i % count_ * set_bytes_;
    const auto at = [base](const Piece& p) { return p.bytes > 0 ? base + p.offset : nullptr; };
    return {at(a_), at(b_), at(d_), at(bias_), at(aux_), at(scale_a_), at(scale_b_)};
  }

  void fill(device::Runtime& runtime, device::StreamHandle stream) const {
    // Products of unit variance, so that accumulation and GELU see usual values. FP8 has no such small
    // values.
    const float small =
        size_of(plan_.b.dtype) == 1 ? 1.0f : 1.0f / std::sqrt(static_cast<float>(plan_.inner));
    fill_normal(runtime, a_, plan_.a.dtype, 1, stream);
    fill_normal(runtime, b_, plan_.b.dtype, small, stream);
    fill_normal(runtime, d_, plan_.d.dtype, 1, stream);
    fill_normal(runtime, aux_, plan_.aux.dtype, 1, stream);
    fill_normal(runtime, bias_, plan_.bias, 1, stream);
    fill_ones(runtime, scale_a_, plan_.a.scaling, stream);
    fill_ones(runtime, scale_b_, plan_.b.scaling, stream);
    for (size_t i = 1; i < count_; ++i)
      for (const Piece& p : {a_, b_, d_, aux_, bias_, scale_a_, scale_b_})
        if (p.bytes > 0)
          runtime.copy(memory_.data() + i * set_bytes_ + p.offset, memory_.data() + p.offset, p.bytes,
                       device::CopyKind::device_to_device, stream);
  }

 private:
  struct Piece {
    size_t offset = 0, bytes = 0;
  };

  // No better aligned than the plan says.
  Piece place(int64_t bytes, int alignment) {
    if (bytes == 0) return {};
    Piece p{(set_bytes_ + 255) / 256 * 256 + static_cast<size_t>(alignment % 256),
            static_cast<size_t>(bytes)};
    set_bytes_ = p.offset + p.bytes;
    return p;
  }

  // Uploads `pattern` and doubles the filled part until the piece is full.
  void fill_with(device::Runtime& runtime, const Piece& p, const std::vector<std::byte>& pattern,
                 device::StreamHandle stream) const {
    std::byte* const to = memory_.data() + p.offset;
    size_t done = std::min(p.bytes, pattern.size());
    runtime.copy(to, pattern.data(), done, device::CopyKind::host_to_device, stream);
    while (done < p.bytes) {
      const size_t more = std::min(done, p.bytes - done);
      runtime.copy(to + done, to, more, device::CopyKind::device_to_device, stream);
      done += more;
    }
    runtime.synchronize(stream);  // the pattern is not pinned
  }

  void fill_normal(device::Runtime& runtime, const Piece& p, DType type, float scale,
                   device::StreamHandle stream) const {
    if (p.bytes == 0) return;
    const std::vector<float>& values = normals();
    const auto size = static_cast<size_t>(size_of(type));
    std::vector<std::byte> pattern(std::min(values.size() * size, p.bytes));
    // Operands begin at different places of the pattern: equal ones would be a special case.
    for (size_t i = 0; i < pattern.size() / size; ++i)
      encode(type, values[(i + p.offset / 16) % values.size()] * scale, pattern.data() + i * size);
    fill_with(runtime, p, pattern, stream);
  }

  void fill_ones(device::Runtime& runtime, const Piece& p, Scaling scaling,
                 device::StreamHandle stream) const {
    if (p.bytes == 0) return;
    if (scaling == Scaling::mx32) return runtime.fill(memory_.data() + p.offset, 127, p.bytes, stream);
    std::vector<std::byte> pattern(p.bytes);
    for (size_t i = 0; i + 4 <= p.bytes; i += 4) encode(DType::f32, 1, pattern.data() + i);
    fill_with(runtime, p, pattern, stream);
  }

  const GemmPlan plan_;
  Piece a_, b_, d_, aux_, bias_, scale_a_, scale_b_;
  size_t set_bytes_ = 0, count_ = 0;
  device::Memory memory_;
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Timer event_timer(device::Runtime& runtime) {
  auto begin = std::make_shared<device::Event>(runtime, device::EventKind::timed),
       end = std::make_shared<device::Event>(runtime, device::EventKind::timed);
  return [&runtime, begin, end](const std::function<void()>& enqueue, device::StreamHandle stream) {
    begin->record(stream);
    enqueue();
    end->record(stream);
    end->synchronize();
    return runtime.elapsed_ms(begin->get(), end->get());
  };
}

}  // namespace

std::optional<std::vector<double>> time_candidates(device::Runtime& runtime, const GemmPlan& plan, int count,
                                                   const Launch& launch, Timer timer) {
  constexpr int rounds = 5;  // odd, for the median
  constexpr double round_ms = 4, hopeless = 2;
  runtime.synchronize();  // no other work runs during the GEMMs, or frees memory later
  const OperandSets sets(runtime, plan);
  if (sets.count() == 0) return std::nullopt;
  const device::Stream stream(runtime);
  sets.fill(runtime, stream.get());
  if (!timer) timer = event_timer(runtime);

  size_t next = 0;
  std::vector<double> result(static_cast<size_t>(count), infinity);
  const auto run = [&](int candidate) {
    return launch(candidate, sets.set(next++), sets.workspace(), stream.get());
  };
  // Not timed: loads the kernels.
  std::vector<int> left;
  for (int c = 0; c < count; ++c)
    if (run(c)) left.push_back(c);
  stream.synchronize();
  std::vector<std::vector<double>> times(static_cast<size_t>(count));
  const auto round = [&](int calls) {
    for (const int c : left)
      times[static_cast<size_t>(c)].push_back(timer(
                                                  [&] {
                                                    for (int i = 0; i < calls; ++i) run(c);
                                                  },
                                                  stream.get()) /
                                              calls);
  };
  round(1);
  double fastest = infinity;
  for (const int c : left) fastest = std::min(fastest, times[static_cast<size_t>(c)].front());
  std::erase_if(left, [&](int c) { return times[static_cast<size_t>(c)].front() > hopeless * fastest; });
  for (const int c : left) times[static_cast<size_t>(c)].clear();
  const int calls = static_cast<int>(std::clamp(std::ceil(round_ms / std::max(fastest, 1e-4)), 1.0, 500.0));
  for (int r = 0; r < rounds; ++r) round(calls);
  for (const int c : left) result[static_cast<size_t>(c)] = median(times[static_cast<size_t>(c)]);
  stream.synchronize();
  return result;
}

Tuner::Tuner(device::Runtime& runtime, const LibraryOptions& options, const std::string& library, Timer timer)
    : runtime_(runtime),
      autotune_(options.autotune),
      cache_(options.gemm_tuning, {runtime.properties().name, library},
             options.autotune ? TuneCache::Access::extend : TuneCache::Access::read),
      timer_(std::move(timer)) {}

void Tuner::reject(const GemmPlan& plan) const {
  if (autotune_) return;
  fail(Exit::data, "{}: the library refuses the algorithm of {}. Fix: remove that line", cache_.file(),
       plan.key());
}

int Tuner::choose(const GemmPlan& plan, const std::vector<Algorithm>& algorithms, const Launch& launch) {
  if (!autotune_) return 0;
  int best = 0;
  if (algorithms.size() > 1) {
    const auto times = time_candidates(runtime_, plan, static_cast<int>(algorithms.size()), launch, timer_);
    if (!times) {
      if (!warned_)
        log::warn(
            "{} of free GPU memory are too little to time the algorithms of GEMM {} and of larger ones: they "
            "use the "
            "library's choice. Fix: tune with a smaller microbatch",
            human_bytes(runtime_.free_memory()), plan.key());
      warned_ = true;
      return 0;
    }
    best = static_cast<int>(std::min_element(times->begin(), times->end()) - times->begin());
    const double fastest = (*times)[static_cast<size_t>(best)];
    if (std::isinf(fastest)) return 0;  // all were refused: the caller reports it
    // Differences below this are noise; the library's choice is better on average.
    constexpr double noise = 1.02;
    if (times->front() <= noise * fastest) best = 0;
    timings_.push_back({plan.key(), times->front(), (*times)[static_cast<size_t>(best)]});
  }
  cache_.store(plan.key(), algorithms[static_cast<size_t>(best)]);
  return best;
}

}  // namespace nrl::ops::gemm
