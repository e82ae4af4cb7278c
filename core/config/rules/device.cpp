// Rules about the device of the run.
#include "core/config/rules/tables.h"

namespace nrl::config_detail {
namespace {

using DeviceRule = Rule<OnDevice>;

/// Values that a GPU, or a CPU, does not support.
DeviceRule unsupported(bool gpu, std::vector<Condition> all, const std::string& reason,
                       std::vector<std::string> remedy = {}) {
  const ConfigRule rule = row(std::move(all), {reason, std::move(remedy)});
  return {rule.keys, [=](const OnDevice& on) {
            Verdict out = on.facts.gpu == gpu ? rule.judge(on.result) : Verdict{};
            for (Broken& broken : out) broken.remedy.insert(broken.remedy.begin(), on.facts.why);
            return out;
          }};
}

/// Values that do not change results there: a configuration for either device may have them.
DeviceRule useless(bool gpu, std::vector<Condition> all, const std::string& reason) {
  DeviceRule rule = unsupported(gpu, std::move(all), reason);
  rule.judge = [judge = rule.judge](const OnDevice& on) {
    Verdict out = judge(on);
    for (Broken& broken : out)
      if (on.result.config.device == DeviceKind::automatic) broken.severity = Severity::warning;
    return out;
  };
  return rule;
}

DeviceRule needs_gpu(const std::string& key) {
  return useless(false, {is(key, {"true"})}, fmt::format("<:{}> has no effect without a GPU", key));
}
DeviceRule pinned_on_gpu(const std::string& key) {
  return unsupported(
      true, {is(key, {"false"})},
      fmt::format(
          "<:{}> is not supported on a GPU: copies run beside computation only from page-locked memory", key),
      {"Fix: remove it, or set it to true"});
}

Verdict judge_pinned_on_cpu(const OnDevice& on) {
  std::vector<std::string> keys;
  for (const auto& [key, pinned] : {std::pair("policy.pin_memory", on.result.config.policy.pin_memory),
                                    std::pair("data.pin_memory", on.result.config.data.pin_memory)})
    if (pinned.value_or(false) && on.result.sound(key)) keys.emplace_back(key);
  if (on.facts.gpu || keys.empty()) return {};
  return {{.reason = fmt::format("{}: true {} no effect on a CPU, which copies nothing to a device",
                                 fmt::join(keys, " and "), keys.size() == 1 ? "has" : "have"),
           .remedy = {on.facts.why},
           .key = keys.front(),
           .severity = Severity::warning}};
}

const DeviceRule device_table[] = {
    pinned_on_gpu("policy.pin_memory"),
    pinned_on_gpu("data.pin_memory"),
    {{}, judge_pinned_on_cpu},
    unsupported(true,
                {is_not("reliability.recompute_check_period", "0"), is("kernels.deterministic", {"false"})},
                "reliability.recompute_check_period compares bits, which are not reproducible on a GPU "
                "without kernels.deterministic",
                {"Fix: kernels.deterministic: true"}),
    useless(true, {is_not("memory.offload_dir", "null")},
            "memory.offload_dir has no effect on a GPU, whose offloaded memory is page-locked"),
    unsupported(true, {is("distributed.backend", {"mpi"})},
                "distributed.backend: mpi supports host memory only",
                {"use auto, nccl, or staged, which goes through MPI"}),
    unsupported(false, {is(key::graph, {"true"})}, "policy.cuda_graph: true needs a GPU"),
    unsupported(false, {is("policy.logits_dtype", {"bfloat16"}), is("policy.precision", {"auto"})},
                "policy.logits_dtype: bfloat16 needs policy.precision: bfloat16",
                {"policy.precision: auto is float32 on a CPU"}),
    unsupported(false, {is("policy.logits_dtype", {"bfloat16"}), is("policy.precision", {"fastest"})},
                "policy.logits_dtype: bfloat16 needs policy.precision: bfloat16",
                {"policy.precision: fastest is float32 on some CPUs"}),
    unsupported(false, {is("policy.attention.type", {"cudnn"})},
                "policy.attention.type: cudnn: cuDNN has kernels for GPUs only", {"use auto"}),
    needs_gpu("distributed.nccl_ub"),
    needs_gpu("kernels.share_device"),
    needs_gpu("kernels.autotune"),
    needs_gpu("kernels.tf32"),
    useless(false, {is_not("kernels.gemm_tuning", "null")},
            "kernels.gemm_tuning has no effect without a GPU"),
    useless(false,
            {is("policy.optimizer.store_param_remainders", {"true"}), is("policy.precision", {"auto"})},
            "policy.optimizer.store_param_remainders: true has no effect without a GPU"),
    useless(false, {is("policy.optimizer.main_params_dtype", {"bf16"}), is("policy.precision", {"auto"})},
            "policy.optimizer.main_params_dtype: bf16 has no effect without a GPU"),
    unsupported(false, {is("distributed.backend", {"nccl", "staged"})},
                "<:distributed.backend> requires device: cuda", {"use mpi or auto"}),
};

const DeviceRule staged_table[] = {
    unsupported(true, {is(key::graph, {"true"})},
                "policy.cuda_graph: true cannot capture host-staged communication",
                {"it runs on the host within a step. Fix: use nccl, or policy.cuda_graph: false"}),
    unsupported(true, {is("distributed.nccl_ub", {"true"})},
                "distributed.nccl_ub: true has no effect on host-staged communication",
                {"use nccl, or distributed.nccl_ub: false"}),
};

Verdict judge_gpu(const OnDevice& on) {
  if (on.result.config.device != DeviceKind::cuda || on.facts.gpu) return {};
  return {{.reason = fmt::format("device: cuda, but {}", on.facts.why),
           .remedy = {"use device: cpu or auto, or see nrl-train doctor"},
           .exit = Exit::unavailable}};
}

Verdict judge_isa(const OnDevice& on) {
  const AutoOr<Isa>& isa = on.result.config.kernels.isa;
  if (isa.is_auto() || isa.value() <= on.facts.best_isa) return {};
  return {{.reason = filled_in(on.result, "<:kernels.isa> is not supported by the processor of every rank"),
           .remedy = {fmt::format("the best that all support is {}; use it or auto, or see nrl-train doctor",
                                  name_of(on.facts.best_isa))},
           .exit = Exit::unavailable}};
}

Verdict judge_fastest(const OnDevice& on) {
  const Config& c = on.result.config;
  if (c.policy.precision != Precision::fastest || !c.kernels.isa.is_auto() || on.facts.gpu ||
      !on.facts.bf16_differs)
    return {};
  return {{"policy.precision: fastest is bfloat16 on some ranks' processors and float32 on others",
           {"use bfloat16 or float32, or one kernels.isa for all"}}};
}

const DeviceRule machine_table[] = {{{"device"}, judge_gpu},
                                    {{"kernels.isa", "device"}, judge_isa},
                                    {{"policy.precision", "device"}, judge_fastest}};

}  // namespace

Diagnostics validate_device(const OnDevice& on) {
  return judge(device_table, on);
}
Diagnostics validate_staged(const OnDevice& on) {
  return judge(staged_table, on);
}

}  // namespace nrl::config_detail

namespace nrl {

Diagnostics validate_for_device(const ConfigResult& result, const DeviceFacts& facts) {
  using namespace config_detail;
  if (!result.sound("device")) return {};
  Diagnostics out = judge(machine_table, OnDevice{result, facts});
  // With an explicit device, these rules were judged when the configuration was loaded.
  if (result.config.device == DeviceKind::automatic)
    out += validate_device({result, {.gpu = facts.gpu, .why = "device: auto: " + facts.why}});
  if (!facts.staged_why.empty())
    out += validate_staged({result, {.gpu = true, .why = "the ranks use staged: " + facts.staged_why}});
  return out;
}

}  // namespace nrl
