// Tensors that several ranks hold in slices: written whole, read back in any other slices.
#include <bit>
#include <limits>

#include "core/io/checkpoint_reader.h"
#include "core/io/checkpoint_store.h"
#include "core/io/slice_plan.h"
#include "tests/catch.h"
#include "tests/io/checkpoint_test_util.h"

using namespace nrl;
using namespace nrl::test;

namespace {

enum class Cut : uint8_t { rows, columns, whole, first, thirds };

struct Held {
  TensorSpec spec;
  Cut cut;
  bool transposed;
};

// More than one block (slice_block_bytes) of each kind of slice; sizes that no number of ranks divides.
const std::vector<Held>& tensors() {
  static const std::vector<Held> all = {
      {{"rows", DType::f32, {13, 7}}, Cut::rows, false},
      {{"columns", DType::bf16, {6, 11}}, Cut::columns, false},
      {{"rows.t", DType::f32, {9, 14}}, Cut::rows, true},
      {{"columns.t", DType::bf16, {37, 50}}, Cut::columns, true},
      {{"copies", DType::f32, {17}}, Cut::whole, false},
      {{"one", DType::f32, {5, 5}}, Cut::first, false},
      {{"vector", DType::f32, {23}}, Cut::rows, false},
      {{"three.t", DType::f32, {10, 31}}, Cut::thirds, true},  // several slices of a rank, as q, k and v
      {{"big.columns", DType::f32, {1100, 1201}}, Cut::columns, false},
      {{"big.rows.t", DType::f32, {1201, 1100}}, Cut::rows, true},
  };
  return all;
}

// The slices of rank `rank` of `size`, in their own memory.
class Slices {
 public:
  Slices(int rank, int size, uint64_t salt, bool filled = true, bool everything = false) {
    for (const Held& held : tensors()) {
      const int64_t height = held.spec.shape[0];
      const int64_t width = held.spec.shape.size() == 2 ? held.spec.shape[1] : 1;
      const auto begin = [&](int64_t n) { return n * rank / size; };
      const auto end = [&](int64_t n) { return n * (rank + 1) / size; };
      const Cut cut = everything ? Cut::whole : held.cut;
      if (cut == Cut::first && rank != 0) continue;
      if (cut == Cut::rows) {
        add(held, begin(height), end(height), 0, width, salt, filled);
      } else if (cut == Cut::columns) {
        add(held, 0, height, begin(width), end(width), salt, filled);
      } else if (cut == Cut::thirds) {
        for (int64_t third = 0; third < 3; ++third) {
          const int64_t first = width * third / 3, count = width * (third + 1) / 3 - first;
          add(held, 0, height, first + begin(count), first + end(count), salt, filled);
        }
      } else {
        add(held, 0, height, 0, width, salt, filled);
      }
    }
  }

  std::vector<TensorSlice> slices;
  std::deque<std::string> memory;  // whose elements stay where they are

 private:
  void add(const Held& held, int64_t r0, int64_t r1, int64_t c0, int64_t c1, uint64_t salt, bool filled) {
    if (r0 == r1 || c0 == c1) return;
    const auto unit = static_cast<size_t>(size_of(held.spec.dtype));
    std::string data(static_cast<size_t>((r1 - r0) * (c1 - c0)) * unit, '\0');
    TensorSlice s{held.spec.name, held.spec.dtype, held.spec.shape, r0, r1 - r0, c0,
                  c1 - c0,        nullptr,         held.transposed};
    if (filled) {
      const std::string all = tensor_bytes(held.spec, salt);
      for (int64_t r = r0; r < r1; ++r)
        for (int64_t c = c0; c < c1; ++c) {
          const int64_t at = held.transposed ? (c - c0) * (r1 - r0) + r - r0 : (r - r0) * (c1 - c0) + c - c0;
          std::memcpy(data.data() + static_cast<size_t>(at) * unit,
                      all.data() + static_cast<size_t>(r * s.width() + c) * unit, unit);
        }
    }
    memory.push_back(std::move(data));
    s.data = memory.back().data();
    slices.push_back(std::move(s));
  }
};

std::vector<Caught> write(const std::string& store, int ranks, uint64_t salt, bool everything = false) {
  ThreadRanks group(ranks);
  return group.run([&](int rank) {
    Slices held(rank, ranks, salt, true, everything);
    CheckpointWriter writer(store, 7, 1000, group.group(rank));
    writer.add_slices("model", held.slices);
    writer.commit(JsonValue::object());
  });
}

}  // namespace

