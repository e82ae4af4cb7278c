#include "apps/profile/verdicts.h"

#include <algorithm>
#include <cmath>

#include <spdlog/fmt/ranges.h>

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

  // The ranks that share the samples of a step.
  int64_t copies() const {
    return std::max<int64_t>(profile_.facts.world / std::max<int64_t>(config_.distributed.model_ranks(), 1),
                             1);
  }
  // The microbatches of a step on a rank; 0: unknown.
  int64_t microbatches() const {
    const auto& micro = config_.policy.train_micro_batch_size;
    return micro.is_auto() ? 0 : config_.policy.train_global_batch_size / (copies() * micro.value());
  }

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
    const int64_t workers = config_.data.num_workers, ahead = config_.data.prefetch_batches;
    const double read = rank_.read_seconds, rest = split_.wall - split_.data;
    std::vector<Candidate> candidates;
    // Threads wait for storage at once. A step takes all its microbatches when it begins: the ones that were
    // not read ahead are waited for.
    const int64_t batches = microbatches();
    const auto add_priced = [&](int64_t threads, int64_t slots) {
      const double with = read / static_cast<double>(threads);
      const auto late = static_cast<double>(std::max<int64_t>(batches - std::max(slots, threads), 0));
      Candidate c;
      if (threads != workers) c.overrides.push_back(fmt::format("data.num_workers={}", threads));
      if (slots != ahead) c.overrides.push_back(fmt::format("data.prefetch_batches={}", slots));
      c.predicted_s = std::max(rest + late / static_cast<double>(batches) * with, with);
      if (!c.overrides.empty()) candidates.push_back(std::move(c));
    };
    if (read > 0 && rest > 0 && batches > 0) {
      const auto enough = static_cast<int64_t>(std::min(std::ceil(1.1 * read / rest), 256.0));
      const int64_t threads = std::max({enough, workers, int64_t{1}});
      add_priced(threads, ahead);
      add_priced(std::max<int64_t>(workers, 1), std::max(batches, ahead));
      add_priced(threads, std::max(batches, ahead));
    }
    candidates.push_back(set("data.num_workers", std::max<int64_t>(2 * workers, 1)));
    candidates.push_back(set("data.prefetch_batches", 2 * config_.data.prefetch_batches));
    add_share("data_loading",
              fmt::format("the step waits for the loader: {}; reading takes {:.1f} ms, with {} of {}",
                          cost(split_.data), read * 1e3, workers, "data.num_workers"),
              split_.data, std::move(candidates));
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
        candidates.push_back(set("distributed.bucket_size_mb", "auto"));
        for (const double factor : {0.5, 2.0, 8.0, 32.0, 128.0})
          candidates.push_back(set("distributed.bucket_size_mb", d.bucket_size_mb.value() * factor));
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
    imbalance();
  }

  // The slowest stage waits for none, so that its own split does not show that the others wait for it.
  void imbalance() {
    const std::vector<double> stages = stage_work(profile_);
    if (stages.size() < 2) return;
    const auto slow = std::max_element(stages.begin(), stages.end());
    const double longer = *slow - mean(stages);
    if (share(longer) <= limits_.imbalance) return;
    const DistributedConfig& d = config_.distributed;
    std::vector<Candidate> candidates;
    const auto spread = [&](const char* key, bool counted) {
      if (counted) return;
      Candidate c = set(key, "true");
      if (d.pipeline_layout) c.overrides.insert(c.overrides.begin(), "distributed.pipeline_layout=null");
      candidates.push_back(std::move(c));
    };
    if (d.pipeline_layout) candidates.push_back(set("distributed.pipeline_layout", "null"));
    spread("distributed.account_for_loss_in_pipeline_split", d.account_for_loss_in_pipeline_split);
    spread("distributed.account_for_embedding_in_pipeline_split", d.account_for_embedding_in_pipeline_split);
    if (d.pipeline_layout && d.pipeline_layout->size() == stages.size()) {
      const auto from = slow - stages.begin();
      const auto to = std::min_element(stages.begin(), stages.end()) - stages.begin();
      std::vector<int64_t> layers = *d.pipeline_layout;
      for (int moved = 0; moved < 4 && layers[from] > 1; ++moved) {
        --layers[from], ++layers[to];
        candidates.push_back(set("distributed.pipeline_layout", fmt::format("[{}]", fmt::join(layers, ","))));
      }
    }
    add_share("pipeline_imbalance",
              fmt::format("stage {} of the pipeline works {:.1f} ms, all stages {:.1f} ms on average: {}",
                          slow - stages.begin(), *slow * 1e3, mean(stages) * 1e3, cost(longer)),
              longer, std::move(candidates));
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
    if (!micro.is_auto())
      for (int64_t size = 2 * micro.value(); size * copies() <= config_.policy.train_global_batch_size;
           size *= 2)
        larger.push_back(set("policy.train_micro_batch_size", size));
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
    const auto is_gemm = [](const Operation& o) {
      return o.name.starts_with("linear") || o.name.starts_with("grouped_linear");
    };
    double gemm = 0, attainable = 0;
    std::vector<std::string> slow;
    for (const Operation& o : rank_.operations) {
      if (device_ && o.calls > 0 && o.seconds / static_cast<double>(o.calls) > limits_.slow_kernel_ms * 1e-3)
        slow.push_back(o.name);
      if (!is_gemm(o)) continue;
      gemm += o.seconds;
      // Few rows wait for the weights: the shape is the cause, not the memory.
      attainable += o.arithmetic;
    }
    if (!slow.empty()) {
      std::sort(slow.begin(), slow.end());
      slow.erase(std::unique(slow.begin(), slow.end()), slow.end());
      add("slow_kernels",
          fmt::format("calls take more than {:g} ms on average: {}", limits_.slow_kernel_ms,
                      joined(slow, ", ", 4)),
          0, static_cast<double>(slow.size()), Severity::medium);
    }
    // Other programs are not the fault of the shapes.
    if (split_.wall > 0) gemm *= 1 - std::clamp(rank_.starved / split_.wall, 0.0, 1.0);
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
    if (copies() < 2 || share(split_.update) <= limits_.update || d.shard_strategy != ShardStrategy::ddp)
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
    if (share(rank_.starved) > limits_.starved)
      add_share("starved",
                fmt::format("other programs take the processors: rank {} waits for one for {}", rank_.rank,
                            cost(rank_.starved)),
                rank_.starved, threads());
    for (const Standing& s : standings(profile_)) {
      if (s.score >= limits_.straggler) continue;
      std::vector<Candidate> candidates = threads();
      if (candidates.empty()) candidates.emplace_back();
      // Without a processor it lengthens communication, too. Other ranks wait for one as well, for the
      // threads that move their bytes.
      double starved = find(s.rank) ? find(s.rank)->starved : 0, least = starved;
      for (const RankProfile& r : profile_.ranks)
        if (r.rank != s.rank) least = std::min(least, r.starved);
      starved -= profile_.ranks.size() > 1 ? least : 0;
      candidates.front().predicted_s =
          std::max(split_.wall - std::max(straggler_seconds(s), starved), s.score * own_work(s));
      add("straggler", straggler_text(s), straggler_seconds(s), s.score, s.severity, std::move(candidates));
    }
  }

  const RankProfile* find(int rank) const {
    for (const RankProfile& r : profile_.ranks)
      if (r.rank == rank) return &r;
    return nullptr;
  }
  std::string straggler_text(const Standing& s) const {
    const RankProfile* r = find(s.rank);
    const std::string longer = s.longer ? fmt::format(": {} +{:.1f} ms", s.longer, s.longer_s * 1e3) : "";
    const std::string why = r && share(r->starved) > limits_.starved
                                ? fmt::format(
                                      "; other programs take its processor for {:.1f} ms. Fix: end "
                                      "them, or bind them to other processors",
                                      r->starved * 1e3)
                                : "";
    return fmt::format("rank {} on {} is slower than the fastest (score {:.2f}){}{}", s.rank,
                       r ? r->host : "?", s.score, longer, why);
  }
  double straggler_seconds(const Standing& s) const {
    const RankProfile* r = find(s.rank);
    return r ? (1 - s.score) * r->own_work() : 0;
  }
  double own_work(const Standing& s) const {
    const RankProfile* r = find(s.rank);
    return r ? r->own_work() : 0;
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
