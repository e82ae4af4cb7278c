// The inputs of a step on their way to the device: positions, bounds and weights that vary from batch to
// batch, and copies of no more than a step or an evaluation uses.

#include "apps/plan/batch.h"

#include "core/ops/transfer.h"
#include "tests/catch.h"
#include "tests/sim/sim.h"

using namespace nrl;
using namespace nrl::plan;

namespace {

using Row = std::vector<int32_t>;

/// Batch tensors on the host, or on the simulated device.
class Bench {
 public:
  Bench(const BatchShape& shape, bool on_device) : tensors_(plan_, staged(shape, on_device)) {
    plan_.solve();
    // All memory is the plan's: two pinned staging buffers on a GPU, none on a CPU.
    const int64_t block = plan_.buffers().front().bytes;
    CHECK(plan_.bytes(memory::Tier::pinned) == (on_device ? 2 * block : 0));
    if (on_device) {
      runtime_ = device::open_sim();
      stream_ = device::Stream(*runtime_);
      exec_.device = runtime_.get();
      exec_.stream = stream_.get();
      arenas_ = memory::Arenas(plan_, *runtime_, exec_.stream);
    } else {
      arenas_ = memory::Arenas(plan_);
    }
    tensors_.bind(plan_, arenas_, exec_);
  }
  BatchTensors* operator->() { return &tensors_; }
  template <class T = int32_t>
  std::vector<T> read(const Tensor& t) {
    std::vector<T> values(static_cast<size_t>(t.numel()));
    ops::download(exec_, t, values.data());
    return values;
  }

 private:
  static BatchShape staged(BatchShape shape, bool on_device) {
    shape.staged = on_device;
    return shape;
  }

  std::unique_ptr<device::Runtime> runtime_;
  device::Stream stream_;
  ops::Exec exec_;
  memory::MemoryPlan plan_;
  BatchTensors tensors_;
  memory::Arenas arenas_;
};

/// Two samples of four tokens, in segments of `bounds`.
data::HostMicroBatch batch(int32_t first, const Row& bounds = {0, 4, 8}) {
  data::HostMicroBatch b;
  for (int32_t i = 0; i < 8; ++i) {
    b.tokens.push_back(first + i);
    b.targets.push_back(first + i + 1);
  }
  b.bounds = bounds;
  return b;
}

constexpr BatchShape plain{.microbatches = 3, .sequences = 2, .length = 4};

}  // namespace

TEST_CASE("packed microbatches have the rows that they are given", "[batch]") {
  for (const bool on_device : {false, true}) {
    CAPTURE(on_device);
    Bench bench(
        {.microbatches = 3, .sequences = 1, .length = 8, .packed = 4, .positions = true, .bounds = true},
        on_device);
    data::HostMicroBatch few;
    few.tokens = {1, 2, 3, 4, 5};
    few.targets = {2, -1, 4, 5, -1};
    few.positions = {0, 1, 0, 1, 2};
    few.bounds = {0, 2, 5};
    data::HostMicroBatch all = batch(10, {0, 4, 8});
    all.positions = {0, 1, 2, 3, 0, 1, 2, 3};
    for (int64_t step = 1; step <= 2; ++step) {
      bench->fill(0, few, 0, 0.25f);
      bench->fill(1, all, 0, 0.75f);
      const auto batches = bench->commit(step, 5);
      REQUIRE(batches.size() == 2);
      CHECK(bench.read(batches[0].ids) == few.tokens);
      CHECK(bench.read(batches[0].target) == few.targets);
      CHECK(bench.read(batches[0].positions) == few.positions);
      CHECK(bench.read(batches[0].cu_seqlens) == Row{0, 2, 5});
      CHECK(bench.read<float>(batches[0].loss_weight) == std::vector<float>(5, -0.2f));
      CHECK(bench.read(batches[1].ids) == all.tokens);
      CHECK(bench.read(batches[1].cu_seqlens) == Row{0, 4, 8});
      CHECK(batches[0].share == 0.25f);
      CHECK(batches[1].lengths.longest == 4);
      CHECK_FALSE(batches[1].lengths.equal);
    }
    // A step may have more rows again.
    bench->fill(0, all, 0);
    CHECK(bench.read(bench->commit(3, 0)[0].target) == all.targets);
  }
}

TEST_CASE("every microbatch of a step arrives with its step", "[batch]") {
  for (const bool on_device : {false, true}) {
    CAPTURE(on_device);
    Bench bench(plain, on_device);
    for (int64_t step = 1; step <= 3; ++step) {
      for (int32_t m = 0; m < 3; ++m)
        bench->fill(m, batch(static_cast<int32_t>(step) * 100 + m * 10), 8 + 2 * m);
      bench->commit(step, 24);
      for (int32_t m = 0; m < 3; ++m) {
        const model::MicroBatch& mb = bench->microbatches()[m];
        const data::HostMicroBatch expected = batch(static_cast<int32_t>(step) * 100 + m * 10);
        CHECK(bench.read(mb.ids) == expected.tokens);
        CHECK(bench.read(mb.target) == expected.targets);
        CHECK(bench.read(mb.positions) == Row{0, 1, 2, 3, 0, 1, 2, 3});
        CHECK(bench.read(mb.cu_seqlens) == Row{0, 4, 8});
        CHECK(mb.lengths.equal);
        CHECK(mb.first_row == 32 + 8 * m);
        CHECK(bench.read<int64_t>(mb.step) == std::vector<int64_t>{step});
        CHECK(bench.read<float>(mb.loss_weight) == std::vector<float>(8, -1.0f / 24));
      }
    }
  }
}

