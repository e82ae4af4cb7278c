// Sharding strategies: the bits of ddp, rounded gradients, bytes, checkpoints. tests/layouts compares them
// with one rank.
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>

#include "apps/model/decoder.h"
#include "apps/state/checkpoint.h"
#include "apps/state/rank_group.h"
#include "apps/state/run_state.h"
#include "core/ops/step.h"
#include "parallel/comm/mpi/mpi_session.h"
#include "tests/comm/shared_directory.h"
#include "tests/comm/world_fixture.h"
#include "tests/engine/training.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::test;

namespace {

constexpr int steps = 3;

struct Setup {
  std::string strategy = "ddp";
  int replicas = 1;
  bool overlap_reduce = true, overlap_gather = false;
  std::string wire = "fp32";
  bool fp32_sums = false, feedback = true;
  int microbatches = 1;
  bool clip = false;
  bool tied = true;
  std::string device = "cpu";
  std::string precision = "float32";
  std::vector<std::string> layout = {};  ///< overrides
};

ConfigResult config_of(const Setup& s, int ranks) {
  // Layers of several times FlatBuckets::shard_unit, so that every rank has a part of each.
  std::vector<std::string> overrides = {
      "policy.model.hidden_size=128", "policy.model.intermediate_size=256",
      "distributed.shard_strategy=" + s.strategy, fmt::format("distributed.dp_replicate_size={}", s.replicas),
      fmt::format("distributed.overlap_grad_reduce={}", s.overlap_reduce),
      fmt::format("distributed.overlap_param_gather={}", s.overlap_gather),
      "distributed.grad_reduce_dtype=" + s.wire,
      fmt::format("distributed.grad_reduce_fp32_accumulation={}", s.fp32_sums),
      fmt::format("distributed.grad_reduce_error_feedback={}", s.feedback),
      // Smaller than a layer, so that layers have several buckets.
      "distributed.bucket_size_mb=0.3", "policy.train_micro_batch_size=1",
      fmt::format("policy.train_global_batch_size={}", ranks * s.microbatches),
      "policy.precision=" + s.precision,
      // Small gradients must not become steps of full size in a random direction.
      "policy.optimizer.eps=1e-3", s.clip ? "policy.max_grad_norm=0.05" : "policy.max_grad_norm=null",
      fmt::format("policy.model.tie_word_embeddings={}", s.tied),
      "kernels.share_device=" + std::string(s.device == "cuda" ? "true" : "false")};
  overrides.insert(overrides.end(), s.layout.begin(), s.layout.end());
  return tiny_config(s.device, overrides);
}

/// Numbers by logical tensor ("NAME" for weights, "exp_avg/NAME") and element; NaN where this rank has none.
using Numbers = std::map<std::string, std::vector<float>>;

struct Trained {
  std::vector<double> losses, norms, evaluations;
  Numbers numbers;                                            ///< that this rank holds
  std::map<std::pair<std::string, comm::Op>, int64_t> bytes;  ///< of the last step, by group and operation
};

/// An engine on all ranks of the test.
class Rank {
 public:
  explicit Rank(const Setup& setup)
      : setup_(setup),
        world_(test_world()),
        config_(config_of(setup, world_.size())),
        placement_(world_, config_) {
    const Config& c = config_.config;
    auto plan = plan::make_run_plan(c, train::load_model_spec(config_), resolve_batch(c, world_.size()),
                                    placement_.grid_position(), placement_.device(), 1);
    engine_ = std::make_unique<engine::Engine>(std::move(plan), engine::training_options(c),
                                               placement_.groups(), placement_.exec());
    monitor::StartPhases phases;
    train::load_initial_weights(c, *engine_, train::verify_none, 1, phases);
    engine_->require_kernels(objective_, "the device");
  }

