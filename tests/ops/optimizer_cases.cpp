#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/ops/optimizer.h"
#include "core/ops/step.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

/// `read`: the type of the weights that layers read; f32: the master weights themselves.
Outputs steps(Exec& e, int64_t n, DType read) {
  const bool low = read != DType::f32;
  Buffer param = Buffer(DType::f32, {n}).normal("param"), copy(low ? read : DType::bf16, {n});
  Buffer grad(DType::f32, {n}), m(DType::f32, {n}), v(DType::f32, {n});
  for (int64_t step = 1; step <= 3; ++step) {
    grad.normal("grad" + std::to_string(step), 100.0);
    AdamW a{.param = param,
            .grad = grad,
            .exp_avg = m,
            .exp_avg_sq = v,
            .lr = 1e-2f,
            .beta2 = 0.95f,
            .rates = {AdamWRates{.weight_decay = 0.1f, .lr_scale = 0.5f}},
            .grad_scale = 0.01f,
            .step = step};
    if (low) a.param_bf16 = copy;
    adamw(e, a);
    synchronize(e);  // the next gradient comes from the host
  }
  return {
      {"param", param, 8}, {"grad", grad}, {"exp_avg", m, 8}, {"exp_avg_sq", v, 8}, {"param_bf16", copy, 8}};
}

/// Flat buffers of 41000 elements, of which a rank's state covers parts: long and short runs, at even and at
/// odd places, one behind the other and not.
std::vector<AdamWRange> ranges(bool aligned) {
  if (aligned)
    return {{0, 0, 17000, 1}, {17024, 17024, 64, 0}, {20000, 17088, 16384, 2}, {40000, 33472, 8, 0}};
  return {{0, 0, 17001, 1}, {17001, 17001, 63, 0}, {20002, 17064, 16385, 2}, {40999, 33449, 1, 0}};
}

Buffer table_of(const std::vector<AdamWRange>& covered) {
  const std::vector<int64_t> rows = adamw_chunks(covered);
  Buffer table(DType::i64, {static_cast<int64_t>(rows.size()) / 4, 4});
  for (size_t i = 0; i < rows.size(); ++i) table.set(static_cast<int64_t>(i), static_cast<double>(rows[i]));
  return table;
}

/// Parts after one another, fresh and added to.
Outputs parts_added(Exec& e, int64_t parts, int64_t n, DType from, DType to) {
  const Buffer x = Buffer(from, {parts, n}).normal("x");
  Buffer fresh = Buffer(to, {n}).fill(NAN), added = Buffer(to, {n}).normal("added");
  sum_parts(e, {.x = x, .out = fresh});
  sum_parts(e, {.x = x, .out = added, .accumulate = true});
  return {{"fresh", fresh}, {"added", added}};
}

enum class From : uint8_t { host, device, skipped };

Outputs chunked(Exec& e, bool aligned, DType read, From from) {
  const bool low = read != DType::f32;
  constexpr int64_t flat = 41000, held = 34000;
  const Buffer table = table_of(ranges(aligned));
  const int64_t state = low ? held : flat;
  Buffer param = Buffer(DType::f32, {state}).normal("param"),
         copy = Buffer(low ? read : DType::bf16, {flat}).normal("copy");
  Buffer grad = Buffer(DType::f32, {flat}).normal("grad"), scalars(DType::f64, {StepScalar::count});
  Buffer m = Buffer(DType::f32, {held}).normal("m"), v = Buffer(DType::f32, {held}).fill(0.25);
  AdamW a{.param = param,
          .grad = grad,
          .exp_avg = m,
          .exp_avg_sq = v,
          .lr = 1e-2f,
          .beta2 = 0.95f,
          .rates = {AdamWRates{}, {.weight_decay = 0.1f}, {.weight_decay = 0.2f, .lr_scale = 3}},
          .grad_scale = 0.5f,
          .step = 3,
          .chunks = table};
  if (low) a.param_bf16 = copy;
  if (from != From::host) {
    a.scalars = scalars;
    scalars.set(StepScalar::learning_rate, 3e-2);
    scalars.set(StepScalar::grad_scale, 0.75);
    scalars.set(StepScalar::correction1, 1 - std::pow(0.9, 7));
    scalars.set(StepScalar::correction2, 1 - std::pow(0.95, 7));
    scalars.set(StepScalar::skip, from == From::skipped);
  }
  adamw(e, a);
  return {
      {"param", param, 8}, {"grad", grad}, {"exp_avg", m, 8}, {"exp_avg_sq", v, 8}, {"param_bf16", copy, 8}};
}

