// Microbatches of examples: their order, packing, padding and rows.
#include "apps/data/examples/example_batches.h"

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/philox.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::data;
using namespace nrl::test;

namespace {

/// Examples whose tokens say where they come from. The second token and every third one have a loss.
class NumberedExamples : public Examples {
 public:
  explicit NumberedExamples(std::vector<std::vector<int>> tokens, int sequences = 1) : sequences_(sequences) {
    for (size_t e = 0; e < tokens.size(); ++e)
      for (size_t s = 0; s < tokens[e].size(); ++s) {
        std::vector<int32_t>& ids = ids_.emplace_back();
        for (int t = 0; t < tokens[e][s]; ++t) ids.push_back(static_cast<int32_t>((e * 2 + s) * 1000) + t);
      }
  }
  int64_t size() const override { return static_cast<int64_t>(ids_.size()) / sequences_; }
  int sequences_per_example() const override { return sequences_; }
  SequenceLength length(int64_t example, int sequence) const override {
    SequenceLength length{.tokens = static_cast<int32_t>(ids(example, sequence).size())};
    for (int64_t t = 0; t < length.tokens; ++t) length.loss_tokens += in_loss(example, sequence, t);
    return length;
  }
  std::span<const int32_t> ids(int64_t example, int sequence) const override {
    return ids_[static_cast<size_t>(example * sequences_ + sequence)];
  }
  bool in_loss(int64_t /*example*/, int /*sequence*/, int64_t token) const override { return token % 3 == 1; }
  std::string where(int64_t example) const override { return std::to_string(example); }
  bool rendered() const override { return false; }
  std::string describe() const override { return ""; }

