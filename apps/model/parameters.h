#pragma once
// The parameters of a decoder: what exists, in which order, under which names, and with which initial values.

#include <cstdint>
#include <string>
#include <vector>

#include "apps/model/spec.h"

namespace nrl::model {

/// One tensor as Hugging Face names it: a contiguous block of rows of a (possibly fused) parameter.
struct Part {
  std::string name;                 ///< e.g. "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;       ///< as we hold it, [out, in]
  int64_t offset = 0;               ///< first element inside the parameter
  bool transposed_on_disk = false;  ///< GPT-2's Conv1D: [in, out] in files
  int64_t numel() const;
};

enum class Init : uint8_t { normal, scaled_normal, ones, zeros };

/// One parameter as the layers use it. q, k and v (and gate and up) are one parameter with several parts.
struct Parameter {
  std::string name;            ///< "layers.0.qkv.weight"
  std::vector<int64_t> shape;  ///< rank 1 or 2
  bool decay = false;          ///< weight decay applies: matrices and embeddings, not biases and norm weights
  Init init = Init::normal;
  std::vector<Part> parts;
  int64_t numel() const;
};

/// Indices into the parameter list of one layer; -1 where the model has no such parameter.
struct LayerParameters {
  int norm1 = -1, norm1_bias = -1, qkv = -1, qkv_bias = -1, q_norm = -1, k_norm = -1, o = -1, o_bias = -1;
  int norm2 = -1, norm2_bias = -1, mlp_in = -1, mlp_in_bias = -1, mlp_out = -1, mlp_out_bias = -1;
};

struct ParameterList {
  std::vector<Parameter> all;  ///< in the order of the forward pass
  std::vector<LayerParameters> layers;
  int embedding = -1, positions = -1, final_norm = -1, final_norm_bias = -1;
  int head = -1;  ///< equals `embedding` when tied
  int64_t total() const;
};

ParameterList make_parameters(const ModelSpec& spec);

/// Initial values of elements [offset, offset + count) of part `part` in our [out, in] order: a pure function
/// of (seed, part name, element), so any rank can make any slice. Matrices and embeddings are normal(0,
/// initializer_range); GPT-2's residual projections (scaled_normal) are divided by sqrt(2 * layers).
void initial_values(const ModelSpec& spec, const Parameter& parameter, const Part& part, uint64_t seed,
                    int64_t offset, int64_t count, float* out, int threads);

}  // namespace nrl::model
