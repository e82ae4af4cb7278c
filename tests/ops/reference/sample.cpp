// Sampling in scalar double precision, for tests.

#include "core/base/philox.h"
#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

int64_t integer64(const Tensor& t, int64_t i) {
  return static_cast<const int64_t*>(t.data)[i];
}

void sample_parts(Exec&, const SampleTokens& a) {
  for (int64_t row = 0; row < a.logits.dim(0); ++row) {
    const double temperature = load(a.temperature, row);
    double largest = -INFINITY, sum = 0, best = -INFINITY, value = 0;
    int64_t token = -1;
    const auto z_of = [&](int64_t i) {
      return load(a.logits, row, i) / (temperature == 0 ? 1.0 : temperature);
    };
    for (int64_t i = 0; i < a.logits.dim(1); ++i) largest = std::max(largest, z_of(i));
    for (int64_t i = 0; i < a.logits.dim(1); ++i) {
      const double z = z_of(i);
      sum += std::exp(z - largest);
      const int64_t id = a.first_column + i;
      double score = z;
      if (temperature > 0) {
        const auto words =
            philox4x32(static_cast<uint64_t>(integer64(a.sample, row)),
                       static_cast<uint64_t>(index(a.position, row)) << 32 | static_cast<uint64_t>(id / 4),
                       static_cast<uint64_t>(integer64(a.seed, row)));
        const double u = (static_cast<double>(words[static_cast<size_t>(id % 4)]) + 0.5) * 0x1p-32;
        score -= std::log(-std::log(u));
      }
      if (id < a.tokens && score > best) best = score, token = id, value = z;
    }
    const double numbers[] = {best, static_cast<double>(token), largest, sum, value};
    for (int64_t i = 0; i < SamplePart::columns; ++i) store(a.out, row, i, numbers[i]);
  }
}

void join_parts(Exec&, const JoinSamples& a) {
  const int64_t rows = a.parts.dim(1);
  for (int64_t row = 0; row < rows; ++row) {
    const auto number = [&](int64_t slice, int64_t i) { return load(a.parts, slice * rows + row, i); };
    double largest = -INFINITY, sum = 0, best = -INFINITY, value = 0;
    int64_t token = -1;
    for (int64_t s = 0; s < a.parts.dim(0); ++s) {
      largest = std::max(largest, number(s, SamplePart::largest));
      if (number(s, SamplePart::token) >= 0 && number(s, SamplePart::score) > best) {
        best = number(s, SamplePart::score), value = number(s, SamplePart::value);
        token = static_cast<int64_t>(number(s, SamplePart::token));
      }
    }
    for (int64_t s = 0; s < a.parts.dim(0); ++s)
      sum += number(s, SamplePart::sum) * std::exp(number(s, SamplePart::largest) - largest);
    static_cast<int32_t*>(a.token.data)[row] = static_cast<int32_t>(token);
    store(a.log_prob, row, token < 0 ? 0 : value - largest - std::log(sum));
  }
}

}  // namespace

void fill_sample(KernelTable& table) {
  table.sample_tokens = sample_parts;
  table.join_samples = join_parts;
}

}  // namespace nrl::ops::reference
