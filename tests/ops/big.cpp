#include "tests/ops/big.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <span>

#include "core/base/philox.h"
#include "core/device/cpu/memory.h"
#include "core/device/runtime.h"
#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"

namespace nrl::ops_test {
namespace {

constexpr int64_t period = 7;

/// Tensors of repeated rows.
class Rows {
 public:
  Rows(ops::Exec& exec, int64_t rows) : exec_(exec), rows_(rows) {}

  /// (rows, width) of normal numbers, or of |scale| of them; only (rows) for width 0.
  Tensor normal(DType dtype, int64_t width, double scale, double mean = 0) {
    const int64_t n = period * std::max<int64_t>(width, 1);
    std::vector<std::byte> pattern(static_cast<size_t>(n * size_of(dtype)));
    const PhiloxStream random(5, "big");
    for (int64_t i = 0; i < n; ++i) {
      const double x = mean + scale * random.normal(static_cast<uint64_t>(drawn_++));
      if (dtype == DType::bf16)
        reinterpret_cast<bf16*>(pattern.data())[i] = bf16(static_cast<float>(x));
      else
        reinterpret_cast<float*>(pattern.data())[i] = static_cast<float>(x);
    }
    return repeated(dtype, width, pattern);
  }
  /// (rows) of integers in [0, below).
  Tensor integers(int64_t below) {
    std::vector<int32_t> values(period);
    for (int64_t i = 0; i < period; ++i) values[i] = static_cast<int32_t>((i * 7919 + 13) % below);
    return repeated(DType::i32, 0, std::as_bytes(std::span(values)));
  }
  /// Results; they begin as NaN.
  Tensor results(DType dtype, int64_t width) {
    const std::vector<std::byte> pattern(
        static_cast<size_t>(period * std::max<int64_t>(width, 1) * size_of(dtype)), std::byte{0xff});
    return repeated(dtype, width, pattern);
  }
  /// A tensor that does not repeat.
  Tensor copy_of(DType dtype, std::initializer_list<int64_t> shape, const void* values) {
    const Tensor t = allocate(make_tensor(nullptr, dtype, shape));
    ops::upload(exec_, t, values);
    return t;
  }
  int64_t rows() const { return rows_; }

 private:
  Tensor allocate(Tensor t) {
    const auto bytes = static_cast<size_t>(t.bytes());
    if (exec_.device)
      t.data = device_.emplace_back(*exec_.device, device::Memory::Kind::device, bytes).data();
    else
      t.data = host_.emplace_back(bytes).data();
    return t;
  }
  Tensor repeated(DType dtype, int64_t width, std::span<const std::byte> pattern) {
    const Tensor t = allocate(width > 0 ? make_tensor(nullptr, dtype, {rows_, width})
                                        : make_tensor(nullptr, dtype, {rows_}));
    const auto bytes = static_cast<size_t>(t.bytes());
    auto* at = static_cast<std::byte*>(t.data);
    size_t done = std::min(bytes, pattern.size());
    ops::upload(exec_, make_tensor(at, dtype, {static_cast<int64_t>(done) / size_of(dtype)}), pattern.data());
    // Doubles the filled part until the tensor is full.
    while (done < bytes) {
      const size_t more = std::min(done, bytes - done);
      if (exec_.device)
        exec_.device->copy(at + done, at, more, device::CopyKind::device_to_device, exec_.stream);
      else
        std::memcpy(at + done, at, more);
      done += more;
    }
    return t;
  }