  void train(int from, int to, Trained& out) {
    for (int step = from; step < to; ++step) {
      if (step + 1 == to) world_.comm().collective_log()->reset_totals();
      for (int m = 0; m < setup_.microbatches; ++m) {
        const int sample = m * world_.size() + world_.rank();
        engine_->fill(m, random_batch(T, static_cast<uint64_t>(100 * step + sample)), sample);
      }
      engine_->step(
          {.number = step + 1, .learning_rate = 1e-2, .loss_tokens = T * setup_.microbatches * world_.size()},
          objective_);
      const engine::StepResult result = engine_->collect();
      engine_->finish_gathers();
      out.losses.push_back(result.metrics[0]);
      out.norms.push_back(result.grad_norm);
    }
    out.bytes.clear();
    for (const comm::LogTotal& total : world_.comm().collective_log()->totals())
      out.bytes[{total.group, total.op}] += total.bytes;
    data::HostMicroBatch batch = random_batch(T, 999);
    out.evaluations.push_back(
        engine_->evaluate(2, [&]() -> const data::HostMicroBatch& { return batch; }).front());
    out.numbers = numbers();
  }

  /// Rank 0's gradient of the last norm has `value` in the steps that follow; unset: its own. On a CPU, where
  /// reductions must not overlap with the backward pass.
  void plant(std::optional<float> value) {
    const auto views = parameter_views(plan().parameters, engine_->groups());
    plan().decoder->watch_results([=, this](const model::StepResults& r) {
      if (value && r.step.backward && world_.rank() == 0) views.back().grad.ptr<float>()[0] = *value;
    });
  }

  /// A step of any layout.
  void step() {
    const int64_t count = engine_->plan().batch.accumulation;
    for (int64_t m = 0; m < count; ++m) engine_->fill(m, random_batch(T, static_cast<uint64_t>(m)), 0);
    engine_->step({.number = 1, .learning_rate = 1e-2, .loss_tokens = T * count}, objective_);
    engine_->collect();
  }

  Numbers numbers() {
    Numbers out;
    const auto add = [&](const std::string& name, const model::Part& part, int64_t first, DType dtype,
                         const std::vector<char>& bytes) {
      const auto count = static_cast<int64_t>(bytes.size()) / size_of(dtype);
      std::vector<float>& values = out[name];
      if (values.empty()) values.assign(static_cast<size_t>(part.global[0] * part.width()), std::nanf(""));
      for (int64_t i = 0; i < count; ++i) {
        float value = 0;
        if (dtype == DType::f32) {
          std::memcpy(&value, bytes.data() + 4 * i, 4);
        } else {
          bf16 low;
          std::memcpy(&low, bytes.data() + 2 * i, 2);
          value = static_cast<float>(low);
        }
        values[part.element(first + i)] = value;
      }
    };
    const model::ParameterList& parameters = engine_->plan().parameters;
    for (const engine::WeightSlice& w : engine_->weight_slices())
      add(w.part.name, w.part, 0, w.values.dtype, bytes_of(*engine_, w.values));
    for (const engine::GroupTensors& t : engine_->groups())
      for (size_t k = 0; k < t.state.size(); ++k)
        for (const plan::OwnedRange& r : t.group->owned)
          for (const model::Part& part : parameters.all[r.parameter].parts) {
            const int64_t begin = std::max(r.offset, part.offset),
                          end = std::min(r.offset + r.count, part.offset + part.numel());
            if (begin < end)
              add(t.group->state[k].name + "/" + part.name, part, begin - part.offset, t.state[k].dtype,
                  bytes_of(*engine_, t.state[k].rows(r.state + begin - r.offset, end - begin)));
          }
    return out;
  }

  engine::Engine& engine() { return *engine_; }
  const plan::RunPlan& plan() const { return engine_->plan(); }
  comm::World& world() { return world_; }

