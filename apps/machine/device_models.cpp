#include "apps/machine/device_models.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include <unistd.h>

#include "core/base/error.h"
#include "core/device/cpu/features.h"
#include "core/device/cpu/memory.h"
#include "core/device/cpu/parallel.h"
#include "core/ops/optimizer.h"
#include "core/ops/peak.h"

namespace nrl::machine {
namespace {

// Multiprocessors, FLOP/s, bandwidths and power limits are from NVIDIA's data sheets. Measured on an H200 in
// steps of training, at its power limit (docs/gpu-results.md): its attention at head dimensions 64 and 128,
// cuDNN 9.14 and 9.19 alike, and that its GEMMs and its copy are as assumed. The rest is assumed:
//   memory     as nvidia-smi reports it with ECC, B200: cudaMemGetInfo's total. B300 and GB300: its power
//              limits as well, 1,100 and 1,400 W
//   copy       about 90 % of the data sheet's bandwidth (A100 40 GB 1.56, H100 3.35, PCIe 2.0, NVL 3.94,
//              H20 4.0, H200 4.8, B200 and GB200 8.0 TB/s); A100 80 GB: 1.61 in the copy of BabelStream
//              (Azure, AI-benchmarking-guide, ND A100 v4), where an H200 has 4.01
//   gemm       of large bf16 GEMMs of random numbers: about 720 of 989 TFLOP/s on an H100 or H200 at 700 W,
//              near what llm.c and llmq publish for whole steps; A100: about 255 of 312. GB200: 2,973 of
//              5,000 in FP8 (Azure, AI-benchmarking-guide, ND GB200 v6); B200: the same chip at the clocks of
//              its power limit (profile.cpp). B300, taken for GB300: 1,578 of 2,250 with 8,192 rows (marin,
//              issue 7010, GPUs of 275 GB and 1,100 W). PCIe and NVL cards reach their power limit earlier,
//              an H20 never
//   attention  causal, long sequences: FlashAttention-3 (Shah et al. 2024) at head dimension 256 on an H100,
//              as a measure of cuDNN 9; FlashAttention-2 (Dao 2023) on an A100. An H20 has an H100's
//              exponentials per multiprocessor beside a quarter of its FLOP/s
//   node       82 % of NVLink each way, 370 of 450 GB/s in rings (maintainers of NCCL, nccl-tests#212):
//              NVLink 4 450 (H800 200), bridges of NVL and PCIe cards 300 GB/s; rings of an A100 232 of 300,
//              of a GB200 680 of 900 GB/s (Azure, as above, all-reduce of 8 GiB, ND A100 v4 and ND GB200 v6)
//   network    a 400 Gbit/s adapter for each GPU, A100: 200, B300 and GB300 800 Gbit/s, at
//              adapter_efficiency
//   host       PCIe 5 x16 as measured on an H200 (docs/gpu-results.md), 87 % of 63 GB/s; A100 on PCIe 4 26.3,
//              GB200 on NVLink-C2C 193 to 201 GB/s (Azure, as above)
//   update     80 % of the host's memory bandwidth, by data sheets of the CPUs in DGX nodes, over 8 GPUs: two
//              sockets with 8 channels of DDR4-3200 (A100), DDR5-4800 (Hopper), DDR5-5600 (B200); GB200: 763
//              GB/s in STREAM's triad (Azure, as above) over 4 GPUs
//   idle       15 % of the power limit: clocks stay up between kernels
// The fractions of attention on Blackwell, which do not count the faster exponentials of a B300, and all of
// an H20 and of PCIe and NVL cards are guesses from an H100's.
constexpr double gbit = 1e9 / 8, mib = 1 << 20;
constexpr double link(double gbits) {
  return adapter_efficiency * gbits * gbit;
}

/// A forward pass of torch.nn.Linear, of one kernel, on an H100 DGX (Xeon 8480C) and a GB200
/// (TransformerEngine, issue 2053). Taken for A100 and B200 as well.
constexpr double xeon_operation = 13.5e-6, grace_operation = 37e-6;

constexpr DeviceModel hopper(std::string_view name, std::string_view product, double memory_mib,
                             double copy) {
  return {.name = name,
          .product = product,
          .major = 9,
          .multiprocessors = 132,
          .memory = memory_mib * mib,
          .copy = copy,
          .f32_flops = 67e12,
          .tf32_flops = 494e12,
          .gemm = 0.73,
          .forward = {.d64 = 0.42, .d128 = 0.58, .d256 = 0.55},
          .backward = {.d64 = 0.335, .d128 = 0.45, .d256 = 0.42},
          .node = {3.7e11, 15e-6},
          .network = {link(400), 30e-6},
          .host = {5.45e10, 3e-6},
          .host_update = 6.1e10,
          .host_operation = xeon_operation,
          .node_ranks = 8,
          .power_limit = 700,
          .idle_power = 105};
}
constexpr DeviceModel h100_pcie() {
  DeviceModel m = hopper("h100-pcie", "H100 PCIe", 81559, 1.8e12);
  m.multiprocessors = 114;
  m.f32_flops = 51e12;
  m.tf32_flops = 378e12;
  m.gemm = 0.65;
  m.node = {2.46e11, 15e-6};
  m.node_ranks = 2;
  m.power_limit = 350;
  m.idle_power = 52;
  return m;
}
constexpr DeviceModel h100_nvl() {
  DeviceModel m = hopper("h100-nvl", "H100 NVL", 95830, 3.5e12);
  m.f32_flops = 60e12;
  m.tf32_flops = 418e12;
  m.gemm = 0.65;
  m.node = {2.46e11, 15e-6};
  m.node_ranks = 2;
  m.power_limit = 400;
  m.idle_power = 60;
  return m;
}
constexpr DeviceModel h800() {
  DeviceModel m = hopper("h800", "H800", 81559, 3.0e12);
  m.node.bandwidth = 1.64e11;
  return m;
}
constexpr DeviceModel h20() {
  DeviceModel m = hopper("h20", "H20", 97871, 3.6e12);
  m.multiprocessors = 78;
  m.f32_flops = 44e12;
  m.tf32_flops = 74e12;
  m.gemm = 0.92;
  m.forward = {.d64 = 0.80, .d128 = 0.85, .d256 = 0.80};
  m.backward = {.d64 = 0.70, .d128 = 0.75, .d256 = 0.70};
  m.power_limit = 500;
  m.idle_power = 75;
  return m;
}
constexpr DeviceModel blackwell(std::string_view name, std::string_view product, double memory_mib) {
  return {.name = name,
          .product = product,
          .major = 10,
          .multiprocessors = 148,
          .memory = memory_mib * mib,
          .copy = 7.2e12,
          .f32_flops = 75e12,
          .tf32_flops = 1125e12,
          .gemm = 0.63,
          .forward = {.d64 = 0.40, .d128 = 0.62, .d256 = 0.55},
          .backward = {.d64 = 0.32, .d128 = 0.46, .d256 = 0.40},
          .node = {6.8e11, 15e-6},
          .network = {link(400), 30e-6},
          .host = {5.45e10, 3e-6},
          .host_update = 7.1e10,
          .host_operation = xeon_operation,
          .node_ranks = 8,
          .power_limit = 1000,
          .idle_power = 150};
}
constexpr DeviceModel gb200() {
  DeviceModel m = blackwell("gb200", "GB200", 189471);
  m.multiprocessors = 152;
  m.f32_flops = 80e12;
  m.tf32_flops = 1250e12;
  m.gemm = 0.60;
  m.host = {1.95e11, 3e-6};
  m.host_update = 1.9e11;
  m.host_operation = grace_operation;
  m.node_ranks = 72;  // NVL72
  m.power_limit = 1200;
  m.idle_power = 180;
  return m;
}
constexpr DeviceModel b300() {
  DeviceModel m = blackwell("b300", "B300", 275040);
  m.gemm = 0.72;
  m.network = {link(800), 30e-6};
  m.power_limit = 1100;
  m.idle_power = 165;
  return m;
}
constexpr DeviceModel gb300() {
  DeviceModel m = gb200();
  m.name = "gb300";
  m.product = "GB300";
  m.memory = 284208 * mib;
  m.gemm = 0.72;
  m.network = {link(800), 30e-6};
  m.power_limit = 1400;
  m.idle_power = 210;
  return m;
}
constexpr DeviceModel ampere(std::string_view name, double memory_mib, double copy) {
  return {.name = name,
          .product = "A100",
          .major = 8,
          .multiprocessors = 108,
          .memory = memory_mib * mib,
          .copy = copy,
          .f32_flops = 19.5e12,
          .tf32_flops = 156e12,
          .gemm = 0.82,
          .forward = {.d64 = 0.58, .d128 = 0.64, .d256 = 0.58},
          .backward = {.d64 = 0.50, .d128 = 0.55, .d256 = 0.45},
          .node = {2.32e11, 15e-6},
          .network = {link(200), 30e-6},
          .host = {2.6e10, 3e-6},
          .host_update = 4.1e10,
          .host_operation = xeon_operation,
          .node_ranks = 8,
          .power_limit = 400,
          .idle_power = 60};
}
constexpr DeviceModel models[] = {hopper("h200", "H200", 143771, 4.3e12),
                                  hopper("h100", "H100", 81559, 3.0e12),
                                  h100_pcie(),
                                  h100_nvl(),
                                  h800(),
                                  h20(),
                                  blackwell("b200", "B200", 182630),
                                  gb200(),
                                  b300(),
                                  gb300(),
                                  ampere("a100", 81920, 1.68e12),
                                  ampere("a100-40g", 40960, 1.35e12)};

/// CPU efficiencies: fractions of the FMA peak that `nrl-train bench gemm` and `bench attention` measure with
/// AVX-512 on large shapes.
constexpr double cpu_gemm = 0.85, cpu_attention_forward = 0.40, cpu_attention_backward = 0.45;
/// A page of a mapped file that is touched and evicted. Measured on a Xeon: offloaded activations moved
/// at 5.9 GB/s, where a copy in memory reached 21.
constexpr double file_page = 4096, file_page_seconds = 0.5e-6;
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
  if (!gpu()) return f32_flops;
  return bf16_sheet > 0 ? bf16_sheet : peak_flops(properties());
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

double DeviceModel::outside_plan(int communicators) const {
  constexpr double gib = 1 << 30, context = 1.5 * gib, communicator = 0.25 * gib;
  return gpu() ? context + communicators * communicator : 0;
}

std::string device_model_names() {
  std::string names;
  for (const DeviceModel& gpu : models) names += (names.empty() ? "" : ", ") + std::string(gpu.name);
  return names;
}

bool has_device_model(std::string_view name) {
  return std::any_of(std::begin(models), std::end(models),
                     [&](const DeviceModel& gpu) { return gpu.name == name; });
}

const DeviceModel& find_device_model(std::string_view option, std::string_view name) {
  for (const DeviceModel& gpu : models)
    if (gpu.name == name) return gpu;
  fail(Exit::usage,
       "{}: unknown GPU '{}'; expected one of: {}. Fix: use the nearest one; nrl-train plan --profile FILE "
       "takes the facts of another one over it (docs/planner.md)",
       option, name, device_model_names());
}

const DeviceModel* model_of_device(const device::Properties& device) {
  const DeviceModel* found = nullptr;
  const auto difference = [&](const DeviceModel& gpu) {
    return std::abs(gpu.memory - static_cast<double>(device.memory));
  };
  for (const DeviceModel& gpu : models) {
    // The peak distinguishes products whose names contain others.
    if (device.name.find(gpu.product) == std::string::npos || peak_flops(device) != gpu.bf16_flops())
      continue;
    if (!found || difference(gpu) < difference(*found)) found = &gpu;
  }
  return found;
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
  m.network = {.bandwidth = 1.1e9, .latency = 30e-6};
  m.host = {.bandwidth = 1 / (2 / m.copy + file_page_seconds / file_page)};
  return m;
}

}  // namespace

size_t processor_cache() {
  long most = 0;
  for (const int level : {_SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE})
    most = std::max(most, sysconf(level));
  return static_cast<size_t>(most);
}

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
