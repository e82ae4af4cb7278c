#pragma once
// The fixtures of scripts/dev/config-fixtures.py, and model directories made of them: config.json, and
// weights that are a function of a tensor's name and an element's index.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "apps/model/inference.h"
#include "core/device/cpu/memory.h"
#include "core/io/json.h"

namespace nrl::test {

using TensorShapes = std::vector<std::pair<std::string, std::vector<int64_t>>>;

/// A config.json, names and shapes of the tensors in its Hugging Face file, and logits by transformers.
struct Fixture {
  std::string name;
  JsonValue config;
  TensorShapes tensors;
  std::vector<int32_t> tokens;
  std::vector<size_t> positions;            ///< of `logits`
  std::vector<std::vector<double>> logits;  ///< (positions, vocabulary)
};
std::vector<Fixture> all_fixtures();
Fixture read_fixture(const std::string& name);

/// weight() of scripts/dev/config-fixtures.py.
std::vector<float> weight_values(const std::string& name, const std::vector<int64_t>& shape);

/// A tensor in a file.
struct StoredTensor {
  std::string name;
  DType dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
/// weight_values() of `name` in f32, bf16, or f16 (cut off, not rounded).
StoredTensor stored(const std::string& name, const std::vector<int64_t>& shape, DType dtype = DType::f32);

/// Writes config.json and model.safetensors into `directory`.
void write_model(const std::string& directory, const JsonValue& config,
                 const std::vector<StoredTensor>& tensors);
void write_model(const std::string& directory, const JsonValue& config, const TensorShapes& tensors,
                 DType dtype = DType::f32);
/// Writes a file of tensors.
void write_tensors(const std::string& path, const std::vector<StoredTensor>& tensors);

/// A model directory in memory, read as `nrl-train generate` reads it.
class LoadedModel {
 public:
  explicit LoadedModel(const std::string& directory);

  model::Inference inference(int64_t max_tokens, int threads = 1);

  model::ModelSpec spec;
  model::ParameterList parameters;
  std::vector<Tensor> weights;

 private:
  std::vector<cpu::HostMemory> memory_;
  ops::Exec exec_;
};

}  // namespace nrl::test