 private:
  Setup setup_;
  comm::World& world_;
  ConfigResult config_;
  train::Placement placement_;
  engine::LanguageModeling objective_;
  std::unique_ptr<engine::Engine> engine_;
};

Trained run(const Setup& setup) {
  Rank rank(setup);
  Trained out;
  rank.train(0, steps, out);
  return out;
}

/// The greatest difference of a number that `got` holds, relative to the largest value of its tensor.
double difference(const Numbers& got, const Numbers& want) {
  double worst = 0;
  for (const auto& [name, values] : got) {
    REQUIRE(want.contains(name));
    const std::vector<float>& expected = want.at(name);
    REQUIRE(values.size() == expected.size());
    double largest = 0, off = 0;
    int64_t unknown = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      if (std::isnan(values[i])) continue;
      unknown += std::isnan(expected[i]);
      largest = std::max(largest, std::abs(static_cast<double>(expected[i])));
      off = std::max(off, std::abs(static_cast<double>(values[i]) - static_cast<double>(expected[i])));
    }
    REQUIRE(unknown == 0);
    worst = std::max(worst, off == 0 ? 0 : off / largest);
  }
  return worst;
}

int64_t count(const Numbers& numbers) {
  int64_t n = 0;
  for (const auto& [name, values] : numbers)
    n += std::count_if(values.begin(), values.end(), [](float v) { return !std::isnan(v); });
  return n;
}

double difference(const std::vector<double>& got, const std::vector<double>& want) {
  REQUIRE(got.size() == want.size());
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) worst = std::max(worst, std::abs(got[i] / want[i] - 1));
  return worst;
}

const std::vector<Setup>& strategies() {
  static const std::vector<Setup> all = [] {
    std::vector<Setup> out;
    for (const char* name : {"optim", "optim_grads", "optim_grads_params"}) out.push_back({.strategy = name});
    if (test_world().size() == 4)
      for (const char* name : {"optim", "optim_grads", "hsdp"})
        out.push_back({.strategy = name, .replicas = 2});
    return out;
  }();
  return all;
}

}  // namespace

TEST_CASE("every strategy has the bits of ddp and a part of its state, with and without overlap",
          "[sharding]") {
  const Trained ddp = run({});
  REQUIRE(ddp.losses[2] != ddp.losses[0]);
  for (const Setup& strategy : strategies())
    for (const bool overlap : {false, true}) {
      Setup s = strategy;
      s.overlap_reduce = s.overlap_gather = overlap;
      CAPTURE(s.strategy, s.replicas, overlap);
      const Trained got = run(s);
      // Every slice of ranks holds the state once, and the weights once or once per rank.
      const int64_t whole = count(ddp.numbers) / 3, ranks = test_world().size();
      const bool shards = s.strategy == "optim_grads_params" || s.strategy == "hsdp";
      std::vector<int64_t> held{count(got.numbers)};
      if (ranks > 1) REQUIRE(held[0] < 3 * whole);
      test_world().comm().all_reduce(held);
      REQUIRE(held[0] == whole * (2 * s.replicas + (shards ? s.replicas : ranks)));
      if (s.replicas > 1) continue;  // their gradients are added over slices first
      REQUIRE(got.losses == ddp.losses);
      REQUIRE(got.evaluations == ddp.evaluations);
      REQUIRE(difference(got.norms, ddp.norms) < 1e-6);
      REQUIRE(difference(got.numbers, ddp.numbers) == 0);
    }
}

