// Attention at the shapes that models train with, on a device: samples against fp64, everything against our
// own kernels where a library runs, and bit by bit against a second run where gradients are deterministic.

#include <cmath>
#include <cstring>
#include <vector>

#include "core/device/runtime.h"
#include "core/ops/attention_difference.h"
#include "core/ops/attention_engine.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

/// `sequences` of equal `length`.
struct Shape {
  int64_t sequences, length, heads, kv_heads, d;
  int64_t rows() const { return sequences * length; }
  int64_t width() const { return (heads + 2 * kv_heads) * d; }
  std::string name() const { return fmt::format("{}x{} {}/{} D{}", sequences, length, heads, kv_heads, d); }
};

/// Near to a normal distribution, from a hash: Buffer::normal() takes seconds at these sizes.
std::vector<bf16> random_values(int64_t n, uint64_t seed) {
  std::vector<bf16> values(static_cast<size_t>(n));
  uint64_t state = seed;
  for (bf16& v : values) {
    uint64_t z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    int sum = 0;
    for (int shift = 0; shift < 64; shift += 8) sum += static_cast<int>(z >> shift & 255);
    v = bf16((static_cast<float>(sum) - 1020.0f) / 209.0f);
  }
  return values;
}

/// A tensor on the device and its values on the host.
template <class T>
struct Mirrored {
  device::Memory memory;
  Tensor tensor;
  std::vector<T> host;

  Mirrored(Exec& e, std::initializer_list<int64_t> shape, std::vector<T> values = {})
      : host(std::move(values)) {
    tensor = make_tensor(nullptr, dtype_of<T>::value, shape);
    memory = device::Memory(*e.device, device::Memory::Kind::device, static_cast<size_t>(tensor.bytes()));
    tensor.data = memory.data();
    if (!host.empty()) {
      upload(e, tensor, host.data());
    } else {
      host.resize(static_cast<size_t>(tensor.numel()));
      e.device->fill(tensor.data, 0xff, static_cast<size_t>(tensor.bytes()), e.stream);
    }
  }
  void fetch(Exec& e) { download(e, tensor, host.data()); }
  double operator[](int64_t i) const { return static_cast<double>(static_cast<float>(host[i])); }
};

struct Attention {
  Shape s;
  Mirrored<bf16> qkv, dout, out, dqkv;
  Mirrored<float> lse;
  Mirrored<int32_t> cu;
  float scale;

  Attention(Exec& e, const Shape& shape)
      : s(shape),
        qkv(e, {s.rows(), s.width()}, random_values(s.rows() * s.width(), 1)),
        dout(e, {s.rows(), s.heads, s.d}, random_values(s.rows() * s.heads * s.d, 2)),
        out(e, {s.rows(), s.heads, s.d}),
        dqkv(e, {s.rows(), s.width()}),
        lse(e, {s.heads, s.rows()}),
        cu(e, {s.sequences + 1}, boundaries(s)),
        scale(1.0f / std::sqrt(static_cast<float>(s.d))) {}
  static std::vector<int32_t> boundaries(const Shape& s) {
    std::vector<int32_t> list;
    for (int64_t i = 0; i <= s.sequences; ++i) list.push_back(static_cast<int32_t>(i * s.length));
    return list;
  }

  Tensor heads_of(const Tensor& rows, int64_t first, int64_t count) const {
    return rows.columns(first * s.d, count * s.d).split_heads(count, s.d);
  }
  AttentionForward forward() const {
    const Tensor& t = qkv.tensor;
    return {.q = heads_of(t, 0, s.heads),
            .k = heads_of(t, s.heads, s.kv_heads),
            .v = heads_of(t, s.heads + s.kv_heads, s.kv_heads),
            .out = out.tensor,
            .lse = lse.tensor,
            .cu_q = cu.tensor,
            .cu_k = cu.tensor,
            .scale = scale,
            .lengths = {s.length, true}};
  }
  /// With out and lse of `given`.
  AttentionBackward backward(const Attention& given) const {
    const AttentionForward f = given.forward();
    const Tensor& t = dqkv.tensor;
    return {.dout = dout.tensor,
            .q = f.q,
            .k = f.k,
            .v = f.v,
            .out = f.out,
            .lse = f.lse,
            .cu_q = f.cu_q,
            .cu_k = f.cu_k,
            .dq = heads_of(t, 0, s.heads),
            .dk = heads_of(t, s.heads, s.kv_heads),
            .dv = heads_of(t, s.heads + s.kv_heads, s.kv_heads),
            .scale = scale,
            .lengths = f.lengths};
  }
};

/// One head of a tensor on the host, as value(row, i).
auto head_of(const Mirrored<bf16>& t, int64_t width, int64_t head, int64_t d) {
  return [&t, width, head, d](int64_t row, int64_t i) { return t[row * width + head * d + i]; };
}

using Row = std::vector<double>;

