// Calls beside published micro-benchmarks of kernels.

#include "apps/machine/call_time.h"

#include <cmath>
#include <tuple>

#include "apps/machine/trainer_kernels.h"
#include "core/base/error.h"
#include "tests/catch.h"

using namespace nrl;
using machine::DeviceModel;

namespace {

const DeviceModel& model(const char* name) {
  return machine::find_device_model("--device", name);
}

ops::Call gemm(DType operands, int64_t m, int64_t n, int64_t k, const char* op = "linear_forward") {
  ops::Cost c;
  c.work = ops::Work::gemm;
  c.operands = operands;
  c.gemm = {m, n, k};
  c.flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  return {.op = op, .cost = c};
}
double seconds(const char* device, const ops::Call& call) {
  return machine::estimate(model(device), call, machine::likely).seconds();
}

}  // namespace

TEST_CASE("GEMMs reach what cuBLASLt does by their size", "[machine]") {
  // Azure, AI-benchmarking-guide: TFLOP/s with random numbers; H100 and GB200 in FP8, A100 in fp16. B300:
  // marin.
  struct Published {
    const char* device;
    DType operands;
    int64_t m, n, k;
    double teraflops;
  };
  constexpr Published table[] = {
      {"h100", DType::e4m3, 2048, 2048, 2048, 1011.3},     {"h100", DType::e4m3, 4096, 4096, 4096, 1216.9},
      {"h100", DType::e4m3, 8192, 8192, 8192, 1290.1},     {"h100", DType::e4m3, 16384, 16384, 16384, 1377.3},
      {"h100", DType::e4m3, 6144, 12288, 12288, 1351.4},   {"gb200", DType::e4m3, 8192, 8192, 8192, 2848.0},
      {"gb200", DType::e4m3, 16384, 16384, 16384, 2929.0}, {"gb200", DType::e4m3, 6144, 12288, 12288, 2928.9},
      {"b300", DType::bf16, 8192, 8192, 8192, 1578.0},     {"a100", DType::bf16, 8192, 8192, 8192, 253.7},
      {"a100", DType::bf16, 16384, 16384, 16384, 256.5},   {"a100", DType::bf16, 6144, 12288, 12288, 250.8}};
  for (const Published& p : table) {
    INFO(p.device << " " << p.m << " x " << p.n << " x " << p.k);
    const ops::Call call = gemm(p.operands, p.m, p.n, p.k);
    const double time = seconds(p.device, call) + machine::launch_gap;
    CHECK(call.cost.flops / time * 1e-12 == Approx(p.teraflops).epsilon(0.03));
  }
}

TEST_CASE("the tiles of a GEMM fill the multiprocessors as far as their sizes allow", "[machine]") {
  const auto used = [](const char* device, int64_t m, int64_t n, int64_t k) {
    const ops::Call call = gemm(DType::bf16, m, n, k);
    const DeviceModel& d = model(device);
    const double inner = static_cast<double>(k) / static_cast<double>(k + 128);
    return call.cost.flops / seconds(device, call) / (d.bf16_flops() * d.gemm * inner);
  };
  // GPT-2 XL: 640 tiles of 128 x 320 in 5 waves. An A100 has tiles of 256 and 128 only: 13 columns for 12.5.
  CHECK(used("h100", 16384, 1600, 6400) == Approx(640.0 / 660));
  CHECK(used("a100", 16384, 1600, 6400) == Approx(64 * 12.5 / (8 * 108)));
  // Tiles of 128 x 160 load more per FLOP.
  CHECK(used("h100", 128 * 132, 160, 6400) == Approx(1 - 17 * (1.0 / 160 - 1.0 / 256)));
  CHECK(used("h100", 192 * 132, 192, 4096) == Approx(1));
  CHECK(used("h100", 8192, 8192, 8192) == Approx(2048.0 / 2112));
}

TEST_CASE("pieces of a GEMM on several streams fill its waves together", "[machine]") {
  const DeviceModel megatron =
      machine::find_trainer_kernels("megatron", {.norm = ops::NormKind::rms}).on(model("h100"));
  const auto time = [](const DeviceModel& device, int pieces) {
    ops::Call piece = gemm(DType::bf16, 4096 / pieces, 3072, 8192);
    piece.pieces = pieces;
    return pieces * machine::estimate(device, piece, machine::likely).arithmetic;
  };
  CHECK(time(model("h100"), 4) / time(model("h100"), 1) > 1.2);
  CHECK(time(megatron, 4) == Approx(time(megatron, 1)));
  CHECK(time(megatron, 1) == Approx(time(model("h100"), 1)));
}

