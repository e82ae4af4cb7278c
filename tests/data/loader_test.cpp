#include "apps/data/loader.h"

#include <numeric>
#include <sstream>

#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::data;
using nrl::test::Caught;
using nrl::test::contains;
using nrl::test::error_of;
using nrl::test::TemporaryDirectory;

namespace {

// Documents of different lengths whose tokens count up through the whole file.
void write_counting(const std::string& prefix, int documents, int32_t base = 0) {
  IndexedDatasetWriter writer(prefix, 60000);
  int32_t next = base;
  for (int d = 0; d < documents; ++d) {
    std::vector<int32_t> tokens(static_cast<size_t>(d * 5 % 13));
    std::iota(tokens.begin(), tokens.end(), next);
    next += static_cast<int32_t>(tokens.size());
    writer.add_sequence(tokens);
    writer.end_document();
  }
  writer.finish();
}

DatasetOptions options_for(const std::vector<std::string>& prefixes, int64_t samples) {
  DatasetOptions options;
  for (const std::string& prefix : prefixes) options.sources.push_back({prefix, 1.0, {}});
  options.sequence_length = 16;
  options.samples = samples;
  options.vocab_size = 60000;
  return options;
}

using Row = std::vector<int32_t>;

// sample number -> tokens and last target, as all ranks of a layout see them, over `steps` steps.
std::vector<Row> rows_of(const TokenDataset& dataset, LoaderOptions options,
                         std::vector<int64_t>* order = nullptr) {
  std::vector<Row> rows(static_cast<size_t>(options.steps * options.global_batch()));
  const int64_t first = options.consumed_samples;
  for (int64_t rank = 0; rank < options.data_parallel_size; ++rank) {
    options.data_parallel_rank = rank;
    BatchLoader loader(dataset, options);
    for (int64_t n = 0; n < options.steps * options.accumulation; ++n) {
      const HostMicroBatch& batch = loader.next();
      CHECK(batch.step == n / options.accumulation);
      const auto length = static_cast<size_t>(dataset.sequence_length());
      for (size_t k = 0; k < batch.samples.size(); ++k) {
        const auto t = batch.tokens.begin() + static_cast<ptrdiff_t>(k * length);
        const auto y = batch.targets.begin() + static_cast<ptrdiff_t>(k * length);
        Row row(t, t + static_cast<ptrdiff_t>(length));
        REQUIRE(std::equal(row.begin() + 1, row.end(), y));
        row.push_back(y[static_cast<ptrdiff_t>(length) - 1]);
        REQUIRE(rows[batch.samples[k] - first].empty());
        rows[batch.samples[k] - first] = row;
        if (order) order->push_back(batch.samples[k]);
      }
    }
  }
  return rows;
}

}  // namespace

TEST_CASE("an epoch's samples are the shuffled documents, cut with one token of overlap", "[loader]") {
  const TemporaryDirectory dir;
  write_counting(dir / "d", 40);
  const IndexedDataset file(dir / "d");
  const int64_t epoch = (file.tokens() - 1) / 16;
  const auto dataset = open_token_dataset(options_for({dir / "d"}, epoch));
  const GptIndex index(plan_gpt_index(file.lengths(), {0, 40}, 16, epoch, "d"), file.lengths(), 1234);
  Row stream;
  for (const int32_t s : index.documents()) {
    Row tokens(static_cast<size_t>(file.lengths()[s]));
    file.read(s, 0, tokens);
    stream.insert(stream.end(), tokens.begin(), tokens.end());
  }
  REQUIRE(dataset->samples() == epoch);
  for (int64_t i = 0; i < dataset->samples(); ++i) {
    Row row(17);
    dataset->read(i, row);
    const auto at = stream.begin() + index.shuffle()[i] * 16;
    CHECK(row == Row(at, at + 17));
  }
}

