// Packing: every unit once, the capacity, equal counts, the balance of ranks, and the published algorithms.

#include "apps/data/packing.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/base/philox.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::data;
using namespace nrl::test;

namespace {

using Algorithm = PackAlgorithm;
using Bins = std::vector<std::vector<std::vector<int32_t>>>;

constexpr Algorithm algorithms[] = {Algorithm::modified_first_fit_decreasing,
                                    Algorithm::first_fit_decreasing,
                                    Algorithm::first_fit_shuffle,
                                    Algorithm::concatenative,
                                    Algorithm::sorted,
                                    Algorithm::none};

std::vector<PackUnit> units_of(const std::vector<int64_t>& rows) {
  std::vector<PackUnit> units;
  for (const int64_t r : rows) units.push_back({r, static_cast<double>(r)});
  return units;
}

// Lengths as in chats: log-normal, cut at `longest`. Attention adds work that is quadratic in them.
std::vector<PackUnit> chat_units(size_t count, double mean, int64_t longest, uint64_t seed) {
  constexpr double sigma = 0.9;
  const PhiloxStream random(seed, "lengths");
  std::vector<PackUnit> units;
  for (size_t i = 0; i < count; ++i) {
    const double length = mean * std::exp(sigma * random.normal(i) - sigma * sigma / 2);
    const int64_t rows = std::clamp<int64_t>(std::llround(length), 8, longest);
    units.push_back({rows, static_cast<double>(rows) * (1 + static_cast<double>(rows) / 4096)});
  }
  return units;
}

int64_t rows_of(const std::vector<int32_t>& bin, const std::vector<PackUnit>& units) {
  int64_t rows = 0;
  for (const int32_t unit : bin) rows += units.at(static_cast<size_t>(unit)).rows;
  return rows;
}
double work_of(const std::vector<int32_t>& bin, const std::vector<PackUnit>& units) {
  double work = 0;
  for (const int32_t unit : bin) work += units.at(static_cast<size_t>(unit)).work;
  return work;
}

// Bins of one rank by their rows, largest first.
std::vector<std::vector<int64_t>> lengths(const Packing& packing, const std::vector<PackUnit>& units) {
  std::vector<std::vector<int64_t>> all;
  for (const auto& bin : packing.bins.at(0)) {
    all.emplace_back();
    for (const int32_t unit : bin) all.back().push_back(units[static_cast<size_t>(unit)].rows);
    std::sort(all.back().rbegin(), all.back().rend());
  }
  std::sort(all.rbegin(), all.rend());
  return all;
}

// Checks the promises that hold for all options, figures included.
void check(const Packing& packing, const std::vector<PackUnit>& units, const PackOptions& options) {
  REQUIRE(packing.bins.size() == static_cast<size_t>(options.ranks));
  std::vector<int> seen(units.size());
  double rows = 0, capacity = 0, most = 0, sum = 0;
  for (const auto& rank : packing.bins) {
    REQUIRE(rank.size() == packing.bins[0].size());
    REQUIRE(rank.size() % static_cast<size_t>(options.bins_multiple) == 0);
    double work = 0;
    for (const auto& bin : rank) {
      REQUIRE(std::is_sorted(bin.begin(), bin.end()));
      for (const int32_t unit : bin) ++seen.at(static_cast<size_t>(unit));
      const int64_t padded =
          (rows_of(bin, units) + options.row_unit - 1) / options.row_unit * options.row_unit;
      REQUIRE(padded <= options.capacity);
      rows += static_cast<double>(rows_of(bin, units));
      if (!bin.empty()) capacity += static_cast<double>(options.capacity);
      work += work_of(bin, units);
    }
    most = std::max(most, work);
    sum += work;
  }
  REQUIRE(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
  CHECK(packing.efficiency == Approx(units.empty() ? 1 : rows / capacity));
  CHECK(packing.imbalance + 1 == Approx(sum > 0 ? most * static_cast<double>(options.ranks) / sum : 1));
}

}  // namespace

TEST_CASE("every packing is complete, fits and has equal counts", "[packing]") {
  const PhiloxStream random(11, "options");
  uint64_t drawn = 0;
  const auto below = [&](uint64_t n) { return static_cast<int64_t>(random.bits(drawn++) % n); };
  for (int i = 0; i < 600; ++i) {
    PackOptions options;
    options.algorithm = algorithms[below(std::size(algorithms))];
    options.order = below(2) ? BinOrder::largest_first : BinOrder::small_ends;
    options.row_unit = 1 + below(3) * below(17);
    options.capacity = options.row_unit * (1 + below(4)) + below(1 + 300 * below(2));
    options.ranks = 1 + below(9);
    options.bins_multiple = 1 + below(3) * below(3);
    options.micro_batch_size = 1 + below(5);
    options.seed = static_cast<uint64_t>(below(1000));
    const int64_t usable = options.capacity / options.row_unit * options.row_unit;
    const int64_t longest = options.algorithm == Algorithm::none ? usable / options.micro_batch_size : usable;
    if (longest == 0) continue;
    std::vector<PackUnit> units(static_cast<size_t>(below(2) ? below(200) : below(12)));
    for (PackUnit& unit : units) {
      unit.rows = 1 + below(static_cast<uint64_t>(longest));
      unit.work = below(8) ? static_cast<double>(unit.rows * (1 + below(3))) : 0.0;
    }
    CAPTURE(i, static_cast<int>(options.algorithm), options.capacity, options.row_unit, options.ranks,
            options.bins_multiple, units.size());
    const Packing packing = pack(units, options);
    check(packing, units, options);
    CHECK(pack(units, options).bins == packing.bins);
  }
}

TEST_CASE("equal units may be exchanged", "[packing]") {
  std::vector<PackUnit> units = chat_units(300, 40, 200, 3);
  PackOptions options{.capacity = 256, .ranks = 3};
  for (const Algorithm algorithm :
       {Algorithm::modified_first_fit_decreasing, Algorithm::first_fit_decreasing, Algorithm::sorted}) {
    options.algorithm = algorithm;
    const auto shape = [&] {
      std::vector<std::vector<int64_t>> all;
      for (const auto& rank : pack(units, options).bins)
        for (const auto& bin : rank) {
          all.emplace_back();
          for (const int32_t unit : bin) all.back().push_back(units[static_cast<size_t>(unit)].rows);
          std::sort(all.back().begin(), all.back().end());
        }
      return all;
    };
    const auto before = shape();
    std::reverse(units.begin(), units.end());
    CHECK(shape() == before);
    std::rotate(units.begin(), units.begin() + 77, units.end());
    CHECK(shape() == before);
  }
}

TEST_CASE("packing algorithms", "[packing]") {
  const auto bins = [](const std::vector<int64_t>& rows, Algorithm algorithm, int64_t capacity) {
    const auto units = units_of(rows);
    PackOptions options{.algorithm = algorithm, .capacity = capacity};
    return lengths(pack(units, options), units);
  };
  using Lengths = std::vector<std::vector<int64_t>>;
  // Without units of more than a third, the bin of 60 takes the smallest and the largest pair that fits.
  CHECK(bins({60, 55, 18, 19, 20, 22}, Algorithm::modified_first_fit_decreasing, 100) ==
        Lengths{{60, 20, 19}, {55, 22, 18}});
  CHECK(bins({60, 55, 18, 19, 20, 22}, Algorithm::first_fit_decreasing, 100) ==
        Lengths{{60, 22, 18}, {55, 20, 19}});
  // Here this saves a bin.
  const std::vector<int64_t> rows = {18, 31, 56, 20, 41, 19, 52, 49};
  CHECK(bins(rows, Algorithm::modified_first_fit_decreasing, 100) ==
        Lengths{{56, 41}, {52, 20, 18}, {49, 31, 19}});
  CHECK(bins(rows, Algorithm::first_fit_decreasing, 100).size() == 4);
  CHECK(bins({30, 30, 50, 30, 60}, Algorithm::concatenative, 100) == Lengths{{60}, {50, 30}, {30, 30}});
  CHECK(bins({30, 40, 50, 20, 60}, Algorithm::sorted, 100) == Lengths{{60}, {50, 40}, {30, 20}});
  CHECK(bins({1, 2, 3, 4, 5}, Algorithm::none, 100) == Lengths{{5}, {4}, {3}, {2}, {1}});
  // Shuffled: the seed decides.
  const auto units = chat_units(64, 20, 64, 5);
  PackOptions options{.algorithm = Algorithm::first_fit_shuffle, .capacity = 64, .seed = 1};
  const Bins first = pack(units, options).bins;
  options.seed = 2;
  CHECK(pack(units, options).bins != first);
}

TEST_CASE("the modified algorithm is first fit decreasing where units are small", "[packing]") {
  const auto units = chat_units(400, 20, 40, 9);
  PackOptions options{.capacity = 240};
  const Bins modified = pack(units, options).bins;
  options.algorithm = Algorithm::first_fit_decreasing;
  CHECK(pack(units, options).bins == modified);
}

TEST_CASE("without packing the order is Megatron's", "[packing]") {
  const auto units = units_of({9, 1, 8, 2, 7, 3, 6});
  PackOptions options{.algorithm = Algorithm::none, .capacity = 20, .ranks = 2, .micro_batch_size = 2};
  CHECK(pack(units, options).bins == Bins{{{0, 1}, {4, 5}}, {{2, 3}, {6}}});
  options.bins_multiple = 3;
  CHECK(pack(units, options).bins == Bins{{{0, 1}, {4, 5}, {}}, {{2, 3}, {6}, {}}});
}

TEST_CASE("microbatches are split, or empty ones added, until the ranks have equal counts", "[packing]") {
  const auto units = units_of({10, 10, 10, 10, 10, 10});
  PackOptions options{.capacity = 30, .ranks = 4};
  const Packing packing = pack(units, options);
  CHECK(packing.bins[0].size() == 1);
  size_t most = 0;
  for (const auto& rank : packing.bins) most = std::max(most, rank[0].size());
  CHECK(most == 2);  // 3 + 3 became 1 + 2 + 1 + 2 or better
  CHECK(packing.efficiency == Approx(0.5));
  options.ranks = 8;
  size_t empty = 0;
  const Packing dummies = pack(units, options);
  for (const auto& rank : dummies.bins) empty += rank.at(0).empty();
  CHECK(empty == 2);
  CHECK(dummies.efficiency == Approx(1.0 / 3));  // of those that are not empty
}

TEST_CASE("a position has similar work on every rank, in the order asked for", "[packing]") {
  const auto units = chat_units(900, 500, 4000, 21);
  PackOptions options{.capacity = 8000, .ranks = 4};
  const Packing packing = pack(units, options);
  const auto work = [&](const Packing& p, size_t rank, size_t position) {
    return work_of(p.bins[rank][position], units);
  };
  const size_t count = packing.bins[0].size();
  REQUIRE(count > 8);
  for (size_t rank = 0; rank < 4; ++rank)
    for (size_t j = 1; j < count; ++j) CHECK(work(packing, rank, j) <= work(packing, rank, j - 1));
  for (size_t j = 0; j + 2 < count; ++j) {
    double least = work(packing, 0, j), most = least;
    for (size_t rank = 1; rank < 4; ++rank) {
      least = std::min(least, work(packing, rank, j));
      most = std::max(most, work(packing, rank, j));
    }
    CHECK(most <= 1.25 * least);
  }
  options.order = BinOrder::small_ends;
  const Packing ends = pack(units, options);
  for (size_t rank = 0; rank < 4; ++rank) {
    auto sorted = ends.bins[rank];
    std::sort(sorted.begin(), sorted.end());
    auto same = packing.bins[rank];
    std::sort(same.begin(), same.end());
    CHECK(sorted == same);
    CHECK(work(ends, rank, 0) == work(packing, rank, count - 1));
    CHECK(work(ends, rank, count - 1) == work(packing, rank, count - 2));
    for (size_t j = 1; j <= (count - 1) / 2; ++j) CHECK(work(ends, rank, j) >= work(ends, rank, j - 1));
    for (size_t j = count / 2 + 1; j < count; ++j) CHECK(work(ends, rank, j) <= work(ends, rank, j - 1));
  }
}

TEST_CASE("packing reaches its targets on the lengths of chats", "[packing]") {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    CAPTURE(seed);
    // Capacities of 8 and 16 mean lengths, and of the longest unit.
    for (const int64_t capacity : {4000, 8000}) {
      const auto units = chat_units(2000, 500, 4000, seed);
      CHECK(pack(units, {.capacity = capacity}).efficiency >= 0.98);
      CHECK(pack(units, {.algorithm = Algorithm::first_fit_decreasing, .capacity = capacity}).efficiency >=
            0.98);
    }
    const auto units = chat_units(2000, 500, 1500, seed);
    const auto longest = std::max_element(units.begin(), units.end(),
                                          [](const auto& a, const auto& b) { return a.rows < b.rows; });
    CHECK(pack(units, {.capacity = longest->rows}).efficiency >= 0.9);
    // At least 8 microbatches per rank.
    for (const Algorithm algorithm : algorithms)
      for (const int64_t ranks : {2, 8, 24}) {
        if (algorithm == Algorithm::none) continue;
        CAPTURE(static_cast<int>(algorithm), ranks);
        const auto many = chat_units(static_cast<size_t>(65 * ranks), 500, 4000, seed);
        const Packing packing = pack(many, {.algorithm = algorithm, .capacity = 4000, .ranks = ranks});
        REQUIRE(packing.bins[0].size() >= 8);
        CHECK(packing.imbalance <= 0.03);
        CHECK(packing.efficiency >= 0.75);
      }
  }
}

