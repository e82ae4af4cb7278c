// Attention in scalar double precision, for tests: softmax over the keys that a query sees, one query
// at a time. In FP8 all but the rounded factors of sums is in double precision.

#include "core/base/philox.h"
#include "core/ops/shared/attention_dropout.h"
#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

void put(const Tensor& t, int64_t token, int64_t head, int64_t i, double value) {
  store_at(t, token * t.step(0) + head * t.step(1) + i * t.step(2), value);
}

/// A tensor [tokens, heads, width], read once: its elements are used for every query or key.
class Heads {
 public:
  explicit Heads(const Tensor& t) : heads_(t.dim(1)), width_(t.dim(2)) {
    values_.reserve(static_cast<size_t>(t.dim(0) * heads_ * width_));
    for (int64_t token = 0; token < t.dim(0); ++token)
      for (int64_t head = 0; head < heads_; ++head)
        for (int64_t i = 0; i < width_; ++i) {
          const int64_t column = head * t.step(1) + i * t.step(2);
          values_.push_back(t.scales.kind == Scaling::tensor ? load_scaled(t, token, column)
                                                             : load_at(t, token * t.step(0) + column));
        }
  }
  /// The elements of a head of a token.
  const double* at(int64_t token, int64_t head) const {
    return values_.data() + (token * heads_ + head) * width_;
  }

 private:
  int64_t heads_, width_;
  std::vector<double> values_;
};

