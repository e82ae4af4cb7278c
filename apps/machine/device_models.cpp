#include "apps/machine/device_models.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "core/base/error.h"
#include "core/device/cpu/features.h"
#include "core/device/cpu/memory.h"
#include "core/device/cpu/parallel.h"
#include "core/ops/optimizer.h"
#include "core/ops/peak.h"

namespace nrl::machine {
namespace {

// Multiprocessors, memory and FLOP/s are from data sheets. Measured on an H200 in steps of training, at its
// power limit (docs/gpu-results.md): its attention at head dimensions 64 and 128, cuDNN 9.14 and 9.19 alike,
// and that its GEMMs and its copy are as assumed. The rest is assumed:
//   copy       about 90 % of the data sheet's bandwidth (H200 4.8, H100 3.35, B200 8.0, A100 2.04 TB/s)
//   gemm       of large bf16 GEMMs of random numbers: about 720 of 989 TFLOP/s on an H100 or H200 at 700 W,
//              near what llm.c and llmq publish for whole steps; A100: about 255 of 312
//   attention  causal, long sequences: FlashAttention-3 (Shah et al. 2024) at head dimension 256 on an H100,
//              as a measure of cuDNN 9; FlashAttention-2 (Dao 2023) on an A100
//   node       80 % of NVLink's data sheet each way: NVLink 4 (450 GB/s), 5 (900), 3 (300)
//   network    84 % of a 400 Gbit/s adapter for each GPU; A100: 200 Gbit/s
// A B200's fractions are guesses close to an H100's.
constexpr DeviceModel models[] = {
    {.name = "h200",
     .product = "H200",
     .major = 9,
     .multiprocessors = 132,
     .memory = 141e9,
     .copy = 4.3e12,
     .f32_flops = 67e12,
     .tf32_flops = 494e12,
     .gemm = 0.73,
     .forward = {.d64 = 0.42, .d128 = 0.58, .d256 = 0.55},
     .backward = {.d64 = 0.335, .d128 = 0.45, .d256 = 0.42},
     .node = {3.6e11, 15e-6},
     .network = {4.2e10, 30e-6}},
    {.name = "h100",
     .product = "H100",
     .major = 9,
     .multiprocessors = 132,
     .memory = 80e9,
     .copy = 3.0e12,
     .f32_flops = 67e12,
     .tf32_flops = 494e12,
     .gemm = 0.73,
     .forward = {.d64 = 0.42, .d128 = 0.58, .d256 = 0.55},
     .backward = {.d64 = 0.335, .d128 = 0.45, .d256 = 0.42},
     .node = {3.6e11, 15e-6},
     .network = {4.2e10, 30e-6}},
    {.name = "b200",
     .product = "B200",
     .major = 10,
     .multiprocessors = 148,
     .memory = 180e9,
     .copy = 7.2e12,
     .f32_flops = 75e12,
     .tf32_flops = 1125e12,
     .gemm = 0.70,
     .forward = {.d64 = 0.40, .d128 = 0.62, .d256 = 0.55},
     .backward = {.d64 = 0.32, .d128 = 0.46, .d256 = 0.40},
     .node = {7.0e11, 15e-6},
     .network = {4.2e10, 30e-6}},
    {.name = "a100",
     .product = "A100",
     .major = 8,
     .multiprocessors = 108,
     .memory = 80e9,
     .copy = 1.75e12,
     .f32_flops = 19.5e12,
     .tf32_flops = 156e12,
     .gemm = 0.82,
     .forward = {.d64 = 0.58, .d128 = 0.64, .d256 = 0.58},
     .backward = {.d64 = 0.50, .d128 = 0.55, .d256 = 0.45},
     .node = {2.3e11, 15e-6},
     .network = {2.1e10, 30e-6}},
};

/// CPU efficiencies: fractions of the FMA peak that `nrl-train bench gemm` and `bench attention` measure with
/// AVX-512 on large shapes.
constexpr double cpu_gemm = 0.85, cpu_attention_forward = 0.40, cpu_attention_backward = 0.45;
/// Bytes/s that a copy larger than the caches reads and writes.
double measure_copy(int threads) {
  constexpr int64_t bytes = int64_t{48} << 20;
  cpu::HostMemory memory(2 * bytes);
  std::byte *from = memory.data(), *to = from + bytes;
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    cpu::parallel_for(threads, bytes, bytes / threads, [=](int64_t first, int64_t last) {
      std::memcpy(to + first, from + first, static_cast<size_t>(last - first));
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    best = std::max(best, 2 * static_cast<double>(bytes) / seconds.count());
  }
  return best;
}

}  // namespace

double DeviceModel::bf16_flops() const {
  return gpu() ? peak_flops(properties()) : f32_flops;
}

device::Properties DeviceModel::properties() const {
  device::Properties p;
  p.name = std::string(product);
  p.major = major;
  p.multiprocessors = multiprocessors;
  p.memory = static_cast<size_t>(memory);
  p.shared_memory_optin = major == 8 ? 163 << 10 : 227 << 10;
  return p;
}

const DeviceModel& find_device_model(std::string_view option, const std::string& name) {
  std::string names;
  for (const DeviceModel& gpu : models) {
    if (gpu.name == name) return gpu;
    names += (names.empty() ? "" : ", ") + std::string(gpu.name);
  }
  fail(Exit::usage, "{}: unknown GPU '{}'; expected one of: {}", option, name, names);
}

const DeviceModel* model_of_device(const device::Properties& device) {
  for (const DeviceModel& gpu : models)
    // The peak distinguishes other variants of a product.
    if (device.name.find(gpu.product) != std::string::npos && peak_flops(device) == gpu.bf16_flops())
      return &gpu;
  return nullptr;
}

namespace {

DeviceModel cpu_model(double flops, double copy) {
  DeviceModel m;
  m.name = "cpu";
  m.product = "CPU";
  m.f32_flops = m.tf32_flops = flops;
  m.copy = copy;
  m.gemm = cpu_gemm;
  m.forward = {cpu_attention_forward, cpu_attention_forward, cpu_attention_forward};
  m.backward = {cpu_attention_backward, cpu_attention_backward, cpu_attention_backward};
  m.node = {.bandwidth = m.copy / 4, .latency = 20e-6};
  m.network = {.bandwidth = 1.1e9, .latency = 60e-6};
  return m;
}

}  // namespace

DeviceModel measure_cpu_model(int ranks, int threads) {
  // Shared resources are measured with the threads of all ranks and divided by the ranks.
  const int together = std::min(ranks * threads, cpu::available_cores());
  DeviceModel m = cpu_model(ops::measure_fma_peak(together) * 1e9 / ranks, measure_copy(together) / ranks);
  m.memory = static_cast<double>(cpu::machine_memory()) / ranks;
  return m;
}

device::Properties usual_properties(const precision::Recipe& recipe) {
  const precision::QuantizedGemms& q = recipe.quantized();
  const bool newer = q.attention || q.weight.scaling == Scaling::mx32;
  device::Properties properties;
  properties.name = newer ? "B200" : "H100";
  properties.major = newer ? 10 : 9;
  properties.multiprocessors = ops::gpu_multiprocessors;
  properties.memory = size_t{1} << 50;
  return properties;
}

DeviceModel usual_model(DeviceType type, int threads, const precision::Recipe& recipe) {
  if (type == DeviceType::cpu) return cpu_model(120e9 * threads, 10e9 * threads);
  return *model_of_device(usual_properties(recipe));
}

double peak_flops(const device::Properties& device) {
  // From data sheets, without sparsity. A name must precede its own prefixes.
  static constexpr struct {
    const char* name;
    double teraflops;
  } sheet[] = {{"GB300", 2500}, {"GB200", 2500}, {"B300", 2250}, {"B200", 2250},     {"GH200", 989},
               {"H200", 989},   {"H20", 148},    {"H800", 989},  {"H100 PCIe", 756}, {"H100 NVL", 835},
               {"H100", 989},   {"A100", 312},   {"A800", 312}};
  for (const auto& entry : sheet)
    if (device.name.find(entry.name) != std::string::npos) return entry.teraflops * 1e12;
  return 0;
}

}  // namespace nrl::machine
