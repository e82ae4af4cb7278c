// The rows of bench ops for generation.

#include <algorithm>
#include <utility>

#include "apps/bench/op_case.h"
#include "core/ops/kernel_table.h"

namespace nrl::bench {

std::vector<OpCase> generation_op_cases(Machine& machine, const OpSizes& sizes, DType dtype) {
  ops::Exec& e = machine.exec();
  using Run = std::function<void()>;
  const ops::KernelTable& k = *e.kernels;
  std::vector<OpCase> all;
  const auto add = [&](const char* name, bool present, std::function<Run(Tensors&)> make) {
    all.push_back({.name = name, .present = present, .make = std::move(make)});
  };
  const int64_t sequences = std::min<int64_t>(64, sizes.tokens),
                context = std::min<int64_t>(1024, sizes.tokens), pages = (context + 15) / 16,
                heads = sizes.heads, kv = sizes.kv_heads, d = sizes.head_dim;
  machine.need_workspace(
      ops::workspace(e, ops::AttentionPaged{.q = make_tensor(nullptr, dtype, {sequences, heads, d}),
                                            .keys = make_tensor(nullptr, dtype, {sequences, kv, d}),
                                            .values = {},
                                            .out = {},
                                            .cu_q = {},
                                            .context = {},
                                            .block_table = {}}));
  add("cache_write", k.cache_write, [=, &e](Tensors& m) -> Run {
    std::vector<int32_t> slots;
    for (int64_t i = 0; i < sequences; ++i) slots.push_back(static_cast<int32_t>(i * 16));
    const ops::CacheWrite a{.keys = m.normal(dtype, {sequences, kv * d}),
                            .values = m.normal(dtype, {sequences, kv * d}),
                            .slots = m.copy_of(DType::i32, {sequences}, slots.data()),
                            .key_cache = m.constant(dtype, {sequences * 16, kv * d}, 0),
                            .value_cache = m.constant(dtype, {sequences * 16, kv * d}, 0)};
    return [&e, a] { ops::cache_write(e, a); };
  });
  add("attention_paged", k.attention_paged, [=, &e](Tensors& m) -> Run {
    std::vector<int32_t> cu{0}, lengths, table;
    for (int64_t i = 0; i < sequences; ++i) {
      cu.push_back(static_cast<int32_t>(i + 1));
      lengths.push_back(static_cast<int32_t>(context));
      for (int64_t p = 0; p < pages; ++p) table.push_back(static_cast<int32_t>(p * sequences + i));
    }
    const ops::AttentionPaged a{.q = m.normal(dtype, {sequences, heads, d}),
                                .keys = m.normal(dtype, {sequences * pages * 16, kv, d}),
                                .values = m.normal(dtype, {sequences * pages * 16, kv, d}),
                                .out = m.constant(dtype, {sequences, heads, d}, 0),
                                .cu_q = m.copy_of(DType::i32, {sequences + 1}, cu.data()),
                                .context = m.copy_of(DType::i32, {sequences}, lengths.data()),
                                .block_table = m.copy_of(DType::i32, {sequences, pages}, table.data()),
                                .page = 16,
                                .scale = 0.125f,
                                .longest = context};
    return [&e, a] { ops::attention_paged(e, a); };
  });
  const auto parts = [=](Tensors& m) {
    return m.constant(DType::f32, {1, sequences, ops::SamplePart::columns}, 1);
  };
  add("sample_tokens", k.sample_tokens, [=, &e](Tensors& m) -> Run {
    std::vector<int64_t> numbers(static_cast<size_t>(sequences), 3);
    const auto of_rows = [&](DType dtype) { return m.copy_of(dtype, {sequences}, numbers.data()); };
    const Tensor out = parts(m);
    const ops::SampleTokens a{
        .logits = m.normal(DType::f32, {sequences, sizes.vocab}),
        .temperature = m.constant(DType::f32, {sequences}, 1),
        .seed = of_rows(DType::i64),
        .sample = of_rows(DType::i64),
        .position = m.integers({sequences}, context),
        .tokens = sizes.vocab,
        .out = make_tensor(out.data, DType::f32, {sequences, ops::SamplePart::columns})};
    return [&e, a] { ops::sample_tokens(e, a); };
  });
  add("join_samples", k.join_samples, [=, &e](Tensors& m) -> Run {
    const ops::JoinSamples a{.parts = parts(m),
                             .token = m.integers({sequences}, 2),
                             .log_prob = m.constant(DType::f32, {sequences}, 0)};
    return [&e, a] { ops::join_samples(e, a); };
  });
  return all;
}

}  // namespace nrl::bench
