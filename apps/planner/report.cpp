#include "apps/planner/report.h"

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>

#include <spdlog/fmt/fmt.h>

#include "apps/engine/step_traffic.h"
#include "apps/plan/dry_rank.h"
#include "apps/plan/generation.h"
#include "apps/plan/host_memory.h"
#include "apps/plan/nodes.h"
#include "apps/plan/pipeline.h"
#include "apps/plan/run_plan.h"
#include "apps/planner/report_grid.h"
#include "apps/state/adapter_files.h"
#include "apps/state/model_source.h"
#include "apps/train/start/memory_fit.h"
#include "apps/train/start/placement.h"
#include "apps/train/start/program_size.h"
#include "apps/train/start/run_data.h"
#include "core/base/jobs.h"
#include "core/base/log.h"
#include "core/base/output.h"
#include "core/base/text.h"
#include "core/device/cpu/features.h"
#include "core/device/cpu/parallel.h"

namespace nrl::planner {
namespace {

/// The part of the model that a rank holds.
struct PartKey {
  int stage = 0, threads = 1;
  /// Elements of the parameters, in their order. They differ where the vocabulary is not a multiple of the
  /// tensor-parallel ranks, and buffers beside the parameters differ with them.
  std::vector<int64_t> elements;
  auto operator<=>(const PartKey&) const = default;
};

/// Bytes of the parameter groups' buffers on the rank at `position`, which holds `parameters`.
int64_t group_bytes(const Config& config, const plan::GridPosition& position, const precision::Recipe& recipe,
                    model::ParameterList& parameters) {
  memory::MemoryPlan memory;
  plan::make_param_groups(
      parameters,
      [&](const std::string& group) { return plan::group_options(config, position, recipe, group); }, memory);
  memory.solve();
  return memory.total_bytes();
}

/// The memory that auto may plan with, of a rank on the node with most ranks.
size_t rank_memory(const Config& config, int world, const train::DeviceChoice& device) {
  const std::vector<int> local = plan::local_sizes(config, world);
  return train::memory_for_rank(config.kernels, device.type, device.memory,
                                *std::max_element(local.begin(), local.end()));
}

// Sorted by total memory, the largest first. Ranks of a part differ in the ends of their shards: of the first
// `most_shards` ranks each counts, so that the work does not grow with their number.
std::vector<PartPlan> plan_parts(const ConfigResult& result, int world, const BatchPlan& batch,
                                 const train::DeviceChoice& device) {
  const Config& c = result.config;
  const model::ModelSpec spec = train::load_model_spec(result);
  const std::vector<int> local = plan::local_sizes(c, world);
  const precision::Recipe recipe = plan::recipe_for(c, device.type, spec.layers);
  constexpr size_t most_shards = 64;
  const bool shards = c.distributed.shard_strategy != ShardStrategy::ddp;
  std::map<std::tuple<int, int, int>, std::vector<int>> by_place;  // of the grid: tp, pp; ranks on the node
  const parallel::RankGrid grid(plan::grid_position(c, world, 0).sizes);
  for (int rank = 0; rank < world; ++rank) {
    const parallel::GridPoint at = grid.coordinates(rank);
    by_place[{at.tp, at.pp, local[rank]}].push_back(rank);
  }
  struct Part {
    std::array<std::vector<int64_t>, 2> bytes;  // of the parameter groups: tp 0 or not; by index in a place
    std::map<int64_t, std::vector<int>> ranks;
  };
  std::map<PartKey, Part> parts;
  std::map<int, int> threads;  // of a rank, by the ranks on its node
  for (const auto& [place, ranks] : by_place) {
    const int on_node = std::get<2>(place);
    if (!threads.contains(on_node)) threads[on_node] = train::threads_for(c.kernels, on_node);
    const plan::GridPosition position = plan::grid_position(c, world, ranks.front());
    model::ParameterList parameters =
        model::make_parameters(spec, plan::model_layout(c, spec, position, device.type));
    model::keep_in_fp8(recipe, parameters);
    PartKey key{.stage = position.at.pp, .threads = threads[on_node], .elements = {}};
    for (const model::Parameter& p : parameters.all) key.elements.push_back(p.numel());
    Part& part = parts[key];
    std::vector<int64_t>& bytes = part.bytes[position.at.tp == 0 ? 0 : 1];
    for (size_t i = 0; i < ranks.size(); ++i) {
      const size_t shard = !shards ? 0 : std::min(i, most_shards - 1);
      if (shard == bytes.size())
        bytes.push_back(group_bytes(c, plan::grid_position(c, world, ranks[i]), recipe, parameters));
      part.ranks[-bytes[shard]].push_back(ranks[i]);
    }
  }
  std::vector<PartPlan> out;
  for (auto& [key, part] : parts) {
    PartPlan& planned = out.emplace_back();
    planned.threads = key.threads;
    const int64_t most = part.ranks.begin()->first;
    for (auto& [negative, ranks] : part.ranks) {
      std::sort(ranks.begin(), ranks.end());
      planned.ranks[negative - most] = std::move(ranks);
    }
  }
  const size_t memory = rank_memory(c, world, device);
  run_jobs(static_cast<size_t>(cpu::available_cores()), out.size(), [&](size_t i) {
    const int first = out[i].ranks.begin()->second.front();
    out[i].plan = plan::make_run_plan(c, spec, batch, plan::grid_position(c, world, first), device.type,
                                      out[i].threads, {}, memory);
  });
  std::stable_sort(out.begin(), out.end(), [](const PartPlan& a, const PartPlan& b) {
    return a.plan->memory.total_bytes() > b.plan->memory.total_bytes();
  });
  return out;
}

/// Host memory of the sample order. If it is unknown because the data is not on this machine, `unknown` is
/// set to the reason.
data::DatasetMemory plan_data(const Config& config, int64_t vocab_size, int64_t global_batch,
                              std::string& unknown) {
  if (config.data.train.data_path.empty()) {
    unknown = "data.train.data_path is not set";
    return {};
  }
  if (trains_on_examples(config)) return {};  // mapped files, and 4 bytes per example
  try {
    train::TrainData data = train::plan_train_data(config, vocab_size, global_batch);
    std::vector<data::DatasetOptions> datasets{data.options};
    if (const auto validation = train::plan_validation_data(config, data, global_batch))
      datasets.push_back(validation->options);
    return data::plan_dataset_memory(datasets);
  } catch (const Error& e) {
    if (e.code() != Exit::no_input) throw;
    unknown = e.what();
    return {};
  }
}

/// Prompts of the validation data, whose completions a teacher scores; unset if it scores none or they cannot
/// be read, with the reason in `unknown`.
std::optional<int64_t> validation_prompts(const Config& config, int64_t vocab_size, std::string& unknown) {
  if (plan::taught_completions(config, 0) == 0 || !evaluates(config)) return {};
  try {
    return train::open_validation_data(config, {}, vocab_size, 1)->prompts->size();
  } catch (const Error& e) {
    unknown = e.what();
    return {};
  }
}

/// Prints what is recomputed of the layers: once, or of each kind of ranks that chose for
/// itself.
void print_layers(const std::vector<PartPlan>& parts) {
  std::map<std::string, std::vector<int>> by_text;
  std::map<int64_t, std::string> by_bytes;  // stages with equal layers recompute alike
  for (const PartPlan& part : parts) {
    std::string& text = by_bytes[part.plan->memory.total_bytes()];
    if (text.empty()) text = plan::recompute_text(*part.plan);
    std::vector<int>& same = by_text[text];
    for (const auto& [less, ranks] : part.ranks) same.insert(same.end(), ranks.begin(), ranks.end());
  }
  std::vector<std::pair<std::vector<int>, std::string>> kinds;
  for (auto& [text, of] : by_text) {
    std::sort(of.begin(), of.end());
    kinds.emplace_back(std::move(of), text);
  }
  std::sort(kinds.begin(), kinds.end());
  constexpr size_t shown = 8;
  for (size_t i = 0; i < std::min(kinds.size(), shown); ++i) {
    const auto& [of, text] = kinds[i];
    log::info("layers   {}{}", kinds.size() == 1 ? "" : fmt::format("{}: ", rank_list(of)),
              text.empty() ? "all activations are kept" : "recomputed: " + text);
  }
  if (kinds.size() > shown)
    log::info("         {} more kinds of ranks keep other parts", kinds.size() - shown);
}

/// Prints both figures where the configured recomputation takes more memory than auto would.
void print_recompute_advice(const Config& c, int world, const PartPlan& part,
                            const train::DeviceChoice& device) {
  if (!plan::recompute_is_configured(c.policy) ||
      c.policy.recompute.granularity == RecomputeGranularity::none)
    return;
  Config open = c;
  open.policy = plan::with_open_recompute(c.policy);
  const plan::RunPlan& plan = *part.plan;
  const auto automatic = plan::make_run_plan(open, plan.spec, plan.batch, plan.position, device.type,
                                             part.threads, {}, rank_memory(c, world, device));
  const auto bytes = [](const plan::RunPlan& p) {
    return static_cast<uint64_t>(p.memory.bytes(memory::Category::activations));
  };
  if (bytes(*automatic) < bytes(plan))
    log::info("         that takes {} of activations, more than the {} of policy.recompute.granularity: auto",
              human_bytes(bytes(plan)), human_bytes(bytes(*automatic)));
}

/// Where activations are between the passes, if some are moved to the host.
void print_offloaded(const plan::RunPlan& plan) {
  if (const std::string text = plan::offload_text(plan); !text.empty())
    log::info("offload  to {} between the passes: {}",
              plan.device == DeviceType::cpu ? "a file" : "page-locked host memory", text);
  else
    return;
  const auto blocks = plan.decoder->block_bytes();
  for (size_t i = 0; i < blocks.size();) {
    size_t end = i + 1;
    const auto same = [&](const model::Decoder::BlockBytes& b) {
      return b.kept == blocks[i].kept && b.recomputed == blocks[i].recomputed &&
             b.offloaded == blocks[i].offloaded;
    };
    while (end < blocks.size() && same(blocks[end])) ++end;
    const int first = blocks[i].block, last = blocks[end - 1].block;
    const auto size = [](int64_t bytes) { return human_bytes(static_cast<uint64_t>(bytes)); };
    log::info("  layer{} {}: {} kept, {} recomputed, {} offloaded per microbatch", first == last ? "" : "s",
              first == last ? std::to_string(first) : fmt::format("{}-{}", first, last), size(blocks[i].kept),
              size(blocks[i].recomputed), size(blocks[i].offloaded));
    i = end;
  }
}

// The process around the planned memory.
void print_host(const Config& config, const plan::RunPlan& plan, std::span<const plan::Traffic> traffic,
                int threads, const data::DatasetMemory& order, int64_t generation, int64_t reference,
                double memory, std::optional<int64_t> prompts) {
  const bool on_host = plan.device == DeviceType::cpu;
  data::DocumentRules rules;
  rules.reset_position_ids = config.data.reset_position_ids;
  rules.reset_attention_mask = config.data.reset_attention_mask;
  const std::vector<plan::HostPart> parts =
      plan::host_memory(config, plan,
                        {.program = train::measure_program(config, threads),
                         .threads = threads,
                         .documents = &rules,
                         .traffic = traffic,
                         .memory = memory,
                         .validation_prompts = prompts});
  const int64_t arena = on_host
                            ? plan.memory.bytes(memory::Tier::device)
                            : plan.memory.bytes(memory::Tier::pinned) + plan.memory.bytes(memory::Tier::host);
  log::info("process  host memory{}, in bytes", on_host ? "" : " without the GPU's driver and libraries");
  const auto row = [](std::string_view name, int64_t bytes, std::string_view text) {
    log::info("  {:<14} {:>14}   {:<9}  {}", name, grouped(bytes), human_bytes(static_cast<uint64_t>(bytes)),
              text);
  };
  row("arena", arena, on_host ? "the buffers of the run" : "pinned buffers of the run");
  if (!on_host) generation = reference = 0;
  if (reference > 0) row("reference", reference, "the model of reference.model_name");
  if (generation > 0) row("generation", generation, "keys, values and buffers of rollouts");
  if (order.order + order.files > 0) row("sample order", order.order + order.files, "and the file index");
  for (const plan::HostPart& part : parts)
    row(part.name, part.bytes,
        part.formula + (part.passing ? " (at times; the largest such part counts)" : ""));
  row("peak", arena + generation + reference + order.order + order.files + plan::sum_of(parts),
      "resident memory");
}

}  // namespace

bool knows_memory(const Config& config, int world, const train::DeviceChoice& device) {
  if (device.type == DeviceType::cuda) return device.memory > 0;
  return plan::configured_nodes(config, world).size() <= 1;
}

bool assumes_this_machine(const Config& config, int world, const train::DeviceChoice& device) {
  return world > 1 && device.type == DeviceType::cpu && config.device == DeviceKind::automatic &&
         plan::configured_nodes(config, world).empty();
}

std::map<int64_t, std::vector<int>> RankPlans::by_need() const {
  std::map<int64_t, std::vector<int>> out;
  const int64_t most = largest().memory.total_bytes();
  for (const PartPlan& part : parts)
    for (const auto& [less, ranks] : part.ranks) {
      std::vector<int>& same = out[most - part.plan->memory.total_bytes() + less];
      same.insert(same.end(), ranks.begin(), ranks.end());
    }
  for (auto& [less, ranks] : out) std::sort(ranks.begin(), ranks.end());
  return out;
}

std::vector<const plan::RunPlan*> RankPlans::by_stage(int stages) const {
  std::vector<const plan::RunPlan*> out(static_cast<size_t>(stages));
  for (const PartPlan& part : parts) {
    const plan::RunPlan*& of = out[part.plan->layout.stage];
    if (!of || part.plan->memory.total_bytes() > of->memory.total_bytes()) of = part.plan.get();
  }
  return out;
}

RankPlans plan_all(const ConfigResult& result, int world, const BatchPlan& batch,
                   const train::DeviceChoice& choice, const machine::DeviceModel* gpu) {
  const Config& c = result.config;
  RankPlans out;
  out.device = std::make_unique<ops::DryDevice>(
      gpu ? ops::DryDevice(gpu->properties(), {})
          : plan::usual_device(choice.type, 1,
                               plan::recipe_for(c, choice.type, train::load_model_spec(result).layers)));
  out.parts = plan_parts(result, world, batch, choice);
  out.traffic = engine::step_traffic(out.parts.front().plan, engine::training_options(c), *out.device);
  return out;
}

void print_plan(const ConfigResult& result, int world, const BatchPlan& batch,
                const train::DeviceChoice& choice, const machine::DeviceModel* gpu, const RankPlans& plans,
                bool buffers) {
  const Config& c = result.config;
  const DeviceType device = choice.type;
  const std::map<int64_t, std::vector<int>> ranks = plans.by_need();
  const std::vector<plan::Traffic>& traffic = plans.traffic;
  const plan::RunPlan& plan = plans.largest();
  const int threads = plans.parts.front().threads;
  log::info("model    {} parameters{}, {} layers, {:.4f} GFLOP per token in training at length {}",
            grouped(plan.whole().total()),
            plan.spec.head == model::HeadKind::scalar ? model::head_text(plan.spec) : "", plan.spec.layers,
            training_flops_per_token(plan.spec, plan.sequence_length) / 1e9, plan.sequence_length);
  if (const std::string experts = model::experts_text(plan.spec); !experts.empty())
    log::info("experts  {}", experts);
  if (const std::string trained = train::trained_text(plan.spec); !trained.empty())
    log::info("trains   {}", trained);
  const std::string fp8 = plan::fp8_text(c, plan);
  log::info("device   {}, {} per rank, weights and activations in {}{}",
            device == DeviceType::cuda ? "cuda" : "cpu", counted(threads, "thread"),
            name_of(plan.recipe.activations()), fp8.empty() ? "" : " + " + fp8);
  if (assumes_this_machine(c, world, choice))
    log::info("         all {} ranks on this machine (others: --device h100, or cluster.gpus_per_node)",
              world);
  print_grid(c, plan, traffic);
  if (const std::string line = plan::pipeline_line(c, plan.spec.layers, batch.accumulation); !line.empty())
    log::info("pipeline {}", line);
  if (plan.layout.tensor > 1)
    log::info("overlap  of tensor-parallel communication: {}{}", name_of(plan.layout.overlap.method),
              c.distributed.tp_comm_overlap.is_auto() ? " (auto)" : "");
  log::info("batch    {} sequences = {} micro x {} accumulate x {} dp = {} tokens per step", batch.global,
            batch.micro, batch.accumulation, batch.data_parallel, grouped(batch.tokens_per_step));
  if (const bool chosen = train::chooses_microbatch(c);
      !knows_memory(c, world, choice) && (chosen || c.memory.on_oom == OnOom::reduce_batch))
    log::info(
        "         a run takes a smaller microbatch if this does not fit into its memory, unknown here ({})",
        chosen ? "policy.train_micro_batch_size: auto" : "memory.on_oom: reduce_batch");
  size_t buckets = 0;
  int64_t elements = 0, bound = 0;
  for (const plan::ParamGroup& group : plan.groups) {
    buckets += group.layout.buckets().size();
    elements += group.layout.total();
    bound = std::max(bound, group.bucket_elements);
  }
  const double mib = static_cast<double>(bound) * size_of(DType::f32) / (1 << 20);
  log::info("buckets  {} of up to {:.6g} MiB{}, {} elements with padding", buckets, mib,
            c.distributed.bucket_size_mb.is_auto() ? " (auto)" : "", grouped(elements));
  print_layers(plans.parts);
  print_recompute_advice(c, world, plans.parts.front(), choice);
  print_offloaded(plan);
  log::info("memory   in bytes, {}",
            ranks.size() == 1 ? "per rank" : fmt::format("{} (largest)", rank_list(ranks.begin()->second)));
  const auto row = [](std::string_view name, int64_t bytes) {
    log::info("  {:<12} {:>16}   {}", name, grouped(bytes), human_bytes(static_cast<uint64_t>(bytes)));
  };
  std::string unknown;
  const data::DatasetMemory order = plan_data(c, plan.spec.vocab_size, batch.global, unknown);
  const int64_t order_bytes = order.order + order.files;
  const bool on_host = device == DeviceType::cpu;
  const int64_t counted_order = on_host ? order_bytes : 0;
  for (int i = 0; i < memory::category_count; ++i) {
    const auto category = static_cast<memory::Category>(i);
    row(memory::name_of(category),
        plan.memory.bytes(category) + (category == memory::Category::data ? counted_order : 0));
  }
  int64_t total = plan.memory.total_bytes();
  std::optional<plan::GenerationPlan> generation;
  int64_t reference = 0;
  std::string no_reference, no_prompts;
  const std::optional<int64_t> prompts = validation_prompts(c, plan.spec.vocab_size, no_prompts);
  if (generates_rollouts(c)) {
    try {
      reference = train::reference_bytes(c, plan);
    } catch (const Error& e) {
      no_reference = e.what();
    }
    if (reference > 0) row("reference", reference);
    total += reference;
    std::optional<int64_t> left;
    if (const size_t memory = rank_memory(c, world, choice); memory > 0)
      left = static_cast<int64_t>(memory) - plan.memory.total_bytes() -
             plan::bytes_beside_plan(c, plan, reference, prompts);
    generation = plan::plan_generation(c, plan, left);
    total += generation->memory.total();
    row("generation", generation->memory.total());
  }
  row("total", total + counted_order);
  if (!no_reference.empty()) log::warn("the reference model is not counted: {}", no_reference);
  if (!no_prompts.empty())
    log::warn("the teacher's numbers of a validation are {}: {}",
              c.rollout.max_val_samples ? "those of distill.max_val_samples prompts" : "not counted",
              no_prompts);
  if (generation) {
    log::info("  generation of {}", generation->text());
    log::info(
        "  phases: generate uses weights and generation; score weights, activations, workspace and data{}; "
        "train all but generation{}",
        reference > 0 ? ", and the reference" : "", reference > 0 ? " and the reference" : "");
  }
  if (choice.memory > 0) {
    const double share = static_cast<double>(total) / static_cast<double>(choice.memory);
    log::info("  {} of the GPU's {}{}",
              share < 10 ? fmt::format("{:.0f} %", share * 100) : fmt::format("{:.0f} times", share),
              human_bytes(choice.memory), share > 1 ? ": does not fit" : "");
    if (gpu)
      log::info("  outside the plan {} of {}: context, libraries, {} (assumed)",
                human_bytes(static_cast<uint64_t>(gpu->memory) - choice.memory),
                human_bytes(static_cast<uint64_t>(gpu->memory)),
                counted(train::communicators_of_run(result, world), "communicator"));
  }
  if (const int64_t pinned = plan.memory.bytes(memory::Tier::pinned); pinned > 0) row("pinned host", pinned);
  if (const int64_t offloaded = plan.memory.bytes(memory::Tier::host); offloaded > 0)
    log::info("  {:<12} {:>16}   {} {}", "offloaded", grouped(offloaded),
              human_bytes(static_cast<uint64_t>(offloaded)),
              on_host ? "in a file (memory.offload_dir)" : "in page-locked host memory");
  constexpr size_t shown = 16;
  for (auto kind = std::next(ranks.begin()); kind != ranks.end(); ++kind) {
    if (static_cast<size_t>(std::distance(ranks.begin(), kind)) == shown) break;
    log::info("  {}: {} less", rank_list(kind->second), human_bytes(static_cast<uint64_t>(kind->first)));
  }
  if (ranks.size() > shown) log::info("  {} more kinds of ranks need less", ranks.size() - shown);
  print_host(c, plan, traffic, threads, order, generation ? generation->memory.total() : 0, reference,
             on_host ? static_cast<double>(rank_memory(c, world, choice)) : 0, prompts);
  if (unknown.empty())
    log::info("data     sample order {}{}, file index {} ({}); peak {} while the order is built",
              human_bytes(static_cast<uint64_t>(order.order)),
              order.shared == 0 ? ""
                                : fmt::format(" and {} in files, once per node",
                                              human_bytes(static_cast<uint64_t>(order.shared))),
              human_bytes(static_cast<uint64_t>(order.files)),
              on_host ? "included in data" : "host memory, not included above",
              human_bytes(static_cast<uint64_t>(order.peak + order.files)));
  else
    log::info("data     memory of the sample order unknown: {}", unknown);
  if (!buffers) return;
  for (const auto& buffer : plan.memory.buffers())
    if (buffer.bytes > 0)
      log::info("  {:<12} {:>14} at {:>14}  {}{}", memory::name_of(buffer.category), grouped(buffer.bytes),
                grouped(buffer.offset), buffer.name,
                buffer.tier == memory::Tier::pinned ? " (pinned host memory)"
                : buffer.tier == memory::Tier::host ? " (offloaded)"
                                                    : "");
}

void print_program(const ConfigResult& result, int world, const BatchPlan& batch, int rank,
                   const train::DeviceChoice& device) {
  const Config& c = result.config;
  const plan::GridPosition position = plan::grid_position(c, world, rank);
  const auto plan = plan::make_run_plan(c, train::load_model_spec(result), batch, position, device.type, 1,
                                        {}, rank_memory(c, world, device));
  output::write(output::Stream::out, plan->decoder->program_text());
}

}  // namespace nrl::planner