TEST_CASE("FP8 gains less than a factor of two over bf16 in the GEMMs of a layer", "[machine]") {
  // TransformerEngine, docs/examples/gemm_profiling: 15,872 tokens, width 4,096, MLP 16,384: 32.0 and 16.8
  // ms.
  constexpr int64_t tokens = 15872, width = 4096;
  constexpr std::pair<int64_t, int64_t> weights[] = {
      {3 * width, width}, {width, width}, {4 * width, width}, {width, 4 * width}};
  const auto layer = [&](DType operands) {
    double sum = 0;
    for (const auto& [out, in] : weights)
      for (const auto& [m, n, k] :
           {std::tuple(tokens, out, in), std::tuple(tokens, in, out), std::tuple(out, in, tokens)})
        sum += seconds("h200", gemm(operands, m, n, k));
    return sum;
  };
  CHECK(layer(DType::bf16) / layer(DType::e4m3) == Approx(32.0 / 16.8).epsilon(0.02));
  // Kernels of our own have measured factors of their own.
  CHECK(seconds("h200", gemm(DType::e4m3, 32768, 1536, 2048, "grouped_linear_forward")) ==
        Approx(seconds("h200", gemm(DType::bf16, 32768, 1536, 2048)) / 2 / 0.79));
}

TEST_CASE("kernels that move bytes have measured fractions of a GPU's copy", "[machine]") {
  const auto time = [](const DeviceModel& device, const char* op) {
    ops::Call call{.op = op};
    call.cost.read = device.copy;
    return machine::estimate(device, call, machine::likely).seconds();
  };
  CHECK(time(model("h100"), "adamw") == Approx(1 / 0.95));
  CHECK(time(model("h100"), "cross_entropy") == Approx(1 / 0.68));
  CHECK(time(model("h100"), "sum_parts") == Approx(1 / 0.85));
  CHECK(time(machine::usual_model(DeviceType::cpu, 2, {}), "cross_entropy") == Approx(1 / 0.85));
}

TEST_CASE("kernels of another trainer move their bytes at the rate of any kernel", "[machine]") {
  using machine::find_trainer_kernels;
  const DeviceModel theirs = find_trainer_kernels("pytorch", {.norm = ops::NormKind::rms}).on(model("h100"));
  const machine::CallTimes times(theirs, nullptr), ours(model("h100"), nullptr);
  const auto call = [&](const char* op) {
    ops::Call c{.op = op};
    c.cost.read = theirs.copy;
    return c;
  };
  CHECK(times.of(call("norm_forward")).value == Approx(46.0 / 8 / 0.85));
  CHECK(times.gaps(call("norm_forward")) == Approx(9 * machine::launch_gap));
  ops::Call sums = call("norm_forward");  // of blocks, in the workspace: as many as ours
  sums.cost.scratch = theirs.copy;
  CHECK(times.of(sums).value == Approx((46.0 / 8 + 1) / 0.85));
  // Ops that were not counted, and GEMMs, are as ours.
  for (const ops::Call& same : {call("sum_parts"), gemm(DType::bf16, 4096, 4096, 4096)}) {
    CHECK(times.of(same).value == ours.of(same).value);
    CHECK(times.gaps(same) == machine::launch_gap);
  }
  // Gathered weights and tokens are copied from 2 bytes to 2, gradients from 2 to 4; messages and our
  // operations are not.
  using comm::Op, comm::Purpose;
  CHECK(times.copies(Purpose::weights, Op::all_gather, theirs.copy) == Approx(2 / 0.85));
  CHECK(times.copies(Purpose::gradients, Op::reduce_scatter, theirs.copy) == Approx(1.5 / 0.85));
  for (const Op op : {Op::all_gather, Op::reduce_scatter})
    CHECK(times.copies(Purpose::layers, op, theirs.copy) == Approx(2 / 0.85));
  CHECK(times.copies(Purpose::messages, Op::send, theirs.copy) == 0);
  CHECK(ours.copies(Purpose::weights, Op::all_gather, theirs.copy) == 0);
  CHECK_THROWS_WITH(
      find_trainer_kernels("tinygrad", {.norm = ops::NormKind::rms}),
      ContainsSubstring("pytorch, pytorch-compile, pytorch-2023, jax, megatron, megatron-2022"));
  CHECK_THROWS_WITH(find_trainer_kernels("megatron-2022", {.norm = ops::NormKind::rms}),
                    ContainsSubstring("LayerNorm only"));
  CHECK(find_trainer_kernels("pytorch", {.norm = ops::NormKind::layer}).find("norm_forward")->bytes ==
        18.0 / 8);
}

