// Data order against values computed with numpy's RandomState and Megatron-LM's algorithm in Python.
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>

#include "apps/data/gpt_dataset.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::data;
using nrl::test::contains;
using nrl::test::error_of;
using nrl::test::TemporaryDirectory;

namespace {

template <class T>
uint64_t hash(std::span<const T> values) {
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

// The whole index as Megatron-LM stores it: 16 bytes a sample.
struct ReferenceIndex {
  int64_t epochs = 0;
  std::vector<int32_t> documents;
  std::vector<std::pair<int64_t, int64_t>> starts;  // position in documents, offset
  std::vector<uint32_t> shuffle;
};

template <class T>
void reference_shuffle(std::mt19937& random, std::vector<T>& values, size_t begin, size_t end) {
  for (size_t i = end - begin; i-- > 1;) {
    uint32_t mask = static_cast<uint32_t>(i);
    for (int shift = 1; shift < 32; shift *= 2) mask |= mask >> shift;
    uint32_t j = 0;
    do j = static_cast<uint32_t>(random()) & mask;
    while (j > i);
    std::swap(values[begin + i], values[begin + j]);
  }
}

// gpt_dataset.py and helpers.cpp of Megatron-LM, step by step; `samples` < 0: one epoch (num_samples None).
ReferenceIndex reference_index(const std::vector<int32_t>& lengths, int64_t first, int64_t last,
                               int64_t sequence_length, int64_t samples, uint32_t seed) {
  ReferenceIndex r;
  const int64_t tokens = std::accumulate(lengths.begin() + first, lengths.begin() + last, int64_t{0});
  r.epochs = 1;
  while (samples >= 0 && (r.epochs * tokens - 1) / sequence_length < samples) ++r.epochs;
  const int64_t before_last = ((r.epochs - 1) * tokens - 1) / sequence_length;
  const bool separate =
      r.epochs > 1 &&
      samples - before_last < static_cast<int64_t>(0.8 * static_cast<double>((tokens - 1) / sequence_length));
  std::mt19937 random(seed);
  for (int64_t e = 0; e < r.epochs; ++e)
    for (int64_t d = first; d < last; ++d) r.documents.push_back(static_cast<int32_t>(d));
  const size_t together = r.documents.size() - (separate ? static_cast<size_t>(last - first) : 0);
  reference_shuffle(random, r.documents, 0, together);
  reference_shuffle(random, r.documents, together, r.documents.size());
  const int64_t total = (r.epochs * tokens - 1) / sequence_length;
  r.starts.emplace_back(0, 0);
  int64_t document = 0, offset = 0;
  for (int64_t sample = 1; sample <= total; ++sample) {
    int64_t remaining = sequence_length + 1;
    while (remaining > 0) {
      const int64_t length = lengths[r.documents[document]] - offset;
      remaining -= length;
      if (remaining <= 0) {
        offset += remaining + length - 1;
      } else {
        ++document;
        offset = 0;
      }
    }
    r.starts.emplace_back(document, offset);
  }
  r.shuffle.resize(static_cast<size_t>(total));
  std::iota(r.shuffle.begin(), r.shuffle.end(), 0u);
  const size_t apart = separate ? static_cast<size_t>(before_last) : r.shuffle.size();
  reference_shuffle(random, r.shuffle, 0, apart);
  reference_shuffle(random, r.shuffle, apart, r.shuffle.size());
  return r;
}

GptIndex make_index(const std::vector<int32_t>& lengths, const SplitPart& part, int64_t sequence_length,
                    int64_t samples, uint32_t seed) {
  return GptIndex(plan_gpt_index(lengths, part, sequence_length, samples, "a"), lengths, seed);
}

void check_equal(const GptIndex& index, const ReferenceIndex& r, const std::vector<int32_t>& lengths) {
  CHECK(index.plan().epochs == r.epochs);
  CHECK(index.plan().total == static_cast<int64_t>(r.shuffle.size()));
  CHECK(std::ranges::equal(index.documents(), r.documents));
  REQUIRE(index.samples() <= index.plan().total);
  for (int64_t i = 0; i < index.samples(); ++i) {
    const auto at = static_cast<size_t>(i);
    REQUIRE(index.shuffle()[at] == r.shuffle[at]);
    auto [document, offset] = r.starts[r.shuffle[at]];
    while (lengths[r.documents[document]] == 0) ++document;  // the first documents may be empty
    const GptIndex::Start start = index.start(i);
    REQUIRE(start.document == document);
    REQUIRE(start.offset == offset);
  }
}

}  // namespace

TEST_CASE("shuffle equals numpy's", "[order]") {
  NumpyRandomState random(42);
  std::vector<uint32_t> x(100003);
  std::iota(x.begin(), x.end(), 0u);
  random.shuffle(std::span(x));
  CHECK(std::vector<uint32_t>(x.begin(), x.begin() + 5) ==
        std::vector<uint32_t>{87184, 98871, 1956, 11529, 39495});
  CHECK(hash(std::span(std::as_const(x))) == 0xe23f464a9f0ca13cull);
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
    GptPlan plan =
        plan_gpt_index(lengths, {g.bounds.first, g.bounds.second}, g.sequence_length, g.samples, "test");
    CHECK(plan.epochs == g.epochs);
    CHECK(plan.total == g.total);
    CHECK(plan.kept == g.samples);
    plan.kept = plan.total;  // the golden values are of all samples
    const GptIndex index(plan, lengths, g.seed);
    CHECK(hash(index.documents()) == g.documents);
    std::vector<int64_t> starts;
    for (int64_t i = 0; i <= g.total; ++i) {
      const GptIndex::Start start = index.find(i * g.sequence_length);
      starts.push_back(start.document);
      starts.push_back(start.offset);
    }
    CHECK(hash(std::span(std::as_const(starts))) == g.starts);
    CHECK(hash(index.shuffle()) == g.shuffle);
  }
}

