// Rows that ranks exchange against the routes that one rank works out for all of them.
#include "parallel/experts/row_exchange.h"

#include <algorithm>
#include <numeric>

#include "core/base/philox.h"
#include "tests/catch.h"
#include "tests/comm/backends.h"
#include "tests/comm/world_fixture.h"

using namespace nrl;
using namespace nrl::parallel;

namespace {

constexpr int64_t width = 3;

struct Routing {
  const char* name;
  int64_t experts, tokens, top_k;
  bool skewed = false;   ///< all tokens of a rank to its first choices
  int64_t capacity = 0;  ///< padded
};

/// The rows of each expert on every rank.
std::vector<std::vector<int64_t>> rows_of(const Routing& r, int ranks) {
  std::vector<std::vector<int64_t>> rows;
  for (int rank = 0; rank < ranks; ++rank) {
    auto& own = rows.emplace_back(static_cast<size_t>(r.experts));
    const PhiloxStream stream(static_cast<uint64_t>(rank + 3), r.name);
    for (int64_t t = 0; t < r.tokens; ++t) {
      std::vector<int64_t> order(static_cast<size_t>(r.experts));
      std::iota(order.begin(), order.end(), 0);
      const auto key = [&](int64_t e) { return stream.normal(static_cast<uint64_t>(t * r.experts + e)); };
      if (!r.skewed)
        std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return key(a) < key(b); });
      for (int64_t k = 0; k < r.top_k; ++k) ++own[order[k]];
    }
    if (r.capacity > 0) std::fill(own.begin(), own.end(), r.capacity);
  }
  return rows;
}

std::vector<int32_t> table_of(const std::vector<std::vector<int64_t>>& rows) {
  std::vector<int32_t> table;
  for (const auto& own : rows) {
    table.push_back(0);
    for (const int64_t n : own) table.push_back(table.back() + static_cast<int32_t>(n));
  }
  return table;
}

/// Different for every element of every rank.
float value(int source, int64_t row, int64_t column) {
  return static_cast<float>(source * 10000 + row * 10 + column);
}

/// What part t of expert e makes of x.
float result(float x, int64_t e, int t) {
  return x * static_cast<float>(e + 1) + static_cast<float>(t) * 0.5f;
}