/// State of n elements in a format, read and written as f32 on the host.
class Moment {
 public:
  Moment(DType dtype, int64_t n)
      : dtype_(dtype), values_(DType::i32, {n}), scales_(DType::i32, {moment_blocks(n)}), n_(n) {}
  Tensor values() const { return make_tensor(values_.tensor().data, dtype_, {n_}); }
  Tensor scales() const {
    return has_moment_scales(dtype_) ? make_tensor(scales_.tensor().data, DType::u8, {moment_blocks(n_)})
                                     : Tensor{};
  }
  void set(const std::vector<float>& x) {
    encode_moments(dtype_, x.data(), n_, values().data, static_cast<uint8_t*>(scales_.tensor().data));
  }
  std::vector<float> get() const {
    std::vector<float> x(static_cast<size_t>(n_));
    decode_moments(dtype_, values().data, static_cast<uint8_t*>(scales_.tensor().data), 0, n_, x.data());
    return x;
  }
  /// The distance of the format's numbers at element i.
  double unit(int64_t i, double x) const {
    const int bits = dtype_ == DType::bf16 ? 7 : dtype_ == DType::f16 ? 10 : 3;
    const double spacing = std::ldexp(1.0, std::ilogb(x == 0 ? 1e-30 : x) - bits);
    if (!has_moment_scales(dtype_)) return spacing;
    const int scale = static_cast<uint8_t*>(scales_.tensor().data)[i / moment_block] - 127;
    return std::max(spacing, std::ldexp(1.0, scale - (dtype_ == DType::f16 ? 24 : 9)));
  }

 private:
  DType dtype_;
  Buffer values_, scales_;
  int64_t n_;
};

std::vector<float> values_of(const Buffer& b) {
  const auto* x = static_cast<const float*>(b.tensor().data);
  return {x, x + b.size()};
}

