// Simulates the bookkeeping of a save at the number of ranks of large clusters: `io_tests "[.bench]"`.
// All ranks' reports are made and planned in this process, so that it needs no cluster.
#include <chrono>

#include "core/io/checkpoint_manifest.h"
#include "core/io/checkpoint_places.h"
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

std::string state_name(int piece) {
  return fmt::format("exp_avg/model.layers.{}.mlp.up_proj.weight", piece);
}

// What one of `ranks` ranks wrote: optimizer state of `pieces` pieces in one file. Every rank of ZeRO-1 with
// 8 tensor-parallel ranks has a part of each tensor.
CheckpointManifest manifest_of_rank(int rank, int ranks, int pieces) {
  CheckpointManifest m;
  m.files.push_back({fmt::format("optimizer-{:05}-of-{:05}.safetensors", rank + 1, ranks), 1 << 24, 1});
  for (int p = 0; p < pieces; ++p) {
    const std::string name = state_name(p);
    const int64_t shards = ranks / 8, offset = (rank % 8 * shards + rank / 8) * 8192;
    LogicalTensor t{DType::f32, {int64_t{ranks}, 8192}, {}};
    t.shards.push_back(
        {m.files[0].name, fmt::format("{}.{}", name, offset), offset, 8192, 8192, 8192, 7, {}});
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
    std::string own, index;
    CheckpointManifest m = manifest_of_rank(1, ranks, pieces);
    const double own_writing = seconds_of([&] { own = m.to_text(); });
    const double own_reading = seconds_of([&] { (void)CheckpointManifest::from_text(own, "bench"); });
    std::vector<std::string> places;
    uint64_t gathered = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      places.push_back(rank == 0 ? "" : places_to_text(manifest_of_rank(rank, ranks, pieces).tensors, rank));
      gathered += places.back().size();
    }
    const size_t each = places[1].size();
    CheckpointManifest all = manifest_of_rank(0, ranks, pieces);
    for (int rank = 1; rank < ranks; ++rank) {
      all.files.push_back({rank_manifest_name(rank), own.size(), 1});
      all.files.push_back({manifest_of_rank(rank, ranks, 0).files[0].name, 1 << 24, 1, rank, pieces + 1});
    }
    const double merging = seconds_of([&] {
      for (const auto& [name, t] : merge_places(places)) all.tensors.at(name).elsewhere = t.elsewhere;
    });
    const double checking = seconds_of([&] {
      for (const auto& [name, t] : all.tensors) (void)tensor_pieces(name, t);
    });
    const double writing = seconds_of([&] { index = all.to_text(); });
    const double reading = seconds_of([&] { (void)CheckpointManifest::from_text(index, "bench"); });
    fmt::print(
        "{:6} ranks x {} pieces: places {} B per rank and {} B on rank 0, once, merged in {:.2f} s; "
        "manifest.json {} B, checked in {:.2f} s, written in {:.2f} s, read in {:.2f} s; a rank's manifest "
        "{} B, "
        "written in {:.4f} s, read in {:.4f} s; {} files\n",
        ranks, pieces, each, gathered, merging, index.size(), checking, writing, reading, own.size(),
        own_writing, own_reading, 2 * ranks);
    std::fflush(stdout);
  }
}
