// The whole decoder: its backward pass against finite differences, the CPU kernels against the reference, and
// every memory option against the run without it.

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>
#include <tuple>

#include "apps/model/families/hf_config.h"
#include "apps/model/spec/normals.h"
#include "tests/catch.h"
#include "tests/model/derivatives.h"
#include "tests/model/tiny_model.h"
#include "tests/ops/reference/table.h"
#include "tests/sim/ops.h"

using namespace nrl;
using test::TinyModel;

TEST_CASE("the decoder's gradients are the derivatives of its loss", "[model]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    TinyModel m(config, ops::reference_kernels(), 1);
    // Not continuous: a small change of a weight may drop another token.
    if (m.spec_.moe.capacity_factor > 0) continue;
    test::require_derivatives(m);
  }
}

TEST_CASE("the CPU kernels compute the same gradients as the reference", "[model]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    TinyModel reference(config, ops::reference_kernels(), 1);
    TinyModel fast(config, ops::cpu_kernels(cpu::best_isa()), 2);
    REQUIRE(fast.loss() == Approx(reference.loss()).epsilon(1e-5));
    reference.gradients();
    fast.gradients();
    for (size_t p = 0; p < reference.gradients_.size(); ++p) {
      INFO(reference.parameters_.all[p].name);
      REQUIRE(test::relative_difference(fast.gradients_[p], reference.gradients_[p]) < 2e-5);
    }
  }
}

TEST_CASE("the GPU's kernels compute the same gradients as the reference", "[model][sim]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    TinyModel reference(config, ops::reference_kernels(), 1);
    TinyModel gpu(config, ops::sim_kernels(), ops::gpu_partials, {}, precision::float32, DeviceType::cuda);
    REQUIRE(gpu.loss() == Approx(reference.loss()).epsilon(1e-5));
    reference.gradients();
    gpu.gradients();
    for (size_t p = 0; p < reference.gradients_.size(); ++p) {
      INFO(reference.parameters_.all[p].name);
      REQUIRE(test::relative_difference(gpu.gradients_[p], reference.gradients_[p]) < 2e-5);
    }
    // bf16 rounds at the same places on both but for the logits' gradient, which is bf16 on a GPU.
    TinyModel half(config, ops::cpu_kernels(cpu::best_isa()), 1, {}, precision::bfloat16_storage);
    TinyModel gpu_half(config, ops::sim_kernels(), ops::gpu_partials, {}, precision::bfloat16,
                       DeviceType::cuda);
    REQUIRE(gpu_half.loss() == Approx(half.loss()).epsilon(3e-3));
    half.gradients();
    gpu_half.gradients();
    for (size_t p = 0; p < half.gradients_.size(); ++p) {
      INFO(half.parameters_.all[p].name);
      REQUIRE(test::relative_difference(gpu_half.gradients_[p], half.gradients_[p]) < 0.06);
    }
  }
}

TEST_CASE("recomputation changes no bit on a GPU", "[model][sim]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    TinyModel kept(config, ops::sim_kernels(), ops::gpu_partials, {"norm"}, precision::bfloat16,
                   DeviceType::cuda);
    TinyModel recomputed(config, ops::sim_kernels(), ops::gpu_partials, {"norm", "activation"},
                         precision::bfloat16, DeviceType::cuda);
    kept.gradients();
    recomputed.gradients();
    REQUIRE(kept.gradients_ == recomputed.gradients_);
  }
}

TEST_CASE("recomputation changes no bit", "[model]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    for (const auto& recipe : {precision::float32, precision::bfloat16_storage}) {
      INFO(name << " " << name_of(recipe.weights()));
      const auto& kernels = ops::cpu_kernels(cpu::best_isa());
      TinyModel kept(config, kernels, 2, {}, recipe);
      TinyModel recomputed(config, kernels, 2, {"norm", "activation"}, recipe);
      kept.gradients();
      recomputed.gradients();
      REQUIRE(kept.gradients_ == recomputed.gradients_);
      REQUIRE(recomputed.plan_.bytes(memory::Category::activations) <
              kept.plan_.bytes(memory::Category::activations));
    }
  }
}