/// The weights after a step are those of fp32 state with the same numbers, and the new state is the fp32 one
/// rounded to a neighbor, up as often as the dropped part says.
void reduced_state(Exec& e, DType mean, DType square, DType read = DType::bf16) {
  constexpr int64_t flat = 41000, held = 34000;
  const Buffer table = table_of(ranges(true)), grad = Buffer(DType::f32, {flat}).normal("grad");
  Buffer param = Buffer(DType::f32, {held}).normal("param"), expected = param;
  Buffer copy(read, {flat}), expected_copy(read, {flat}), scalars(DType::f64, {StepScalar::count});
  scalars.set(StepScalar::learning_rate, 3e-2);
  scalars.set(StepScalar::grad_scale, 0.75);
  scalars.set(StepScalar::correction1, 1 - std::pow(0.9, 7));
  scalars.set(StepScalar::correction2, 1 - std::pow(0.95, 7));
  Moment m(mean, held), v(square, held);
  m.set(values_of(Buffer(DType::f32, {held}).normal("m", 0.1)));
  std::vector<float> squares = values_of(Buffer(DType::f32, {held}).normal("v"));
  for (float& x : squares) x *= x;
  v.set(squares);
  double bias = 0, units = 0;
  int64_t lost = 0;
  for (int step = 1; step <= 4; ++step) {
    scalars.set(StepScalar::updates, step);
    Buffer exact_m(DType::f32, {held}), exact_v(DType::f32, {held});
    const std::vector<float> old_m = m.get(), old_v = v.get();
    for (int64_t i = 0; i < held; ++i) {
      exact_m.set(i, static_cast<double>(old_m[i]));
      exact_v.set(i, static_cast<double>(old_v[i]));
    }
    AdamW a{.param = expected,
            .grad = grad,
            .exp_avg = exact_m,
            .exp_avg_sq = exact_v,
            .param_bf16 = expected_copy,
            .beta2 = 0.95f,
            .rates = {AdamWRates{}, {.weight_decay = 0.1f}, {.weight_decay = 0.2f, .lr_scale = 3}},
            .chunks = table,
            .scalars = scalars};
    adamw(e, a);
    a.param = param;
    a.param_bf16 = copy;
    a.exp_avg = m.values();
    a.exp_avg_scales = m.scales();
    a.exp_avg_sq = v.values();
    a.exp_avg_sq_scales = v.scales();
    adamw(e, a);
    synchronize(e);
    expect(same_bits(param, expected) && same_bits(copy, expected_copy),
           "the weights are not those of fp32 state with the same numbers");
    const std::vector<float> new_m = m.get(), new_v = v.get();
    for (const AdamWRange& r : ranges(true))
      for (int64_t i = r.state; i < r.state + r.count; ++i) {
        const auto check = [&](const Moment& moment, double want, double got, const char* name) {
          const double unit = moment.unit(i, want), error = (got - want) / unit;
          expect(std::fabs(error) < 1 || want == 0, fmt::format("{} {}: {} became {}", name, i, want, got));
          bias += error;
          units += 1;
        };
        if (mean != DType::f32) check(m, exact_m.get(i), static_cast<double>(new_m[i]), "exp_avg");
        const double want = exact_v.get(i), got = static_cast<double>(new_v[i]);
        if (square != DType::f32 && want > v.unit(i, 0)) check(v, want, got, "exp_avg_sq");
        lost += want > 0 && got == 0;
      }
  }
  expect(lost == 0, fmt::format("{} squares became zero", lost));
  // Errors are within one unit; the mean of n has a standard deviation below 0.5 / sqrt(n).
  expect(std::fabs(bias / units) < 2.5 / std::sqrt(units),
         fmt::format("mean error of {} units", bias / units));
  const std::vector<float> stored = m.get();
  m.set(stored);
  expect(m.get() == stored, "decoded state that is encoded again has other numbers");
}

/// Master weights as bf16 and remainders are updated as fp32 ones are, ties and signs included.
void remainders(Exec& e) {
  constexpr int64_t flat = 41000, held = 34000;
  for (const bool aligned : {true, false}) {
    const Buffer table = table_of(ranges(aligned)), grad = Buffer(DType::f32, {flat}).normal("grad");
    Buffer param = Buffer(DType::f32, {held}).normal("param"), copy = Buffer(DType::bf16, {flat}),
           high = Buffer(DType::bf16, {flat}), low(DType::i32, {held});
    const Tensor remainder = make_tensor(low.tensor().data, DType::u16, {held});
    auto* master = static_cast<uint32_t*>(param.tensor().data);
    for (int64_t i = 0; i < held; i += 3) master[i] = (master[i] & 0xffff0000u) | 0x8000u;  // halfway
    split_master(static_cast<const float*>(param.tensor().data), held,
                 static_cast<uint16_t*>(remainder.data));
    for (const AdamWRange& r : ranges(aligned))
      for (int64_t i = 0; i < r.count; ++i)
        static_cast<uint16_t*>(high.tensor().data)[r.flat + i] =
            static_cast<uint16_t>((master[r.state + i] + 0x8000u) >> 16);
    Buffer m = Buffer(DType::f32, {held}).normal("m"), v = Buffer(DType::f32, {held}).fill(0.25), m2 = m,
           v2 = v;
    for (int64_t step = 1; step <= 4; ++step) {
      AdamW a{.param = param,
              .grad = grad,
              .exp_avg = m,
              .exp_avg_sq = v,
              .param_bf16 = copy,
              .lr = step == 1 ? 0.0f : 1e-3f,  // keeps the ties
              .rates = {AdamWRates{}, {.weight_decay = 0.1f}, {.weight_decay = 0.2f, .lr_scale = 3}},
              .step = step,
              .chunks = table};
      adamw(e, a);
      a.param = {};
      a.remainder = remainder;
      a.param_bf16 = high;
      a.exp_avg = m2;
      a.exp_avg_sq = v2;
      adamw(e, a);
      synchronize(e);
      expect(same_bits(copy, high), fmt::format("step {}: other bf16 weights", step));
      expect(same_bits(m, m2) && same_bits(v, v2), "other state");
      for (const AdamWRange& r : ranges(aligned)) {
        std::vector<float> joined(static_cast<size_t>(r.count));
        join_master(static_cast<const bf16*>(high.tensor().data) + r.flat,
                    static_cast<const uint16_t*>(remainder.data) + r.state, r.count, joined.data());
        expect(std::memcmp(joined.data(), master + r.state, joined.size() * 4) == 0,
               fmt::format("step {}: other master weights", step));
      }
    }
  }
}

