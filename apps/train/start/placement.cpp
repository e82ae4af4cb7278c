#include "apps/train/start/placement.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <sstream>

#include <spdlog/fmt/ranges.h>

#include "apps/machine/device_models.h"
#include "apps/plan/nodes.h"
#include "apps/plan/run_plan.h"
#include "apps/state/model_source.h"
#include "apps/train/launch/launch.h"
#include "core/base/cpu_list.h"
#include "core/base/output.h"
#include "core/base/text.h"
#include "core/device/choose.h"
#include "core/device/cpu/binding.h"
#include "core/device/cpu/threads.h"
#include "core/device/cuda/nvml.h"
#include "core/io/atomic_file.h"
#include "core/ops/cpu_choice.h"
#include "core/ops/kernel_table.h"
#include "core/ops/peak.h"
#include "parallel/grid/nodes.h"

namespace nrl::train {
namespace {

// The visible devices of every rank of this node, by local rank; `mine`: the UUIDs of this rank's devices.
std::vector<std::vector<std::string>> devices_of_node(comm::World& world,
                                                      const std::vector<std::string>& mine) {
  std::string listed;
  for (const std::string& id : mine) listed += id + "\n";
  std::vector<std::vector<std::string>> seen;
  const std::vector<std::string> all = world.comm().gather_texts(listed);
  for (size_t r = 0; r < all.size(); ++r) {
    if (world.hosts()[r] != world.hosts()[world.rank()]) continue;
    std::istringstream lines(all[r]);
    std::vector<std::string>& ids = seen.emplace_back();
    for (std::string id; std::getline(lines, id);) ids.push_back(id);
  }
  return seen;
}

// ", 1980 MHz", with the limit where the clock is held below it; empty where the driver reports none.
std::string clock_text(const std::string& uuid) {
  const std::unique_ptr<cuda::Nvml> nvml = cuda::open_nvml();
  const auto state = nvml ? nvml->state(uuid) : std::nullopt;
  if (!state || !state->clock_limit) return "";
  std::string text = fmt::format(", up to {} MHz", *state->clock_limit);
  if (state->clock && !state->throttled.empty())
    text += fmt::format(", now {} MHz: {}", *state->clock, fmt::join(state->throttled, " and "));
  return text;
}

}  // namespace

RankDevice open_rank_device(comm::World& world, const DeviceRequest& request) {
  RankDevice out;
  out.type = request.type;
  std::string why_not;
  std::vector<std::string> mine;
  if (out.type == DeviceType::cuda)
    for (VisibleDevice& device : accelerator_backend().devices(why_not))
      mine.push_back(std::move(device.uuid));
  const auto seen = devices_of_node(world, mine);
  run_collectively(world, [&] {
    cpu::use_threads(request.threads);
    if (out.type == DeviceType::cpu) {
      out.exec.kernels = &ops::cpu_kernels(request.isa);
      out.exec.threads = request.threads;
      return;
    }
    out.visible = static_cast<int>(mine.size());
    out.ordinal = device::choose_ordinal(world.local_rank(), seen, request.share);
    out.accelerator = open_accelerator(out.ordinal, request.libraries);
    out.exec = out.accelerator.exec();
  });
  return out;
}

Placement::Placement(comm::World& world, const ConfigResult& result)
    : grid_position_(plan::grid_position(result.config, world.size(), world.rank())) {
  const Config& config = result.config;
  choose(world, config);
  std::optional<parallel::DeviceGroups> devices;
  if (facts_.gpu) {
    device_ = open_rank_device(world, request_);
    std::optional<comm::DeviceCommKind> requested;
    if (config.distributed.backend == CommBackend::nccl) requested = comm::DeviceCommKind::nccl;
    if (config.distributed.backend == CommBackend::staged) requested = comm::DeviceCommKind::staged;
    device::Runtime& runtime = *device_.accelerator.runtime;
    const std::vector<std::string> uuids = world.comm().gather_texts(runtime.properties().uuid);
    run_collectively(world, [&] {
      const comm::DeviceCommChoice choice = comm::choose_device_comm(requested, uuids, comm::nccl_support());
      devices =
          parallel::DeviceGroups{choice.kind, &runtime, {.nccl_user_buffers = config.distributed.nccl_ub}};
      if (world.size() == 1) return;
      const bool staged = choice.kind == comm::DeviceCommKind::staged;
      comm_text_ = fmt::format("{} ({})", staged ? "staged" : "nccl", choice.why);
      if (staged) facts_.staged_why = choice.why;
    });
  }
  run_collectively(world, [&] {
    Diagnostics found = validate_for_device(result, facts_);
    const Diagnostics spans = plan::check_nodes(result, parallel::nodes_of(world.nodes(), world.hosts()),
                                                facts_.gpu ? DeviceType::cuda : DeviceType::cpu);
    found.insert(found.end(), spans.begin(), spans.end());
    if (has_errors(found)) raise(found);
    if (world.rank() == 0 && !found.empty()) output::write(output::Stream::err, render(found));
  });
  if (!facts_.gpu) device_ = open_rank_device(world, request_);
  std::vector<parallel::GroupId> needed;
  run_collectively(world, [&] { needed = groups_of_run(result, grid_position_); });
  run_collectively(world, [&] {  // fails on all ranks or on none
    groups_ = std::make_unique<parallel::Groups>(grid_position_.grid, world.comm(), needed, devices,
                                                 plan::needed_channels(config, grid_position_));
  });
  const size_t free = facts_.gpu ? device_.exec.device->free_memory() : 0;
  auto memory = static_cast<double>(memory_for_rank(config.kernels, device_.type, free, world.local_size()));
  world.comm().all_reduce(std::span(&memory, 1), comm::Reduce::min);
  memory_ = static_cast<size_t>(memory);
  capacity_ = facts_.gpu ? free : memory_;
}

// All ranks use the same kind of device: auto chooses GPUs only if every rank has one.
void Placement::choose(comm::World& world, const Config& config) {
  const DeviceChoice choice = choose_device(config.device);
  const std::vector<std::string> whys = world.comm().gather_texts(choice.why_no_gpu);
  double worst_isa = static_cast<double>(ops::cpu_choice().usable);
  world.comm().all_reduce(std::span(&worst_isa, 1), comm::Reduce::min);
  facts_.best_isa = static_cast<Isa>(static_cast<int>(worst_isa));
  const bool native = ops::cpu_choice().isa >= cpu::Isa::avx512_bf16;
  double natives = native ? 1 : 0;
  world.comm().all_reduce(std::span(&natives, 1), comm::Reduce::sum);
  facts_.bf16_differs = natives > 0 && natives < world.size();
  facts_.gpu = config.device != DeviceKind::cpu;
  facts_.why = "every rank has a GPU";
  for (size_t r = whys.size(); r-- > 0;)
    if (!whys[r].empty()) {
      facts_.gpu = false;
      facts_.why = whys.size() == 1 ? whys[r] : fmt::format("rank {}: {}", r, whys[r]);
    }
  if (config.device == DeviceKind::automatic && !facts_.gpu) why_no_gpu_ = facts_.why;

  if (const std::string& binding = config.kernels.cpu_binding; binding != "none")
    run_collectively(world, [&] {
      static const std::vector<int> allowed = cpu::allowed_cpus();  // before it was bound the first time
      const std::vector<int> cpus =
          cpu::cpus_of_rank(binding, allowed, world.local_rank(), world.local_size());
      cpu::bind_to(cpus);
      bound_ = fmt::format(", on CPU{} {}", cpus.size() == 1 ? "" : "s", cpu_list_text(cpus));
    });
  host_threads_ = threads_for(config.kernels, world.local_size());
  clocks_ = config.logger.monitor_gpus;  // which opens the driver's library anyway
  request_.type = facts_.gpu ? DeviceType::cuda : DeviceType::cpu;
  request_.isa = plan::isa_for(config.kernels);
  request_.threads = host_threads_;
  request_.share = config.kernels.share_device;
  request_.libraries.autotune = config.kernels.autotune;
  request_.libraries.tf32 = config.kernels.tf32;
  request_.libraries.deterministic = config.kernels.deterministic;
  if (config.kernels.gemm_tuning || config.kernels.autotune)
    request_.libraries.gemm_tuning = config.kernels.gemm_tuning.value_or(config.logger.log_dir);
}

std::vector<parallel::GroupId> groups_of_run(const ConfigResult& config, const plan::GridPosition& position) {
  return plan::needed_groups(config.config, position, position.sizes.pp > 1 && load_model_spec(config).tied);
}

int communicators_of_run(const ConfigResult& config, int world) {
  const plan::GridPosition position = plan::grid_position(config.config, world, 0);
  const std::vector<parallel::GroupAlias> groups =
      parallel::group_aliases(position.grid, groups_of_run(config, position));
  return static_cast<int>(std::count_if(groups.begin(), groups.end(), [&](const parallel::GroupAlias& g) {
    return g.id == g.made && position.grid.members(g.id).size() > 1;
  }));
}

std::string Placement::describe(int kernels) const {
  if (device_.type == DeviceType::cpu)
    return fmt::format("cpu ({}), {} per rank{}, {} kernels{}", name_of(request_.isa),
                       counted(host_threads_, "thread"), bound_, kernels,
                       // Only if a GPU driver is loaded: on other machines a CPU run is expected.
                       !why_no_gpu_.empty() && path_exists("/dev/nvidiactl")
                           ? fmt::format("  (auto: {})", why_no_gpu_)
                           : "");
  const device::Properties& d = device_.accelerator.runtime->properties();
  return fmt::format("cuda, {} (device {} of {}, {} of {} free{}), {} kernels{}{}", d.name, device_.ordinal,
                     device_.visible, human_bytes(capacity_), human_bytes(d.memory),
                     clocks_ ? clock_text(d.uuid) : "", kernels, comm_text_.empty() ? "" : ", " + comm_text_,
                     bound_);
}

double native_factor(const ops::Exec& exec, DType operands) {
  return operands == DType::bf16 ? ops::bf16_rate(exec.kernels->bf16_products) : 1;
}

double peak_of(const Placement& placement, DType operands) {
  if (placement.device() == DeviceType::cuda)
    return machine::peak_flops(placement.accelerator().runtime->properties());
  return ops::measure_gemm_peak(placement.host_threads()) * 1e9 * native_factor(placement.exec(), operands);
}

}  // namespace nrl::train
