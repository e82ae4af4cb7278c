#include "apps/model/generation_pass.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "apps/model/chunks.h"
#include "apps/model/program/rope_tables.h"
#include "core/ops/dry_run.h"
#include "core/ops/libraries.h"
#include "core/ops/sample.h"
#include "core/ops/transfer.h"

namespace nrl::model {

using memory::Category;

namespace {

int64_t table_width(const GenerationLimits& l) {
  return (l.longest + l.page_tokens - 1) / l.page_tokens;
}

constexpr int64_t alignment = 16;  // of the tensors in the block of rows

int64_t aligned(int64_t bytes) {
  return (bytes + alignment - 1) / alignment * alignment;
}

/// Bytes of a block with the most rows.
int64_t block_bytes(const GenerationLimits& l) {
  const int64_t n = l.tokens, s = l.sequences;
  return 3 * aligned(n * 4) + aligned((s + 1) * 4) + 4 * aligned(s * 4) + aligned(s * table_width(l) * 4) +
         2 * aligned(s * 8);
}

/// Puts tensors into a block, one after the other. The addresses depend on their sizes alone.
class Packer {
 public:
  /// `host`: where they are written; null: nowhere.
  Packer(std::byte* device, std::byte* host) : device_(device), host_(host) {}
  template <class T>
  Tensor put(DType dtype, const std::vector<T>& values, std::initializer_list<int64_t> shape) {
    const Tensor t = make_tensor(device_ + size_, dtype, shape);
    NRL_CHECK(t.bytes() == static_cast<int64_t>(values.size() * sizeof(T)));
    if (host_ && !values.empty()) std::memcpy(host_ + size_, values.data(), values.size() * sizeof(T));
    size_ += aligned(t.bytes());
    return t;
  }
  int64_t size() const { return size_; }

 private:
  std::byte *device_, *host_;
  int64_t size_ = 0;
};

}  // namespace

int64_t padded_sequences(int64_t sequences, int64_t most) {
  int64_t n = 1;
  while (n < sequences && n < 8) n *= 2;
  return std::min(n < sequences ? (sequences + 7) / 8 * 8 : n, most);
}

struct GenerationPass::Rows {
  MicroBatch batch;
  PagedCache cache;
  Tensor temperature, seed, sample, position;  ///< without data: no keys
};

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
  const int64_t n = l.tokens, s = l.sequences;
  // Experts with a capacity would drop other tokens.
  pads_ = device == DeviceType::cuda && spec.moe.capacity_factor == 0;
  if (device == DeviceType::cpu)
    no_graphs_ = {};
  else if (!pads_)
    no_graphs_ = "experts have a capacity, which rows of padding would take";
  else if (layout.tensor > 1)  // StepWatch limits the graphs of training; nothing limits these
    no_graphs_ = "a replayed graph of tensor-parallel ranks would wait for a lost rank without a time limit";
  else if (!l.graphs)
    no_graphs_ = "they are off";
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
  const auto block = add("rows", block_bytes(l)), logits = add("logits", s * own_.count * 4),
             rope = add("rope table", rope_table_bytes(spec, l.longest)),
             parts = add("sampling parts", layout.tensor * s * ops::SamplePart::columns * 4),
             results = add("sampled tokens", s * 8);
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
    block_ = static_cast<std::byte*>(arenas.at(plan, block));
    context_.next_logits = at(logits, DType::f32, {s, own_.count});
    context_.rope_tables = rope_tables_at(spec, l.longest, arenas.at(plan, rope));
    parts_ = at(parts, DType::f32, {layout.tensor, s, ops::SamplePart::columns});
    results_ = at(results, DType::i32, {2 * s});
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
  if (exec_.device)
    staging_ =
        device::Memory(*exec_.device, device::Memory::Kind::pinned, static_cast<size_t>(block_bytes(l)));
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
                        .sampled = std::vector<int32_t>(static_cast<size_t>(limits_.sequences)),
                        .keys = std::vector<SamplingKey>(static_cast<size_t>(limits_.sequences))};
    for (int64_t left = limits_.tokens; left > 0 && std::ssize(rows.sequences) < limits_.sequences;) {
      const int64_t n = std::min(left, most);
      rows.sequences.push_back({.tokens = std::span(tokens).first(static_cast<size_t>(n)),
                                .first = limits_.longest - n,
                                .pages = pages});
      left -= n;
    }
    run(rows);
  }
  if (exec_.libraries && no_graphs_.empty()) no_graphs_ = exec_.libraries->not_capturable;
  exec_ = exec;
  return dry.workspace();
}

