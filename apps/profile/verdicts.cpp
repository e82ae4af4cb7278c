#include "apps/profile/verdicts.h"

#include <algorithm>
#include <cmath>

#include "apps/profile/analyses.h"
#include "apps/profile/summary.h"
#include "core/base/sample.h"
#include "core/base/text.h"

namespace nrl::profile {
namespace {

class Rules {
 public:
  Rules(const Profile& profile, const Config& config, const Thresholds& thresholds)
      : profile_(profile),
        config_(config),
        limits_(thresholds),
        split_(profile.split),
        rank_(slowest(profile)),
        device_(rank_.device != "cpu") {}

  std::vector<Verdict> run() {
    data();
    exposed();
    pipeline();
    memory();
    kernels();
    update();
    steadiness();
    std::stable_sort(out_.begin(), out_.end(), [](const Verdict& a, const Verdict& b) {
      return a.finding.seconds > b.finding.seconds;
    });
    return std::move(out_);
  }

 private:
  double share(double seconds) const { return split_.wall > 0 ? seconds / split_.wall : 0; }

  std::string cost(double seconds) const {
    return fmt::format("{:.1f} ms of {:.1f} ({:.1f} %)", seconds * 1e3, split_.wall * 1e3,
                       100 * share(seconds));
  }

  void add(std::string type, std::string text, double seconds, double value, Severity severity,
           std::vector<Candidate> candidates = {}) {
    Verdict v;
    v.finding.type = std::move(type);
    v.finding.text = std::move(text);
    v.finding.seconds = seconds;
    v.finding.value = value;
    v.finding.severity = severity;
    v.candidates = std::move(candidates);
    out_.push_back(std::move(v));
  }
  // `value` is the share of the step in percent.
  void add_share(std::string type, std::string text, double seconds, std::vector<Candidate> candidates) {
    const double percent = 100 * share(seconds);
    add(std::move(type), std::move(text), seconds, percent,
        percent >= 20  ? Severity::high
        : percent >= 5 ? Severity::medium
                       : Severity::low,
        std::move(candidates));
  }

  static Candidate set(const char* key, const auto& value, bool changes_numbers = false) {
    return {{fmt::format("{}={}", key, value)}, changes_numbers};
  }

  void data() {
    if (share(split_.data) <= limits_.data) return;
    const int64_t workers = config_.data.num_workers;
    add_share(
        "data_loading", fmt::format("the step waits for the loader: {}", cost(split_.data)), split_.data,
        {set("data.num_workers", workers + 1), set("data.num_workers", std::max<int64_t>(2 * workers, 1)),
         set("data.prefetch_batches", 2 * config_.data.prefetch_batches)});
  }

  void exposed() {
    const DistributedConfig& d = config_.distributed;
    const double busy = communication_seconds(rank_);
    if (share(busy) > limits_.communication)
      add("high_communication_overhead",
          fmt::format("communication is busy for {}, of which {:.1f} ms are exposed", cost(busy),
                      exposed_seconds(split_) * 1e3),
          std::min(busy, exposed_seconds(split_)), 100 * share(busy), Severity::medium);
    struct Kind {
      double seconds = 0;
      std::string group;
    } gradients, weights, tensor, context, expert;
    for (const GroupTime& g : rank_.groups) {
      if (g.ranks < 2 || g.group.starts_with("pp") || g.group == "world") continue;
      const bool data =
          g.group.find("dp") != std::string::npos;  // "dp", and "cp-dp" with context parallelism
      Kind& kind = data && g.operation == "all_gather" ? weights
                   : data                              ? gradients
                   : g.group.starts_with("tp")         ? tensor
                   : g.group.starts_with("cp")         ? context
                   : g.group.starts_with("ep")         ? expert
                                                       : gradients;
      kind.seconds += g.exposed;
      kind.group = g.group;
    }
    const auto over = [&](const Kind& kind) { return share(kind.seconds) > limits_.exposed; };
    if (over(gradients)) {
      std::vector<Candidate> candidates;
      if (!d.overlap_grad_reduce) candidates.push_back(set("distributed.overlap_grad_reduce", "true"));
      if (!d.bucket_size_mb.is_auto()) {
        candidates.push_back(set("distributed.bucket_size_mb", d.bucket_size_mb.value() / 2));
        candidates.push_back(set("distributed.bucket_size_mb", d.bucket_size_mb.value() * 2));
      }
      if (d.grad_reduce_dtype == DType::f32)
        candidates.push_back(set("distributed.grad_reduce_dtype", "bf16", true));
      add_share("exposed_gradients",
                fmt::format("the reduction of gradients ({}) is exposed: {}", gradients.group,
                            cost(gradients.seconds)),
                gradients.seconds, std::move(candidates));
    }
    if (over(weights)) {
      std::vector<Candidate> candidates;
      if (!d.overlap_param_gather) candidates.push_back(set("distributed.overlap_param_gather", "true"));
      const char* less = d.shard_strategy == ShardStrategy::optim_grads_params ? "optim_grads"
                         : d.shard_strategy == ShardStrategy::optim_grads      ? "optim"
                         : d.shard_strategy == ShardStrategy::optim            ? "ddp"
                                                                               : nullptr;
      if (less) candidates.push_back(set("distributed.shard_strategy", less));
      add_share(
          "exposed_weights",
          fmt::format("the gathering of weights ({}) is exposed: {}", weights.group, cost(weights.seconds)),
          weights.seconds, std::move(candidates));
    }
    if (over(tensor)) {
      std::vector<Candidate> candidates;
      for (const char* how : {"bulk", "pipelined", "ring"})
        candidates.push_back(set("distributed.tp_comm_overlap", how));
      candidates.push_back(set("distributed.tensor_parallel_size", d.tensor_parallel_size / 2));
      add_share("exposed_tensor_parallel",
                fmt::format("communication of tensor parallelism is exposed: {}", cost(tensor.seconds)),
                tensor.seconds, std::move(candidates));
    }
    if (over(context))
      add_share("exposed_context_parallel",
                fmt::format("communication of context parallelism is exposed: {}", cost(context.seconds)),
                context.seconds,
                {set("distributed.cp_comm_type", "a2a"), set("distributed.cp_comm_type", "p2p"),
                 set("distributed.context_parallel_size", d.context_parallel_size / 2)});
    if (over(expert))
      add_share("exposed_expert_parallel",
                fmt::format("communication of expert parallelism is exposed: {}", cost(expert.seconds)),
                expert.seconds, {set("distributed.expert_parallel_size", d.expert_parallel_size / 2)});
  }

