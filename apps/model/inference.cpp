#include "apps/model/inference.h"

#include <algorithm>
#include <utility>

#include "apps/model/chunks.h"
#include "core/ops/dry_run.h"
#include "core/ops/transfer.h"

namespace nrl::model {

using memory::Category;

namespace {

constexpr int64_t chunk_tokens = 128;  // prompt tokens per forward pass

}  // namespace

Inference::Inference(const ModelSpec& spec, const ParameterList& parameters, std::vector<ParameterView> views,
                     const ops::Exec& exec, int64_t max_tokens)
    : max_tokens_(max_tokens), exec_(exec) {
  NRL_CHECK(max_tokens > 0 && spec.head == HeadKind::vocabulary);
  if (spec.learned_positions && max_tokens > spec.max_positions)
    fail(Exit::usage, "the model has {} positions; found {} tokens", spec.max_positions, max_tokens);
  const DeviceType device = exec.libraries ? DeviceType::cuda : DeviceType::cpu;
  const precision::Recipe& recipe = precision::recipe_for_weights(views[parameters.embedding].weight.dtype);
  const DType dtype = recipe.activations();
  const int64_t n = std::min(chunk_tokens, max_tokens);
  context_.exec = &exec_;
  context_.spec = &spec;
  context_.parameters = std::move(views);
  stage_ = std::make_unique<Stage>(decoder_chunks(context_, parameters, {.recipe = recipe, .device = device}),
                                   domain_rows(spec, {}, n, n, 0, true));

  memory::MemoryPlan plan;
  stage_->add_program(memory::generation,
                      pipeline::make_schedule({.kind = pipeline::ScheduleKind::forward_only}, 0), {});
  stage_->declare(plan);
  std::vector<memory::BufferId> caches;
  for (int64_t i = 0; i < 2 * spec.layers; ++i)
    caches.push_back(plan.add("cache", Category::data, max_tokens * spec.kv_width() * size_of(dtype)));
  const auto add = [&](const char* name, int64_t bytes) { return plan.add(name, Category::data, bytes); };
  const auto ids = add("ids", n * 4), positions = add("positions", n * 4), cu = add("sequence bounds", 8),
             cu_keys = add("key bounds", 8), logits = add("logits", spec.vocab_size * 4),
             rope = add("rope table", spec.use_rope ? max_tokens * spec.rope.rotary_dim * 4 : 0);
  const auto bind = [&](const memory::Arenas& arenas) {
    const auto at = [&](memory::BufferId id) { return arenas.at(plan, id); };
    stage_->bind(plan, arenas);
    cache_.layers.clear();
    for (size_t i = 0; i < caches.size(); i += 2)
      cache_.layers.push_back({make_tensor(at(caches[i]), dtype, {max_tokens, spec.kv_width()}),
                               make_tensor(at(caches[i + 1]), dtype, {max_tokens, spec.kv_width()})});
    cache_.cu_keys = make_tensor(at(cu_keys), DType::i32, {2});
    batch_.ids = make_tensor(at(ids), DType::i32, {n});
    batch_.positions = make_tensor(at(positions), DType::i32, {n});
    batch_.cu_seqlens = make_tensor(at(cu), DType::i32, {2});
    batch_.cache = &cache_;
    context_.next_logits = make_tensor(at(logits), DType::f32, {1, spec.vocab_size});
    if (spec.use_rope)
      context_.rope_table = make_tensor(at(rope), DType::f32, {max_tokens, spec.rope.rotary_dim});
  };
  const size_t workspace = needed_workspace(n, [&] { bind(memory::Arenas::nowhere()); });
  const auto scratch = plan.add("op workspace", Category::workspace, static_cast<int64_t>(workspace));
  plan.solve();
  arenas_ = exec_.device ? memory::Arenas(plan, *exec_.device, exec_.stream) : memory::Arenas(plan);
  bind(arenas_);
  exec_.workspace = {static_cast<std::byte*>(arenas_.at(plan, scratch)), workspace};
  logits_.resize(static_cast<size_t>(spec.vocab_size));
  if (spec.use_rope) {
    const std::vector<float> table = ops::rope_table(spec.rope, max_tokens, max_tokens);
    ops::upload(exec_, context_.rope_table, table.data());
  }
}

Inference::~Inference() = default;

size_t Inference::needed_workspace(int64_t tokens, const std::function<void()>& bind) {
  const ops::DryDevice device = ops::DryDevice::like(exec_);
  const ops::Exec exec = std::exchange(exec_, device.exec());
  const ops::DryRun dry(exec_);
  bind();
  cache_.length = max_tokens_ - tokens;
  append_chunk(std::vector<int32_t>(static_cast<size_t>(tokens)));
  reset();
  exec_ = exec;
  return dry.workspace();
}

std::span<const float> Inference::append(std::span<const int32_t> tokens) {
  NRL_CHECK(!tokens.empty() && length() + static_cast<int64_t>(tokens.size()) <= max_tokens_);
  while (!tokens.empty()) {
    const auto now = std::min<size_t>(tokens.size(), chunk_tokens);
    append_chunk(tokens.first(now));
    tokens = tokens.subspan(now);
  }
  ops::download(exec_, context_.next_logits, logits_.data());
  return logits_;
}

void Inference::append_chunk(std::span<const int32_t> tokens) {
  const auto n = static_cast<int64_t>(tokens.size());
  std::vector<int32_t> positions(tokens.size());
  for (int64_t i = 0; i < n; ++i) positions[i] = static_cast<int32_t>(cache_.length + i);
  const int32_t cu[] = {0, static_cast<int32_t>(n)}, cu_keys[] = {0, static_cast<int32_t>(cache_.length + n)};
  MicroBatch now = batch_;
  now.ids.shape[0] = now.positions.shape[0] = n;
  now.lengths.longest = cache_.length + n;
  ops::upload(exec_, now.ids, tokens.data());
  ops::upload(exec_, now.positions, positions.data());
  ops::upload(exec_, now.cu_seqlens, cu);
  ops::upload(exec_, cache_.cu_keys, cu_keys);
  stage_->execute(0, {.batches = {&now, 1}});
  cache_.length += n;
}

}  // namespace nrl::model
