#include "apps/train/checkpoint.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/base/finite.h"
#include "core/io/json.h"

namespace nrl::train {
namespace {

using model::ModelSpec;
using model::Parameter;
using model::Part;

constexpr std::string_view dtype_text(DType t) {
  return t == DType::bf16 ? "bfloat16" : "float32";
}

std::vector<int64_t> disk_shape(const Part& part) {
  if (part.transposed_on_disk) return {part.shape[1], part.shape[0]};
  return part.shape;
}

char* part_data(const Tensor& weight, const Part& part) {
  return static_cast<char*>(weight.data) + part.offset * size_of(weight.dtype);
}

// (rows, columns) -> (columns, rows), elements of `unit` bytes.
std::vector<char> transposed(const char* in, int64_t rows, int64_t columns, int64_t unit) {
  std::vector<char> out(static_cast<size_t>(rows * columns * unit));
  constexpr int64_t block = 32;
  for (int64_t r0 = 0; r0 < rows; r0 += block)
    for (int64_t c0 = 0; c0 < columns; c0 += block)
      for (int64_t r = r0; r < std::min(rows, r0 + block); ++r)
        for (int64_t c = c0; c < std::min(columns, c0 + block); ++c)
          std::memcpy(&out[static_cast<size_t>((c * rows + r) * unit)], in + (r * columns + c) * unit,
                      static_cast<size_t>(unit));
  return out;
}

// The optimizer tensors of one rank: one per (kind, part, piece of a part that it owns).
struct StatePiece {
  ShardSpec shard;
  float* data = nullptr;
  int64_t count = 0;
};

template <class Visit>
void for_each_owned_part(const TrainState& s, const Visit& visit) {
  for (const plan::OwnedRange& range : s.owned) {
    const Parameter& p = s.parameters->all[static_cast<size_t>(range.parameter)];
    for (const Part& part : p.parts) {
      const int64_t begin = std::max(range.offset, part.offset),
                    end = std::min(range.offset + range.count, part.offset + part.numel());
      if (begin < end) visit(part, begin - part.offset, end - begin, range.state + begin - range.offset);
    }
  }
}

std::vector<std::pair<std::string, float*>> state_kinds(const TrainState& s) {
  std::vector<std::pair<std::string, float*>> kinds{{"exp_avg/", s.exp_avg}, {"exp_avg_sq/", s.exp_avg_sq}};
  if (s.master) kinds.push_back({"master/", s.master});
  return kinds;
}

std::vector<StatePiece> state_pieces(const TrainState& s) {
  std::vector<StatePiece> pieces;
  for (const auto& [kind, base] : state_kinds(s))
    for_each_owned_part(
        s, [&, kind = kind, base = base](const Part& part, int64_t offset, int64_t count, int64_t at) {
          const std::string name = kind + part.name;
          const bool whole = count == part.numel();
          pieces.push_back({whole ? ShardSpec::whole(name, DType::f32, part.shape)
                                  : ShardSpec::flat(fmt::format("{}@{}", name, offset), name, DType::f32,
                                                    part.shape, offset, count),
                            base + at, count});
        });
  return pieces;
}

JsonValue to_json(const Position& p) {
  return JsonValue::object({{"step", p.step},
                            {"updates", p.updates},
                            {"consumed_samples", p.consumed_samples},
                            {"tokens", p.tokens},
                            {"skipped", p.skipped},
                            {"skipped_in_a_row", p.skipped_in_a_row},
                            {"dataset_samples", p.dataset_samples},
                            {"global_batch", p.global_batch},
                            {"best_val_loss", p.best_val_loss},
                            {"best_val_step", p.best_val_step}});
}

// NaN and infinity spread through a model within one step, so they are refused where they are still in one
// tensor.
void require_finite(const std::string& where, std::string_view name, DType dtype, const void* data,
                    int64_t count) {
  const int64_t bad = count_non_finite(dtype, data, static_cast<size_t>(count * size_of(dtype)));
  if (bad > 0)
    fail(Exit::data,
         "{}: tensor \"{}\" holds {} NaN or infinite values of {} read: these weights cannot be used", where,
         name, bad, count);
}

void convert_into(const Tensor& weight, const Part& part, const char* raw, DType from) {
  const int64_t n = part.numel();
  char* out = part_data(weight, part);
  if (from == weight.dtype) {
    std::memcpy(out, raw, static_cast<size_t>(n * size_of(from)));
    return;
  }
  auto value = [&](int64_t i) -> float {
    if (from == DType::f32) return reinterpret_cast<const float*>(raw)[i];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(raw)[i];
    if (from == DType::bf16) return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;  // f16
    const float magnitude = exponent == 31  ? (mantissa ? NAN : INFINITY)
                            : exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                            : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
  };
  for (int64_t i = 0; i < n; ++i) {
    if (weight.dtype == DType::f32) {
      reinterpret_cast<float*>(out)[i] = value(i);
    } else {
      reinterpret_cast<bf16*>(out)[i] = bf16(value(i));
    }
  }
}

}  // namespace

std::string save_checkpoint(const TrainState& s, const Position& position, const SaveOptions& options,
                            const RankGroup& group) {
  const bool first = group.rank == 0;
  std::vector<ShardSpec> model_shards;
  uint64_t bytes = 0;
  if (first)
    for (size_t i = 0; i < s.weights.size(); ++i)
      for (const Part& part : s.parameters->all[i].parts) {
        model_shards.push_back(ShardSpec::whole(part.name, s.weights[i].dtype, disk_shape(part)));
        bytes += static_cast<uint64_t>(part.numel() * size_of(s.weights[i].dtype));
      }
  std::vector<StatePiece> pieces;
  if (options.optimizer) pieces = state_pieces(s);
  for (const StatePiece& piece : pieces) bytes += static_cast<uint64_t>(piece.count) * 4;

  CheckpointWriter::Options writing;
  writing.refuse_non_finite = true;
  CheckpointWriter writer(options.store, position.step, bytes, group, writing);
  if (first) {
    writer.add_tensors("model.safetensors", model_shards, [&](SafetensorsWriter& file) {
      for (size_t i = 0; i < s.weights.size(); ++i)
        for (const Part& part : s.parameters->all[i].parts) {
          const char* data = part_data(s.weights[i], part);
          const int64_t unit = size_of(s.weights[i].dtype);
          const auto size = static_cast<size_t>(part.numel() * unit);
          if (part.transposed_on_disk) {
            file.write(part.name, transposed(data, part.shape[0], part.shape[1], unit).data(), size);
          } else {
            file.write(part.name, data, size);
          }
        }
    });
    writer.guard([&] {
      const std::string config = hf_config_json(*s.spec, dtype_text(s.weights.front().dtype), options.hf);
      writer.add_file("config.json", config);
      if (const std::string text = hf_generation_config(config, options.hf); !text.empty())
        writer.add_file("generation_config.json", text);
    });
    writer.add_file("nrl-train.yaml", options.resolved_config);
    for (const data::Tokenizer::File& file : options.hf.files) writer.add_file(file.name, file.content);
  }
  std::vector<ShardSpec> shards;
  for (const StatePiece& piece : pieces) shards.push_back(piece.shard);
  writer.add_tensor_set("optimizer", shards, [&](SafetensorsWriter& file) {
    for (const StatePiece& piece : pieces)
      file.write(piece.shard.key, piece.data, static_cast<size_t>(piece.count) * 4);
  });
  JsonValue state = to_json(position);
  state.set("run", options.run);
  return writer.commit(state);
}

Position read_position(const CheckpointReader& reader) {
  const JsonValue& json = reader.manifest().state;
  // Far above any run, and far enough below 2^63 for sums and products with a batch.
  constexpr int64_t most_steps = int64_t{1} << 40, most_samples = int64_t{1} << 50;
  constexpr int64_t most_tokens = int64_t{1} << 62;
  const auto counter = [&](std::string_view key, int64_t most) {
    const int64_t n = json.get_int(key);
    if (n < 0 || n > most)
      fail(Exit::data, "{}: {} is {}; expected 0 to {}", join_path(reader.path(), kManifestName), key, n,
           most);
    return n;
  };
  Position p;
  p.step = counter("step", most_steps);
  p.updates = counter("updates", p.step);
  p.skipped = counter("skipped", p.step - p.updates);
  p.skipped_in_a_row = counter("skipped_in_a_row", p.skipped);
  p.consumed_samples = counter("consumed_samples", most_samples);
  p.tokens = counter("tokens", most_tokens);
  p.dataset_samples = counter("dataset_samples", most_samples);
  p.global_batch = counter("global_batch", INT32_MAX);
  p.best_val_step = counter("best_val_step", p.step);
  p.best_val_loss = json.get_double("best_val_loss");
  const bool consistent = p.step == reader.manifest().step && p.updates + p.skipped == p.step &&
                          p.consumed_samples >= p.step && p.tokens >= p.consumed_samples;
  if (!consistent)
    fail(Exit::data,
         "{}: the counters contradict each other: step {} in step-{}, {} updates, {} skipped, {} samples, {} "
         "tokens",
         join_path(reader.path(), kManifestName), p.step, reader.manifest().step, p.updates, p.skipped,
         p.consumed_samples, p.tokens);
  return p;
}

void load_checkpoint(CheckpointReader& reader, const TrainState& s) {
  std::vector<TensorSpec> wanted;
  for (size_t i = 0; i < s.weights.size(); ++i)
    for (const Part& part : s.parameters->all[i].parts) {
      wanted.push_back({part.name, s.weights[i].dtype, disk_shape(part)});
      for (const auto& kind : state_kinds(s))
        wanted.push_back({kind.first + part.name, DType::f32, part.shape});
    }
  reader.check_names(wanted);
  std::vector<char> raw;
  for (size_t i = 0; i < s.weights.size(); ++i)
    for (const Part& part : s.parameters->all[i].parts) {
      const int64_t unit = size_of(s.weights[i].dtype);
      const auto size = static_cast<size_t>(part.numel() * unit);
      char* out = part_data(s.weights[i], part);
      if (part.transposed_on_disk) {
        raw.resize(size);
        reader.read_logical(part.name, raw.data(), size);
        std::memcpy(out, transposed(raw.data(), part.shape[1], part.shape[0], unit).data(), size);
      } else {
        reader.read_logical(part.name, out, size);
      }
      require_finite(reader.path(), part.name, s.weights[i].dtype, out, part.numel());
    }
  for (const auto& [kind, base] : state_kinds(s))
    for_each_owned_part(
        s, [&, kind = kind, base = base](const Part& part, int64_t offset, int64_t count, int64_t at) {
          reader.read_logical(kind + part.name, offset, count, base + at);
          require_finite(reader.path(), kind + part.name, DType::f32, base + at, count);
        });
}

DType stored_dtype(const std::string& directory) {
  const SafetensorsSet files(directory);
  for (const std::string& name : files.names())
    if (files.at(name).tensor->dtype != DType::bf16) return DType::f32;
  return DType::bf16;
}

void load_weights(const std::string& directory, const ModelSpec& spec, const model::ParameterList& parameters,
                  const std::vector<Tensor>& weights) {
  const SafetensorsSet files(directory);
  size_t found = 0;
  std::vector<char> raw;
  for (size_t i = 0; i < weights.size(); ++i)
    for (const Part& part : parameters.all[i].parts) {
      std::string name = part.name;
      // Published GPT-2 files lack the prefix.
      if (spec.family == model::Family::gpt2 && !files.find(name)) name = name.substr(name.find('.') + 1);
      const auto [file, tensor] = files.at(name);
      if (tensor->shape != disk_shape(part))
        fail(Exit::data, "{}: {} is {}, the model needs {}", file->path(), name, shape_text(tensor->shape),
             shape_text(disk_shape(part)));
      const bool usable =
          tensor->dtype == DType::f32 || tensor->dtype == DType::bf16 || tensor->dtype == DType::f16;
      if (!usable)
        fail(Exit::data, "{}: {} holds {}; F32, BF16 or F16 is needed", file->path(), name,
             tensor->dtype_name);
      raw.resize(tensor->bytes());
      file->read(*tensor, raw.data(), raw.size());
      if (part.transposed_on_disk)
        raw = transposed(raw.data(), part.shape[1], part.shape[0], size_of(*tensor->dtype));
      convert_into(weights[i], part, raw.data(), *tensor->dtype);
      require_finite(file->path(), name, weights[i].dtype, part_data(weights[i], part), part.numel());
      ++found;
    }
  std::string unexpected;
  for (const std::string& name : files.names()) {
    const bool buffer = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
                        name.ends_with("rotary_emb.inv_freq");
    const bool tied_head = spec.tied && name == "lm_head.weight";
    bool known = buffer || tied_head;
    for (const Parameter& p : parameters.all)
      for (const Part& part : p.parts)
        known = known || part.name == name ||
                (spec.family == model::Family::gpt2 && part.name == "transformer." + name);
    if (!known) unexpected += (unexpected.empty() ? "" : ", ") + name;
  }
  if (!unexpected.empty())
    fail(Exit::data, "{}: tensors that this model does not have: {}; is config.json the right one?",
         directory, unexpected.substr(0, 400));
}

}  // namespace nrl::train