/// Weights without master weights are updated as master weights of the same numbers, and rounded to one of
/// the two neighbors, without a bias.
void without_master(Exec& e) {
  constexpr int64_t flat = 41000, held = 34000;
  for (const bool aligned : {true, false}) {
    const Buffer table = table_of(ranges(aligned)), grad = Buffer(DType::f32, {flat}).normal("grad");
    const Buffer before = Buffer(DType::bf16, {flat}).normal("weights");
    Buffer weights = before, param(DType::f32, {held}), copy = before;
    for (const AdamWRange& r : ranges(aligned))
      for (int64_t i = 0; i < r.count; ++i) param.set(r.state + i, before.get(r.flat + i));
    Buffer m = Buffer(DType::f32, {held}).normal("m"), v = Buffer(DType::f32, {held}).fill(0.25), m2 = m,
           v2 = v;
    AdamW a{.param = param,
            .grad = grad,
            .exp_avg = m,
            .exp_avg_sq = v,
            .param_bf16 = copy,
            .lr = 1e-3f,
            .rates = {AdamWRates{}, {.weight_decay = 0.1f}, {.weight_decay = 0.2f, .lr_scale = 3}},
            .chunks = table};
    adamw(e, a);
    a.param = {};
    a.param_bf16 = weights;
    a.exp_avg = m2;
    a.exp_avg_sq = v2;
    adamw(e, a);
    synchronize(e);
    expect(same_bits(m, m2) && same_bits(v, v2), "other state");
    double bias = 0, count = 0;
    std::vector<bool> covered(static_cast<size_t>(flat));
    for (const AdamWRange& r : ranges(aligned))
      for (int64_t i = 0; i < r.count; ++i) {
        covered[static_cast<size_t>(r.flat + i)] = true;
        const double want = param.get(r.state + i), got = weights.get(r.flat + i);
        const double unit = std::ldexp(1.0, std::ilogb(want) - 7);
        expect(std::fabs(got - want) < unit, fmt::format("{} became {}", want, got));
        bias += (got - want) / unit;
        ++count;
      }
    expect(std::fabs(bias / count) < 2.5 / std::sqrt(count),
           fmt::format("mean error of {} units", bias / count));
    for (int64_t i = 0; i < flat; ++i)
      expect(covered[static_cast<size_t>(i)] || weights.get(i) == before.get(i),
             "a weight outside the ranges");
  }
}

