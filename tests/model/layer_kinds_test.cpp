// Layers that only this test has: another kind of layer between the blocks of a model, a recompute rule, and
// layers that are wrong.
#include <cmath>
#include <cstring>
#include <random>

#include "apps/model/linear/pre_norm.h"
#include "apps/model/program/stage.h"
#include "core/ops/dry_run.h"
#include "core/ops/kernel_table.h"
#include "core/ops/shared/scratch.h"
#include "tests/catch.h"
#include "tests/model/poison.h"
#include "tests/model/tiny_model.h"
#include "tests/ops/reference/table.h"

using namespace nrl;
using namespace nrl::model;

namespace {

constexpr int64_t narrow = 6;
constexpr int microbatches = 4, blocks = 3;

const char* const config =
    R"({"model_type":"llama","vocab_size":67,"hidden_size":16,"intermediate_size":24,"num_hidden_layers":3,
        "num_attention_heads":2,"num_key_value_heads":1,"max_position_embeddings":64})";

/// An op with scratch memory that only this test has: out = x in reverse order of columns, through a copy of
/// x.
struct Reverse {
  Tensor x, out;  ///< (N, D) f32 or bf16, which may be the same memory
};
size_t reverse_workspace(const Tensor& x) {
  return ops::scratch_bytes(x.bytes(), 1) * 1000 + ops::scratch_alignment;  // more than all others
}
void reverse(ops::Exec& exec, const Reverse& a) {
  if (exec.needed) return ops::note_scratch(exec, reverse_workspace(a.x));
  ops::Scratch scratch("reverse", exec.workspace);
  std::byte* const copy = scratch.bytes(reverse_workspace(a.x) - ops::scratch_alignment);
  const auto bytes = static_cast<size_t>(a.x.bytes()), element = static_cast<size_t>(size_of(a.x.dtype)),
             width = static_cast<size_t>(a.x.dim(1)) * element;
  std::memcpy(copy, a.x.data, bytes);
  auto* const out = static_cast<std::byte*>(a.out.data);
  for (size_t row = 0; row < bytes; row += width)
    for (size_t i = 0; i < width; i += element)
      std::memcpy(out + row + width - element - i, copy + row + i, element);
}

/// A bottleneck adapter (Houlsby et al. 2019) with its norm: out = up(gelu(down(norm(x + residual)))).
class Adapter : public Layer {
 public:
  struct Parameters {
    int norm, down, up;
  };
  Adapter(const LayerContext& c, const Parameters& p, DType dtype) : Layer("adapter", c), p_(p) {
    const int64_t h = c.spec->hidden;
    ports_.x = slot({.name = "x", .width = h, .dtype = dtype, .port = true});
    ports_.residual = slot({.name = "residual in", .width = h, .dtype = dtype, .port = true});
    ports_.d_out = slot({.name = "d_out", .width = h, .dtype = dtype, .port = true});
    const precision::Recipe recipe = precision::recipe_for_weights(dtype);
    norm_.emplace(builder(recipe),
                  Stream{.x = ports_.x, .residual = ports_.residual, .layer = 0, .site = DropoutSite::mlp},
                  p.norm, -1);
    ports_.sum = norm_->sum;
    down_ = slot({.name = "down", .width = narrow, .dtype = dtype, .rules = "adapter"});
    act_ = slot({.name = "activation", .width = narrow, .dtype = dtype, .rules = "activation adapter"});
    ports_.out = slot({.name = "up", .width = h, .dtype = dtype});
    d_act_ = slot({.name = "d_activation", .width = narrow, .dtype = dtype});
    d_down_ = slot({.name = "d_down", .width = narrow, .dtype = dtype});
    d_norm_ = slot({.name = "d_norm", .width = h, .dtype = dtype});
    ports_.d_x = slot({.name = "d_x", .width = h, .dtype = dtype});
    describe();
  }

  void forward(Run& r) override {
    norm_->forward(r);
    r.step("down", reads(norm_->out), writes(down_), [&] {
      ops::linear_forward(r.exec(), {.x = r[norm_->out], .weight = r.weight(p_.down), .out = r[down_]});
    });
    r.step("activation", reads(down_), writes(act_), [&] {
      ops::activation_forward(r.exec(), {.kind = ops::Activation::gelu_tanh, .x = r[down_], .out = r[act_]});
      for (int twice = 0; twice < 2; ++twice) reverse(r.exec(), {r[act_], r[act_]});
    });
    r.step("up", reads(act_), writes(ports_.out), [&] {
      ops::linear_forward(r.exec(), {.x = r[act_], .weight = r.weight(p_.up), .out = r[ports_.out]});
      r.all_reduce(r[ports_.out], parallel::group::all);  // nothing without groups
    });
  }