 private:
  int sequences_;
  std::vector<std::vector<int32_t>> ids_;
};

constexpr int most_tokens = 17;

// Sequences of 1 to 17 tokens.
std::shared_ptr<const Examples> some_examples(int count, int sequences = 1) {
  const PhiloxStream random(3, 0);
  std::vector<std::vector<int>> tokens;
  uint64_t n = 0;
  for (int e = 0; e < count; ++e) {
    tokens.emplace_back();
    for (int s = 0; s < sequences; ++s)
      tokens.back().push_back(1 + static_cast<int>(random.bits(n++) % most_tokens));
  }
  return std::make_shared<NumberedExamples>(std::move(tokens), sequences);
}

/// A sequence in a microbatch.
struct Placed {
  int64_t example;
  int sequence;
  auto operator<=>(const Placed&) const = default;
};
using Placements = std::vector<Placed>;

// The sequences of a microbatch, whose rows must be theirs.
Placements placements(const Examples& examples, const HostMicroBatch& batch, int64_t rows) {
  Placements found;
  const auto all = static_cast<int64_t>(batch.tokens.size());
  REQUIRE(batch.targets.size() == batch.tokens.size());
  REQUIRE(batch.positions.size() == batch.tokens.size());
  REQUIRE(batch.bounds.front() == 0);
  REQUIRE(batch.bounds.back() == all);
  int64_t loss_tokens = 0;
  bool right = true;
  for (size_t i = 0; i + 1 < batch.bounds.size(); ++i) {
    const int64_t begin = batch.bounds[i], end = batch.bounds[i + 1];
    REQUIRE(begin < end);
    for (int64_t row = begin; row < end; ++row)
      right = right && batch.positions[static_cast<size_t>(row)] == row - begin;
    if (begin >= rows) {  // padding
      for (int64_t row = begin; row < end; ++row)
        right = right && batch.tokens[static_cast<size_t>(row)] == 0 &&
                batch.targets[static_cast<size_t>(row)] < 0;
      continue;
    }
    const int32_t number = batch.tokens[static_cast<size_t>(begin)] / 1000;
    const Placed placed{.example = number / 2, .sequence = number % 2};
    const auto ids = examples.ids(placed.example, placed.sequence);
    REQUIRE(end - begin == std::max<int64_t>(static_cast<int64_t>(ids.size()) - 1, 1));
    for (int64_t row = begin; row < end; ++row) {
      const int64_t t = row - begin;
      const bool target = t + 1 < static_cast<int64_t>(ids.size()) && (t + 1) % 3 == 1;
      right = right && batch.tokens[static_cast<size_t>(row)] == ids[static_cast<size_t>(t)] &&
              batch.targets[static_cast<size_t>(row)] == (target ? ids[static_cast<size_t>(t) + 1] : -1);
      loss_tokens += target;
    }
    found.push_back(placed);
  }
  CHECK(right);
  CHECK(batch.loss_tokens == loss_tokens);
  return found;
}

// The sequences of all microbatches of the next step.
std::vector<Placements> step_of(ExampleBatches& batches, const Examples& examples) {
  const int64_t count = batches.begin_step().microbatches;
  std::vector<Placements> all;
  for (int64_t i = 0; i < count; ++i) {
    const HostMicroBatch& batch = batches.next();
    CHECK(batch.index == i);
    all.push_back(placements(examples, batch, batches.rows()));
  }
  return all;
}

Placements joined(const std::vector<Placements>& parts) {
  Placements all;
  for (const Placements& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

// One example per microbatch, in the order of the step.
ExampleBatchOptions one_by_one(int64_t global_batch) {
  return {.global_batch = global_batch,
          .seed = 5,
          .packing = {.algorithm = PackAlgorithm::none, .capacity = 64},
          .most_microbatches = global_batch,
          .most_rows = most_tokens};
}

// Microbatches of 40 rows on `ranks` ranks.
ExampleBatchOptions packed(PackAlgorithm algorithm, int64_t ranks, int rank) {
  return {.global_batch = 12,
          .seed = 5,
          .packing = {.algorithm = algorithm, .capacity = 40, .ranks = ranks},
          .rank = rank,
          .most_microbatches = 12,
          .most_rows = most_tokens};
}

// The examples of `steps` steps in order.
std::vector<int64_t> order_of(const ExampleBatchOptions& options, int64_t examples, int steps) {
  const auto set = some_examples(static_cast<int>(examples));
  ExampleBatches batches(set, options);
  std::vector<int64_t> order;
  for (int i = 0; i < steps; ++i)
    for (const Placed& placed : joined(step_of(batches, *set))) order.push_back(placed.example);
  return order;
}

constexpr PackAlgorithm algorithms[] = {PackAlgorithm::modified_first_fit_decreasing,
                                        PackAlgorithm::first_fit_decreasing,
                                        PackAlgorithm::first_fit_shuffle,
                                        PackAlgorithm::concatenative,
                                        PackAlgorithm::sorted,
                                        PackAlgorithm::none};

}  // namespace

TEST_CASE("example batches: every epoch has each example once, in an order of its own", "[batches]") {
  const std::vector<int64_t> order = order_of(one_by_one(5), 7, 7);  // five epochs, across steps
  REQUIRE(order.size() == 35);
  std::set<std::vector<int64_t>> epochs;
  for (size_t e = 0; e < 5; ++e) {
    const auto begin = order.begin() + static_cast<ptrdiff_t>(e) * 7;
    const std::vector<int64_t> epoch(begin, begin + 7);
    CHECK(std::set(epoch.begin(), epoch.end()).size() == 7);
    epochs.insert(epoch);
  }
  CHECK(epochs.size() == 5);
  CHECK(order == order_of(one_by_one(5), 7, 7));
  CHECK(order == order_of(one_by_one(7), 7, 5));  // whatever the batch
  ExampleBatchOptions other = one_by_one(5);
  other.seed = 6;
  CHECK(order != order_of(other, 7, 7));
}

TEST_CASE("example batches: without shuffling the order is the set's, again and again", "[batches]") {
  ExampleBatchOptions options = one_by_one(4);
  options.shuffle = false;
  CHECK(order_of(options, 3, 2) == std::vector<int64_t>{0, 1, 2, 0, 1, 2, 0, 1});
}

TEST_CASE("example batches: without repetition the last step has the rest", "[batches]") {
  const auto set = some_examples(7);
  ExampleBatchOptions options = one_by_one(5);
  options.repeat = false;
  options.shuffle = false;
  ExampleBatches batches(set, options);
  CHECK(step_of(batches, *set).size() == 5);
  CHECK(joined(step_of(batches, *set)) == Placements{{5, 0}, {6, 0}});
  CHECK(contains(error_of([&] { batches.begin_step(); }).text, "no examples are left"));
}

TEST_CASE("example batches: the sequences of a pair are neighbors in one microbatch, the chosen one first",
          "[batches]") {
  const auto set = some_examples(30, 2);
  for (const PackAlgorithm algorithm : algorithms)
    for (int rank = 0; rank < 2; ++rank) {
      CAPTURE(static_cast<int>(algorithm), rank);
      ExampleBatches batches(set, packed(algorithm, 2, rank));
      for (int i = 0; i < 4; ++i)
        for (const Placements& microbatch : step_of(batches, *set)) {
          REQUIRE(microbatch.size() % 2 == 0);
          for (size_t p = 0; p < microbatch.size(); p += 2) {
            CHECK(microbatch[p].example == microbatch[p + 1].example);
            CHECK(microbatch[p].sequence == 0);
            CHECK(microbatch[p + 1].sequence == 1);
          }
        }
    }
}

TEST_CASE("example batches: several ranks have exactly the examples of the step together", "[batches]") {
  for (const int sequences : {1, 2}) {
    const auto set = some_examples(30, sequences);
    for (const PackAlgorithm algorithm : algorithms)
      for (const int64_t ranks : {1, 2, 3}) {
        CAPTURE(sequences, static_cast<int>(algorithm), ranks);
        ExampleBatchOptions plain = one_by_one(12);
        ExampleBatches order(set, plain);
        std::vector<ExampleBatches> of_ranks;
        for (int64_t rank = 0; rank < ranks; ++rank)
          of_ranks.emplace_back(set, packed(algorithm, ranks, static_cast<int>(rank)));
        for (int step = 0; step < 5; ++step) {
          Placements expected = joined(step_of(order, *set)), found;
          int64_t rows = 0, loss_tokens = 0;
          ExampleStep first;
          for (ExampleBatches& batches : of_ranks) {
            const ExampleStep counts = batches.begin_step();
            if (&batches == &of_ranks[0]) first = counts;
            CHECK(counts.examples == 12);
            CHECK(counts.microbatches == first.microbatches);
            CHECK(counts.rows == first.rows);
            CHECK(counts.loss_tokens == first.loss_tokens);
            CHECK(counts.imbalance == first.imbalance);
            for (int64_t i = 0; i < counts.microbatches; ++i) {
              const HostMicroBatch& batch = batches.next();
              const Placements part = placements(*set, batch, batches.rows());
              found.insert(found.end(), part.begin(), part.end());
              if (!part.empty()) rows += batches.rows();
              loss_tokens += batch.loss_tokens;
              CHECK(static_cast<int64_t>(batch.tokens.size()) <= 40);
            }
          }
          std::sort(expected.begin(), expected.end());
          std::sort(found.begin(), found.end());
          CHECK(found == expected);
          CHECK(rows == first.rows);
          CHECK(loss_tokens == first.loss_tokens);
        }
      }
  }
}

TEST_CASE("example batches: a run that resumes has the steps of an uninterrupted one", "[batches]") {
  const auto set = some_examples(31, 2);
  for (const PackAlgorithm algorithm : algorithms) {
    CAPTURE(static_cast<int>(algorithm));
    ExampleBatchOptions options = packed(algorithm, 2, 1);
    ExampleBatches whole(set, options);
    for (int i = 0; i < 4; ++i) (void)step_of(whole, *set);
    options.consumed_samples = 4 * options.global_batch;  // in the second epoch
    ExampleBatches resumed(set, options);
    for (int step = 0; step < 4; ++step) {
      const int64_t count = whole.begin_step().microbatches;
      REQUIRE(resumed.begin_step().microbatches == count);
      for (int64_t i = 0; i < count; ++i) {
        const HostMicroBatch &a = whole.next(), &b = resumed.next();
        CHECK(a.tokens == b.tokens);
        CHECK(a.targets == b.targets);
        CHECK(a.positions == b.positions);
        CHECK(a.bounds == b.bounds);
        CHECK(a.loss_tokens == b.loss_tokens);
      }
    }
  }
}

TEST_CASE("example batches: rows are padded by sequences of their own", "[batches]") {
  const auto set = some_examples(30);
  ExampleBatchOptions options = packed(PackAlgorithm::concatenative, 1, 0);
  options.packing.row_unit = 8;
  options.most_rows = 16;
  for (const bool to_capacity : {false, true}) {
    options.pad_to_capacity = to_capacity;
    ExampleBatches batches(set, options);
    bool padded = false;
    for (int step = 0; step < 5; ++step) {
      const int64_t count = batches.begin_step().microbatches;
      for (int64_t i = 0; i < count; ++i) {
        const HostMicroBatch& batch = batches.next();
        (void)placements(*set, batch, batches.rows());
        const auto all = static_cast<int64_t>(batch.tokens.size());
        const int64_t expected = to_capacity ? 40 : (batches.rows() + 7) / 8 * 8;
        CHECK(all == expected);
        for (size_t b = 0; b + 1 < batch.bounds.size(); ++b)
          CHECK(batch.bounds[b + 1] - batch.bounds[b] <= options.most_rows);
        padded = padded || all > batches.rows();
      }
    }
    CHECK(padded);
  }
}

TEST_CASE("example batches: the number of microbatches is rounded up with empty ones", "[batches]") {
  const auto set = some_examples(30);
  ExampleBatchOptions options = packed(PackAlgorithm::first_fit_decreasing, 1, 0);
  ExampleBatches plain(set, options);
  const int64_t microbatches = plain.begin_step().microbatches;
  REQUIRE(microbatches > 1);
  options.packing.row_unit = 4;
  options.rounded_up = [](int64_t count) { return count + 2; };
  ExampleBatches batches(set, options);
  REQUIRE(batches.begin_step().microbatches == microbatches + 2);
  for (int64_t i = 0; i < microbatches + 2; ++i) {
    const HostMicroBatch& batch = batches.next();
    CHECK((batches.rows() == 0) == (i >= microbatches));
    if (i < microbatches) continue;
    CHECK(placements(*set, batch, 0).empty());
    CHECK(batch.tokens.size() == 4);
    CHECK(batch.loss_tokens == 0);
  }
}

TEST_CASE("example batches: a packing of too many microbatches becomes the plain one", "[batches]") {
  // Rows 6, 4, 6, 4: sorted by length only one of 6 and one of 4 fit together.
  const auto set = std::make_shared<NumberedExamples>(std::vector<std::vector<int>>{{7}, {5}, {7}, {5}});
  ExampleBatchOptions options{
      .global_batch = 4,
      .shuffle = false,
      .packing = {.algorithm = PackAlgorithm::sorted, .capacity = 10, .micro_batch_size = 2},
      .most_microbatches = 3,
      .most_rows = 6};
  ExampleBatches sorted(set, options);
  CHECK(step_of(sorted, *set).size() == 3);
  options.most_microbatches = 2;
  ExampleBatches plain(set, options);
  CHECK(step_of(plain, *set) == std::vector<Placements>{{{0, 0}, {1, 0}}, {{2, 0}, {3, 0}}});
  options.most_microbatches = 1;
  ExampleBatches refused(set, options);
  CHECK(contains(error_of([&] { refused.begin_step(); }).text, "2 microbatches, planned are 1"));
}

TEST_CASE("example batches: ranks are balanced by the work of sequences", "[batches]") {
  const auto set = std::make_shared<NumberedExamples>(std::vector<std::vector<int>>{{9}, {5}, {5}});
  ExampleBatchOptions options{
      .global_batch = 3,
      .shuffle = false,
      .packing = {.algorithm = PackAlgorithm::first_fit_decreasing, .capacity = 8, .ranks = 2},
      .most_microbatches = 2,
      .most_rows = 8};
  // Rows 8 on one rank, 4 and 4 on the other.
  ExampleBatches by_rows(set, options);
  CHECK(by_rows.begin_step().imbalance == 0);
  options.work = [](int64_t rows) { return static_cast<double>(rows * rows); };
  ExampleBatches by_squares(set, options);
  const ExampleStep step = by_squares.begin_step();
  CHECK(step.imbalance > 0.33);  // 64 and 32: 64 / 48 - 1
  CHECK(step.imbalance < 0.34);
  CHECK(step.rows == 16);
  CHECK(step.efficiency == 1);
}
