#include <bit>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "core/base/error.h"
#include "core/ops/gemm/engine.h"
#include "core/ops/gemm/tuner.h"

namespace nrl::ops::gemm {
namespace {

void check(cublasStatus_t status, const char* call, std::string_view what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    fail(Exit::internal, "{} of {}: {}", call, what, cublasLtGetStatusString(status));
}
// Formats the plan only for the message.
void check(cublasStatus_t status, const char* call, const GemmPlan& plan) {
  if (status != CUBLAS_STATUS_SUCCESS) check(status, call, plan.key());
}

cudaDataType_t type_of(DType t) {
  switch (t) {
    case DType::f32:
      return CUDA_R_32F;
    case DType::f16:
      return CUDA_R_16F;
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::e4m3:
      return CUDA_R_8F_E4M3;
    case DType::e5m2:
      return CUDA_R_8F_E5M2;
    default:
      fail(Exit::internal, "cuBLASLt has no type {}", name_of(t));
  }
}

// cuBLAS 12.9 names these; the numbers let older toolkits build, whose libraries refuse them.
constexpr auto a_scale_mode = static_cast<cublasLtMatmulDescAttributes_t>(31),
               b_scale_mode = static_cast<cublasLtMatmulDescAttributes_t>(32);

int32_t scale_mode_of(Scaling s) {
  switch (s) {
    case Scaling::row128:
      return 4;  // CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
    case Scaling::block128:
      return 5;  // CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
    case Scaling::mx32:
      return 2;  // CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0
    case Scaling::none:
    case Scaling::tensor:
      break;
  }
  return 0;  // CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, the default
}

cublasLtEpilogue_t epilogue_of(Epilogue e) {
  switch (e) {
    case Epilogue::none:
      return CUBLASLT_EPILOGUE_DEFAULT;
    case Epilogue::bias:
      return CUBLASLT_EPILOGUE_BIAS;
    case Epilogue::gelu:
      return CUBLASLT_EPILOGUE_GELU;
    case Epilogue::gelu_bias:
      return CUBLASLT_EPILOGUE_GELU_BIAS;
    case Epilogue::gelu_aux:
      return CUBLASLT_EPILOGUE_GELU_AUX;
    case Epilogue::gelu_aux_bias:
      return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case Epilogue::dgelu:
      return CUBLASLT_EPILOGUE_DGELU;
  }
  return CUBLASLT_EPILOGUE_DEFAULT;
}

/// Owns one of the library's descriptors.
template <class T, cublasStatus_t (*destroy)(T)>
struct Owned {
  T value = nullptr;
  Owned() = default;
  ~Owned() {
    if (value) destroy(value);
  }
  Owned(Owned&& o) noexcept : value(std::exchange(o.value, nullptr)) {}
  Owned& operator=(Owned&& o) noexcept {
    std::swap(value, o.value);
    return *this;
  }
};
using MatmulDesc = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

/// Descriptors and algorithm of a plan, prepared once.
struct Prepared {
  bool supported = false;
  MatmulDesc matmul;
  Layout a, b, d;
  cublasLtMatmulAlgo_t algorithm{};
};

template <class V>
void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const V& value) {
  check(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof value),
        "cublasLtMatmulDescSetAttribute", "a GEMM");
}

class CublasLt final : public Engine {
 public:
  CublasLt(device::Runtime& runtime, const LibraryOptions& options)
      : tuner_(runtime, options, cublaslt_version()) {
    if (const cublasStatus_t status = cublasLtCreate(&handle_); status != CUBLAS_STATUS_SUCCESS)
      fail(Exit::unavailable, "cuBLASLt does not work on {}: {}", runtime.properties().name,
           cublasLtGetStatusString(status));
    const device::Properties& p = runtime.properties();
    architecture_ = architecture_of(p.major);
  }
  ~CublasLt() override {
    prepared_.clear();
    cublasLtDestroy(handle_);
  }

  bool supports(const GemmPlan& plan) override {
    return plan.validate(architecture_).empty() && prepare(plan).supported;
  }

  void run(const GemmPlan& plan, const GemmOperands& o, Workspace workspace,
           device::StreamHandle stream) override {
    Prepared& p = prepare(plan);
    if (!p.supported) {
      const std::string wrong = plan.validate(architecture_);
      fail(Exit::internal, "cuBLASLt has no algorithm for the GEMM {}{}{}", plan.key(),
           wrong.empty() ? "" : ": ", wrong);
    }
    NRL_CHECK(workspace.size >= workspace_bytes, "a GEMM has {} bytes of workspace, needs {}", workspace.size,
              workspace_bytes);
    check(launch(p, plan, o, workspace, stream), "cublasLtMatmul", plan);
  }
  std::vector<Timing> timings() const override { return tuner_.timings(); }

 private:
  cublasStatus_t launch(Prepared& p, const GemmPlan& plan, const GemmOperands& o, Workspace workspace,
                        device::StreamHandle stream) {
    if (plan.has_bias()) set(p.matmul.value, CUBLASLT_MATMUL_DESC_BIAS_POINTER, o.bias);
    if (plan.has_aux()) set(p.matmul.value, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, o.aux);
    if (plan.fp8()) {  // the operands change places, see column_major()
      set(p.matmul.value, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, o.scale_b);
      set(p.matmul.value, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, o.scale_a);
    }
    const float alpha = o.alpha, beta = plan.accumulate ? 1.0f : 0.0f;
    return cublasLtMatmul(handle_, p.matmul.value, &alpha, o.b, p.a.value, o.a, p.b.value, &beta, o.d,
                          p.d.value, o.d, p.d.value, &p.algorithm, workspace.data, workspace_bytes,
                          static_cast<cudaStream_t>(stream));
  }