TEST_CASE("a single document is split by tokens, and nothing is lost", "[loader]") {
  const TemporaryDirectory dir;
  IndexedDatasetWriter writer(dir / "d", 60000);
  Row all(1000);
  std::iota(all.begin(), all.end(), 0);
  writer.add_sequence(all);
  writer.end_document();
  writer.finish();
  auto options = options_for({dir / "d"}, 0);
  options.split = {90, 10};
  std::vector<int> seen(1000, 0);
  for (const Split part : {Split::train, Split::validation}) {
    options.part = part;
    options.samples = samples_of_one_epoch(options);
    CHECK(options.samples == (part == Split::train ? 56 : 6));
    const auto dataset = open_token_dataset(options);
    CHECK(contains(dataset->describe(), "split by tokens"));
    for (int64_t i = 0; i < dataset->samples(); ++i) {
      Row row(17);
      dataset->read(i, row);
      for (size_t t = 0; t < 17; ++t) {
        CHECK(row[t] == row[0] + static_cast<int32_t>(t));
        CHECK((row[t] < 900) == (part == Split::train));
        if (t < 16) ++seen[row[t]];
      }
    }
  }
  CHECK(std::accumulate(seen.begin(), seen.end(), 0) == 62 * 16);
  CHECK(*std::max_element(seen.begin(), seen.end()) == 1);
}

TEST_CASE("what is read does not depend on ranks, accumulation or threads", "[loader]") {
  const TemporaryDirectory dir;
  write_counting(dir / "a", 40);
  write_counting(dir / "b", 30, 1000);
  auto options = options_for({dir / "a", dir / "b"}, 8 * 9);
  options.sources[1].weight = 2.5;
  const auto dataset = open_token_dataset(options);
  LoaderOptions one{.micro_batch = 8, .consumed_samples = 8, .steps = 6, .threads = 0};
  const auto expected = rows_of(*dataset, one);
  CHECK(std::find(expected.begin(), expected.end(), Row{}) == expected.end());
  for (const int dp : {1, 2, 4})
    for (const int micro_batch : {1, 2})
      for (const int threads : {0, 1, 3}) {
        const LoaderOptions layout{.micro_batch = micro_batch,
                                   .data_parallel_size = dp,
                                   .accumulation = 8 / dp / micro_batch,
                                   .consumed_samples = 8,
                                   .steps = 6,
                                   .threads = threads,
                                   .prefetch = 2};
        CHECK(rows_of(*dataset, layout) == expected);
      }
}

TEST_CASE("samples keep their documents apart, whatever the layout", "[loader]") {
  const TemporaryDirectory dir;
  write_counting(dir / "d", 40);
  auto options = options_for({dir / "d"}, 8 * 3);
  // Some token of nearly every sample, by the place of the sample alone.
  options.documents = {true, true, true, 0};
  const auto every = open_token_dataset(options);
  Row first(17);
  every->read(5, first);
  options.documents.end_token = first[3];
  const auto dataset = open_token_dataset(options);
  Sample expected;
  make_sample(first, options.documents, expected);
  REQUIRE(expected.segments == Row{0, 4});
  int64_t cut = 0;
  for (const int micro_batch : {1, 2, 8})
    for (const int threads : {0, 2}) {
      BatchLoader loader(
          *dataset,
          {.micro_batch = micro_batch, .accumulation = 8 / micro_batch, .steps = 3, .threads = threads});
      for (int n = 0; n < 24 / micro_batch; ++n) {
        const HostMicroBatch& batch = loader.next();
        size_t segment = 0;
        for (size_t k = 0; k < batch.samples.size(); ++k) {
          Row ids(17);
          dataset->read(batch.samples[k], ids);
          make_sample(ids, options.documents, expected);
          const auto at = static_cast<ptrdiff_t>(16 * k);
          CHECK(std::equal(expected.ids.begin(), expected.ids.end(), batch.tokens.begin() + at));
          CHECK(std::equal(expected.targets.begin(), expected.targets.end(), batch.targets.begin() + at));
          CHECK(
              std::equal(expected.positions.begin(), expected.positions.end(), batch.positions.begin() + at));
          for (const int32_t row : expected.segments)
            CHECK(batch.bounds.at(segment++) == row + 16 * static_cast<int32_t>(k));
          cut += expected.segments.size() > 1;
        }
        CHECK(segment + 1 == batch.bounds.size());
        CHECK(batch.loss_tokens ==
              16 * micro_batch - std::count(batch.targets.begin(), batch.targets.end(), -1));
        CHECK(batch.bounds.back() == 16 * micro_batch);
      }
    }
  CHECK(cut == 6);
}

