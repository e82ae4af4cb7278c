// Device memory through pinned buffers: every byte, in every order of streams; and checkpoints through them.
#include "apps/engine/pinned_staging.h"

#include <numeric>

#include "apps/state/run_state.h"
#include "tests/engine/training.h"
#include "tests/io/io_test_util.h"
#include "tests/sim/sim.h"

using namespace nrl;
using namespace nrl::test;

namespace {

using Kind = device::Memory::Kind;

std::vector<std::byte> some_bytes(size_t count) {
  std::vector<std::byte> out(count);
  for (size_t i = 0; i < count; ++i) out[i] = static_cast<std::byte>(i * 31 % 251);
  return out;
}

constexpr const char* tiny_gpt2 =
    "{model_type: gpt2, vocab_size: 61, n_embd: 16, n_layer: 2, n_head: 2, n_positions: 64}";

/// Every byte of the weights and optimizer state that this rank owns.
std::vector<std::vector<char>> contents(engine::Engine& engine) {
  std::vector<std::vector<char>> out;
  for (const Tensor& weight : engine.weights()) out.push_back(bytes_of(engine, weight));
  for (const engine::GroupTensors& group : engine.groups())
    for (const Tensor& state : group.state)
      for (const plan::OwnedRange& range : group.group->owned)
        out.push_back(bytes_of(engine, state.rows(range.state, range.count)));
  return out;
}

void train_steps(engine::Engine& engine, int64_t count) {
  const BatchPlan& batch = engine.plan().batch;
  engine::LanguageModeling objective;
  for (int64_t step = 1; step <= count; ++step) {
    for (int64_t m = 0; m < batch.accumulation; ++m)
      engine.fill(m, random_batch(batch.micro * T, static_cast<uint64_t>(step * 10 + m)), m * batch.micro);
    engine.step({.number = step, .learning_rate = 1e-2, .loss_tokens = batch.tokens_per_step}, objective);
    engine.collect();
  }
}

/// A copy of an engine's state in host memory.
struct HostCopy {
  explicit HostCopy(engine::Engine& engine) : state(train::state_of(engine, nullptr)) {
    const auto copy = [&](Tensor& tensor) {
      memory.push_back(bytes_of(engine, tensor));
      tensor.data = memory.back().data();
    };
    for (engine::WeightSlice& weight : state.weights) copy(weight.values);
    for (engine::GroupTensors& group : state.groups)
      for (Tensor& tensor : group.state) copy(tensor);
  }
  std::vector<std::vector<char>> memory;
  train::TrainState state;
};

std::string save(const train::TrainState& state, const std::string& store) {
  train::SaveOptions options;
  options.store = store;
  options.resolved_config = "a: b\n";
  options.run = JsonValue::object({});
  return train::save_checkpoint(state, {.step = 2, .updates = 2, .consumed_samples = 8, .tokens = 64},
                                options, RankGroup{});
}

}  // namespace

TEST_CASE("pieces of any size pass through pinned buffers in order", "[staging]") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    const auto runtime = device::open_sim({.seed = seed});
    const device::Stream compute(*runtime);
    const device::Memory pinned(*runtime, Kind::pinned, 512), from(*runtime, Kind::device, 5000),
        to(*runtime, Kind::device, 5000);
    const std::vector<std::byte> bytes = some_bytes(5000);
    runtime->copy(from.data(), bytes.data(), 5000, device::CopyKind::host_to_device, compute.get());
    std::vector<std::byte> got;
    {
      engine::PinnedStaging staging(*runtime, compute.get(), std::span(pinned.data(), 512));
      REQUIRE(staging.piece_bytes() == 256);
      std::vector<MemoryRange> ranges{{from.data(), 100}};
      append_pieces(staging, from.data() + 100, 4900, ranges);
      REQUIRE(ranges.size() == 21);
      staging.read_ahead({{from.data() + 7, 1}});  // replaced
      staging.read_ahead(ranges);
      for (const MemoryRange& range : ranges) {
        const auto* piece = static_cast<const std::byte*>(staging.next());
        got.insert(got.end(), piece, piece + range.bytes);
      }
      REQUIRE_THROWS_AS(staging.next(), Error);
    }
    REQUIRE((got == bytes));

    engine::PinnedStaging staging(*runtime, compute.get(), std::span(pinned.data(), 512));
    int64_t calls = 0;
    fill_memory(&staging, to.data(), 1250, 4, [&](int64_t first, int64_t n, void* out) {
      ++calls;
      std::memcpy(out, bytes.data() + first * 4, static_cast<size_t>(n * 4));
    });
    REQUIRE(calls == 20);
    staging.finish();
    std::vector<std::byte> back(5000);
    runtime->copy(back.data(), to.data(), 5000, device::CopyKind::device_to_host, compute.get());
    REQUIRE((back == bytes));
  }
}