/// The fp64 definition of single rows; gradients are those of the out and lse that `a` has.
struct Reference {
  const Attention& a;
  const Shape& s = a.s;

  auto column(int64_t head) const { return head_of(a.qkv, s.width(), head, s.d); }
  auto dout(int64_t head) const { return head_of(a.dout, s.heads * s.d, head, s.d); }
  template <class X, class Y>
  double dot(const X& x, int64_t i, const Y& y, int64_t j) const {
    double sum = 0;
    for (int64_t c = 0; c < s.d; ++c) sum += x(i, c) * y(j, c);
    return sum;
  }
  int64_t kv(int64_t head) const { return s.heads + head / (s.heads / s.kv_heads); }

  /// Row `row` of query head `head`; the last element is lse.
  Row out(int64_t row, int64_t head) const {
    const int64_t begin = row / s.length * s.length;
    const auto q = column(head), k = column(kv(head)), v = column(kv(head) + s.kv_heads);
    Row score, result(static_cast<size_t>(s.d), 0.0);
    for (int64_t j = begin; j <= row; ++j) score.push_back(a.scale * dot(q, row, k, j));
    const double top = *std::max_element(score.begin(), score.end());
    double sum = 0;
    for (const double x : score) sum += std::exp(x - top);
    for (int64_t j = begin; j <= row; ++j) {
      const double p = std::exp(score[j - begin] - top) / sum;
      for (int64_t c = 0; c < s.d; ++c) result[c] += p * v(j, c);
    }
    result.push_back(top + std::log(sum));
    return result;
  }
  struct Pair {
    double p, ds;
  };
  Pair pair(int64_t head, int64_t i, int64_t j) const {
    const auto q = column(head), k = column(kv(head)), v = column(kv(head) + s.kv_heads);
    const auto o = head_of(a.out, s.heads * s.d, head, s.d);
    const double p = std::exp(a.scale * dot(q, i, k, j) - a.lse[head * s.rows() + i]);
    return {p, p * (dot(dout(head), i, v, j) - dot(dout(head), i, o, i))};
  }
  Row dq(int64_t row, int64_t head) const {
    Row result(static_cast<size_t>(s.d), 0.0);
    const auto k = column(kv(head));
    for (int64_t j = row / s.length * s.length; j <= row; ++j) {
      const double ds = a.scale * pair(head, row, j).ds;
      for (int64_t c = 0; c < s.d; ++c) result[c] += ds * k(j, c);
    }
    return result;
  }
  /// Of key row `row` and key head `kv_head`: dk, then dv.
  std::pair<Row, Row> dkv(int64_t row, int64_t kv_head) const {
    Row dk(static_cast<size_t>(s.d), 0.0), dv = dk;
    const int64_t group = s.heads / s.kv_heads, end = (row / s.length + 1) * s.length;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
      for (int64_t i = row; i < end; ++i) {
        const Pair x = pair(head, i, row);
        const auto q = column(head), d_out = dout(head);
        for (int64_t c = 0; c < s.d; ++c) {
          dk[c] += a.scale * x.ds * q(i, c);
          dv[c] += x.p * d_out(i, c);
        }
      }
    return {dk, dv};
  }
};

void check(const Shape& s, const std::string& what, double difference,
           double limit = attention_difference_limit) {
  if (!(difference <= limit))
    throw Failure{fmt::format("{}: {} is off by {:.3g}, limit {:.3g}", s.name(), what, difference, limit)};
}

/// Some rows of `a` against fp64: in the first, second and last sequence, around tiles, in several heads.
void check_samples(const Attention& a) {
  const Shape& s = a.s;
  const Reference reference{a};
  const double out_rms = rms_of(s.rows(), s.heads * s.d, head_of(a.out, s.heads * s.d, 0, s.d));
  const auto gradient_rms = [&](int64_t first, int64_t count) {
    return rms_of(s.rows(), count * s.d, head_of(a.dqkv, s.width(), first, s.d));
  };
  const double dq_rms = gradient_rms(0, s.heads), dk_rms = gradient_rms(s.heads, s.kv_heads),
               dv_rms = gradient_rms(s.heads + s.kv_heads, s.kv_heads);
  const auto compare = [&](const char* what, const auto& got, int64_t row, const Row& want, double rms) {
    check(s, fmt::format("{} of row {}", what, row),
          largest_difference(
              1, s.d, [&](int64_t, int64_t i) { return got(row, i); },
              [&](int64_t, int64_t i) { return want[i]; }, rms));
  };
  const int64_t last = s.sequences - 1;
  for (const int64_t sequence : {int64_t{0}, std::min<int64_t>(1, last), last})
    for (const int64_t at : {int64_t{0}, int64_t{1}, s.length / 3, s.length / 2, s.length - 2, s.length - 1})
      for (const int64_t kv_head : {int64_t{0}, s.kv_heads / 2, s.kv_heads - 1}) {
        const int64_t row = sequence * s.length + at, group = s.heads / s.kv_heads,
                      head = kv_head * group + at % group;
        const Row out = reference.out(row, head);
        compare("out", head_of(a.out, s.heads * s.d, head, s.d), row, out, out_rms);
        check(s, "lse", std::fabs(a.lse[head * s.rows() + row] - out.back()), 1e-4);
        compare("dq", head_of(a.dqkv, s.width(), head, s.d), row, reference.dq(row, head), dq_rms);
        const auto [dk, dv] = reference.dkv(row, kv_head);
        compare("dk", head_of(a.dqkv, s.width(), s.heads + kv_head, s.d), row, dk, dk_rms);
        compare("dv", head_of(a.dqkv, s.width(), s.heads + s.kv_heads + kv_head, s.d), row, dv, dv_rms);
      }
}

