#pragma once
// cuDNN graphs of attention problems: tensors, offsets of ragged sequences, and the layout of the
// workspace. Included by cudnn.cpp alone.
//
// Sequences of equal length are strided (B, H, S, D) tensors. The rows of q and of k per sequence may differ,
// as with the keys of other ranks in context parallelism. Other sequences are described by offsets and a
// padding mask ("THD"): the number of sequences and the longest length are rounded up, so that few plans
// serve many batches. Padding sequences are empty.
//
// A causal mask ends at the last query and the last key, as here.
//
// Our softmax statistics are (H, tokens). cuDNN gets them packed, (B, H, S): before 9.26 its backward pass
// silently reads any other strides as packed, and before 9.12 the forward pass writes them packed. Ragged
// statistics are (tokens, H). Both are reordered in our part of the workspace.
//
// FP8: cuDNN calls scales that multiply codes "descale" and those that make codes "scale", P "S" and the
// gradient of the scores "dP". Results are in bf16, so that only P and dP are rounded there.

#include <algorithm>
#include <bit>
#include <cctype>
#include <memory>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/ops/attention/cudnn/frontend.h"
#include "core/ops/attention/cudnn/ragged.h"
#include "core/ops/attention/cudnn/support.h"

namespace nrl::ops::attention {
namespace {

namespace fe = cudnn_frontend;
using fe::graph::Graph;
using TensorAttributes = fe::graph::Tensor_attributes;
using TensorPointer = std::shared_ptr<TensorAttributes>;

constexpr size_t alignment = 256;

/// Tensors of a graph. The numbers of Fp8Number follow, and offsets, one for each distinct step between rows.
enum Uid : int64_t {
  uid_q = 1,
  uid_k,
  uid_v,
  uid_out,
  uid_lse,
  uid_dout,
  uid_dq,
  uid_dk,
  uid_dv,
  uid_lengths,
  uid_q_scale,
  uid_k_scale,
  uid_v_scale,
  uid_dout_scale
};
constexpr int64_t uid_numbers = uid_dout_scale + 1, uid_offsets = 32;
static_assert(uid_numbers + fp8_numbers <= uid_offsets);

int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}
size_t padded(size_t bytes) {
  return (bytes + alignment - 1) / alignment * alignment;
}

/// The problem, rounded up, whose plan runs `p`.
Problem plan_problem(Problem p) {
  if (p.equal) {
    for (RowBlocks* blocks : {&p.query, &p.key}) {
      blocks->first = 0;
      if (p.sequences == 1) blocks->step = blocks->rows;
    }
    return p;
  }
  p.sequences = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(p.sequences)));
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(p.query.rows)));
  p.query.rows = p.key.rows = round_up(p.query.rows, std::max<int64_t>(128, power / 8));
  return p;
}

/// Offsets in our part of the workspace, which precedes cuDNN's.
struct Layout {
  bool ragged = false;
  bool reorders_lse = false;  ///< cuDNN's statistics are in the workspace, at `lse`
  RowSteps steps;             ///< ragged: step 1 (of the statistics) included
  bool spread = false;        ///< ragged: dk and dv are made dense and then copied to where they belong
  bool fp8 = false;
  size_t numbers = 0;  ///< fp8: the array indexed by Fp8Number
  size_t lengths = 0, offsets = 0, lse = 0, dk = 0, dv = 0, bytes = 0;

  explicit Layout(const Problem& p) : ragged(!p.equal), fp8(p.dtype == DType::e4m3) {
    if (fp8) numbers = take(sizeof(float) * fp8_numbers);
    reorders_lse = p.lse_row > 0 && (ragged || p.sequences > 1 || p.lse_row != p.query.rows);
    const int64_t queries = ragged ? p.queries : p.sequences * p.query.rows;
    if (reorders_lse) lse = take(sizeof(float) * static_cast<size_t>(queries * p.heads));
    if (!ragged) return;
    // With grouped heads cuDNN allocates dk and dv per query head, with the row steps of dk and dv times the
    // group: many times their size where these are columns of a fused buffer.
    spread = p.direction == Direction::backward && p.heads != p.kv_heads;
    for (const int64_t step : {p.heads, p.q.row, p.k.row, p.v.row, p.out.row, p.dout.row, p.dq.row,
                               spread ? p.kv_heads * p.d : p.dk.row, spread ? p.kv_heads * p.d : p.dv.row})
      if (step > 0 && index_of(step) < 0) {
        NRL_CHECK(steps.count < most_row_steps, "attention: too many different row steps");
        steps.step[steps.count++] = step;
      }
    lengths = take(sizeof(int32_t) * static_cast<size_t>(p.sequences));
    offsets = take(sizeof(int64_t) * static_cast<size_t>(steps.count * (p.sequences + 1)));
    if (!spread) return;
    const auto gradient = static_cast<size_t>(p.keys * p.kv_heads * p.d * size_of(p.dtype));
    dk = take(gradient);
    dv = take(gradient);
  }
  int index_of(int64_t step) const {
    for (int i = 0; i < steps.count; ++i)
      if (steps.step[i] == step) return i;
    return -1;
  }