/// Weights in bf16 follow updates that are far less than half a unit.
void small_updates(Exec& e) {
  constexpr int64_t n = 4096, steps = 400;
  constexpr float lr = 1e-5f;  // a unit below 1 is 390 times as large
  Buffer weights = Buffer(DType::bf16, {n}).fill(0.75), grad(DType::f32, {n}), m(DType::f32, {n}),
         v(DType::f32, {n});
  for (int64_t step = 1; step <= steps; ++step) {
    for (int64_t i = 0; i < n; ++i)
      grad.set(i, 1.0 + 1e-3 * std::sin(static_cast<double>(step) + static_cast<double>(i)));
    adamw(e, {.param = {},
              .grad = grad,
              .exp_avg = m,
              .exp_avg_sq = v,
              .param_bf16 = weights,
              .lr = lr,
              .step = step});
    synchronize(e);
  }
  double moved = 0;
  for (int64_t i = 0; i < n; ++i) moved += (0.75 - weights.get(i)) / static_cast<double>(n);
  const double want = static_cast<double>(lr) * static_cast<double>(steps);
  expect(std::fabs(moved - want) < 0.07 * want, fmt::format("weights moved by {}, wanted {}", moved, want));
}

/// bf16 gradients give what the same numbers in fp32 give.
void low_gradients(Exec& e) {
  constexpr int64_t flat = 41000, held = 34000;
  for (const bool aligned : {true, false}) {
    const Buffer table = table_of(ranges(aligned)), low = Buffer(DType::bf16, {flat}).normal("grad");
    Buffer grad(DType::f32, {flat});
    for (int64_t i = 0; i < flat; ++i) grad.set(i, low.get(i));
    Buffer param = Buffer(DType::f32, {held}).normal("param"), other = param;
    Buffer m = Buffer(DType::f32, {held}).normal("m"), v = Buffer(DType::f32, {held}).fill(0.25);
    Buffer m2 = m, v2 = v, copy(DType::bf16, {flat}), copy2(DType::bf16, {flat});
    AdamW a{.param = param, .grad = grad, .exp_avg = m, .exp_avg_sq = v, .param_bf16 = copy};
    a.lr = 1e-2f;
    a.chunks = table;
    adamw(e, a);
    a.param = other;
    a.grad = low;
    a.exp_avg = m2;
    a.exp_avg_sq = v2;
    a.param_bf16 = copy2;
    adamw(e, a);
    synchronize(e);
    expect(same_bits(param, other) && same_bits(m, m2) && same_bits(v, v2) && same_bits(copy, copy2),
           "other results");
  }
}

/// A running mean follows changes that are less than half a unit of its format.
void small_changes(Exec& e, DType dtype) {
  constexpr int64_t n = 2048;
  Buffer param(DType::f32, {n}), grad = Buffer(DType::f32, {n}).fill(1);
  Moment m(dtype, n), v(dtype, n);
  v.set(std::vector<float>(n, 4.0f));
  for (int64_t step = 1; step <= 300; ++step) {
    const float t = static_cast<float>(step);
    // Gradients differ from element to element and step to step, as in training.
    for (int64_t i = 0; i < n; ++i)
      static_cast<float*>(grad.tensor().data)[i] = 1.0f + 1e-3f * std::sin(t + static_cast<float>(i));
    AdamW a{.param = param, .grad = grad, .exp_avg = m.values(), .exp_avg_sq = v.values()};
    a.exp_avg_scales = m.scales();
    a.exp_avg_sq_scales = v.scales();
    a.beta2 = 0.998f;
    a.step = step;
    adamw(e, a);
    synchronize(e);
  }
  const double want = 1 + 3 * std::pow(0.998, 300);  // 2.65
  double mean = 0;
  for (const float x : v.get()) mean += static_cast<double>(x) / n;
  expect(std::fabs(mean - want) < 0.07 * want, fmt::format("exp_avg_sq came to {}, wanted {}", mean, want));
}