TEST_CASE("hostile sizes", "[packing]") {
  const auto check_all = [](const std::vector<PackUnit>& units, PackOptions options) {
    for (const Algorithm algorithm : algorithms) {
      CAPTURE(static_cast<int>(algorithm));
      options.algorithm = algorithm;
      check(pack(units, options), units, options);
    }
  };
  check_all({}, {.capacity = 1, .ranks = 3});
  CHECK(pack({}, {.capacity = 1, .ranks = 3}).bins == Bins(3));
  check_all(units_of({1}), {.capacity = 1, .ranks = 7, .bins_multiple = 5});
  check_all(units_of(std::vector<int64_t>(100, 64)), {.capacity = 64, .ranks = 3});
  const int64_t large = int64_t{1} << 40;
  check_all(units_of({large, 1, large, large - 1, 1}), {.capacity = large, .ranks = 2});
  check_all({{5, 0}, {5, 0}, {5, 0}}, {.capacity = 5, .ranks = 2});  // no work
  check_all({{5, 1e300}, {5, 1e-300}, {5, 0}, {1, 1e290}}, {.capacity = 6, .ranks = 2});
  check_all(units_of(std::vector<int64_t>(20000, 1)), {.capacity = 1, .ranks = 1});

  const auto code = [](const std::vector<PackUnit>& units, const PackOptions& options) {
    return error_of([&] { pack(units, options); }).code;
  };
  const int internal = static_cast<int>(Exit::internal);
  CHECK(code(units_of({0}), {.capacity = 4}) == internal);
  CHECK(code({{1, -1.0}}, {.capacity = 4}) == internal);
  CHECK(code({{1, NAN}}, {.capacity = 4}) == internal);
  CHECK(code(units_of({large + 1}), {.capacity = large}) == internal);
  CHECK(code(units_of({1}), {.capacity = 0}) == internal);
  CHECK(code(units_of({1}), {.capacity = 4, .ranks = 0}) == internal);
  CHECK(code(units_of({1}), {.capacity = 4, .ranks = INT64_MAX, .bins_multiple = INT64_MAX}) == internal);
}

TEST_CASE("a unit that does not fit is an error with the smallest capacity", "[packing]") {
  const auto text = [](const std::vector<int64_t>& rows, const PackOptions& options) {
    const Caught caught = error_of([&] { pack(units_of(rows), options); });
    CHECK((caught.code == 0 || caught.code == static_cast<int>(Exit::config)));
    return caught.text;
  };
  CHECK(text({3, 101, 5}, {.capacity = 100}) ==
        "a microbatch has at most 100 rows, but the longest sequence or pair has 101. Fix: allow at least "
        "101 rows");
  CHECK(contains(text({3, 97, 5}, {.capacity = 100, .row_unit = 16}), "at least 112 rows"));
  CHECK(text({3, 96, 5}, {.capacity = 100, .row_unit = 16}).empty());
  const PackOptions fixed{.algorithm = Algorithm::none, .capacity = 100, .micro_batch_size = 2};
  CHECK(text({60, 40, 90}, fixed).empty());
  CHECK(contains(text({60, 40, 90, 20}, fixed), "the 2 sequences or pairs of one have 110"));
}