void check(Backend& backend, const Routing& routing, const ExpertShape& shape) {
  const int ranks = shape.ranks(), rank = backend.comm().rank();
  const auto rows = rows_of(routing, ranks);
  const std::vector<int32_t> table = table_of(rows);
  const RowExchange exchange(shape, rank);
  REQUIRE(static_cast<int64_t>(table.size()) == exchange.table_size());
  if (routing.capacity > 0) {
    std::vector<int32_t> padded(table.size());
    exchange.padded_table(routing.capacity, padded);
    REQUIRE(padded == table);
  }
  const int64_t sent = std::accumulate(rows[rank].begin(), rows[rank].end(), int64_t{0});
  REQUIRE(exchange.sent(table) == sent);

  // In the order [local expert, source], with the expert of each row.
  const int64_t first = rank / shape.etp * shape.local();
  std::vector<float> expected, weights;
  std::vector<int64_t> expert;
  std::vector<int32_t> offsets{0};
  for (int64_t e = first; e < first + shape.local(); ++e) {
    for (int source = 0; source < ranks; ++source) {
      const int64_t begin = table[source * (routing.experts + 1) + e];
      for (int64_t i = 0; i < rows[source][e]; ++i) {
        for (int64_t c = 0; c < width; ++c) expected.push_back(value(source, begin + i, c));
        weights.push_back(-value(source, begin + i, 0));
        expert.push_back(e);
      }
    }
    offsets.push_back(static_cast<int32_t>(expert.size()));
  }
  const auto received = static_cast<int64_t>(expert.size());
  REQUIRE(exchange.received(table) == received);
  std::vector<int32_t> local(static_cast<size_t>(shape.local() + 1));
  exchange.local_offsets(table, local);
  CHECK(local == offsets);
  const ExpertCapacity capacity{routing.capacity, routing.capacity > 0};
  CHECK(received <= most_received(shape, routing.tokens, routing.top_k, capacity));
  if (routing.skewed && rank < shape.etp && shape.local() >= routing.top_k)  // it is needed
    CHECK(received == most_received(shape, routing.tokens, routing.top_k, capacity));

  std::vector<float> own, own_weights;
  for (int64_t i = 0; i < sent; ++i) {
    for (int64_t c = 0; c < width; ++c) own.push_back(value(rank, i, c));
    own_weights.push_back(-value(rank, i, 0));
  }
  std::vector<float> wanted;
  for (int t = 0; t < shape.etp; ++t)
    for (int64_t e = 0; e < routing.experts; ++e) {
      const int64_t begin = table[rank * (routing.experts + 1) + e];
      for (int64_t i = 0; i < rows[rank][e]; ++i)
        for (int64_t c = 0; c < width; ++c) wanted.push_back(result(value(rank, begin + i, c), e, t));
    }
  // The rows for each of the T ranks, which differ.
  std::vector<float> divided;
  for (int t = 0; t < shape.etp; ++t)
    for (const float x : own) divided.push_back(x + 0.25f * static_cast<float>(t));
  // All at once, and in rounds of a part of the rows.
  const int64_t most = exchange.most_received(table);
  CHECK(received <= most);
  std::vector<RowRange> ways{RowRange{}};
  for (const int64_t n : {most / 2 + 1, most / 5 + 1, int64_t{1}})
    if (n > 1 || most < 10) ways.push_back({0, n});
  Data<float> in(backend, own), in_weights(backend, own_weights), in_divided(backend, divided);
  for (RowRange range : ways) {
    CAPTURE(range.rows);
    Data<float> returned(backend, own.size() * static_cast<size_t>(shape.etp), -1.0f);
    for (int64_t at = 0; at == 0 || at < most; at += range.rows) {
      range.first = at;
      const int64_t n = std::clamp(received - at, int64_t{0}, range.rows);
      REQUIRE(exchange.received(table, range) == n);
      std::vector<int32_t> local_of_range(local.size()), want_local;
      exchange.local_offsets(table, local_of_range, range);
      for (const int32_t o : local)
        want_local.push_back(static_cast<int32_t>(std::clamp<int64_t>(o - at, 0, n)));
      CHECK(local_of_range == want_local);
      std::vector<int32_t> begin(static_cast<size_t>(exchange.group_count() + 1)), place(begin.size() - 1);
      exchange.groups(table, begin, place, range);
      REQUIRE(begin.back() == n);
      // The row that arrives as number i has place order[i] by experts.
      std::vector<int64_t> order;
      for (size_t g = 0; g < place.size(); ++g)
        for (int32_t i = 0; i < begin[g + 1] - begin[g]; ++i) order.push_back(place[g] + i);

      const auto count = static_cast<size_t>(n);
      Data<float> out(backend, count * width, -1.0f), out_weights(backend, count, -1.0f),
          out_divided(backend, count * width, -1.0f);
      const std::array forth{RowExchange::Rows{in, out, width}, RowExchange::Rows{in_weights, out_weights, 1},
                             RowExchange::Rows{in_divided, out_divided, width, true}};
      exchange.dispatch(backend.comm(), table, forth, range, backend.stream()).wait();
      const std::vector<float> arrived = out.read(), arrived_weights = out_weights.read(),
                               arrived_part = out_divided.read();
      std::vector<float> results;
      for (size_t i = 0; i < count; ++i) {
        const auto row = static_cast<size_t>(at + order[i]);
        CHECK(arrived_weights[i] == weights[row]);
        for (size_t c = 0; c < width; ++c) {
          CHECK(arrived[i * width + c] == expected[row * width + c]);
          CHECK(arrived_part[i * width + c] ==
                expected[row * width + c] + 0.25f * static_cast<float>(rank % shape.etp));
          results.push_back(result(expected[row * width + c], expert[row], rank % shape.etp));
        }
      }
      Data<float> y(backend, results);
      const std::array back{RowExchange::Rows{y, returned, width}};
      exchange.combine(backend.comm(), table, back, range, backend.stream()).wait();
    }
    CHECK(returned.read() == wanted);
  }
}

}  // namespace

