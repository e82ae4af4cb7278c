#include "apps/model/spec/parameters.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <string_view>
#include <utility>

#include "apps/model/spec/normals.h"
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
  Builder(const ModelSpec& spec, const ModelLayout& layout)
      : spec_(spec), layout_(layout), gpt2_(rules_of(spec.family).style == FileStyle::gpt2) {}

  ParameterList build() {
    const auto [h, v] = std::pair(spec_.hidden, spec_.vocab_size);
    if (layout_.first_stage()) list_.embedding = embedding();
    if (spec_.learned_positions && layout_.first_stage()) {
      list_.positions = matrix("positions", {{"transformer.wpe", spec_.max_positions}}, h, Split::none,
                               Init::normal, false);
      replicated(list_.positions, false);  // its gradient is computed from all tokens
    }
    const std::vector<bool> held = held_blocks(layout_, spec_.layers);
    for (int64_t i = 0; i < spec_.layers; ++i) list_.layers.push_back(held[i] ? layer(i) : LayerParameters{});
    if (layout_.last_stage()) {
      norm("final_norm", gpt2_ ? "transformer.ln_f" : "model.norm", list_.final_norm, list_.final_norm_bias);
      if (spec_.head == HeadKind::scalar)
        list_.head = score();
      else if (!spec_.tied)
        list_.head = matrix("head", {{"lm_head", v}}, h, Split::rows, Init::normal, false);
      else
        list_.head = list_.embedding >= 0 ? list_.embedding : embedding();
      overwritten(list_.head);  // also when tied: the head runs before the embedding's backward pass
    }
    for (Parameter& p : list_.all) freeze(p);
    return std::move(list_);
  }

 private:
  struct Rows {
    std::string name;
    int64_t rows;
  };

  /// How tensor-parallel or expert-tensor-parallel ranks divide a matrix: by its outputs (with the bias) or
  /// by its inputs.
  enum class Split : uint8_t { none, rows, columns, expert_rows, expert_columns };

  static bool by_rows(Split split) { return split == Split::rows || split == Split::expert_rows; }
  static bool by_columns(Split split) { return split == Split::columns || split == Split::expert_columns; }
  Slice slice(Split split, int64_t n) const {
    if (split == Split::expert_rows || split == Split::expert_columns)
      return {n / layout_.expert_tensor * layout_.expert_tensor_rank, n / layout_.expert_tensor};
    return tensor_slice(layout_, n);
  }

  int matrix(const std::string& name, const std::vector<Rows>& parts, int64_t in, Split split, Init init,
             bool conv1d) {
    const Slice columns = by_columns(split) ? slice(split, in) : Slice{0, in};
    Parameter p{
        .name = name + ".weight", .shape = {0, columns.count}, .decay = true, .init = init, .parts = {}};
    add_parts(p, parts, split,
              {.name = ".weight",
               .global = {0, in},
               .column = columns.begin,
               .columns = columns.count,
               .transposed_on_disk = conv1d});
    return add(std::move(p));
  }

  int vector(const std::string& name, const std::vector<Rows>& parts, Split split, Init init) {
    Parameter p{.name = name, .shape = {0}, .decay = false, .init = init, .parts = {}};
    add_parts(p, parts, split, {.name = {}, .global = {0}});
    return add(std::move(p));
  }

  /// Adds parts like `like`, whose name is appended to each name of `parts`. Neighboring rows of one name
  /// are slices of one logical tensor.
  void add_parts(Parameter& p, const std::vector<Rows>& parts, Split split, const Part& like) const {
    p.parts.reserve(parts.size());
    for (size_t begin = 0, end = 0; begin < parts.size(); begin = end) {
      int64_t all = 0, before = 0;  // rows of the tensor
      for (; end < parts.size() && parts[end].name == parts[begin].name; ++end) all += parts[end].rows;
      for (size_t i = begin; i < end; before += parts[i++].rows) {
        const Slice own = by_rows(split) ? slice(split, parts[i].rows) : Slice{0, parts[i].rows};
        Part& part = p.parts.emplace_back(like);
        part.name.insert(0, parts[i].name);
        part.global[0] = all;
        part.row = before + own.begin;
        part.rows = own.count;
        part.offset = p.shape[0] * part.columns;
        p.shape[0] += part.rows;
      }
    }
  }

  // Held by all tensor-parallel ranks. `partial`: each computes only a part of the gradient, which must be
  // summed; else all compute the same gradient.
  void replicated(int parameter, bool partial) {
    if (layout_.tensor == 1) return;
    Parameter& p = list_.all[parameter];
    if (partial)
      p.group = group_name::tensor_partial;
    else
      p.copies = Copies::tp;
  }

  // Frozen copies are equal, wherever their gradients would have been summed.
  void freeze(Parameter& p) const {
    const TrainedPart& t = spec_.trained;
    if (p.adapter || !(t.adapters ? true : t.freezes(p.parts.front().name))) return;
    p.frozen = true;
    if (!p.trainable) return;
    p.trainable = false;
    if (p.group == group_name::tensor_partial) p.copies = Copies::tp;
    if (p.group != group_name::tied) p.group = p.of_experts ? group_name::frozen_expert : group_name::frozen;
  }

  // The adapter of a matrix that was just made of the same `parts`.
  AdapterParameters adapter(const std::string& name, const std::vector<Rows>& parts, int64_t in,
                            Split split) {
    const AdapterSpec& spec = spec_.trained.adapters;
    AdapterParameters out;
    std::vector<Rows> a, b;
    int64_t column = 0;
    for (const Rows& part : parts) {
      const int64_t count = by_rows(split) ? slice(split, part.rows).count : part.rows;
      if (spec.selects(part.name)) {
        const std::string own = std::string(adapter_prefix) + part.name;
        if (a.empty() || a.back().name != own + ".lora_A") a.push_back({own + ".lora_A", spec.rank});
        b.push_back({own + ".lora_B", part.rows});
        const auto module = static_cast<int64_t>(a.size()) - 1;
        const bool follows = out.piece_count > 0 && out.pieces[out.piece_count - 1].module == module;
        if (follows)
          out.pieces[out.piece_count - 1].count += count;
        else
          out.pieces[out.piece_count++] = {column, count, module};
      }
      column += count;
    }
    if (a.empty()) return out;
    out.modules = static_cast<int64_t>(a.size());
    // Ranks that split the outputs have copies of A, each with a part of its gradient; else copies of B.
    out.a = matrix(name + ".lora_a", a, in, by_columns(split) ? split : Split::none,
                   spec.xavier ? Init::xavier_normal : Init::kaiming_uniform, false);
    out.b = matrix(name + ".lora_b", b, spec.rank, by_rows(split) ? split : Split::none, Init::zeros, false);
    for (const int p : {out.a, out.b}) {
      list_.all[p].adapter = true;
      overwritten(p);
    }
    replicated(by_columns(split) ? out.b : out.a, true);
    return out;
  }

  int embedding() {
    const int at = matrix("embedding", {{gpt2_ ? "transformer.wte" : "model.embed_tokens", spec_.vocab_size}},
                          spec_.hidden, Split::rows, Init::normal, false);
    if (spec_.tied && layout_.stages > 1) list_.all[at].group = group_name::tied;
    return at;
  }

  // Every rank has the scores of its own tokens. Beside adapters it is trained as a whole, and belongs to
  // their files.
  int score() {
    const bool adapter = static_cast<bool>(spec_.trained.adapters);
    const std::string_view name = module_of(adapter ? adapted_score_name : score_name);
    const int at = matrix("head", {{std::string(name), 1}}, spec_.hidden, Split::none, Init::normal, false);
    list_.all[at].adapter = adapter;
    replicated(at, layout_.sequence_parallel);
    return at;
  }

  /// The weights of a norm that multiplies by 1.
  Init norm_init() const { return spec_.norm_offset == 1 ? Init::zeros : Init::ones; }

  int norm_weight(const std::string& name, const std::string& file) {
    const int weight = vector(name + ".weight", {{file + ".weight", spec_.hidden}}, Split::none, norm_init());
    replicated(weight, layout_.sequence_parallel);
    return weight;
  }

  void norm(const std::string& name, const std::string& file, int& weight, int& norm_bias) {
    weight = norm_weight(name, file);
    if (!spec_.norm_bias) return;
    norm_bias = vector(name + ".bias", {{file + ".bias", spec_.hidden}}, Split::none, Init::zeros);
    replicated(norm_bias, layout_.sequence_parallel);
  }

  int add(Parameter p) {
    list_.all.push_back(std::move(p));
    return static_cast<int>(list_.all.size()) - 1;
  }

  void overwritten(int parameter) { list_.all[parameter].overwrites_gradient = true; }

  // The bias of a matrix split by columns is replicated: it is added to the sum over the ranks.
  int bias(const std::string& name, const std::vector<Rows>& parts, Split split) {
    std::vector<Rows> named;
    for (const Rows& part : parts) named.push_back({part.name + ".bias", part.rows});
    const int at = vector(name + ".bias", named, split == Split::rows ? split : Split::none, Init::zeros);
    if (split == Split::columns) replicated(at, false);
    return at;
  }

  LayerParameters layer(int64_t i) {
    const ModelSpec& s = spec_;
    const std::string own = "layers." + std::to_string(i) + ".";
    const std::string hf = (gpt2_ ? "transformer.h." : "model.layers.") + std::to_string(i) + ".";
    const Init residual = gpt2_ ? Init::scaled_normal : Init::normal;
    LayerParameters l;
    auto linear = [&](const std::string& name, const std::vector<Rows>& parts, int64_t in, Split split,
                      Init init, bool with_bias, int& weight, int& b) {
      weight = matrix(own + name, parts, in, split, init, gpt2_);
      overwritten(weight);
      if (with_bias) overwritten(b = bias(own + name, parts, split));
      return adapter(own + name, parts, in, split);
    };
    norm(own + "norm1", hf + (gpt2_ ? "ln_1" : "input_layernorm"), l.norm1, l.norm1_bias);
    const auto hf_name = [&](const char* llama) { return hf + (gpt2_ ? "attn.c_attn" : llama); };
    const std::vector<Rows> qkv{{hf_name("self_attn.q_proj"), s.q_width()},
                                {hf_name("self_attn.k_proj"), s.kv_width()},
                                {hf_name("self_attn.v_proj"), s.kv_width()}};
    l.qkv_adapter = linear("qkv", qkv, s.hidden, Split::rows, Init::normal, s.qkv_bias, l.qkv, l.qkv_bias);
    if (s.qk_norm) {
      const auto head_norm = [&](const char* name) {
        const int weight =
            vector(own + name + ".weight", {{hf + "self_attn." + name + ".weight", s.head_dim}}, Split::none,
                   norm_init());
        replicated(weight, true);  // every rank normalizes its own heads
        return weight;
      };
      l.q_norm = head_norm("q_norm");
      l.k_norm = head_norm("k_norm");
    }
    l.o_adapter = linear("o", {{hf + (gpt2_ ? "attn.c_proj" : "self_attn.o_proj"), s.hidden}}, s.q_width(),
                         Split::columns, residual, s.o_bias, l.o, l.o_bias);
    if (s.post_norms) l.post_norm1 = norm_weight(own + "post_norm1", hf + "post_attention_layernorm");
    const char* const norm2 = s.post_norms ? "pre_feedforward_layernorm" : "post_attention_layernorm";
    norm(own + "norm2", hf + (gpt2_ ? "ln_2" : norm2), l.norm2, l.norm2_bias);
    if (s.has_experts(i)) {
      experts(own, hf, l);
      return l;
    }
    std::vector<Rows> in{{hf + "mlp.c_fc", s.ffn}};
    if (s.gated) in = {{hf + "mlp.gate_proj", s.ffn}, {hf + "mlp.up_proj", s.ffn}};
    l.mlp_in_adapter =
        linear("mlp_in", in, s.hidden, Split::rows, Init::normal, s.mlp_bias, l.mlp_in, l.mlp_in_bias);
    l.mlp_out_adapter = linear("mlp_out", {{hf + (gpt2_ ? "mlp.c_proj" : "mlp.down_proj"), s.hidden}}, s.ffn,
                               Split::columns, residual, s.mlp_bias, l.mlp_out, l.mlp_out_bias);
    if (s.post_norms) l.post_norm2 = norm_weight(own + "post_norm2", hf + "post_feedforward_layernorm");
    return l;
  }

  void experts(const std::string& own, const std::string& hf, LayerParameters& l) {
    const MoeSpec& m = spec_.moe;
    const ExpertRules& rules = rules_of(spec_.family).experts;
    const std::string file = hf + std::string(rules.module);
    const auto linear = [&](const char* name, const std::vector<Rows>& parts, int64_t in, Split split) {
      const int parameter = matrix(own + name, parts, in, split, Init::normal, false);
      overwritten(parameter);
      return parameter;
    };
    const auto of_experts = [&](const char* name, const std::vector<Rows>& parts, int64_t in, Split split) {
      const int parameter = linear(name, parts, in, split);
      list_.all[parameter].group = group_name::expert;
      list_.all[parameter].of_experts = true;
      return parameter;
    };
    // Every rank routes its own tokens.
    const auto router = [&](const char* name, const Rows& rows) {
      const int parameter = linear(name, {rows}, spec_.hidden, Split::none);
      replicated(parameter, true);
      return parameter;
    };
    l.router = router("router", {file + "gate", m.experts});
    if (m.expert_bias) {
      // DeepSeek-V3's name.
      l.router_bias = vector(own + "router.bias", {{file + "gate.e_score_correction_bias", m.experts}},
                             Split::none, Init::zeros);
      replicated(l.router_bias, false);
      Parameter& bias = list_.all[l.router_bias];
      bias.group = group_name::router_bias;
      bias.trainable = false;
      bias.f32 = true;
    }
    std::vector<Rows> in, out;
    const Slice local = local_experts(spec_, layout_);
    for (int64_t e = local.begin; e < local.begin + local.count; ++e) {
      const std::string expert = file + "experts." + std::to_string(e) + ".";
      in.push_back({expert + std::string(rules.gate), m.ffn});
      in.push_back({expert + std::string(rules.up), m.ffn});
      out.push_back({expert + std::string(rules.down), spec_.hidden});
    }
    l.experts_in = of_experts("experts_in", in, spec_.hidden, Split::expert_rows);
    l.experts_out = of_experts("experts_out", out, m.ffn, Split::expert_columns);
    if (m.shared_ffn == 0) return;
    const std::string shared = file + "shared_expert.";
    l.shared_in =
        linear("shared_in", {{shared + "gate_proj", m.shared_ffn}, {shared + "up_proj", m.shared_ffn}},
               spec_.hidden, Split::rows);
    l.shared_out = linear("shared_out", {{shared + "down_proj", spec_.hidden}}, m.shared_ffn, Split::columns);
    if (m.shared_gate) l.shared_gate = router("shared_gate", {file + "shared_expert_gate", 1});
  }

  const ModelSpec& spec_;
  const ModelLayout& layout_;
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

