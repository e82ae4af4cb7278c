#include "apps/model/decoder.h"

#include <algorithm>

#include "apps/model/program/rope_tables.h"
#include "apps/model/spec/rank_groups.h"
#include "core/base/error.h"
#include "core/ops/dry_run.h"
#include "core/ops/optimizer.h"
#include "core/ops/transfer.h"
#include "parallel/pipeline/equivalent.h"
#include "parallel/program/lower.h"

namespace nrl::model {

using memory::Category;

namespace {

// CPU: 512 tokens per chunk, fewer for vocabularies whose logits would be large. The head's weight gradient
// is read and written once per chunk: against 256 tokens a step of GPT-2 124M is 4 % shorter in bf16 and 2 %
// in fp32, for 49 MiB. A GPU needs more rows to occupy its multiprocessors, long sums to hide those reads and
// writes, and has the memory: 8192 tokens at a vocabulary of 128256 in bf16.
struct HeadLimits {
  int64_t tokens, logits_bytes;
  int64_t unit;  ///< chunks are multiples of it, so that GEMM tiles are full
};
constexpr HeadLimits head_limits(DeviceType device) {
  return device == DeviceType::cpu ? HeadLimits{512, int64_t{128} << 20, 1}
                                   : HeadLimits{8192, int64_t{2} << 30, 128};
}

}  // namespace

int64_t head_chunk_tokens(int64_t tokens, int64_t vocab, DType logits, DeviceType device) {
  const HeadLimits limits = head_limits(device);
  int64_t fit = std::clamp<int64_t>(limits.logits_bytes / (vocab * size_of(logits)), 32, limits.tokens);
  if (fit >= tokens) return tokens;
  const int64_t unit = std::min(limits.unit, fit);
  fit = fit / unit * unit;
  // Equal chunks: a GEMM with few rows would be inefficient.
  const int64_t chunks = (tokens + fit - 1) / fit;
  return ((tokens + chunks - 1) / chunks + unit - 1) / unit * unit;
}

Decoder::Decoder(const ModelSpec& spec, const ParameterList& parameters, DecoderOptions options,
                 memory::MemoryPlan& plan)
    : part_(tensor_part(spec, options.layout)), options_(std::move(options)) {
  const std::string unsupported =
      precision::unsupported_reason(options_.recipe, static_cast<int>(spec.layers));
  NRL_CHECK(unsupported.empty(), "recipe: {}", unsupported);
  context_.spec = &part_;
  context_.expert_rounds = &expert_rounds_;
  context_.layout = options_.layout;
  context_.seed = options_.seed;
  context_.sequences = options_.sequences;
  context_.loss = options_.loss;
  for (const Parameter& p : parameters.all) context_.trainable.push_back(p.trainable);
  const int64_t n = options_.tokens, tensor = options_.layout.tensor;
  const int64_t residual = options_.layout.own_tokens(n);
  NRL_CHECK(!options_.layout.sequence_parallel || n % tensor == 0, "{} tokens on {} ranks", n, tensor);
  if (const ModelLayout& l = options_.layout; l.context > 1) {
    const int64_t samples = options_.sequences, length = n * l.context / samples;
    context_.share.emplace(samples, length, l.context, l.context_rank);
    NRL_CHECK(context_.share->rows() == n, "{} tokens of {} samples of {} on {} ranks", n, samples, length,
              l.context);
  }
  // The slices differ by a row at most; the chunks, between which ranks communicate, must not.
  const int64_t vocabulary = (spec.vocab_size + tensor - 1) / tensor;
  const int64_t chunk = options_.head_chunk_tokens > 0
                            ? options_.head_chunk_tokens
                            : head_chunk_tokens(n, vocabulary, options_.recipe.logits(), options_.device);
  const ModelLayout& layout = options_.layout;
  NRL_CHECK(options_.training.actions.empty() || options_.training.stashes.chunks() == layout.chunks,
            "a schedule of {} chunks for {}", options_.training.stashes.chunks(), layout.chunks);
  stage_ = std::make_unique<Stage>(decoder_chunks(context_, parameters,
                                                  {.recipe = options_.recipe,
                                                   .device = options_.device,
                                                   .head_chunk_tokens = chunk,
                                                   .layout = layout,
                                                   .recompute = options_.recompute,
                                                   .offload = options_.offload,
                                                   .fuse_activation = options_.fuse_activation}),
                                   domain_rows(part_, options_.layout, n, residual, chunk, false),
                                   options_.sharded);
  if (!options_.training.actions.empty()) add_training_programs();
  pipeline::ScheduleOptions forward{.kind = pipeline::ScheduleKind::forward_only,
                                    .stages = layout.stages,
                                    .chunks_per_stage = layout.chunks};
  evaluation_ =
      stage_->add_program(memory::evaluation, pipeline::make_schedule(forward, layout.stage), layout);
  if (layout.stages > 1 && options_.evaluated > 1) {
    forward.microbatches = options_.evaluated;
    evaluations_ =
        stage_->add_program(memory::evaluation, pipeline::shortest_equivalent(forward, layout.stage), layout);
  }
  stage_->declare(plan);
  declare_loss(plan);
  buffers_.rope = plan.add("rope table", Category::data, rope_table_bytes(spec, options_.max_sequence));
  head_chunk_ = chunk;
  const bool counts = spec.moe.counts_steps() && !options_.training.actions.empty();
  buffers_.router_counts =
      counts ? plan.add("router counts", Category::data, spec.layers * spec.moe.experts * 4) : -1;
  const bool loads = spec.moe.experts > 0 && !spec.moe.has_aux_loss() && !options_.training.actions.empty();
  buffers_.expert_counts =
      loads ? plan.add("expert counts", Category::data, counted_rows() * spec.moe.experts * 4) : -1;
  for (size_t l = 0; counts && l < parameters.layers.size(); ++l)
    if (const int bias = parameters.layers[l].router_bias; bias >= 0 && !parameters.all[bias].frozen)
      router_biases_.emplace_back(static_cast<int>(l), bias);
  fp8_ = std::make_unique<Fp8State>(part_, options_.layout, options_.recipe, parameters, plan);
  context_.fp8 = fp8_.get();
}

Decoder::~Decoder() = default;

namespace {

/// LayerContext::expert_load that exceeds what the experts of any rank get.
constexpr double most_expert_load = 1e6;

/// The steps of layers for the first microbatch of a program.
program::Program first_microbatch(const program::Program& whole) {
  program::Program out{.mode = whole.mode, .stashes = whole.stashes};
  for (const program::Step& s : whole.steps)
    if ((s.begins_visit() || s.within_visit()) && s.microbatch == 0) out.take(whole, s);
  return out;
}

}  // namespace

size_t Decoder::needed_workspace(ops::Exec& exec, std::vector<ParameterView> views, const MicroBatch& batch,
                                 const parallel::Groups* groups) {
  const ops::DryRun dry(exec);
  const memory::Arenas nowhere = memory::Arenas::nowhere();
  bind({}, nowhere, exec, std::move(views), {}, {}, groups);
  const double load = std::exchange(context_.expert_load, most_expert_load);
  context_.few_rounds = true;
  double metrics[3];
  if (part_.moe.experts > 0) context_.router_metrics = make_tensor(metrics, DType::f64, {3});
  const auto pass = [&](int program) {
    stage_->execute(program, first_microbatch(stage_->program(program)), {.batches = {&batch, 1}});
  };
  if (training_ >= 0) {
    pass(training_);
    add_expert_load();
  }
  pass(evaluation_);
  context_.router_metrics = {};
  context_.expert_load = load;
  context_.few_rounds = false;
  context_.exec = nullptr;
  expert_rounds_ = 1;
  return dry.workspace();
}

void Decoder::add_workspace(memory::MemoryPlan& plan, size_t bytes) {
  workspace_bytes_ = bytes;
  buffers_.workspace = plan.add("op workspace", Category::workspace, static_cast<int64_t>(bytes));
}

void Decoder::bind(const memory::MemoryPlan& plan, const memory::Arenas& arenas, ops::Exec& exec,
                   std::vector<ParameterView> views, std::function<void(int)> gradient_ready,
                   std::function<void(int)> weight_needed, const parallel::Groups* groups) {
  auto at = [&](memory::BufferId id) { return arenas.at(plan, id); };
  NRL_CHECK(exec.needed || buffers_.workspace >= 0, "the plan has no workspace");
  exec.workspace = {};
  if (buffers_.workspace >= 0)
    exec.workspace = {static_cast<std::byte*>(at(buffers_.workspace)), workspace_bytes_};
  context_.exec = &exec;
  context_.groups = groups;
  context_.parameters = std::move(views);
  context_.gradient_ready = std::move(gradient_ready);
  context_.weight_needed = std::move(weight_needed);
  bind_loss(plan, arenas);
  if (buffers_.router_counts >= 0)
    context_.router_counts =
        make_tensor(at(buffers_.router_counts), DType::i32, {part_.layers, part_.moe.experts});
  if (buffers_.expert_counts >= 0)
    context_.expert_counts =
        make_tensor(at(buffers_.expert_counts), DType::i32, {counted_rows(), part_.moe.experts});
  context_.rope_tables = rope_tables_at(part_, options_.max_sequence, at(buffers_.rope));
  // A dry run would spend much of its time on the values.
  if (!exec.needed) fill_rope_tables(exec, part_, context_.rope_tables);
  std::vector<Tensor> weights;
  for (const ParameterView& p : context_.parameters) weights.push_back(p.weight);
  fp8_->bind(plan, arenas, exec, weights);
  stage_->bind(plan, arenas);
}

void Decoder::declare_loss(memory::MemoryPlan& plan) {
  const auto by_row = [&](const char* name) { return plan.add(name, Category::data, options_.tokens * 4); };
  buffers_.log_prob = by_row("log-probabilities");
  const LossNeeds& loss = options_.loss;
  const bool rule = loss.dependence == Dependence::token || loss.dependence == Dependence::sequence;
  const bool scores = part_.head == HeadKind::scalar;
  if ((rule && !scores) || (loss.divergence && loss.divergence->zero_outside))
    buffers_.lse = by_row("log-sum-exp");
  if (loss.entropy) buffers_.entropy = by_row("entropies");
  if (loss.top_k > 0) {
    buffers_.top_ids =
        plan.add("ids of the largest logits", Category::data, options_.tokens * loss.top_k * 4);
    buffers_.top_logits = plan.add("largest logits", Category::data, options_.tokens * loss.top_k * 4);
  }
  if (!rule) return;
  buffers_.weight = by_row("weights of log-probabilities");
  if (loss.entropy) buffers_.entropy_weight = by_row("weights of entropies");
  if (loss.sequence_values > 0)
    buffers_.of_segments = plan.add("sums over sequences", Category::data, 2 * most_segments() * 8);
}

void Decoder::bind_loss(const memory::MemoryPlan& plan, const memory::Arenas& arenas) {
  const auto by_row = [&](memory::BufferId id) {
    return id < 0 ? Tensor{} : make_tensor(arenas.at(plan, id), DType::f32, {options_.tokens});
  };
  context_.lse = by_row(buffers_.lse);
  HeadOutput& head = context_.head;
  head.log_prob = by_row(buffers_.log_prob);
  head.weight = by_row(buffers_.weight);
  head.entropy = by_row(buffers_.entropy);
  head.entropy_weight = by_row(buffers_.entropy_weight);
  if (const int64_t k = options_.loss.top_k; k > 0) {
    head.top_ids = make_tensor(arenas.at(plan, buffers_.top_ids), DType::i32, {options_.tokens, k});
    head.top_logits = make_tensor(arenas.at(plan, buffers_.top_logits), DType::f32, {options_.tokens, k});
  }
  if (buffers_.of_segments >= 0) {
    const int64_t most = most_segments();
    auto* const numbers = static_cast<double*>(arenas.at(plan, buffers_.of_segments));
    head.segment_sums = make_tensor(numbers, DType::f64, {most});
    head.segment_weights = make_tensor(numbers + most, DType::f64, {most});
  }
  head.counts_segments = options_.layout.context_rank == 0;
  head.sum_over_rows = [this](const Tensor& t) {
    if (options_.layout.context == 1 || !context_.groups) return;
    (*context_.groups)[segment_ranks]
        .all_reduce_async(view_of(t), comm::Reduce::sum, comm::StreamRef{context_.exec->stream})
        .wait();
  };
}

template <class F>
void Decoder::for_each_block(F&& work) const {
  const ModelLayout& layout = options_.layout;
  for (int c = 0; c < layout.chunks; ++c) {
    const BlockRange blocks = chunk_blocks(layout, part_.layers, layout.model_chunk(c));
    for (int b = blocks.begin; b < blocks.end; ++b)  // after the embedding or what is received
      work(b, stage_->first_layer(c) + b - blocks.begin + 1);
  }
}

std::vector<Decoder::BlockTable> Decoder::blocks() const {
  std::vector<BlockTable> out;
  for_each_block([&](int block, int layer) { out.push_back({block, &stage_->layer(layer).table()}); });
  return out;
}

std::vector<Decoder::BlockBytes> Decoder::block_bytes() const {
  const program::Layers& layers = stage_->all_layers();
  std::vector<memory::SlotSet> read(layers.layers.size()), offloaded(layers.layers.size());
  if (training_ >= 0) {
    const program::Program& program = stage_->program(training_);
    for (const program::Step& s : program.steps)
      if (s.kind == program::StepKind::compute && (s.backward || s.again))
        read[s.layer] |= layers.of(s.layer).table->steps()[s.index].reads;
    offloaded = program::offloaded_slots(program, layers);
  }
  std::vector<BlockBytes> out;
  for_each_block([&](int block, int layer) {
    const Layer& l = stage_->layer(layer);
    BlockBytes bytes{.block = block};
    memory::for_each_slot(read[layer] & l.table().offloadable(), [&](size_t s) {
      (l.policy().recomputed()[s] ? bytes.recomputed
       : offloaded[layer][s]      ? bytes.offloaded
                                  : bytes.kept) += bytes_of(l.table().slots()[s]);
    });
    out.push_back(bytes);
  });
  return out;
}

std::string Decoder::program_text() const {
  return program::text(program(memory::training), stage_->all_layers());
}

// Schedules that differ only in how often they repeat their period share a program.
void Decoder::add_training_programs() {
  training_ = stage_->add_program(memory::training, options_.training, options_.layout);
  std::vector<std::pair<const pipeline::Schedule*, int>> programs{{&options_.training, training_}};
  fewer_.resize(options_.fewer.size());
  // From the most microbatches: a program has the stashes of all that it executes.
  for (size_t i = options_.fewer.size(); i-- > 0;) {
    const pipeline::Schedule& s = options_.fewer[i];
    Fewer& f = fewer_[i];
    f.times = s.period.times;
    if (s.actions.empty()) continue;
    for (const auto& [other, program] : programs)
      if (pipeline::same_but_times(*other, s)) f.program = program;
    if (f.program >= 0) continue;
    f.program = stage_->add_program(memory::training, s, options_.layout);
    programs.emplace_back(&s, f.program);
  }
}

void Decoder::run(int program, std::span<const MicroBatch> batches, const StepHooks& hooks, bool first,
                  std::optional<int> times) {
  NRL_CHECK(options_.layout.stages == 1 || messages_, "the stages are not connected");
  fp8_->align(*context_.exec);
  if (most_repetitions_ && program == training_)
    times = std::min(*most_repetitions_, times.value_or(this->program(memory::training).period.times));
  stage_->execute(
      program, {.batches = batches, .hooks = &hooks, .messages = messages_, .first = first, .times = times});
}

void Decoder::train(std::span<const MicroBatch> batches, const StepHooks& hooks) {
  ops::Exec& exec = *context_.exec;
  if (context_.router_counts) ops::zero(exec, {.x = context_.router_counts});
  shares_.clear();
  for (const MicroBatch& batch : batches) shares_.push_back(batch.share);
  const auto count = static_cast<int>(batches.size());
  if (count == pipeline::microbatches(options_.training)) return run(training_, batches, hooks);
  NRL_CHECK(count >= 1 && count <= static_cast<int>(fewer_.size()) && fewer_[count - 1].program >= 0,
            "no schedule of {} microbatches", count);
  run(fewer_[count - 1].program, batches, hooks, true, fewer_[count - 1].times);
}

int64_t Decoder::counted_rows() const {
  return pipeline::microbatches(options_.training) * held_expert_layers(part_, options_.layout, part_.layers);
}

void Decoder::add_expert_load() {
  const Tensor& counts = context_.expert_counts;
  if (!counts || counts.dim(0) == 0 || !context_.router_metrics) return;
  ops::Exec& exec = *context_.exec;
  const ModelLayout& layout = options_.layout;
  if (layout.tensor * layout.context > 1 && context_.groups)
    (*context_.groups)[microbatch_ranks(layout.tensor, layout.context)]
        .all_reduce_async(view_of(counts), comm::Reduce::sum, comm::StreamRef{exec.stream})
        .wait();
  if (layout.tensor_rank > 0 || layout.context_rank > 0) return;
  const int64_t experts = counts.dim(1);
  const int64_t layers = held_expert_layers(part_, layout, part_.layers);
  for (int64_t i = 0; i < layers * static_cast<int64_t>(shares_.size()); ++i)
    ops::router_balance(exec, {.rule = part_.moe.rule,
                               .logits = make_tensor(nullptr, DType::f32, {0, experts}, counts.device),
                               .counts = counts.rows(i, 1),
                               .share = shares_[i / layers] / static_cast<float>(part_.expert_layers()),
                               .metrics = context_.router_metrics});
}

void Decoder::update_router_bias(const Tensor& scalars) {
  const Tensor& counts = context_.router_counts;
  if (router_biases_.empty()) return;
  ops::Exec& exec = *context_.exec;
  if (context_.groups)
    (*context_.groups)[batch_ranks(options_.layout.tensor)]
        .all_reduce_async(view_of(counts), comm::Reduce::sum, comm::StreamRef{exec.stream})
        .wait();
  const int64_t experts = counts.dim(1);
  for (const auto& [layer, parameter] : router_biases_)
    ops::router_bias(exec, {.counts = make_tensor(counts.ptr<int32_t>() + layer * experts, DType::i32,
                                                  {experts}, counts.device),
                            .scalars = scalars,
                            .rate = part_.moe.bias_rate,
                            .bias = context_.parameters[parameter].weight});
}

void Decoder::evaluate(std::span<const MicroBatch> batches, const std::function<void(int)>& log_probs_ready,
                       bool first) {
  if (evaluations_ >= 0 && static_cast<int>(batches.size()) == options_.evaluated) {
    run(evaluations_, batches, {.log_probs_ready = log_probs_ready}, first);
    return;
  }
  for (size_t i = 0; i < batches.size(); ++i)
    run(evaluation_, batches.subspan(i, 1),
        {.log_probs_ready =
             [&](int) {
               if (log_probs_ready) log_probs_ready(static_cast<int>(i));
             }},
        first && i == 0);
}

}  // namespace nrl::model