TEST_CASE("slices of any number of ranks are stored whole, and read back in any other slices") {
  for (const int writers : {1, 2, 4}) {
    CAPTURE(writers);
    const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
    for (const Caught& e : write(dir / "c", writers, 3)) REQUIRE(e.text == "");
    const std::string step = dir / "c/step-7";
    std::vector<std::string> files{"manifest.json"};
    for (int k = 1; k <= writers && writers > 1; ++k)
      files.push_back(fmt::format("model-{:05}-of-{:05}.safetensors", k, writers));
    files.push_back(writers == 1 ? "model.safetensors" : "model.safetensors.index.json");
    CHECK(list_directory(step) == files);
    CHECK(validate_checkpoint(step, Validation::full).empty());

    // As any other program reads it.
    const SafetensorsSet set(step);
    CHECK(set.names().size() == tensors().size());
    for (const Held& held : tensors()) {
      CAPTURE(held.spec.name);
      const std::string want = tensor_bytes(held.spec, 3);
      std::string got(want.size(), '\1');
      set.read(held.spec.name, got.data(), got.size());
      CHECK((got == want));
    }
    for (const int readers : {1, 2, 3})
      for (int rank = 0; rank < readers; ++rank) {
        const Slices want(rank, readers, 3);
        Slices got(rank, readers, 3, false);
        CheckpointReader reader(step);
        for (const TensorSlice& s : got.slices) reader.read_slice(s);
        CHECK((got.memory == want.memory));
      }
  }
}

TEST_CASE("the ranks share the writing unless the first one holds everything") {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  for (const Caught& e : write(dir / "all", 3, 3, true)) REQUIRE(e.text == "");
  CHECK(list_directory(dir / "all/step-7") == std::vector<std::string>{"manifest.json", "model.safetensors"});
  CHECK(write(dir / "one", 1, 3)[0].text == "");
  CHECK((read_file(dir / "all/step-7/model.safetensors", 1 << 24) ==
         read_file(dir / "one/step-7/model.safetensors", 1 << 24)));

  // Equal tensors that all ranks hold in part: each writes as many, and none of them whole on its own.
  ThreadRanks group(4);
  for (const Caught& e : group.run([&](int rank) {
         std::vector<float> data(40, 1.0f);
         std::vector<TensorSlice> slices;
         for (int t = 0; t < 8; ++t)
           slices.push_back({fmt::format("t{}", t), DType::f32, {16, 10}, 4 * rank, 4, 0, 10, data.data()});
         CheckpointWriter writer(dir / "shared", 7, 0, group.group(rank));
         writer.add_slices("model", slices);
         writer.commit(JsonValue::object());
       }))
    REQUIRE(e.text == "");
  for (int k = 1; k <= 4; ++k)
    CHECK(SafetensorsFile(fmt::format("{}/step-7/model-{:05}-of-00004.safetensors", dir / "shared", k))
              .tensors()
              .size() == 2);
}