TEST_CASE("the order equals the one that is stored whole", "[order]") {
  std::mt19937 random(5);
  for (int round = 0; round < 300; ++round) {
    std::vector<int32_t> lengths(1 + random() % 200);
    for (int32_t& length : lengths) length = random() % 4 == 0 ? 0 : static_cast<int32_t>(random() % 40);
    lengths.back() = 7;
    const auto count = static_cast<int64_t>(lengths.size());
    const int64_t first = static_cast<int64_t>(random() % lengths.size());
    const auto sequence_length = static_cast<int64_t>(1 + random() % 50);
    const auto samples = static_cast<int64_t>(random() % 300);
    const uint32_t seed = random();
    check_equal(make_index(lengths, {first, count}, sequence_length, samples, seed),
                reference_index(lengths, first, count, sequence_length, samples, seed), lengths);
  }
}

TEST_CASE("memory of the order: 4 bytes a sample that is used, 4.25 a document and epoch", "[order]") {
  const std::vector<int32_t> lengths(64000, 10);
  const GptPlan plan = plan_gpt_index(lengths, {0, 64000}, 16, 1000, "a");
  CHECK(plan.total == 39999);
  CHECK(plan.bytes().arrays == 64000 * 4 + 2000 * 8 + 1000 * 4);
  CHECK(plan.bytes().built == 64000 * 4 + 2000 * 8 + 39999 * 4);
  CHECK(plan.bytes().scratch == 0);  // fits a block
  CHECK(plan.build_memory() == 64000 * 4);
  CHECK(plan.bytes({.block = 1024}).scratch == 64000 * 4);
  CHECK(plan.build_memory({.block = 1024, .threads = 1}) == 5 * 1024 * 4);
  CHECK(plan.build_memory({.block = 1024, .threads = 3}) == 6 * 1024 * 4);
  const GptIndex index(plan, lengths, 1);
  CHECK(index.documents().size_bytes() + index.shuffle().size_bytes() + 2000 * 8 ==
        static_cast<size_t>(plan.bytes().arrays));
}

