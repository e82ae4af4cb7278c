// Libraries of attention and of GEMMs, on the simulated device: their plans are those of the dry run of a
// step.

#include <map>
#include <set>

#include "core/ops/attention_engine.h"
#include "core/ops/gemm/engine.h"
#include "tests/engine/training.h"
#include "tests/sim/ops.h"

using namespace nrl;
using namespace nrl::test;
using ops::attention::Direction;
using ops::attention::Problem;
using ops::attention::problem_of;

namespace {

/// Runs every problem on our own kernels, and remembers for which it was asked and which it ran.
class FakeLibrary final : public ops::attention::Engine {
 public:
  std::string name() const override { return "a library"; }
  const std::string& no_plan_reason(const Problem& p, size_t workspace) override {
    ++plans_[{p, workspace}];
    return none_;
  }
  void forward(ops::Exec& exec, const ops::AttentionForward& a) override {
    ran(problem_of(a));
    own_kernels(exec, [&](ops::Exec& own) { ops::sim_kernels().attention_forward(own, a); });
  }
  void backward(ops::Exec& exec, const ops::AttentionBackward& a) override {
    ran(problem_of(a));
    own_kernels(exec, [&](ops::Exec& own) { ops::sim_kernels().attention_backward(own, a); });
  }
  std::string not_capturable_reason(const Problem& p) const override {
    return p.direction == Direction::backward ? obstacle : "";
  }
  size_t plans() const { return plans_.size(); }
  int runs(Direction direction) const { return runs_[static_cast<size_t>(direction)]; }

  std::string obstacle;

 private:
  void ran(const Problem& p) { ++runs_[static_cast<size_t>(p.direction)]; }
  template <class Call>
  static void own_kernels(const ops::Exec& exec, const Call& call) {
    ops::Libraries none = *exec.libraries;
    none.attention = nullptr;
    ops::Exec own = exec;
    own.libraries = &none;
    call(own);
  }
  std::map<std::pair<Problem, size_t>, int> plans_;
  int runs_[2] = {};
  const std::string none_;
};

/// Remembers the GEMMs that it was asked about, and counts the runs of others.
class CountingGemms final : public ops::gemm::Engine {
 public:
  explicit CountingGemms(std::shared_ptr<ops::gemm::Engine> engine) : engine_(std::move(engine)) {}
  bool supports(const ops::gemm::GemmPlan& plan) override {
    known_.insert(plan.key());
    return !lacks_all && engine_->supports(plan);
  }
  void run(const ops::gemm::GemmPlan& plan, const ops::gemm::GemmOperands& operands, ops::Workspace workspace,
           device::StreamHandle stream) override {
    ++runs;
    if (!known_.contains(plan.key())) unknown.insert(plan.key());
    engine_->run(plan, operands, workspace, stream);
  }

  int runs = 0;
  bool lacks_all = false;
  std::set<std::string> unknown;

 private:
  std::shared_ptr<ops::gemm::Engine> engine_;
  std::set<std::string> known_;
};

struct Training {
  ConfigResult config;
  std::unique_ptr<comm::World> world = comm::World::init();
  train::Placement placement{*world, config};
  std::shared_ptr<FakeLibrary> library = std::make_shared<FakeLibrary>();
  std::unique_ptr<engine::Engine> engine;
  engine::LanguageModeling objective;

