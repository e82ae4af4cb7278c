// Context-parallel attention against attention over all tokens in double precision: outputs and gradients.
#include "parallel/context/attention.h"

#include <cmath>
#include <cstring>

#include "core/base/philox.h"
#include "core/ops/attention_engine.h"
#include "core/ops/dry_run.h"
#include "core/ops/kernel_table.h"
#include "core/ops/libraries.h"
#include "core/ops/transfer.h"
#include "tests/catch.h"
#include "tests/comm/backends.h"
#include "tests/comm/world_fixture.h"
#include "tests/ops/reference/table.h"
#include "tests/sim/ops.h"

using namespace nrl;
using namespace nrl::parallel;

namespace {

/// Tensors in the memory of a backend.
class Memory {
 public:
  explicit Memory(Backend& backend) : backend_(backend) {}
  Tensor make(DType dtype, std::initializer_list<int64_t> shape) {
    int64_t bytes = size_of(dtype);
    for (const int64_t n : shape) bytes *= n;
    return make_tensor(allocate(static_cast<size_t>(bytes)), dtype, shape);
  }
  std::byte* allocate(size_t bytes) {
    if (backend_.on_device()) {
      device_.emplace_back(*backend_.runtime(), device::Memory::Kind::device, bytes);
      return device_.back().data();
    }
    host_.emplace_back(bytes + 64);
    // Poison: NaN in every type, so that memory that nobody wrote is noticed.
    std::memset(host_.back().data(), 0xff, host_.back().size());
    return host_.back().data() + (64 - reinterpret_cast<uintptr_t>(host_.back().data()) % 64) % 64;
  }

 private:
  Backend& backend_;
  std::vector<device::Memory> device_;
  std::vector<std::vector<std::byte>> host_;
};

struct Problem {
  const char* name;
  int64_t samples, length, heads, kv_heads, d;
  std::vector<int32_t> documents = {};  ///< empty: whole samples
  int64_t window = 0;
  float dropout = 0;
};

/// Row-major (rows, width) values rounded to the type.
using Values = std::vector<float>;

Values random_values(const char* name, int64_t n, DType dtype) {
  const PhiloxStream stream(17, name);
  Values v(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const auto x = static_cast<float>(stream.normal(static_cast<uint64_t>(i)));
    v[i] = dtype == DType::bf16 ? static_cast<float>(bf16(x)) : x;
  }
  return v;
}

struct Case {
  Problem problem;
  DType dtype;
  Values q, k, v, dout;
  Values out, dq, dk, dv;  ///< of all tokens, on one rank
  std::vector<int32_t> documents;

  Case(const Problem& p, DType t) : problem(p), dtype(t), documents(p.documents) {
    const int64_t tokens = p.samples * p.length;
    if (documents.empty())
      for (int64_t s = 0; s <= p.samples; ++s) documents.push_back(static_cast<int32_t>(s * p.length));
    q = random_values("q", tokens * p.heads * p.d, t);
    k = random_values("k", tokens * p.kv_heads * p.d, t);
    v = random_values("v", tokens * p.kv_heads * p.d, t);
    dout = random_values("dout", tokens * p.heads * p.d, t);
    out.resize(q.size()), dq.resize(q.size()), dk.resize(k.size()), dv.resize(k.size());
    Values lse(static_cast<size_t>(tokens * p.heads));
    ops::Exec exec{.kernels = &ops::reference_kernels()};
    const auto heads = [&](Values& x, int64_t n) {
      return make_tensor(x.data(), DType::f32, {tokens, n, p.d});
    };
    const Tensor cu = make_tensor(documents.data(), DType::i32, {static_cast<int64_t>(documents.size())});
    ops::AttentionForward f{.q = heads(q, p.heads),
                            .k = heads(k, p.kv_heads),
                            .v = heads(v, p.kv_heads),
                            .out = heads(out, p.heads),
                            .lse = make_tensor(lse.data(), DType::f32, {p.heads, tokens}),
                            .cu_q = cu,
                            .cu_k = cu,
                            .scale = scale(),
                            .window = p.window,
                            .dropout = dropout()};
    ops::attention_forward(exec, f);
    ops::attention_backward(exec, {.dout = heads(dout, p.heads),
                                   .q = f.q,
                                   .k = f.k,
                                   .v = f.v,
                                   .out = f.out,
                                   .lse = f.lse,
                                   .cu_q = cu,
                                   .cu_k = cu,
                                   .dq = heads(dq, p.heads),
                                   .dk = heads(dk, p.kv_heads),
                                   .dv = heads(dv, p.kv_heads),
                                   .scale = scale(),
                                   .window = p.window,
                                   .dropout = dropout()});
  }
  ops::FusedDropout dropout() const {
    return {.p = problem.dropout, .seed = 0x123456789abcdefull, .stream = 0x2f2, .first_row = 1000};
  }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(problem.d)); }
};

