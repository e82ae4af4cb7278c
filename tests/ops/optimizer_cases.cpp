#include <algorithm>
#include <cmath>

#include "core/ops/optimizer.h"
#include "core/ops/step.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

Outputs steps(Exec& e, int64_t n, bool low) {
  Buffer param = Buffer(DType::f32, {n}).normal("param"), copy(DType::bf16, {n});
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
Outputs parts_added(Exec& e, int64_t parts, int64_t n, DType from) {
  const Buffer x = Buffer(from, {parts, n}).normal("x");
  Buffer fresh = Buffer(DType::f32, {n}).fill(NAN), added = Buffer(DType::f32, {n}).normal("added");
  sum_parts(e, {.x = x, .out = fresh});
  sum_parts(e, {.x = x, .out = added, .accumulate = true});
  return {{"fresh", fresh}, {"added", added}};
}

enum class From : uint8_t { host, device, skipped };

Outputs chunked(Exec& e, bool aligned, bool low, From from) {
  constexpr int64_t flat = 41000, held = 34000;
  const Buffer table = table_of(ranges(aligned));
  const int64_t state = low ? held : flat;
  Buffer param = Buffer(DType::f32, {state}).normal("param"),
         copy = Buffer(DType::bf16, {flat}).normal("copy");
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
    for (bool low : {false, true}) {
      registry.tests.push_back({fmt::format("adamw ({}) {}", n, low ? "bf16 copy" : ""),
                                [=](Exec& e) { return steps(e, n, low); }, true});
    }
    for (DType from : {DType::f32, DType::bf16}) {
      for (int64_t offset : {0, 3})
        registry.tests.push_back({fmt::format("sums on the device.{} ({}) from {}", name_of(from), n, offset),
                                  [=](Exec& e) { return device_sums(e, n, from, offset); }, true});
      for (int64_t parts : {1, 2, 5})
        registry.tests.push_back({fmt::format("sum of {} parts ({}) from {}", parts, n, name_of(from)),
                                  [=](Exec& e) { return parts_added(e, parts, n, from); }, true});
      for (DType to : {DType::f32, DType::bf16}) {
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
  }
  for (bool aligned : {true, false})
    for (bool low : {false, true})
      for (From from : {From::host, From::device, From::skipped})
        registry.tests.push_back(
            {fmt::format("adamw chunks{}{}{}", aligned ? "" : " at odd places", low ? " bf16 copy" : "",
                         from == From::host     ? ""
                         : from == From::device ? " scalars on the device"
                                                : " skipped"),
             [=](Exec& e) { return chunked(e, aligned, low, from); }, true});
  registry.properties.push_back({"optimizer.non_finite", non_finite});
  registry.properties.push_back({"optimizer.chunk_table", chunk_table});
  registry.properties.push_back({"optimizer.empty_sums", empty_sums});
  registry.properties.push_back({"optimizer.wrong_arguments", wrong_arguments});
}

}  // namespace nrl::ops_test