  void backward(Run& r) override {
    r.dgrad("up", reads(ports_.d_out), writes(d_act_), [&] {
      ops::linear_backward_data(r.exec(),
                                {.dout = r[ports_.d_out], .weight = r.weight(p_.up), .dx = r[d_act_]});
    });
    r.wgrad("up", reads(ports_.d_out, act_), [&] {
      ops::linear_backward_weight(r.exec(),
                                  {.dout = r[ports_.d_out], .x = r[act_], .dweight = r.grad(p_.up)});
    });
    r.dgrad("activation", reads(d_act_, down_), writes(over(d_down_, down_)), [&] {
      ops::activation_backward(
          r.exec(), {.kind = ops::Activation::gelu_tanh, .dout = r[d_act_], .x = r[down_], .dx = r[d_down_]});
    });
    r.dgrad("down", reads(d_down_), writes(d_norm_), [&] {
      ops::linear_backward_data(r.exec(),
                                {.dout = r[d_down_], .weight = r.weight(p_.down), .dx = r[d_norm_]});
    });
    r.wgrad("down", reads(d_down_, norm_->out), [&] {
      ops::linear_backward_weight(r.exec(),
                                  {.dout = r[d_down_], .x = r[norm_->out], .dweight = r.grad(p_.down)});
    });
    norm_->backward(r, d_norm_, ports_.d_out, {ports_.d_x});
  }

 private:
  Parameters p_;
  std::optional<PreNorm> norm_;
  Slot down_, act_, d_act_, d_down_, d_norm_;
};

/// Its second step reads a slot and does not say so.
class Forgetful : public Layer {
 public:
  explicit Forgetful(const LayerContext& c) : Layer("forgetful", c) {
    made_ = slot({.name = "made", .width = 4});
    ports_.out = slot({.name = "out", .width = 4});
    describe();
  }
  void forward(Run& r) override {
    r.step("make", reads(), writes(made_), [&] { r[made_].ptr<float>()[0] = 1; });
    r.step("peek", reads(), writes(ports_.out),
           [&] { r[ports_.out].ptr<float>()[0] = *r[made_].ptr<float>(); });
  }
  void backward(Run&) override {}

 private:
  Slot made_;
};

/// A model with an adapter behind each block.
class AdaptedModel {
 public:
  AdaptedModel(const ops::KernelTable& kernels, int threads, DType dtype, const RecomputePolicy& policy,
               const pipeline::Schedule& schedule)
      : tiny_(config, kernels, threads, test::TinyOptions{}), schedule_(schedule) {
    exec_ = tiny_.exec_;
    context_.exec = &exec_;
    context_.spec = &tiny_.spec_;
    context_.seed = 5;
    std::vector<Chunk> chunks = decoder_chunks(
        context_, tiny_.parameters_,
        {.recipe = precision::recipe_for_weights(dtype), .head_chunk_tokens = 10, .recompute = policy});
    for (size_t i = 0; i < tiny_.parameters_.all.size(); ++i)
      add(tiny_.weights_[i], tiny_.parameters_.all[i].shape);
    for (int b = 0; b < blocks; ++b) {
      const Adapter::Parameters p{random({16}), random({narrow, 16}), random({16, narrow})};
      auto adapter = std::make_unique<Adapter>(context_, p, dtype);
      adapter->recompute(policy ? policy(blocks + b, adapter->table()) : 0);
      chunks[0].insert(chunks[0].begin() + 2 + 2 * b, std::move(adapter));
    }
    for (size_t i = 0; i < weights_.size(); ++i) {
      low_.emplace_back(weights_[i].begin(), weights_[i].end());
      gradients_.emplace_back(weights_[i].size());
      void* weight = dtype == DType::f32 ? static_cast<void*>(weights_[i].data()) : low_[i].data();
      context_.parameters.push_back(
          {view(weight, dtype, shapes_[i]), view(gradients_[i].data(), DType::f32, shapes_[i])});
    }
    stage_ = std::make_unique<Stage>(
        std::move(chunks),
        std::array<int64_t, row_domains>{test::TinyModel::tokens, test::TinyModel::tokens, 10});
    stage_->add_program(memory::training, schedule, {});
    stage_->declare(plan_);
    const auto log_prob = plan_.add("log-probabilities", memory::Category::data, 4 * test::TinyModel::tokens);
    const auto bind = [&](const memory::Arenas& arenas) {
      context_.head.log_prob = make_tensor(arenas.at(plan_, log_prob), DType::f32, {test::TinyModel::tokens});
      stage_->bind(plan_, arenas);
    };
    rope_ = ops::rope_table(tiny_.spec_.rope(0), 12, 12);
    context_.rope_tables = {make_tensor(rope_.data(), DType::f32, {12, tiny_.spec_.rope(0).rotary_dim})};
    bind(memory::Arenas::nowhere());
    {
      const ops::DryRun dry(exec_);
      const std::vector<MicroBatch> batches = tiny_.batches(microbatches);
      stage_->execute(0, {.batches = batches});
      workspace_ = dry.workspace();
    }
    const auto scratch =
        plan_.add("op workspace", memory::Category::workspace, static_cast<int64_t>(workspace_));
    plan_.solve();
    arenas_ = memory::Arenas(plan_);
    bind(arenas_);
    exec_.workspace = {static_cast<std::byte*>(arenas_.at(plan_, scratch)), workspace_};
  }

