// Sharded weights and gradients of parameter groups: their communication, and the memory of their buffers.
#include "apps/plan/param_groups.h"

#include <map>

#include "apps/engine/step_traffic.h"
#include "apps/model/families/hf_config.h"
#include "apps/plan/run_plan.h"
#include "parallel/pipeline/equivalent.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::plan;
using memory::Category;

namespace {

const std::string llama =
    R"({"model_type":"llama","vocab_size":4096,"hidden_size":256,"intermediate_size":768,
    "num_hidden_layers":8,"num_attention_heads":8,"num_key_value_heads":2,"max_position_embeddings":2048,
    "tie_word_embeddings":TIED})";

struct Case {
  std::string strategy;
  bool tied = false;
  bool overlap = true;
  int world = 4, replicas = 1, microbatches = 2;
  std::vector<std::string> extra = {};
  int rank = -1;    // -1: the last one
  int samples = 0;  // in the global batch; 0: world * microbatches
};

std::unique_ptr<RunPlan> plan_of(const Case& c) {
  std::vector<std::string> overrides{
      fmt::format("policy.train_global_batch_size={}", c.samples > 0 ? c.samples : c.world * c.microbatches),
      "distributed.shard_strategy=" + c.strategy, fmt::format("distributed.dp_replicate_size={}", c.replicas),
      fmt::format("distributed.overlap_param_gather={}", c.overlap && c.strategy != "ddp"),
      fmt::format("distributed.overlap_grad_reduce={}", c.overlap || c.strategy == "optim")};
  overrides.insert(overrides.end(), c.extra.begin(), c.extra.end());
  const ConfigResult result = load_config_text(
      "policy:\n"
      "  model: {model_type: llama}\n"
      "  train_micro_batch_size: 1\n"
      "  max_total_sequence_length: 64\n"
      "pretrain: {max_num_steps: 10}\n"
      "data: {train: {data_path: corpus}}\n",
      "t.yaml", overrides);
  INFO(render(result.diagnostics));
  REQUIRE(result.ok());
  std::string text = llama;
  text.replace(text.find("TIED"), 4, c.tied ? "true" : "false");
  return make_run_plan(
      result.config, model::parse_model_config(text, "test"), resolve_batch(result.config, c.world),
      grid_position(result.config, c.world, c.rank < 0 ? c.world - 1 : c.rank), DeviceType::cpu, 2);
}

int64_t bytes(const RunPlan& p, Category c) {
  return p.memory.bytes(c);
}

/// The greatest total of these buffers that are alive at one time.
int64_t peak(const RunPlan& p, const std::vector<memory::BufferId>& ids) {
  std::map<int, int64_t> change;
  for (const memory::BufferId id : ids) {
    const auto& b = p.memory.buffers()[id];
    REQUIRE(!b.always());
    for (const memory::Lifetime& life : b.lifetimes) {
      change[life.first] += b.bytes;
      change[life.last + 1] -= b.bytes;
    }
  }
  int64_t now = 0, most = 0;
  for (const auto& [tick, by] : change) most = std::max(most, now += by);
  return most;
}

int64_t largest(const RunPlan& p, const std::vector<memory::BufferId>& ids) {
  int64_t most = 0;
  for (const memory::BufferId id : ids) most = std::max(most, p.memory.buffers()[id].bytes);
  return most;
}

}  // namespace

TEST_CASE("each strategy keeps what it says of weights, gradients and optimizer state", "[plan]") {
  for (const bool tied : {false, true}) {
    const auto ddp = plan_of({"ddp", tied}), optim = plan_of({"optim", tied}),
               grads = plan_of({"optim_grads", tied}), params = plan_of({"optim_grads_params", tied}),
               copies = plan_of({.strategy = "hsdp", .tied = tied, .replicas = 2});
    for (const RunPlan* p : {ddp.get(), optim.get(), grads.get(), params.get(), copies.get()}) {
      const int shards = p == copies.get() ? 2 : 4;
      const int64_t all = p->groups[0].layout.total() * 4;
      CAPTURE(p->groups[0].strategy.name, tied);
      CHECK(bytes(*p, Category::weights) == (p->groups[0].weights_sharded ? all / shards : all));
      CHECK(bytes(*p, Category::gradients) == (p->groups[0].gradients_sharded ? all / shards : all));
      CHECK(bytes(*p, Category::optimizer) == (p == ddp.get() ? 2 * all : 2 * all / shards));
    }
    // What is left of the layers' weights and gradients while they are used is less than what is saved.
    CHECK(optim->memory.total_bytes() < ddp->memory.total_bytes());
    CHECK(grads->memory.total_bytes() < optim->memory.total_bytes());
    CHECK(params->memory.total_bytes() < grads->memory.total_bytes());
    CHECK(params->memory.total_bytes() < copies->memory.total_bytes());
  }
}