TEST_CASE("experts of Megatron-Core have GEMMs and casts of their own, for which its host takes time",
          "[machine]") {
  using machine::find_trainer_kernels;
  const auto times = [](const char* gpu, std::optional<Fp8Recipe> fp8 = {}) {
    return machine::CallTimes(
        find_trainer_kernels("megatron", {.norm = ops::NormKind::rms, .fp8 = fp8}).on(model(gpu)), nullptr);
  };
  const auto grouped = [](const char* op, DType operands, int64_t m, int64_t n, int64_t k) {
    ops::Call call = gemm(operands, m, n, k, op);
    call.cost.groups = 16;
    return call;
  };
  const ops::Call forward = grouped("grouped_linear_forward", DType::bf16, 16 * 1024, 1536, 2048),
                  weights = grouped("grouped_linear_backward_weight", DType::bf16, 16 * 1024, 1536, 2048);
  // The tiles of all experts fill waves together: 16 x 8 x 6 of 128 x 256 in 6 of 132. For the weights the
  // rows of one expert are the inner dimension.
  const auto inner = [](double k) { return k / (k + 128); };
  CHECK(times("h100").of(forward).value ==
        Approx(forward.cost.flops / (model("h100").bf16_flops() * 0.73 * 768 / 792 * inner(2048))));
  CHECK(times("h100").of(weights).value ==
        Approx(forward.cost.flops / (model("h100").bf16_flops() * 0.73 * 768 / 792 * inner(1024))));
  CHECK(times("h100").gaps(forward) == Approx(machine::launch_gap));
  CHECK(times("h100").host(forward) == Approx(13.5e-6 + 16 * 3.8e-6));
  CHECK(machine::CallTimes(model("h100"), nullptr).host(forward) == 0);
  // Our kernels multiply FP8 operands as f16 on a B200, the library does not.
  const ops::Call as_f16 = grouped("grouped_linear_forward", DType::f16, 16 * 1024, 1536, 2048);
  CHECK(times("b200").of(as_f16).value == Approx(2 * times("b200", Fp8Recipe::mxfp8).of(as_f16).value));
  ops::Call cast{.op = "quantize"};
  cast.cost.groups = 16;
  const auto kernels = [&](std::optional<Fp8Recipe> fp8) {
    return times("h100", fp8).gaps(cast) / machine::launch_gap;
  };
  CHECK(kernels(Fp8Recipe::delayed) == Approx(2));
  CHECK(kernels(Fp8Recipe::blockwise) == Approx(2 + 16));
  CHECK(kernels(Fp8Recipe::tensorwise) == Approx(2 + 4 * 16));
  cast.cost.groups = 0;
  CHECK(kernels(Fp8Recipe::tensorwise) == Approx(2));
  CHECK(times("h100").host_waits({.op = "dispatch_sort"}));
  CHECK_FALSE(times("h100").host_waits({.op = "permute"}));
}

TEST_CASE("properties of a trainer change what its host and its experts do", "[machine]") {
  const machine::TrainedModel dense{.norm = ops::NormKind::rms},
      experts{.norm = ops::NormKind::rms, .fp8 = Fp8Recipe::tensorwise, .experts = true, .exchanges = true};
  const auto times = [&](const char* trainer) {
    return machine::CallTimes(machine::find_trainer(trainer, experts).on(model("h100")), nullptr);
  };
  ops::Call cast{.op = "quantize"}, sorted{.op = "regroup_rows"};
  cast.cost.groups = 16;
  sorted.cost.read = model("h100").copy;
  CHECK(times("megatron").host(cast) == Approx(2 * 13.5e-6 + 4 * 16 * 3.8e-6));
  CHECK(times("megatron+grouped").host(cast) == Approx(2 * 13.5e-6));
  CHECK(times("megatron+grouped").gaps(cast) == Approx(2 * machine::launch_gap));
  CHECK(times("megatron+grouped").host_waits({.op = "dispatch_sort"}));
  CHECK(times("megatron+grouped+graphs").host(cast) == 0);
  // Rows in FP8 are sorted and padded, padded, or neither.
  CHECK(times("megatron").of(sorted).value == Approx(2 / 0.85));
  CHECK(times("megatron+deepep").of(sorted).value == Approx(1 / 0.85));
  CHECK(times("megatron+hybridep").of(sorted).value == 0);
  const machine::Trainer all = machine::find_trainer("megatron+graphs+grouped+hybridep+overlap", experts);
  CHECK(
      (all.graphs && all.experts.grouped && all.experts.once && all.experts.in_order && all.experts.beside));
  CHECK(machine::find_trainer("pytorch+graphs", dense).graphs);
  CHECK(machine::find_trainer("jax", dense).on(model("h100")).host_operation == 0);
  machine::TrainedModel here = experts, graphs = dense;
  here.exchanges = false;
  graphs.graphs = true;
  CHECK(machine::find_trainer("pytorch", graphs).graphs);
  CHECK(machine::find_trainer("megatron+grouped", here).experts.grouped);
  const std::tuple<const char*, const machine::TrainedModel*, const char*> refused[] = {
      {"megatron+fast", &dense, "unknown property 'fast'"},
      {"megatron+", &dense, "unknown property ''"},
      {"megatron+overlap", &dense, "the model has no experts"},
      {"pytorch+deepep", &experts, "pytorch has our kernels"},
      {"megatron+grouped+deepep", &here, "deepep has no effect: no rows of experts are exchanged"},
      {"jax+graphs", &dense, "the host is never late"},
      {"pytorch+graphs", &graphs, "steps are in graphs already"},
      {"megatron+graphs+graphs", &dense, "steps are in graphs already"},
      {"megatron+hybridep+deepep", &experts, "another property says so"}};
  for (const auto& [trainer, of, why] : refused)
    CHECK_THROWS_WITH(machine::find_trainer(trainer, *of), ContainsSubstring(why));
}

