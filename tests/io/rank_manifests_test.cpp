// Manifests that ranks other than 0 write themselves, and the places in manifest.json that lead to them.
#include <functional>
#include <set>

#include "core/base/philox.h"
#include "core/io/checkpoint_places.h"
#include "core/io/crc32c.h"
#include "tests/catch.h"
#include "tests/io/checkpoint_test_util.h"

using namespace nrl;
using namespace nrl::test;

namespace {

using Places = std::vector<PiecePlace>;

Places sorted(Places places) {
  std::sort(places.begin(), places.end(), [](const PiecePlace& a, const PiecePlace& b) {
    return std::tie(a.offset, a.rank) < std::tie(b.offset, b.rank);
  });
  return places;
}

// Ranks `first`, first + step, ... hold equal ranges of a tensor.
Places ranges(int first, int step, int ranks, int64_t count, int64_t offset = 0) {
  Places out;
  for (int i = 0; i < ranks; ++i) out.push_back({first + i * step, offset + i * count, count, count, count});
  return out;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  CAPTURE(text, from);
  const size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

}  // namespace

TEST_CASE("places of pieces: packed and read back, short if ranks hold equal parts") {
  CHECK(pack_places({}).empty());
  CHECK(unpack_places("").empty());
  CHECK(pack_places(ranges(3, 1, 1, 10)) == "3,0,10");
  // 16,384 ranks, every eighth has the next 1,000 elements.
  const Places many = ranges(5, 8, 16384, 1000);
  CHECK(pack_places(many) == "5,0,1000,16384,8,1000");
  CHECK(sorted(unpack_places(pack_places(many))) == many);
  // In two buckets, the last range shorter.
  Places buckets = ranges(0, 4, 256, 64);
  for (const PiecePlace& p : ranges(0, 4, 255, 64, 256 * 64)) buckets.push_back(p);
  buckets.push_back({255 * 4, 511 * 64, 3, 3, 3});
  CHECK(pack_places(buckets) == "0,0,64,256,4,64 0,16384,64,255,4,64 1020,32704,3");
  CHECK(sorted(unpack_places(pack_places(buckets))) == sorted(buckets));
  // Columns of 8 tensor-parallel ranks, whose rows 4 others share.
  Places columns;
  for (int dp = 0; dp < 4; ++dp)
    for (int tp = 0; tp < 8; ++tp) columns.push_back({dp * 8 + tp, dp * 6400 + tp * 8, 800, 8, 64});
  const std::string packed = pack_places(columns);
  CHECK(packed.size() < 130);
  CHECK(sorted(unpack_places(packed)) == sorted(columns));

  const PhiloxStream random(5, "places");
  for (uint64_t i = 0; i < 300; ++i) {
    Places places;
    const uint64_t n = random.bits(1000 * i) % 40;
    for (uint64_t k = 1; k <= n; ++k) {
      const auto draw = [&](uint64_t which, uint64_t of) {
        return static_cast<int64_t>(random.bits(1000 * i + 5 * k + which) % of);
      };
      const int64_t run = 1 + draw(0, 3), count = run * (1 + draw(1, 2));
      places.push_back({static_cast<int>(draw(2, 4)), draw(3, 50), count, run, count == run ? run : 7});
    }
    const auto all = [](const PiecePlace& a, const PiecePlace& b) {
      return std::tie(a.rank, a.offset, a.count, a.run) < std::tie(b.rank, b.offset, b.count, b.run);
    };
    Places got = unpack_places(pack_places(places));
    std::sort(got.begin(), got.end(), all);
    std::sort(places.begin(), places.end(), all);
    CHECK(got == places);
  }
  for (const char* bad :
       {"1", "1,2", "1,2,3,4", "1,2,3,4,5,6,7", "1,2,3,4,5,6,7,8,9", "a,2,3", "1,,3", "-1,2,3", "1,2,3 4,5",
        "1,2,3  4,5,6", "1,2,99999999999999999999", "1,2,3,0,1,1", "1,2,3,5000000,1,1", "1,2,3,9,-1,1",
        "1,2,3,9,999999999,1", "1,2,3,9,0,9223372036854775807", "1.5,2,3", "1,2,0x3"}) {
    CAPTURE(bad);
    const Caught caught = error_of([&] { unpack_places(bad); });
    CHECK(caught.code == 65);
    CHECK(contains(caught.text, "is not the place of a piece"));
  }
}

TEST_CASE("ranks describe their own pieces, and readers open the manifests that they need") {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  const std::string path = save_by_ranks(dir / "c", 4);
  const std::string index = read_file(path + "/manifest.json", 1 << 20);
  CHECK(contains(index, "\"format\":\"nrl-checkpoint-2\""));
  CHECK(contains(index, "\"of_ranks\":\"1,175,175,3,1,175\""));
  CHECK_FALSE(contains(index, "big.part\",\"offset\":175"));
  CHECK(validate_checkpoint(path, Validation::full).empty());
  CHECK(holds_model(path, 3));
  // Without the manifests of ranks 1 and 3, what they describe cannot be read; the rest can.
  for (const int rank : {1, 3}) remove_tree(join_path(path, rank_manifest_name(rank)));
  CheckpointReader reader(path, open_manifest(path).manifest);
  const std::string wanted = tensor_bytes(model_tensors()[2], 3);
  for (int rank = 0; rank < 4; ++rank) {
    std::string got(175 * 4, '\0');
    const Caught caught = error_of([&] { reader.read_logical("big", rank * 175, 175, got.data()); });
    CAPTURE(rank, caught.text);
    CHECK((rank % 2 == 1) == !caught.text.empty());
    if (rank % 2 == 1) CHECK(contains(caught.text, path + "/" + rank_manifest_name(rank)));
    if (rank % 2 == 0) CHECK((got == wanted.substr(static_cast<size_t>(rank) * 700, 700)));
  }
  const std::vector<std::string> problems = validate_checkpoint(path, Validation::quick);
  CHECK(problems == std::vector<std::string>{path + "/manifest-00001.json: missing",
                                             path + "/manifest-00003.json: missing"});
  CHECK(validate_checkpoint(path, Validation::full) == problems);

  // One rank alone writes what it always wrote.
  const std::string alone = save(dir / "alone", 7, 3);
  CHECK(contains(read_file(alone + "/manifest.json", 1 << 20), "\"format\":\"nrl-checkpoint-1\""));
  CHECK_FALSE(path_exists(join_path(alone, rank_manifest_name(0))));
}

TEST_CASE("a damaged or foreign manifest of a rank is found, and named") {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  const std::string path = save_by_ranks(dir / "c", 3);
  const std::string other = save_by_ranks(dir / "other", 3, 710);
  const std::string file = path + "/manifest-00002.json", good = read_file(file, 1 << 20);
  const std::string index_file = path + "/manifest.json", index = read_file(index_file, 1 << 20);
  const auto sealed = [](const std::string& text) {
    const std::string body = text.substr(0, text.rfind("\"crc32c\":\""));
    return body + fmt::format("\"crc32c\":\"{:08x}\"}}\n", crc32c(body.data(), body.size()));
  };
  // The rank's manifest with other text, and manifest.json with its size and checksum.
  const auto write = [&](const std::string& text, const std::string& index_text) {
    CheckpointManifest m = CheckpointManifest::from_text(index_text, "index");
    for (CheckpointFile& f : m.files)
      if (f.name == "manifest-00002.json") f = {f.name, text.size(), crc32c(text.data(), text.size())};
    overwrite(file, text);
    overwrite(index_file, m.to_text());
  };
  struct Case {
    std::string text, index, what;
  };
  const Case cases[] = {
      {"{}", index, "truncated or damaged"},
      {sealed(replaced(good, "\"step\":7", "\"step\":8")), index,
       "damaged: it is of step 8, manifest.json of 7"},
      {read_file(other + "/manifest-00002.json", 1 << 20), index, "is not as in manifest.json"},
      {read_file(path + "/manifest-00001.json", 1 << 20), index, "is not as in manifest.json"},
      {sealed(replaced(good, "\"key\":\"big.part\"", "\"key\":\"gone\"")), index,
       "there is no tensor \"gone\""},
      {sealed(replaced(good, "\"offset\":466,\"count\":234", "\"offset\":465,\"count\":234")), index,
       "damaged: it does not have the piece of tensor \"big\" at 466 with 234 elements"},
      {good, sealed(replaced(index, "2,466,234", "2,466,233")), "elements [699, 700) are stored nowhere"},
      {good, sealed(replaced(index, "1,233,233 2,466,234", "1,233,467")), "at 233 with 467 elements"},
      {good, sealed(replaced(index, "1,233,233 2,466,234", "1,x")), "is not the place of a piece"},
      {good, sealed(replaced(index, "1,233,233 2,466,234", "1,233,233 9,466,234")),
       "there is no file manifest-00009.json"},
      {good, sealed(replaced(index, "\"rank\":2,\"sums\":3", "\"rank\":2,\"sums\":4")),
       "is not as in manifest.json"},
      {good, sealed(replaced(index, "\"rank\":2,\"sums\":3", "\"rank\":1,\"sums\":3")),
       "is not as in manifest.json"},
  };
  for (const Case& c : cases) {
    write(c.text, c.index);
    const std::vector<std::string> problems = validate_checkpoint(path, Validation::full);
    const Caught caught = error_of([&] { holds_model(path, 3); });
    CAPTURE(c.what, problems, caught.text);
    REQUIRE_FALSE(problems.empty());
    CHECK(std::set<std::string>(problems.begin(), problems.end()).size() == problems.size());
    for (const std::string& p : problems) CHECK(p.starts_with(path + "/"));
    const bool reading_finds = contains(caught.text, c.what);
    bool found = reading_finds;
    for (const std::string& p : problems) found = found || contains(p, c.what);
    CHECK(found);
    CHECK(caught.code == 65);
  }
  // What manifest.json itself must not say.
  for (const auto& [from, to] : {std::pair("\"rank\":2,\"sums\":3", "\"rank\":7,\"sums\":3"),
                                 std::pair("\"rank\":2,\"sums\":3", "\"rank\":2,\"sums\":0"),
                                 std::pair("\"rank\":2,\"sums\":3", "\"rank\":2,\"sums\":99999999999"),
                                 std::pair("\"rank\":2,\"sums\":3", "\"rank\":2")}) {
    const Caught caught =
        error_of([&] { CheckpointManifest::from_text(sealed(replaced(index, from, to)), "index"); });
    CAPTURE(to, caught.text);
    CHECK(caught.code == 65);
    CHECK(caught.text.starts_with("index"));
  }
  write(good, index);
  CHECK(validate_checkpoint(path, Validation::full).empty());
}

TEST_CASE("places are collected again when the pieces of any rank change") {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  constexpr int ranks = 3;
  std::vector<SavePlans> kept(ranks);
  int64_t step = 0, gathers = 0;
  // `order`: the ranks in the order of their ranges of the tensor.
  const auto save = [&](const std::vector<int>& order, bool fails = false) {
    ThreadRanks threads(ranks);
    ++step;
    gathers = 0;
    const auto caught = threads.run([&](int rank) {
      RankGroup group = threads.group(rank);
      if (rank == 0)
        group.gather = [&, gather = group.gather](const std::string& text) {
          ++gathers;
          return gather(text);
        };
      CheckpointWriter::Options options;
      options.plans = &kept[rank];
      CheckpointWriter writer(dir / "c", step, 1000, group, options);
      const auto at = std::find(order.begin(), order.end(), rank) - order.begin();
      const std::vector<float> values(4, static_cast<float>(10 * step + at));
      writer.add_tensor_set("optimizer", {ShardSpec::flat("x.part", "x", DType::f32, {12}, at * 4, 4)},
                            [&](SafetensorsWriter& w) { w.write("x.part", values.data(), 16); });
      if (fails && rank == 1) overwrite(writer.directory() + "/optimizer-00002-of-00003.safetensors", "x");
      writer.commit(JsonValue::object());
    });
    for (const Caught& e : caught) CHECK(e.code == (fails ? 74 : 0));
    if (fails) return;
    std::vector<float> got(12), want(12);
    for (size_t i = 0; i < 12; ++i) want[i] = static_cast<float>(10 * step + static_cast<int64_t>(i / 4));
    const std::string path = dir / fmt::format("c/step-{}", step);
    CheckpointReader(path).read_logical("x", got.data(), 48);
    CHECK(got == want);
    CHECK(validate_checkpoint(path, Validation::full).empty());
  };
  save({0, 1, 2});
  const int64_t first = gathers;
  save({0, 1, 2});
  CHECK(gathers == first - 1);
  save({0, 2, 1});
  CHECK(gathers == first);
  save({0, 2, 1}, true);
  save({0, 2, 1});
  CHECK(gathers == first - 1);
  save({0, 1, 2}, true);  // a save that fails with new places: none are kept
  save({0, 2, 1});
  CHECK(gathers == first);
  save({1, 2, 0});
  CHECK(gathers == first);
}

TEST_CASE("mutated manifests of ranks are read or refused") {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  const std::string path = save_by_ranks(dir / "c", 3);
  int accepted = 0;
  for (const char* name : {"manifest.json", "manifest-00001.json"}) {
    const std::string file = join_path(path, name), good = read_file(file, 1 << 20);
    const std::string body = good.substr(0, good.rfind("\"crc32c\":\""));
    const std::string index_file = path + "/manifest.json", index = read_file(index_file, 1 << 20);
    for (int i = 0; i < fuzz_iterations() / 8; ++i) {
      const std::string bad = mutated(body, static_cast<uint64_t>(i), 4);
      const std::string text = bad + fmt::format("\"crc32c\":\"{:08x}\"}}\n", crc32c(bad.data(), bad.size()));
      CheckpointManifest m = CheckpointManifest::from_text(index, "index");
      for (CheckpointFile& f : m.files)
        if (f.name == name) f = {f.name, text.size(), crc32c(text.data(), text.size())};
      overwrite(index_file, m.to_text());
      overwrite(file, text);
      const int code = error_of([&] { holds_model(path, 3); }).code;
      REQUIRE((code == 0 || code == 65));
      const int verifying = error_of([&] { validate_checkpoint(path, Validation::full); }).code;
      REQUIRE(verifying == 0);
      accepted += code == 0;
    }
    overwrite(file, good);
    overwrite(index_file, index);
  }
  CHECK(accepted > 0);
  CHECK(holds_model(path, 3));
}