  Training(const std::string& model, std::vector<std::string> overrides) {
    overrides.push_back("policy.precision=bfloat16");
    config = tiny_config("cuda", overrides, model);
    placement.exec().libraries->attention = library;
    engine = make_engine(placement, config);
  }
  double step(int64_t number) {
    const BatchPlan& batch = engine->plan().batch;
    for (int64_t m = 0; m < batch.accumulation; ++m)
      engine->fill(m, random_batch(2 * T, static_cast<uint64_t>(m)), m * batch.micro);
    engine->step({.number = number, .learning_rate = 1e-2, .loss_tokens = batch.tokens_per_step}, objective);
    return engine->collect().metrics[0];
  }
};

struct Model {
  const char *name, *text;
};
const Model models[] = {
    {"gpt2",
     "{model_type: gpt2, vocab_size: 61, n_embd: 16, n_layer: 2, n_head: 2, n_positions: 64, attn_pdrop: 0, "
     "resid_pdrop: 0, embd_pdrop: 0}"},
    {"llama", tiny_llama},
    {"mistral",
     "{model_type: mistral, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
     "num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 64, sliding_window: 4}"},
    {"qwen3",
     "{model_type: qwen3, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
     "num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8, max_position_embeddings: 64}"}};

/// What the check of the kernels before the first step says; "" if it finds nothing.
std::string refusal_of(Training& t) {
  try {
    t.engine->require_kernels(t.objective, "the GPU");
  } catch (const Error& e) {
    CHECK(e.code() == Exit::unavailable);
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a step asks an attention library for no plan that its dry run has not made", "[engine]") {
  for (const Model& model : models)
    for (const char* recompute : {"auto", "[]"}) {
      CAPTURE(model.name, recompute);
      Training t(model.text, {fmt::format("policy.recompute.modules={}", recompute)});
      t.engine->require_kernels(t.objective, "the GPU");
      CHECK(t.library->plans() == 2);  // all blocks have the same problems
      CHECK(t.library->runs(Direction::forward) == 0);
      const auto choices = t.placement.exec().libraries->choices;
      CHECK(std::count(choices.begin(), choices.end(),
                       ops::LibraryChoice{"attention", "forward", "a library"}) == 1);
      CHECK(std::count(choices.begin(), choices.end(),
                       ops::LibraryChoice{"attention", "backward", "a library"}) == 1);
      t.step(1);
      t.step(2);
      CHECK(t.library->plans() == 2);
      CHECK(t.library->runs(Direction::forward) >= 2 * 2);
      CHECK(t.library->runs(Direction::backward) >= 2 * 2);
      CHECK(t.placement.exec().libraries->choices == choices);  // the banner had them all
    }
}

TEST_CASE("a step runs no GEMM whose algorithm the dry run has not chosen", "[engine]") {
  for (const Model& model : models)
    for (const char* batch : {"4", "2"}) {  // with two microbatches, weight gradients also accumulate
      CAPTURE(model.name, batch);
      Training t(model.text, {fmt::format("policy.train_global_batch_size={}", batch)});
      auto& gemm = t.placement.exec().libraries->gemm;
      const auto counting = std::make_shared<CountingGemms>(gemm);
      gemm = counting;
      t.engine->require_kernels(t.objective, "the GPU");
      CHECK(counting->runs == 0);
      t.step(1);
      CHECK(counting->runs > 0);
      CHECK(counting->unknown == std::set<std::string>());
    }
}

TEST_CASE("GEMMs for which the library has no algorithm are refused before the first step", "[engine]") {
  Training t(tiny_llama, {});
  auto& gemm = t.placement.exec().libraries->gemm;
  const auto none = std::make_shared<CountingGemms>(gemm);
  none->lacks_all = true;
  gemm = none;
  CHECK(refusal_of(t).starts_with("this GPU's cuBLASLt has no GEMM "));
}

TEST_CASE("the dry run notes whether GELU is fused into the GEMM", "[engine]") {
  Training t(models[0].text, {});
  t.engine->require_kernels(t.objective, "the GPU");
  const auto& choices = t.placement.exec().libraries->choices;
  for (const char* pass : {"forward", "backward"})
    CHECK(std::count(choices.begin(), choices.end(),
                     ops::LibraryChoice{"gelu", pass, "fused into the GEMM"}) == 1);
}

TEST_CASE("a step that a library cannot capture is refused with policy.cuda_graph only", "[engine]") {
  for (const bool graph : {false, true})
    for (const std::string obstacle : {"", "it reads host memory"}) {
      CAPTURE(graph, obstacle);
      Training t(tiny_llama, {fmt::format("policy.cuda_graph={}", graph)});
      t.library->obstacle = obstacle;
      CHECK(refusal_of(t) ==
            (graph && !obstacle.empty()
                 ? "policy.cuda_graph: a step of this model cannot be captured: it reads host memory. "
                   "Fix: policy.cuda_graph: false"
                 : ""));
    }
}
