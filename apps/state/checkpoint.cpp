#include "apps/state/checkpoint.h"

#include <algorithm>
#include <set>
#include <utility>

#include "apps/state/adapter_files.h"
#include "apps/state/load_slice.h"
#include "apps/state/snapshot.h"
#include "apps/state/state_pieces.h"
#include "core/base/log.h"
#include "core/io/json.h"
#include "core/ops/step.h"

namespace nrl::train {
namespace {

using model::ModelSpec;
using model::Parameter;
using model::Part;

constexpr std::string_view dtype_text(DType t) {
  return t == DType::bf16 ? "bfloat16" : t == DType::f16 ? "float16" : "float32";
}

constexpr std::string_view error_prefix = "grad_error.", sum_error_prefix = "grad_sum_error/";

std::string error_name(int rank, std::string_view part) {
  return fmt::format("{}{}/{}", error_prefix, rank, part);
}

// A tensor of a group's state with what is needed to read and write it.
struct GroupState {
  std::string name;
  StateMemory memory;
  std::vector<plan::OwnedRange> owned;  ///< the ranges whose state is in this tensor

  auto named() const {
    return [this](const Part& part) { return name + "/" + part.name; };
  }
};

// The tensors of the optimizer state, to which pieces refer: what is in the memory of the device, and what is
// offloaded.
std::vector<GroupState> state_tensors(const TrainState& s, bool saving) {
  std::vector<GroupState> out;
  for (const engine::GroupTensors& t : s.groups)
    for (const bool offloaded : {true, false}) {
      const std::vector<Tensor>& tensors = offloaded ? t.offloaded : t.state;
      const std::vector<Tensor>& scales = offloaded ? t.offloaded_scales : t.scales;
      std::vector<plan::OwnedRange> owned;
      const std::vector<plan::OwnedRange>& ranges = saving ? t.group->saved : t.group->owned;
      std::copy_if(ranges.begin(), ranges.end(), std::back_inserter(owned),
                   [&](const plan::OwnedRange& r) { return r.offloaded == offloaded; });
      if (owned.empty()) continue;
      for (size_t k = 0; k < tensors.size(); ++k) {
        const plan::StateTensor& state = t.group->state[k];
        StateMemory memory{.values = tensors[k], .scales = k < scales.size() ? scales[k] : Tensor{}};
        if (state.dtype == DType::u16) memory.weights = t.weights;
        out.push_back({state.name, memory, owned});
      }
    }
  return out;
}

struct ErrorTensors {
  const engine::GroupTensors* group = nullptr;
  StateMemory errors, sums;
};
std::vector<ErrorTensors> error_tensors(const TrainState& s) {
  std::vector<ErrorTensors> out;
  for (const engine::GroupTensors& t : s.groups) out.push_back({&t, {t.errors}, {t.sum_errors}});
  return out;
}

// What this rank's gradients and sums lost by rounding. `stored`: only pieces of tensors for which it holds.
template <class Stored>
std::vector<StatePiece> error_pieces(const TrainState& s, const std::vector<ErrorTensors>& tensors,
                                     bool counted_only, const Stored& stored) {
  std::vector<StatePiece> pieces;
  for (const ErrorTensors& e : tensors) {
    const engine::GroupTensors& t = *e.group;
    const plan::ParamGroup& g = *t.group;
    const int ranks = g.layout.shards() * g.replicas;
    std::vector<StatePiece> own;
    add_state(
        *s.parameters, e.errors, g.error_ranges, counted_only,
        [&](const Part& part) { return error_name(g.reduce_rank, part.name); }, own);
    add_state(
        *s.parameters, e.sums, g.sum_error_ranges, counted_only,
        [](const Part& part) { return std::string(sum_error_prefix) + part.name; }, own);
    std::copy_if(own.begin(), own.end(), std::back_inserter(pieces),
                 [&](const StatePiece& piece) { return stored(piece.name, ranks); });
  }
  return pieces;
}

constexpr std::string_view fp8_prefix = "fp8.";

// The scales of FP8 operands that outlive a step. Pieces refer to them.
struct ScaleTensor {
  const char* name;
  StateMemory memory;
};
std::vector<ScaleTensor> scale_tensors(const TrainState& s) {
  std::vector<ScaleTensor> out;
  for (const auto& [name, t] : {std::pair("fp8.scale", s.scales), std::pair("fp8.amax", s.amax)})
    if (t) out.push_back({name, {t}});
  return out;
}

std::vector<StatePiece> scale_pieces(const std::vector<ScaleTensor>& tensors) {
  std::vector<StatePiece> pieces;
  for (const ScaleTensor& s : tensors) {
    const Tensor& t = s.memory.values;
    StatePiece& piece = pieces.emplace_back();
    piece.name = s.name;
    for (int i = 0; i < t.rank; ++i) piece.shape.push_back(t.dim(i));
    piece.count = piece.run = piece.stride = t.numel();
    piece.memory = &s.memory;
  }
  return pieces;
}

JsonValue to_json(const Position& p) {
  JsonValue out = JsonValue::object({{"step", p.step},
                                     {"updates", p.updates},
                                     {"consumed_samples", p.consumed_samples},
                                     {"tokens", p.tokens},
                                     {"skipped", p.skipped},
                                     {"skipped_in_a_row", p.skipped_in_a_row},
                                     {"loss_scale", p.loss_scale},
                                     {"clean_steps", p.clean_steps},
                                     {"dataset_samples", p.dataset_samples},
                                     {"global_batch", p.global_batch},
                                     {"best_val_loss", p.best_val_loss},
                                     {"best_val_step", p.best_val_step}});
  if (p.prompts > 0) out.set("prompts", p.prompts);
  if (p.replicas_agreed) out.set("replicas_agreed", true);
  if (p.recoveries > 0) {
    out.set("lr_factor", p.lr_factor);
    out.set("recoveries", p.recoveries);
  }
  return out;
}

// Sets all elements: state that a checkpoint may lack must not keep what another checkpoint left in it.
void fill_floats(const Tensor& t, float value, Staging* staging) {
  if (!t) return;
  NRL_CHECK(t.dtype == DType::f32, "{}", name_of(t.dtype));
  fill_memory(staging, t.data, t.numel(), size_of(t.dtype),
              [&](int64_t, int64_t n, void* out) { std::fill_n(static_cast<float*>(out), n, value); });
}

}  // namespace

std::string save_checkpoint(const TrainState& s, const Position& position, const SaveOptions& options,
                            const RankGroup& group) {
  const bool adapters = static_cast<bool>(s.spec->trained.adapters);
  std::vector<bool> saves(s.parameters->all.size());
  for (const engine::GroupTensors& t : s.groups)
    for (const int p : t.group->saved_weights) saves[p] = s.parameters->all[p].adapter == adapters;
  std::vector<TensorSlice> slices;
  // The saved elements, so that the sum over the ranks is the size of the checkpoint.
  int64_t bytes = 0;
  for (const engine::WeightSlice& weight : s.weights) {
    if (!saves[weight.parameter]) continue;
    TensorSlice& slice = slices.emplace_back(slice_of(weight));
    const int64_t size = slice.rows * slice.columns * size_of(slice.dtype);
    if (s.snapshot) slice.data = s.snapshot->at(slice.data, size);
    bytes += size;
  }
  std::vector<StatePiece> pieces;
  const std::vector<GroupState> state = state_tensors(s, true);
  const std::vector<ErrorTensors> errors = error_tensors(s);
  const std::vector<ScaleTensor> scales = scale_tensors(s);
  if (options.optimizer) {
    for (const GroupState& t : state) add_state(*s.parameters, t.memory, t.owned, true, t.named(), pieces);
    for (StatePiece& piece : error_pieces(s, errors, true, [](std::string_view, int) { return true; }))
      pieces.push_back(std::move(piece));
    if (group.rank == 0)
      for (StatePiece& piece : scale_pieces(scales)) pieces.push_back(std::move(piece));
  }
  for (const StatePiece& piece : pieces) bytes += piece.count * size_of(piece.dtype);

  CheckpointWriter::Options writing;
  writing.refuse_non_finite = true;
  if (!s.snapshot) writing.staging = s.staging;
  writing.plans = options.plans;
  writing.before_publish = options.before_commit;
  CheckpointWriter writer(options.store, position.step, static_cast<uint64_t>(bytes), group, writing);
  if (adapters)
    writer.add_slices(adapter_stem, slices, /*one_file=*/true);
  else
    writer.add_slices("model", slices);
  if (group.rank == 0) {
    writer.guard([&] {
      if (adapters) return writer.add_file(adapter_config_name, adapter_config_json(*s.spec, options.base));
      const std::string config =
          hf_config_json(*s.spec, dtype_text(s.groups.front().group->weight), options.hf);
      writer.add_file("config.json", config);
      if (const std::string text = hf_generation_config(config, options.hf); !text.empty())
        writer.add_file("generation_config.json", text);
    });
    writer.add_file("nrl-train.yaml", options.resolved_config);
    for (const data::Tokenizer::File& file : options.hf.files) writer.add_file(file.name, file.content);
  }
  std::vector<ShardSpec> shards;
  for (const StatePiece& piece : pieces) shards.push_back(piece.shard());
  writer.add_tensor_set("optimizer", shards, [&](SafetensorsWriter& file) {
    StateReader reader(pieces, s.snapshot ? s.snapshot : s.staging);
    for (size_t i = 0; i < pieces.size(); ++i)
      for (int64_t at = 0; at < pieces[i].count;) {
        const auto [data, count] = reader.next(pieces[i], at);
        file.write_slice(shards[i].key, static_cast<uint64_t>(at * size_of(StatePiece::dtype)), data,
                         static_cast<size_t>(count * size_of(StatePiece::dtype)));
        at += count;
      }
  });
  JsonValue saved = to_json(position);
  saved.set("run", options.run);
  return writer.commit(saved);
}

Position read_position(const CheckpointReader& reader) {
  const JsonValue& json = reader.manifest().state;
  // Larger than in any run, and small enough that sums and products with a batch size do not overflow.
  constexpr int64_t max_steps = int64_t{1} << 40, max_samples = int64_t{1} << 50;
  constexpr int64_t max_tokens = int64_t{1} << 62;
  constexpr double max_loss = 1e9;
  const auto counter = [&](std::string_view key, int64_t max) {
    const int64_t n = json.get_int(key);
    if (n < 0 || n > max)
      fail(Exit::data, "{}: {} is {}; expected 0 to {}", reader.manifest_path(), key, n, max);
    return n;
  };
  Position p;
  p.step = counter("step", max_steps);
  p.updates = counter("updates", p.step);
  p.skipped = counter("skipped", p.step - p.updates);
  p.skipped_in_a_row = counter("skipped_in_a_row", p.skipped);
  if (json.find("loss_scale")) {
    p.loss_scale = json.get_double("loss_scale");
    p.clean_steps = counter("clean_steps", p.step);
    if (!(p.loss_scale >= 0 && p.loss_scale <= ops::largest_loss_scale))
      fail(Exit::data, "{}: loss_scale is {}; expected 0 to 2^60", reader.manifest_path(), p.loss_scale);
  }
  p.consumed_samples = counter("consumed_samples", max_samples);
  p.tokens = counter("tokens", max_tokens);
  p.dataset_samples = counter("dataset_samples", max_samples);
  p.global_batch = counter("global_batch", INT32_MAX);
  if (json.find("prompts")) p.prompts = counter("prompts", max_samples);
  p.best_val_step = counter("best_val_step", p.step);
  p.best_val_loss = json.get_double("best_val_loss");
  if (!(p.best_val_loss >= 0 && p.best_val_loss <= max_loss))
    fail(Exit::data, "{}: best_val_loss is {}; expected 0 to {:g}", reader.manifest_path(), p.best_val_loss,
         max_loss);
  if (json.find("recoveries")) {
    p.recoveries = counter("recoveries", max_steps);
    p.lr_factor = json.get_double("lr_factor");
    if (!(p.lr_factor > 0 && p.lr_factor <= 1))
      fail(Exit::data, "{}: lr_factor is {}; expected above 0, to 1", reader.manifest_path(), p.lr_factor);
  }
  const bool consistent = p.step == reader.manifest().step && p.updates + p.skipped == p.step &&
                          p.consumed_samples >= p.step && p.tokens >= p.consumed_samples;
  if (!consistent)
    fail(Exit::data,
         "{}: inconsistent counters: step {} in step-{}, {} updates, {} skipped, {} samples, {} tokens",
         reader.manifest_path(), p.step, reader.manifest().step, p.updates, p.skipped, p.consumed_samples,
         p.tokens);
  return p;
}

std::string load_checkpoint(CheckpointReader& reader, const TrainState& s) {
  // The tensors of the whole model, of which this rank may hold a part.
  std::vector<TensorSpec> wanted;
  std::set<std::string> names;
  const auto want = [&](const std::string& name, DType dtype, const std::vector<int64_t>& shape) {
    if (names.insert(name).second) wanted.push_back({name, dtype, shape});
  };
  const engine::GroupTensors* trained = nullptr;  // every trained group has the same state
  for (const engine::GroupTensors& t : s.groups)
    if (t.group->trainable) trained = &t;
  const bool adapters = static_cast<bool>(s.spec->trained.adapters);
  for (const Parameter& parameter : s.whole->all)
    for (const Part& part : parameter.parts) {
      if (parameter.adapter != adapters) continue;
      want(part.name, parameter.f32 ? DType::f32 : s.groups.front().group->weight, shape_on_disk(part));
      if (trained && parameter.trainable)
        for (const plan::StateTensor& state : trained->group->state)
          want(state.name + "/" + part.name, StatePiece::dtype, part.global);
    }
  // What rounding lost is of as many ranks as saved it: other runs begin without.
  for (const auto& [name, tensor] : reader.manifest().tensors)
    if (name.starts_with(error_prefix) || name.starts_with(sum_error_prefix) || name.starts_with(fp8_prefix))
      want(name, tensor.dtype, tensor.shape);
  const auto has_any = [&](const plan::StateTensor& state) {
    const std::string prefix = state.name + "/";
    const auto found = reader.manifest().tensors.lower_bound(prefix);
    return found != reader.manifest().tensors.end() && found->first.starts_with(prefix);
  };
  if (trained && std::none_of(trained->group->state.begin(), trained->group->state.end(), has_any))
    fail(
        Exit::data,
        "{}: has no optimizer state (checkpointing.save_optimizer: false saves none), so that the run cannot "
        "go on. Fix: start a new one from its weights: policy.model_name: {}, checkpointing.resume: never",
        reader.path(), reader.path());
  reader.check_names(wanted);

  for (const engine::WeightSlice& weight : s.weights)
    if (s.parameters->all[weight.parameter].adapter == adapters)
      load_slice([&] { return reader.files_of(weight.part.name); }, weight.part.name, slice_of(weight),
                 s.staging, [&](const TensorSlice& slice) { reader.read_slice(slice); });
  std::vector<StatePiece> pieces;
  const std::vector<GroupState> state = state_tensors(s, false);
  const std::vector<ErrorTensors> errors = error_tensors(s);
  for (const GroupState& t : state)
    if (!t.memory.encoded()) add_state(*s.parameters, t.memory, t.owned, false, t.named(), pieces);
  int64_t kept = 0;
  for (const ErrorTensors& e : errors) {
    fill_floats(e.errors.values, 0, s.staging);
    fill_floats(e.sums.values, 0, s.staging);
  }
  for (StatePiece& piece : error_pieces(s, errors, false, [&](std::string_view name, int ranks) {
         const std::string_view part = name.substr(name.find('/') + 1);
         return reader.find(name) && reader.find(error_name(ranks - 1, part)) &&
                !reader.find(error_name(ranks, part));
       })) {
    pieces.push_back(std::move(piece));
    ++kept;
  }
  const bool wants_errors = std::any_of(s.groups.begin(), s.groups.end(), [](const engine::GroupTensors& t) {
    return t.errors && t.group->reduce_rank == 0;
  });
  if (wants_errors && kept == 0)
    log::warn(
        "{}: has no rounding errors of fp8 gradients of as many ranks as this run has: they begin at zero",
        reader.path());
  // Of the same layers and as many steps; else the run measures anew.
  const std::vector<ScaleTensor> scale_memory = scale_tensors(s);
  const std::vector<StatePiece> scales = scale_pieces(scale_memory);
  std::string warning;
  const bool same_scales = std::all_of(scales.begin(), scales.end(), [&](const StatePiece& piece) {
    const auto* stored = reader.find(piece.name);
    return stored && stored->shape == piece.shape;
  });
  fill_floats(s.scales, 1, s.staging);
  fill_floats(s.amax, 0, s.staging);
  if (same_scales)
    pieces.insert(pieces.end(), scales.begin(), scales.end());
  else
    warning = fmt::format("{}: has no FP8 scales of this recipe: they begin at 1", reader.path());
  const auto load_piece = [&](const StatePiece& piece, Staging* staging) {
    // In elements if they are contiguous, else in runs.
    const int64_t unit = piece.flat() ? 1 : piece.run, stride = piece.flat() ? 1 : piece.stride;
    load_finite([&] { return reader.files_of(piece.name); }, piece.name, piece.dtype, piece.data(),
                piece.count / unit, unit * size_of(piece.dtype), staging,
                [&](int64_t first, int64_t n, void* out) {
                  const int64_t reads = piece.flat() ? 1 : n, count = piece.flat() ? n : piece.run;
                  for (int64_t i = 0; i < reads; ++i)
                    reader.read_logical(piece.name, piece.offset + (first + i) * stride, count,
                                        static_cast<char*>(out) + i * count * size_of(piece.dtype));
                });
  };
  for (const StatePiece& piece : pieces) load_piece(piece, s.staging);
  // Through host memory, because the pieces of a block that shares a scale may be apart in the files.
  std::vector<float> values;
  for (const GroupState& t : state) {
    if (!t.memory.encoded()) continue;
    for (const plan::OwnedRange& range : t.owned)
      for (int64_t at = 0; at < range.count; at += state_window) {
        plan::OwnedRange part = range;
        part.offset += at;
        part.count = std::min(state_window, range.count - at);
        part.state = part.weight = 0;
        values.resize(static_cast<size_t>(part.count));
        const StateMemory decoded{make_tensor(values.data(), DType::f32, {part.count})};
        pieces.clear();
        add_state(*s.parameters, decoded, std::span(&part, 1), false, t.named(), pieces);
        for (const StatePiece& piece : pieces) load_piece(piece, nullptr);
        write_encoded(t.memory, range.state + at, values, s.staging);
      }
  }
  return warning;
}

}  // namespace nrl::train
