// Simulates the bookkeeping of a start and a save at the number of ranks of large clusters:
// `io_tests "[.bench]"`. All ranks' reports are made and planned in this process, so that it needs no
// cluster. scripts/bench/ranks.sh runs it with `plan` and the sample order.
#include <ctime>

#include "core/base/text.h"
#include "core/io/checkpoint_manifest.h"
#include "core/io/checkpoint_places.h"
#include "core/io/checkpoint_reader.h"
#include "core/io/slice_plan.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;

namespace {

constexpr int rank_counts[] = {64, 1024, 16384};

// Time of the processor, which a busy machine changes less than that of the clock. All work is of one thread.
double seconds_of(const std::function<void()>& work) {
  const std::clock_t begin = std::clock();
  work();
  return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
}

// A row of the table: a cell for each number of ranks.
class Table {
 public:
  void add(const std::string& row, std::string cell) {
    for (auto& [name, cells] : rows_)
      if (name == row) return cells.push_back(std::move(cell));
    rows_.push_back({row, {std::move(cell)}});
  }
  void seconds(const std::string& row, double value) { add(row, fmt::format("{:.4f} s", value)); }
  void bytes(const std::string& row, uint64_t value) { add(row, human_bytes(value)); }
  void count(const std::string& row, size_t value) { add(row, fmt::format("{}", value)); }

  void print() const {
    fmt::print("{:68}", "");
    for (const int ranks : rank_counts) fmt::print("{:>13}", fmt::format("{} ranks", ranks));
    fmt::print("\n");
    for (const auto& [name, cells] : rows_) {
      fmt::print("{:68}", name);
      for (const std::string& cell : cells) fmt::print("{:>13}", cell);
      fmt::print("\n");
    }
    std::fflush(stdout);
  }

 private:
  std::vector<std::pair<std::string, std::vector<std::string>>> rows_;
};

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

void measure_slices(int ranks, int tensors, Table& table) {
  const std::vector<std::string> texts = slices_of_ranks(ranks, tensors);
  size_t all = 0, most = 0;
  for (const std::string& text : texts) all += text.size();
  std::vector<std::string> parts;
  const double planning = seconds_of([&] {
    const SlicePlan plan = plan_slices(texts);
    for (const SlicePlan& part : plan.parts(ranks)) parts.push_back(part.to_text());
  });
  for (const std::string& part : parts) most = std::max(most, part.size());
  table.bytes("first save, a rank sends its slices", texts[0].size());
  table.bytes("first save, rank 0 gathers the slices", all);
  table.seconds("first save, rank 0 plans who writes them, and cuts the plan", planning);
  table.bytes("first save, a rank gets its part of the plan, at most", most);
  table.seconds("first save, a rank reads it", seconds_of([&] { (void)SlicePlan::from_text(parts[0]); }));
}

// The files of a checkpoint, empty but of the right size.
void make_files(const std::string& directory, const CheckpointManifest& manifest) {
  for (const CheckpointFile& file : manifest.files)
    File::create(join_path(directory, file.name)).truncate(file.bytes);
}

void measure_manifests(int ranks, int pieces, Table& table) {
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
  const size_t own_places = places[1].size();
  CheckpointManifest all = manifest_of_rank(0, ranks, pieces);
  for (int rank = 1; rank < ranks; ++rank) {
    all.files.push_back({rank_manifest_name(rank), own.size(), 1});
    all.files.push_back({manifest_of_rank(rank, ranks, 0).files[0].name, 1 << 24, 1, rank,
                         static_cast<uint64_t>(pieces + 1)});
  }
  const double merging = seconds_of([&] {
    for (const auto& [name, t] : merge_places(places)) all.tensors.at(name).elsewhere = t.elsewhere;
  });
  const double checking = seconds_of([&] {
    for (const auto& [name, t] : all.tensors) (void)tensor_pieces(name, t);
  });
  const double writing = seconds_of([&] { index = all.to_text(); });
  table.bytes("first save, a rank sends its pieces", own_places);
  table.bytes("first save, rank 0 gathers the pieces", gathered);
  table.seconds("first save, rank 0 merges and checks them", merging + checking);
  table.seconds("each save, a rank writes its manifest", own_writing);
  table.seconds("each save, rank 0 writes manifest.json", writing);
  table.bytes("each save, manifest.json", index.size());
  table.count("each save, files of all ranks", all.files.size() + 1);

  const test::TemporaryDirectory dir;
  make_files(dir.path(), all);
  write_file_atomic(join_path(dir.path(), manifest_name), index);
  const auto open = [&](int parts) {
    return seconds_of([&] { CHECK(open_manifest(dir.path(), 0, parts).problems.empty()); });
  };
  table.bytes("start on the same layout, a rank reads", index.size() + own.size());
  table.seconds("start, rank 0 reads manifest.json, looks at the sizes of all files", open(1));
  table.seconds("start, each rank reads it and its own manifest, looks at its share",
                open(ranks) + own_reading);
}

}  // namespace

TEST_CASE("bookkeeping of a start and a save by number of ranks", "[.bench]") {
  constexpr int tensors = 40, pieces = 480;
  Table table;
  for (const int ranks : rank_counts) measure_slices(ranks, tensors, table);
  for (const int ranks : rank_counts) measure_manifests(ranks, pieces, table);
  fmt::print("{} tensors and {} pieces of optimizer state per rank\n", tensors, pieces);
  table.print();
}
