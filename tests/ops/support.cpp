#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <new>
#include <type_traits>
#include <utility>

#include "core/base/philox.h"
#include "core/device/runtime.h"
#include "tests/ops/registry.h"

namespace nrl::ops_test {
namespace {

constexpr size_t alignment = 64;
constexpr size_t tail_bytes = 128;
constexpr uint8_t canary = 0xA5;

// Calls `visit` with the data as what they are.
template <class Visit>
auto typed(const Tensor& tensor, const Visit& visit) {
  switch (tensor.dtype) {
    case DType::bf16:
      return visit(tensor.ptr<bf16>());
    case DType::f16:
      return visit(tensor.ptr<f16>());
    case DType::f64:
      return visit(tensor.ptr<double>());
    case DType::i32:
      return visit(tensor.ptr<int32_t>());
    case DType::i64:
      return visit(tensor.ptr<int64_t>());
    default:
      NRL_CHECK(tensor.dtype == DType::f32, "Buffer of {}", name_of(tensor.dtype));
      return visit(tensor.ptr<float>());
  }
}

template <class T>
constexpr bool is_half = std::is_same_v<T, bf16> || std::is_same_v<T, f16>;

template <class T>
double as_double(T value) {
  if constexpr (is_half<T>)
    return static_cast<double>(static_cast<float>(value));
  else
    return static_cast<double>(value);
}

template <class T>
T from_double(double value) {
  if constexpr (is_half<T>)
    return T(static_cast<float>(value));
  else
    return static_cast<T>(value);
}

}  // namespace

BufferMemory& buffer_memory() {
  static BufferMemory memory{
      [](size_t bytes) { return ::operator new (bytes, std::align_val_t{alignment}); },
      [](void* p) { ::operator delete (p, std::align_val_t{alignment}); },
  };
  return memory;
}

int64_t& largest_buffer() {
  static int64_t elements = INT64_MAX;
  return elements;
}

Buffer::Buffer(DType dtype, std::vector<int64_t> shape, int64_t row_gap) : gap_(row_gap) {
  tensor_.dtype = dtype;
  tensor_.rank = static_cast<int8_t>(shape.size());
  int64_t step = 1;
  for (int i = tensor_.rank - 1; i >= 0; --i) {
    const auto u = static_cast<size_t>(i);
    tensor_.shape[u] = shape[u];
    if (i == 0 && tensor_.rank > 1) step += gap_;
    tensor_.stride[u] = step;
    step *= shape[u];
  }
  const int64_t elements = tensor_.rank > 0 ? tensor_.shape[0] * tensor_.stride[0] : 1;
  if (elements > largest_buffer()) throw TooLarge{};
  allocate(static_cast<size_t>(elements * size_of(dtype)));
  for_rows([&](int64_t at, int64_t, int64_t n) {  // all bytes of a zero are 0, in every type
    std::memset(static_cast<std::byte*>(tensor_.data) + at * size_of(dtype), 0,
                static_cast<size_t>(n * size_of(dtype)));
  });
}

Buffer::~Buffer() {
  if (!tensor_.data) return;
  buffer_memory().unfence(tail(), tail_bytes);
  buffer_memory().release(tensor_.data);
}

Buffer::Buffer(const Buffer& other) : tensor_(other.tensor_), gap_(other.gap_) {
  tensor_.data = nullptr;
  if (!other.tensor_.data) return;
  allocate(other.bytes_);
  std::memcpy(tensor_.data, other.tensor_.data, bytes_);
}

Buffer& Buffer::operator=(const Buffer& other) {
  if (this != &other) *this = Buffer(other);
  return *this;
}

Buffer::Buffer(Buffer&& other) noexcept {
  *this = std::move(other);
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(tensor_, other.tensor_);
  std::swap(bytes_, other.bytes_);
  std::swap(gap_, other.gap_);
  return *this;
}

void Buffer::allocate(size_t bytes) {
  bytes_ = bytes;
  tensor_.data = buffer_memory().allocate(bytes + tail_bytes);
  // The canary behind the last element catches kernels that write whole vectors over the end.
  std::memset(tensor_.data, canary, bytes + tail_bytes);
  buffer_memory().fence(tail(), tail_bytes);
}

std::byte* Buffer::tail() const {
  return static_cast<std::byte*>(tensor_.data) + bytes_;
}

int64_t Buffer::row_size() const {
  return tensor_.rank > 0 && tensor_.shape[0] > 0 ? size() / tensor_.shape[0] : size();
}

// Only rows of the first dimension have gaps.
int64_t Buffer::offset(int64_t i) const {
  return gap_ == 0 ? i : i / row_size() * tensor_.stride[0] + i % row_size();
}

template <class Body>
void Buffer::for_rows(const Body& body) const {
  const int64_t n = gap_ == 0 ? size() : row_size();
  for (int64_t first = 0; first < size(); first += n) body(offset(first), first, n);
}

double Buffer::get(int64_t i) const {
  const int64_t at = offset(i);
  return typed(tensor_, [&](const auto* data) { return as_double(data[at]); });
}

void Buffer::set(int64_t i, double value) {
  const int64_t at = offset(i);
  typed(tensor_, [&]<class T>(T* data) { data[at] = from_double<T>(value); });
}

template <class Value>
Buffer& Buffer::set_all(const Value& value) {
  typed(tensor_, [&]<class T>(T* data) {
    for_rows([&](int64_t at, int64_t first, int64_t n) {
      for (int64_t i = 0; i < n; ++i) data[at + i] = from_double<T>(value(first + i));
    });
  });
  return *this;
}

std::vector<double> Buffer::values() const {
  std::vector<double> out(static_cast<size_t>(size()));
  typed(tensor_, [&](const auto* data) {
    for_rows([&](int64_t at, int64_t first, int64_t n) {
      for (int64_t i = 0; i < n; ++i) out[first + i] = as_double(data[at + i]);
    });
  });
  return out;
}

Buffer& Buffer::normal(std::string_view name, double scale, double mean) {
  // The cases ask for the same streams again and again.
  static std::map<std::string, std::vector<double>, std::less<>> streams;
  auto it = streams.find(name);
  if (it == streams.end()) it = streams.emplace(std::string(name), std::vector<double>()).first;
  std::vector<double>& drawn = it->second;
  const PhiloxStream random(1234, name);
  for (auto i = static_cast<int64_t>(drawn.size()); i < size(); ++i) {
    drawn.push_back(random.normal(static_cast<uint64_t>(i)));
  }
  return set_all([&](int64_t i) { return mean + scale * drawn[i]; });
}

Buffer& Buffer::integers(std::string_view name, int64_t low, int64_t high) {
  const PhiloxStream random(1234, name);
  return set_all([&](int64_t i) {
    const auto draw = static_cast<int64_t>(random.bits(static_cast<uint64_t>(i)));
    return static_cast<double>(low + draw % (high - low));
  });
}

Buffer& Buffer::fill(double value) {
  return set_all([&](int64_t) { return value; });
}

bool Buffer::gap_intact() const {
  if (!tensor_.data) return true;
  const auto* bytes = static_cast<const uint8_t*>(tensor_.data);
  auto intact = [&](int64_t from, int64_t to) {
    return std::all_of(bytes + from, bytes + to, [](uint8_t b) { return b == canary; });
  };
  const int64_t rows = tensor_.rank > 0 ? tensor_.shape[0] : 1;
  const int64_t pitch = (tensor_.rank > 0 ? tensor_.stride[0] : 1) * size_of(tensor_.dtype);
  const int64_t gap = tensor_.rank > 1 ? gap_ * size_of(tensor_.dtype) : 0;
  for (int64_t r = 0; r < rows; ++r) {
    if (!intact((r + 1) * pitch - gap, (r + 1) * pitch)) return false;
  }
  const int64_t end = static_cast<int64_t>(bytes_);
  buffer_memory().unfence(tail(), tail_bytes);
  const bool good = intact(end, end + static_cast<int64_t>(tail_bytes));
  buffer_memory().fence(tail(), tail_bytes);
  return good;
}

double tolerance(DType dtype, int64_t reduction_length, bool rounded_factors) {
  // f32: a few roundings per element plus a random walk over the sum. bf16, f16: one unit in the last place
  // on top, because an f32 error may move a value over the boundary at which the two results are rounded
  // apart.
  const double f32 = 0x1.0p-24 * (16.0 + 4.0 * std::sqrt(static_cast<double>(reduction_length)));
  if (dtype != DType::bf16 && dtype != DType::f16) return f32;
  // Rounded factors are off by up to half a unit each: a random walk of that beside the size of the sum. The
  // largest error of attention's gradients on an H200 was 2.7 units, on a CPU 3.6 (of keys that one query
  // sees).
  const double unit = dtype == DType::bf16 ? 0x1.0p-7 : 0x1.0p-10;
  return (rounded_factors ? 4 * unit : unit) + f32;
}

bool rounds_attention(const ops::Exec& exec, DType dtype) {
  return exec.multiprocessors > 0 ||
         (dtype == DType::bf16 && ops::multiplies_bf16(exec.kernels->bf16_products));
}

namespace {

bool on_gpu(const ops::Exec& exec) {
  return exec.device && !exec.device->properties().simulated;
}

}  // namespace

double exp_tolerance(const ops::Exec& exec) {
  return on_gpu(exec) ? 1e-5 : 0.0;
}

double fp8_sum_tolerance(const ops::Exec& exec, bool ours) {
  return !on_gpu(exec) ? 0.0 : ours ? 1.5e-3 : 1e-2;
}

namespace {

// Calls `visit` with the elements of two buffers of one shape, as what they are: visit(got, want).
template <class Visit>
void for_pairs(const Buffer& got, const Buffer& want, const Visit& visit) {
  const Tensor &g = got.tensor(), &w = want.tensor();
  NRL_CHECK(g.rank == w.rank && g.shape == w.shape, "buffers of two shapes");
  const int64_t rows = w.rank > 1 ? w.shape[0] : 1, columns = rows > 0 ? want.size() / rows : 0;
  typed(g, [&](const auto* g_data) {
    typed(w, [&](const auto* w_data) {
      for (int64_t r = 0; r < rows; ++r) {
        const auto* g_row = g_data + r * g.stride[0];
        const auto* w_row = w_data + r * w.stride[0];
        for (int64_t i = 0; i < columns; ++i) visit(as_double(g_row[i]), as_double(w_row[i]));
      }
    });
  });
}

}  // namespace

double error_of(const Buffer& got, const Buffer& want) {
  double squares = 0;
  for_pairs(want, want, [&](double, double w) { squares += std::isfinite(w) ? w * w : 0.0; });
  const double rms = want.size() > 0 ? std::sqrt(squares / static_cast<double>(want.size())) : 0.0;
  double worst = 0;
  for_pairs(got, want, [&](double g, double w) {
    if (g == w) return;
    if (std::isnan(g) != std::isnan(w) || std::isinf(g) != std::isinf(w)) worst = INFINITY;
    if (std::isfinite(w)) worst = std::max(worst, std::fabs(g - w) / (std::fabs(w) + rms));
  });
  return worst;
}

bool same_bits(const Buffer& a, const Buffer& b) {
  if (a.size() != b.size() || a.tensor().dtype != b.tensor().dtype) return false;
  bool same = true;
  for_pairs(a, b, [&](double x, double y) { same = same && std::memcmp(&x, &y, sizeof x) == 0; });
  return same;
}

double dot(const Buffer& a, const Buffer& b) {
  double s = 0;
  for (int64_t i = 0; i < a.size(); ++i) s += a.get(i) * b.get(i);
  return s;
}

std::vector<Register>& registrars() {
  static std::vector<Register> list;
  return list;
}

Registrar::Registrar(Register r) {
  registrars().push_back(r);
}

}  // namespace nrl::ops_test