TEST_CASE("slices that are not the whole tensor once are refused on every rank, and nothing is left") {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  std::vector<float> data(100, 1.0f);
  const auto attempt = [&](const std::vector<TensorSlice>& first, const std::vector<TensorSlice>& second) {
    ThreadRanks group(2);
    const auto errors = group.run([&](int rank) {
      CheckpointWriter writer(dir / "c", 1, 0, group.group(rank));
      std::vector<TensorSlice> mine = rank == 0 ? first : second;
      for (TensorSlice& s : mine) s.data = data.data();
      writer.add_slices("model", mine);
      writer.commit(JsonValue::object());
    });
    CHECK(errors[0].text == errors[1].text);
    CHECK(list_directory(dir / "c").empty());
    return errors[0].text;
  };
  const auto rows = [](int64_t row, int64_t count) {
    return TensorSlice{"w", DType::f32, {10, 4}, row, count, 0, 4};
  };
  const auto columns = [](int64_t column, int64_t count) {
    return TensorSlice{"w", DType::f32, {10, 4}, 0, 10, column, count};
  };
  CHECK(contains(attempt({rows(0, 5)}, {rows(6, 4)}), "the ranks hold 36 of its 40 elements"));
  CHECK(contains(attempt({rows(0, 5)}, {rows(4, 6)}), "slices of ranks 0 and 1 overlap"));
  CHECK(contains(attempt({columns(0, 3)}, {columns(2, 2)}), "slices of ranks 0 and 1 overlap"));
  CHECK(contains(attempt({rows(0, 5)}, {columns(0, 4)}), "overlap"));
  CHECK(contains(attempt({rows(0, 5)}, {rows(5, 6)}), "rank 1 holds rows 5+6"));
  CHECK(contains(attempt({columns(0, 2)}, {columns(2, 3)}), "columns 2+3"));
  CHECK(contains(attempt({rows(-1, 6)}, {rows(5, 5)}), "rank 0 holds rows -1+6"));
  TensorSlice other = rows(5, 5);
  other.shape = {10, 5};
  CHECK(contains(attempt({rows(0, 5)}, {other}), "tensor \"w\" of rank 1 is f32 [10, 5]"));
  other = rows(5, 5);
  other.dtype = DType::bf16;
  CHECK(contains(attempt({rows(0, 5)}, {other}), "is bf16 [10, 4], of another one f32 [10, 4]"));
}

TEST_CASE("any two slices that overlap are found, and no others") {
  // All pairs of rectangles of a 4 x 4 matrix, with the rest of it in single elements.
  const auto plan = [](const std::vector<TensorSlice>& slices) {
    return error_of([&] { plan_slices({slices_to_text(slices)}); }).text;
  };
  const auto rectangle = [](int k) {
    const int64_t row = k & 3, rows = 1 + (k >> 2 & 3), column = k >> 4 & 3, columns = 1 + (k >> 6);
    return TensorSlice{"w", DType::f32, {4, 4}, row, rows, column, columns};
  };
  const auto inside = [](const TensorSlice& s) { return s.row + s.rows <= 4 && s.column + s.columns <= 4; };
  const auto has = [](const TensorSlice& s, int64_t r, int64_t c) {
    return r >= s.row && r < s.row + s.rows && c >= s.column && c < s.column + s.columns;
  };
  int refused = 0, accepted = 0;
  for (int a = 0; a < 256; ++a)
    for (int b = a + 1; b < 256; ++b) {
      std::vector<TensorSlice> slices{rectangle(a), rectangle(b)};
      if (!inside(slices[0]) || !inside(slices[1])) continue;
      bool overlap = false;
      for (int64_t r = 0; r < 4; ++r)
        for (int64_t c = 0; c < 4; ++c) {
          const int count = has(slices[0], r, c) + has(slices[1], r, c);
          overlap = overlap || count == 2;
          if (count == 0) slices.push_back({"w", DType::f32, {4, 4}, r, 1, c, 1});
        }
      const std::string text = plan(slices);
      if (contains(text, "overlap") != overlap) FAIL(a << " and " << b << ": " << text);
      ++(overlap ? refused : accepted);
    }
  CHECK(refused + accepted == 100 * 99 / 2);
  CHECK(accepted > 500);
}