TEST_CASE("the table of a dry run has the planned rows", "[experts]") {
  for (const auto& [experts, ep, etp] : {std::array{8, 4, 1}, {8, 2, 2}, {6, 1, 3}, {4, 4, 1}})
    for (const int64_t sent : {16, 37})
      for (int rank = 0; rank < ep * etp; ++rank)
        for (const double load : {1.0, 0.3, 1.7}) {
          const ExpertShape shape{.experts = experts, .ep = ep, .etp = etp};
          const RowExchange exchange(shape, rank);
          const int64_t most = shape.ranks() * sent;
          const auto received = std::min<int64_t>(
              most, std::llround(load * static_cast<double>(sent) * static_cast<double>(etp)));
          if (ep == 1 && received != most) continue;  // the others' experts do not exist
          CAPTURE(experts, ep, etp, sent, rank, load);
          std::vector<int32_t> table(static_cast<size_t>(exchange.table_size()), -1);
          exchange.planned_table(sent, received, table);
          for (int source = 0; source < shape.ranks(); ++source) {
            const auto offsets = std::span(table).subspan(static_cast<size_t>(source * (experts + 1)),
                                                          static_cast<size_t>(experts + 1));
            CHECK(offsets.front() == 0);
            CHECK(offsets.back() == sent);
            CHECK(std::is_sorted(offsets.begin(), offsets.end()));
          }
          CHECK(exchange.sent(table) == sent);
          CHECK(exchange.received(table) == received);
          if (load == 1.0) CHECK(exchange.most_received(table) - received <= shape.ranks());
        }
}

TEST_CASE("rows go to their experts and back", "[experts]") {
  const Routing routings[] = {
      {"even", 12, 40, 2},        {"one choice", 12, 7, 1},        {"all", 12, 5, 12},
      {"skewed", 12, 9, 1, true}, {"skewed, two", 24, 9, 2, true}, {"few tokens", 12, 1, 1},
      {"nothing", 12, 0, 2},      {"padded", 12, 10, 2, false, 4}};
  for (auto& backend : backends()) {
    const int size = backend->comm().size();
    if (size != test_world().size()) continue;
    for (const Routing& routing : routings)
      for (int ep = 1; ep <= size; ++ep) {
        if (size % ep != 0) continue;
        CAPTURE(routing.name, backend->name(), ep);
        check(*backend, routing, {.experts = routing.experts, .ep = ep, .etp = size / ep});
      }
  }
}

// A layer that recomputes its rows dispatches them while the gradients of other rows still wait for the sum
// that they return after; on some ranks that takes longer than on others.
TEST_CASE("rows that return may wait while others are dispatched", "[experts]") {
  const Routing routing{"even", 12, 40, 2};
  for (auto& backend : backends()) {
    comm::Communicator& ranks = backend->comm();
    const int size = ranks.size(), rank = ranks.rank();
    if (size < 2 || size != test_world().size() || ranks.single_fifo()) continue;
    CAPTURE(backend->name());
    const auto rows = rows_of(routing, size);
    const std::vector<int32_t> table = table_of(rows);
    const RowExchange exchange({.experts = routing.experts, .ep = size, .etp = 1}, rank);
    const auto sent = static_cast<size_t>(exchange.sent(table)),
               received = static_cast<size_t>(exchange.received(table));
    Data<float> in(*backend, std::vector<float>(sent, 1)), y(*backend, std::vector<float>(received, 2)),
        out(*backend, received), returned(*backend, sent), sum(*backend, 1);
    const std::array forth{RowExchange::Rows{in, out, 1}}, back{RowExchange::Rows{y, returned, 1}};
    // The last rank's rows wait for a message that the first one sends when it has issued both.
    constexpr int tag = 9;
    std::vector<comm::Handle> handles;
    if (rank + 1 == size) handles.push_back(ranks.recv_async(sum, 0, tag, backend->stream()));
    const comm::After after =
        handles.empty() ? comm::After(backend->stream()) : comm::After(backend->stream(), handles.front());
    handles.push_back(exchange.combine(ranks, table, back, {}, after));
    handles.push_back(exchange.dispatch(ranks, table, forth, {}, backend->stream()));
    if (rank == 0) handles.push_back(ranks.send_async(sum, size - 1, tag, backend->stream()));
    for (comm::Handle& handle : handles) handle.wait();
    CHECK(out.read() == std::vector<float>(received, 1));
    CHECK(returned.read() == std::vector<float>(sent, 2));
  }
}