TEST_CASE("orders of 15 T tokens", "[order]") {
  constexpr int64_t trillion = 1'000'000'000'000;
  // One source with documents of 8,000 tokens.
  const GptPlan one = plan_gpt_index(15 * trillion, {0, 1'875'000'000}, 8192, 1'831'000'000, "a");
  CHECK(one.epochs == 1);
  CHECK(one.total == 1'831'054'687);
  CHECK(one.bytes().arrays == 1'875'000'000 * 4ll + 58'593'750 * 8ll + 1'831'000'000 * 4ll);
  CHECK(one.bytes().built == one.bytes().arrays + 54'687 * 4);
  CHECK(one.bytes().scratch == 1'875'000'000 * 4ll);
  CHECK(one.build_memory() == int64_t{256} << 20);
  // Its documents in two epochs still fit 32 bits, in three no more.
  CHECK(plan_gpt_index(15 * trillion, {0, 1'875'000'000}, 16384, 1'831'000'000, "a").bytes().arrays ==
        2 * (1'875'000'000 * 4ll) + 117'187'500 * 8ll + 1'831'000'000 * 4ll);
  const auto error = [](int64_t tokens, int64_t documents, int64_t length, int64_t samples) {
    return error_of([&] { plan_gpt_index(tokens, {0, documents}, length, samples, "a"); });
  };
  CHECK(error(15 * trillion, 1'875'000'000, 16384, 2'000'000'000).code == 78);
  // Documents of 1,000 tokens: 1.5e10 of them must be several sources.
  const auto many = error(15 * trillion, 15'000'000'000, 8192, 1'831'000'000);
  CHECK(many.code == 65);
  CHECK(contains(many.text, "15000000000 sequences; expected at most 2147483647. Fix: divide"));
  CHECK(error(15 * trillion, 2'147'483'648, 8192, 1'831'000'000).code == 65);
  CHECK(error(15 * trillion, 2'147'483'647, 8192, 1'831'000'000).code == 0);
  // The largest number of samples, and one more.
  const int64_t most_tokens = 4'294'967'294 * 8192 + 1;
  CHECK(error(most_tokens, 1'000'000, 8192, 4'294'967'294).code == 0);
  CHECK(error(most_tokens, 1'000'000, 8192, 4'294'967'295).code == 78);
  CHECK(error(most_tokens + 8192, 1'000'000, 8192, 1).code == 78);  // all samples are shuffled
  // 50 sources: the documents are the largest part.
  const int64_t request = blend_request(0.02, 1'831'000'000);
  CHECK(request == 36'803'100);
  const GptPlan source = plan_gpt_index(3 * trillion / 10, {0, 300'000'000}, 8192, request, "a");
  CHECK(source.epochs == 2);  // 0.5 % more than its share
  CHECK(source.bytes().arrays == 2 * 300'000'000 * 4ll + 18'750'000 * 8ll + request * 4);
  CHECK(BlendIndex::bytes(50, 1'831'000'000) == 1'831'000'000 * 2ll + 447'022 * 50 * 8ll);
}

TEST_CASE("an empty part or too many samples for an index are errors", "[order]") {
  const std::vector<int32_t> lengths{0, 0, 3};
  const auto code = [&](const SplitPart& part, int64_t sequence_length, int64_t samples) {
    return error_of([&] { plan_gpt_index(lengths, part, sequence_length, samples, "a"); }).code;
  };
  CHECK(code({0, 2}, 8, 1) == 65);
  CHECK(code({1, 1}, 8, 1) == 65);
  CHECK(code({0, 3}, 1 << 20, int64_t{1} << 31) == 78);
  CHECK(code({0, 3}, 1 << 30, INT64_MAX / 2) == 78);
}

TEST_CASE("too few documents for the shares: the tokens are split", "[order]") {
  const SplitShares shares{95, 5};
  const auto bounds = [&](const std::vector<int32_t>& lengths, Split split, const SplitShares& s) {
    const SplitPart p = split_part(s, split, lengths);
    return std::vector<int64_t>{p.first, p.last, p.skip, p.drop, p.tokens(lengths)};
  };
  using V = std::vector<int64_t>;
  // One document.
  CHECK(bounds({1000}, Split::train, shares) == V{0, 1, 0, 50, 950});
  CHECK(bounds({1000}, Split::validation, shares) == V{0, 1, 950, 0, 50});
  CHECK(bounds({1000}, Split::test, shares) == V{0, 0, 0, 0, 0});
  // A handful: the boundary lies where the tokens say, empty documents do no harm.
  CHECK(bounds({0, 500, 0, 500, 0}, Split::train, SplitShares{1, 1}) == V{0, 2, 0, 0, 500});
  CHECK(bounds({10, 900, 90}, Split::train, shares) == V{0, 3, 0, 50, 950});
  CHECK(bounds({10, 900, 90}, Split::validation, shares) == V{2, 3, 40, 0, 50});
  CHECK(bounds({50, 100}, Split::train, SplitShares{1, 9, 90}) == V{0, 1, 0, 48, 2});
  CHECK(bounds({50, 100}, Split::validation, SplitShares{1, 9, 90}) == V{0, 1, 2, 35, 13});
  // Enough documents, or no share: whole documents as before.
  const std::vector<int32_t> twenty(20, 10);
  CHECK(bounds(twenty, Split::validation, shares) == V{19, 20, 0, 0, 10});
  CHECK(bounds({1000}, Split::train, SplitShares{1}) == V{0, 1, 0, 0, 1000});
  CHECK(bounds({1000}, Split::validation, SplitShares{1}) == V{1, 1, 0, 0, 0});
  // Test alone may be empty: Megatron-LM trains with such files.
  CHECK(bounds(std::vector<int32_t>(100, 5), Split::validation, SplitShares{969, 30, 1}) ==
        V{97, 100, 0, 0, 15});
}

TEST_CASE("split bounds round as Python does", "[order]") {
  const auto bounds = [](const SplitShares& shares, int64_t n) {
    const auto train = split_bounds(shares, Split::train, n),
               valid = split_bounds(shares, Split::validation, n);
    const auto test = split_bounds(shares, Split::test, n);
    CHECK(train.second == valid.first);
    CHECK(valid.second == test.first);
    return std::vector<int64_t>{train.first, train.second, valid.second, test.second};
  };
  CHECK(bounds({969, 30, 1}, 1000) == std::vector<int64_t>{0, 969, 999, 1000});
  CHECK(bounds({969, 30, 1}, 50) == std::vector<int64_t>{0, 48, 50, 50});
  CHECK(bounds({1, 1}, 5) == std::vector<int64_t>{0, 2, 5, 5});
  CHECK(bounds({1, 1, 2}, 10) == std::vector<int64_t>{0, 2, 5, 10});
  CHECK(bounds({90, 5, 5}, 10) == std::vector<int64_t>{0, 9, 10, 10});
  for (const SplitShares& bad :
       {SplitShares{0, 0, 0}, SplitShares{1, -1}, SplitShares{NAN}, SplitShares{INFINITY}})
    CHECK(error_of([&] { split_bounds(bad, Split::train, 1); }).code == 78);
}

// build_exhaustive_blending_indices of Megatron-LM's helpers.cpp: a blend without weights.
std::vector<std::pair<size_t, int64_t>> exhaustive_blend(const std::vector<int64_t>& sizes) {
  const auto total = static_cast<double>(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}));
  std::vector<int64_t> taken(sizes.size(), 0);
  std::set<size_t> unspent;
  for (size_t d = 0; d < sizes.size(); ++d) unspent.insert(d);
  std::vector<std::pair<size_t, int64_t>> order;
  while (!unspent.empty()) {
    const double k = std::max(static_cast<double>(order.size()), 1.0);
    double most = std::numeric_limits<double>::lowest();
    size_t best = 0;
    for (const size_t d : unspent) {
      const double error = static_cast<double>(sizes[d]) / total * k - static_cast<double>(taken[d]);
      if (error > most) most = error, best = d;
    }
    order.emplace_back(best, taken[best]);
    if (++taken[best] == sizes[best]) unspent.erase(best);
  }
  return order;
}

TEST_CASE("a blend follows its weights as Megatron's does", "[order]") {
  const auto blend = [](const std::vector<double>& weights, int64_t samples) {
    const std::vector<int64_t> plenty(weights.size(), samples);
    return BlendIndex(normalized_weights(weights), plenty, samples);
  };
  const auto datasets = [](const BlendIndex& index) {
    std::vector<size_t> all;
    for (int64_t k = 0; k < index.samples(); ++k) all.push_back(index.at(k).dataset);
    return all;
  };
  const auto samples = [](const BlendIndex& index) {
    std::vector<int64_t> all;
    for (int64_t k = 0; k < index.samples(); ++k) all.push_back(index.at(k).sample);
    return all;
  };
  const BlendIndex a = blend({5, 3, 2}, 20);
  CHECK(datasets(a) == std::vector<size_t>{0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1, 2, 0, 1, 0, 2, 0, 1, 0});
  CHECK(samples(a) == std::vector<int64_t>{0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 5, 3, 2, 6, 4, 7, 3, 8, 5, 9});
  CHECK(blend_request(0.5, 100) == 51);
  CHECK(blend_request(1.0 / 9, 100) == 13);
  const BlendIndex b = blend({1, 1, 7}, 20);
  CHECK(datasets(b) == std::vector<size_t>{2, 0, 2, 2, 1, 2, 2, 2, 2, 0, 2, 2, 2, 1, 2, 2, 2, 2, 0, 2});
  CHECK(error_of([] { normalized_weights(std::vector<double>{1, 0}); }).code == 78);
}

TEST_CASE("a blend without weights uses up every dataset as Megatron's does", "[order]") {
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{1, 1}, {7, 1, 30}, {12000, 3, 5001}, std::vector<int64_t>(700, 20)}) {
    const auto expected = exhaustive_blend(sizes);
    const std::vector<double> weights(sizes.begin(), sizes.end());
    const BlendIndex index(normalized_weights(weights), sizes, static_cast<int64_t>(expected.size()));
    for (size_t k = 0; k < expected.size(); ++k) {
      const BlendIndex::Sample sample = index.at(static_cast<int64_t>(k));
      REQUIRE(sample.dataset == expected[k].first);
      REQUIRE(sample.sample == expected[k].second);
    }
  }
}

TEST_CASE("sources without weights come in Megatron's order", "[order]") {
  const TemporaryDirectory dir;
  // Tokens name their file and place. In proportion to tokens, or to documents, the order is another one.
  const std::vector<std::vector<int32_t>> lengths{
      {30, 4, 61, 9, 9, 80, 33}, {100, 40, 3, 17, 60}, {200, 1, 70}};
  DatasetOptions options;
  for (size_t d = 0; d < lengths.size(); ++d) {
    const std::string prefix = dir / fmt::format("d{}", d);
    options.sources.push_back({prefix, {}, {}});
    IndexedDatasetWriter writer(prefix, 60000);
    int32_t next = static_cast<int32_t>(d) * 1000;
    for (const int32_t length : lengths[d]) {
      std::vector<int32_t> tokens(static_cast<size_t>(length));
      std::iota(tokens.begin(), tokens.end(), next);
      next += length;
      writer.add_sequence(tokens);
      writer.end_document();
    }
    writer.finish();
  }
  constexpr int64_t sample_length = 8;
  options.sequence_length = sample_length;
  options.vocab_size = 60000;
  options.seed = 77;
  std::vector<int64_t> sizes;
  std::vector<ReferenceIndex> indices;
  for (const auto& of : lengths) {
    indices.push_back(
        reference_index(of, 0, static_cast<int64_t>(of.size()), sample_length, -1, options.seed));
    sizes.push_back(static_cast<int64_t>(indices.back().shuffle.size()));
  }
  const auto order = exhaustive_blend(sizes);
  CHECK(samples_of_one_epoch(options) == static_cast<int64_t>(order.size()));

  for (const size_t wanted : {size_t{5}, order.size() - 3, order.size()}) {
    options.samples = static_cast<int64_t>(wanted);
    const auto dataset = open_token_dataset(options);
    REQUIRE(dataset->samples() == options.samples);
    for (size_t k = 0; k < wanted; ++k) {
      const auto [d, sample] = order[k];
      std::vector<int32_t> stream;
      for (const int32_t document : indices[d].documents) {
        const auto begin = std::accumulate(lengths[d].begin(), lengths[d].begin() + document, int32_t{0});
        for (int32_t t = 0; t < lengths[d][document]; ++t)
          stream.push_back(static_cast<int32_t>(d) * 1000 + begin + t);
      }
      const auto at = stream.begin() + indices[d].shuffle[sample] * sample_length;
      std::vector<int32_t> row(sample_length + 1);
      dataset->read(static_cast<int64_t>(k), row);
      REQUIRE(row == std::vector<int32_t>(at, at + sample_length + 1));
    }
  }

  // More than one epoch: the sources repeat in the same proportions.
  options.samples = 3 * static_cast<int64_t>(order.size());
  const auto dataset = open_token_dataset(options);
  std::vector<int64_t> drawn(lengths.size());
  std::vector<int32_t> row(sample_length + 1);
  for (int64_t k = 0; k < options.samples; ++k) {
    dataset->read(k, row);
    ++drawn[row[0] / 1000];
  }
  for (size_t d = 0; d < sizes.size(); ++d) CHECK(std::abs(drawn[d] - 3 * sizes[d]) <= 1);

  // A source that is too small for a sample is refused by name.
  options.sequence_length = 250;
  const auto caught = error_of([&] { open_token_dataset(options); });
  CHECK(caught.code == 78);
  CHECK(contains(caught.text, "d0 is too small: no complete sample of 251 tokens"));
}

TEST_CASE("the planned memory is that of the parts", "[order]") {
  const TemporaryDirectory dir;
  DatasetOptions options;
  for (const char* name : {"a", "b"}) {
    IndexedDatasetWriter writer(dir / name, 100);
    for (int d = 0; d < 50; ++d) {
      writer.add_sequence(std::vector<int32_t>(20, 1));
      writer.end_document();
    }
    writer.finish();
    options.sources.push_back({dir / name, 1.0, {}});
  }
  options.sequence_length = 16;
  options.vocab_size = 100;
  options.samples = 200;  // 2 epochs of 62 samples each
  const DatasetMemory blend = plan_dataset_memory(std::span(&options, 1));
  const GptPlan plan =
      plan_gpt_index(std::vector<int32_t>(50, 20), {0, 50}, 16, blend_request(0.5, 200), "a");
  CHECK(plan.epochs == 2);
  const OrderBytes bytes = plan.bytes();
  CHECK(blend.order == 2 * bytes.arrays + BlendIndex::bytes(2, 200));
  CHECK(blend.peak == blend.order + bytes.built - bytes.arrays);
  CHECK(blend.files >= 2 * 50 * 4);
  options.orders = std::make_shared<OrderFiles>(std::vector<std::string>{}, bytes.arrays);
  const DatasetMemory stored = plan_dataset_memory(std::span(&options, 1));
  CHECK(stored.shared == 2 * bytes.arrays);
  CHECK(stored.order == BlendIndex::bytes(2, 200));          // less than the smallest file
  CHECK(stored.peak == stored.order + plan.build_memory());  // in the process that builds them
  options.orders.reset();
  options.sources.pop_back();
  options.samples = 30;
  open_sources(options);
  std::vector<DatasetOptions> two{options, options};
  const DatasetMemory memory = plan_dataset_memory(two);
  CHECK(memory.order == 2 * (50 * 4 + 2 * 8 + 30 * 4));
  CHECK(memory.files == options.sources[0].file->memory_bytes());
}
