// Data order against values computed with numpy's RandomState and Megatron-LM's algorithm in Python.
#include <numeric>

#include "apps/data/gpt_index.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::data;
using nrl::test::error_of;

namespace {

template <class T>
uint64_t hash(const std::vector<T>& values) {
  uint64_t h = 0xcbf29ce484222325ull;
  for (const T v : values) h = (h ^ static_cast<uint32_t>(v)) * 0x100000001b3ull;
  return h;
}

std::vector<int32_t> uneven_lengths() {
  std::vector<int32_t> lengths;
  for (int i = 0; i < 60; ++i) lengths.push_back((7 * i * i + 3 * i) % 23 + (i % 11 == 5 ? 0 : 1));
  lengths[5] = 0;
  return lengths;
}

}  // namespace

TEST_CASE("shuffle equals numpy's", "[order]") {
  NumpyRandomState random(42);
  std::vector<uint32_t> x(100003);
  std::iota(x.begin(), x.end(), 0u);
  random.shuffle(std::span(x));
  CHECK(std::vector<uint32_t>(x.begin(), x.begin() + 5) ==
        std::vector<uint32_t>{87184, 98871, 1956, 11529, 39495});
  CHECK(hash(x) == 0xe23f464a9f0ca13cull);
  std::vector<int32_t> y(12);
  std::iota(y.begin(), y.end(), 0);
  random.shuffle(std::span(y));
  CHECK(y == std::vector<int32_t>{1, 4, 0, 6, 11, 3, 2, 5, 9, 10, 8, 7});
}

TEST_CASE("documents, starts and samples come in Megatron's order", "[order]") {
  struct Golden {
    std::pair<int64_t, int64_t> bounds;
    int64_t sequence_length, samples;
    uint32_t seed;
    int64_t epochs, total;
    uint64_t documents, starts, shuffle;
  };
  const Golden goldens[] = {
      {{0, 58}, 8, 40, 1234, 1, 79, 0xc56719b39b2a38ca, 0x3c1f73a566ef385f, 0x776e1141a1c0a4ae},
      {{0, 58}, 8, 100, 7, 2, 158, 0x470e1f068fd3daf7, 0xbcd4862952334ac6, 0x228040a7a7e55ba0},
      {{0, 58}, 8, 200, 99, 3, 238, 0x3b0d9df8117727ce, 0x31e9ab72304dcbe9, 0x40e0095385ada200},
      {{0, 58}, 16, 77, 1234, 2, 79, 0xc7d76f1d271ddae7, 0x645bc29f926caadc, 0xdc32251206b3beec},
      {{58, 60}, 8, 30, 3, 18, 31, 0x7ee554c88f2bb15d, 0x6231e91026262ad0, 0x9aef1fac526b5b38},
  };
  const std::vector<int32_t> lengths = uneven_lengths();
  for (const Golden& g : goldens) {
    const GptIndex index = build_gpt_index(lengths, g.bounds, g.sequence_length, g.samples, g.seed, "test");
    CHECK(index.epochs == g.epochs);
    CHECK(index.samples() == g.total);
    CHECK(hash(index.documents) == g.documents);
    std::vector<int64_t> starts;
    for (size_t i = 0; i < index.start_document.size(); ++i) {
      starts.push_back(index.start_document[i]);
      starts.push_back(index.start_offset[i]);
    }
    CHECK(hash(starts) == g.starts);
    CHECK(hash(index.shuffle) == g.shuffle);
  }
}

TEST_CASE("what an index cannot hold is refused", "[order]") {
  const std::vector<int32_t> lengths{0, 0, 3};
  CHECK(error_of([&] { build_gpt_index(lengths, {0, 2}, 8, 1, 1, "a"); }).code == 65);
  CHECK(error_of([&] { build_gpt_index(lengths, {1, 1}, 8, 1, 1, "a"); }).code == 65);
  CHECK(error_of([&] { build_gpt_index(lengths, {0, 3}, 1 << 20, int64_t{1} << 31, 1, "a"); }).code == 78);
  CHECK(error_of([&] { build_gpt_index(lengths, {0, 3}, 1 << 30, INT64_MAX / 2, 1, "a"); }).code == 78);
}

TEST_CASE("split bounds round as Python does", "[order]") {
  const auto bounds = [](const char* split, int64_t n) {
    const SplitShares shares = parse_split(split);
    const auto train = split_bounds(shares, Split::train, n),
               valid = split_bounds(shares, Split::validation, n);
    const auto test = split_bounds(shares, Split::test, n);
    CHECK(train.second == valid.first);
    CHECK(valid.second == test.first);
    return std::vector<int64_t>{train.first, train.second, valid.second, test.second};
  };
  CHECK(bounds("969,30,1", 1000) == std::vector<int64_t>{0, 969, 999, 1000});
  CHECK(bounds("969,30,1", 50) == std::vector<int64_t>{0, 48, 50, 50});
  CHECK(bounds("1,1", 5) == std::vector<int64_t>{0, 2, 5, 5});
  CHECK(bounds("1,1,2", 10) == std::vector<int64_t>{0, 2, 5, 10});
  CHECK(bounds("90,5,5", 10) == std::vector<int64_t>{0, 9, 10, 10});
  for (const char* bad : {"", "1,,2", "0,0,0", "1,-1", "nan", "1,2,3,4", "1;2", "inf"})
    CHECK(error_of([&] { parse_split(bad); }).code == 78);
}

TEST_CASE("a blend follows its weights as Megatron's does", "[order]") {
  const auto shares = normalised_weights(std::vector<double>{5, 3, 2});
  const BlendIndex a = build_blend_index(shares, 20);
  CHECK(a.dataset == std::vector<int16_t>{0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1, 2, 0, 1, 0, 2, 0, 1, 0});
  CHECK(a.sample == std::vector<int64_t>{0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 5, 3, 2, 6, 4, 7, 3, 8, 5, 9});
  CHECK(blend_request(0.5, 100) == 51);
  CHECK(blend_request(1.0 / 9, 100) == 13);
  const BlendIndex b = build_blend_index(normalised_weights(std::vector<double>{1, 1, 7}), 20);
  CHECK(b.dataset == std::vector<int16_t>{2, 0, 2, 2, 1, 2, 2, 2, 2, 0, 2, 2, 2, 1, 2, 2, 2, 2, 0, 2});
  CHECK(error_of([] { normalised_weights(std::vector<double>{1, 0}); }).code == 78);
}