  const std::vector<std::vector<float>>& train() { return train(schedule_); }
  /// With another schedule than the one that was planned.
  const std::vector<std::vector<float>>& train(const pipeline::Schedule& schedule) {
    test::Poison poison(plan_, arenas_);
    stage_->watch_ticks([&](int tick) { poison.enter(tick); });
    for (auto& g : gradients_) std::fill(g.begin(), g.end(), 0.0f);
    loss_ = 0;
    const std::vector<MicroBatch> batches = tiny_.batches(microbatches);
    const StepHooks hooks{
        .log_probs_ready = [this](int) { loss_ += tiny_.weighted(context_.head.log_prob); }};
    stage_->execute(0, stage_->lowered(memory::training, schedule, {}),
                    {.batches = batches, .hooks = &hooks});
    return gradients_;
  }
  double loss() const { return loss_; }
  size_t workspace() const { return workspace_; }
  /// Counts what a step of one of several ranks would communicate and which ops it would call.
  ops::KernelSet dry_run(const parallel::Groups& groups, std::vector<ops::Call>& calls) {
    stage_->watch_ticks({});
    context_.groups = &groups;
    const std::vector<MicroBatch> batches = tiny_.batches(microbatches);
    const ops::DryRun dry(exec_, &calls);
    stage_->execute(0, {.batches = batches});
    context_.groups = nullptr;
    return dry.kernels();
  }
  std::vector<std::vector<float>>& weights() { return weights_; }

 private:
  int add(std::vector<float> values, const std::vector<int64_t>& shape) {
    weights_.push_back(std::move(values));
    shapes_.push_back(shape);
    return static_cast<int>(weights_.size()) - 1;
  }
  int random(const std::vector<int64_t>& shape) {
    std::mt19937 generator(static_cast<unsigned>(weights_.size()));
    std::uniform_real_distribution<float> value(-0.3f, 0.5f);
    std::vector<float> values(static_cast<size_t>(shape[0] * (shape.size() > 1 ? shape[1] : 1)));
    for (float& v : values) v = value(generator);
    return add(std::move(values), shape);
  }
  static Tensor view(void* p, DType t, const std::vector<int64_t>& shape) {
    return shape.size() == 1 ? make_tensor(p, t, {shape[0]}) : make_tensor(p, t, {shape[0], shape[1]});
  }

  test::TinyModel tiny_;
  pipeline::Schedule schedule_;
  ops::Exec exec_;
  LayerContext context_;
  std::vector<std::vector<float>> weights_, gradients_;
  std::vector<std::vector<bf16>> low_;
  std::vector<std::vector<int64_t>> shapes_;
  memory::MemoryPlan plan_;
  memory::Arenas arenas_;
  std::unique_ptr<Stage> stage_;
  std::vector<float> rope_;
  size_t workspace_ = 0;
  double loss_ = 0;
};

pipeline::Schedule in_turn() {
  return pipeline::make_schedule({.microbatches = microbatches}, 0);
}

/// Three microbatches in flight, and all weight parts at the end.
pipeline::Schedule deferred() {
  using pipeline::ActionKind;
  std::vector<pipeline::Action> actions;
  for (int m = 0; m < microbatches; ++m) actions.push_back({ActionKind::forward, 0, m});
  for (int m = 0; m < microbatches; ++m) actions.push_back({ActionKind::backward_data, 0, m});
  for (int m = 0; m < microbatches; ++m) actions.push_back({ActionKind::backward_weight, 0, m});
  return pipeline::complete_schedule(actions, {.microbatches = microbatches}, 0);
}

}  // namespace