TEST_CASE("a capacity that drops nothing changes nothing", "[model]") {
  const std::string start =
      R"({"model_type":"qwen3_moe","vocab_size":67,"hidden_size":32,"intermediate_size":40,"num_hidden_layers":2,
          "num_attention_heads":4,"num_key_value_heads":2,"head_dim":12,"max_position_embeddings":64,
          "num_experts":6,"num_experts_per_tok":2,"moe_intermediate_size":16,"norm_topk_prob":true)";
  const auto& kernels = ops::cpu_kernels(cpu::best_isa());
  for (const ops::KernelTable* table : {&kernels, &ops::sim_kernels()}) {
    const bool gpu = table != &kernels;
    const test::TinyOptions options{.device = gpu ? DeviceType::cuda : DeviceType::cpu};
    const int partials = gpu ? ops::gpu_partials : 2;
    TinyModel all(start + "}", *table, partials, options);
    const double loss = all.loss();
    all.gradients();
    for (const char* more : {R"(,"moe_expert_capacity_factor":6})",
                             R"(,"moe_expert_capacity_factor":6,"moe_token_drop_policy":"position"})",
                             R"(,"moe_expert_capacity_factor":6,"moe_pad_expert_input_to_capacity":true})"}) {
      INFO(more);
      TinyModel limited(start + more, *table, partials, options);
      CHECK(limited.loss() == Approx(loss).epsilon(1e-6));
      limited.gradients();
      for (size_t p = 0; p < all.gradients_.size(); ++p) {
        INFO(all.parameters_.all[p].name);
        CHECK(test::relative_difference(limited.gradients_[p], all.gradients_[p]) < 1e-5);
      }
    }
    // Half of the choices are dropped, at least.
    TinyModel dropping(start + R"(,"moe_expert_capacity_factor":0.5})", *table, partials, options);
    CHECK(std::abs(dropping.loss() - loss) > 1e-3);
  }
}

TEST_CASE("the backward pass of the activation recomputes it", "[model]") {
  static int calls, with_out;
  static decltype(ops::KernelTable::activation_forward) forward;
  static decltype(ops::KernelTable::activation_backward) backward;
  ops::KernelTable counting = ops::cpu_kernels(cpu::best_isa());
  forward = counting.activation_forward;
  backward = counting.activation_backward;
  counting.activation_forward = [](ops::Exec& e, const ops::ActivationForward& a) {
    ++calls;
    forward(e, a);
  };
  counting.activation_backward = [](ops::Exec& e, const ops::ActivationBackward& a) {
    with_out += a.out.data != nullptr;
    backward(e, a);
  };
  for (const auto& [name, config] : test::tiny_configs())
    for (const bool recompute : {false, true}) {
      INFO(name);
      using Rules = std::vector<std::string>;
      TinyModel m(config, counting, 1, recompute ? Rules{"activation"} : Rules{});
      if (m.spec_.moe.experts > 0) continue;  // the router's gradient needs it before
      calls = with_out = 0;
      m.gradients();
      const auto layers = static_cast<int>(m.spec_.layers);
      CHECK(calls == layers);
      CHECK(with_out == (recompute ? layers : 0));
    }
}

TEST_CASE("bf16 storage stays near f32", "[model]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    const auto& kernels = ops::cpu_kernels(cpu::best_isa());
    TinyModel full(config, kernels, 1), half(config, kernels, 1, {}, precision::bfloat16_storage);
    // 8 bits of mantissa through two layers.
    REQUIRE(half.loss() == Approx(full.loss()).epsilon(0.03));
    full.gradients();
    half.gradients();
    for (size_t p = 0; p < full.gradients_.size(); ++p) {
      INFO(full.parameters_.all[p].name);
      REQUIRE(test::relative_difference(half.gradients_[p], full.gradients_[p]) < 0.15);
    }
  }
}

// On a CPU and a GPU, with the head in one chunk and in several.
TEST_CASE("bf16 logits stay near f32 logits", "[model][sim]") {
  for (const auto& [name, config] : test::tiny_configs())
    for (const DeviceType device : {DeviceType::cpu, DeviceType::cuda})
      for (const int64_t chunk : {0, 8}) {
        const bool gpu = device == DeviceType::cuda;
        INFO(name << (gpu ? " on a GPU" : " on a CPU") << ", chunks of " << chunk);
        const precision::Recipe recipe = gpu ? precision::bfloat16 : precision::bfloat16_storage;
        const auto make = [&](const precision::Recipe& r) {
          return TinyModel(config, gpu ? ops::sim_kernels() : ops::cpu_kernels(cpu::best_isa()),
                           gpu ? ops::gpu_partials : 2,
                           test::TinyOptions{.recipe = r, .device = device, .head_chunk_tokens = chunk});
        };
        TinyModel full = make(recipe), low = make(recipe.with_bf16_logits());
        for (const bool train : {true, false}) {
          const double want = full.loss(train), got = low.loss(train);
          CHECK(got != want);
          CHECK(got == Approx(want).epsilon(5e-4));
        }
        full.gradients();
        low.gradients();
        for (size_t p = 0; p < full.gradients_.size(); ++p) {
          INFO(full.parameters_.all[p].name);
          CHECK(test::relative_difference(low.gradients_[p], full.gradients_[p]) < 0.02);
        }
        // The logits take half of the memory.
        const auto logits_bytes = [](const TinyModel& m) {
          for (const auto& buffer : m.plan_.buffers())
            if (buffer.name.ends_with("logits of a chunk")) return buffer.bytes;
          return int64_t{0};
        };
        CHECK(logits_bytes(low) > 0);
        CHECK(logits_bytes(low) < logits_bytes(full));
      }
}

