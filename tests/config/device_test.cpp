// The checks of a configuration against the device that a run found.
#include "tests/catch.h"
#include "tests/config/helpers.h"

using namespace nrl;
using namespace nrl::test;

namespace {

const DeviceFacts no_gpu{.gpu = false, .why = "no driver is loaded", .best_isa = Isa::avx2};
const DeviceFacts one_gpu{.gpu = true, .why = "every rank has a GPU"};

std::string found(const std::vector<std::string>& keys, const DeviceFacts& facts, Exit exit) {
  std::string text = base_yaml;
  for (const std::string& key : keys) text += key + "\n";
  const ConfigResult result = load_text(text);
  INFO(render(result.diagnostics));
  REQUIRE(result.ok());
  const Diagnostics problems = validate_for_device(result, facts);
  CAPTURE(render(problems));
  CHECK(exit_code(problems) == exit);
  for (const Diagnostic& d : problems) {
    CHECK(d.file == "t.yaml");
    CHECK(d.line > 6);  // the keys above
  }
  return render(problems);
}

}  // namespace

TEST_CASE("keys that the device does not support are refused at their position", "[config]") {
  struct Case {
    std::vector<std::string> keys;
    DeviceFacts facts;
    Exit exit;
    std::vector<std::string> parts;
  };
  DeviceFacts staged = one_gpu;
  staged.staged_why = "NCCL is not in this build";
  const Case cases[] = {
      {{"device: cuda"}, no_gpu, Exit::unavailable, {"device: cuda, but no driver is loaded", "t.yaml:7:9"}},
      {{"kernels: {isa: avx512}"},
       no_gpu,
       Exit::unavailable,
       {"kernels.isa: avx512", "is avx2", "t.yaml:7:16"}},
      {{"kernels: {cuda_graph: {enabled: true}}"},
       no_gpu,
       Exit::config,
       {"policy.cuda_graph: true needs a GPU", "device: auto: no driver is loaded"}},
      {{"distributed: {backend: nccl}"}, no_gpu, Exit::config, {"nccl requires device: cuda", "t.yaml:7:24"}},
      {{"distributed: {backend: mpi}"}, one_gpu, Exit::config, {"mpi supports host memory only"}},
      {{"kernels: {cuda_graph: {enabled: true}}"},
       staged,
       Exit::config,
       {"cannot capture", "NCCL is not in this build"}},
      {{"distributed: {nccl_ub: true}"}, staged, Exit::config, {"no effect on host-staged", "t.yaml:7:24"}},
      {{"distributed: {nccl_ub: true}"},
       no_gpu,
       Exit::ok,
       {"warning: distributed.nccl_ub: true has no effect"}},
      {{"kernels: {tf32: true, autotune: true, gemm_tuning: configs}"},
       no_gpu,
       Exit::ok,
       {"warning: kernels.autotune: true has no effect", "warning: kernels.tf32: true has no effect",
        "warning: kernels.gemm_tuning has no effect"}}};
  for (const Case& c : cases) {
    const std::string text = found(c.keys, c.facts, c.exit);
    for (const std::string& part : c.parts) {
      CAPTURE(text, part);
      CHECK(contains(text, part));
    }
  }
}

TEST_CASE("supported keys cause no diagnostics", "[config]") {
  CHECK(found({}, no_gpu, Exit::ok).empty());
  CHECK(found({"device: cpu", "kernels: {isa: avx2}", "distributed: {backend: mpi}"}, no_gpu, Exit::ok)
            .empty());
  CHECK(found({"device: cuda", "kernels: {tf32: true}", "distributed: {backend: staged}"}, one_gpu, Exit::ok)
            .empty());
}

TEST_CASE("a rule about the device is judged once", "[config]") {
  // device: cpu and device: cuda are known when the configuration is read.
  const ConfigResult cpu = load_base({"device=cpu", "policy.cuda_graph=true"});
  CHECK_FALSE(cpu.ok());
  CHECK(validate_for_device(cpu, no_gpu).empty());
}

TEST_CASE("bf16 logits need bf16 activations, which auto has on a GPU only", "[config]") {
  const std::string logits = "policy.logits_dtype=bfloat16";
  const Diagnostics found = validate_for_device(load_base({logits}), no_gpu);
  REQUIRE(found.size() == 1);
  CHECK(contains(render(found), "policy.logits_dtype: bfloat16 needs policy.precision: bfloat16"));
  CHECK(contains(render(found), "device: auto: no driver is loaded"));
  CHECK(validate_for_device(load_base({logits}), one_gpu).empty());
  CHECK(validate_for_device(load_base({logits, "policy.precision=bfloat16"}), no_gpu).empty());
}

TEST_CASE("page-locked buffers are what a GPU has and a CPU has no use for", "[config]") {
  const auto problems = [](const std::string& value, const DeviceFacts& facts) {
    return validate_for_device(load_base({"policy.pin_memory=" + value, "data.pin_memory=" + value}), facts);
  };
  for (const char* value : {"true", "auto"}) CHECK(problems(value, one_gpu).empty());
  for (const char* value : {"false", "auto"}) CHECK(problems(value, no_gpu).empty());
  const Diagnostics notice = problems("true", no_gpu);
  REQUIRE(notice.size() == 1);
  CHECK(notice[0].severity == Severity::warning);
  CHECK(contains(render(notice), "policy.pin_memory and data.pin_memory: true have no effect on a CPU"));
  const Diagnostics refused = problems("false", one_gpu);
  CHECK(refused.size() == 2);
  CHECK(exit_code(refused) == Exit::config);
  const ConfigResult cpu = load_base({"device=cpu", "data.pin_memory=true"});
  CHECK(cpu.ok());
  CHECK(contains(render(cpu.diagnostics), "warning: data.pin_memory: true has no effect on a CPU"));
}

TEST_CASE("fastest must mean one precision on all ranks", "[config]") {
  DeviceFacts facts = no_gpu;
  facts.bf16_differs = true;
  const auto problems = [&](std::vector<std::string> keys, const DeviceFacts& of) {
    return validate_for_device(load_base(std::move(keys)), of);
  };
  const Diagnostics refused = problems({"policy.precision=fastest"}, facts);
  CHECK(exit_code(refused) == Exit::config);
  CHECK(contains(render(refused),
                 "policy.precision: fastest is bfloat16 on some ranks' processors and float32 on others"));
  CHECK(problems({"policy.precision=bfloat16"}, facts).empty());
  CHECK(problems({"policy.precision=fastest"}, no_gpu).empty());
  CHECK(problems({"policy.precision=fastest", "kernels.isa=avx2"}, facts).empty());
  CHECK(validate_for_device(load_base({"policy.precision=fastest", "policy.logits_dtype=bfloat16"}), no_gpu)
            .size() == 1);
}
