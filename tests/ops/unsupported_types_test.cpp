// Scaled tensors are refused by every op that takes f32, bf16 or f16, and f16 by those that have no kernels
// for it.

#include <functional>
#include <utility>
#include <vector>

#include "core/ops/kernel_table.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::ops;

namespace {

class Fixture {
 public:
  Fixture() { exec.kernels = &cpu_kernels(cpu::best_isa()); }
  Tensor tensor(DType dtype, std::initializer_list<int64_t> shape) {
    memory_.emplace_back(4096);
    return make_tensor(memory_.back().data(), dtype, shape);
  }
  Exec exec;

 private:
  std::vector<std::vector<std::byte>> memory_;
};

/// The message of the internal error that the call ends in.
std::string refusal_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    CHECK(e.code() == Exit::internal);
    return e.what();
  }
  return "";
}

/// Every op, named, with tensors of (4, 8) or heads of (4, 2, 4) in this type and scaling.
std::vector<std::pair<const char*, std::function<void()>>> calls(Fixture& f, DType dtype, Scaling scaling) {
  auto t = [&](std::initializer_list<int64_t> shape) {
    Tensor x = f.tensor(dtype, shape);
    x.scales.kind = scaling;
    return x;
  };
  auto f32 = [&](std::initializer_list<int64_t> shape) { return f.tensor(DType::f32, shape); };
  auto i32 = [&](std::initializer_list<int64_t> shape) { return f.tensor(DType::i32, shape); };
  Exec& e = f.exec;
  const Tensor x = t({4, 8}), y = t({4, 8}), w = t({8, 8}), row = t({8}), heads = t({4, 2, 4});
  const Tensor table = f32({8, 4}), ids = i32({4}), bounds = i32({2});
  return {
      {"linear_forward", [=, &e] { linear_forward(e, {.x = x, .weight = w, .out = y}); }},
      {"linear_backward_data", [=, &e] { linear_backward_data(e, {.dout = x, .weight = w, .dx = y}); }},
      {"linear_backward_weight",
       [=, &e, &f] {
         linear_backward_weight(e, {.dout = x, .x = y, .dweight = f.tensor(DType::f32, {8, 8})});
       }},
      {"column_sums", [=, &e, &f] { column_sums(e, {.x = x, .out = f.tensor(DType::f32, {8})}); }},
      {"cache_write",
       [=, &e] { cache_write(e, {.keys = x, .values = y, .slots = ids, .key_cache = w, .value_cache = w}); }},
      {"attention_paged",
       [=, &e] {
         attention_paged(e, {.q = heads,
                             .keys = heads,
                             .values = heads,
                             .out = heads,
                             .cu_q = bounds,
                             .context = i32({1}),
                             .block_table = i32({1, 2}),
                             .page = 2});
       }},
      {"attention_forward",
       [=, &e] {
         attention_forward(
             e, {.q = heads, .k = heads, .v = heads, .out = heads, .cu_q = bounds, .cu_k = bounds});
       }},
      {"norm_forward", [=, &e] { norm_forward(e, {.x = x, .weight = row, .out = y}); }},
      {"activation_forward",
       [=, &e] {
         activation_forward(e, {Activation::silu, false, x, y});
       }},
      {"dropout", [=, &e] { dropout(e, {.x = x, .out = y, .p = 0.5f}); }},
      {"add_rows", [=, &e] { add_rows(e, {.x = x, .out = y}); }},
      {"merge_attention",
       [=, &e] {
         merge_attention(e, {.part = heads, .part_lse = f32({2, 4}), .out = heads, .lse = f32({2, 4})});
       }},
      {"embedding_forward", [=, &e] { embedding_forward(e, {.ids = ids, .table = w, .out = x}); }},
      {"rope", [=, &e] { rope(e, {.x = heads, .table = table, .positions = ids}); }},
      {"qk_norm_rope_forward",
       [=, &e] {
         qk_norm_rope_forward(e, {.x = heads, .out = heads, .heads = 1, .table = table, .positions = ids});
       }},
      {"convert", [=, &e, &f] { convert(e, {.x = row, .out = f.tensor(DType::f32, {8})}); }},
      {"sum_parts", [=, &e, &f] { sum_parts(e, {.x = x, .out = f.tensor(DType::f32, {8})}); }},
      {"add_sum_of_squares",
       [=, &e, &f] { add_sum_of_squares(e, {.x = row, .out = f.tensor(DType::f64, {1})}); }},
  };
}