TEST_CASE("one rank that keeps gradients in bf16 needs 10 bytes for a parameter instead of 12", "[plan]") {
  for (const std::string strategy : {"optim", "optim_grads"})
    for (const bool bf16 : {false, true}) {
      const std::string section = "policy.optimizer.";
      const auto p =
          plan_of({.strategy = strategy,
                   .world = 1,
                   .microbatches = 4,
                   .extra = {"policy.precision=bfloat16", section + "use_precision_aware_optimizer=true",
                             section + "exp_avg_dtype=bf16", section + "exp_avg_sq_dtype=bf16",
                             section + "main_grads_dtype=" + (bf16 ? "bf16" : "fp32")}});
      const ParamGroup& g = p->groups.at(0);
      int64_t kept = 0;
      for (const auto& b : p->memory.buffers())
        if (b.always() && (b.category == Category::weights || b.category == Category::gradients ||
                           b.category == Category::optimizer))
          kept += b.bytes;
      CHECK(kept == (bf16 ? 10 : 12) * g.layout.total());
      CHECK(g.gradient_buckets == bf16);
      CHECK(g.bucket_gradients.size() == (bf16 ? g.layout.buckets().size() : 0));
      // Two layers at most also have fp32 gradients.
      if (bf16) CHECK(peak(*p, g.bucket_gradients) <= 2 * largest(*p, g.bucket_gradients));
    }
}

TEST_CASE("at most two layers are gathered at once, and the gradients of two reduced", "[plan]") {
  for (const bool overlap : {false, true}) {
    CAPTURE(overlap);
    const auto p = plan_of({.strategy = "optim_grads_params", .overlap = overlap});
    const ParamGroup& g = p->groups[0];
    CHECK(peak(*p, g.gathered) <= (overlap ? 2 : 1) * largest(*p, g.gathered));
    CHECK(peak(*p, g.bucket_gradients) <= (overlap ? 2 : 1) * largest(*p, g.bucket_gradients));
    // The tied embedding's gradient is that of the head first, and complete with the first layer's.
    const auto tied = plan_of({.strategy = "optim_grads", .tied = true, .overlap = overlap});
    const auto& ids = tied->groups[0].bucket_gradients;
    int64_t blocks = 0;
    for (size_t b = 0; b < ids.size(); ++b)
      if (tied->groups[0].layout.params()[tied->groups[0].layout.buckets()[b].params[0]].name.starts_with(
              "layers."))
        blocks = std::max(blocks, tied->memory.buffers()[ids[b]].bytes);
    CHECK(blocks > 0);
    CHECK(peak(*tied, ids) <= largest(*tied, ids) + (overlap ? 2 : 1) * blocks);
  }
}