// Every layer that is run again gathers its weights for it.
TEST_CASE("recomputed layers and segments change no bit of a sharded run", "[sharding]") {
  for (const char* strategy : {"ddp", "optim_grads", "optim_grads_params"})
    for (const bool overlap : {false, true}) {
      Setup s{.strategy = strategy, .microbatches = 2};
      s.overlap_reduce = s.overlap_gather = overlap && s.strategy != "ddp";
      s.layout = {"policy.recompute.granularity=none"};
      const Trained kept = run(s);
      for (const char* keys : {"policy.gradient_checkpointing=true", "policy.checkpoint_every=2"}) {
        CAPTURE(strategy, overlap, keys);
        s.layout = {keys};
        const Trained again = run(s);
        REQUIRE(again.losses == kept.losses);
        REQUIRE(again.norms == kept.norms);
        REQUIRE(difference(again.numbers, kept.numbers) == 0);
        const auto gathered = [](const Trained& t) {
          int64_t bytes = 0;
          for (const auto& [key, n] : t.bytes) bytes += key.second == comm::Op::all_gather ? n : 0;
          return bytes;
        };
        // A layer that is alone in its visit is gathered once for it and its recomputation.
        const bool segments = std::string_view(keys).find("every") != std::string_view::npos;
        if (s.strategy == "optim_grads_params" && test_world().size() > 1)
          REQUIRE((gathered(again) > gathered(kept)) == segments);
      }
    }
}

TEST_CASE("gradients that are kept in bf16 change a step by their rounding", "[sharding]") {
  for (const int microbatches : {1, 3}) {
    const Trained ddp = run({.microbatches = microbatches});
    for (Setup s : strategies()) {
      s.microbatches = microbatches;
      s.layout = {"policy.optimizer.use_precision_aware_optimizer=true",
                  "policy.optimizer.main_grads_dtype=bf16"};
      for (const std::string device : {"cpu", "cuda"}) {
        s.device = device;
        CAPTURE(s.strategy, s.replicas, microbatches, device);
        const Rank rank(s);
        for (const plan::ParamGroup& g : rank.plan().groups)
          REQUIRE(rank.plan().memory.buffers()[g.gradients].bytes ==
                  2 * (s.strategy == "optim" ? g.layout.total() : g.layout.shard_total()));
        const Trained got = run(s);
        // 2^-8 relative per gradient and microbatch; the norm averages it away.
        REQUIRE(difference({got.norms[0]}, {ddp.norms[0]}) < 1e-3);
        REQUIRE(difference(got.norms, ddp.norms) < 1e-2);  // of other weights
        REQUIRE(difference(got.norms, ddp.norms) > 0);
        REQUIRE(difference(got.losses, ddp.losses) < 1e-4);
      }
    }
  }
}

TEST_CASE("gradients in bf16 have the same bits whole and in shards, after one microbatch", "[sharding]") {
  for (const bool overlap : {false, true})
    for (const int microbatches : {1, 3}) {
      Setup s{.strategy = "optim_grads", .microbatches = microbatches};
      s.overlap_reduce = overlap;
      s.layout = {"policy.optimizer.use_precision_aware_optimizer=true",
                  "policy.optimizer.main_grads_dtype=bf16"};
      const Trained shards = run(s);
      s.strategy = "optim";
      const Trained whole = run(s);
      CAPTURE(overlap, microbatches);
      // Shards are rounded after the sum over the ranks, and whole gradients of several microbatches before
      // it.
      const bool same = microbatches == 1 || test_world().size() == 1;
      REQUIRE((whole.losses == shards.losses) == same);
      REQUIRE((difference(whole.numbers, shards.numbers) == 0) == same);
      REQUIRE(difference(whole.norms, shards.norms) < (same ? 1e-6 : 1e-2));
      // Whole gradients travel once a step.
      const auto reduced = [](const Trained& t) {
        int64_t bytes = 0;
        for (const auto& [key, n] : t.bytes) bytes += key.second == comm::Op::reduce_scatter ? n : 0;
        return bytes;
      };
      REQUIRE(reduced(shards) == microbatches * reduced(whole));
    }
}