TEST_CASE("attention is FlashAttention-2, or has its scores in memory, as the trainer's", "[machine]") {
  // FlashAttention-2 on an H100, causal, heads of 128: TFLOP/s forward (Shah et al. 2024), and both ways
  // (its repository).
  const auto with = [](const char* trainer, ops::NormKind norm, const char* gpu, bool dropout = false) {
    return machine::find_trainer_kernels(trainer, {.norm = norm, .dropout = dropout}).on(model(gpu));
  };
  const DeviceModel h100 = with("pytorch-compile", ops::NormKind::rms, "h100");
  const auto attention = [](double keys, double head, bool backward) {
    ops::Cost c{
        .work = ops::Work::attention, .operands = DType::bf16, .head_dim = static_cast<int64_t>(head)};
    c.keys = keys;
    c.flops = (backward ? 10 : 4) * head * keys * 1e6;  // of 10^6 queries of a head
    c.backward = backward;
    c.library = true;
    return ops::Call{.op = backward ? "attention_backward" : "attention_forward", .cost = c};
  };
  const auto time = [&](const DeviceModel& gpu, const ops::Call& call) {
    return machine::estimate(gpu, call, machine::likely).seconds();
  };
  for (const auto& [length, forward, both] :
       {std::tuple(4096, 319, 294), {8192, 333, 308}, {16384, 335, 328}}) {
    const ops::Call f = attention(length / 2.0, 128, false), b = attention(length / 2.0, 128, true);
    CHECK(f.cost.flops / time(h100, f) * 1e-12 == Approx(forward).epsilon(0.05));
    CHECK((f.cost.flops + b.cost.flops) / (time(h100, f) + time(h100, b)) * 1e-12 ==
          Approx(both).epsilon(0.06));
  }
  // At lower clocks of the GPU.
  machine::Profile limited;
  limited.base = "h100";
  limited.facts["power_limit"] = 500;
  const DeviceModel slow = limited.device(h100);
  const ops::Call one = attention(4096, 128, false);
  CHECK(time(slow, one) == Approx(time(h100, one) * std::cbrt(595.0 / 395)));
  // Scores in memory: PyTorch's attention of the same paper, forward and backward on an A100 at 2,048,
  // causal, reaches 32 TFLOP/s in more kernels than Megatron's, which has one for the softmax.
  const DeviceModel a100 = with("megatron-2022", ops::NormKind::layer, "a100");
  const ops::Call f = attention(1024, 128, false), b = attention(1024, 128, true);
  const double rate = (f.cost.flops + b.cost.flops) / (time(a100, f) + time(a100, b)) * 1e-12;
  CHECK(rate > 32);
  CHECK(rate < 64);
  const DeviceModel dropped = with("megatron-2022", ops::NormKind::layer, "a100", true);
  CHECK(time(dropped, f) - time(a100, f) == Approx(5 * 2048e6 / (a100.copy * 0.85)));
  // The bytes alone: 19 of each of 2,048 x 10^6 scores.
  CHECK(time(a100, f) + time(a100, b) > 19 * 2048e6 / a100.copy);
}
