// Sampling on the CPU; formulas in core/ops/sample.h. A row at a time: the largest logit first, then sums,
// noise and the best score in one pass over groups of 4 x lanes tokens.

#include <algorithm>
#include <cmath>

#include "core/base/philox.h"
#include "core/device/cpu/parallel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/sample/join.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

constexpr float no_score = -INFINITY;
constexpr int group_tokens = 4 * lanes;  ///< tokens whose noise is drawn at a time

/// log(1 + f) + e log(2) within 2 ulp, for 1 + f in [sqrt(1/2), sqrt(2)); the polynomial of Cephes' logf.
NRL_INLINE Lanes log_of_parts(Lanes f, Lanes e) {
  const Lanes z = f * f;
  Lanes y = Lanes{} + 7.0376836292e-2f;
  y = y * f - 1.1514610310e-1f;
  y = y * f + 1.1676998740e-1f;
  y = y * f - 1.2420140846e-1f;
  y = y * f + 1.4249322787e-1f;
  y = y * f - 1.6668057665e-1f;
  y = y * f + 2.0000714765e-1f;
  y = y * f - 2.4999993993e-1f;
  y = y * f + 3.3333331174e-1f;
  y = y * f * z - e * 2.12194440e-4f - 0.5f * z;
  return f + y + e * 0.693359375f;
}
/// log(x) of positive normal numbers; log(1 - c) where c, which x = 1 - c rounds, is small.
NRL_INLINE Lanes log_lanes(Lanes x, Lanes c) {
  constexpr int32_t sqrt_half = 0x3f3504f3;
  const IntLanes shifted = bits_of(x) - sqrt_half, e = shifted >> 23;
  const Lanes f = from_bits((shifted & 0x7fffff) + sqrt_half) - 1.0f;
  const auto near_one = c < 0.25f;
  return log_of_parts(near_one ? -c : f, near_one ? Lanes{} : __builtin_convertvector(e, Lanes));
}
/// -log(-log(u)), u = (bits + 1/2) 2^-32. 1 - u is exact to its own rounding, so that u near 1 loses nothing.
NRL_INLINE Lanes gumbel(WordLanes bits) {
  // Halves, because vectors convert from signed integers.
  const auto unit = [](WordLanes x) __attribute__((always_inline)) {
    const auto high = __builtin_convertvector(reinterpret_cast<IntLanes>(x >> 16), Lanes),
               low = __builtin_convertvector(reinterpret_cast<IntLanes>(x & 0xffffu), Lanes);
    return high * 0x1p-16f + (low + 0.5f) * 0x1p-32f;
  };
  const Lanes e = -log_lanes(unit(bits), unit(~bits));
  return -log_lanes(e, Lanes{} + 1.0f);
}

/// The words of the Philox blocks counter, counter + 1, ..., interleaved as the tokens are.
NRL_INLINE void draw(uint64_t sample, uint64_t counter, uint64_t key, uint32_t (&words)[group_tokens]) {
  uint32_t c0[lanes], c1[lanes], c2[lanes], c3[lanes];
  for (int l = 0; l < lanes; ++l) {
    c0[l] = static_cast<uint32_t>(sample), c1[l] = static_cast<uint32_t>(sample >> 32);
    c2[l] = static_cast<uint32_t>(counter) + static_cast<uint32_t>(l);
    c3[l] = static_cast<uint32_t>(counter >> 32);
  }
  auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int l = 0; l < lanes; ++l) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * c0[l], p1 = uint64_t{0xCD9E8D57u} * c2[l];
      const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1[l] ^ k0,
                     n2 = static_cast<uint32_t>(p0 >> 32) ^ c3[l] ^ k1;
      c1[l] = static_cast<uint32_t>(p1), c3[l] = static_cast<uint32_t>(p0);
      c0[l] = n0, c2[l] = n2;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int l = 0; l < lanes; ++l)
    words[4 * l] = c0[l], words[4 * l + 1] = c1[l], words[4 * l + 2] = c2[l], words[4 * l + 3] = c3[l];
}