TEST_CASE("ops without kernels for f16 refuse it") {
  Fixture f;
  Exec& e = f.exec;
  const auto f16 = [&](std::initializer_list<int64_t> shape) { return f.tensor(DType::f16, shape); };
  const auto f32 = [&](std::initializer_list<int64_t> shape) { return f.tensor(DType::f32, shape); };
  const auto i32 = [&](std::initializer_list<int64_t> shape) { return f.tensor(DType::i32, shape); };
  const auto bf16 = [&](std::initializer_list<int64_t> shape) { return f.tensor(DType::bf16, shape); };
  const std::pair<const char*, std::function<void()>> refused[] = {
      {"sum_parts",
       [&] {
         sum_parts(e, {.x = f16({4, 8}), .out = f32({8})});
       }},
      {"add_sum_of_squares",
       [&] { add_sum_of_squares(e, {.x = f16({8}), .out = f.tensor(DType::f64, {1})}); }},
      {"cross_entropy",
       [&] {
         cross_entropy(e, {.logits = f16({4, 8}), .target = i32({4}), .log_prob = f32({4})});
       }},
      {"cross_entropy_gradient",
       [&] {
         cross_entropy_gradient(
             e, {.logits = f16({4, 8}), .target = i32({4}), .lse = f32({4}), .weight = f32({4})});
       }},
      {"top_columns",
       [&] {
         top_columns(e, {.logits = f16({4, 8}), .ids = i32({4, 2}), .values = f32({4, 2})});
       }},
      {"gather_columns",
       [&] {
         gather_columns(e, {.logits = f16({4, 8}), .ids = i32({4, 2}), .out = f32({4, 2})});
       }},
      {"scatter_columns",
       [&] {
         scatter_columns(e, {.logits = f16({4, 8}), .ids = i32({4, 2}), .gradient = f32({4, 2})});
       }},
      // Types that kernels do not take together.
      {"norm_forward",
       [&] {
         norm_forward(e, {.x = f32({4, 8}), .weight = f16({8}), .out = f32({4, 8})});
       }},
      {"norm_forward",
       [&] {
         norm_forward(e, {.x = f16({4, 8}), .weight = bf16({8}), .out = f16({4, 8})});
       }},
      {"permute",
       [&] {
         permute(e, {.x = f16({4, 8}), .source = i32({4}), .top_k = 1, .out = bf16({4, 8})});
       }},
      {"grouped_linear_forward",
       [&] {
         grouped_linear_forward(
             e, {.x = f16({4, 8}), .weight = bf16({16, 8}), .offsets = i32({3}), .out = f16({4, 8})});
       }},
      {"embedding_forward",
       [&] {
         embedding_forward(e, {.ids = i32({4}), .table = f16({8, 8}), .out = bf16({4, 8})});
       }},
  };
  for (const auto& [name, call] : refused) {
    const std::string message = refusal_of(call);
    INFO(name << ": " << message);
    CHECK(message.find("f16[") != std::string::npos);
  }
}

TEST_CASE("ops refuse scaled tensors") {
  Fixture f;
  for (const DType dtype : {DType::bf16, DType::e4m3})
    for (const auto& [name, call] : calls(f, dtype, Scaling::tensor)) {
      const std::string message = refusal_of(call);
      INFO(name << ": " << message);
      CHECK(message.find("with tensor scales") != std::string::npos);
    }
}

}  // namespace