/// All of `a` against `own`.
void check_all(const Attention& a, const Attention& own) {
  const Shape& s = a.s;
  const auto compare = [&](const char* what, const Mirrored<bf16>& got, const Mirrored<bf16>& want,
                           int64_t width, int64_t first, int64_t count) {
    const double rms = rms_of(s.rows(), count * s.d, head_of(want, width, first, s.d));
    for (int64_t head = first; head < first + count; ++head)
      check(s, fmt::format("{} of head {}, from our own kernels,", what, head - first),
            largest_difference(s.rows(), s.d, head_of(got, width, head, s.d), head_of(want, width, head, s.d),
                               rms));
  };
  compare("out", a.out, own.out, s.heads * s.d, 0, s.heads);
  compare("dq", a.dqkv, own.dqkv, s.width(), 0, s.heads);
  compare("dk", a.dqkv, own.dqkv, s.width(), s.heads, s.kv_heads);
  compare("dv", a.dqkv, own.dqkv, s.width(), s.heads + s.kv_heads, s.kv_heads);
  for (int64_t i = 0; i < s.heads * s.rows(); ++i) check(s, "lse", std::fabs(a.lse[i] - own.lse[i]), 1e-4);
}

void train(Exec& e, Attention& a, const Attention& given) {
  if (&a == &given) attention_forward(e, a.forward());
  attention_backward(e, a.backward(given));
  a.out.fetch(e);
  a.lse.fetch(e);
  a.dqkv.fetch(e);
}

void model_shape(Exec& e, const Shape& s) {
  // Deterministic gradients need a matrix of queries x keys, which a training step would not give them.
  const int64_t padded = (s.length + 127) / 128 * 128, matrix = 2 * s.sequences * s.heads * padded * padded;
  const device::Memory workspace(
      *e.device, device::Memory::Kind::device,
      attention_gpu_workspace(s.rows(), s.heads, s.kv_heads, s.d) + static_cast<size_t>(matrix));
  Exec exact = e;
  exact.workspace = {workspace.data(), workspace.size()};
  Attention a(exact, s);
  const attention::Problem problems[] = {attention::problem_of(a.forward()),
                                         attention::problem_of(a.backward(a))};
  const bool simulated = e.device->properties().simulated;
  std::string library;
  for (const attention::Problem& p : problems) {
    const attention::Choice choice = attention::choose(*e.libraries, p, exact.workspace.size);
    expect(choice.engine || simulated, fmt::format("{}: {} runs on {}", s.name(), describe(choice, p).pass,
                                                   describe(choice, p).implementation));
    if (choice.engine) library = choice.engine->name();
  }
  train(exact, a, a);
  check_samples(a);
  if (library.empty()) return;
  if (library.find("deterministic") != std::string::npos) {
    const std::vector<bf16> first = a.dqkv.host;
    train(exact, a, a);
    expect(std::memcmp(first.data(), a.dqkv.host.data(), first.size() * sizeof(bf16)) == 0,
           s.name() + ": another run gives other bits");
  }
  Libraries none = *e.libraries;
  none.attention = nullptr;
  exact.libraries = &none;
  Attention own(exact, s);
  attention_forward(exact, own.forward());
  train(exact, own, a);
  check_all(a, own);
}

}  // namespace

NRL_OP_CASES(attention_model) {
  const auto add = [&](const Shape& s, bool on_simulated) {
    registry.properties.push_back({"attention of a model " + s.name(),
                                   [=](Exec& e) {
                                     if (e.device && e.device->properties().simulated == on_simulated)
                                       model_shape(e, s);
                                   },
                                   !on_simulated});
  };
  for (const Shape& lengths : {Shape{8, 512, 0, 0, 0}, {2, 2048, 0, 0, 0}, {1, 4096, 0, 0, 0}})
    for (const Shape& heads : {Shape{0, 0, 32, 8, 128}, {0, 0, 32, 8, 64}, {0, 0, 25, 25, 64}})
      add({lengths.sequences, lengths.length, heads.heads, heads.kv_heads, heads.d}, false);
  add({3, 70, 4, 2, 16}, true);  // the checks themselves, with our own kernels
  add({1, 130, 2, 2, 64}, true);
}

}  // namespace nrl::ops_test