  void pipeline() {
    const DistributedConfig& d = config_.distributed;
    std::vector<Candidate> candidates;
    if (share(split_.bubble) > limits_.bubble) {
      candidates.push_back(set("distributed.virtual_pipeline_size", 2 * d.virtual_pipeline_size.value_or(1)));
      candidates.push_back(set("distributed.pipeline_schedule", "zb_h1"));
      const auto& micro = config_.policy.train_micro_batch_size;
      if (!micro.is_auto() && micro.value() > 1)
        candidates.push_back(set("policy.train_micro_batch_size", micro.value() / 2));
      add_share("pipeline_bubble",
                fmt::format("stages wait for each other, as the schedule has it: {}", cost(split_.bubble)),
                split_.bubble, std::move(candidates));
    }
    if (share(split_.imbalance) <= limits_.imbalance) return;
    candidates.clear();
    if (!d.account_for_loss_in_pipeline_split)
      candidates.push_back(set("distributed.account_for_loss_in_pipeline_split", "true"));
    if (!d.account_for_embedding_in_pipeline_split)
      candidates.push_back(set("distributed.account_for_embedding_in_pipeline_split", "true"));
    add_share("pipeline_imbalance",
              fmt::format("stages wait for slower ones beyond the schedule: {}", cost(split_.imbalance)),
              split_.imbalance, std::move(candidates));
  }

  void memory() {
    if (share(split_.recompute) > limits_.recompute)
      add_share("recomputation", fmt::format("activations are computed again: {}", cost(split_.recompute)),
                split_.recompute, {set("policy.recompute.granularity", "none")});
    if (share(split_.offload) <= limits_.offload) return;
    std::vector<Candidate> candidates;
    if (const double part = config_.policy.offload_activations.value; part > 0)
      candidates.push_back(set("policy.offload_activations", part / 2));
    if (const double part = config_.policy.offload_optimizer.value; part > 0)
      candidates.push_back(set("policy.offload_optimizer", part / 2));
    add_share("exposed_offloading", fmt::format("ops wait for offloaded memory: {}", cost(split_.offload)),
              split_.offload, std::move(candidates));
  }

