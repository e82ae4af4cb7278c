#include "apps/model/generation_pass.h"

#include <algorithm>
#include <utility>

#include "apps/model/chunks.h"
#include "apps/model/program/rope_tables.h"
#include "core/ops/dry_run.h"
#include "core/ops/sample.h"
#include "core/ops/transfer.h"

namespace nrl::model {

using memory::Category;

namespace {

int64_t table_width(const GenerationLimits& l) {
  return (l.longest + l.page_tokens - 1) / l.page_tokens;
}

}  // namespace

GenerationPass::GenerationPass(const ModelSpec& spec, const ParameterList& parameters,
                               std::vector<ParameterView> views, const ops::Exec& exec,
                               const GenerationLimits& limits, const ModelLayout& layout,
                               const parallel::Groups* groups, bool allocate)
    : part_(tensor_part(spec, layout)),
      vocabulary_(spec.vocab_size),
      own_(tensor_slice(layout, spec.vocab_size)),
      limits_(limits),
      exec_(exec) {
  const GenerationLimits& l = limits_;
  NRL_CHECK(l.tokens > 0 && l.sequences > 0 && l.longest > 0 && l.pages > 0 && l.page_tokens > 0 &&
            spec.head == HeadKind::vocabulary);
  NRL_CHECK(layout.context == 1 && layout.stages == 1 && layout.chunks == 1 && !layout.sequence_parallel &&
                layout.expert_ranks() == 1,
            "generation with a layout of more than tensor parallelism");
  if (spec.learned_positions && l.longest > spec.max_positions)
    fail(Exit::usage, "the model has {} positions; found {} tokens", spec.max_positions, l.longest);
  const DeviceType device = exec.libraries ? DeviceType::cuda : DeviceType::cpu;
  const precision::Recipe& recipe = precision::recipe_for_weights(views[parameters.embedding].weight.dtype);
  const DType dtype = recipe.activations();
  const int64_t n = l.tokens, s = l.sequences, width = table_width(l);
  context_.exec = &exec_;
  context_.spec = &part_;
  context_.layout = layout;
  context_.groups = groups;
  context_.parameters = std::move(views);
  stage_ = std::make_unique<Stage>(decoder_chunks(context_, parameters,
                                                  {.recipe = recipe,
                                                   .device = device,
                                                   .head_chunk_tokens = s,
                                                   .layout = layout,
                                                   .recompute = {},
                                                   .offload = {}}),
                                   domain_rows(part_, layout, n, n, s, true));

  memory::MemoryPlan plan;
  stage_->add_program(memory::generation,
                      pipeline::make_schedule({.kind = pipeline::ScheduleKind::forward_only}, 0), layout);
  stage_->declare(plan);
  const auto add = [&](const char* name, int64_t bytes) { return plan.add(name, Category::data, bytes); };
  const int64_t cache_rows = l.pages * l.page_tokens;
  std::vector<memory::BufferId> caches;
  for (int64_t i = 0; i < 2 * spec.layers; ++i)
    caches.push_back(add("cache", cache_rows * part_.kv_width() * size_of(dtype)));
  const auto ids = add("ids", n * 4), positions = add("positions", n * 4),
             cu = add("sequence bounds", (s + 1) * 4), slots = add("cache rows", n * 4),
             context = add("context lengths", s * 4), table = add("block table", s * width * 4),
             sampled = add("sampled rows", s * 4), logits = add("logits", s * own_.count * 4),
             rope = add("rope table", rope_table_bytes(spec, l.longest)),
             temperature = add("temperatures", s * 4), seed = add("seeds", s * 8),
             sample = add("samples", s * 8), position = add("sampled positions", s * 4),
             parts = add("sampling parts", layout.tensor * s * ops::SamplePart::columns * 4),
             token = add("sampled tokens", s * 4), log_prob = add("sampled log-probabilities", s * 4);
  const auto bind = [&](const memory::Arenas& arenas) {
    const auto at = [&](memory::BufferId id, DType type, std::initializer_list<int64_t> shape) {
      return make_tensor(arenas.at(plan, id), type, shape);
    };
    stage_->bind(plan, arenas);
    cache_.layers.clear();
    for (size_t i = 0; i < caches.size(); i += 2)
      cache_.layers.push_back({at(caches[i], dtype, {cache_rows, part_.kv_width()}),
                               at(caches[i + 1], dtype, {cache_rows, part_.kv_width()})});
    cache_.page = l.page_tokens;
    cache_.slots = at(slots, DType::i32, {n});
    cache_.context = at(context, DType::i32, {s});
    cache_.block_table = at(table, DType::i32, {s, width});
    cache_.sampled_rows = at(sampled, DType::i32, {s});
    batch_.ids = at(ids, DType::i32, {n});
    batch_.positions = at(positions, DType::i32, {n});
    batch_.cu_seqlens = at(cu, DType::i32, {s + 1});
    context_.next_logits = at(logits, DType::f32, {s, own_.count});
    context_.rope_tables = rope_tables_at(spec, l.longest, arenas.at(plan, rope));
    sampling_ = {.temperature = at(temperature, DType::f32, {s}),
                 .seed = at(seed, DType::i64, {s}),
                 .sample = at(sample, DType::i64, {s}),
                 .position = at(position, DType::i32, {s}),
                 .parts = at(parts, DType::f32, {layout.tensor, s, ops::SamplePart::columns}),
                 .token = at(token, DType::i32, {s}),
                 .log_prob = at(log_prob, DType::f32, {s})};
  };
  const size_t workspace = needed_workspace([&] { bind(memory::Arenas::nowhere()); });
  const auto scratch = plan.add("op workspace", Category::workspace, static_cast<int64_t>(workspace));
  plan.solve();
  for (const memory::BufferId id : caches) memory_.pages += plan.buffers()[static_cast<size_t>(id)].bytes;
  memory_.buffers = plan.total_bytes() - memory_.pages;
  if (!allocate) return;
  arenas_ = exec_.device ? memory::Arenas(plan, *exec_.device, exec_.stream) : memory::Arenas(plan);
  bind(arenas_);
  exec_.workspace = {static_cast<std::byte*>(arenas_.at(plan, scratch)), workspace};
  fill_rope_tables(exec_, spec, context_.rope_tables);
}

GenerationPass::~GenerationPass() = default;

GenerationMemory GenerationPass::memory(const ModelSpec& spec, const ParameterList& parameters,
                                        std::vector<ParameterView> views, const ops::Exec& exec,
                                        const GenerationLimits& limits, const ModelLayout& layout,
                                        const parallel::Groups* groups) {
  return GenerationPass(spec, parameters, std::move(views), exec, limits, layout, groups, false).memory_;
}

int64_t GenerationPass::page_bytes(const ModelSpec& spec, const ModelLayout& layout, int64_t page_tokens,
                                   DType dtype) {
  return 2 * spec.layers * page_tokens * tensor_part(spec, layout).kv_width() * size_of(dtype);
}

size_t GenerationPass::needed_workspace(const std::function<void()>& bind) {
  const parallel::DryGroups dry_groups(context_.groups);
  const ops::DryDevice device = ops::DryDevice::like(exec_);
  const ops::Exec exec = std::exchange(exec_, device.exec());
  const ops::DryRun dry(exec_);
  bind();
  // All rows at the end of the longest contexts: in few sequences, and in as many as there may be.
  const std::vector<int32_t> tokens(static_cast<size_t>(limits_.longest)),
      pages(static_cast<size_t>(table_width(limits_)));
  for (const int64_t most : {limits_.longest, int64_t{1}}) {
    GenerationRows rows{.sequences = {},
                        .sampled = std::vector<int32_t>(static_cast<size_t>(limits_.sequences))};
    for (int64_t left = limits_.tokens; left > 0 && std::ssize(rows.sequences) < limits_.sequences;) {
      const int64_t n = std::min(left, most);
      rows.sequences.push_back({.tokens = std::span(tokens).first(static_cast<size_t>(n)),
                                .first = limits_.longest - n,
                                .pages = pages});
      left -= n;
    }
    run(rows);
  }
  exec_ = exec;
  return dry.workspace();
}

Tensor GenerationPass::upload(const Tensor& to, const void* from, std::initializer_list<int64_t> shape) {
  const Tensor part = make_tensor(to.data, to.dtype, shape);
  ops::upload(exec_, part, from);
  return part;
}

void GenerationPass::copy_page(int32_t from, int32_t to) {
  const int64_t page = limits_.page_tokens;
  for (const PagedCache::Layer& layer : cache_.layers)
    for (const Tensor& t : {layer.keys, layer.values})
      ops::copy(exec_, t.rows(from * page, page), t.rows(to * page, page));
}

void GenerationPass::run(const GenerationRows& rows) {
  const int64_t page = limits_.page_tokens;
  std::vector<int32_t> ids, positions, slots, cu{0}, context, table;
  size_t width = 1;
  MicroBatch now = batch_;
  PagedCache cache = cache_;
  for (const GenerationRows::Sequence& s : rows.sequences) width = std::max(width, s.pages.size());
  width = std::min(width, static_cast<size_t>(table_width(limits_)));
  for (const GenerationRows::Sequence& s : rows.sequences) {
    const auto count = static_cast<int64_t>(s.tokens.size()), end = s.first + count;
    NRL_CHECK(count > 0 && end <= limits_.longest && static_cast<int64_t>(s.pages.size()) * page >= end,
              "tokens {} to {} of a sequence of at most {} in {} pages", s.first, end, limits_.longest,
              s.pages.size());
    for (int64_t p = s.first; p < end; ++p) {
      positions.push_back(static_cast<int32_t>(p));
      slots.push_back(static_cast<int32_t>(s.pages[static_cast<size_t>(p / page)] * page + p % page));
    }
    ids.insert(ids.end(), s.tokens.begin(), s.tokens.end());
    cu.push_back(static_cast<int32_t>(ids.size()));
    context.push_back(static_cast<int32_t>(end));
    const size_t begin = table.size(), used = std::min(s.pages.size(), width);
    table.insert(table.end(), s.pages.begin(), s.pages.begin() + static_cast<std::ptrdiff_t>(used));
    table.resize(begin + width);
    cache.longest = std::max(cache.longest, end);
  }
  const auto n = static_cast<int64_t>(ids.size()), s = static_cast<int64_t>(context.size());
  sampled_ = static_cast<int64_t>(rows.sampled.size());
  NRL_CHECK(n > 0 && n <= limits_.tokens && s <= limits_.sequences && sampled_ <= limits_.sequences,
            "{} rows of {} sequences, {} sampled; {} and {} at most", n, s, sampled_, limits_.tokens,
            limits_.sequences);
  now.ids = upload(batch_.ids, ids.data(), {n});
  now.positions = upload(batch_.positions, positions.data(), {n});
  now.cu_seqlens = upload(batch_.cu_seqlens, cu.data(), {s + 1});
  now.lengths.longest = cache.longest;
  cache.slots = upload(cache_.slots, slots.data(), {n});
  cache.context = upload(cache_.context, context.data(), {s});
  cache.block_table = upload(cache_.block_table, table.data(), {s, static_cast<int64_t>(width)});
  cache.sampled_rows = upload(cache_.sampled_rows, rows.sampled.data(), {sampled_});
  now.cache = &cache;
  stage_->execute(0, {.batches = {&now, 1}});
}

std::vector<SampledToken> GenerationPass::sample(std::span<const SamplingKey> keys, int64_t vocabulary) {
  const int64_t n = sampled_, ranks = context_.layout.tensor;
  NRL_CHECK(static_cast<int64_t>(keys.size()) == n, "{} keys for {} rows", keys.size(), n);
  if (n == 0) return {};
  std::vector<float> temperature;
  std::vector<int64_t> seed, sample;
  std::vector<int32_t> position;
  for (const SamplingKey& k : keys) {
    temperature.push_back(k.temperature);
    seed.push_back(k.seed);
    sample.push_back(k.sample);
    position.push_back(k.position);
  }
  constexpr int64_t columns = ops::SamplePart::columns;
  const Tensor parts = make_tensor(sampling_.parts.data, DType::f32, {ranks, n, columns}),
               own = make_tensor(
                   static_cast<float*>(sampling_.parts.data) + context_.layout.tensor_rank * n * columns,
                   DType::f32, {n, columns}),
               token = make_tensor(sampling_.token.data, DType::i32, {n}),
               log_prob = make_tensor(sampling_.log_prob.data, DType::f32, {n});
  ops::sample_tokens(exec_, {.logits = context_.next_logits.rows(0, n),
                             .temperature = upload(sampling_.temperature, temperature.data(), {n}),
                             .seed = upload(sampling_.seed, seed.data(), {n}),
                             .sample = upload(sampling_.sample, sample.data(), {n}),
                             .position = upload(sampling_.position, position.data(), {n}),
                             .tokens = vocabulary,
                             .first_column = own_.begin,
                             .out = own});
  if (ranks > 1)
    (*context_.groups)[parallel::group::tp]
        .all_gather_async(view_of(own), view_of(parts), comm::StreamRef{exec_.stream})
        .wait();
  ops::join_samples(exec_, {.parts = parts, .token = token, .log_prob = log_prob});
  std::vector<int32_t> tokens(keys.size());
  std::vector<float> log_probs(keys.size());
  ops::download(exec_, token, tokens.data());
  ops::download(exec_, log_prob, log_probs.data());
  std::vector<SampledToken> out;
  for (size_t i = 0; i < keys.size(); ++i) out.push_back({tokens[i], log_probs[i]});
  return out;
}

std::span<const float> GenerationPass::logits() {
  NRL_CHECK(context_.layout.tensor == 1, "logits of a part of the vocabulary");
  logits_.resize(static_cast<size_t>(sampled_ * vocabulary_));
  ops::download(exec_, context_.next_logits.rows(0, sampled_), logits_.data());
  return logits_;
}

}  // namespace nrl::model
