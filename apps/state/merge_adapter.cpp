#include "apps/state/merge_adapter.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "apps/model/families/hf_config.h"
#include "apps/model/spec/parameters.h"
#include "apps/state/adapter_files.h"
#include "apps/state/model_source.h"
#include "core/base/error.h"
#include "core/device/cpu/features.h"
#include "core/device/cpu/parallel.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"
#include "core/io/safetensors.h"
#include "core/io/tensor_slice.h"

namespace nrl::train {
namespace {

namespace fs = std::filesystem;

/// Copied as they are: configuration and tokenizer, not weights of other formats or the state of a run.
constexpr uint64_t most_copied_bytes = uint64_t{64} << 20;

/// A tensor of files in f32.
std::vector<float> read_f32(const SafetensorsSet& files, const std::string& name) {
  const auto [file, tensor] = files.at(name);
  const DType stored = tensor->dtype.value_or(DType::u8);
  if (stored != DType::f32 && stored != DType::bf16 && stored != DType::f16)
    fail(Exit::data, "{}: {} has dtype {}; expected F32, BF16 or F16", file->path(), name,
         tensor->dtype_name);
  std::vector<float> out(static_cast<size_t>(tensor->elements()));
  TensorSlice slice{.name = name, .shape = tensor->shape};
  slice.rows = tensor->shape.at(0);
  slice.columns = slice.width();
  slice.data = out.data();
  const auto unit = static_cast<uint64_t>(size_of(stored));
  read_slice(slice, stored, [&, from = file, info = tensor](int64_t offset, int64_t count, void* to) {
    from->read_bytes(*info, static_cast<uint64_t>(offset) * unit, to, static_cast<size_t>(count) * unit);
  });
  return out;
}

/// Rounds once; returns the bytes of the tensor.
std::vector<std::byte> rounded(const std::vector<float>& x, DType dtype) {
  std::vector<std::byte> out(x.size() * static_cast<size_t>(size_of(dtype)));
  auto* const words = reinterpret_cast<uint16_t*>(out.data());
  if (dtype == DType::f32) std::copy(x.begin(), x.end(), reinterpret_cast<float*>(out.data()));
  for (size_t i = 0; dtype != DType::f32 && i < x.size(); ++i)
    words[i] = dtype == DType::bf16 ? bf16(x[i]).bits : f16(x[i]).bits;
  return out;
}

/// W (out, in), or (in, out) if transposed, += scale B A.
void add_product(std::vector<float>& w, const std::vector<float>& a, const std::vector<float>& b, int64_t out,
                 int64_t in, int64_t rank, float scale, bool transposed) {
  cpu::parallel_for(cpu::available_cores(), out, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(static_cast<size_t>(in));
    for (int64_t o = begin; o < end; ++o) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t k = 0; k < rank; ++k)
        for (int64_t i = 0; i < in; ++i) sum[i] += b[o * rank + k] * a[k * in + i];
      for (int64_t i = 0; i < in; ++i) w[transposed ? i * out + o : o * in + i] += scale * sum[i];
    }
  });
}

/// The matrices with adapters: by their names in the files, the modules as PEFT names them.
std::map<std::string, std::string> adapted(const model::ModelSpec& spec, const SafetensorsSet& files) {
  std::map<std::string, std::string> out;
  for (const std::string& module : spec.trained.adapters.targets) {
    std::string name;
    for (const std::string& other : model::names_in_files(model::rules_of(spec.family), module + ".weight"))
      if (name = other; files.find(name)) break;
    out[name] = std::string(model::adapter_prefix) + module;
  }
  return out;
}

constexpr std::string_view logits_name = "lm_head.weight";

/// The file of the base model in whose place the head of a reward model is written that replaces its logits;
/// null if it has the head, or is no reward model.
const SafetensorsFile* file_of_new_head(const model::ModelSpec& spec, const SafetensorsSet& base) {
  if (!spec.new_head) return nullptr;
  const auto logits = base.find(logits_name);
  return logits ? logits->file : base.files().back().get();
}

