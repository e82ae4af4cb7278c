// cuDNN's fused attention through its header-only C++ interface: the only file that includes it, because it
// takes half a minute to compile. The library is opened when it is first wanted, so that the program starts
// without it.
//
// Sequences of equal length are a strided (B, H, S, D) tensor. Others are described by offsets and a padding
// mask ("THD"): the number of sequences and the longest length are rounded up, so that few plans serve many
// batches. Padding sequences are empty.

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/device/runtime.h"
#include "core/ops/attention/cudnn/ragged.h"
#include "core/ops/attention/cudnn/support.h"

namespace nrl::ops::attention {
namespace {

// The interface looks for CUDA's runtime in a shared library of one of two names. This program has the
// runtime linked into it: answer from there, whatever other versions lie on the machine.
const char runtime_library[] = "libcudart.so.13";

void* open_library(const char* name, int flags) {
  if (std::strncmp(name, "libcudart.so", 12) != 0) return dlopen(name, flags);
  return std::strcmp(name, runtime_library) == 0 ? const_cast<char*>(runtime_library) : nullptr;
}

void* find_symbol(void* library, const char* name) {
  if (library != runtime_library) return dlsym(library, name);
  static const std::unordered_map<std::string, void*> symbols = {
      {"cudaGetDevice", reinterpret_cast<void*>(&cudaGetDevice)},
      {"cudaGetDeviceProperties",
       reinterpret_cast<void*>(static_cast<cudaError_t (*)(cudaDeviceProp*, int)>(&cudaGetDeviceProperties))},
      {"cudaGetErrorString", reinterpret_cast<void*>(&cudaGetErrorString)},
      {"cudaStreamIsCapturing", reinterpret_cast<void*>(&cudaStreamIsCapturing)},
      {"cudaMemcpyAsync",
       reinterpret_cast<void*>(
           static_cast<cudaError_t (*)(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t)>(
               &cudaMemcpyAsync))},
      {"cudaMemsetAsync",
       reinterpret_cast<void*>(
           static_cast<cudaError_t (*)(void*, int, size_t, cudaStream_t)>(&cudaMemsetAsync))},
  };
  const auto it = symbols.find(name);
  return it == symbols.end() ? nullptr : it->second;
}

}  // namespace
}  // namespace nrl::ops::attention

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
// Its JSON library is another version of ours under the same names.
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#define dlopen(name, flags) ::nrl::ops::attention::open_library(name, flags)
#define dlsym(library, name) ::nrl::ops::attention::find_symbol(library, name)
#include <cudnn_frontend.h>
#undef dlopen
#undef dlsym

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace nrl::ops::attention {
namespace {

namespace fe = cudnn_frontend;
using fe::graph::Graph;
using TensorAttributes = fe::graph::Tensor_attributes;
using TensorPointer = std::shared_ptr<TensorAttributes>;

constexpr int oldest_cudnn = 90800;  ///< the first that takes a described device
constexpr size_t alignment = 256;

/// Why cuDNN cannot be used; empty when it is open.
std::string open_library_once() {
  static const std::string reason = [] {
    void* library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_GLOBAL);
    std::string why = library ? "" : dlerror();
    if (!library) library = dlopen(NRL_CUDNN_LIBRARY, RTLD_NOW | RTLD_GLOBAL);
    if (!library) return fmt::format("cuDNN cannot be loaded: {}", why);
    fe::cudnn_dlhandle = library;
    const size_t version = fe::detail::get_backend_version();
    return version >= oldest_cudnn
               ? std::string()
               : fmt::format("cuDNN {} is older than 9.8", fe::detail::get_backend_version_string());
  }();
  return reason;
}

/// Tensors of a graph. Offsets follow, one for each distinct step between rows.
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
  uid_lengths
};
constexpr int64_t uid_offsets = 32;

int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}
size_t padded(size_t bytes) {
  return (bytes + alignment - 1) / alignment * alignment;
}

/// The problem whose plan serves `p`.
Problem plan_problem(Problem p) {
  if (p.equal) return p;
  p.sequences = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(p.sequences)));
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(p.longest)));
  p.longest = round_up(p.longest, std::max<int64_t>(128, power / 8));
  return p;
}

/// Where things lie in the workspace before what cuDNN wants for itself.
struct Layout {
  bool ragged = false;  ///< everything but `bytes` is used for these only
  RowSteps steps;       ///< step 1 (of the statistics) included
  bool spread = false;  ///< dk and dv are made dense and then copied to where they belong
  size_t lengths = 0, offsets = 0, lse = 0, dk = 0, dv = 0, bytes = 0;

