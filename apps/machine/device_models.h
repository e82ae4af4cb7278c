#pragma once
// Devices that a step can be predicted for, with their assumed rates: GPUs by name, and the CPU of this
// machine. device_models.cpp names the sources.

#include <cstdint>
#include <string>
#include <string_view>

#include "core/device/runtime.h"
#include "core/tensor/tensor.h"
#include "precision/recipe.h"

namespace nrl::machine {

struct TrainerKernels;

/// Fractions of the bf16 peak that fused attention reaches on long sequences, by head dimension.
struct AttentionRates {
  double d64, d128, d256;
};

/// The fraction of an adapter's rate that large messages reach: 46 of 50 GB/s with nccl-tests on ConnectX-7.
inline constexpr double adapter_efficiency = 0.92;

/// A link between two ranks.
struct LinkModel {
  double bandwidth = 0;  ///< bytes/s of a large message, each way
  double latency = 0;    ///< seconds that an operation takes at least; between CPUs, of each step as well
};

/// How another trainer works on the rows of experts (find_trainer()).
struct ExpertsOfTrainer {
  bool grouped = false;   ///< one kernel for all experts of a rank
  bool once = false;      ///< a token goes to each node once, however many of its experts are there
  bool in_order = false;  ///< rows arrive as experts take them, also padded for FP8
  bool beside = false;    ///< rows are exchanged beside the computation of another microbatch
};

struct DeviceModel {
  std::string_view name;     ///< of the options --predict and --device
  std::string_view product;  ///< GPU: part of the driver's name; peak_flops() knows it
  int major = 0;             ///< GPU: compute capability
  int multiprocessors = 0;   ///< 0: a CPU
  double memory = 0;         ///< bytes that the driver reports
  double copy = 0;           ///< bytes/s read and written by a large copy
  double f32_flops = 0;      ///< FLOP/s of f32; of a GPU on the data sheet, not on tensor cores
  double tf32_flops = 0;     ///< dense, on the data sheet
  double bf16_sheet = 0;     ///< GPU: dense bf16, on the data sheet; 0: peak_flops() knows it
  double gemm = 0;           ///< fraction of the peak in the main loop of a large GEMM
  AttentionRates forward = {}, backward = {};  ///< of cuDNN; of ours on a CPU
  LinkModel node = {};                         ///< between ranks of a node
  LinkModel network = {};                      ///< a rank's adapter, to ranks of other nodes
  /// A GPU: its link to page-locked memory. A CPU: to the file that takes its offloaded activations.
  LinkModel host = {};
  double host_update = 0;  ///< GPU: bytes/s that its part of the host's CPUs reads and writes in an update
  /// GPU: seconds that PyTorch on its host takes to start an operation; 0: it is in a CUDA graph.
  double host_operation = 0;
  int node_ranks = 1;  ///< GPU: ranks with NVLink between all of them, where the configuration has no nodes
  double power_limit = 0;                   ///< GPU: watts
  double idle_power = 0;                    ///< GPU: watts between kernels
  double busy_power = 0;                    ///< GPU: watts in steps of training, measured; 0: not measured
  const TrainerKernels* kernels = nullptr;  ///< GPU: of another trainer (trainer_kernels.h); null: ours
  ExpertsOfTrainer experts = {};

  bool gpu() const { return multiprocessors > 0; }
  double bf16_flops() const;  ///< dense, on the data sheet; f32_flops of a CPU
  /// For a dry run (device::open_dry_run).
  device::Properties properties() const;
  /// Bytes of a GPU that are not in a plan: CUDA's context, libraries, and NCCL's buffers. Assumed.
  double outside_plan(int communicators) const;
  /// The rest of its memory, which a run finds free.
  size_t for_plan(int communicators) const {
    return static_cast<size_t>(memory - outside_plan(communicators));
  }
};

/// A GPU by its name in `option`. Fails with Exit::usage and the names that there are.
const DeviceModel& find_device_model(std::string_view option, std::string_view name);
bool has_device_model(std::string_view name);
/// "h100, h200, ...", for messages and help.
std::string device_model_names();
/// The model of a GPU; null for other devices. Variants of a product differ in peak or memory.
const DeviceModel* model_of_device(const device::Properties& device);
/// One of `ranks` ranks with `threads` threads each on this machine's CPU. Takes about 50 ms: peak and
/// bandwidth are measured.
DeviceModel measure_cpu_model(int ranks, int threads);

/// Bytes of the largest cache of this machine's processor according to the system; 0: it does not say.
size_t processor_cache();

/// A GPU that runs `recipe`: a B200 for attention with FP8 operands and for MXFP8, else an H100.
device::Properties usual_properties(const precision::Recipe& recipe);
/// The model of that GPU, or of `threads` threads on a CPU with AVX-512, whose
/// rates are assumed, not measured: the same on all ranks.
DeviceModel usual_model(DeviceType type, int threads, const precision::Recipe& recipe);

/// Dense bf16 FLOP/s of a GPU by the data sheet; 0 for a device that is not in the table.
double peak_flops(const device::Properties& device);

}  // namespace nrl::machine