/// The chunks joined together are the ranges.
void chunk_table(Exec&) {
  const std::vector<AdamWRange> covered = ranges(false);
  const std::vector<int64_t> rows = adamw_chunks(covered);
  expect(rows.size() % 4 == 0, "rows of four numbers");
  std::vector<AdamWRange> joined;
  for (size_t i = 0; i < rows.size(); i += 4) {
    const AdamWRange r{rows[i], rows[i + 1], rows[i + 2], static_cast<int>(rows[i + 3])};
    expect(r.count > 0 && r.count <= adamw_chunk, fmt::format("a chunk of {} elements", r.count));
    const bool follows = !joined.empty() && joined.back().flat + joined.back().count == r.flat &&
                         joined.back().state + joined.back().count == r.state &&
                         joined.back().rates == r.rates;
    if (follows) {
      joined.back().count += r.count;
    } else {
      joined.push_back(r);
    }
  }
  expect(joined.size() == covered.size(), fmt::format("{} ranges became {}", covered.size(), joined.size()));
  for (size_t i = 0; i < covered.size(); ++i) {
    const AdamWRange &got = joined[i], &want = covered[i];
    expect(got.flat == want.flat && got.state == want.state && got.count == want.count &&
               got.rates == want.rates,
           fmt::format("range {} is another one", i));
  }
}

/// Sums on the device: the block sums run over several blocks, the result is kept or added to.
Outputs device_sums(Exec& e, int64_t n, DType dtype, int64_t offset) {
  const Buffer x = Buffer(dtype, {n + offset}).normal("x"),
               y = Buffer(DType::f32, {n + offset}).normal("y", 1.0, 0.5);
  const Tensor part = x.tensor().rows(offset, n);
  Buffer fresh = Buffer(DType::f64, {1}).fill(NAN), added = Buffer(DType::f64, {1}).fill(3.5), sum = added;
  Exec exact = e;  // not a byte more than asked for
  exact.workspace.size = std::min(sum_of_squares_workspace(n), e.workspace.size);
  add_sum_of_squares(exact, {.x = part, .out = fresh});
  add_sum_of_squares(exact, {.x = part, .out = added, .accumulate = true});
  add_sum(exact, {.x = y.tensor().rows(offset, n), .out = sum});
  return {{"fresh", fresh}, {"added", added}, {"sum", sum}};
}

void empty_sums(Exec& e) {
  const Tensor none = make_tensor(nullptr, DType::f32, {0});
  Buffer fresh = Buffer(DType::f64, {1}).fill(2), kept = fresh;
  add_sum_of_squares(e, {.x = none, .out = fresh});
  add_sum_of_squares(e, {.x = none, .out = kept, .accumulate = true});
  add_sum(e, {.x = none, .out = kept});
  synchronize(e);
  expect(fresh.get(0) == 0 && kept.get(0) == 2, "sums over nothing");
}

void wrong_arguments(Exec& e) {
  const Buffer flat(DType::f32, {8}), state(DType::f32, {4}), table(DType::i64, {1, 3});
  auto refused = [&](const AdamW& a) {
    try {
      adamw(e, a);
    } catch (const Error& error) {
      return error.code() == Exit::internal;
    }
    return false;
  };
  expect(refused({.param = flat, .grad = flat, .exp_avg = state, .exp_avg_sq = state}),
         "a state of another length without chunks");
  expect(refused({.param = flat, .grad = flat, .exp_avg = flat, .exp_avg_sq = flat, .chunks = table}),
         "chunks of three numbers");
  expect(refused({.param = flat, .grad = flat, .exp_avg = flat, .exp_avg_sq = flat, .scalars = state}),
         "scalars that are not scalars");
}

void non_finite(Exec& e) {
  Buffer x = Buffer(DType::f32, {100000}).normal("x");
  x.set(77777, INFINITY);
  Buffer sum(DType::f64, {1});
  const auto squares = [&](const Buffer& of) {
    add_sum_of_squares(e, {.x = of, .out = sum});
    synchronize(e);
    return sum.get(0);
  };
  expect(std::isinf(squares(x)), "an infinity is lost");
  x.set(5, NAN);
  expect(std::isnan(squares(x)), "a NaN is lost");
  Buffer low(DType::bf16, {100000});
  convert(e, {.x = x, .out = low});
  expect(std::isnan(squares(low)), "a NaN of bf16 is lost");
  expect(std::isnan(low.get(5)) && std::isinf(low.get(77777)), "convert loses NaN or infinity");
}

}  // namespace

