#include "apps/model/decoder.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"
#include "core/trace/trace.h"

namespace nrl::model {

using memory::Category;
using memory::Keep;

namespace {

// CPU: 256 tokens at a time: the head's weight gradient is read and written once per chunk, which larger
// chunks hardly speed up (512 gained 1 % at a vocabulary of 50304, for 49 MiB); fewer where the vocabulary
// would make the logits large. A GPU needs more rows to fill its multiprocessors and has the memory.
struct HeadLimits {
  int64_t tokens, logits_bytes;
};
constexpr HeadLimits head_limits(DeviceType device) {
  return device == DeviceType::cpu ? HeadLimits{256, int64_t{128} << 20} : HeadLimits{4096, int64_t{1} << 30};
}

int64_t head_chunk_tokens(int64_t tokens, int64_t vocab, DeviceType device) {
  const HeadLimits limits = head_limits(device);
  const int64_t fit = std::clamp<int64_t>(limits.logits_bytes / (vocab * 4), 32, limits.tokens);
  if (fit >= tokens) return tokens;
  // Equal chunks: a small last one would waste the matrix product.
  const int64_t chunks = (tokens + fit - 1) / fit;
  return (tokens + chunks - 1) / chunks;
}

size_t needed_gpu_workspace(const ModelSpec& m, const DecoderOptions& o) {
  const int64_t widest = std::max({m.hidden, m.qkv_width(), m.mlp_in_width(), m.head_dim});
  return std::max({o.optimizer_workspace, ops::norm_backward_workspace(m.hidden, o.threads),
                   ops::qk_norm_rope_workspace(m.head_dim, o.threads),
                   ops::gpu_linear_workspace(widest, o.threads),
                   ops::embedding_backward_workspace(o.tokens, m.hidden),
                   ops::attention_gpu_workspace(o.tokens, m.heads, m.kv_heads, m.head_dim)});
}

size_t needed_workspace(const ModelSpec& m, const DecoderOptions& o, int64_t chunk) {
  if (o.device == DeviceType::cuda) return needed_gpu_workspace(m, o);
  const DType dtype = o.recipe.activations;
  size_t bytes = ops::norm_backward_workspace(std::max(m.hidden, m.head_dim), o.threads);
  auto linear = [&](int64_t n, int64_t out, int64_t in) {
    bytes = std::max(bytes, ops::linear_workspace(n, out, in, dtype, o.threads));
  };
  linear(o.tokens, m.qkv_width(), m.hidden);
  linear(o.tokens, m.hidden, m.q_width());
  linear(o.tokens, m.mlp_in_width(), m.hidden);
  linear(o.tokens, m.hidden, m.ffn);
  linear(chunk, m.vocab_size, m.hidden);
  if (o.tokens % chunk) linear(o.tokens % chunk, m.vocab_size, m.hidden);
  return std::max(
      bytes, ops::attention_workspace(o.tokens, m.heads, m.kv_heads, m.head_dim, o.max_sequence, o.threads));
}

}  // namespace

std::vector<std::string_view> training_kernels(const ModelSpec& spec, const precision::Recipe& recipe) {
  std::vector<std::string_view> needed{"embedding_forward",
                                       "embedding_backward",
                                       "norm_forward",
                                       "norm_backward",
                                       "linear_forward",
                                       "linear_backward_data",
                                       "linear_backward_weight",
                                       "attention_forward",
                                       "attention_backward",
                                       "activation_forward",
                                       "activation_backward",
                                       "cross_entropy",
                                       "add_sum",
                                       "add_sum_of_squares",
                                       "decide_step",
                                       "adamw",
                                       "zero"};
  if (spec.use_rope || spec.qk_norm) {
    needed.push_back("qk_norm_rope_forward");
    needed.push_back("qk_norm_rope_backward");
  }
  if (spec.residual_dropout > 0 || spec.embedding_dropout > 0) needed.push_back("dropout");
  if (recipe.master_weights()) needed.push_back("convert");
  return needed;
}

DType logits_gradient_dtype(const precision::Recipe& recipe, DeviceType device) {
  return device == DeviceType::cpu ? DType::f32 : recipe.activations;
}

Decoder::Decoder(const ModelSpec& spec, const ParameterList& parameters, const DecoderOptions& options,
                 memory::MemoryPlan& plan)
    : spec_(spec),
      parameters_(parameters),
      options_(options),
      slots_(block_slots(spec, options.recipe)),
      policy_(static_cast<int>(spec.layers), slots_),
      ticks_{static_cast<int>(spec.layers), static_cast<int>(ForwardStep::count),
             static_cast<int>(BackwardStep::count)},
      chunk_(head_chunk_tokens(options.tokens, spec.vocab_size, options.device)) {
  for (const std::string& module : options.recompute_modules)
    if (!policy_.recompute_module(module, slots_))
      fail(Exit::config,
           "policy.recompute.modules: '{}' names no activation of this model; known: norm, activation",
           module);
  // A fused activation is rounded from the f32 sum, a recomputed one made from the rounded mlp_in: other
  // bits.
  fuse_gelu_ = options.device == DeviceType::cuda && !spec.gated &&
               spec.activation == ops::Activation::gelu_tanh &&
               policy_.get(0, static_cast<int>(Slot::act)) == Keep::keep;
  if (fuse_gelu_) slots_[static_cast<size_t>(Slot::act)].made = static_cast<int>(ForwardStep::mlp_in);
  gradient_slots_ = block_gradient_slots(spec, options.recipe, fuse_gelu_);
  slot_plan_ = memory::SlotPlan(plan, ticks_, slots_, gradient_slots_, policy_, options.tokens);

  const int64_t n = options.tokens, row = spec.hidden * size_of(options.recipe.activations);
  const int last_forward = ticks_.forward(ticks_.layers - 1, ticks_.forward_steps - 1);
  const int head = ticks_.head();
  buffers_.final_resid = plan.add("final residual", Category::activations, n * row, {last_forward, head});
  buffers_.final_norm = plan.add("final norm", Category::activations, n * row, {head, head});
  buffers_.stats = plan.add("final stats", Category::activations, n * 2 * 4, {head, head});
  buffers_.logits =
      plan.add("logits of a chunk", Category::activations, chunk_ * spec.vocab_size * 4, {head, head});
  buffers_.dresid =
      plan.add("residual gradient", Category::activations, n * row, {head, ticks_.embedding_backward()});
  buffers_.dropped = plan.add("gradient behind dropout", Category::activations,
                              spec.residual_dropout > 0 ? n * row : 0, {head, ticks_.embedding_backward()});
  buffers_.log_prob = plan.add("log-probabilities", Category::data, n * 4);
  buffers_.rope = plan.add("rope table", Category::data,
                           spec.use_rope ? options.max_sequence * spec.rope.rotary_dim * 4 : 0);
  workspace_bytes_ = needed_workspace(spec, options, chunk_);
  buffers_.workspace = plan.add("op workspace", Category::workspace, static_cast<int64_t>(workspace_bytes_));
}

Decoder::~Decoder() = default;

void Decoder::bind(const memory::MemoryPlan& plan, const memory::Arenas& arenas, ops::Exec& exec,
                   std::vector<ParameterView> views, std::function<void(int)> gradient_ready) {
  const int64_t n = options_.tokens, h = spec_.hidden;
  const DType a = options_.recipe.activations;
  auto at = [&](memory::BufferId id) { return arenas.at(plan, id); };
  t_.final_resid = make_tensor(at(buffers_.final_resid), a, {n, h});
  t_.final_norm = make_tensor(at(buffers_.final_norm), a, {n, h});
  t_.stats = make_tensor(at(buffers_.stats), DType::f32, {2, n});
  t_.logits = make_tensor(at(buffers_.logits), DType::f32, {chunk_, spec_.vocab_size});
  t_.log_prob = make_tensor(at(buffers_.log_prob), DType::f32, {n});
  t_.dresid = make_tensor(at(buffers_.dresid), a, {n, h});
  if (spec_.residual_dropout > 0) t_.dropped = make_tensor(at(buffers_.dropped), a, {n, h});
  exec.workspace = {static_cast<std::byte*>(at(buffers_.workspace)), workspace_bytes_};

  context_.exec = &exec;
  context_.spec = &spec_;
  context_.parameters = std::move(views);
  context_.seed = options_.seed;
  context_.fuse_gelu = fuse_gelu_;
  context_.gradient_ready = std::move(gradient_ready);
  context_.ticks = ticks_;
  if (spec_.use_rope) {
    const std::vector<float> table =
        ops::rope_table(spec_.rope, options_.max_sequence, options_.max_sequence);
    context_.rope_table =
        make_tensor(at(buffers_.rope), DType::f32, {options_.max_sequence, spec_.rope.rotary_dim});
    ops::upload(exec, context_.rope_table, table.data());
  }

  blocks_.clear();
  layer_names_.clear();
  for (int64_t i = 0; i < spec_.layers; ++i)
    layer_names_.push_back(trace::intern(fmt::format("layer_{}", i)));
  blocks_.reserve(static_cast<size_t>(spec_.layers));
  for (int layer = 0; layer < ticks_.layers; ++layer) {
    BlockTensors tensors;
    for (size_t s = 0; s < slots_.size(); ++s) {
      if (slots_[s].width == 0) continue;
      auto view = [&](memory::SlotPlan::Phase phase) {
        void* p = at(slot_plan_.buffer(layer, static_cast<int>(s), phase));
        // lse is (heads, N), everything else (N, width)
        if (static_cast<Slot>(s) == Slot::lse) return make_tensor(p, slots_[s].dtype, {slots_[s].width, n});
        return make_tensor(p, slots_[s].dtype, {n, slots_[s].width});
      };
      tensors.forward[s] = view(memory::SlotPlan::Phase::forward);
      tensors.backward[s] = view(memory::SlotPlan::Phase::backward);
      tensors.keep[s] = policy_.get(layer, static_cast<int>(s));
    }
    for (size_t g = 0; g < gradient_slots_.size(); ++g)
      tensors.gradient[g] = make_tensor(at(slot_plan_.gradient(layer, static_cast<int>(g))),
                                        gradient_slots_[g].dtype, {n, gradient_slots_[g].width});
    blocks_.emplace_back(context_, layer, parameters_.layers[static_cast<size_t>(layer)], tensors);
  }
}

Tensor Decoder::forward(const MicroBatch& batch, bool train) {
  MicroBatch mb = batch;
  mb.dropout = mb.dropout && train;
  ops::Exec& e = *context_.exec;
  const auto& views = context_.parameters;
  auto weight = [&](int p) { return p < 0 ? Tensor{} : views[static_cast<size_t>(p)].weight; };
  const Tensor first = blocks_.front().resid1();
  context_.enter(ticks_.embedding());
  ops::embedding_forward(
      e, {mb.ids, weight(parameters_.embedding), weight(parameters_.positions), mb.positions, first});
  if (mb.dropout && spec_.embedding_dropout > 0)
    ops::dropout(e, {first, first, spec_.embedding_dropout, context_.seed, 0, mb.first_row, mb.step});
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const trace::Range range(layer_names_[i]);
    blocks_[i].forward(mb, i ? blocks_[i - 1].resid2() : Tensor{},
                       i + 1 < blocks_.size() ? blocks_[i + 1].resid1() : t_.final_resid);
  }
  const trace::Range range("loss_computation");
  context_.enter(ticks_.head());
  head(mb, train);
  return t_.log_prob;
}

