#include "tests/model/fixture.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "apps/state/checkpoint.h"
#include "apps/state/model_source.h"
#include "core/base/dtype.h"
#include "core/device/cpu/features.h"
#include "core/io/safetensors.h"
#include "core/ops/kernel_table.h"

namespace nrl::test {
namespace {

const std::string directory = std::string(NRL_TEST_DATA) + "/fixtures/";

template <class T, class F>
std::vector<T> read_list(const JsonValue& list, F&& read) {
  std::vector<T> out;
  for (const JsonValue& item : list.items()) out.push_back(read(item));
  return out;
}
int64_t integer(const JsonValue& v) {
  return v.as_int();
}

}  // namespace

Fixture read_fixture(const std::string& name) {
  const JsonValue json = read_json(directory + name + ".json");
  Fixture f{name, json.at("config"), {}, {}, {}, {}};
  for (const JsonMember& tensor : json.at("tensors").members())
    f.tensors.emplace_back(tensor.key, read_list<int64_t>(tensor.value, integer));
  f.tokens = read_list<int32_t>(json.at("tokens"), integer);
  f.positions = read_list<size_t>(json.at("positions"), integer);
  f.logits = read_list<std::vector<double>>(json.at("logits"), [](const JsonValue& row) {
    return read_list<double>(row, [](const JsonValue& x) { return x.as_double(); });
  });
  return f;
}

std::vector<Fixture> all_fixtures() {
  std::vector<Fixture> all;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    all.push_back(read_fixture(entry.path().stem().string()));
  std::sort(all.begin(), all.end(), [](const Fixture& a, const Fixture& b) { return a.name < b.name; });
  return all;
}

std::vector<float> weight_values(const std::string& name, const std::vector<int64_t>& shape) {
  uint64_t seed = 0xCBF29CE484222325;  // FNV-1a
  for (const unsigned char byte : name) seed = (seed ^ byte) * 0x100000001B3;
  size_t count = 1;
  for (int64_t n : shape) count *= static_cast<size_t>(n);
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    uint64_t x = seed + i * 0x9E3779B97F4A7C15;  // SplitMix64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    x ^= x >> 31;
    double u = std::ldexp(static_cast<double>(x >> 40), -23) - 1;
    if (shape.size() == 1) {
      u = has("bias") ? u / 4 : 1 + u / 4;
    } else if (has("embed_tokens") || has("wte") || has("wpe")) {
      u /= 64;
    } else if (!has("lm_head")) {
      u /= 2;
    }
    values[i] = static_cast<float>(u);
  }
  return values;
}

StoredTensor stored(const std::string& name, const std::vector<int64_t>& shape, DType dtype) {
  StoredTensor t{name, dtype, shape, {}};
  for (float value : weight_values(name, shape)) {
    const auto bits = std::bit_cast<uint32_t>(value);
    char bytes[4] = {};
    if (dtype == DType::f32) {
      std::memcpy(bytes, &value, 4);
    } else {
      const bf16 rounded(value);
      // Sign, five bits of the exponent, ten of the mantissa; what is too small for them is 0.
      const uint32_t exponent = bits >> 23 & 255;
      const auto half = static_cast<uint16_t>(
          (bits >> 16 & 0x8000) | (exponent > 112 ? ((exponent - 112) << 10) | (bits >> 13 & 1023) : 0));
      if (dtype == DType::bf16)
        std::memcpy(bytes, &rounded, 2);
      else
        std::memcpy(bytes, &half, 2);
    }
    t.bytes.append(bytes, static_cast<size_t>(size_of(dtype)));
  }
  return t;
}

void write_model(const std::string& to, const JsonValue& config, const std::vector<StoredTensor>& tensors) {
  std::filesystem::create_directories(to);
  write_file_atomic(to + "/config.json", config.dump(2));
  write_tensors(to + "/model.safetensors", tensors);
}

void write_tensors(const std::string& path, const std::vector<StoredTensor>& tensors) {
  std::filesystem::remove(path);
  std::vector<TensorSpec> specs;
  for (const StoredTensor& t : tensors) specs.push_back({t.name, t.dtype, t.shape});
  SafetensorsWriter writer(path, specs);
  for (const StoredTensor& t : tensors) writer.write(t.name, t.bytes.data(), t.bytes.size());
  writer.finish();
}

void write_model(const std::string& to, const JsonValue& config, const TensorShapes& shapes, DType dtype) {
  std::vector<StoredTensor> tensors;
  for (const auto& [name, shape] : shapes) tensors.push_back(stored(name, shape, dtype));
  write_model(to, config, tensors);
}

LoadedModel::LoadedModel(const std::string& from)
    : spec(train::load_model_directory(from)), parameters(model::make_parameters(spec)) {
  const DType dtype = train::stored_dtype(from);
  for (const model::Parameter& p : parameters.all) {
    memory_.emplace_back(static_cast<size_t>(p.numel() * size_of(dtype)));
    weights.push_back(p.view(memory_.back().data(), dtype));
  }
  train::load_weights(from, spec, engine::whole_slices(parameters, weights));
}

model::Inference LoadedModel::inference(int64_t max_tokens, int threads) {
  exec_.kernels = &ops::cpu_kernels(cpu::best_isa());
  exec_.threads = threads;
  std::vector<model::ParameterView> views;
  for (const Tensor& weight : weights) views.push_back({weight, {}});
  return {spec, parameters, std::move(views), exec_, max_tokens};
}

}  // namespace nrl::test
