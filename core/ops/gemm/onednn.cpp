#include "core/ops/gemm/onednn.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <dnnl.hpp>

#include "core/base/error.h"
#include "core/device/cpu/parallel.h"
#include "core/ops/linear.h"
#include "core/ops/shared/scratch.h"

namespace nrl::ops {
namespace {

// The shape alone selects oneDNN's entry point, never a measurement at run time, so that a run repeats bit
// for bit. The thresholds come from GPT-2 124M and a 17M Llama on AVX-512 with oneDNN 2.6.3 (GFLOP/s; the
// peak is 456):
// clang-format off
//   pass     sgemm    matmul   where it is different
//   forward  413-440  405-418  k >= 1024: sgemm 354-385, matmul 403-414
//   dgrad    427-452  195-440  at most 512 rows of a wide output: sgemm 358, with the reduction split 413
//   wgrad    403-441  175-419  more than 512 rows at once: sgemm 250-325, in pieces of 512 rows 380-416
// clang-format on
constexpr int64_t deep_forward = 1024;
constexpr int64_t weight_rows = 512;
constexpr int64_t few_rows = 512, wide_output = 1024, reduction_piece = 256;

/// The workspace follows from the sizes alone, so the matmul primitive gets dense operands only.
bool use_matmul(int64_t m, int64_t k, int64_t x_ld, int64_t w_ld, int64_t y_ld) {
  return k >= deep_forward && x_ld == k && w_ld == k && y_ld == m;
}

/// oneDNN takes its thread count from OpenMP.
class ThreadScope {
 public:
  explicit ThreadScope(int threads) : before_(omp_get_max_threads()) {
    if (threads != before_) omp_set_num_threads(threads);
  }
  ~ThreadScope() { omp_set_num_threads(before_); }
  ThreadScope(const ThreadScope&) = delete;
  ThreadScope& operator=(const ThreadScope&) = delete;