TEST_CASE("the chunks of the head are equal and their logits bounded", "[model]") {
  constexpr DeviceType host = DeviceType::cpu, gpu = DeviceType::cuda;
  for (const int64_t vocab : {50304, 128256, 151936, 262144})
    for (const DType logits : {DType::f32, DType::bf16})
      for (const int64_t tokens : {1000, 8192, 10000, 32768, 100001}) {
        const int64_t chunk = model::head_chunk_tokens(tokens, vocab, logits, gpu);
        CAPTURE(vocab, tokens, chunk);
        CHECK(chunk * vocab * size_of(logits) <= int64_t{2} << 30);
        CHECK(chunk <= 8192);
        CHECK((chunk % 128 == 0 || chunk == tokens));
        const int64_t chunks = (tokens + chunk - 1) / chunk;
        CHECK(tokens - (chunks - 1) * chunk > chunk - 128 * chunks);  // the last one
      }
  CHECK(model::head_chunk_tokens(32768, 128256, DType::bf16, gpu) == 8192);
  CHECK(model::head_chunk_tokens(32768, 128256, DType::f32, gpu) == 4096);
  CHECK(model::head_chunk_tokens(32768, 151936, DType::bf16, gpu) == 6656);
  CHECK(model::head_chunk_tokens(700, 1000, DType::f32, host) == 350);
  CHECK(model::head_chunk_tokens(700, 262144, DType::f32, host) == 117);
  CHECK(model::head_chunk_tokens(100, int64_t{1} << 40, DType::f32, gpu) == 32);
}

TEST_CASE("evaluation drops nothing", "[model][sim]") {
  const auto config = [](const char* p) {
    return fmt::format(
        R"({{"model_type":"gpt2","vocab_size":61,"n_embd":24,"n_layer":2,"n_head":3,"n_positions":32,
             "resid_pdrop":{0},"embd_pdrop":{0},"attn_pdrop":{0}}})",
        p);
  };
  const auto check = [&](const ops::KernelTable& kernels, int threads, DeviceType device) {
    TinyModel plain(config("0"), kernels, threads, {}, precision::float32, device);
    TinyModel dropped(config("0.4"), kernels, threads, {}, precision::float32, device);
    const double want = plain.loss(false);
    CHECK(plain.loss(true) == want);
    CHECK(dropped.loss(false) == want);
    CHECK(dropped.loss(true) != want);
    CHECK(dropped.loss(false) == want);
  };
  check(ops::reference_kernels(), 1, DeviceType::cpu);
  check(ops::cpu_kernels(cpu::best_isa()), 2, DeviceType::cpu);
  check(ops::sim_kernels(), ops::gpu_partials, DeviceType::cuda);
}

TEST_CASE("each kind of dropout changes the loss, with its own mask", "[model]") {
  std::vector<double> losses;
  for (const auto& [attention, residual, embedding] :
       {std::tuple{0.0, 0.0, 0.0}, {0.3, 0.0, 0.0}, {0.0, 0.3, 0.0}, {0.0, 0.0, 0.3}}) {
    const std::string config =
        fmt::format(R"({{"model_type":"gpt2","vocab_size":61,"n_embd":24,"n_layer":2,"n_head":3,
                         "n_positions":32,"attn_pdrop":{},"resid_pdrop":{},"embd_pdrop":{}}})",
                    attention, residual, embedding);
    TinyModel m(config, ops::cpu_kernels(cpu::best_isa()), 1);
    const double loss = m.loss();
    for (double other : losses) CHECK(loss != other);
    losses.push_back(loss);
  }
}

TEST_CASE("every parameter reports its gradient exactly once", "[model]") {
  for (const auto& [name, config] : test::tiny_configs()) {
    INFO(name);
    TinyModel m(config, ops::cpu_kernels(cpu::best_isa()), 1);
    m.gradients();
    std::multiset<int> seen(m.ready_.begin(), m.ready_.end());
    REQUIRE(seen.size() == m.parameters_.all.size());
    for (size_t p = 0; p < m.parameters_.all.size(); ++p) REQUIRE(seen.count(static_cast<int>(p)) == 1);
  }
}

