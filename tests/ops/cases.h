#pragma once
// The registry of op cases. <op>_cases.cpp registers cases with NRL_OP_CASES; the program
// `op_tests` runs them in one of two modes:
//   test  kernels of every ISA of this machine against the reference, same bits twice
//   grad  finite differences (4 points, f64) of the reference forward against the reference backward, then
//         the CPU backward against the reference backward

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/ops/kernel_table.h"

namespace nrl::ops_test {

/// Where the memory of Buffers comes from, accessible to the host. A program for devices puts in memory that
/// has a copy there, one with the address sanitizer fences off what lies behind a Buffer. Replaced before the
/// first Buffer is made.
struct BufferMemory {
  void* (*allocate)(size_t bytes);  ///< 64-byte aligned
  void (*release)(void* p);
  void (*fence)(void* p, size_t bytes) = [](void*, size_t) {};    ///< makes them inaccessible
  void (*unfence)(void* p, size_t bytes) = [](void*, size_t) {};  ///< undoes fence()
};
BufferMemory& buffer_memory();

/// Thrown where a Buffer would have more elements than largest_buffer(), which tests set to leave out large
/// cases.
struct TooLarge {};
int64_t& largest_buffer();

/// A tensor with its memory, 64-byte aligned. `row_gap` > 0 makes the rows of the first dimension that many
/// elements longer than the shape says; the gap holds a canary.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer();
  /// Zeroed; f32, bf16, f16, f64, i32 or i64. TooLarge.
  Buffer(DType dtype, std::vector<int64_t> shape, int64_t row_gap = 0);
  Buffer(const Buffer& other);
  Buffer& operator=(const Buffer& other);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  /// mean + scale * standard normal of Philox stream `name`, by element: the same values in every dtype
  /// up to rounding.
  Buffer& normal(std::string_view name, double scale = 1.0, double mean = 0.0);
  /// Integers in [low, high).
  Buffer& integers(std::string_view name, int64_t low, int64_t high);
  Buffer& fill(double value);

  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }
  int64_t size() const { return tensor_.numel(); }
  /// Element i in row-major order.
  double get(int64_t i) const;
  void set(int64_t i, double value);
  std::vector<double> values() const;  ///< all elements in row-major order
  /// The canaries between the rows and behind the last are as they were.
  bool gap_intact() const;

 private:
  int64_t row_size() const;
  int64_t offset(int64_t i) const;
  template <class Body>
  void for_rows(const Body& body) const;  // body(offset, first element, elements) of parts without gaps
  template <class Value>
  Buffer& set_all(const Value& value);  // element i to value(i)
  void allocate(size_t bytes);
  std::byte* tail() const;
  Tensor tensor_;     ///< its data is what this object owns
  size_t bytes_ = 0;  ///< of the elements with their gaps; canaries follow
  int64_t gap_ = 0;
};

/// Largest accepted error_of() for a result of `dtype` that sums `reduction_length` products in f32, whose
/// factors were rounded to `dtype` where `rounded_factors`. The only place where tolerances are decided.
double tolerance(DType dtype, int64_t reduction_length, bool rounded_factors = false);

/// True where attention rounds probabilities and gradients of scores to the inputs' type: tensor cores
/// multiply them, or the CPU's products of bf16.
bool rounds_attention(const ops::Exec& exec, DType dtype);

/// Added to f32 tolerances of ops with exponentials on a GPU, 0 elsewhere. __expf(x) is off by up to
/// 2 + 1.2 |x| units of 2^-24 (CUDA C++ Programming Guide), and ex2.approx and lg2.approx of libraries by as
/// much; terms with |x| > 20 do not count beside e^0, so that 26 units remain, or 2e-6, in numerator,
/// denominator and lse.
double exp_tolerance(const ops::Exec& exec);

/// Added to tolerances of FP8 GEMMs on a GPU, 0 elsewhere. Hopper's tensor cores cut the terms of a sum off
/// 13 bits below the largest one: of 400 products of normal numbers some 1e-3 of their size. `ours`: of
/// experts, whose sums have at most 128 products; the largest error on an H200 was 8.2e-4.
double fp8_sum_tolerance(const ops::Exec& exec, bool ours);

/// max over i of |got - want| / (|want[i]| + rms(want)): elements that nearly cancel are judged by the
/// tensor's size. Infinite when one is finite or NaN where the other is not.
double error_of(const Buffer& got, const Buffer& want);

bool same_bits(const Buffer& a, const Buffer& b);

/// What a case produced, with the length of the sums behind each element.
struct Output {
  std::string name;
  Buffer value;
  int64_t reduction_length = 1;
  bool rounded_factors = false;  ///< the sums' factors are results themselves, rounded to the tensor's type
};
using Outputs = std::vector<Output>;

/// mode `test`: `body` builds its inputs (from Philox, so they are the same each time), runs the ops and
/// returns the results. It is called with the reference, then twice per ISA with 2 threads;
/// `any_threads`: one thread must give the same bits as two; `no_gpu`: a GPU has no kernel for it.
struct TestCase {
  std::string name;
  std::function<Outputs(ops::Exec&)> body;
  bool any_threads = false, no_gpu = false;
};

/// The same context with few blocks on a GPU, so that each of them has several rounds of work.
inline ops::Exec few_blocks(const ops::Exec& e) {
  ops::Exec few = e;
  few.threads = std::min(e.threads, 2);
  few.reduction_blocks = std::min(e.reduction_blocks, 2);
  few.multiprocessors = std::min(e.multiprocessors, 1);
  return few;
}

/// A check without reference, called once per ISA with 2 threads; throw Failure (expect()) when it
/// does not hold.
struct PropertyCase {
  std::string name;
  std::function<void(ops::Exec& cpu)> body;
  bool large = false;   ///< left out with NRL_TEST_SMALL, whatever its tensors
  bool no_gpu = false;  ///< a GPU has no kernel for it
};
struct Failure {
  std::string text;
};
inline void expect(bool ok, const std::string& text) {
  if (!ok) throw Failure{text};
}

/// One problem of mode `grad`: `gradients[i]` is filled by `backward` for `inputs[i]`. `loss` is a scalar of
/// the forward. Kernels are called through exec.kernels-> directly: the dispatch functions refuse f64.
struct GradProblem {
  std::vector<Buffer*> inputs, gradients;
  std::function<double(ops::Exec&)> loss;
  std::function<void(ops::Exec&)> backward;
  int64_t reduction_length = 1;
  std::shared_ptr<void> keep;  ///< owns the buffers
};
/// `make(f64)` for finite differences, `make(f32)` for the CPU kernels.
struct GradCase {
  std::string name;
  std::function<GradProblem(DType)> make;
};

struct Registry {
  std::vector<TestCase> tests;
  std::vector<PropertyCase> properties;
  std::vector<GradCase> grads;
};

/// sum of a[i] * b[i] in double: the usual loss, with b a fixed random tensor that is also `dout`.
double dot(const Buffer& a, const Buffer& b);

using Register = void (*)(Registry&);
struct Registrar {
  explicit Registrar(Register r);
};

}  // namespace nrl::ops_test

/// NRL_OP_CASES(norm) { registry.tests.push_back(...); }
#define NRL_OP_CASES(op)                                               \
  static void register_##op(nrl::ops_test::Registry& registry);        \
  static const nrl::ops_test::Registrar registrar_##op{register_##op}; \
  static void register_##op([[maybe_unused]] nrl::ops_test::Registry& registry)