TEST_CASE("weights follow the number of tokens with a loss, and stay where nothing is trained", "[batch]") {
  for (const bool on_device : {false, true}) {
    CAPTURE(on_device);
    Bench bench(plain, on_device);
    const auto weights_after = [&](int64_t loss_tokens) {
      bench->fill(0, batch(1), 0);
      bench->commit(1, loss_tokens);
      return bench.read<float>(bench->microbatches()[2].loss_weight);
    };
    for (const int64_t n : {24, 24, 20, 7, 24}) {
      CAPTURE(n);
      CHECK(weights_after(n) == std::vector<float>(8, static_cast<float>(-1.0 / static_cast<double>(n))));
      CHECK(weights_after(0) == std::vector<float>(8, static_cast<float>(-1.0 / static_cast<double>(n))));
    }
  }
}

TEST_CASE("a commit copies the microbatches that were filled, and no others", "[batch][sim]") {
  Bench bench(plain, true);
  for (int32_t m = 0; m < 3; ++m) bench->fill(m, batch(10 * m), 0);
  bench->commit(1, 24);
  // As an evaluation does: the other pinned block holds nothing of the microbatches 1 and 2.
  bench->fill(0, batch(500), 0);
  bench->commit(0, 0);
  CHECK(bench.read(bench->microbatches()[0].ids) == batch(500).tokens);
  CHECK(bench.read(bench->microbatches()[1].ids) == batch(10).tokens);
  CHECK(bench.read(bench->microbatches()[2].target) == batch(20).targets);
}

TEST_CASE("positions and bounds of each microbatch, in a planned room", "[batch]") {
  for (const bool on_device : {false, true}) {
    CAPTURE(on_device);
    BatchShape shape = plain;
    shape.positions = shape.bounds = true;
    Bench bench(shape, on_device);
    const Row all{0, 1, 2, 3, 4, 5, 6, 7, 8}, some{0, 1, 4, 6, 7, 8}, none{0, 4, 8};
    const Row positions{0, 0, 1, 2, 0, 1, 0, 0};
    for (int64_t step = 1; step <= 2; ++step) {
      int64_t m = 0;
      for (const Row& bounds : {all, some, none}) {
        data::HostMicroBatch b = batch(static_cast<int32_t>(10 * m), bounds);
        b.positions = positions;
        b.positions[7] = static_cast<int32_t>(m);
        bench->fill(m++, b, 0);
      }
      bench->commit(step, 24);
      CHECK(bench.read(bench->microbatches()[0].cu_seqlens) == all);
      // Empty sequences up to a power of two, and twice the samples at least.
      CHECK(bench.read(bench->microbatches()[1].cu_seqlens) == Row{0, 1, 4, 6, 7, 8, 8, 8, 8});
      CHECK(bench.read(bench->microbatches()[2].cu_seqlens) == Row{0, 4, 8, 8, 8});
      for (m = 0; m < 3; ++m) {
        CHECK_FALSE(bench->microbatches()[m].lengths.equal);
        CHECK(bench->microbatches()[m].lengths.longest == 4);
        CHECK(bench.read(bench->microbatches()[m].positions)[7] == m);
        CHECK(bench.read(bench->microbatches()[m].ids) == batch(static_cast<int32_t>(10 * m)).tokens);
      }
    }
  }
}

TEST_CASE("the counts of a batch", "[batch]") {
  data::HostMicroBatch b = batch(1, {0, 1, 4, 8});
  b.loss_tokens = 6;
  model::ModelSpec spec;
  spec.layers = 2;
  spec.layer_kinds.resize(2);
  const BatchCounts c = count(b, spec), twice = c + c;
  CHECK(c.tokens == 8);
  CHECK(c.loss_tokens == 6);
  CHECK(c.pairs == 1 + (1 + 2 + 3) + (1 + 2 + 3 + 4));
  const double all = c.pairs, windowed = 1 + (1 + 2 + 2) + (1 + 2 + 2 + 2);
  spec.layer_kinds[1].window = 2;
  CHECK(count(b, spec).pairs == (all + windowed) / 2);
  spec.layer_kinds[0].window = 2;
  CHECK(count(b, spec).pairs == windowed);
  CHECK(twice.tokens == 16);
  CHECK(twice.loss_tokens == 12);
  CHECK(twice.pairs == 2 * c.pairs);
}