/// `head`: the file gets the adapter's.
void write_merged(const SafetensorsFile& file, const std::map<std::string, std::string>& modules,
                  const SafetensorsSet& base, const SafetensorsSet& adapter, const model::ModelSpec& spec,
                  bool head, const std::string& path) {
  std::vector<TensorSpec> tensors;
  const auto replaced = [&](const TensorInfo& t) { return spec.new_head && t.name == logits_name; };
  for (const TensorInfo& t : file.tensors()) {
    if (replaced(t)) continue;
    if (!t.dtype)
      fail(Exit::data, "{}: {} has dtype {}, which cannot be written", file.path(), t.name, t.dtype_name);
    tensors.push_back({t.name, *t.dtype, t.shape});
  }
  const std::string score(model::score_name);
  if (head) tensors.push_back({score, file.tensors().front().dtype.value_or(DType::f32), {1, spec.hidden}});
  const bool transposed = model::rules_of(spec.family).style == model::FileStyle::gpt2;
  const model::AdapterSpec& a = spec.trained.adapters;
  SafetensorsWriter writer(path, tensors, {.metadata = {{"format", "pt"}}, .refuse_non_finite = true});
  std::vector<std::byte> block;
  const auto write_score = [&](DType dtype) {
    block = rounded(read_f32(adapter, std::string(model::adapted_score_name)), dtype);
    writer.write(score, block.data(), block.size());
  };
  if (head) write_score(tensors.back().dtype);
  for (const TensorInfo& t : file.tensors()) {
    if (replaced(t)) continue;
    if (spec.head == model::HeadKind::scalar && t.name == score) {
      write_score(*t.dtype);
      continue;
    }
    const auto module = modules.find(t.name);
    if (module == modules.end()) {
      constexpr uint64_t most = uint64_t{16} << 20;
      for (uint64_t at = 0; at < t.bytes(); at += most) {
        block.resize(std::min(most, t.bytes() - at));
        file.read_bytes(t, at, block.data(), block.size());
        writer.write_slice(t.name, at, block.data(), block.size());
      }
      if (t.bytes() == 0) writer.write(t.name, nullptr, 0);
      continue;
    }
    std::vector<float> w = read_f32(base, t.name);
    const int64_t out = t.shape[transposed ? 1 : 0], in = t.shape[transposed ? 0 : 1];
    add_product(w, read_f32(adapter, module->second + ".lora_A.weight"),
                read_f32(adapter, module->second + ".lora_B.weight"), out, in, a.rank, a.scale(), transposed);
    const std::vector<std::byte> bytes = rounded(w, *t.dtype);
    writer.write(t.name, bytes.data(), bytes.size());
  }
  writer.finish();
}

/// Writes the configuration and the index of a base model whose logits a score replaces, which is in `file`.
void write_new_head_files(const model::ModelSpec& spec, const SafetensorsFile& file, const std::string& base,
                          const std::string& to) {
  const DType dtype = file.tensors().front().dtype.value_or(DType::f32);
  write_file_atomic(join_path(to, "config.json"),
                    model::hugging_face_config(spec, dtype == DType::f32    ? "float32"
                                                     : dtype == DType::bf16 ? "bfloat16"
                                                                            : "float16"));
  constexpr const char* index_name = "model.safetensors.index.json";
  const std::string index = join_path(base, index_name);
  if (!path_exists(index)) return;
  const JsonValue old = parse_json(read_file(index, most_copied_bytes), index);
  JsonValue files = JsonValue::object();
  for (const JsonMember& tensor : old.at("weight_map").members())
    if (tensor.key != logits_name) files.set(tensor.key, tensor.value);
  files.set(std::string(model::score_name), fs::path(file.path()).filename().string());
  write_file_atomic(
      join_path(to, index_name),
      JsonValue::object({{"metadata", JsonValue::object()}, {"weight_map", std::move(files)}}).dump(2) +
          "\n");
}

/// Files of `from` that are neither weights nor the state of a run, unless `to` has them.
void copy_others(const std::string& from, const std::string& to) {
  const auto has_suffix = [](const std::string& name, std::initializer_list<std::string_view> suffixes) {
    return std::any_of(suffixes.begin(), suffixes.end(),
                       [&](std::string_view s) { return name.ends_with(s); });
  };
  for (const std::string& name : list_directory(from)) {
    const std::string path = join_path(from, name);
    const bool weights =
        has_suffix(name, {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf"}) ||
        name == "pytorch_model.bin.index.json" || name == "adapter_model.safetensors.index.json";
    const bool state =
        name.starts_with("manifest") || name == "nrl-train.yaml" || name == adapter_config_name;
    if (weights || state || is_directory(path) || path_exists(join_path(to, name))) continue;
    if (fs::file_size(path) <= most_copied_bytes)
      write_file_atomic(join_path(to, name), read_file(path, most_copied_bytes));
  }
}

}  // namespace

void merge_adapter(const std::string& directory, const std::string& output) {
  if (!is_adapter(directory))
    fail(is_directory(directory) ? Exit::data : Exit::no_input,
         "{}: is not an adapter; expected a directory with {}", directory, adapter_config_name);
  if (path_exists(output))
    fail(Exit::cannot_create, "{}: exists. Fix: give another directory, or remove it", output);
  const model::ModelSpec spec = load_model_directory(directory);
  const std::string base = base_directory(directory, read_adapter(directory));
  const SafetensorsSet files(base), adapter(directory, adapter_stem);
  if (spec.new_head)
    for (const std::string& name : files.names())
      if (model::name_in_text_model(model::rules_of(spec.family), name) != name)
        fail(Exit::usage,
             "{}: a reward model on a multimodal model cannot be merged into its files ({}). Fix: save the "
             "text "
             "part first (pretrain.max_num_steps=0) and train the adapter on that directory",
             base, name);
  const std::string temporary = output + ".tmp";
  if (path_exists(temporary)) remove_tree(temporary);
  make_directories(temporary);
  try {
    const auto modules = adapted(spec, files);
    const SafetensorsFile* const head = file_of_new_head(spec, files);
    for (const auto& file : files.files())
      write_merged(*file, modules, files, adapter, spec, file.get() == head,
                   join_path(temporary, fs::path(file->path()).filename().string()));
    if (head) write_new_head_files(spec, *head, base, temporary);
    copy_others(directory, temporary);
    copy_others(base, temporary);
    fs::rename(temporary, output);
  } catch (...) {
    remove_tree(temporary);
    throw;
  }
}

}  // namespace nrl::train
