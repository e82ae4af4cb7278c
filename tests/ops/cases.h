#pragma once
// The registry of op cases. A family's <family>_cases.cpp registers cases with NRL_OP_CASES; the program
// `op_tests` runs them in one of three modes: test (every ISA of this machine against the reference), grad
// (finite differences of the reference forward against the reference backward, then the CPU backward against
// that), perf (rates at model shapes).

#include <functional>
#include <string>
#include <vector>

#include "core/base/philox.h"
#include "core/ops/exec.h"
#include "core/ops/kernel_table.h"

namespace nrl::ops_test {

/// Tensors with their memory. f32 or bf16 values come from Philox by (name, element).
class Buffer {
 public:
  Buffer() = default;
  /// Zeroed contiguous tensor. `row_gap` > 0 makes the rows (of the first dimension) that many elements
  /// longer than the shape says, so that strides are exercised; the gap is filled with a canary that
  /// check_canary() verifies.
  Buffer(DType dtype, std::vector<int64_t> shape, int64_t row_gap = 0);
  Buffer& normal(std::string_view name, double scale = 1.0, double mean = 0.0);
  /// Integers in [low, high); i32 only.
  Buffer& integers(std::string_view name, int32_t low, int32_t high);
  Buffer& fill(double value);

  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }
  /// Values in row-major order, widened.
  std::vector<double> values() const;
  double get(int64_t i) const;
  void set(int64_t i, double value);
  int64_t size() const { return tensor_.numel(); }
  bool gap_intact() const;
  /// Same shape, dtype, gap and values, other memory.
  Buffer clone() const;
  /// Same shape as f32 with the same values (for comparing bf16 kernels with the reference, for finite
  /// differences).
  Buffer as_f32() const;

 private:
  int64_t offset(int64_t i) const;
  std::vector<std::byte> memory_;
  Tensor tensor_;
  int64_t gap_ = 0;
  friend void copy_values(const Buffer& from, Buffer& to);
  void rebind();

 public:
  Buffer(const Buffer& other) { *this = other; }
  Buffer& operator=(const Buffer& other);
};

/// Relative tolerance for a result of `dtype` that is a sum of `reduction_length` products computed in f32.
/// The only place where tolerances are decided.
double tolerance(DType dtype, int64_t reduction_length);

/// max |a - b| / (scale of b), where the scale is the root mean square of b plus |b| of the element: errors
/// of elements that cancel are judged against the size of the tensor.
double error_of(const std::vector<double>& got, const std::vector<double>& want);

/// What a case may call while it runs.
class Check {
 public:
  /// Compares with tolerance(dtype of got, reduction_length); records a failure naming `what`.
  void close(const std::string& what, const Buffer& got, const Buffer& want, int64_t reduction_length);
  void close(const std::string& what, const std::vector<double>& got, const std::vector<double>& want,
             double tol);
  /// Same bits.
  void same(const std::string& what, const Buffer& a, const Buffer& b);
  void that(const std::string& what, bool ok);

  std::string prefix;
  int failures = 0;
  int checks = 0;
  double worst = 0;  ///< largest error / tolerance seen
};

/// Runs with a table: `exec` has 2 threads and a generous workspace.
using Run = std::function<void(ops::Exec& exec)>;

/// mode `test`: called once per ISA; compare kernels of `cpu` with `reference`.
struct TestCase {
  std::string name;
  std::function<void(ops::Exec& cpu, ops::Exec& reference, Check& check)> body;
};

/// mode `grad`: `inputs` (f32) are perturbed one element at a time; `loss(reference)` is a scalar (double) of
/// the reference forward, `backward(exec)` fills `gradients` (same order as inputs).
struct GradCase {
  std::string name;
  std::vector<Buffer*> inputs;
  std::vector<Buffer*> gradients;
  std::function<double(ops::Exec& reference)> loss;
  std::function<void(ops::Exec& exec)> backward;
  std::shared_ptr<void> keep;  ///< owns the buffers
  double tol = 2e-4;           ///< finite differences against the reference backward
};

/// mode `perf`: `run` is timed; bytes or flops of one call.
struct PerfCase {
  std::string name;
  Run run;
  double bytes = 0;
  double flops = 0;
  std::shared_ptr<void> keep;
};

struct Registry {
  std::vector<TestCase> tests;
  std::vector<std::function<GradCase()>> grads;  ///< made when they run, so that memory is not held
  std::vector<std::function<PerfCase()>> perfs;
};
using Register = void (*)(Registry&);
std::vector<Register>& registrars();
struct Registrar {
  explicit Registrar(Register r) { registrars().push_back(r); }
};

}  // namespace nrl::ops_test

/// NRL_OP_CASES(norm) { registry.tests.push_back(...); }
#define NRL_OP_CASES(family)                                                   \
  static void register_##family(nrl::ops_test::Registry& registry);            \
  static const nrl::ops_test::Registrar registrar_##family{register_##family}; \
  static void register_##family([[maybe_unused]] nrl::ops_test::Registry& registry)