  static void make_layout(Layout& layout, DType type, int64_t rows, int64_t cols, int64_t ld) {
    check(cublasLtMatrixLayoutCreate(&layout.value, type_of(type), static_cast<uint64_t>(rows),
                                     static_cast<uint64_t>(cols), ld),
          "cublasLtMatrixLayoutCreate", fmt::format("{} x {} {}", rows, cols, name_of(type)));
  }

  Prepared& prepare(const GemmPlan& plan) {
    const auto [entry, is_new] = prepared_.try_emplace(plan);
    Prepared& p = entry->second;
    if (!is_new || !plan.validate(architecture_).empty()) return p;
    describe(plan, p);
    if (const auto known = tuner_.known(plan)) {
      if (take(*known, p)) return p;
      tuner_.reject(plan);
    }
    const std::vector<cublasLtMatmulHeuristicResult_t> found = ask(plan, p, tuner_.candidates());
    if (found.empty()) return p;
    std::vector<Tuner::Algorithm> algorithms;
    for (const auto& f : found) algorithms.push_back(std::bit_cast<Tuner::Algorithm>(f.algo));
    const int best = tuner_.choose(
        plan, algorithms,
        [&](int candidate, const GemmOperands& o, Workspace workspace, device::StreamHandle stream) {
          p.algorithm = found[static_cast<size_t>(candidate)].algo;
          return launch(p, plan, o, workspace, stream) == CUBLAS_STATUS_SUCCESS;
        });
    p.algorithm = found[static_cast<size_t>(best)].algo;
    p.supported = true;
    return p;
  }

  void describe(const GemmPlan& plan, Prepared& p) const {
    const ColumnMajor c = column_major(plan);
    const cublasComputeType_t compute =
        plan.compute == Compute::tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    check(cublasLtMatmulDescCreate(&p.matmul.value, compute, CUDA_R_32F), "cublasLtMatmulDescCreate", plan);
    set(p.matmul.value, CUBLASLT_MATMUL_DESC_TRANSA, c.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(p.matmul.value, CUBLASLT_MATMUL_DESC_TRANSB, c.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(p.matmul.value, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(plan.epilogue));
    if (plan.has_bias()) set(p.matmul.value, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(plan.bias));
    if (plan.has_aux()) {
      set(p.matmul.value, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, plan.aux.ld);
      set(p.matmul.value, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, type_of(plan.aux.dtype));
    }
    if (plan.fp8()) {
      set(p.matmul.value, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(plan.fast_accumulation));
      if (plan.b.scaling != Scaling::tensor) set(p.matmul.value, a_scale_mode, scale_mode_of(plan.b.scaling));
      if (plan.a.scaling != Scaling::tensor) set(p.matmul.value, b_scale_mode, scale_mode_of(plan.a.scaling));
      // The library chooses algorithms for scaled operands only if it sees scales; launch() sets the true
      // ones.
      const void* const any = this;
      set(p.matmul.value, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, any);
      set(p.matmul.value, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, any);
    }
    make_layout(p.a, plan.b.dtype, c.a_rows, c.a_cols, plan.b.ld);
    make_layout(p.b, plan.a.dtype, c.b_rows, c.b_cols, plan.a.ld);
    make_layout(p.d, plan.d.dtype, c.m, c.n, plan.d.ld);
  }

  // An algorithm of an earlier run, if this library still takes it.
  bool take(const Tuner::Algorithm& words, Prepared& p) const {
    const auto algorithm = std::bit_cast<cublasLtMatmulAlgo_t>(words);
    cublasLtMatmulHeuristicResult_t result{};
    if (cublasLtMatmulAlgoCheck(handle_, p.matmul.value, p.a.value, p.b.value, p.d.value, p.d.value,
                                &algorithm, &result) != CUBLAS_STATUS_SUCCESS ||
        result.workspaceSize > workspace_bytes)
      return false;
    p.algorithm = algorithm;
    return p.supported = true;
  }

  std::vector<cublasLtMatmulHeuristicResult_t> ask(const GemmPlan& plan, const Prepared& p, int count) const {
    Preference preference;
    check(cublasLtMatmulPreferenceCreate(&preference.value), "cublasLtMatmulPreferenceCreate", plan);
    auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      check(cublasLtMatmulPreferenceSetAttribute(preference.value, attribute, &value, sizeof value),
            "cublasLtMatmulPreferenceSetAttribute", plan);
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{workspace_bytes});
    // Excludes atomic split-K reductions, whose order of additions varies between runs, and those that round
    // partial sums to a result of 16 bits.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE |
                                 (plan.d.dtype == DType::f32 ? CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE : 0)));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(plan.b.alignment));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(plan.a.alignment));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(plan.d.alignment));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(plan.d.alignment));
    std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(count));
    int found = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle_, p.matmul.value, p.a.value, p.b.value, p.d.value, p.d.value,
                                       preference.value, count, results.data(), &found);
    if (status != CUBLAS_STATUS_SUCCESS) found = 0;
    results.resize(static_cast<size_t>(found));
    std::erase_if(results, [](const auto& r) { return r.state != CUBLAS_STATUS_SUCCESS; });
    return results;
  }

  Tuner tuner_;
  cublasLtHandle_t handle_ = nullptr;
  Architecture architecture_ = Architecture::sm90;
  std::unordered_map<GemmPlan, Prepared, PlanHash> prepared_;
};

}  // namespace

std::string cublaslt_version() {
  const size_t v = cublasLtGetVersion();
  return fmt::format("cuBLASLt {}.{}.{}", v / 10000, v / 100 % 100, v % 100);
}

std::unique_ptr<Engine> open_cublaslt(device::Runtime& runtime, const LibraryOptions& options) {
  return std::make_unique<CublasLt>(runtime, options);
}

}  // namespace nrl::ops::gemm