TEST_CASE("the plan of slices is used again until the slices of any rank change") {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  constexpr int ranks = 3;
  std::vector<SavePlans> kept(ranks);
  const auto save = [&](int64_t step, uint64_t salt, bool everything) {
    ThreadRanks threads(ranks);
    for (const Caught& e : threads.run([&](int rank) {
           Slices held(rank, ranks, salt, true, everything);
           CheckpointWriter::Options options;
           options.plans = &kept[rank];
           CheckpointWriter writer(dir / "c", step, 1000, threads.group(rank), options);
           writer.add_slices("model", held.slices);
           writer.commit(JsonValue::object());
         }))
      REQUIRE(e.text == "");
    if (kept[0].slices.at("model").index == "{}") return;  // not readable as a set
    const SafetensorsSet set(fmt::format("{}/step-{}", dir / "c", step));
    for (const Held& held : tensors()) {
      const std::string want = tensor_bytes(held.spec, salt);
      std::string got(want.size(), '\1');
      set.read(held.spec.name, got.data(), got.size());
      CHECK((got == want));
    }
  };
  const auto slices = [&](size_t rank) -> std::string& { return kept[rank].slices.at("model").slices; };
  const auto marked = [&] {
    int count = 0;
    for (const SavePlans& shares : kept) count += shares.slices.at("model").index == "{}";
    return count;
  };
  const auto mark = [&] {
    kept[0].slices.at("model").index = "{}";  // which no new plan has
  };
  save(1, 3, false);
  CHECK(read_file(dir / "c/step-1/model.safetensors.index.json", 1 << 20).size() > 100);
  mark();
  save(2, 4, false);
  CHECK(marked() == 1);
  slices(1) += " ";  // as if those of one rank had changed
  save(3, 5, false);
  CHECK(marked() == 0);
  mark();
  kept[2].slices.clear();
  save(4, 6, false);
  CHECK(marked() == 0);
  mark();
  save(5, 7, true);
  CHECK(marked() == 0);
}

TEST_CASE("each rank receives its own part of a plan") {
  const auto text = [](const std::vector<TensorSlice>& slices) { return slices_to_text(slices); };
  const SlicePlan plan = plan_slices({
      text({{"a", DType::f32, {4, 4}, 0, 2, 0, 4}, {"b", DType::f32, {4}, 0, 4, 0, 1}}),
      text({{"a", DType::f32, {4, 4}, 2, 1, 0, 4}}),
      text({{"a", DType::f32, {4, 4}, 3, 1, 0, 4}, {"b", DType::f32, {4}, 0, 4, 0, 1}}),
      text({}),
  });
  const std::vector<SlicePlan> parts = plan.parts(4);
  REQUIRE(plan.tensors[0].owner == 0);
  REQUIRE(plan.tensors[1].owner == 2);
  REQUIRE(parts[0].tensors.size() == 1);
  CHECK(parts[0].tensors[0].sources.size() == 3);
  REQUIRE(parts[1].tensors.size() == 1);
  REQUIRE(parts[1].tensors[0].sources.size() == 1);
  CHECK(parts[1].tensors[0].sources[0].row == 2);
  REQUIRE(parts[2].tensors.size() == 2);
  CHECK(parts[2].tensors[0].sources.size() == 1);
  CHECK(parts[2].tensors[1].sources.size() == 1);
  CHECK(parts[3].tensors.empty());
}

TEST_CASE("a manifest that could not be read is not written") {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  REQUIRE(write(dir / "c", 1, 3)[0].text == "");
  const uint64_t bytes = read_file(dir / "c/step-7/manifest.json", 1 << 24).size();
  const auto attempt = [&](uint64_t limit) {
    ThreadRanks group(1);
    return group.run([&](int rank) {
      Slices held(rank, 1, 3);
      CheckpointWriter::Options options;
      options.manifest_limit = limit;
      CheckpointWriter writer(dir / "c", 8, 1000, group.group(rank), options);
      writer.add_slices("model", held.slices);
      writer.commit(JsonValue::object());
    })[0];
  };
  const Caught refused = attempt(bytes - 1);
  CHECK(refused.code == 74);
  CHECK(contains(refused.text, "step-8: the manifest of 10 tensors in 1 files has"));
  CHECK(list_directory(dir / "c") == std::vector<std::string>{"LATEST", "step-7"});
  CHECK(attempt(bytes).text == "");
}