  ops::Exec& exec_;
  int64_t rows_, drawn_ = 0;
  std::deque<device::Memory> device_;
  std::deque<cpu::HostMemory> host_;
};

struct Result {
  std::string name;
  Tensor value;
};
/// Builds the inputs, runs the op and returns what it wrote.
using Body = std::function<std::vector<Result>(ops::Exec&, Rows&)>;

std::vector<std::byte> stored_bytes(ops::Exec& exec, const Tensor& t, int64_t begin, int64_t count) {
  std::vector<std::byte> bytes(static_cast<size_t>(count));
  const int64_t size = size_of(t.dtype);
  ops::download(exec, make_tensor(static_cast<std::byte*>(t.data) + begin, t.dtype, {count / size}),
                bytes.data());
  return bytes;
}

std::string compare(ops::Exec& exec, const Body& body, int64_t width, int64_t elements) {
  Rows few(exec, period), many(exec, (elements / width / period + 1) * period + 1);
  const std::vector<Result> expected = body(exec, few), got = body(exec, many);
  ops::synchronize(exec);
  for (size_t k = 0; k < got.size(); ++k) {
    const int64_t repeat = expected[k].value.bytes(), all = got[k].value.bytes();
    const int64_t slice = std::max<int64_t>((int64_t{64} << 20) / repeat, 1) * repeat;
    const std::vector<std::byte> want = stored_bytes(exec, expected[k].value, 0, repeat);
    for (int64_t begin = 0; begin < all; begin += slice) {
      const std::vector<std::byte> part =
          stored_bytes(exec, got[k].value, begin, std::min(slice, all - begin));
      for (size_t at = 0; at < part.size(); at += want.size()) {
        const size_t n = std::min(want.size(), part.size() - at);
        if (std::memcmp(part.data() + at, want.data(), n) == 0) continue;
        const auto [a, b] = std::mismatch(want.begin(), want.begin() + static_cast<std::ptrdiff_t>(n),
                                          part.begin() + static_cast<std::ptrdiff_t>(at));
        const int64_t byte = begin + static_cast<int64_t>(b - part.begin());
        return fmt::format("{} differs in row {} of {}", got[k].name, byte / (repeat / period), many.rows());
      }
    }
  }
  return {};
}

std::vector<Result> rms_norm(ops::Exec& exec, Rows& rows) {
  constexpr int64_t width = 4096;
  const std::vector<bf16> ones(width, bf16(1.0F));
  ops::NormForward f;
  f.kind = ops::NormKind::rms;
  f.x = rows.normal(DType::bf16, width, 1);
  f.weight = rows.copy_of(DType::bf16, {width}, ones.data());
  f.out = rows.results(DType::bf16, width);
  f.rstd = rows.results(DType::f32, 0);
  ops::norm_forward(exec, f);
  return {{"out", f.out}, {"rstd", f.rstd}};
}

std::vector<Result> swiglu(ops::Exec& exec, Rows& rows) {
  constexpr int64_t width = 4096;
  const ops::ActivationForward a{.kind = ops::Activation::silu,
                                 .gated = true,
                                 .x = rows.normal(DType::bf16, 2 * width, 1),
                                 .out = rows.results(DType::bf16, width)};
  ops::activation_forward(exec, a);
  return {{"out", a.out}};
}

std::vector<Result> cross_entropy(ops::Exec& exec, Rows& rows) {
  constexpr int64_t vocab = 32000;
  ops::CrossEntropy c;
  c.logits = rows.normal(DType::f32, vocab, 1);
  c.target = rows.integers(vocab);
  c.log_prob = rows.results(DType::f32, 0);
  c.weight = rows.normal(DType::f32, 0, 1e-3);
  // As in the head: the gradient overwrites the logits.
  c.dlogits = make_tensor(c.logits.data, DType::bf16, {rows.rows(), vocab});
  c.dlogits.stride[0] = 2 * vocab;
  ops::cross_entropy(exec, c);
  return {{"log_prob", c.log_prob}, {"dlogits", c.logits}};
}

std::vector<Result> adamw(ops::Exec& exec, Rows& rows) {
  constexpr int64_t width = 4096;
  const int64_t n = rows.rows() * width;
  const auto flat = [n](const Tensor& t) { return make_tensor(t.data, t.dtype, {n}); };
  ops::AdamW a;
  a.param = flat(rows.normal(DType::f32, width, 0.02));
  a.grad = flat(rows.normal(DType::f32, width, 1e-3));
  a.exp_avg = flat(rows.normal(DType::f32, width, 1e-3));
  a.exp_avg_sq = flat(rows.normal(DType::f32, width, 1e-8, 1e-6));
  a.param_bf16 = flat(rows.results(DType::bf16, width));
  a.rates[0].weight_decay = 0.1F;
  const ops::AdamWRange range{.count = n};
  const auto chunks = ops::adamw_chunks(std::span(&range, 1));
  a.chunks = rows.copy_of(DType::i64, {static_cast<int64_t>(chunks.size()) / 4, 4}, chunks.data());
  double scalars[ops::StepScalar::count] = {};
  scalars[ops::StepScalar::learning_rate] = 1e-3;
  scalars[ops::StepScalar::updates] = 100;
  scalars[ops::StepScalar::grad_scale] = 1;
  scalars[ops::StepScalar::correction1] = scalars[ops::StepScalar::correction2] = 0.9;
  a.scalars = rows.copy_of(DType::f64, {ops::StepScalar::count}, scalars);
  ops::adamw(exec, a);
  return {
      {"param", a.param}, {"exp_avg", a.exp_avg}, {"exp_avg_sq", a.exp_avg_sq}, {"param_bf16", a.param_bf16}};
}

BigCase big_case(std::string name, int64_t width, size_t bytes_per_element, Body body) {
  return {std::move(name), bytes_per_element,
          [width, body = std::move(body)](ops::Exec& exec, int64_t elements) {
            return compare(exec, body, width, elements);
          }};
}

}  // namespace

std::vector<BigCase> big_cases() {
  return {big_case("rms_norm", 4096, 4, rms_norm), big_case("swiglu", 4096, 6, swiglu),
          big_case("cross_entropy", 32000, 4, cross_entropy), big_case("adamw", 4096, 18, adamw)};
}

}  // namespace nrl::ops_test