double product(const double* x, const double* y, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

/// What dropout multiplies the probability of a query and a key of its sequence by.
class Keep {
 public:
  template <class Arguments>
  explicit Keep(const Arguments& a)
      : random_(a.dropout.seed,
                dropout_stream(a.dropout.stream, static_cast<const int64_t*>(a.dropout.step.data))),
        first_row_(a.dropout.first_row),
        first_head_(a.slice.first),
        heads_(a.slice.all > 0 ? a.slice.all : a.q.dim(1)),
        below_(attention::drop_below(a.dropout.p)),
        rows_(a.dropout.rows),
        places_(a.key_places) {}
  /// `key` of the sequence whose first key is `first`.
  double operator()(int64_t row, int64_t head, int64_t key, int64_t first) const {
    if (rows_) row = index(rows_, row), key = index(places_, first + key);
    const auto e = static_cast<size_t>(key % attention::keys_per_block);
    const PhiloxBlock words = random_.block(attention::philox_block_of(
        first_row_ + row, heads_, first_head_ + head, key / attention::keys_per_block));
    const uint32_t bits = words[e / 2] >> 16 * (e % 2) & 0xffff;
    return bits >= below_ ? 65536.0 / (65536.0 - below_) : 0.0;
  }

 private:
  PhiloxStream random_;
  int64_t first_row_, first_head_, heads_;
  uint32_t below_;
  Tensor rows_, places_;
};

/// Calls body(query row, head, key head, first key row of the sequence, first key row seen, end) for every
/// query of every head.
template <class Arguments, class Body>
void for_each_query(const Arguments& a, const Body& body) {
  const int64_t heads = a.q.dim(1), group = heads / a.k.dim(1);
  for (int64_t s = 0; s + 1 < a.cu_q.dim(0); ++s) {
    const int64_t q0 = index(a.cu_q, s), q1 = index(a.cu_q, s + 1), k0 = index(a.cu_k, s),
                  k1 = index(a.cu_k, s + 1);
    for (int64_t i = q0; i < q1; ++i) {
      // The queries are the last rows of the sequence.
      const int64_t self = k1 - (q1 - i);
      const int64_t end = a.causal ? std::max(k0, self + 1) : k1;
      const int64_t begin = a.causal && a.window > 0 ? std::max(k0, self - a.window + 1) : k0;
      for (int64_t h = 0; h < heads; ++h) body(i, h, h / group, k0, std::min(begin, end), end);
    }
  }
}

/// The multiple of 1 / `inverse` by a number of the format that is nearest to x, even if two are.
double rounded_to(DType format, double x, double inverse) {
  if (std::isnan(x)) return x;
  static const std::vector<double> e4m3 = fp8_numbers(DType::e4m3), e5m2 = fp8_numbers(DType::e5m2);
  return fp8_number(nearest_fp8(x * inverse, format == DType::e4m3 ? e4m3 : e5m2),
                    format == DType::e4m3 ? e4m3 : e5m2) /
         inverse;
}

double scale_of(const Tensor& t) {
  return static_cast<double>(*static_cast<const float*>(t.scales.data));
}

void forward(Exec&, const AttentionForward& a) {
  const Keep keep(a);
  const bool fp8 = a.q.dtype == DType::e4m3;
  const int64_t d = a.q.dim(2);
  const Heads q(a.q), k(a.k), v(a.v);
  for_each_query(a, [&](int64_t i, int64_t h, int64_t g, int64_t k0, int64_t begin, int64_t end) {
    std::vector<double> p;
    double top = -INFINITY, sum = 0;
    for (int64_t j = begin; j < end; ++j) {
      p.push_back(product(q.at(i, h), k.at(j, g), d) * static_cast<double>(a.scale));
      top = std::max(top, p.back());
    }
    // A probability is rounded relative to the power of two from the largest on.
    if (fp8 && !p.empty()) top = std::ceil(top / std::log(2.0)) * std::log(2.0);
    for (double& x : p) sum += x = std::exp(x - top);
    if (fp8)
      for (double& x : p) x = rounded_to(DType::e4m3, x, static_cast<double>(probability_code_scale));
    for (int64_t j = begin; j < end; ++j) p[j - begin] *= keep(i, h, j - k0, k0);
    std::vector<double> o(static_cast<size_t>(d));
    for (int64_t j = begin; j < end; ++j) {
      const double* row = v.at(j, g);
      for (int64_t c = 0; c < d; ++c) o[c] += p[j - begin] * row[c];
    }
    for (int64_t c = 0; c < d; ++c) put(a.out, i, h, c, p.empty() ? 0.0 : o[c] / sum);
    if (a.lse) store(a.lse, h, i, p.empty() ? -INFINITY : top + std::log(sum));
  });
}

void backward(Exec&, const AttentionBackward& a) {
  const int64_t d = a.q.dim(2);
  // Sums over queries and heads are kept in double, rounded once.
  const auto width = static_cast<size_t>(a.k.dim(1) * d);
  std::vector<double> dk(static_cast<size_t>(a.k.dim(0)) * width), dv(dk.size());
  const Heads q(a.q), k(a.k), v(a.v), out(a.out), dout(a.dout);
  const Keep keep(a);
  const bool fp8 = a.q.dtype == DType::e4m3;
  const double ds_scale = fp8 ? 0.5 * static_cast<double>(a.scale) * static_cast<double>(d) * 448 *
                                    scale_of(a.dout) * scale_of(a.v)
                              : 1.0;
  for_each_query(a, [&](int64_t i, int64_t h, int64_t g, int64_t k0, int64_t begin, int64_t end) {
    const double *q_row = q.at(i, h), *dout_row = dout.at(i, h);
    const double delta = product(dout_row, out.at(i, h), d);
    std::vector<double> dq(static_cast<size_t>(d));
    for (int64_t j = begin; j < end; ++j) {
      const double* k_row = k.at(j, g);
      const double s = product(q_row, k_row, d) * static_cast<double>(a.scale),
                   p = std::exp(s - load(a.lse, h, i)), kept = keep(i, h, j - k0, k0),
                   dp = product(dout_row, v.at(j, g), d);
      const double exact = p * (kept * dp - delta) * static_cast<double>(a.scale),
                   ds = fp8 ? rounded_to(DType::e5m2, exact, 1 / ds_scale) : exact,
                   p_factor =
                       fp8 ? rounded_to(DType::e4m3, p, static_cast<double>(probability_code_scale)) : p;
      for (int64_t c = 0; c < d; ++c) {
        const size_t e = static_cast<size_t>(j) * width + static_cast<size_t>(g * d + c);
        dq[c] += ds * k_row[c];
        dk[e] += ds * q_row[c];
        dv[e] += kept * p_factor * dout_row[c];
      }
    }
    for (int64_t c = 0; c < d; ++c) put(a.dq, i, h, c, dq[c]);
  });
  size_t e = 0;
  for (int64_t j = 0; j < a.k.dim(0); ++j)
    for (int64_t g = 0; g < a.k.dim(1); ++g)
      for (int64_t c = 0; c < d; ++c, ++e) {
        put(a.dk, j, g, c, dk[e]);
        put(a.dv, j, g, c, dv[e]);
      }
}

}  // namespace

void fill_attention(KernelTable& table) {
  table.attention_forward = forward;
  table.attention_backward = backward;
}

}  // namespace nrl::ops::reference