  void kernels() {
    const auto& micro = config_.policy.train_micro_batch_size;
    std::vector<Candidate> larger;
    if (!micro.is_auto()) larger.push_back(set("policy.train_micro_batch_size", 2 * micro.value()));
    const double busy = utilization(split_);
    if (device_ && busy < limits_.utilization)
      add("low_gpu_utilization", fmt::format("the GPU computes {:.0f} % of the step", 100 * busy),
          split_.host + split_.launch, 100 * busy,
          busy < limits_.poor_utilization ? Severity::high : Severity::medium, larger);
    if (share(split_.host + split_.launch) > limits_.gaps) {
      std::vector<Candidate> candidates = larger;
      if (!config_.policy.cuda_graph) candidates.insert(candidates.begin(), set("policy.cuda_graph", "true"));
      add_share("launch_overhead",
                fmt::format("the GPU waits for launches: {}", cost(split_.host + split_.launch)),
                split_.host + split_.launch, std::move(candidates));
    }
    double gemm = 0, attainable = 0;
    std::vector<std::string> slow;
    for (const Operation& o : rank_.operations) {
      if (device_ && o.calls > 0 && o.seconds / static_cast<double>(o.calls) > limits_.slow_kernel_ms * 1e-3)
        slow.push_back(o.name);
      if (!o.name.starts_with("linear") && !o.name.starts_with("grouped_linear")) continue;
      gemm += o.seconds;
      attainable += o.attainable;
    }
    if (!slow.empty()) {
      std::sort(slow.begin(), slow.end());
      slow.erase(std::unique(slow.begin(), slow.end()), slow.end());
      add("slow_kernels",
          fmt::format("calls take more than {:g} ms on average: {}", limits_.slow_kernel_ms,
                      joined(slow, ", ", 4)),
          0, static_cast<double>(slow.size()), Severity::medium);
    }
    if (gemm <= 0 || attainable <= 0 || attainable >= limits_.gemm * gemm) return;
    std::vector<Candidate> candidates = larger;
    if (config_.distributed.tensor_parallel_size > 1)
      candidates.push_back(
          set("distributed.tensor_parallel_size", config_.distributed.tensor_parallel_size / 2));
    if (device_ && !config_.kernels.autotune) candidates.push_back(set("kernels.autotune", "true"));
    add("inefficient_gemms",
        fmt::format("GEMMs reach {:.0f} % of this machine's peak in their shapes: {} are lost",
                    100 * attainable / gemm, cost(gemm - attainable)),
        gemm - attainable, 100 * attainable / gemm, Severity::medium, std::move(candidates));
  }

  void update() {
    const DistributedConfig& d = config_.distributed;
    const int64_t copies = profile_.facts.world / std::max<int64_t>(d.model_ranks(), 1);
    if (copies < 2 || share(split_.update) <= limits_.update || d.shard_strategy != ShardStrategy::ddp)
      return;
    add_share("optimizer_step", fmt::format("every rank updates all weights: {}", cost(split_.update)),
              split_.update, {set("distributed.shard_strategy", "optim")});
  }

  void steadiness() {
    if (rank_.step_s.size() >= 20) {
      const double p50 = quantile(rank_.step_s, 0.5), p99 = quantile(rank_.step_s, 0.99);
      if (p50 > 0 && p99 > limits_.tail * p50)
        add("unsteady_steps",
            fmt::format("steps vary: p99 is {:.1f} ms, p50 {:.1f} ms; {} involuntary context switches",
                        p99 * 1e3, p50 * 1e3, rank_.involuntary_switches),
            mean(rank_.step_s) - p50, p99 / p50, Severity::low, threads());
    }
    for (const Standing& s : standings(profile_.ranks)) {
      if (s.score >= limits_.straggler) continue;
      add("straggler", straggler_text(s), straggler_seconds(s), s.score, s.severity, threads());
    }
  }

  const RankProfile* find(int rank) const {
    for (const RankProfile& r : profile_.ranks)
      if (r.rank == rank) return &r;
    return nullptr;
  }
  std::string straggler_text(const Standing& s) const {
    const RankProfile* r = find(s.rank);
    return fmt::format("rank {} on {} is slower than the fastest (score {:.2f}){}", s.rank, r ? r->host : "?",
                       s.score, s.longer ? fmt::format(": {} +{:.1f} ms", s.longer, s.longer_s * 1e3) : "");
  }
  double straggler_seconds(const Standing& s) const {
    const RankProfile* r = find(s.rank);
    return r ? (1 - s.score) * r->own_work() : 0;
  }

  // More threads than cores.
  std::vector<Candidate> threads() const {
    if (device_ || rank_.cores <= 0 || profile_.facts.threads <= rank_.cores) return {};
    return {set("kernels.num_threads", rank_.cores)};
  }

  const Profile& profile_;
  const Config& config_;
  const Thresholds& limits_;
  const Split& split_;
  const RankProfile& rank_;
  const bool device_;
  std::vector<Verdict> out_;
};

}  // namespace

std::vector<Verdict> find_verdicts(const Profile& profile, const Config& config,
                                   const Thresholds& thresholds) {
  return Rules(profile, config, thresholds).run();
}

}  // namespace nrl::profile