  explicit Layout(const Problem& p) : ragged(!p.equal) {
    if (!ragged) return;
    // With grouped heads cuDNN makes one dk and dv per query head, with the row steps of dk and dv times the
    // group: many times their size where these are columns of a wide buffer.
    spread = p.direction == Direction::backward && p.heads != p.kv_heads;
    for (const int64_t step : {p.heads, p.q.row, p.k.row, p.v.row, p.out.row, p.dout.row, p.dq.row,
                               spread ? p.kv_heads * p.d : p.dk.row, spread ? p.kv_heads * p.d : p.dv.row})
      if (step > 0 && index_of(step) < 0) {
        NRL_CHECK(steps.count < most_row_steps, "attention: too many different row steps");
        steps.step[steps.count++] = step;
      }
    lengths = take(sizeof(int32_t) * static_cast<size_t>(p.sequences));
    offsets = take(sizeof(int64_t) * static_cast<size_t>(steps.count * (p.sequences + 1)));
    if (p.lse_row > 0) lse = take(sizeof(float) * static_cast<size_t>(p.queries * p.heads));
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

/// A graph whose own share of the workspace is known before its plans are built.
struct SizedGraph : Graph {
  size_t own_workspace() const { return static_cast<size_t>(get_fe_workspace_size_subtree()); }
};

/// Makes the tensors of one graph.
class Builder {
 public:
  /// `capability` is 10 * major + minor: nodes ask for it when they are made.
  Builder(const Problem& p, int capability) : p_(p), layout_(p), graph_(std::make_unique<SizedGraph>()) {
    graph_->set_sm_version(capability);
    graph_->set_io_data_type(fe::DataType_t::BFLOAT16)
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
    auto q = input(uid_q, p_.heads, p_.q), k = input(uid_k, p_.kv_heads, p_.k),
         v = input(uid_v, p_.kv_heads, p_.v);
    auto [out, stats] = graph_->sdpa(q, k, v, options);
    output(out, uid_out, p_.heads, p_.out);
    if (stats) {
      stats->set_output(true);
      place_statistics(stats);
    }
    return std::move(graph_);
  }

  std::unique_ptr<SizedGraph> backward(bool deterministic) {
    auto options = fe::graph::SDPA_backward_attributes().set_name("attention_backward");
    options.set_deterministic_algorithm(deterministic);
    describe(options);
    if (layout_.ragged) {
      options.set_max_total_seq_len_q(p_.queries);
      options.set_max_total_seq_len_kv(p_.keys);
    }
    auto q = input(uid_q, p_.heads, p_.q), k = input(uid_k, p_.kv_heads, p_.k),
         v = input(uid_v, p_.kv_heads, p_.v), out = input(uid_out, p_.heads, p_.out),
         dout = input(uid_dout, p_.heads, p_.dout);
    auto stats = graph_->tensor(TensorAttributes());
    place_statistics(stats);
    auto [dq, dk, dv] = graph_->sdpa_backward(q, k, v, out, dout, stats, options);
    const HeadSteps dense{p_.kv_heads * p_.d, p_.d};
    output(dq, uid_dq, p_.heads, p_.dq);
    output(dk, uid_dk, p_.kv_heads, layout_.spread ? dense : p_.dk);
    output(dv, uid_dv, p_.kv_heads, layout_.spread ? dense : p_.dv);
    return std::move(graph_);
  }

 private:
  TensorPointer side_input(int64_t uid, int64_t n, fe::DataType_t type) {
    return graph_->tensor(
        TensorAttributes().set_uid(uid).set_dim({n, 1, 1, 1}).set_stride({1, 1, 1, 1}).set_data_type(type));
  }
  /// Rows of one tensor: all sequences, or the first and where each begins.
  void place(TensorAttributes& t, int64_t heads, int64_t width, int64_t row, int64_t head) {
    t.set_dim({p_.sequences, heads, p_.longest, width}).set_stride({p_.longest * row, head, row, 1});
    if (layout_.ragged) t.set_ragged_offset(offsets_.at(static_cast<size_t>(layout_.index_of(row))));
  }
  TensorPointer input(Uid uid, int64_t heads, const HeadSteps& steps) {
    TensorAttributes t;
    t.set_uid(uid);
    place(t, heads, p_.d, steps.row, steps.head);
    return graph_->tensor(t);
  }
  void output(const TensorPointer& t, Uid uid, int64_t heads, const HeadSteps& steps) {
    t->set_uid(uid).set_output(true);
    place(*t, heads, p_.d, steps.row, steps.head);
  }
  /// Ragged: (tokens, heads), the order for which the interface computes its workspace; else our (heads,
  /// tokens).
  void place_statistics(const TensorPointer& t) {
    t->set_uid(uid_lse).set_data_type(fe::DataType_t::FLOAT);
    if (layout_.ragged) return place(*t, p_.heads, 1, p_.heads, 1);
    t->set_dim({p_.sequences, p_.heads, p_.longest, 1}).set_stride({p_.longest, p_.lse_row, 1, 1});
  }
  template <class Options>
  void describe(Options& options) {
    options.set_attn_scale(p_.scale).set_causal_mask(p_.causal);
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

/// Candidates for `p` in `workspace` bytes. Without a handle the graph has been given the description of a
/// device.
CudnnSupport find_plans(SizedGraph& graph, const Problem& p, size_t workspace, cudnnHandle_t handle) {
  CudnnSupport s;
  const auto ok = [&s](const fe::error_t& e) {
    if (e.is_bad()) s.refused = text_of(e);
    return e.is_good();
  };
  if (!ok(graph.validate()) || !ok(graph.build_operation_graph(handle)) ||
      !ok(graph.create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK})))
    return s;
  s.plans = graph.get_execution_plan_count();
  s.own_bytes = Layout(p).bytes + padded(graph.own_workspace());
  if (s.own_bytes > workspace) {
    s.refused =
        fmt::format("cuDNN wants more than {} bytes of workspace, there are {}", s.own_bytes, workspace);
    return s;
  }
  graph.deselect_workspace_greater_than(static_cast<int64_t>(workspace - s.own_bytes));
  ok(graph.check_support());
  return s;
}

class Cudnn final : public Engine {
 public:
  Cudnn(device::Runtime& runtime, const CudnnOptions& options) : runtime_(runtime), options_(options) {
    runtime.bind_thread();
    if (const auto status = fe::detail::create_handle(&handle_); status != CUDNN_STATUS_SUCCESS)
      fail(Exit::unavailable, "cudnnCreate failed on {}: {}", runtime.properties().name,
           fe::detail::get_error_string(status));
  }
  ~Cudnn() override {
    plans_.clear();
    if (handle_) fe::detail::destroy_handle(handle_);
  }

  std::string name() const override {
    return fmt::format("cuDNN {}{}", fe::detail::get_backend_version_string(),
                       options_.deterministic ? ", deterministic" : "");
  }

  const std::string& refusal(const Problem& problem, size_t workspace) override {
    return plan_for(problem, workspace).refused;
  }

  void forward(Exec& exec, const AttentionForward& a) override {
    const Problem problem = problem_of(a);
    Plan& plan = plan_for(problem, exec.workspace.size);
    const Layout& at = plan.layout;
    std::byte* const memory = exec.workspace.data;
    Pointers pointers = {{uid_q, a.q.data}, {uid_k, a.k.data}, {uid_v, a.v.data}, {uid_out, a.out.data}};
    if (a.lse) pointers[uid_lse] = at.ragged ? memory + at.lse : a.lse.data;
    describe_sequences(exec, plan, a.cu_q, problem.sequences, pointers);
    run(exec, plan, pointers);
    if (at.ragged && a.lse)
      cuda::transpose_f32(exec.stream, reinterpret_cast<float*>(memory + at.lse), problem.heads,
                          problem.queries, problem.heads, static_cast<float*>(a.lse.data), problem.lse_row);
  }

  void backward(Exec& exec, const AttentionBackward& a) override {
    const Problem problem = problem_of(a);
    Plan& plan = plan_for(problem, exec.workspace.size);
    const Layout& at = plan.layout;
    std::byte* const memory = exec.workspace.data;
    if (at.ragged)
      cuda::transpose_f32(exec.stream, static_cast<const float*>(a.lse.data), problem.lse_row, problem.heads,
                          problem.queries, reinterpret_cast<float*>(memory + at.lse), problem.heads);
    Pointers pointers = {{uid_q, a.q.data},
                         {uid_k, a.k.data},
                         {uid_v, a.v.data},
                         {uid_out, a.out.data},
                         {uid_lse, at.ragged ? memory + at.lse : a.lse.data},
                         {uid_dout, a.dout.data},
                         {uid_dq, a.dq.data},
                         {uid_dk, at.spread ? memory + at.dk : a.dk.data},
                         {uid_dv, at.spread ? memory + at.dv : a.dv.data}};
    describe_sequences(exec, plan, a.cu_q, problem.sequences, pointers);
    run(exec, plan, pointers);
    if (!at.spread) return;
    for (const auto& [from, to] : {std::pair{at.dk, &a.dk}, {at.dv, &a.dv}})
      cuda::spread_rows_bf16(exec.stream, reinterpret_cast<const bf16*>(memory + from), problem.keys,
                             problem.kv_heads * problem.d, static_cast<bf16*>(to->data), to->stride[0],
                             exec.multiprocessors);
  }

 private:
  using Pointers = std::unordered_map<int64_t, void*>;
  struct Plan {
    explicit Plan(const Problem& p) : layout(p), sequences(p.sequences) {}
    Layout layout;
    int64_t sequences;
    std::unique_ptr<SizedGraph> graph;
    std::string refused;
  };

  Plan& plan_for(const Problem& problem, size_t workspace) {
    const std::scoped_lock lock(mutex_);
    const std::pair key{plan_problem(problem), workspace};
    if (const auto it = plans_.find(key); it != plans_.end()) return it->second;
    Plan& plan = plans_.try_emplace(key, key.first).first->second;
    plan.refused = make(plan, key.first, workspace);
    return plan;
  }

  /// Builds the plan; returns why there is none.
  std::string make(Plan& plan, const Problem& p, size_t workspace) {
    try {
      const auto& device = runtime_.properties();
      auto graph = build_graph(p, options_, device.major * 10 + device.minor);
      const CudnnSupport found = find_plans(*graph, p, workspace, handle_);
      if (!found.refused.empty()) return found.refused;
      if (const auto e = graph->build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE); e.is_bad())
        return text_of(e);
      int64_t wanted = 0;
      if (const auto e = graph->get_workspace_size(wanted); e.is_bad()) return text_of(e);
      if (plan.layout.bytes + static_cast<size_t>(wanted) > workspace)
        return fmt::format("cuDNN wants {} bytes of workspace, there are {}",
                           plan.layout.bytes + static_cast<size_t>(wanted), workspace);
      plan.graph = std::move(graph);
      return "";
    } catch (const std::exception& e) {  // the interface throws what its shared libraries lack
      return e.what();
    }
  }

  static void describe_sequences(const Exec& exec, const Plan& plan, const Tensor& cu, int64_t sequences,
                                 Pointers& pointers) {
    const Layout& at = plan.layout;
    if (!at.ragged) return;
    std::byte* const memory = exec.workspace.data;
    auto* const offsets = reinterpret_cast<int64_t*>(memory + at.offsets);
    cuda::ragged_description(exec.stream, static_cast<const int32_t*>(cu.data), sequences, plan.sequences,
                             at.steps, reinterpret_cast<int32_t*>(memory + at.lengths), offsets);
    pointers[uid_lengths] = memory + at.lengths;
    for (int i = 0; i < at.steps.count; ++i) pointers[uid_offsets + i] = offsets + i * (plan.sequences + 1);
  }

  void run(const Exec& exec, const Plan& plan, Pointers& pointers) const {
    NRL_CHECK(plan.graph, "attention: cuDNN has no plan for this: {}", plan.refused);
    if (const auto status = fe::detail::set_stream(handle_, static_cast<cudaStream_t>(exec.stream));
        status != CUDNN_STATUS_SUCCESS)
      fail(Exit::internal, "cudnnSetStream: {}", fe::detail::get_error_string(status));
    const auto e = plan.graph->execute(handle_, pointers, exec.workspace.data + plan.layout.bytes);
    if (e.is_bad()) fail(Exit::internal, "cuDNN attention: {}", text_of(e));
  }

  device::Runtime& runtime_;
  CudnnOptions options_;
  cudnnHandle_t handle_ = nullptr;
  std::mutex mutex_;
  std::map<std::pair<Problem, size_t>, Plan> plans_;
};

}  // namespace

std::unique_ptr<Engine> open_cudnn(device::Runtime& runtime, const CudnnOptions& options,
                                   std::string& why_none) {
  why_none = open_library_once();
  if (!why_none.empty()) return nullptr;
  try {
    return std::make_unique<Cudnn>(runtime, options);
  } catch (const std::exception& e) {
    why_none = e.what();
    return nullptr;
  }
}

CudnnSupport cudnn_support(const Problem& problem, const CudnnOptions& options, size_t workspace,
                           const std::string& device, int compute_capability) {
  if (const std::string why = open_library_once(); !why.empty()) fail(Exit::unavailable, "{}", why);
  const Problem p = plan_problem(problem);
  auto properties = std::make_shared<fe::DeviceProperties>();
  if (const auto e = properties->deserialize({device.begin(), device.end()}); e.is_bad())
    return {fmt::format("the description of the device: {}", text_of(e))};
  auto graph = build_graph(p, options, compute_capability);
  graph->set_device_properties(properties);
  return find_plans(*graph, p, workspace, nullptr);
}

}  // namespace nrl::ops::attention
