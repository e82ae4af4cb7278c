#include "apps/model/parameters.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "apps/model/normals.h"
#include "core/base/philox.h"
#include "core/device/cpu/parallel.h"

namespace nrl::model {
namespace {

int64_t product(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// Builds the list. The only code that knows the tensor names of both file styles (GPT-2 and Llama).
class Builder {
 public:
  explicit Builder(const ModelSpec& spec) : spec_(spec), gpt2_(spec.family == Family::gpt2) {}

  ParameterList build() {
    const auto [h, v] = std::pair(spec_.hidden, spec_.vocab_size);
    list_.embedding =
        matrix("embedding", {{gpt2_ ? "transformer.wte" : "model.embed_tokens", v}}, h, Init::normal, false);
    if (spec_.learned_positions)
      list_.positions =
          matrix("positions", {{"transformer.wpe", spec_.max_positions}}, h, Init::normal, false);
    for (int64_t i = 0; i < spec_.layers; ++i) list_.layers.push_back(layer(i));
    const std::string final_norm = gpt2_ ? "transformer.ln_f" : "model.norm";
    list_.final_norm = vector("final_norm.weight", {{final_norm + ".weight", h}}, Init::ones);
    if (spec_.norm_bias)
      list_.final_norm_bias = vector("final_norm.bias", {{final_norm + ".bias", h}}, Init::zeros);
    list_.head = spec_.tied ? list_.embedding : matrix("head", {{"lm_head", v}}, h, Init::normal, false);
    overwritten(list_.head);  // also when tied: the head runs before the embedding's backward pass
    return std::move(list_);
  }

 private:
  struct Rows {
    std::string name;
    int64_t rows;
  };

  int matrix(const std::string& name, const std::vector<Rows>& parts, int64_t in, Init init, bool conv1d) {
    Parameter p{.name = name + ".weight", .shape = {0, in}, .decay = true, .init = init, .parts = {}};
    for (const Rows& part : parts)
      add_part(p, parts, part,
               {.name = part.name + ".weight", .global = {0, in}, .transposed_on_disk = conv1d});
    return add(std::move(p));
  }

  int vector(const std::string& name, const std::vector<Rows>& parts, Init init) {
    Parameter p{.name = name, .shape = {0}, .decay = false, .init = init, .parts = {}};
    for (const Rows& part : parts) add_part(p, parts, part, {.name = part.name, .global = {0}});
    return add(std::move(p));
  }

  // Rows of one name are slices of one logical tensor.
  static void add_part(Parameter& p, const std::vector<Rows>& all, const Rows& rows, Part part) {
    for (const Rows& other : all)
      if (other.name == rows.name) part.global[0] += other.rows;
    for (const Part& before : p.parts)
      if (before.name == part.name) part.row += before.rows;
    part.rows = rows.rows;
    part.columns = part.width();
    part.offset = p.shape[0] * part.columns;
    p.shape[0] += part.rows;
    p.parts.push_back(std::move(part));
  }

  int add(Parameter p) {
    list_.all.push_back(std::move(p));
    return static_cast<int>(list_.all.size()) - 1;
  }

  void overwritten(int parameter) { list_.all[static_cast<size_t>(parameter)].overwrites_gradient = true; }

  int bias(const std::string& name, const std::vector<Rows>& parts) {
    std::vector<Rows> named;
    for (const Rows& part : parts) named.push_back({part.name + ".bias", part.rows});
    return vector(name + ".bias", named, Init::zeros);
  }

  LayerParameters layer(int64_t i) {
    const ModelSpec& s = spec_;
    const std::string own = "layers." + std::to_string(i) + ".";
    const std::string hf = (gpt2_ ? "transformer.h." : "model.layers.") + std::to_string(i) + ".";
    const Init residual = gpt2_ ? Init::scaled_normal : Init::normal;
    LayerParameters l;
    auto norm = [&](const std::string& name, const std::string& file, int& weight, int& norm_bias) {
      weight = vector(own + name + ".weight", {{file + ".weight", s.hidden}}, Init::ones);
      if (s.norm_bias) norm_bias = vector(own + name + ".bias", {{file + ".bias", s.hidden}}, Init::zeros);
    };
    auto linear = [&](const std::string& name, const std::vector<Rows>& parts, int64_t in, Init init,
                      bool with_bias, int& weight, int& b) {
      weight = matrix(own + name, parts, in, init, gpt2_);
      overwritten(weight);
      if (with_bias) overwritten(b = bias(own + name, parts));
    };
    norm("norm1", hf + (gpt2_ ? "ln_1" : "input_layernorm"), l.norm1, l.norm1_bias);
    const auto hf_name = [&](const char* llama) { return hf + (gpt2_ ? "attn.c_attn" : llama); };
    const std::vector<Rows> qkv{{hf_name("self_attn.q_proj"), s.q_width()},
                                {hf_name("self_attn.k_proj"), s.kv_width()},
                                {hf_name("self_attn.v_proj"), s.kv_width()}};
    linear("qkv", qkv, s.hidden, Init::normal, s.qkv_bias, l.qkv, l.qkv_bias);
    if (s.qk_norm) {
      l.q_norm = vector(own + "q_norm.weight", {{hf + "self_attn.q_norm.weight", s.head_dim}}, Init::ones);
      l.k_norm = vector(own + "k_norm.weight", {{hf + "self_attn.k_norm.weight", s.head_dim}}, Init::ones);
    }
    linear("o", {{hf + (gpt2_ ? "attn.c_proj" : "self_attn.o_proj"), s.hidden}}, s.q_width(), residual,
           s.o_bias, l.o, l.o_bias);
    norm("norm2", hf + (gpt2_ ? "ln_2" : "post_attention_layernorm"), l.norm2, l.norm2_bias);
    std::vector<Rows> in{{hf + "mlp.c_fc", s.ffn}};
    if (s.gated) in = {{hf + "mlp.gate_proj", s.ffn}, {hf + "mlp.up_proj", s.ffn}};
    linear("mlp_in", in, s.hidden, Init::normal, s.mlp_bias, l.mlp_in, l.mlp_in_bias);
    linear("mlp_out", {{hf + (gpt2_ ? "mlp.c_proj" : "mlp.down_proj"), s.hidden}}, s.ffn, residual,
           s.mlp_bias, l.mlp_out, l.mlp_out_bias);
    return l;
  }

  const ModelSpec& spec_;
  const bool gpt2_;
  ParameterList list_;
};

}  // namespace

int64_t Parameter::numel() const {
  return product(shape);
}

int64_t ParameterList::total() const {
  return std::accumulate(all.begin(), all.end(), int64_t{0},
                         [](int64_t sum, const Parameter& p) { return sum + p.numel(); });
}

ParameterList make_parameters(const ModelSpec& spec) {
  return Builder(spec).build();
}

void initial_values(const ModelSpec& spec, const Parameter& parameter, const Part& part, uint64_t seed,
                    float* out, int threads) {
  const int64_t count = part.numel();
  if (parameter.init == Init::ones || parameter.init == Init::zeros) {
    std::fill(out, out + count, parameter.init == Init::ones ? 1.0f : 0.0f);
    return;
  }
  double scale = spec.initializer_range;
  if (parameter.init == Init::scaled_normal) scale /= std::sqrt(2.0 * static_cast<double>(spec.layers));
  const PhiloxStream stream(seed, part.name);
  // Elements [first, last) of the logical tensor: whole blocks of four, and parts of one at both ends.
  const auto fill_one_by_one = [&](uint64_t first, uint64_t last, float* to) {
    for (uint64_t e = first; e < last; ++e) to[e - first] = static_cast<float>(scale * stream.normal(e));
  };
  const auto fill = [&](uint64_t first, uint64_t last, float* to) {
    const uint64_t begin = std::min((first + 3) / 4 * 4, last), end = std::max(last / 4 * 4, begin);
    fill_one_by_one(first, begin, to);
    scaled_normals(stream, begin / 4, static_cast<int64_t>((end - begin) / 4), scale, to + (begin - first));
    fill_one_by_one(end, last, to + (end - first));
  };
  const bool contiguous = part.columns == part.width();
  cpu::parallel_for(threads, count, 4096, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row_end = (begin / part.columns + 1) * part.columns;
      const int64_t n = (contiguous ? end : std::min(end, row_end)) - begin;
      const auto first = static_cast<uint64_t>(part.element(begin));
      fill(first, first + static_cast<uint64_t>(n), out + begin);
      begin += n;
    }
  });
}

}  // namespace nrl::model
