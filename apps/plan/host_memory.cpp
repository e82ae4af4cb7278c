#include "apps/plan/host_memory.h"

#include <algorithm>
#include <map>

#include "apps/plan/memory_check.h"
#include "apps/plan/nodes.h"
#include "apps/plan/snapshot.h"
#include "apps/plan/traffic.h"
#include "core/base/text.h"
#include "core/io/tensor_slice.h"
#include "core/ops/peak.h"
#include "parallel/comm/mpi/mpi_options.h"
#include "parallel/grid/groups.h"
#include "parallel/grid/nodes.h"

namespace nrl::plan {
namespace {

// Pages of the shared windows of this rank's groups that its collectives touch; several groups with the same
// members have one window, which holds the ranks of this host.
struct Windows {
  int64_t bytes = 0;
  int count = 0;
  bool messages = false;  // a group lies on several nodes and has a buffer for reductions
};

Windows windows_of(const Config& config, const parallel::ProcessGrid& grid,
                   std::span<const Traffic> traffic) {
  const std::vector<int> node_of = parallel::node_of_ranks(configured_nodes(config, grid.ranks()));
  const comm::MpiOptions options;
  std::map<std::vector<int>, int64_t> touched;
  Windows out;
  for (const Traffic& t : by_operation(traffic)) {
    const std::vector<int> members = grid.members(t.group);
    const auto here = [&](int r) { return node_of.empty() || node_of[r] == node_of[grid.rank()]; };
    const auto local = static_cast<int>(std::count_if(members.begin(), members.end(), here));
    const bool spans = static_cast<size_t>(local) < members.size();
    if (spans)
      out.messages = out.messages || t.op == comm::Op::all_reduce || t.op == comm::Op::reduce_scatter;
    if (spans && local == 1) continue;
    const int64_t bytes = t.bytes / std::max<int64_t>(t.count, 1);
    int64_t& most = touched[members];
    most = std::max(most, spans ? comm::spanning_window_bytes(options, t.op, bytes, local)
                                : comm::shared_window_bytes(options, t.op, bytes, local));
  }
  for (const auto& [members, bytes] : touched) {
    out.bytes += bytes;
    ++out.count;
  }
  return out;
}

// Pages of offloaded optimizer state that are resident during an update.
int64_t offload_window_bytes(const RunPlan& plan) {
  int64_t most = 0;
  for (const ParamGroup& g : plan.groups) {
    int64_t per_element = 0;
    for (const StateTensor& s : g.state) per_element += size_of(s.dtype);
    most = std::max(most, per_element * std::min(offload_piece, g.offloaded_elements));
  }
  return most;
}

}  // namespace

std::vector<HostPart> host_memory(const Config& config, const RunPlan& plan, const HostFacts& facts) {
  const parallel::ProcessGrid& grid = plan.position.grid;
  std::vector<HostPart> parts;
  const auto add = [&](std::string name, int64_t bytes, std::string formula, bool passing = false) {
    if (bytes > 0) parts.push_back({std::move(name), bytes, std::move(formula), passing});
  };
  const bool cpu_run = plan.device == DeviceType::cpu;
  add("program", facts.program, "code, libraries, threads and plan, measured here");
  if (grid.ranks() > 1) {
    add("MPI library", comm::mpi_resident_bytes, "its components, measured with Open MPI 4.1");
    if (cpu_run) {
      const Windows windows = windows_of(config, grid, facts.traffic);
      add("shared windows", windows.bytes,
          fmt::format("of {} that communicate inside a host", counted(windows.count, "group")));
      if (windows.messages)
        add("reductions", comm::MpiOptions().scratch_bytes, "buffer for messages to other hosts");
    }
  }
  if (cpu_run)
    add("offloaded state", offload_window_bytes(plan),
        "optimizer state of the elements that are updated at a time", true);
  if (!facts.training) return parts;
  const data::DocumentRules none, &rules = facts.documents ? *facts.documents : none;
  data::LoaderOptions loading;
  loading.micro_batch = plan.batch.micro;
  loading.threads = static_cast<int>(config.data.num_workers);
  loading.prefetch = static_cast<int>(config.data.prefetch_batches);
  const auto loader = [&] {
    return fmt::format("{} microbatches of {} x {} tokens", data::loader_slots(loading), loading.micro_batch,
                       plan.sequence_length);
  };
  add("data loader", data::loader_bytes(loading, rules, plan.sequence_length), loader());
  if (evaluates(config)) {
    loading.prefetch = data::LoaderOptions{}.prefetch;
    add("evaluation", data::loader_bytes(loading, rules, plan.sequence_length), loader(), true);
  }
  if (cpu_run && grid.rank() == 0)
    add("GEMM probe", ops::gemm_peak_bytes(facts.threads), "the GEMM that measures the peak", true);
  if (config.checkpointing.enabled)
    add("checkpoints", slice_block_bytes, "a block of a tensor that is converted or cut while it is saved",
        true);
  const int64_t taught = taught_completions(config, facts.validation_prompts),
                validated = taught - rollouts_at_once(config);
  add("teacher's numbers", teacher_number_bytes(config, facts.validation_prompts),
      fmt::format("{} ids and logits for each token of {} completions{}", grouped(config.distillation.topk),
                  grouped(taught),
                  validated > 0 ? fmt::format(", {} of them of a validation", grouped(validated)) : ""));
  if (takes_snapshot(config, plan, facts.memory))
    add("snapshot", snapshot_bytes(config, plan), "of what the rank saves while the next steps run");
  return parts;
}

int64_t taught_completions(const Config& config, std::optional<int64_t> validation_prompts) {
  if (config.algorithm != Algorithm::distill || !generates_rollouts(config)) return 0;
  if (!evaluates(config)) return rollouts_at_once(config);
  const RolloutConfig& c = config.rollout;
  const int64_t all = validation_prompts.value_or(c.max_val_samples.value_or(0)),
                answered = std::min(all, c.max_val_samples.value_or(all));
  return rollouts_at_once(config) + answered * c.val_num_generations_per_prompt;
}

int64_t teacher_number_bytes(const Config& config, std::optional<int64_t> validation_prompts) {
  constexpr int64_t of_number = sizeof(int32_t) + sizeof(float);
  const int64_t longest = config.policy.max_total_sequence_length - 1;  // a prompt has a token or more
  const int64_t of_completion = std::min(config.rollout.max_new_tokens.value_or(longest), longest) *
                                config.distillation.topk * of_number;
  const double bytes = static_cast<double>(taught_completions(config, validation_prompts)) *
                       static_cast<double>(of_completion);
  return static_cast<int64_t>(std::min(bytes, 0x1p60));  // does not overflow
}

int64_t bytes_beside_plan(const Config& config, const RunPlan& plan, int64_t reference,
                          std::optional<int64_t> validation_prompts) {
  const bool on_host = plan.device == DeviceType::cpu;
  return reference + (on_host ? teacher_number_bytes(config, validation_prompts) : int64_t{0});
}

int64_t room_for_teacher_numbers(const Config& config, const RunPlan& plan, const HostFacts& facts,
                                 int64_t reference, int64_t share) {
  if (plan.device == DeviceType::cpu) return share - plan.memory.total_bytes() - reference;
  const int64_t others =
      sum_of(host_memory(config, plan, facts)) - teacher_number_bytes(config, facts.validation_prompts);
  return share - plan.memory.bytes(memory::Tier::pinned) - plan.memory.bytes(memory::Tier::host) - others;
}

int64_t sum_of(const std::vector<HostPart>& parts) {
  int64_t sum = 0, passing = 0;
  for (const HostPart& part : parts) {
    if (part.passing)
      passing = std::max(passing, part.bytes);
    else
      sum += part.bytes;
  }
  return sum + passing;
}

}  // namespace nrl::plan
