// The attention engine on cuDNN. The library is opened when it is first needed, so that the program
// starts without it.

#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "core/device/runtime.h"
#include "core/ops/attention/cudnn/defects.h"
#include "core/ops/attention/cudnn/graph.h"

namespace nrl::ops::attention {
namespace {

constexpr int oldest_cudnn = 90800;  ///< the first that accepts a described device

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

  const std::string& no_plan_reason(const Problem& problem, size_t workspace) override {
    return plan_for(problem, workspace).reason;
  }

  std::string not_capturable_reason(const Problem& p) const override {
    return uncapturable_reason(p, version());
  }

  void forward(Exec& exec, const AttentionForward& a) override {
    const Problem problem = problem_of(a);
    Plan& plan = plan_for(problem, exec.workspace.size);
    const Layout& at = plan.layout;
    std::byte* const memory = exec.workspace.data;
    const RowBlocks &query = problem.query, &key = problem.key;
    Pointers pointers = {{uid_q, first_row(a.q, query)},
                         {uid_k, first_row(a.k, key)},
                         {uid_v, first_row(a.v, key)},
                         {uid_out, first_row(a.out, query)}};
    if (a.lse) pointers[uid_lse] = at.reorders_lse ? memory + at.lse : a.lse.data;
    describe_sequences(exec, plan, a.cu_q, problem.sequences, pointers);
    describe_scales(exec, plan, a, {}, pointers);
    run(exec, plan, pointers);
    clear_other_rows(exec, problem, query, a.out);
    if (!at.reorders_lse) return;
    const auto* const lse = reinterpret_cast<const float*>(memory + at.lse);
    auto* const ours = static_cast<float*>(a.lse.data);
    if (at.ragged)
      cuda::transpose_f32(exec.stream, lse, problem.heads, problem.queries, problem.heads, ours,
                          problem.lse_row);
    else
      cuda::unpack_statistics(exec.stream, lse, problem.heads, problem.sequences, query, ours,
                              problem.lse_row, problem.queries);
  }

  void backward(Exec& exec, const AttentionBackward& a) override {
    const Problem problem = problem_of(a);
    Plan& plan = plan_for(problem, exec.workspace.size);
    const Layout& at = plan.layout;
    std::byte* const memory = exec.workspace.data;
    const RowBlocks &query = problem.query, &key = problem.key;
    const auto* const ours = static_cast<const float*>(a.lse.data);
    auto* const lse = reinterpret_cast<float*>(memory + at.lse);
    if (at.ragged)
      cuda::transpose_f32(exec.stream, ours, problem.lse_row, problem.heads, problem.queries, lse,
                          problem.heads);
    else if (at.reorders_lse)
      cuda::pack_statistics(exec.stream, ours, problem.lse_row, problem.queries, problem.heads,
                            problem.sequences, query, lse);
    Pointers pointers = {{uid_q, first_row(a.q, query)},
                         {uid_k, first_row(a.k, key)},
                         {uid_v, first_row(a.v, key)},
                         {uid_out, first_row(a.out, query)},
                         {uid_lse, at.reorders_lse ? memory + at.lse : a.lse.data},
                         {uid_dout, first_row(a.dout, query)},
                         {uid_dq, first_row(a.dq, query)},
                         {uid_dk, at.spread ? memory + at.dk : first_row(a.dk, key)},
                         {uid_dv, at.spread ? memory + at.dv : first_row(a.dv, key)}};
    describe_sequences(exec, plan, a.cu_q, problem.sequences, pointers);
    describe_scales(exec, plan, a, a.dout.scales, pointers);
    run(exec, plan, pointers);
    clear_other_rows(exec, problem, query, a.dq);
    clear_other_rows(exec, problem, key, a.dk);
    clear_other_rows(exec, problem, key, a.dv);
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
    std::string reason;
  };

  CudnnVersion version() const {
    return {static_cast<int>(fe::detail::get_backend_version()), runtime_.properties().major};
  }

  Plan& plan_for(const Problem& problem, size_t workspace) {
    const std::scoped_lock lock(mutex_);
    const std::pair key{plan_problem(problem), workspace};
    if (const auto it = plans_.find(key); it != plans_.end()) return it->second;
    Plan& plan = plans_.try_emplace(key, key.first).first->second;
    plan.reason = make(plan, key.first, workspace);
    return plan;
  }

  /// Builds the plan; returns why there is none.
  std::string make(Plan& plan, const Problem& p, size_t workspace) {
    if (std::string defect = defect_reason(p, version()); !defect.empty()) return defect;
    try {
      const auto& device = runtime_.properties();
      auto graph = build_graph(p, options_, device.major * 10 + device.minor);
      const CudnnSupport found = find_plans(*graph, p, workspace, handle_);
      if (!found.reason.empty()) return found.reason;
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

  static void* first_row(const Tensor& t, const RowBlocks& blocks) {
    return static_cast<std::byte*>(t.data) + blocks.first * t.stride[0] * size_of(t.dtype);
  }
  /// Zeros where rows belong to none of the blocks that cuDNN was given.
  static void clear_other_rows(const Exec& exec, const Problem& p, const RowBlocks& blocks, const Tensor& t) {
    if (!p.equal || p.sequences * blocks.rows == t.dim(0)) return;
    cuda::clear_other_rows_bf16(exec.stream, static_cast<bf16*>(t.data), t.dim(0), t.dim(1) * t.dim(2),
                                t.stride[0], p.sequences, blocks, exec.multiprocessors);
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

  template <class Attention>
  static void describe_scales(const Exec& exec, const Plan& plan, const Attention& a, const Scales& dout,
                              Pointers& pointers) {
    if (!plan.layout.fp8) return;
    auto* const numbers = reinterpret_cast<float*>(exec.workspace.data + plan.layout.numbers);
    cuda::write_fp8_numbers(exec.stream, a.scale, a.q.dim(2), static_cast<const float*>(dout.data),
                            static_cast<const float*>(a.v.scales.data), numbers);
    constexpr int of_forward[] = {one, p_scale, p_code_scale, first_amax, first_amax + 1};
    if (dout.data)
      for (int i = 0; i < fp8_numbers; ++i) pointers[uid_numbers + i] = numbers + i;
    else
      for (const int i : of_forward) pointers[uid_numbers + i] = numbers + i;
    pointers[uid_q_scale] = a.q.scales.data;
    pointers[uid_k_scale] = a.k.scales.data;
    pointers[uid_v_scale] = a.v.scales.data;
    if (dout.data) pointers[uid_dout_scale] = dout.data;
  }

  void run(const Exec& exec, const Plan& plan, Pointers& pointers) const {
    NRL_CHECK(plan.graph, "attention: cuDNN has no plan for this: {}", plan.reason);
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