NRL_OP_CASES(optimizer) {
  for (int64_t n : {1, 7, 64, 257, 40001}) {
    for (const DType read : {DType::f32, DType::bf16, DType::f16})
      registry.tests.push_back({fmt::format("adamw ({}) of {} weights", n, name_of(read)),
                                [=](Exec& e) { return steps(e, n, read); }, true});
    for (DType from : {DType::f32, DType::bf16}) {
      for (int64_t offset : {0, 3})
        registry.tests.push_back({fmt::format("sums on the device.{} ({}) from {}", name_of(from), n, offset),
                                  [=](Exec& e) { return device_sums(e, n, from, offset); }, true});
      for (int64_t parts : {1, 2, 5})
        for (DType to : {DType::f32, DType::bf16})
          registry.tests.push_back(
              {fmt::format("sum of {} parts ({}) from {} to {}", parts, n, name_of(from), name_of(to)),
               [=](Exec& e) { return parts_added(e, parts, n, from, to); }, true});
    }
    for (DType from : {DType::f32, DType::bf16, DType::f16})
      for (DType to : {DType::f32, DType::bf16, DType::f16}) {
        registry.tests.push_back({fmt::format("convert {} to {} ({})", name_of(from), name_of(to), n),
                                  [=](Exec& e) -> Outputs {
                                    const Buffer x = Buffer(from, {n}).normal("x");
                                    Buffer copy(to, {n}), none = Buffer(to, {n}).normal("z");
                                    convert(e, {.x = x, .out = copy});
                                    zero(e, {.x = none});
                                    return {{"copy", copy}, {"zero", none}};
                                  },
                                  true});
      }
  }
  for (bool aligned : {true, false})
    for (const DType read : {DType::f32, DType::bf16, DType::f16})
      for (From from : {From::host, From::device, From::skipped})
        registry.tests.push_back(
            {fmt::format("adamw chunks{} of {} weights{}", aligned ? "" : " at odd places", name_of(read),
                         from == From::host     ? ""
                         : from == From::device ? " scalars on the device"
                                                : " skipped"),
             [=](Exec& e) { return chunked(e, aligned, read, from); }, true});
  for (const DType mean : {DType::f32, DType::bf16, DType::f16, DType::e4m3})
    for (const DType square : {DType::f32, DType::bf16, DType::f16, DType::e4m3})
      if (mean != DType::f32 || square != DType::f32)
        registry.properties.push_back(
            {fmt::format("optimizer.reduced_state {} {}", name_of(mean), name_of(square)),
             [=](Exec& e) { reduced_state(e, mean, square); }, mean != square});
  registry.properties.push_back({"optimizer.reduced_state of f16 weights",
                                 [=](Exec& e) { reduced_state(e, DType::bf16, DType::bf16, DType::f16); }});
  for (const DType dtype : {DType::bf16, DType::f16, DType::e4m3})
    registry.properties.push_back({fmt::format("optimizer.small_changes {}", name_of(dtype)),
                                   [=](Exec& e) { small_changes(e, dtype); }, true});
  registry.properties.push_back({"optimizer.remainders", remainders});
  registry.properties.push_back({"optimizer.without_master", without_master});
  registry.properties.push_back({"optimizer.small_updates", small_updates});
  registry.properties.push_back({"optimizer.low_gradients", low_gradients});
  registry.properties.push_back({"optimizer.non_finite", non_finite});
  registry.properties.push_back({"optimizer.chunk_table", chunk_table});
  registry.properties.push_back({"optimizer.empty_sums", empty_sums});
  registry.properties.push_back({"optimizer.wrong_arguments", wrong_arguments});
}

}  // namespace nrl::ops_test