std::vector<int> LayerParameters::all() const {
  std::vector<int> out;
  for (const int p : {norm1,
                      norm1_bias,
                      qkv,
                      qkv_bias,
                      q_norm,
                      k_norm,
                      o,
                      o_bias,
                      post_norm1,
                      norm2,
                      norm2_bias,
                      mlp_in,
                      mlp_in_bias,
                      mlp_out,
                      mlp_out_bias,
                      post_norm2,
                      router,
                      router_bias,
                      experts_in,
                      experts_out,
                      shared_in,
                      shared_out,
                      shared_gate,
                      qkv_adapter.a,
                      qkv_adapter.b,
                      o_adapter.a,
                      o_adapter.b,
                      mlp_in_adapter.a,
                      mlp_in_adapter.b,
                      mlp_out_adapter.a,
                      mlp_out_adapter.b})
    if (p >= 0) out.push_back(p);
  return out;
}

std::vector<int> ParameterList::units() const {
  std::vector<int> out(all.size());  // 0: the embeddings
  const auto set = [&](int parameter, size_t unit) {
    if (parameter >= 0) out[parameter] = static_cast<int>(unit);
  };
  for (size_t l = 0; l < layers.size(); ++l)
    for (const int p : layers[l].all()) set(p, l + 1);
  for (const int p : {final_norm, final_norm_bias, head == embedding ? -1 : head}) set(p, layers.size() + 1);
  return out;
}

