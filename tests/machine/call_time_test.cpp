// Calls beside published micro-benchmarks of kernels.

#include "apps/machine/call_time.h"

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
  // Azure, AI-benchmarking-guide: TFLOP/s with random numbers; H100 and GB200 in FP8, A100 in fp16.
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
      {"a100", DType::bf16, 8192, 8192, 8192, 253.7},      {"a100", DType::bf16, 16384, 16384, 16384, 256.5},
      {"a100", DType::bf16, 6144, 12288, 12288, 250.8}};
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