TEST_CASE("gradients in fp8 change a step by their rounding", "[sharding][fp8]") {
  if (test_world().size() == 1) return;
  const Trained exact = run({});
  for (const std::string strategy : {"ddp", "optim"})
    for (const int replicas : {1, 2})
      for (const bool feedback : {false, true}) {
        if (replicas == 2 && (strategy == "ddp" || test_world().size() != 4)) continue;
        CAPTURE(strategy, replicas, feedback);
        Setup s{.strategy = strategy, .replicas = replicas, .wire = "fp8", .feedback = feedback};
        const Trained got = run(s);
        // 2^-4 relative per gradient at most, without preference for a sign; the norm averages it away.
        REQUIRE(difference({got.norms[0]}, {exact.norms[0]}) < 5e-3);
        REQUIRE(difference(got.norms, exact.norms) > 0);
        REQUIRE(difference(got.losses, exact.losses) < 1e-3);
        // The same on the GPU's kernels, where gradients differ in the last bits and so may roundings.
        s.device = "cuda";
        const Trained gpu = run(s);
        REQUIRE(difference(gpu.losses, got.losses) < 1e-4);
        REQUIRE(difference({gpu.norms[0]}, {got.norms[0]}) < 1e-4);
      }
}

TEST_CASE("what rounding to fp8 lost is memory of the plan, and none without feedback", "[sharding][fp8]") {
  const int n = test_world().size();
  for (const std::string strategy : {"ddp", "optim"})
    for (const bool feedback : {false, true}) {
      const Rank rank({.strategy = strategy, .wire = "fp8", .feedback = feedback});
      for (const plan::ParamGroup& g : rank.plan().groups) {
        const auto bytes = [&](memory::BufferId id) {
          return id < 0 ? 0 : rank.plan().memory.buffers()[id].bytes;
        };
        const bool kept = feedback && n > 1;
        REQUIRE(bytes(g.errors) == (kept ? 4 * g.layout.total() : 0));
        REQUIRE(bytes(g.sum_errors) == (kept && strategy == "ddp" ? 4 * g.layout.shard_total() : 0));
        REQUIRE((bytes(g.staging) > 0) == (n > 1));
      }
    }
}

TEST_CASE("a skipped step leaves nothing of its gradients to the next ones", "[sharding][fp8]") {
  if (test_world().size() == 1) return;
  for (const char* strategy : {"ddp", "optim"})
    // The second one is finite, but infinite when it is rounded, and what that loses is -inf.
    for (const float planted : {NAN, 3.4028e38f}) {
      CAPTURE(strategy, planted);
      const Setup setup{.strategy = strategy, .overlap_reduce = false, .wire = "fp8"};
      Rank spoiled(setup), good(setup);
      spoiled.plant(planted);
      Trained first, got, want;
      spoiled.train(0, 1, first);
      REQUIRE(!std::isfinite(first.norms[0]));
      spoiled.plant({});
      spoiled.train(1, 1 + steps, got);
      good.train(1, 1 + steps, want);
      CHECK(got.losses == want.losses);
      CHECK(got.norms == want.norms);
      CHECK(difference(got.numbers, want.numbers) == 0);
    }
}

TEST_CASE("strategies compute the same on a device", "[sharding][device]") {
  const Trained ddp = run({.microbatches = 2, .device = "cuda"});
  for (Setup s : strategies()) {
    s.microbatches = 2;
    s.device = "cuda";
    s.overlap_gather = true;
    CAPTURE(s.strategy, s.replicas);
    const Trained got = run(s);
    REQUIRE(difference(got.losses, ddp.losses) < 1e-6);
    REQUIRE(difference(got.norms, ddp.norms) < 1e-6);
    REQUIRE(difference(got.numbers, ddp.numbers) < 1e-5);
  }
}

