#include "apps/machine/call_time.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include "apps/machine/trainer_kernels.h"
#include "core/base/error.h"
#include "core/base/sample.h"

namespace nrl::machine {
namespace {

/// Our own attention kernels, as fractions of the bf16 peak (measured on an H200), or of the f32 peak for f32
/// tensors (assumed).
constexpr double own_forward = 0.30, own_backward = 0.17, own_f32 = 0.30;
/// At this many keys per query fused attention reaches half of its rate on long sequences.
constexpr double attention_half_keys = 256;
/// A GEMM with this inner dimension spends half of its time outside the main loop. FP8 on Hopper: cuBLASLt on
/// an H100 and an H200 loses 12 % from 16,384 to 4,096 (Azure, AI-benchmarking-guide, ND H100 v5 and ND H200
/// v5: 1,377 and 1,217 TFLOP/s), and the GEMMs of a layer gain a factor of 1.90 over bf16 (TransformerEngine,
/// docs/examples/gemm_profiling). Blackwell has sums in a memory of their own and loses less (ND GB200 v6).
constexpr double gemm_half_inner = 128, hopper_fp8_half_inner = 512;
/// The part of a GEMM's epilogue traffic that no main loop hides.
constexpr double exposed_epilogue = 0.6;

/// The fraction of the copy bandwidth that memory-bound kernels reach.
constexpr double op_bandwidth = 0.85;

/// Seconds in which a host launches one of many kernels in a loop (NVIDIA, "Getting Started with CUDA
/// Graphs").
constexpr double host_launch = 3.8e-6;

struct OpFraction {
  std::string_view op;
  double fraction;
};
/// Measured on an H200 by `bench ops` (docs/gpu-results.md, "Memory-bound kernels"), times 4.18 over 4.30
/// TB/s, its copy there and in device_models.cpp. Norms as they come in layers, with a residual; rounding to
/// FP8 with and without an activation. The cross entropy reads half of a long row again.
constexpr OpFraction op_fractions[] = {{"norm_forward", 0.88},
                                       {"norm_backward", 0.83},
                                       {"rope", 0.87},
                                       {"activation_forward", 0.97},
                                       {"activation_backward", 0.98},
                                       {"qk_norm_rope_forward", 0.69},
                                       {"qk_norm_rope_backward", 0.76},
                                       {"cross_entropy", 0.68},
                                       {"adamw", 0.95},
                                       {"quantize", 0.89},
                                       {"dropout", 0.67},
                                       {"column_sums", 0.67},
                                       {"embedding_forward", 0.80},
                                       {"embedding_backward", 0.59}};

/// Our own FP8 GEMMs of experts beside a library's, on an H200 with scales of tensors.
constexpr OpFraction fp8_experts[] = {{"grouped_linear_forward", 0.79},
                                      {"grouped_linear_backward_data", 0.78},
                                      {"grouped_linear_backward_weight", 0.51}};

double fraction_of(std::string_view op, std::span<const OpFraction> table, double otherwise) {
  const auto at = std::find_if(table.begin(), table.end(), [&](const OpFraction& f) { return f.op == op; });
  return at == table.end() ? otherwise : at->fraction;
}

/// The rows and columns of a result that a multiprocessor computes at a time.
struct Tile {
  int64_t rows, columns;
  /// The rate of the main loop: smaller tiles load more per FLOP. 0.93 and 0.8 with 128 and 64 rows of 128
  /// columns.
  double rate() const {
    const double loads = 1.0 / static_cast<double>(rows) + 1.0 / static_cast<double>(columns),
                 least = 1.0 / 128 + 1.0 / 256;
    return std::min(1.0, 1 - 17 * (loads - least));
  }
};
constexpr Tile ampere_tiles[] = {{128, 256}, {256, 128}, {128, 128}, {64, 128}, {128, 64}};
/// From Hopper on cuBLASLt has more of them, by the names of its kernels: nvjet_hsh_192x192, 320x128 (on an
/// H100), nvjet_tst_144x128, 128x160. Assumed: all of them either way around, and that it chooses the best.
constexpr Tile hopper_tiles[] = {{128, 256}, {256, 128}, {192, 192}, {320, 128}, {128, 320}, {128, 160},
                                 {160, 128}, {144, 128}, {128, 144}, {128, 128}, {64, 128},  {128, 64}};

/// The fraction of the multiprocessors' time that the tiles of `parts` equal results occupy, which are
/// computed at once: the last wave of tiles leaves some idle, tiles at the edges are partly empty. The inner
/// dimension is split where tiles are few.
double tile_utilization(const DeviceModel& gpu, const std::array<int64_t, 3>& gemm, int64_t parts = 1) {
  if (!gpu.gpu()) return 1;
  constexpr int64_t least_inner = 512;
  constexpr double split_rate = 0.9;
  const auto [rows, columns, inner] = gemm;
  const auto processors = static_cast<int64_t>(gpu.multiprocessors);
  double best = 0;
  for (const Tile& tile : gpu.major >= 9 ? std::span<const Tile>(hopper_tiles) : ampere_tiles) {
    const int64_t count =
        parts * ((rows + tile.rows - 1) / tile.rows) * ((columns + tile.columns - 1) / tile.columns);
    const int64_t splits = std::clamp<int64_t>(processors / std::max<int64_t>(count, 1), 1,
                                               std::max<int64_t>(inner / least_inner, 1));
    const int64_t waves = (count * splits + processors - 1) / processors;
    const double used = static_cast<double>(parts * rows * columns * splits),
                 available = static_cast<double>(waves * processors * tile.rows * tile.columns);
    best = std::max(best, used / available * tile.rate() * (splits > 1 ? split_rate : 1.0));
  }
  return best;
}

/// The GEMMs of a call, all alike, which run at once.
struct Gemms {
  std::array<int64_t, 3> size;
  int64_t count = 1;
  DType operands;
  double fraction = 1;  // of the rate of the library
};

Gemms gemms_of(const DeviceModel& gpu, const ops::Call& call) {
  const ops::Cost& cost = call.cost;
  const TrainerKernels* const theirs = gpu.kernels;
  if (!theirs || !theirs->expert_gemms || cost.groups == 0)
    return {.size = cost.gemm,
            .count = theirs && theirs->streams ? call.pieces : 1,
            .operands = cost.operands,
            .fraction = gpu.gpu() && size_of(cost.operands) == 1 ? fraction_of(call.op, fp8_experts, 1) : 1};
  const auto [all, m, k] = cost.gemm;
  const int64_t rows = std::max<int64_t>(all / cost.groups, 1);
  const bool of_weights = std::string_view(call.op) == "grouped_linear_backward_weight";
  // Where our kernels multiply FP8 operands as f16, the library does not.
  return {.size = of_weights ? std::array{m, k, rows} : std::array{rows, m, k},
          .count = cost.groups,
          .operands = theirs->fp8 && cost.operands == DType::f16 ? DType::e4m3 : cost.operands};
}

double peak_of(const DeviceModel& gpu, const ops::Cost& cost, DType operands) {
  if (!gpu.gpu()) return gpu.f32_flops;
  // The fractions of attention below refer to the bf16 peak: FP8 does not make exponentials faster.
  if (size_of(operands) == 1) return (cost.work == ops::Work::attention ? 1 : 2) * gpu.bf16_flops();
  if (operands != DType::f32) return gpu.bf16_flops();
  return cost.tf32 ? gpu.tf32_flops : gpu.f32_flops;
}

double attention_fraction(const DeviceModel& gpu, const ops::Cost& cost) {
  if (!cost.library && gpu.gpu())
    return cost.operands == DType::f32 ? own_f32 : cost.backward ? own_backward : own_forward;
  const AttentionRates& rates = cost.backward ? gpu.backward : gpu.forward;
  return cost.head_dim <= 64 ? rates.d64 : cost.head_dim <= 128 ? rates.d128 : rates.d256;
}

/// Attention with scores in memory: two products forward, four backward, where nothing is computed again.
/// Their inner dimensions are the head dimension or long; each is taken for the former.
CallTime stored_attention(const DeviceModel& gpu, const ops::Cost& cost, const Scores& scores,
                          const Scenario& scenario) {
  constexpr double fused_products[] = {2, 5}, products[] = {2, 4}, above_diagonal = 2;
  const ScoreBytes& bytes = cost.backward ? scores.backward : scores.forward;
  const auto inner = static_cast<double>(cost.head_dim);
  const double flops = above_diagonal * cost.flops / fused_products[cost.backward],  // of a product
      moved = flops / (2 * inner) / (gpu.copy * scenario.bandwidth * op_bandwidth),  // seconds of a byte each
      rate = peak_of(gpu, cost, cost.operands) * gpu.gemm * scenario.arithmetic * inner /
             (inner + gemm_half_inner);
  const double others = bytes.others * moved;
  return {.arithmetic = products[cost.backward] * flops / rate + others,
          .memory = bytes.products * moved + others};
}

/// Null: as ours.
const OpKernels* theirs_for(const DeviceModel& gpu, const ops::Call& call) {
  return gpu.kernels ? gpu.kernels->find(call.op, gpu.experts) : nullptr;
}

/// The kernels of a call for its groups of rows, besides the others.
double group_kernels(const DeviceModel& gpu, const ops::Call& call) {
  const OpKernels* const theirs = theirs_for(gpu, call);
  return theirs && !gpu.experts.grouped ? static_cast<double>(theirs->per_group * call.cost.groups) : 0;
}

double launches_of(const DeviceModel& gpu, const ops::Call& call) {
  const OpKernels* const theirs = theirs_for(gpu, call);
  return call.cost.launches * (theirs ? theirs->launches : 1);
}

}  // namespace

CallTime estimate(const DeviceModel& gpu, const ops::Call& call, const Scenario& scenario) {
  const ops::Cost& cost = call.cost;
  const double copy = gpu.copy * scenario.bandwidth;
  CallTime time;
  if (cost.bytes() + cost.flops == 0) return time;
  const OpKernels* const theirs = theirs_for(gpu, call);
  switch (cost.work) {
    case ops::Work::memory:
      time.memory =
          (cost.bytes() * (theirs ? theirs->bytes : 1) + cost.scratch) /
          (copy * (gpu.gpu() && !theirs ? fraction_of(call.op, op_fractions, op_bandwidth) : op_bandwidth));
      break;
    case ops::Work::gemm: {
      const Gemms gemms = gemms_of(gpu, call);
      const auto inner = static_cast<double>(gemms.size[2]);
      const bool hopper_fp8 = gpu.major == 9 && size_of(gemms.operands) == 1 && gemms.fraction == 1;
      const double rate = peak_of(gpu, cost, gemms.operands) * gpu.gemm * scenario.arithmetic *
                          tile_utilization(gpu, gemms.size, gemms.count) * inner /
                          (inner + (hopper_fp8 ? hopper_fp8_half_inner : gemm_half_inner)) * gemms.fraction;
      time.arithmetic = cost.flops / rate + exposed_epilogue * cost.epilogue / copy;
      time.memory = cost.bytes() / (copy * op_bandwidth);
      break;
    }
    case ops::Work::attention: {
      if (gpu.kernels && gpu.kernels->scores.stored())
        return stored_attention(gpu, cost, gpu.kernels->scores, scenario);
      const double rate = peak_of(gpu, cost, cost.operands) * attention_fraction(gpu, cost) *
                          scenario.arithmetic * cost.keys / (cost.keys + attention_half_keys);
      time.arithmetic = cost.flops / rate;
      time.memory = cost.bytes() / (copy * op_bandwidth);
      break;
    }
  }
  return time;
}

double memory_seconds(const DeviceModel& gpu, const char* op, double bytes) {
  return estimate(gpu, {.op = op, .cost = {.read = bytes}}, likely).seconds();
}

double copy_seconds(const DeviceModel& gpu, comm::Purpose purpose, comm::Op op, double bytes,
                    const Scenario& scenario) {
  if (!gpu.kernels) return 0;
  const bool gather = op == comm::Op::all_gather, reduce = op == comm::Op::reduce_scatter;
  const TrainerKernels& theirs = *gpu.kernels;
  const double moved = purpose == comm::Purpose::weights && gather              ? theirs.gather_copies
                       : purpose == comm::Purpose::gradients && reduce          ? theirs.reduce_copies
                       : purpose == comm::Purpose::layers && (gather || reduce) ? theirs.layer_copies
                                                                                : 0;
  return moved * bytes / (gpu.copy * scenario.bandwidth * op_bandwidth);
}

CallTimes::CallTimes(const DeviceModel& device, const Profile* profile, const Scenario& scenario)
    : device_(device), scenario_(scenario), gap_(launch_gap) {
  if (!profile) return;
  if (profile->host_gap_s) gap_ = *profile->host_gap_s;
  for (const MeasuredCall& m : profile->calls) {
    measured_[m.key] = m.seconds;
    const ops::Call call{.op = m.key.op.c_str(), .cost = cost_of(m.key, m.work, m.flops, m.library)};
    const double modeled = estimate(device_, call, likely).seconds();
    if (modeled <= 0) continue;
    const Point point{size_of(m.key), m.seconds / modeled};
    points_[{m.work, m.key.op, m.key.operands, m.key.backward}].push_back(point);
    points_[{m.work, "", m.key.operands, m.key.backward}].push_back(point);
  }
}

CallTimes::Size CallTimes::size_of(const CallKey& key) {
  const auto log = [](int64_t n) { return std::log(static_cast<double>(std::max<int64_t>(n, 1))); };
  if (key.gemm[0] > 0) return {log(key.gemm[0]), log(key.gemm[1]), log(key.gemm[2])};
  return {log(key.bytes), log(key.head_dim), log(key.keys)};
}

double CallTimes::ratio(const CallKey& key, ops::Work work) const {
  constexpr size_t most = 4;
  for (const std::string& op : {key.op, std::string()}) {
    const auto points = points_.find({work, op, key.operands, key.backward});
    if (points == points_.end()) continue;
    const Size at = size_of(key);
    std::vector<std::pair<double, double>> near;  // distance and ratio
    for (const Point& p : points->second)
      near.emplace_back(std::hypot(p.at[0] - at[0], p.at[1] - at[1], p.at[2] - at[2]), p.ratio);
    const size_t n = std::min(most, near.size());
    std::partial_sort(near.begin(), near.begin() + static_cast<std::ptrdiff_t>(n), near.end());
    std::vector<double> ratios;
    for (size_t i = 0; i < n; ++i) ratios.push_back(near[i].second);
    return median(std::move(ratios));
  }
  return 0;
}

Seconds CallTimes::of(const ops::Call& call) const {
  if (measured_.empty()) return {estimate(device_, call, scenario_).seconds(), Source::assumed};
  const CallKey key = key_of(call);
  if (const auto at = measured_.find(key); at != measured_.end()) return {at->second, Source::profile};
  const double ratio = this->ratio(key, call.cost.work);
  if (ratio == 0) return {estimate(device_, call, scenario_).seconds(), Source::assumed};
  const ops::Cost cost = cost_of(key, call.cost.work, call.cost.flops, call.cost.library);
  return {ratio * estimate(device_, {.op = call.op, .cost = cost}, likely).seconds(), Source::profile};
}

double CallTimes::gaps(const ops::Call& call) const {
  // GEMMs of groups run on several streams.
  return gap_ * (launches_of(device_, call) +
                 (call.cost.work == ops::Work::gemm ? 0 : group_kernels(device_, call)));
}

double CallTimes::host(const ops::Call& call) const {
  if (host_of_operation() == 0) return 0;
  return device_.host_operation * launches_of(device_, call) + host_launch * group_kernels(device_, call);
}

bool CallTimes::host_waits(const ops::Call& call) const {
  const OpKernels* const theirs = theirs_for(device_, call);
  return theirs && theirs->host_waits;
}

std::string assumptions(const DeviceModel& gpu) {
  const auto percent = [](double x) { return std::lround(x * 100); };
  const auto attention = [&](const AttentionRates& r) {
    return fmt::format("{}, {}, {} %", percent(r.d64), percent(r.d128), percent(r.d256));
  };
  const auto [slowest, fastest] =
      std::minmax_element(std::begin(op_fractions), std::end(op_fractions),
                          [](const OpFraction& a, const OpFraction& b) { return a.fraction < b.fraction; });
  return fmt::format(
      "assumed     {:.0f} TFLOP/s dense bf16 (data sheet), {:.2f} TB/s in a copy\n"
      "assumed     GEMMs reach {} % of the peak, less by tiles and epilogue; other kernels {} to {} % of the "
      "copy\n"
      "assumed     cuDNN's attention at head dimension 64, 128, 256: forward {}, backward {} of the peak\n"
      "assumed     our own attention: forward {}, backward {} % of the peak; {:.0f} us between kernels\n"
      "assumed     poor and good rates: arithmetic x {:.2f} and x {:.2f}, bandwidth x {:.2f} and x {:.2f}",
      gpu.bf16_flops() * 1e-12, gpu.copy * 1e-12, percent(gpu.gemm), percent(slowest->fraction),
      percent(fastest->fraction), attention(gpu.forward), attention(gpu.backward), percent(own_forward),
      percent(own_backward), launch_gap * 1e6, poor.arithmetic, good.arithmetic, poor.bandwidth,
      good.bandwidth);
}

}  // namespace nrl::machine