void GenerationPass::copy_page(int32_t from, int32_t to) {
  const int64_t page = limits_.page_tokens;
  for (const PagedCache::Layer& layer : cache_.layers)
    for (const Tensor& t : {layer.keys, layer.values})
      ops::copy(exec_, t.rows(from * page, page), t.rows(to * page, page));
}

void GenerationPass::upload(const GenerationRows& rows, int64_t padding, Rows& to) {
  const int64_t page = limits_.page_tokens;
  std::vector<int32_t> ids, positions, slots, cu{0}, context, table, sampled = rows.sampled;
  // The width is an argument of kernels.
  auto width = static_cast<size_t>(table_width(limits_));
  if (!pads_) {
    size_t most = 1;
    for (const GenerationRows::Sequence& s : rows.sequences) most = std::max(most, s.pages.size());
    width = std::min(width, most);
  }
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
    to.cache.longest = std::max(to.cache.longest, end);
  }
  std::vector<SamplingKey> keys = rows.keys;
  for (int64_t i = 0; i < padding; ++i) {
    sampled.push_back(static_cast<int32_t>(ids.size()));
    ids.push_back(ids.front());
    positions.push_back(positions.front());
    slots.push_back(-1);
    cu.push_back(static_cast<int32_t>(ids.size()));
    context.push_back(context.front());
    table.resize(table.size() + width);
    std::copy_n(table.begin(), width, table.end() - static_cast<std::ptrdiff_t>(width));
    if (!keys.empty()) keys.push_back(SamplingKey(keys.front()));
  }
  const auto n = static_cast<int64_t>(ids.size()), s = static_cast<int64_t>(context.size()),
             r = static_cast<int64_t>(sampled.size()), k = static_cast<int64_t>(keys.size());
  NRL_CHECK(n > 0 && n <= limits_.tokens && s <= limits_.sequences && r <= limits_.sequences,
            "{} rows of {} sequences, {} sampled; {} and {} at most", n, s, r, limits_.tokens,
            limits_.sequences);
  NRL_CHECK(k == 0 || k == r, "{} keys for {} rows", k, r);
  if (in_flight_) exec_.device->synchronize(exec_.stream);
  Packer block(block_, exec_.needed ? nullptr : exec_.device ? staging_.data() : block_);
  to.batch.ids = block.put(DType::i32, ids, {n});
  to.batch.positions = block.put(DType::i32, positions, {n});
  to.batch.cu_seqlens = block.put(DType::i32, cu, {s + 1});
  to.batch.lengths.longest = to.cache.longest;
  to.cache.slots = block.put(DType::i32, slots, {n});
  to.cache.context = block.put(DType::i32, context, {s});
  to.cache.block_table = block.put(DType::i32, table, {s, static_cast<int64_t>(width)});
  to.cache.sampled_rows = block.put(DType::i32, sampled, {r});
  if (k > 0) {
    std::vector<float> temperature;
    std::vector<int64_t> seed, sample;
    std::vector<int32_t> position;
    for (const SamplingKey& key : keys) {
      temperature.push_back(key.temperature);
      seed.push_back(key.seed);
      sample.push_back(key.sample);
      position.push_back(key.position);
    }
    to.temperature = block.put(DType::f32, temperature, {k});
    to.seed = block.put(DType::i64, seed, {k});
    to.sample = block.put(DType::i64, sample, {k});
    to.position = block.put(DType::i32, position, {k});
  }
  if (!exec_.device || exec_.needed) return;
  exec_.device->copy(block_, staging_.data(), static_cast<size_t>(block.size()),
                     device::CopyKind::host_to_device, exec_.stream);
  in_flight_ = true;
}

void GenerationPass::execute(const Rows& rows, bool samples) {
  MicroBatch batch = rows.batch;
  batch.cache = &rows.cache;
  stage_->execute(0, {.batches = {&batch, 1}});
  if (samples) sample(rows);
}