TEST_CASE("the bytes of a step are those of the strategy", "[sharding]") {
  const int n = test_world().size();
  if (n == 1) return;
  const auto sent = [&](const Setup& s) {
    double bytes = -2.0 * (n - 1) / n * 8 * int{ops::StepScalar::sums};  // the step's scalars
    for (const auto& [key, total] : run(s).bytes) {
      const double share = static_cast<double>(n - 1) / n * static_cast<double>(total);
      if (key.second == comm::Op::all_reduce) bytes += 2 * share;
      if (key.second == comm::Op::reduce_scatter || key.second == comm::Op::all_gather) bytes += share;
    }
    return bytes;
  };
  const Setup fsdp{.strategy = "optim_grads_params"};
  const Rank sharded(fsdp), whole({});
  const plan::ParamGroup &layers = sharded.plan().groups[0], &all = whole.plan().groups[0];
  const double share = static_cast<double>(n - 1) / n * 4;
  const double ddp = sent({});
  REQUIRE(ddp == Approx(2 * share * static_cast<double>(all.layout.total())));
  REQUIRE(sent({.strategy = "optim"}) == ddp);
  // The layouts of sharded gradients have other padding.
  const double once = share * static_cast<double>(layers.layout.total());
  REQUIRE(sent({.strategy = "optim_grads"}) == Approx(2 * once));
  REQUIRE(sent({.strategy = "optim_grads", .microbatches = 3}) == Approx(4 * once));
  // Every block is gathered for its forward and for its backward pass; so is the tied embedding, for the
  // first layer and the head. The final norm is there from the head's forward to its backward pass.
  double final_norm = 0;
  for (const parallel::Bucket& b : layers.layout.buckets())
    if (layers.layout.params()[b.params.front()].name.starts_with("final_norm"))
      final_norm += share * static_cast<double>(b.size);
  REQUIRE(final_norm > 0);
  for (const int microbatches : {1, 3})
    for (const bool overlap : {false, true}) {
      CAPTURE(microbatches, overlap);
      REQUIRE(
          sent({.strategy = "optim_grads_params", .overlap_gather = overlap, .microbatches = microbatches}) ==
          Approx(microbatches * (3 * once - final_norm)));
    }
}

TEST_CASE("a checkpoint of one strategy is the state of every other one", "[sharding]") {
  comm::World& world = test_world();
  std::vector<Setup> all = strategies();
  all.push_back({});
  const SharedDirectory shared(world.comm());
  const std::string& dir = shared.path;
  for (const std::string precision : {"float32", "bfloat16"})
    for (size_t i = 0; i < all.size(); ++i) {
      Setup saved = all[i];
      saved.precision = precision;
      Trained before;
      Rank rank(saved);
      rank.train(0, 2, before);
      const std::string store = fmt::format("{}/{}{}", dir, precision, i);
      train::SaveOptions options;
      options.store = store;
      options.resolved_config = "a: b\n";
      options.run = JsonValue::object({});
      const std::string path =
          train::save_checkpoint(train::state_of(rank.engine(), nullptr),
                                 {.step = 2, .updates = 2, .consumed_samples = 8, .tokens = 64}, options,
                                 train::rank_group(world.comm()));
      REQUIRE(validate_checkpoint(path, Validation::full).empty());
      // Read back as every rank's state of ddp, of the next strategy, and of its own.
      Numbers whole;
      for (Setup loaded : {Setup{}, all[(i + 1) % all.size()], all[i]}) {
        loaded.precision = precision;
        CAPTURE(precision, saved.strategy, saved.replicas, loaded.strategy, loaded.replicas);
        Rank other(loaded);
        CheckpointReader reader(path);
        train::load_checkpoint(reader, train::state_of(other.engine(), nullptr));
        const Numbers got = other.numbers();
        if (whole.empty()) whole = got;
        REQUIRE(difference(before.numbers, whole) == 0);
        REQUIRE(difference(got, whole) == 0);
      }
      world.comm().barrier();
    }
}