/// Runs problems on our own kernels, and compares what the host knows of the lengths with the boundaries.
class CheckingLibrary final : public ops::attention::Engine {
 public:
  std::string name() const override { return "a library"; }
  const std::string& no_plan_reason(const ops::attention::Problem&, size_t) override { return none_; }
  void forward(ops::Exec& exec, const ops::AttentionForward& a) override {
    compare(exec, a);
    ops::Exec own = without_library(exec);
    ops::sim_kernels().attention_forward(own, a);
  }
  void backward(ops::Exec& exec, const ops::AttentionBackward& a) override {
    compare(exec, a);
    ops::Exec own = without_library(exec);
    ops::sim_kernels().attention_backward(own, a);
  }

  int calls = 0, to_other_keys = 0;

 private:
  ops::Exec without_library(const ops::Exec& exec) const {
    ops::Exec own = exec;
    own.libraries = nullptr;
    return own;
  }
  static std::vector<int32_t> boundaries(ops::Exec& exec, const Tensor& cu) {
    std::vector<int32_t> values(static_cast<size_t>(cu.numel()));
    ops::download(exec, cu, values.data());
    return values;
  }
  template <class Attention>
  void compare(ops::Exec& exec, const Attention& a) {
    const ops::attention::Problem p = ops::attention::problem_of(a);
    const std::vector<int32_t> cu_q = boundaries(exec, a.cu_q), cu_k = boundaries(exec, a.cu_k);
    ++calls;
    to_other_keys += !p.self;
    if (!p.equal) {
      CHECK(p.self);
      return;
    }
    const auto is_block = [](const std::vector<int32_t>& cu, size_t i, const ops::RowBlocks& b, int64_t s) {
      return cu[i] == b.first + s * b.step && cu[i + 1] - cu[i] == b.rows;
    };
    int64_t block = 0;
    for (size_t i = 0; i + 1 < cu_q.size(); ++i)
      if (cu_q[i] < cu_q[i + 1] && cu_k[i] < cu_k[i + 1]) {
        CHECK(is_block(cu_q, i, p.query, block));
        CHECK(is_block(cu_k, i, p.key, block));
        ++block;
      }
    CHECK(block == p.sequences);
  }

  const std::string none_;
};

/// One rank's tensors of a case.
class LocalRun {
 public:
  LocalRun(Backend& backend, const Case& c, const ContextExchange& exchange)
      : backend_(backend),
        case_(c),
        zigzag_(c.problem.samples, c.problem.length, backend.comm().size(), backend.comm().rank()),
        memory_(backend),
        attention_({.exchange = exchange,
                    .zigzag = zigzag_,
                    .heads = c.problem.heads,
                    .kv_heads = c.problem.kv_heads,
                    .d = c.problem.d,
                    .dtype = c.dtype,
                    .window = c.problem.window,
                    .scale = c.scale()}),
        bounds_(exchange, zigzag_, c.problem.window, c.problem.dropout > 0) {
    const bool device = backend.on_device();
    exec_ = {.kernels = device ? &ops::sim_kernels() : &ops::cpu_kernels(cpu::best_isa()),
             .threads = 1,
             .reduction_blocks = device ? ops::gpu_partials : 0,
             .stream = device ? backend.stream().native : nullptr,
             .device = backend.runtime(),
             .multiprocessors = device ? 2 : 0};
    libraries_.attention = library;
    const ContextGroups made = groups(exchange.a2a);
    run(made);
    backend.idle();
  }