// The dry run of a long schedule is that of a shorter one: what it places in shared memory must be apart in
// the long one, too.
TEST_CASE("buffers that live at once in the whole schedule share no memory", "[plan]") {
  const std::vector<std::string> schedules{"pipeline_schedule=1f1b", "pipeline_schedule=zb_h1",
                                           "virtual_pipeline_size=2", "overlap_p2p_comm=true"};
  for (const int stages : {2, 4})
    for (const int microbatches : {3, 8, 17})
      for (int i = 0; i < stages * static_cast<int>(schedules.size()); ++i) {
        const int rank = 2 * (i % stages);
        const std::string& schedule = schedules[i / stages];
        CAPTURE(stages, microbatches, rank, schedule);
        const auto p = plan_of({.strategy = "optim_grads_params",
                                .world = 2 * stages,
                                .extra = {fmt::format("distributed.pipeline_parallel_size={}", stages),
                                          "distributed." + schedule},
                                .rank = rank,
                                .samples = 2 * microbatches});
        model::DecoderOptions options = p->decoder->options();
        options.training = pipeline::unrolled(options.training);
        REQUIRE(options.training.actions.size() >= p->decoder->options().training.actions.size());
        memory::MemoryPlan whole;
        model::Decoder decoder(p->spec, p->parameters, options, whole);
        decoder.add_workspace(whole, 0);
        std::vector<ParamGroup> groups = p->groups;
        declare_buckets(groups, decoder.buckets(), whole);
        // The same buffers in the same order; the plan has others before them.
        const auto before =
            static_cast<size_t>(p->groups[0].gathered[0]) - static_cast<size_t>(groups[0].gathered[0]);
        const auto planned = std::span(p->memory.buffers()).subspan(before);
        const auto& buffers = whole.buffers();
        REQUIRE(planned.size() == buffers.size());
        const auto alive_together = [](const auto& a, const auto& b) {
          for (const memory::Lifetime& x : a.lifetimes)
            for (const memory::Lifetime& y : b.lifetimes)
              if (x.first <= y.last && y.first <= x.last) return true;
          return false;
        };
        std::vector<std::string> conflicts;
        for (size_t i = 0; i < buffers.size(); ++i) {
          REQUIRE(planned[i].name == buffers[i].name);
          for (size_t j = 0; j < i; ++j)
            if (planned[i].offset < planned[j].offset + planned[j].bytes &&
                planned[j].offset < planned[i].offset + planned[i].bytes &&
                alive_together(buffers[i], buffers[j]))
              conflicts.push_back(buffers[i].name + " and " + buffers[j].name);
        }
        CAPTURE(conflicts);
        REQUIRE(conflicts.empty());
      }
}

TEST_CASE("the buckets of a layer are gathered in one operation, and reduced in another", "[plan]") {
  for (const auto& [size, buckets] : {std::pair("auto", false), {"0.3", true}})
    for (const auto& [wire, joint] : {std::pair("fp32", true), {"bf16", false}}) {
      CAPTURE(size, wire);
      const Case c{.strategy = "optim_grads_params",
                   .extra = {fmt::format("distributed.bucket_size_mb={}", size),
                             fmt::format("distributed.grad_reduce_dtype={}", wire)}};
      const ops::DryDevice device(1);
      auto p = plan_of(c);
      REQUIRE((std::ssize(p->groups[0].layout.buckets()) > 10) == buckets);  // 8 blocks, embedding and head
      int64_t gathers = 0, sums = 0, gathered = 0, summed = 0;
      engine::TrainingOptions options;
      options.overlap_param_gather = true;
      for (const Traffic& t : engine::step_traffic(p, options, device)) {
        if (t.purpose == comm::Purpose::weights) gathers += t.count, gathered += t.bytes;
        if (t.purpose == comm::Purpose::gradients) sums += t.count, summed += t.bytes;
      }
      const ParamGroup& g = p->groups[0];
      // The backward pass begins with the layer that the forward pass ends with, and that of the embedding
      // reads no weights.
      CHECK(gathers == c.microbatches * (2 * 10 - 2));
      // The head's gradient is complete after the forward pass, that of the norm before it is not.
      CHECK(sums == c.microbatches * (joint ? 10 + buckets : std::ssize(g.layout.buckets())));
      CHECK(summed == c.microbatches * g.layout.total() * (joint ? 4 : 2));
      CHECK(gathered > 0);
      CHECK(gathered < 2 * c.microbatches * g.layout.total() * 4);
    }
}

TEST_CASE("one rank has no shards, whatever the strategy", "[plan]") {
  const auto ddp = plan_of({.strategy = "ddp", .world = 1});
  for (const char* strategy : {"optim", "optim_grads", "optim_grads_params"}) {
    const auto p = plan_of({.strategy = strategy, .world = 1});
    CHECK(p->memory.total_bytes() == ddp->memory.total_bytes());
    CHECK(p->decoder->buckets().empty());
  }
}

TEST_CASE("gradients in bf16 cost a staging buffer of two buckets", "[plan]") {
  const auto plain = plan_of({.strategy = "optim"});
  for (const bool fp32_sums : {false, true}) {
    const auto p =
        plan_of({.strategy = "optim",
                 .extra = {"distributed.grad_reduce_dtype=bf16",
                           fmt::format("distributed.grad_reduce_fp32_accumulation={}", fp32_sums)}});
    int64_t bucket = 0;
    for (const parallel::Bucket& b : p->groups[0].layout.buckets()) bucket = std::max(bucket, b.size);
    CHECK(bytes(*p, Category::gradients) - bytes(*plain, Category::gradients) ==
          2 * bucket * 2 * (fp32_sums ? 2 : 1));
  }
}