TEST_CASE("microbatches take Megatron's slices", "[loader]") {
  const TemporaryDirectory dir;
  write_counting(dir / "d", 40);
  const auto dataset = open_token_dataset(options_for({dir / "d"}, 100));
  std::vector<int64_t> order;
  rows_of(*dataset, {.micro_batch = 2, .data_parallel_size = 2, .accumulation = 2, .steps = 2}, &order);
  CHECK(order == std::vector<int64_t>{0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15});
}

TEST_CASE("a loader can be left at any time, and stops at the end", "[loader]") {
  const TemporaryDirectory dir;
  write_counting(dir / "d", 40);
  const auto dataset = open_token_dataset(options_for({dir / "d"}, 100));
  LoaderOptions options{.micro_batch = 2, .steps = 10, .threads = 2};
  for (int taken = 0; taken < 5; ++taken) {
    BatchLoader loader(*dataset, options);
    for (int i = 0; i < taken; ++i) CHECK(loader.next().samples[0] == 2 * i);
  }
  BatchLoader loader(*dataset, options);
  for (int i = 0; i < 10; ++i) loader.next();
  CHECK(error_of([&] { loader.next(); }).code == 70);
  options.steps = 1000;
  CHECK(error_of([&] { BatchLoader too_long(*dataset, options); }).code == 78);
}

TEST_CASE("a token outside the vocabulary stops the run with its place", "[loader]") {
  const TemporaryDirectory dir;
  write_counting(dir / "d", 40);
  auto options = options_for({dir / "d"}, 10);
  options.vocab_size = 200;  // the file has 234 tokens
  const auto dataset = open_token_dataset(options);
  for (const int threads : {0, 2}) {
    BatchLoader loader(*dataset, {.micro_batch = 1, .steps = 10, .threads = threads});
    const Caught caught = error_of([&] {
      for (int i = 0; i < 10; ++i) loader.next();
    });
    CHECK(caught.code == 65);
    CHECK(contains(caught.text, "d.bin: token 2"));
    CHECK(contains(caught.text, "document 3"));
    CHECK(contains(caught.text, "not below vocab_size 200"));
  }
}

TEST_CASE("data show prints the samples of the steps asked for", "[loader]") {
  const TemporaryDirectory dir;
  write_counting(dir / "d", 40);
  auto options = options_for({dir / "d"}, 10);
  options.sequence_length = 2;
  const auto dataset = open_token_dataset(options);
  std::ostringstream out;
  show_samples(*dataset, 2, 2, 3, out);
  Row a(3), b(3);
  dataset->read(2, a);
  dataset->read(3, b);
  CHECK(out.str() == fmt::format("{{\"step\":2,\"sample\":2,\"tokens\":[{},{},{}]}}\n"
                                 "{{\"step\":2,\"sample\":3,\"tokens\":[{},{},{}]}}\n",
                                 a[0], a[1], a[2], b[0], b[1], b[2]));
  CHECK(error_of([&] { show_samples(*dataset, 2, 1, 5000, out); }).code == 64);
  out.str("");
  options.documents = {true, true, true, a[0]};
  show_samples(*open_token_dataset(options), 2, 2, 3, out);
  CHECK(contains(out.str(), "\"positions\":[0,0],\"segments\":[0,1],\"no_loss\":[0]}\n"));
  CHECK(contains(out.str(), "\"positions\":[0,1],\"segments\":[0],\"no_loss\":[]}\n"));
}