 private:
  int before_;
};

void sgemm(char ta, char tb, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
           int64_t ldb, float beta, float* c, int64_t ldc) {
  const dnnl_status_t status = dnnl_sgemm(ta, tb, m, n, k, 1.0f, a, lda, b, ldb, beta, c, ldc);
  if (status == dnnl_out_of_memory)
    fail(Exit::out_of_memory, "oneDNN found no memory for a {}x{}x{} GEMM", m, n, k);
  NRL_CHECK(status == dnnl_success, "dnnl_sgemm {}{} {}x{}x{}: status {}", ta, tb, m, n, k,
            static_cast<int>(status));
}

dnnl::engine& cpu_engine() {
  static dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

struct MatmulKey {
  int64_t n, m, k;
  bool bias, accumulate;
  int threads;
  bool operator==(const MatmulKey&) const = default;
};

/// A ready matmul primitive: y = x w^T with plain row-major memory, scratch memory from the caller.
struct Matmul {
  MatmulKey key;
  dnnl::matmul primitive;
  dnnl::memory::desc x, w, bias, y, scratch;
};

dnnl::matmul::primitive_desc describe_matmul(const Matmul& p, const dnnl::primitive_attr& attributes) {
#if DNNL_VERSION_MAJOR >= 3
  if (p.key.bias) return {cpu_engine(), p.x, p.w, p.bias, p.y, attributes};
  return {cpu_engine(), p.x, p.w, p.y, attributes};
#else
  if (p.key.bias) return {{p.x, p.w, p.bias, p.y}, attributes, cpu_engine()};
  return {{p.x, p.w, p.y}, attributes, cpu_engine()};
#endif
}

Matmul make_matmul(const MatmulKey& key) {
  using dnnl::memory;
  const auto f32 = memory::data_type::f32;
  Matmul p;
  p.key = key;
  p.x = memory::desc({key.n, key.k}, f32, memory::dims{key.k, 1});
  p.w = memory::desc({key.k, key.m}, f32, memory::dims{1, key.k});
  p.y = memory::desc({key.n, key.m}, f32, memory::dims{key.m, 1});
  if (key.bias) p.bias = memory::desc({1, key.m}, f32, memory::dims{key.m, 1});
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (key.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
  const auto description = describe_matmul(p, attributes);
  p.scratch = description.scratchpad_desc();
  p.primitive = dnnl::matmul(description);
  return p;
}

/// The primitive for `key`, made on first use. Only the newest are cached: sequences of varying length must
/// not fill memory.
const Matmul& matmul_for(const MatmulKey& key) {
  static std::deque<Matmul> cached;
  constexpr size_t max_cached = 256;
  for (const Matmul& p : cached)
    if (p.key == key) return p;
  try {
    ThreadScope scope(key.threads);
    cached.push_front(make_matmul(key));
  } catch (const dnnl::error& e) {
    fail(Exit::internal, "oneDNN has no matmul for n={} m={} k={}: {}", key.n, key.m, key.k, e.what());
  }
  if (cached.size() > max_cached) cached.pop_back();
  return cached.front();
}

std::mutex& matmul_mutex() {
  static std::mutex mutex;
  return mutex;
}

void run_matmul(const MatmulKey& key, Matrix x, Matrix w, Matrix y, const float* bias, Workspace scratch) {
  using dnnl::memory;
  dnnl::matmul primitive;
  std::array<memory::desc, 5> d;
  {
    std::lock_guard lock(matmul_mutex());
    const Matmul& p = matmul_for(key);
    primitive = p.primitive;
    d = {p.x, p.w, p.bias, p.y, p.scratch};
  }
  void* aligned = Scratch("linear_forward", scratch).bytes(d[4].get_size());
  dnnl::engine& engine = cpu_engine();
  static thread_local dnnl::stream stream(engine);
  std::unordered_map<int, memory> arguments = {{DNNL_ARG_SRC, memory(d[0], engine, x.data)},
                                               {DNNL_ARG_WEIGHTS, memory(d[1], engine, w.data)},
                                               {DNNL_ARG_DST, memory(d[3], engine, y.data)},
                                               {DNNL_ARG_SCRATCHPAD, memory(d[4], engine, aligned)}};
  if (bias) arguments.emplace(DNNL_ARG_BIAS, memory(d[2], engine, const_cast<float*>(bias)));
  ThreadScope scope(key.threads);
  primitive.execute(stream, arguments);
}

void fill_rows(int64_t n, int64_t m, Matrix y, const float* row, int threads) {
  cpu::parallel_for(threads, n, std::max<int64_t>(1, 16384 / std::max<int64_t>(m, 1)),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t i = begin; i < end; ++i)
                        std::memcpy(y.data + i * y.ld, row, static_cast<size_t>(m) * sizeof(float));
                    });
}

}  // namespace

// From allocations of oneDNN 2.6.3: on one thread all sizes agree with the formula to a page.
int64_t gemm_packing_bytes(int64_t m, int64_t k, int threads) {
  constexpr int64_t register_rows = 48, block_rows = 9984, block_columns = 384, block_depth = 384,
                    margin = 18112;
  const int64_t depth = std::min(k, block_depth);
  const int64_t rows =
      std::min((m + register_rows - 1) / register_rows * register_rows, threads * block_rows);
  return rows * depth * 4 + threads * (block_columns * depth * 4 + margin);
}

void gemm_forward(int64_t n, int64_t m, int64_t k, Matrix x, Matrix w, Matrix y, const float* bias,
                  bool accumulate, int threads, Workspace scratch) {
  NRL_CHECK(!(bias && accumulate));
  if (n == 0 || m == 0) return;
  if (scratch.data && use_matmul(m, k, x.ld, w.ld, y.ld)) {
    run_matmul({n, m, k, bias != nullptr, accumulate, threads}, x, w, y, bias, scratch);
    return;
  }
  // Writing the bias first and accumulating onto it costs less than a pass over the result.
  if (bias) fill_rows(n, m, y, bias, threads);
  ThreadScope scope(threads);
  sgemm('N', 'T', n, m, k, x.data, x.ld, w.data, w.ld, bias || accumulate ? 1.0f : 0.0f, y.data, y.ld);
}

void gemm_backward_data(int64_t n, int64_t m, int64_t k, Matrix dy, Matrix w, Matrix dx, bool accumulate,
                        int threads) {
  if (n == 0 || k == 0) return;
  ThreadScope scope(threads);
  const int64_t piece =
      n <= few_rows && k >= wide_output && m > reduction_piece && m < k ? reduction_piece : m;
  for (int64_t j = 0; j < m; j += piece)
    sgemm('N', 'N', n, k, std::min(piece, m - j), dy.data + j, dy.ld, w.data + j * w.ld, w.ld,
          accumulate || j > 0 ? 1.0f : 0.0f, dx.data, dx.ld);
}

void gemm_backward_weight(int64_t n, int64_t m, int64_t k, Matrix dy, Matrix x, Matrix dw, bool accumulate,
                          int threads) {
  if (m == 0 || k == 0) return;
  NRL_CHECK(n > 0);
  ThreadScope scope(threads);
  for (int64_t i = 0; i < n; i += weight_rows)
    sgemm('T', 'N', m, k, std::min(weight_rows, n - i), dy.data + i * dy.ld, dy.ld, x.data + i * x.ld, x.ld,
          accumulate || i > 0 ? 1.0f : 0.0f, dw.data, dw.ld);
}

size_t gemm_scratch(int64_t n, int64_t m, int64_t k, int threads) {
  if (!use_matmul(m, k, k, k, m) || n == 0 || m == 0) return 0;
  std::lock_guard lock(matmul_mutex());
  size_t bytes = 0;
  for (const auto& [bias, accumulate] : {std::pair{false, false}, {true, false}, {false, true}})
    bytes = std::max(bytes, matmul_for({n, m, k, bias, accumulate, threads}).scratch.get_size());
  return scratch_bytes(static_cast<int64_t>(bytes), 1);
}

}  // namespace nrl::ops