TEST_CASE("buffers that are alive together do not overlap", "[model][memory]") {
  TinyModel m(test::tiny_configs()[2].second, ops::cpu_kernels(cpu::best_isa()), 1, {"norm", "activation"});
  const auto& buffers = m.plan_.buffers();
  for (size_t i = 0; i < buffers.size(); ++i)
    for (size_t j = i + 1; j < buffers.size(); ++j) {
      const auto &a = buffers[i], &b = buffers[j];
      if (a.tier != b.tier || a.bytes == 0 || b.bytes == 0) continue;
      bool together = a.always() || b.always();
      for (const auto& x : a.lifetimes)
        for (const auto& y : b.lifetimes) together = together || (x.first <= y.last && y.first <= x.last);
      if (!together) continue;
      INFO(a.name << " and " << b.name);
      REQUIRE((a.offset + a.bytes <= b.offset || b.offset + b.bytes <= a.offset));
    }
}

TEST_CASE("normal numbers in bulk have the bits of single ones", "[model]") {
  // 1 of some thousand batches is computed again, because an approximation is too close to a boundary.
  struct Case {
    uint64_t seed, first;
    double scale;
    int64_t blocks;
  };
  for (const Case& c : {Case{7, 0, 0.02, 1 << 20},
                        {8, (uint64_t{1} << 40) + 3, 0.02 / std::sqrt(24.0), 1 << 18},
                        {9, 5, 1.0, 64 * 1000 + 63},
                        {10, 1, 0.0, 200},
                        {11, 0, -1e-30, 63},
                        {12, 9, 1, 0}}) {
    CAPTURE(c.seed);
    const PhiloxStream stream(c.seed, "normals");
    std::vector<float> want(static_cast<size_t>(4 * c.blocks));
    for (size_t i = 0; i < want.size(); ++i)
      want[i] = static_cast<float>(c.scale * stream.normal(4 * c.first + i));
    for (const Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
      if (isa > cpu::best_isa()) break;
      CAPTURE(name_of(isa));
      std::vector<float> got(static_cast<size_t>(4 * c.blocks) + 1, 123.0f);
      model::scaled_normals(stream, c.first, c.blocks, c.scale, got.data(), isa);
      int64_t bad = 0;
      for (size_t i = 0; i < want.size(); ++i)
        bad += std::bit_cast<uint32_t>(got[i]) != std::bit_cast<uint32_t>(want[i]);
      REQUIRE(bad == 0);
      REQUIRE(got.back() == 123.0f);
    }
  }
}

TEST_CASE("initial values are scaled normal numbers of the element", "[model]") {
  const auto spec = model::parse_model_config(test::tiny_configs()[0].second, "test");
  model::Parameter p;
  for (const int64_t columns : {1, 7, 300, 1001}) {
    CAPTURE(columns);
    model::Part part{"w", {5, columns + 3}};
    part.row = 1, part.rows = 3, part.column = columns == 7 ? 2 : 0, part.columns = columns;
    const PhiloxStream stream(4, "w");
    std::vector<float> values(static_cast<size_t>(part.numel()));
    model::initial_values(spec, p, part, 4, values.data(), 2);
    int64_t bad = 0;
    for (int64_t i = 0; i < part.numel(); ++i)
      bad += values[i] != static_cast<float>(spec.initializer_range *
                                             stream.normal(static_cast<uint64_t>(part.element(i))));
    REQUIRE(bad == 0);
  }
}

TEST_CASE("initial values depend on seed, name and element only", "[model]") {
  const auto spec = model::parse_model_config(test::tiny_configs()[2].second, "test");
  const auto list = model::make_parameters(spec);
  const auto& p = list.all[list.layers[1].qkv];
  const auto& part = p.parts[1];  // k_proj, 16 x 32
  std::vector<float> whole(static_cast<size_t>(part.numel()));
  model::initial_values(spec, p, part, 9, whole.data(), 2);
  for (const auto& [row, rows, column, columns] :
       {std::array<int64_t, 4>{3, 9, 0, 32}, {0, 16, 5, 7}, {4, 5, 31, 1}, {0, 16, 0, 32}}) {
    CAPTURE(row, column);
    model::Part slice = part;
    slice.row = row, slice.rows = rows, slice.column = column, slice.columns = columns;
    std::vector<float> piece(static_cast<size_t>(slice.numel()));
    model::initial_values(spec, p, slice, 9, piece.data(), 1);
    int bad = 0;
    for (int64_t i = 0; i < slice.numel(); ++i)
      bad += piece[i] != whole[(row + i / columns) * 32 + column + i % columns];
    REQUIRE(bad == 0);
    model::initial_values(spec, p, slice, 10, piece.data(), 1);
    REQUIRE(piece[0] != whole[row * 32 + column]);
  }
}