TEST_CASE("a run with gradients in fp8 resumes with what they lost", "[sharding][fp8]") {
  comm::World& world = test_world();
  if (world.size() == 1) return;
  const SharedDirectory shared(world.comm());
  const std::string& dir = shared.path;
  for (const std::string strategy : {"ddp", "optim"}) {
    const Setup setup{.strategy = strategy, .wire = "fp8"};
    Trained whole, first;
    Rank one(setup);
    one.train(0, 2, first);
    train::SaveOptions options;
    options.store = dir + "/" + strategy;
    options.resolved_config = "a: b\n";
    options.run = JsonValue::object({});
    const std::string path =
        train::save_checkpoint(train::state_of(one.engine(), nullptr),
                               {.step = 2, .updates = 2, .consumed_samples = 8, .tokens = 64}, options,
                               train::rank_group(world.comm()));
    REQUIRE(validate_checkpoint(path, Validation::full).empty());
    one.train(2, 4, whole);
    const auto resumed = [&](const Setup& s) {
      Rank next(s);
      CheckpointReader reader(path);
      train::load_checkpoint(reader, train::state_of(next.engine(), nullptr));
      next.engine().restore({.updates = 2});
      Trained out;
      next.train(2, 4, out);
      return out;
    };
    const Trained same = resumed(setup);
    REQUIRE(same.losses == whole.losses);
    REQUIRE(same.norms == whole.norms);
    REQUIRE(difference(same.numbers, whole.numbers) == 0);
    // Other settings read the rest.
    REQUIRE(resumed({.strategy = strategy}).norms != whole.norms);
    Setup other = setup;
    other.strategy = strategy == "ddp" ? "optim" : "ddp";
    REQUIRE(resumed(other).norms.size() == whole.norms.size());
    world.comm().barrier();
  }
}

namespace {

/// What a process holds of its system and of MPI.
struct Holdings {
  comm::MpiObjects mpi;
  int64_t files = 0, threads = 0;
  bool operator==(const Holdings&) const = default;

  static Holdings now() {
    const auto entries = [](const char* directory) {
      return std::distance(std::filesystem::directory_iterator(directory),
                           std::filesystem::directory_iterator());
    };
    return {comm::live_mpi_objects(), entries("/proc/self/fd"), entries("/proc/self/task")};
  }
};

}  // namespace

TEST_CASE("engines and their groups leave nothing behind", "[sharding][leaks]") {
  comm::World& world = test_world();
  const std::string tp = "distributed.tensor_parallel_size=2", cp = "distributed.context_parallel_size=2",
                    pp = "distributed.pipeline_parallel_size=2";
  std::vector<Setup> all = {{}, {.strategy = "optim", .wire = "fp8"}, {.strategy = "optim_grads_params"}};
  if (world.size() > 1)
    for (const std::vector<std::string>& layout :
         std::vector<std::vector<std::string>>{{tp}, {cp}, {cp, "distributed.cp_comm_type=a2a"}, {pp}})
      all.push_back({.strategy = "optim", .layout = layout});
  if (world.size() == 4)
    for (const std::vector<std::string>& layout :
         std::vector<std::vector<std::string>>{{tp, cp}, {tp, pp}, {cp, pp}})
      all.push_back({.layout = layout});
  if (world.size() == 4) all.push_back({.strategy = "hsdp", .replicas = 2});
  const auto round = [&] {
    for (const Setup& setup : all) {
      Rank rank(setup);
      rank.step();
    }
  };
  round();  // what is made once: threads, tables
  world.comm().barrier();
  const Holdings before = Holdings::now();
  if (world.size() > 1) REQUIRE(before.mpi.communicators > 0);
  REQUIRE(before.mpi.requests == 0);
  {
    const Rank rank(all.back());
    if (world.size() > 1) REQUIRE(comm::live_mpi_objects().communicators > before.mpi.communicators);
  }
  for (int i = 0; i < 12; ++i) {
    round();
    world.comm().barrier();
    const Holdings now = Holdings::now();
    CAPTURE(i, now.mpi.communicators, now.mpi.windows, now.mpi.requests, now.files, now.threads, before.files,
            before.threads);
    REQUIRE(now == before);
  }
}

TEST_CASE("sharded weights are not there between the passes", "[sharding]") {
  if (test_world().size() == 1) return;
  Rank rank({.strategy = "optim_grads_params"});
  REQUIRE_THROWS_AS(rank.engine().weights(), Error);
}