  void check(const char* what, const Values& whole, const Tensor& got, double tolerance) {
    const int64_t rows = zigzag_.rows(), width = got.dim(1) * got.dim(2);
    Values values(static_cast<size_t>(rows * width));
    std::vector<std::byte> raw(static_cast<size_t>(rows * got.step(0) * size_of(got.dtype)));
    // The rows of dq, dk and dv lie in one buffer: the last row ends before the next row's beginning.
    const int64_t last = (rows - 1) * got.step(0) + width;
    Tensor flat = make_tensor(got.data, got.dtype, {last});
    ops::download(exec_, flat, raw.data());
    double squares = 0, worst = 0;
    for (const float x : whole) squares += static_cast<double>(x) * x;
    const double rms = std::sqrt(squares / static_cast<double>(whole.size()));
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < width; ++i) {
        const auto at = static_cast<size_t>(r * got.step(0) + i);
        const float x = got.dtype == DType::bf16
                            ? static_cast<float>(reinterpret_cast<const bf16*>(raw.data())[at])
                            : reinterpret_cast<const float*>(raw.data())[at];
        const double want = static_cast<double>(whole[zigzag_.global_row(r) * width + i]);
        const double error = std::fabs(x - want) / (std::fabs(want) + rms);
        if (!(error <= worst)) worst = error;  // NaN included
      }
    INFO(what << " is off by " << worst);
    CHECK(worst < tolerance);
  }

  Tensor out, dq, dk, dv;
  const std::shared_ptr<CheckingLibrary> library = std::make_shared<CheckingLibrary>();

 private:
  ContextGroups groups(int a2a) {
    comm::Communicator& all = backend_.comm();
    if (a2a > 1) {
      a2a_ = all.split(all.rank() / a2a, all.rank(), "a2a");
      ring_ = all.split(all.rank() % a2a, all.rank(), "ring");
      return {.all = &all, .a2a = a2a_.get(), .ring = ring_.get()};
    }
    return {.all = &all, .a2a = nullptr, .ring = &all};
  }

  /// The local rows of (tokens, heads, d) values, as columns of a wider buffer.
  void put(const Values& whole, const Tensor& to) {
    const int64_t rows = zigzag_.rows(), width = to.dim(1) * to.dim(2);
    const Tensor dense = memory_.make(to.dtype, {rows, width});
    Values local(static_cast<size_t>(rows * width));
    std::vector<bf16> rounded(local.size());
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < width; ++i) {
        const auto at = static_cast<size_t>(r * width + i);
        local[at] = whole[zigzag_.global_row(r) * width + i];
        rounded[at] = bf16(local[at]);
      }
    ops::upload(exec_, dense,
                to.dtype == DType::bf16 ? static_cast<const void*>(rounded.data()) : local.data());
    Tensor matrix = to;
    matrix.rank = 2;
    matrix.shape = {rows, width};
    matrix.stride = {to.step(0), 1};
    ops::copy(exec_, dense, matrix);
  }

  void run(const ContextGroups& made) {
    const Problem& p = case_.problem;
    const int64_t rows = zigzag_.rows();
    const auto fused = [&] {
      return memory_.make(case_.dtype, {rows, (p.heads + 2 * p.kv_heads) * p.d + 8});
    };
    const auto part = [&](const Tensor& t, int64_t first, int64_t n) {
      return t.columns(first * p.d, n * p.d).split_heads(n, p.d);
    };
    const Tensor qkv = fused(), d_qkv = fused();
    const Tensor q = part(qkv, 0, p.heads), k = part(qkv, p.heads, p.kv_heads),
                 v = part(qkv, p.heads + p.kv_heads, p.kv_heads);
    dq = part(d_qkv, 0, p.heads), dk = part(d_qkv, p.heads, p.kv_heads),
    dv = part(d_qkv, p.heads + p.kv_heads, p.kv_heads);
    out = memory_.make(case_.dtype, {rows, p.heads, p.d});
    const Tensor dout = memory_.make(case_.dtype, {rows, p.heads, p.d});
    put(case_.q, q), put(case_.k, k), put(case_.v, v), put(case_.dout, dout);

    std::vector<int32_t> words(static_cast<size_t>(bounds_.capacity()));
    const Tensor device_words = memory_.make(DType::i32, {bounds_.capacity()});
    std::vector<CallBounds> views(static_cast<size_t>(bounds_.calls()));
    bounds_.write(case_.documents, !p.documents.empty(), words.data(), device_words.ptr<int32_t>(), views);
    ops::upload(exec_, device_words, words.data());

    const Tensor saved = memory_.make(DType::u8, {rows, attention_.saved_width()}),
                 buffer = memory_.make(DType::u8, {rows, attention_.forward_width()}),
                 d_buffer = memory_.make(DType::u8, {rows, attention_.backward_width()});
    const bool kept = !attention_.saves_inputs();
    const auto passes = [&] {
      attention_.forward(exec_, made,
                         {.q = q,
                          .k = k,
                          .v = v,
                          .out = out,
                          .saved = saved,
                          .buffer = buffer,
                          .bounds = views,
                          .dropout = case_.dropout()});
      attention_.backward(exec_, made,
                          {.dout = dout,
                           .q = kept ? q : Tensor{},
                           .k = kept ? k : Tensor{},
                           .v = kept ? v : Tensor{},
                           .out = kept ? out : Tensor{},
                           .dq = dq,
                           .dk = dk,
                           .dv = dv,
                           .saved = saved,
                           .buffer = d_buffer,
                           .bounds = views,
                           .dropout = case_.dropout()});
    };
    size_t workspace = 0;
    {
      const ops::DryRun dry(exec_);
      passes();
      workspace = dry.workspace();
    }
    exec_.workspace = {memory_.allocate(workspace), workspace};
    // Which would only note that it does not run the others.
    if (backend_.on_device() && case_.dtype == DType::bf16 && case_.problem.dropout == 0)
      exec_.libraries = &libraries_;
    passes();
  }

  Backend& backend_;
  const Case& case_;
  ZigZag zigzag_;
  Memory memory_;
  ContextAttention attention_;
  ContextBounds bounds_;
  std::unique_ptr<comm::Communicator> a2a_, ring_;
  ops::Libraries libraries_;
  ops::Exec exec_;
};