void Decoder::head(const MicroBatch& mb, bool train) {
  ops::Exec& e = *context_.exec;
  const auto& p = parameters_;
  auto weight = [&](int i) { return i < 0 ? Tensor{} : context_.parameters[static_cast<size_t>(i)].weight; };
  auto grad = [&](int i) { return i < 0 ? Tensor{} : context_.parameters[static_cast<size_t>(i)].grad; };
  const bool layer_norm = spec_.norm == ops::NormKind::layer;
  const int64_t n = options_.tokens;
  const Tensor mean = layer_norm ? make_tensor(t_.stats.data, DType::f32, {n}) : Tensor{};
  const Tensor rstd = make_tensor(t_.stats.ptr<float>() + n, DType::f32, {n});
  ops::norm_forward(e, {spec_.norm, spec_.norm_eps, t_.final_resid, blocks_.back().resid2(), t_.final_resid,
                        weight(p.final_norm), weight(p.final_norm_bias), t_.final_norm, mean, rstd,
                        fused_dropout(spec_, context_.seed, ticks_.layers - 1, DropoutSite::mlp, mb)});
  for (int64_t begin = 0; begin < n; begin += chunk_) {
    const int64_t count = std::min(chunk_, n - begin);
    const Tensor hidden = t_.final_norm.rows(begin, count), logits = t_.logits.rows(0, count);
    const DType low = logits_gradient_dtype(options_.recipe, options_.device);
    Tensor dlogits = logits;
    if (low != DType::f32) {  // in the front half of each row of the logits
      dlogits.dtype = low;
      dlogits.stride[0] = logits.stride[0] * size_of(DType::f32) / size_of(low);
    }
    ops::linear_forward(e, {hidden, weight(p.head), {}, logits});
    ops::cross_entropy(e, {logits,
                           mb.target.rows(begin, count),
                           train ? mb.weight.rows(begin, count) : Tensor{},
                           t_.log_prob.rows(begin, count),
                           {},
                           train && low != DType::f32 ? dlogits : Tensor{}});
    if (!train) continue;
    // The logits have given way to their gradient; the chunk's hidden states are dead once the weight
    // gradient has read them.
    ops::linear_backward_weight(e, {dlogits, hidden, grad(p.head), {}, true});
    ops::linear_backward_data(e, {dlogits, weight(p.head), hidden, false});
  }
  if (!train) return;
  if (p.head != p.embedding) context_.gradient_ready(p.head);
  ops::norm_backward(e, {spec_.norm,
                         t_.final_norm,
                         t_.final_resid,
                         weight(p.final_norm),
                         mean,
                         rstd,
                         {},
                         t_.dresid,
                         grad(p.final_norm),
                         grad(p.final_norm_bias)});
  context_.gradient_ready(p.final_norm);
  if (p.final_norm_bias >= 0) context_.gradient_ready(p.final_norm_bias);
}

void Decoder::backward(const MicroBatch& mb) {
  for (size_t i = blocks_.size(); i-- > 0;) {
    const trace::Range range(layer_names_[i]);
    blocks_[i].backward(mb, t_.dresid, t_.dropped);
  }
  context_.enter(ticks_.embedding_backward());
  ops::Exec& e = *context_.exec;
  if (spec_.embedding_dropout > 0)
    ops::dropout(e, {t_.dresid, t_.dresid, spec_.embedding_dropout, context_.seed, 0, mb.first_row, mb.step});
  auto grad = [&](int i) { return i < 0 ? Tensor{} : context_.parameters[static_cast<size_t>(i)].grad; };
  const auto& p = parameters_;
  ops::embedding_backward(e, {mb.ids, t_.dresid, grad(p.embedding), mb.positions, grad(p.positions)});
  context_.gradient_ready(p.embedding);
  if (p.positions >= 0) context_.gradient_ready(p.positions);
}

}  // namespace nrl::model