TEST_CASE("an error of one rank during the exchange of slices reaches every rank without a deadlock") {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  for (const Caught& e : write(dir / "c", 3, 1)) REQUIRE(e.text == "");
  for (int bad = 0; bad < 3; ++bad) {
    CAPTURE(bad);
    // Before the slices: that rank opens no file. In them: a NaN of its own, written by whoever
    // owns the tensor.
    for (const bool before : {true, false}) {
      ThreadRanks group(3);
      const auto errors = group.run([&](int rank) {
        Slices held(rank, 3, 2);
        CheckpointWriter::Options options;
        options.refuse_non_finite = true;
        CheckpointWriter writer(dir / "c", 8, 1000, group.group(rank), options);
        writer.guard([&] {
          if (before && rank == bad) fail(Exit::io, "the disk of this rank is full");
        });
        if (!before && rank == bad)
          for (TensorSlice& s : held.slices)
            if (s.name == "big.columns")
              static_cast<float*>(s.data)[5] = std::numeric_limits<float>::quiet_NaN();
        writer.add_slices("model", held.slices);
        writer.commit(JsonValue::object());
      });
      for (const Caught& e : errors) {
        CHECK(e.code == (before ? 74 : 79));
        CHECK(contains(e.text, before ? fmt::format("rank {}: the disk of this rank is full", bad)
                                      : "tensor \"big.columns\" holds a NaN"));
      }
      CHECK(list_directory(dir / "c") == std::vector<std::string>{"LATEST", "step-7"});
    }
  }
}

TEST_CASE("a slice of a tensor that is stored otherwise, or damaged, is refused") {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  REQUIRE(write(dir / "c", 1, 3)[0].text == "");
  float out[200];
  const auto attempt = [&](TensorSlice s) {
    s.data = out;
    return error_of([&] { CheckpointReader(dir / "c/step-7").read_slice(s); });
  };
  const Caught shape = attempt({"rows", DType::f32, {7, 13}, 0, 2, 0, 13});
  CHECK(shape.code == 65);
  CHECK(contains(shape.text, "tensor \"rows\" is f32 [13, 7]; expected f32 [7, 13]"));
  CHECK(contains(attempt({"rows", DType::bf16, {13, 7}, 0, 2, 0, 7}).text, "expected bf16 [13, 7]"));
  CHECK(attempt({"absent", DType::f32, {13, 7}, 0, 2, 0, 7}).code == 65);
  CHECK(attempt({"rows", DType::f32, {13, 7}, 12, 2, 0, 7}).code == 70);  // behind its end
  CHECK(attempt({"rows", DType::f32, {13, 7}, 3, 2, 5, 3}).code == 70);

  const std::string path = dir / "c/step-7/model.safetensors";
  std::string bytes = read_file(path, 1 << 24);
  const SafetensorsFile file(path);
  bytes[file.data_offset() + file.at("rows").begin + 20] ^= 1;
  overwrite(path, bytes);
  const Caught damaged = attempt({"rows", DType::f32, {13, 7}, 0, 2, 1, 3});
  CHECK(damaged.code == 65);
  CHECK(contains(damaged.text, "damaged: tensor \"rows\""));
}

TEST_CASE("slices are converted and transposed while they are read") {
  // 2400 rows: several blocks. Element i is i % 1000 as f16.
  constexpr int64_t height = 2400, width = 1000;
  const auto half = [](int64_t n) {  // exact for integers below 2048
    if (n == 0) return uint16_t{0};
    const int exponent = std::bit_width(static_cast<uint64_t>(n)) - 1;
    return static_cast<uint16_t>((exponent + 15) << 10 | ((n << (10 - exponent)) & 1023));
  };
  for (const bool transposed : {false, true}) {
    std::vector<float> data(static_cast<size_t>(height * 300), -1.0f);
    const TensorSlice s{"w", DType::f32, {height + 1, width}, 1, height, 500, 300, data.data(), transposed};
    read_slice(s, DType::f16, [&](int64_t offset, int64_t count, void* out) {
      for (int64_t i = 0; i < count; ++i) static_cast<uint16_t*>(out)[i] = half((offset + i) * 7 % 1999);
    });
    int64_t bad = 0;
    for (int64_t r = 0; r < height; ++r)
      for (int64_t c = 0; c < 300; ++c) {
        const auto want = static_cast<float>(((r + 1) * width + 500 + c) * 7 % 1999);
        bad += data[transposed ? c * height + r : r * 300 + c] != want;
      }
    CHECK(bad == 0);
  }
}