ParameterList make_parameters(const ModelSpec& spec, const ModelLayout& layout) {
  return Builder(spec, layout).build();
}

std::vector<std::pair<precision::Gemm, int>> gemm_weights(const LayerParameters& layer) {
  using precision::Gemm;
  std::vector<std::pair<Gemm, int>> out{{Gemm::qkv, layer.qkv},
                                        {Gemm::o_proj, layer.o},
                                        {Gemm::mlp_in, layer.mlp_in},
                                        {Gemm::mlp_out, layer.mlp_out},
                                        {Gemm::experts_in, layer.experts_in},
                                        {Gemm::experts_out, layer.experts_out},
                                        {Gemm::shared_in, layer.shared_in},
                                        {Gemm::shared_out, layer.shared_out}};
  std::erase_if(out, [](const auto& weight) { return weight.second < 0; });
  return out;
}

void keep_in_fp8(const precision::Recipe& recipe, ParameterList& parameters) {
  for (size_t l = 0; l < parameters.layers.size(); ++l)
    for (const auto& [gemm, weight] : gemm_weights(parameters.layers[l])) {
      if (!recipe.keeps_fp8(static_cast<int>(l), gemm)) continue;
      Parameter& p = parameters.all[weight];
      p.group = group_name::fp8;
      p.fp8 = true;
    }
}

void initial_values(const ModelSpec& spec, const Parameter& parameter, const Part& part, uint64_t seed,
                    float* out, int threads) {
  const int64_t count = part.numel();
  if (parameter.init == Init::ones || parameter.init == Init::zeros) {
    std::fill(out, out + count, parameter.init == Init::ones ? 1.0f : 0.0f);
    return;
  }
  const PhiloxStream stream(seed, part.name);
  const auto in = static_cast<double>(part.width());
  if (parameter.init == Init::kaiming_uniform) {  // with a = sqrt(5), as torch.nn.Linear
    const double bound = 1 / std::sqrt(in);
    for (int64_t i = 0; i < count; ++i) {
      const auto uniform = static_cast<double>(stream.uniform(static_cast<uint64_t>(part.element(i))));
      out[i] = static_cast<float>(bound * (2 * uniform - 1));
    }
    return;
  }
  double scale = spec.initializer_range;
  if (parameter.init == Init::scaled_normal) scale /= std::sqrt(2.0 * static_cast<double>(spec.layers));
  if (parameter.init == Init::xavier_normal)
    scale = std::sqrt(2 / (in + static_cast<double>(part.global.front())));
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