void GenerationPass::run(const GenerationRows& rows) {
  const auto s = static_cast<int64_t>(rows.sequences.size());
  sampled_ = static_cast<int64_t>(rows.sampled.size());
  bool decodes = pads_ && sampled_ == s;
  for (int64_t i = 0; decodes && i < s; ++i)
    decodes = rows.sequences[static_cast<size_t>(i)].tokens.size() == 1 &&
              rows.sampled[static_cast<size_t>(i)] == i;
  last_ = std::make_unique<Rows>(
      Rows{.batch = {}, .cache = cache_, .temperature = {}, .seed = {}, .sample = {}, .position = {}});
  upload(rows, decodes ? padded_sequences(s, limits_.sequences) - s : 0, *last_);
  const bool samples = !rows.keys.empty() && !rows.sample_later;
  if (!decodes || !exec_.device || exec_.needed || !no_graphs_.empty()) return execute(*last_, samples);
  Captured& captured = graphs_[{last_->cache.context.dim(0), samples}];
  if (!std::exchange(captured.ran, true)) return execute(*last_, samples);
  if (!captured.graph) {
    device::Capture capture(*exec_.device, exec_.stream);
    execute(*last_, samples);
    captured.graph = device::Graph(*exec_.device, capture.end());
  }
  captured.graph.launch(exec_.stream);
  ++replays_;
}

void GenerationPass::sample() {
  NRL_CHECK(last_ && last_->temperature.data, "a pass without keys is sampled");
  if (exec_.device) ops::upload(exec_, context_.next_logits.rows(0, sampled_), logits_.data());
  sample(*last_);
}

void GenerationPass::sample(const Rows& rows) {
  const int64_t n = rows.position.dim(0), ranks = context_.layout.tensor;
  constexpr int64_t columns = ops::SamplePart::columns;
  const Tensor parts = make_tensor(parts_.data, DType::f32, {ranks, n, columns}),
               own = make_tensor(static_cast<float*>(parts_.data) + context_.layout.tensor_rank * n * columns,
                                 DType::f32, {n, columns});
  auto* const results = static_cast<int32_t*>(results_.data);
  ops::sample_tokens(exec_, {.logits = context_.next_logits.rows(0, n),
                             .temperature = rows.temperature,
                             .seed = rows.seed,
                             .sample = rows.sample,
                             .position = rows.position,
                             .tokens = limits_.vocabulary > 0 ? limits_.vocabulary : vocabulary_,
                             .first_column = own_.begin,
                             .out = own});
  if (ranks > 1)
    (*context_.groups)[parallel::group::tp]
        .all_gather_async(view_of(own), view_of(parts), comm::StreamRef{exec_.stream})
        .wait();
  ops::join_samples(exec_, {.parts = parts,
                            .token = make_tensor(results, DType::i32, {n}),
                            .log_prob = make_tensor(results + n, DType::f32, {n})});
}

std::vector<SampledToken> GenerationPass::tokens() {
  if (sampled_ == 0) return {};
  NRL_CHECK(last_->position.data, "{} rows were sampled without keys", sampled_);
  const auto n = static_cast<size_t>(last_->position.dim(0));
  std::vector<int32_t> results(2 * n);
  ops::download(exec_, make_tensor(results_.data, DType::i32, {static_cast<int64_t>(2 * n)}), results.data());
  in_flight_ = false;
  std::vector<SampledToken> out;
  for (size_t i = 0; i < static_cast<size_t>(sampled_); ++i) {
    SampledToken& t = out.emplace_back(SampledToken{.token = results[i]});
    std::memcpy(&t.log_prob, &results[n + i], sizeof t.log_prob);
  }
  return out;
}

std::span<float> GenerationPass::logits() {
  NRL_CHECK(context_.layout.tensor == 1, "logits of a part of the vocabulary");
  const auto size = static_cast<size_t>(sampled_ * vocabulary_);
  if (!exec_.device) return {static_cast<float*>(context_.next_logits.data), size};
  logits_.resize(size);
  ops::download(exec_, context_.next_logits.rows(0, sampled_), logits_.data());
  in_flight_ = false;
  return logits_;
}

}  // namespace nrl::model
