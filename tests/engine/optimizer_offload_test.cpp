// Offloaded optimizer state changes no bit of losses, weights and state: all formats and shares, on the CPU
// and on a GPU's code; skipped steps, graphs and checkpoints. tests/layouts combines it with every layout.
#include <algorithm>
#include <limits>

#include "apps/state/checkpoint.h"
#include "apps/state/rank_group.h"
#include "apps/state/run_state.h"
#include "parallel/comm/mpi/mpi_session.h"
#include "tests/comm/shared_directory.h"
#include "tests/comm/world_fixture.h"
#include "tests/engine/training.h"

using namespace nrl;
using namespace nrl::test;

namespace {

using Overrides = std::vector<std::string>;

Overrides operator+(Overrides a, const Overrides& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const std::string biased_llama =
    "{model_type: llama, vocab_size: 61, hidden_size: 32, intermediate_size: 44, num_hidden_layers: 2,\n"
    "          num_attention_heads: 2, max_position_embeddings: 64, attention_bias: true}";
const std::string experts =
    "{model_type: qwen3_moe, vocab_size: 61, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,\n"
    "          num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16, max_position_embeddings: 64,\n"
    "          num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 24, norm_topk_prob: true}";

/// An engine on all ranks of the test.
class Rank {
 public:
  Rank(const std::string& device, const Overrides& overrides, const std::string& model = biased_llama)
      : config_(tiny_config(device,
                            Overrides{"policy.train_micro_batch_size=1",
                                      fmt::format("policy.train_global_batch_size={}", test_world().size()),
                                      // Layers of several buckets, so that there are many updates.
                                      "distributed.bucket_size_mb=0.02", "policy.max_grad_norm=0.5",
                                      fmt::format("kernels.share_device={}", device == "cuda")} +
                                overrides,
                            model)),
        placement_(test_world(), config_) {
    const Config& c = config_.config;
    engine_ = std::make_unique<engine::Engine>(
        plan::make_run_plan(c, train::load_model_spec(config_), resolve_batch(c, test_world().size()),
                            placement_.grid_position(), placement_.device(), 2),
        engine::training_options(c), placement_.groups(), placement_.exec());
    monitor::StartPhases phases;
    train::load_initial_weights(c, *engine_, train::verify_none, 1, phases);
    engine_->require_kernels(objective_, "the device");
  }

  /// Steps [from, to); `poisoned`: one in which a gradient of the first rank is infinite.
  void train(int64_t from, int64_t to, int64_t poisoned = -1) {
    const int rank = test_world().rank(), ranks = test_world().size();
    for (int64_t number = from; number < to; ++number) {
      engine_->fill(0, random_batch(T, static_cast<uint64_t>(100 * number + rank)), rank);
      engine::StepInput input{.number = number, .learning_rate = 1e-2, .loss_tokens = T * ranks};
      if (number == poisoned)
        input.gradients_reduced = [&] {
          const float infinity = std::numeric_limits<float>::infinity();
          const engine::GroupTensors& t = engine_->groups().front();
          if (rank == 0)
            ops::upload(engine_->exec(), t.gradients.rows(t.group->owned.at(0).gradient, 1), &infinity);
        };
      engine_->step(input, objective_);
      const engine::StepResult result = engine_->collect();
      REQUIRE(result.skipped == (number == poisoned));
      numbers.insert(numbers.end(), {result.metrics[0], result.grad_norm});
    }
  }

  /// Every bit of weights and state on this rank: the offloaded part precedes the other.
  std::vector<std::vector<char>> bits() {
    engine_->finish_gathers();
    std::vector<std::vector<char>> out;
    for (const engine::GroupTensors& t : engine_->groups()) {
      out.push_back(bytes_of(*engine_, t.weights));
      for (size_t k = 0; k < t.state.size(); ++k)
        for (const bool scales : {false, true}) {
          const auto& offloaded = scales ? t.offloaded_scales : t.offloaded;
          const Tensor& resident = (scales ? t.scales : t.state)[k];
          std::vector<char>& bytes = out.emplace_back();
          if (!offloaded.empty() && offloaded[k]) bytes = bytes_of(*engine_, offloaded[k], true);
          if (!resident || resident.numel() == 0) continue;
          const std::vector<char> rest = bytes_of(*engine_, resident);
          bytes.insert(bytes.end(), rest.begin(), rest.end());
        }
    }
    return out;
  }

  std::string save(const std::string& store) {
    train::SaveOptions options;
    options.store = store;
    options.resolved_config = "a: b\n";
    options.run = JsonValue::object({});
    std::string path;
    train::with_state(*engine_, [&](const train::TrainState& state) {
      path = train::save_checkpoint(state, {.step = 2, .updates = 2, .consumed_samples = 8, .tokens = 64},
                                    options, train::rank_group(test_world().comm()));
    });
    return path;
  }
  void load(const std::string& path) {
    CheckpointReader reader(path);
    train::with_state(*engine_,
                      [&](const train::TrainState& state) { train::load_checkpoint(reader, state); });
    engine_->restore({.updates = 2});
  }

  int64_t offloaded_bytes() const { return engine_->plan().memory.bytes(memory::Tier::host); }
  int64_t optimizer_bytes() const { return engine_->plan().memory.bytes(memory::Category::optimizer); }

  std::vector<double> numbers;  ///< loss and gradient norm by step

 private:
  ConfigResult config_;
  train::Placement placement_;
  engine::LanguageModeling objective_;
  std::unique_ptr<engine::Engine> engine_;
};

/// The first difference, for messages: matchers would print all bytes.
std::string difference(const std::vector<std::vector<char>>& got,
                       const std::vector<std::vector<char>>& want) {
  if (got.size() != want.size()) return fmt::format("{} tensors, wanted {}", got.size(), want.size());
  for (size_t t = 0; t < got.size(); ++t) {
    if (got[t].size() != want[t].size())
      return fmt::format("tensor {}: {} bytes, wanted {}", t, got[t].size(), want[t].size());
    const auto [a, b] = std::mismatch(got[t].begin(), got[t].end(), want[t].begin());
    if (a != got[t].end())
      return fmt::format("tensor {}, byte {} of {}", t, a - got[t].begin(), got[t].size());
  }
  return "";
}

const Overrides half{"policy.offload_optimizer=0.5"}, all{"policy.offload_optimizer=true"};

/// Trains with and without, and compares everything.
void require_same(const std::string& device, const Overrides& overrides,
                  const std::string& model = biased_llama, int64_t poisoned = -1) {
  CAPTURE(device, overrides, model, poisoned);
  Rank without(device, overrides, model);
  without.train(1, 5, poisoned);
  REQUIRE(without.offloaded_bytes() == 0);
  const std::vector<std::vector<char>> want = without.bits();
  for (const Overrides& share : {half, all}) {
    CAPTURE(share);
    Rank offloaded(device, overrides + share, model);
    offloaded.train(1, 5, poisoned);
    REQUIRE(offloaded.numbers == without.numbers);
    REQUIRE(difference(offloaded.bits(), want) == "");
    // What is offloaded is no longer in the memory of the device.
    REQUIRE(offloaded.offloaded_bytes() > 0);
    REQUIRE((share == all) == (offloaded.optimizer_bytes() == 0));
    const int64_t sum = offloaded.offloaded_bytes() + offloaded.optimizer_bytes();
    REQUIRE(std::abs(sum - without.optimizer_bytes()) <= 12 * memory::MemoryPlan::alignment);
  }
}

const Overrides bf16_remainders{"policy.precision=bfloat16",
                                "policy.optimizer.use_precision_aware_optimizer=true",
                                "policy.optimizer.store_param_remainders=true"};

}  // namespace

TEST_CASE("offloaded state changes no bit in any format", "[offload]") {
  for (const std::string device : {"cpu", "cuda"})
    for (const std::string strategy : {"ddp", "optim_grads"}) {
      const Overrides sharding{"distributed.shard_strategy=" + strategy};
      require_same(device, sharding + Overrides{"policy.precision=bfloat16"});
      require_same(device, sharding + bf16_remainders);
      for (const std::string moments : {"bf16", "fp16", "fp8"})
        require_same(device, sharding + bf16_remainders +
                                 Overrides{"policy.optimizer.exp_avg_dtype=" + moments,
                                           "policy.optimizer.exp_avg_sq_dtype=" + moments});
    }
}

TEST_CASE("a skipped step leaves offloaded state and its weights as they are", "[offload]") {
  for (const std::string device : {"cpu", "cuda"})
    for (const Overrides& precision :
         {Overrides{}, Overrides{"policy.precision=bfloat16"}, bf16_remainders}) {
      require_same(device, precision, biased_llama, 3);
      require_same(device, precision + Overrides{"policy.loss_scaling=dynamic"}, biased_llama, 3);
    }
}

TEST_CASE("offloading goes with experts and with gathers that overlap", "[offload]") {
  require_same("cuda", {}, experts);
  require_same("cuda", {"distributed.shard_strategy=optim_grads", "distributed.overlap_param_gather=true"});
}

TEST_CASE("an offloaded update is captured in a graph", "[offload]") {
  if (test_world().size() > 1) return;  // messages between the ranks of one device cannot be captured
  require_same("cuda", {"policy.cuda_graph=true"});
}

TEST_CASE("a run resumes with another share of offloaded state", "[offload]") {
  const SharedDirectory shared(test_world().comm());
  int n = 0;
  for (const std::string device : {"cpu", "cuda"})
    for (const Overrides& formats : {Overrides{}, Overrides{"policy.precision=bfloat16"}, bf16_remainders,
                                     bf16_remainders + Overrides{"policy.optimizer.exp_avg_dtype=fp8",
                                                                 "policy.optimizer.exp_avg_sq_dtype=fp16"}}) {
      const bool scaled = formats.size() > bf16_remainders.size();
      const Overrides common = formats + Overrides{"distributed.shard_strategy=optim"};
      Rank whole(device, common);
      whole.train(1, 3);
      const auto before = whole.bits();
      whole.train(3, 5);
      for (const Overrides& saved : {Overrides{}, half, all})
        for (const Overrides& loaded : {Overrides{}, half, all}) {
          if (saved == loaded && saved != half) continue;
          CAPTURE(device, formats, saved, loaded);
          Rank first(device, common + saved);
          first.train(1, 3);
          const std::string path = first.save(fmt::format("{}/{}", shared.path, n++));
          REQUIRE(validate_checkpoint(path, Validation::full).empty());
          Rank second(device, common + loaded);
          second.load(path);
          // Of the same numbers: blocks that share a scale may have another one than before.
          Rank plain(device, common);
          plain.load(path);
          REQUIRE(difference(second.bits(), plain.bits()) == "");
          if (!scaled) REQUIRE(difference(second.bits(), before) == "");
          second.train(3, 5);
          REQUIRE(difference(second.bits(), whole.bits()) == "");
          REQUIRE(second.numbers == std::vector<double>(whole.numbers.begin() + 4, whole.numbers.end()));
          test_world().comm().barrier();
        }
    }
}
