#pragma once
// Shared by all benchmarks: the device with memory and timing, and the report.

#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "apps/bench/bench.h"
#include "apps/train/launch/accelerator.h"
#include "core/device/cpu/memory.h"
#include "core/io/json.h"
#include "core/ops/exec.h"

namespace nrl::bench {

/// Kind, name and properties of the device of `exec`, for the report.
JsonValue describe_device(const nrl::ops::Exec& exec);

/// The device that is measured.
class Machine {
 public:
  /// `device`: "auto", "cpu" or "cuda"; fails with Exit::unavailable and the reason for "cuda" without a
  /// usable GPU. `quick`: every call is executed once.
  Machine(const std::string& device, bool quick);
  /// The device of `exec`, which must outlive it; without its workspace.
  Machine(const nrl::ops::Exec& exec, bool quick);

  bool quick() const { return quick_; }
  bool gpu() const { return exec_.device != nullptr; }
  nrl::ops::Exec& exec() { return exec_; }
  JsonValue describe() const { return describe_device(exec_); }
  const std::string& name() const { return name_; }

  /// Grows the exec's workspace to at least this size.
  void need_workspace(size_t bytes);

  /// Number of working sets of `bytes` to cycle through, so that each is evicted from the cache before
  /// its next use.
  int sets(double bytes) const;
  /// Seconds per call of work(i), where i counts up and the work repeats after `sets` calls. On a GPU the
  /// median over rounds between timed events, each with enough calls to hide the host; on a CPU the minimum.
  double seconds(const std::function<void(int)>& work, int sets);
  /// Bytes read and written per second by a copy within device memory. Measured once.
  double copy_bandwidth();
  /// The bandwidth of the fastest copy so far, after another measurement.
  double copy_bandwidth_again();

 private:
  void describe_gpu();
  double round(const std::function<void(int)>& work, int& next, int calls);

  train::Accelerator accelerator_;
  nrl::ops::Exec exec_;
  device::Memory device_workspace_;
  cpu::HostMemory host_workspace_;
  device::Event begin_, end_;
  std::string name_;
  size_t cache_bytes_ = 0;
  double copy_bandwidth_ = 0;
  bool quick_;
};

/// Tensors of one working set in the memory of a machine, which must outlive them.
class Tensors {
 public:
  explicit Tensors(Machine& machine) : machine_(machine) {}

  /// scale * standard normal; f32, bf16 or f16. Values repeat after 2^18 elements.
  Tensor normal(DType dtype, std::initializer_list<int64_t> shape, double scale = 1);
  /// i32, random in [0, below).
  Tensor integers(std::initializer_list<int64_t> shape, int64_t below);
  /// (n) i32: first, first + step, ...
  Tensor arithmetic(int64_t n, int64_t first, int64_t step);
  Tensor constant(DType dtype, std::initializer_list<int64_t> shape, double value);
  /// A copy of `values`, host memory of the tensor's size.
  Tensor copy_of(DType dtype, std::initializer_list<int64_t> shape, const void* values);

 private:
  Tensor allocate(DType dtype, std::initializer_list<int64_t> shape);
  /// Repeats value(0), value(1), ..., f32, rounded to the type.
  template <class Value>
  Tensor filled_with(DType dtype, std::initializer_list<int64_t> shape, const Value& value);
  /// Repeats the pattern to fill the tensor.
  Tensor filled(DType dtype, std::initializer_list<int64_t> shape, const void* pattern, size_t pattern_bytes);

  Machine& machine_;
  std::vector<device::Memory> device_;
  std::vector<cpu::HostMemory> host_;
};

/// The JSON report: common properties and one object per measurement.
class Report {
 public:
  Report(const Args& args, JsonValue device);
  void set(std::string key, JsonValue value) { head_.set(std::move(key), std::move(value)); }
  void add(JsonValue row) { rows_.push_back(std::move(row)); }
  /// A failed measurement: printed on standard error; the exit code becomes Exit::internal.
  void add_failure(const std::string& name, const std::string& why);
  /// Writes the file of --json, one measurement per line. Returns the exit code.
  int finish();

 private:
  std::string path_, only_;
  JsonValue head_;
  std::vector<JsonValue> rows_;
  bool failed_ = false;
};

/// The dtype of activations to measure.
inline DType precision_of(const Args& args, const Machine& machine) {
  if (args.precision == "auto") return machine.gpu() ? DType::bf16 : DType::f32;
  return args.precision == "bfloat16" ? DType::bf16 : args.precision == "float16" ? DType::f16 : DType::f32;
}

/// Whether --only selects a case.
inline bool selected(const Args& args, const std::string& name) {
  return name.find(args.only) != std::string::npos;
}

}  // namespace nrl::bench
