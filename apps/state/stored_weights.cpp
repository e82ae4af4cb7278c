// Weights of model directories and adapters (checkpoint.h).

#include <string>
#include <utility>

#include "apps/state/adapter_files.h"
#include "apps/state/checkpoint.h"
#include "apps/state/load_slice.h"
#include "core/io/safetensors.h"

namespace nrl::train {

using model::ModelSpec;
using model::Parameter;
using model::Part;

std::vector<int64_t> shape_on_disk(const Part& part) {
  std::vector<int64_t> shape = part.global;
  if (part.transposed_on_disk) std::swap(shape[0], shape[1]);
  return shape;
}

TensorSlice slice_of(const engine::WeightSlice& weight) {
  const Part& part = weight.part;
  TensorSlice s;
  s.name = part.name;
  s.dtype = weight.values.dtype;
  s.shape = shape_on_disk(part);
  s.row = part.row, s.rows = part.rows;
  s.column = part.column, s.columns = part.columns;
  s.data = weight.values.data;
  if (part.transposed_on_disk) {
    std::swap(s.row, s.column);
    std::swap(s.rows, s.columns);
    s.transposed = true;
  }
  return s;
}

namespace {

DType dtype_of_files(const SafetensorsSet& files) {
  for (const std::string& name : files.names())
    // Biases of routers are f32 beside any weights.
    if (files.at(name).tensor->dtype != DType::bf16 && !name.ends_with(".e_score_correction_bias"))
      return DType::f32;
  return DType::bf16;
}

}  // namespace

DType stored_dtype(const std::string& directory) {
  if (is_adapter(directory)) {
    const DType base = stored_dtype(base_directory(directory, read_adapter(directory)));
    return base == DType::bf16 ? dtype_of_files(SafetensorsSet(directory, adapter_stem)) : base;
  }
  return dtype_of_files(SafetensorsSet(directory));
}

namespace {

/// load_weights() for the tensors of the model itself, or for its adapters.
void load_tensors(const SafetensorsSet& files, const std::string& directory, const ModelSpec& spec,
                  bool adapters, const std::vector<engine::WeightSlice>& weights, Staging* staging) {
  const std::string_view source = adapters ? "policy.lora" : "config.json";
  const model::FamilyRules& rules = model::rules_of(spec.family);
  for (const engine::WeightSlice& weight : weights) {
    std::string name = weight.part.name;
    // A head that is trained beside adapters begins with the model's.
    if (!adapters && name == model::adapted_score_name) name = model::score_name;
    if (name.starts_with(model::adapter_prefix) != adapters) continue;
    if (spec.new_head && name == model::score_name) continue;
    for (const std::string& other : model::names_in_files(rules, name))
      if (name = other; files.find(name)) break;
    const auto [file, tensor] = files.at(name);
    const TensorSlice slice = slice_of(weight);
    if (tensor->shape != slice.shape)
      fail(Exit::data, "{}: {} has shape {}; {} needs {}", file->path(), name, shape_text(tensor->shape),
           source, shape_text(slice.shape));
    const bool usable =
        tensor->dtype == DType::f32 || tensor->dtype == DType::bf16 || tensor->dtype == DType::f16;
    if (!usable)
      fail(Exit::data, "{}: {} has dtype {}; expected F32, BF16 or F16", file->path(), name,
           tensor->dtype_name);
    const auto unit = static_cast<uint64_t>(size_of(*tensor->dtype));
    load_slice([from = file] { return from->path(); }, name, slice, staging,
               [&, from = file, info = tensor](const TensorSlice& rows) {
                 read_slice(rows, *info->dtype, [&](int64_t offset, int64_t count, void* out) {
                   from->read_bytes(*info, static_cast<uint64_t>(offset) * unit, out,
                                    static_cast<size_t>(count) * unit);
                 });
               });
  }
  const model::ParameterList whole = model::make_parameters(spec);
  std::string unexpected;
  for (const std::string& name : files.names()) {
    const std::string own = model::name_in_text_model(rules, name);
    const bool buffer = own.empty() || name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
                        name.ends_with("rotary_emb.inv_freq");
    const bool other_head = (spec.tied || spec.new_head) && own == "lm_head.weight";
    const bool score = spec.head == model::HeadKind::scalar && !spec.new_head && name == model::score_name;
    bool known = buffer || other_head || score;
    for (const Parameter& p : whole.all)
      for (const Part& part : p.parts)
        known = known || part.name == own ||
                (!rules.optional_prefix.empty() && part.name == std::string(rules.optional_prefix) + own);
    if (!known) unexpected += (unexpected.empty() ? "" : ", ") + name;
  }
  if (!unexpected.empty())
    fail(Exit::data, "{}: tensors that {} does not describe: {}. Fix: use the {} of these weights", directory,
         source, unexpected.substr(0, 400), source);
}

}  // namespace

void load_weights(const std::string& directory, const ModelSpec& spec,
                  const std::vector<engine::WeightSlice>& weights, Staging* staging) {
  const bool adapter = is_adapter(directory);
  const std::string base = adapter ? base_directory(directory, read_adapter(directory)) : directory;
  load_tensors(SafetensorsSet(base), base, spec, false, weights, staging);
  if (adapter) load_adapter(directory, spec, weights, staging);
}

void load_adapter(const std::string& directory, const ModelSpec& spec,
                  const std::vector<engine::WeightSlice>& weights, Staging* staging) {
  load_tensors(SafetensorsSet(directory, adapter_stem), directory, spec, true, weights, staging);
}

}  // namespace nrl::train