TEST_CASE("two kinds of layers live in one model", "[model][memory]") {
  const ops::KernelTable& kernels = ops::cpu_kernels(cpu::best_isa());
  for (const DType dtype : {DType::f32, DType::bf16}) {
    AdaptedModel plain(kernels, 1, dtype, {}, in_turn());
    const auto want = plain.train();
    for (const auto& g : want)
      REQUIRE(std::any_of(g.begin(), g.end(), [](float x) { return x != 0 && std::isfinite(x); }));
    std::mt19937 random(7);
    for (int i = 0; i < 20; ++i) {
      INFO("case " << i);
      const RecomputePolicy policy = [&](int, const memory::LayerTable& t) {
        return t.recomputable() & memory::SlotSet(random());
      };
      AdaptedModel other(kernels, 1, dtype, policy, i % 2 ? deferred() : in_turn());
      REQUIRE(other.train() == want);
    }
  }
}

TEST_CASE("gradients of the adapter are the derivatives of the loss", "[model]") {
  AdaptedModel m(ops::reference_kernels(), 1, DType::f32, {}, in_turn());
  const auto gradients = m.train();
  for (size_t p = gradients.size() - 3; p < gradients.size(); ++p) {
    float& w = m.weights()[p][3];
    const float kept = w, h = 1.0f / 256;
    double at[2];
    for (int side = 0; side < 2; ++side) {
      w = side ? kept + h : kept - h;
      m.train();
      at[side] = m.loss();
    }
    w = kept;
    CHECK((at[1] - at[0]) / (2 * static_cast<double>(h)) ==
          Approx(gradients[p][3]).epsilon(0.02).margin(1e-3));
  }
}

TEST_CASE("a dry run counts the communication, kernels and costs of any kind of layer", "[model]") {
  AdaptedModel m(ops::cpu_kernels(cpu::best_isa()), 1, DType::f32, {}, in_turn());
  const auto want = m.train();
  comm::Ledger ledger;
  const std::array ids{parallel::group::all};
  const parallel::Groups groups(parallel::ProcessGrid({}, 4, 1), ids, {}, ledger);
  std::vector<ops::Call> calls;
  const ops::KernelSet kernels = m.dry_run(groups, calls);
  REQUIRE(ledger.sums().size() == 1);
  const comm::Ledger::Sum& sum = ledger.sums().front();
  CHECK(sum.op == comm::Op::all_reduce);
  CHECK(sum.count % microbatches == 0);
  CHECK(sum.count > 0);
  CHECK(sum.bytes == sum.count * test::TinyModel::tokens * 16 * 4);
  CHECK(kernels.contains(ops::Kernel::activation_backward));
  CHECK(std::count_if(calls.begin(), calls.end(), [](const ops::Call& c) {
          return c.cost.flops == ops::linear_flops(test::TinyModel::tokens, narrow, 16);
        }) >= 3 * sum.count);
  CHECK(m.train() == want);  // nothing was computed meanwhile
}

TEST_CASE("an op of any kind of layer gets the workspace that it notes", "[model][memory]") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    AdaptedModel m(ops::cpu_kernels(cpu::best_isa()), 1, dtype, {}, in_turn());
    CHECK(m.workspace() == reverse_workspace(make_tensor(nullptr, dtype, {test::TinyModel::tokens, narrow})));
    m.train();  // fails if an op takes more
  }
}

TEST_CASE("a step that touches a slot which it does not name is stopped", "[model]") {
  ops::Exec exec;
  LayerContext context;
  context.exec = &exec;
  std::vector<Chunk> chunks(1);
  chunks[0].push_back(std::make_unique<Forgetful>(context));
  Stage stage(std::move(chunks), {1, 1});
  memory::MemoryPlan plan;
  std::array<int32_t, 1> id{};
  MicroBatch batch;
  batch.ids = make_tensor(id.data(), DType::i32, {1});
  stage.add_program(memory::evaluation,
                    pipeline::make_schedule({.kind = pipeline::ScheduleKind::forward_only}, 0), {});
  stage.declare(plan);
  plan.solve();
  const memory::Arenas arenas(plan);
  stage.bind(plan, arenas);
  REQUIRE_THROWS_WITH(stage.execute(0, {.batches = {&batch, 1}}),
                      ContainsSubstring("accesses the slot made"));
}

TEST_CASE("a weight part that runs later than planned is noticed", "[model][memory]") {
  const ops::KernelTable& kernels = ops::cpu_kernels(cpu::best_isa());
  AdaptedModel plain(kernels, 1, DType::f32, {}, in_turn());
  AdaptedModel late(kernels, 1, DType::f32, {}, in_turn());
  const auto want = plain.train();
  pipeline::Schedule schedule = in_turn();
  const auto backward = schedule.actions.begin() + 1;
  REQUIRE(backward->kind == pipeline::ActionKind::backward);
  pipeline::Action weight = *backward;
  backward->kind = pipeline::ActionKind::backward_data;
  weight.kind = pipeline::ActionKind::backward_weight;
  schedule.actions.insert(backward + 1, weight);
  CHECK(late.train(schedule) != want);
}