const std::vector<Problem>& problems() {
  static const std::vector<Problem> all = {
      {"one sample", 1, 48, 4, 4, 16},
      {"grouped heads", 1, 80, 8, 4, 8},
      {"three samples", 3, 16, 4, 4, 16},
      {"documents", 1, 64, 4, 4, 16, {0, 5, 6, 30, 31, 50, 64}},
      {"documents in two samples", 2, 32, 8, 4, 8, {0, 20, 32, 33, 34, 64}},
      {"documents at the cuts", 1, 32, 4, 4, 8, {0, 4, 8, 16, 24, 28, 32}},
      {"window", 1, 48, 4, 4, 16, {}, 7},
      {"window over documents", 2, 32, 4, 4, 8, {0, 9, 32, 50, 64}, 11},
      {"dropout", 1, 48, 4, 4, 16, {}, 0, 0.3f},
      {"dropout of grouped heads", 1, 80, 8, 4, 8, {}, 0, 0.5f},
      {"dropout of three samples", 3, 16, 4, 4, 16, {}, 0, 0.3f},
      {"dropout of documents", 1, 64, 4, 4, 16, {0, 5, 6, 30, 31, 50, 64}, 0, 0.3f},
      {"dropout of documents in two samples", 2, 32, 8, 4, 8, {0, 20, 32, 33, 34, 64}, 0, 0.3f},
      {"dropout in a window over documents", 2, 32, 4, 4, 8, {0, 9, 32, 50, 64}, 11, 0.3f},
      {"dropout of long samples", 1, 288, 4, 4, 16, {}, 0, 0.2f},
  };
  return all;
}

std::vector<ContextExchange> exchanges(int size, int64_t window) {
  std::vector<ContextExchange> all = {{.gather = true}};
  for (int a2a = 1; a2a <= size; ++a2a)
    if (size % a2a == 0 && (window == 0 || a2a == size)) all.push_back({.a2a = a2a});
  return all;
}

/// A library is given all calls of whole samples in bf16 whose chunks it takes, and no others: of a ring
/// those of the other ranks' keys, of gathered keys all chunks but the first.
void check_library(const CheckingLibrary& library, Backend& backend, const Case& c,
                   const ContextExchange& exchange) {
  const Problem& p = c.problem;
  if (!backend.on_device() || c.dtype != DType::bf16 || p.dropout > 0) {
    CHECK(library.calls == 0);
    return;
  }
  const int size = backend.comm().size(), ring = size / exchange.a2a;
  if (!p.documents.empty()) {  // only attention of a rank's own rows has its keys
    CHECK(library.to_other_keys == 0);
    return;
  }
  const int first = backend.comm().rank() == 0 ? 1 : 0;
  const int calls = exchange.gather ? 2 * static_cast<int>(p.samples) : ring,
            own = exchange.gather ? first * static_cast<int>(p.samples) : 1;
  CHECK(library.calls == 2 * calls);
  CHECK(library.to_other_keys == 2 * (calls - own));
}

void check_all(DType dtype, double tolerance) {
  for (const Problem& p : problems()) {
    const Case c(p, dtype);
    for (auto& backend : backends()) {
      if (backend->comm().size() != test_world().size()) continue;
      for (const ContextExchange& exchange : exchanges(test_world().size(), p.window)) {
        CAPTURE(p.name, backend->name(), exchange.gather, exchange.a2a);
        LocalRun run(*backend, c, exchange);
        run.check("out", c.out, run.out, tolerance);
        run.check("dq", c.dq, run.dq, tolerance);
        run.check("dk", c.dk, run.dk, tolerance);
        run.check("dv", c.dv, run.dv, tolerance);
        check_library(*run.library, *backend, c, exchange);
      }
    }
  }
}

}  // namespace

// f32 sums of up to 80 products; the order differs from that of one rank.
TEST_CASE("context-parallel attention is attention on one rank, f32", "[context]") {
  check_all(DType::f32, 1e-5);
}

// Rounding to bf16 (2^-9) of the results, of the parts that are merged, and of out, whose product with dout
// is subtracted from equal numbers where a row has few keys: one rank alone is off by 0.09 in the long
// samples, whose gradients are small in the mean.
TEST_CASE("context-parallel attention is attention on one rank, bf16", "[context]") {
  check_all(DType::bf16, 1.5e-1);
}
