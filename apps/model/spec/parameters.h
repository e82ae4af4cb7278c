#pragma once
// The parameters of a decoder: order, names, shapes and initial values.

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/model/spec/layout.h"
#include "core/tensor/tensor.h"
#include "precision/recipe.h"

namespace nrl::model {

/// A slice of a logical tensor (a tensor named by Hugging Face): rows [row, row + rows) and columns
/// [column, column + columns), stored contiguously in a (possibly fused) parameter. Several parts may belong
/// to one logical tensor: GPT-2's c_attn is split into q, k and v.
struct Part {
  std::string name;             ///< e.g. "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> global;  ///< shape of the logical tensor in memory, [out, in] or [out]
  int64_t row = 0, rows = 0;
  int64_t column = 0, columns = 1;  ///< a vector has one column
  int64_t offset = 0;               ///< first element inside the parameter
  bool transposed_on_disk = false;  ///< GPT-2's Conv1D is stored as [in, out]
  int64_t numel() const { return rows * columns; }
  int64_t width() const { return global.size() == 2 ? global[1] : 1; }
  /// Row-major index in the logical tensor of element `i` of the part.
  int64_t element(int64_t i) const { return (row + i / columns) * width() + column + i % columns; }
  /// Calls visit(begin, end) for elements [begin, end) of the part cut where its rows begin: the rest of a
  /// row, whole rows, and the start of a row, as far as there are any.
  template <class Visit>
  void for_each_rows(int64_t begin, int64_t end, const Visit& visit) const {
    const int64_t rest = std::min(end, (begin + columns - 1) / columns * columns);
    for (const int64_t to : {rest, std::max(rest, end / columns * columns), end}) {
      if (begin < to) visit(begin, to);
      begin = std::max(begin, to);
    }
  }
};

/// kaiming_uniform and xavier_normal: of adapters (AdapterSpec::xavier).
enum class Init : uint8_t { normal, scaled_normal, ones, zeros, kaiming_uniform, xavier_normal };

/// Copies of a parameter beyond those that its group sums over: on the tensor-parallel ranks, which compute
/// equal gradients (norms without sequence parallelism, biases of matrices split by columns). They count once
/// in the gradient norm and are saved once.
enum class Copies : uint8_t { none, tp };

/// Parameter groups. Their gradients are summed over different ranks (plan::reduction_group()).
namespace group_name {
inline constexpr const char* dense = "dense";
/// Held by all tensor-parallel ranks; each computes only a part of the gradient: norms with sequence
/// parallelism, QK norms, routers.
inline constexpr const char* tensor_partial = "tensor_partial";
/// The tied embedding, if the first and the last pipeline stage both hold it.
inline constexpr const char* tied = "tied";
/// The matrices of experts; each is on one rank of the expert grid's tensor- and expert-parallel axes.
inline constexpr const char* expert = "expert";
/// Weights of GEMMs that are kept in FP8.
inline constexpr const char* fp8 = "fp8";
/// Biases of routers: no gradient; a step updates them from the load of the experts.
inline constexpr const char* router_bias = "router_bias";
/// Frozen parameters, dense ones and matrices of experts. Tied embeddings that are frozen remain in `tied`.
inline constexpr const char *frozen = "frozen", *frozen_expert = "frozen_expert";
}  // namespace group_name

/// The matrix of a scalar head in the files of a model and of adapters.
inline constexpr std::string_view score_name = "score.weight",
                                  adapted_score_name = "base_model.model.score.weight";

/// A parameter as the layers use it. q, k and v (and gate and up) are one fused parameter with several parts.
struct Parameter {
  std::string name;            ///< "layers.0.qkv.weight"
  std::vector<int64_t> shape;  ///< rank 1 or 2
  bool decay = false;          ///< weight decay applies: matrices and embeddings, not biases or norm weights
  Init init = Init::normal;
  std::vector<Part> parts;
  std::string group = group_name::dense;  ///< one flat layout and one optimizer call
  bool trainable = true;                  ///< equal within a group; false: no gradient, no optimizer state
  bool frozen = false;                    ///< by ModelSpec::trained; then not trainable
  bool adapter = false;                   ///< in the files of adapters, not of the model itself
  bool of_experts = false;
  bool f32 = false;  ///< stored in f32 with any recipe; equal within a group
  bool fp8 = false;  ///< layers read it in FP8 only; equal within a group
  Copies copies = Copies::none;
  /// The weight (or bias) of a GEMM, whose first contribution to the gradient of a step overwrites it. All
  /// other gradients are zeroed after the update, and every contribution is added.
  bool overwrites_gradient = false;
  int64_t numel() const;
  /// Calls visit(part, begin, end) for each part with elements in [first, first + count) of the parameter:
  /// elements [begin, end) of the part.
  template <class Visit>
  void for_each_part(int64_t first, int64_t count, const Visit& visit) const {
    for (const Part& part : parts) {
      const int64_t begin = std::max<int64_t>(first - part.offset, 0),
                    end = std::min(first + count - part.offset, part.numel());
      if (begin < end) visit(part, begin, end);
    }
  }
  /// The parameter as a tensor at `data`.
  Tensor view(void* data, DType dtype) const {
    return shape.size() == 1 ? make_tensor(data, dtype, {shape[0]})
                             : make_tensor(data, dtype, {shape[0], shape[1]});
  }
};

/// The adapter of a matrix: indices of A (P rank, in) and B (out', rank) into the parameter list; -1: none. A
/// fused matrix has one for each of its P modules that are selected, and B only their rows.
struct AdapterParameters {
  int a = -1, b = -1;
  /// Rows of B, in their order: they add to `count` columns of y from `column` on, from the columns of
  /// x A^T that belong to the module, the module-th `rank` of them.
  struct Piece {
    int64_t column = 0, count = 0, module = 0;
  };
  std::array<Piece, 3> pieces = {};
  int64_t piece_count = 0, modules = 0;  ///< modules: P
  std::span<const Piece> all_pieces() const { return {pieces.data(), static_cast<size_t>(piece_count)}; }
  explicit operator bool() const { return a >= 0; }
};

/// Indices into the parameter list of one layer; -1 where the model has no such parameter.
struct LayerParameters {
  int norm1 = -1, norm1_bias = -1, qkv = -1, qkv_bias = -1, q_norm = -1, k_norm = -1, o = -1, o_bias = -1;
  int norm2 = -1, norm2_bias = -1, mlp_in = -1, mlp_in_bias = -1, mlp_out = -1, mlp_out_bias = -1;
  int post_norm1 = -1, post_norm2 = -1;  ///< of the outputs of attention and MLP (ModelSpec::post_norms)
  // With experts, in place of the MLP: router (E, H); experts_in (E 2F, H), of each expert its gate, then its
  // up projection; experts_out (E H, F).
  int router_bias = -1;  ///< (E)
  int router = -1, experts_in = -1, experts_out = -1, shared_in = -1, shared_out = -1, shared_gate = -1;
  AdapterParameters qkv_adapter = {}, o_adapter = {}, mlp_in_adapter = {}, mlp_out_adapter = {};
  /// The parameters that the model has.
  std::vector<int> all() const;
};

struct ParameterList {
  std::vector<Parameter> all;  ///< in the order of the forward pass
  std::vector<LayerParameters> layers;
  int embedding = -1, positions = -1, final_norm = -1, final_norm_bias = -1;
  int head = -1;  ///< (vocabulary, H), equal to `embedding` when tied; (1, H) of a scalar head
  int64_t total() const;
  /// By parameter: the layer that it belongs to, counted in model order. Sharded weights are gathered, and
  /// their gradients reduced, in buckets of one unit.
  std::vector<int> units() const;
};

/// The parameters of a rank; by default of the whole model. The blocks of other stages have no parameters.
ParameterList make_parameters(const ModelSpec& spec, const ModelLayout& layout = {});

/// The weights of the GEMMs that the layer has.
std::vector<std::pair<precision::Gemm, int>> gemm_weights(const LayerParameters& layer);
/// Puts the weights that the recipe keeps in FP8 (Recipe::keeps_fp8()) in a group of their own.
void keep_in_fp8(const precision::Recipe& recipe, ParameterList& parameters);

/// Initial values of a part, in [out, in] order: a pure function of (seed, name, element of the logical
/// tensor), so that any rank can initialize any slice. Matrices and embeddings are normal(0,
/// initializer_range); GPT-2's residual projections (scaled_normal) are divided by sqrt(2 * layers). A of an
/// adapter is uniform in +-1 / sqrt(in), or normal(0, sqrt(2 / (in + rank))); B is zero.
void initial_values(const ModelSpec& spec, const Parameter& parameter, const Part& part, uint64_t seed,
                    float* out, int threads);

}  // namespace nrl::model
