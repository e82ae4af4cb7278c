// Simulates the bookkeeping of a save at the number of ranks of large clusters: `io_tests "[.bench]"`.
// All ranks' reports are made and planned in this process, so that it needs no cluster.
#include <chrono>

#include "core/io/checkpoint_manifest.h"
#include "core/io/slice_plan.h"
#include "tests/catch.h"

using namespace nrl;

namespace {

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// ZeRO-3: every rank holds some rows of every tensor.
std::vector<std::string> slices_of_ranks(int ranks, int tensors) {
  std::vector<std::string> texts;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<TensorSlice> slices;
    for (int t = 0; t < tensors; ++t)
      slices.push_back({fmt::format("model.layers.{}.mlp.up_proj.weight", t),
                        DType::bf16,
                        {int64_t{2} * ranks, 8192},
                        int64_t{2} * rank,
                        2,
                        0,
                        8192});
    texts.push_back(slices_to_text(slices));
  }
  return texts;
}

// Optimizer state of `pieces` pieces per rank, in one file of each rank.
CheckpointManifest manifest_of_ranks(int ranks, int pieces) {
  CheckpointManifest m;
  m.state = JsonValue::object();
  for (int rank = 0; rank < ranks; ++rank)
    m.files.push_back({fmt::format("optimizer-{:05}-of-{:05}.safetensors", rank + 1, ranks), 1 << 24, 1});
  for (int p = 0; p < pieces; ++p) {
    const std::string name = fmt::format("exp_avg/model.layers.{}.mlp.up_proj.weight", p);
    LogicalTensor t{DType::f32, {ranks, 8192}, {}};
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string key = fmt::format("{}.{}", name, rank * 8192);
      t.shards.push_back(
          {m.files[static_cast<size_t>(rank)].name, key, rank * 8192, 8192, 8192, 8192, 7, {}});
    }
    m.tensors.emplace(name, std::move(t));
  }
  return m;
}

}  // namespace

TEST_CASE("bookkeeping of a save by number of ranks", "[.bench]") {
  constexpr int tensors = 40, pieces = 480;
  for (const int ranks : {64, 1024, 16384}) {
    const std::vector<std::string> texts = slices_of_ranks(ranks, tensors);
    size_t all = 0, longest = 0;
    for (const std::string& text : texts) all += text.size(), longest = std::max(longest, text.size());
    SlicePlan plan;
    const double planning = seconds_of([&] { plan = plan_slices(texts); });
    size_t sent = 0, most = 0;
    std::vector<std::string> parts;
    const double cutting = seconds_of([&] {
      for (const SlicePlan& part : plan.parts(ranks)) parts.push_back(part.to_text());
    });
    for (const std::string& part : parts) sent += part.size(), most = std::max(most, part.size());
    const double parsing = seconds_of([&] { (void)SlicePlan::from_text(parts[0]); });
    fmt::print(
        "{:6} ranks x {} tensors: slice reports {} B per rank, {} B on rank 0; plan {:.3f} s, cut into "
        "parts {:.3f} s, {} B together, at most {} B per rank, parsed in {:.4f} s\n",
        ranks, tensors, longest, all, planning, cutting, sent, most, parsing);
    std::fflush(stdout);
  }
  for (const int ranks : {64, 1024, 16384}) {
    std::string text;
    CheckpointManifest m = manifest_of_ranks(ranks, pieces);
    const double writing = seconds_of([&] { text = m.to_text(); });
    m = {};
    std::string reading =
        "not measured";  // at 16,384 ranks it needs more memory than most test machines have
    if (ranks <= 1024)
      reading =
          fmt::format("{:.2f} s", seconds_of([&] { (void)CheckpointManifest::from_text(text, "bench"); }));
    fmt::print("{:6} ranks x {} pieces: manifest {} B, written in {:.2f} s, read: {}; {} files\n", ranks,
               pieces, text.size(), writing, reading, ranks + 1);
    std::fflush(stdout);
  }
}