TEST_CASE("a transfer of the next piece is in flight while the caller has one", "[staging]") {
  const auto runtime = device::open_sim({.deferred = false});  // everything runs when it is enqueued
  const device::Stream compute(*runtime);
  const device::Memory pinned(*runtime, Kind::pinned, 512), from(*runtime, Kind::device, 512);
  runtime->fill(from.data(), 1, 256, compute.get());
  runtime->fill(from.data() + 256, 2, 256, compute.get());
  engine::PinnedStaging staging(*runtime, compute.get(), std::span(pinned.data(), 512));
  staging.read_ahead({{from.data(), 256}, {from.data() + 256, 256}});
  const auto* first = static_cast<const std::byte*>(staging.next());
  REQUIRE(first[0] == std::byte{1});
  const std::byte* other = first == pinned.data() ? pinned.data() + 256 : pinned.data();
  REQUIRE(other[0] == std::byte{2});
}

TEST_CASE("a checkpoint through staging buffers has the bytes of one from host memory", "[staging]") {
  for (const auto& [model, precision] : {std::pair(tiny_llama, "bfloat16"), {tiny_gpt2, "float32"}}) {
    CAPTURE(model, precision);
    const ConfigResult config = tiny_config("cuda", {std::string("policy.precision=") + precision}, model);
    const auto world = comm::World::init();
    train::Placement placement(*world, config);
    const auto engine = make_engine(placement, config);
    train_steps(*engine, 2);
    const auto before = contents(*engine);
    TemporaryDirectory dir;
    const std::string expected = save(HostCopy(*engine).state, dir.path() + "/host");
    // Pieces of a few rows, and of whole tensors.
    device::Runtime& runtime = *placement.exec().device;
    for (const size_t half : {size_t{256}, size_t{0}}) {
      CAPTURE(half);
      const device::Memory pinned(runtime, Kind::pinned, 2 * half);
      const auto open = [&]() -> std::unique_ptr<Staging> {
        if (half == 0) return engine->staging();
        return std::make_unique<engine::PinnedStaging>(runtime, placement.exec().stream,
                                                       std::span(pinned.data(), 2 * half));
      };
      const std::string store = dir.path() + "/staged-" + std::to_string(half);
      const std::string saved = save(train::state_of(*engine, open().get()), store);
      for (const char* file :
           {"model.safetensors", "optimizer-00001-of-00001.safetensors", "manifest.json", "config.json"}) {
        CAPTURE(file);
        const std::string want = read_file(expected + "/" + file, uint64_t{1} << 30);
        REQUIRE(want.size() > 100);
        CHECK((read_file(saved + "/" + file, uint64_t{1} << 30) == want));
      }
      // Loaded over other values.
      train_steps(*engine, 1);
      REQUIRE((contents(*engine) != before));
      {
        const auto staging = open();
        CheckpointReader reader(saved);
        train::load_checkpoint(reader, train::state_of(*engine, staging.get()));
        staging->finish();
      }
      CHECK((contents(*engine) == before));
      train_steps(*engine, 1);
      {
        const auto staging = open();
        train::load_weights(saved, engine->plan().spec, engine->weight_slices(), staging.get());
        staging->finish();
      }
      for (size_t i = 0; i < engine->weights().size(); ++i)
        CHECK((bytes_of(*engine, engine->weights()[i]) == before[i]));
      CheckpointReader reader(saved);
      train::with_state(*engine, [&](const train::TrainState& state) { load_checkpoint(reader, state); });
      CHECK((contents(*engine) == before));
    }
  }
}