void sample_row(const SampleTokens& a, int64_t row) {
  const float* logits = data_of<const float>(a.logits) + row * a.logits.step(0);
  const float temperature = data_of<const float>(a.temperature)[row];
  const bool greedy = temperature == 0.0f;
  const float factor = greedy ? 1.0f : 1.0f / temperature;
  const auto sample = static_cast<uint64_t>(data_of<const int64_t>(a.sample)[row]),
             key = static_cast<uint64_t>(data_of<const int64_t>(a.seed)[row]),
             position = static_cast<uint64_t>(data_of<const int>(a.position)[row]) << 32;
  const int64_t columns = a.logits.dim(1);
  const Lanes nothing = no_score + Lanes{};
  Lanes most = nothing;
  for_lanes(columns, [&](int64_t i, const auto& access) {
    Lanes z = access.load(logits + i) * factor;
    if (columns - i < lanes)
      for (int l = static_cast<int>(columns - i); l < lanes; ++l) z[l] = no_score;
    most = max(z, most);
  });
  float largest = no_score;
  for (int l = 0; l < lanes; ++l) largest = std::max(largest, most[l]);

  // Groups of tokens begin at multiples of 4 in the vocabulary, so that each draws whole blocks.
  const int64_t first = a.first_column / 4 * 4, end = a.first_column + columns;
  Lanes sum{}, best = nothing, best_z{};
  IntLanes best_token = IntLanes{} - 1, index;
  for (int l = 0; l < lanes; ++l) index[l] = l;
  for (int64_t token = first; token < end; token += group_tokens) {
    uint32_t words[group_tokens] = {};
    if (!greedy) draw(sample, position | static_cast<uint64_t>(token / 4), key, words);
    for (int part = 0; part < group_tokens; part += lanes) {
      const int64_t at = token + part, column = at - a.first_column;
      Lanes z = nothing;
      if (column >= 0 && column + lanes <= columns) {
        z = NRL_ISA::load(logits + column) * factor;
      } else {
        for (int l = 0; l < lanes; ++l)
          if (column + l >= 0 && column + l < columns) z[l] = logits[column + l] * factor;
      }
      sum += exp_f32(z - largest);
      const Lanes score = greedy ? z : z + gumbel(NRL_ISA::load(words + part));
      const IntLanes id = static_cast<int32_t>(at) + index;
      const auto better = (score > best) & (id < static_cast<int32_t>(std::min(a.tokens, end)));
      best = better ? score : best;
      best_z = better ? z : best_z;
      best_token = better ? id : best_token;
    }
  }
  float* out = data_of<float>(a.out) + row * SamplePart::columns;
  int winner = 0;
  for (int l = 1; l < lanes; ++l)
    if (best_token[l] >= 0 && (best_token[winner] < 0 || best[l] > best[winner] ||
                               (best[l] == best[winner] && best_token[l] < best_token[winner])))
      winner = l;
  out[SamplePart::score] = best[winner];
  out[SamplePart::token] = static_cast<float>(best_token[winner]);
  out[SamplePart::largest] = largest;
  out[SamplePart::sum] = sum_lanes(sum);
  out[SamplePart::value] = best_z[winner];
}

void sample_tokens_kernel(Exec& exec, const SampleTokens& a) {
  cpu::parallel_tasks(exec.threads, a.logits.dim(0), [&](int64_t row, int64_t) { sample_row(a, row); });
}

void join_samples_kernel(Exec&, const JoinSamples& a) {
  for (int64_t row = 0; row < a.parts.dim(1); ++row) {
    const sample::Joined joined =
        sample::join(data_of<const float>(a.parts), a.parts.dim(0), a.parts.dim(1), row);
    data_of<int>(a.token)[row] = joined.token;
    data_of<float>(a.log_prob)[row] = joined.log_prob;
  }
}

}  // namespace

void fill_sample(KernelTable& table) {
  table.sample_tokens = sample_tokens_kernel;
  table.join_samples = join_samples_kernel;
}

}  // namespace nrl::ops::NRL_ISA