 private:
  size_t take(size_t size) {
    const size_t at = bytes;
    bytes += padded(size);
    return at;
  }
};

/// A graph whose own workspace is known before its plans are built.
struct SizedGraph : Graph {
  size_t own_workspace() const { return static_cast<size_t>(get_fe_workspace_size_subtree()); }
};

/// Makes the tensors of one graph.
class Builder {
 public:
  /// `capability` is 10 * major + minor: nodes ask for it when they are made.
  Builder(const Problem& p, int capability) : p_(p), layout_(p), graph_(std::make_unique<SizedGraph>()) {
    graph_->set_sm_version(capability);
    const DType results = layout_.fp8 ? p.result : p.dtype;
    graph_->set_io_data_type(results == DType::f16 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    if (!layout_.ragged) return;
    for (int i = 0; i < layout_.steps.count; ++i)
      offsets_.push_back(side_input(uid_offsets + i, p.sequences + 1, fe::DataType_t::INT64));
    lengths_ = side_input(uid_lengths, p.sequences, fe::DataType_t::INT32);
  }

  std::unique_ptr<SizedGraph> forward() {
    auto options = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(p_.lse_row > 0);
    describe(options);
    auto q = input(uid_q, p_.query, p_.heads, p_.q), k = input(uid_k, p_.key, p_.kv_heads, p_.k),
         v = input(uid_v, p_.key, p_.kv_heads, p_.v);
    TensorPointer out, stats;
    if (layout_.fp8) {
      const auto results =
          graph_->sdpa_fp8(q, k, v, scalar(uid_q_scale), scalar(uid_k_scale), scalar(uid_v_scale),
                           number(p_scale), number(p_code_scale), number(one), options);
      out = results[0], stats = results[1];
      for (size_t i = 2; i < results.size(); ++i) unused(results[i], i - 2);
    } else {
      const auto results = graph_->sdpa(q, k, v, options);
      out = results[0], stats = results[1];
    }
    output(out, uid_out, p_.query, p_.heads, p_.out);
    if (stats) {
      stats->set_output(true);
      place_statistics(stats);
    }
    return std::move(graph_);
  }

  std::unique_ptr<SizedGraph> backward(bool deterministic) {
    auto q = input(uid_q, p_.query, p_.heads, p_.q), k = input(uid_k, p_.key, p_.kv_heads, p_.k),
         v = input(uid_v, p_.key, p_.kv_heads, p_.v), out = input(uid_out, p_.query, p_.heads, p_.out),
         dout = input(uid_dout, p_.query, p_.heads, p_.dout);
    auto stats = graph_->tensor(TensorAttributes());
    place_statistics(stats);
    TensorPointer dq, dk, dv;
    const auto describe_backward = [&](auto options) {
      options.set_name("attention_backward").set_deterministic_algorithm(deterministic);
      describe(options);
      return options;
    };
    if (layout_.fp8) {
      const TensorPointer exact = number(one);
      const auto results = graph_->sdpa_fp8_backward(
          q, k, v, out, dout, stats, scalar(uid_q_scale), scalar(uid_k_scale), scalar(uid_v_scale), exact,
          scalar(uid_dout_scale), number(p_scale), number(ds_scale), number(p_code_scale), exact, exact,
          exact, number(ds_code_scale), describe_backward(fe::graph::SDPA_fp8_backward_attributes()));
      dq = results[0], dk = results[1], dv = results[2];
      for (size_t i = 3; i < results.size(); ++i) unused(results[i], i - 3);
    } else {
      auto options = describe_backward(fe::graph::SDPA_backward_attributes());
      if (layout_.ragged) {
        options.set_max_total_seq_len_q(p_.queries);
        options.set_max_total_seq_len_kv(p_.keys);
      }
      const auto results = graph_->sdpa_backward(q, k, v, out, dout, stats, options);
      dq = results[0], dk = results[1], dv = results[2];
    }
    const HeadSteps dense{p_.kv_heads * p_.d, p_.d};
    output(dq, uid_dq, p_.query, p_.heads, p_.dq);
    output(dk, uid_dk, p_.key, p_.kv_heads, layout_.spread ? dense : p_.dk);
    output(dv, uid_dv, p_.key, p_.kv_heads, layout_.spread ? dense : p_.dv);
    return std::move(graph_);
  }

 private:
  TensorPointer scalar(int64_t uid) { return side_input(uid, 1, fe::DataType_t::FLOAT); }
  TensorPointer number(Fp8Number which) { return scalar(uid_numbers + which); }
  /// Declares an amax output that the graph must have and nothing reads.
  static void unused(const TensorPointer& amax, size_t which) {
    amax->set_uid(uid_numbers + first_amax + static_cast<int64_t>(which))
        .set_output(true)
        .set_dim({1, 1, 1, 1})
        .set_stride({1, 1, 1, 1})
        .set_data_type(fe::DataType_t::FLOAT);
  }
  TensorPointer side_input(int64_t uid, int64_t n, fe::DataType_t type) {
    return graph_->tensor(
        TensorAttributes().set_uid(uid).set_dim({n, 1, 1, 1}).set_stride({1, 1, 1, 1}).set_data_type(type));
  }
  /// Rows of one tensor: all sequences, or the first and where each begins.
  void place(TensorAttributes& t, const RowBlocks& blocks, int64_t heads, int64_t width, int64_t row,
             int64_t head) {
    const int64_t step = layout_.ragged ? blocks.rows : blocks.step;
    t.set_dim({p_.sequences, heads, blocks.rows, width}).set_stride({step * row, head, row, 1});
    if (layout_.ragged) t.set_ragged_offset(offsets_.at(static_cast<size_t>(layout_.index_of(row))));
  }
  TensorPointer input(Uid uid, const RowBlocks& blocks, int64_t heads, const HeadSteps& steps) {
    TensorAttributes t;
    t.set_uid(uid);
    if (layout_.fp8 && uid != uid_out)
      t.set_data_type(uid == uid_dout ? fe::DataType_t::FP8_E5M2 : fe::DataType_t::FP8_E4M3);
    place(t, blocks, heads, p_.d, steps.row, steps.head);
    return graph_->tensor(t);
  }
  void output(const TensorPointer& t, Uid uid, const RowBlocks& blocks, int64_t heads,
              const HeadSteps& steps) {
    t->set_uid(uid).set_output(true);
    place(*t, blocks, heads, p_.d, steps.row, steps.head);
  }
  /// Ragged: (tokens, heads), the order for which the interface computes its workspace; else packed.
  void place_statistics(const TensorPointer& t) {
    t->set_uid(uid_lse).set_data_type(fe::DataType_t::FLOAT);
    if (layout_.ragged) return place(*t, p_.query, p_.heads, 1, p_.heads, 1);
    const int64_t rows = p_.query.rows;
    t->set_dim({p_.sequences, p_.heads, rows, 1}).set_stride({p_.heads * rows, rows, 1, 1});
  }
  template <class Options>
  void describe(Options& options) {
    options.set_attn_scale(p_.scale);
    if (p_.causal) options.set_diagonal_band_right_bound(0);
    options.set_diagonal_alignment(p_.causal && !p_.self ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                         : fe::DiagonalAlignment_t::TOP_LEFT);
    // Keys after i - window, as here.
    if (p_.window > 0) options.set_diagonal_band_left_bound(static_cast<int>(p_.window));
    if (layout_.ragged) options.set_padding_mask(true).set_seq_len_q(lengths_).set_seq_len_kv(lengths_);
  }

  const Problem& p_;
  Layout layout_;
  std::unique_ptr<SizedGraph> graph_;
  std::vector<TensorPointer> offsets_;
  TensorPointer lengths_;
};

std::unique_ptr<SizedGraph> build_graph(const Problem& p, const CudnnOptions& options, int capability) {
  Builder builder(p, capability);
  return p.direction == Direction::forward ? builder.forward() : builder.backward(options.deterministic);
}

/// The beginning of what cuDNN says, in one line.
std::string text_of(fe::error_t e) {
  std::string text = e.get_message().substr(0, 400);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.pop_back();
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

/// Candidates for `p` in `workspace` bytes. Without a handle the graph has been given the description
/// of a device.
CudnnSupport find_plans(SizedGraph& graph, const Problem& p, size_t workspace, cudnnHandle_t handle) {
  CudnnSupport s;
  const auto ok = [&s](const fe::error_t& e) {
    if (e.is_bad()) s.reason = text_of(e);
    return e.is_good();
  };
  if (!ok(graph.validate()) || !ok(graph.build_operation_graph(handle)) ||
      !ok(graph.create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK})))
    return s;
  s.plans = graph.get_execution_plan_count();
  s.own_bytes = Layout(p).bytes + padded(graph.own_workspace());
  if (s.own_bytes > workspace) {
    s.reason =
        fmt::format("cuDNN wants more than {} bytes of workspace, there are {}", s.own_bytes, workspace);
    return s;
  }
  graph.deselect_workspace_greater_than(static_cast<int64_t>(workspace - s.own_bytes));
  ok(graph.check_support());
  return s;
}

}  // namespace
}  // namespace nrl::ops::attention
