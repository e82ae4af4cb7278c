#include "parallel/experts/row_exchange.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/base/error.h"

namespace nrl::parallel {

int64_t most_received(const ExpertShape& shape, int64_t tokens, int64_t top_k,
                      const ExpertCapacity& capacity) {
  const int64_t slots = shape.ranks() * shape.local() * capacity.rows;
  if (capacity.pad) return slots;
  const int64_t most = shape.ranks() * tokens * std::min(top_k, shape.local());
  return capacity.rows > 0 ? std::min(most, slots) : most;
}

RowExchange::RowExchange(const ExpertShape& shape, int rank) : shape_(shape), rank_(rank) {
  NRL_CHECK(
      shape.ep >= 1 && shape.etp >= 1 && shape.experts % shape.ep == 0 && rank >= 0 && rank < shape.ranks(),
      "{} experts on {} x {} ranks, rank {}", shape.experts, shape.ep, shape.etp, rank);
}

void RowExchange::padded_table(int64_t capacity, std::span<int32_t> table) const {
  for (int r = 0; r < shape_.ranks(); ++r)
    for (int64_t e = 0; e <= shape_.experts; ++e)
      table[r * (shape_.experts + 1) + e] = static_cast<int32_t>(e * capacity);
}

void RowExchange::planned_table(int64_t sent, int64_t received, std::span<int32_t> table) const {
  const int64_t own = shape_.local(), others = shape_.experts - own;
  const auto before = [](int64_t n, int64_t parts, int64_t i) { return parts == 0 ? 0 : n * i / parts; };
  const int64_t row = shape_.experts + 1, first = first_expert();
  int64_t here_before = -1;
  for (int64_t r = 0; r < shape_.ranks(); ++r) {
    const int64_t here = before(received, shape_.ranks(), r + 1) - before(received, shape_.ranks(), r);
    if (std::exchange(here_before, here) == here) {
      std::copy_n(&table[(r - 1) * row], row, &table[r * row]);
      continue;
    }
    for (int64_t e = 0; e <= shape_.experts; ++e) {
      const int64_t mine = std::clamp<int64_t>(e - first, 0, own);
      table[r * row + e] =
          static_cast<int32_t>(before(here, own, mine) + before(sent - here, others, e - mine));
    }
  }
}

template <class F>
void RowExchange::for_each_group(std::span<const int32_t> table, int rank, const RowRange& range,
                                 F&& f) const {
  int64_t at = 0;
  for (int64_t l = 0; l < shape_.local(); ++l)
    for (int source = 0; source < shape_.ranks(); ++source) {
      const int64_t n = count(table, source, first_expert_of(rank) + l);
      const int64_t begin = std::clamp(range.first - at, int64_t{0}, n),
                    end = std::clamp(range.first + range.rows - at, int64_t{0}, n);
      f(l, source, begin, end - begin);
      at += n;
    }
}

int64_t RowExchange::received(std::span<const int32_t> table, const RowRange& range) const {
  int64_t sum = 0;
  for_each_group(table, rank_, range, [&](int64_t, int, int64_t, int64_t n) { sum += n; });
  return sum;
}

int64_t RowExchange::most_received(std::span<const int32_t> table) const {
  int64_t most = 0;
  for (int rank = 0; rank < shape_.ranks(); rank += shape_.etp) {
    const int64_t first = first_expert_of(rank);
    int64_t sum = 0;
    for (int r = 0; r < shape_.ranks(); ++r)
      sum += offset(table, r, first + shape_.local()) - offset(table, r, first);
    most = std::max(most, sum);
  }
  return most;
}

void RowExchange::local_offsets(std::span<const int32_t> table, std::span<int32_t> offsets,
                                const RowRange& range) const {
  std::fill(offsets.begin(), offsets.end(), 0);
  for_each_group(table, rank_, range,
                 [&](int64_t l, int, int64_t, int64_t n) { offsets[l + 1] += static_cast<int32_t>(n); });
  std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
}

void RowExchange::groups(std::span<const int32_t> table, std::span<int32_t> begin, std::span<int32_t> place,
                         const RowRange& range) const {
  // Group [source, l] arrives as number source L + l. First `begin` has its rows.
  int32_t at = 0;
  begin[0] = 0;
  for_each_group(table, rank_, range, [&](int64_t l, int source, int64_t, int64_t n) {
    const auto group = static_cast<size_t>(source * shape_.local() + l);
    place[group] = at;
    begin[group + 1] = static_cast<int32_t>(n);
    at += static_cast<int32_t>(n);
  });
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
}

comm::Handle RowExchange::dispatch(comm::Communicator& ranks, std::span<const int32_t> table,
                                   std::span<const Rows> rows, const RowRange& range,
                                   const comm::After& after) const {
  return exchange(ranks, table, rows, true, range, after);
}

comm::Handle RowExchange::combine(comm::Communicator& ranks, std::span<const int32_t> table,
                                  std::span<const Rows> rows, const RowRange& range,
                                  const comm::After& after) const {
  return exchange(ranks, table, rows, false, range, after);
}

comm::Handle RowExchange::exchange(comm::Communicator& ranks, std::span<const int32_t> table,
                                   std::span<const Rows> rows, bool forth, const RowRange& range,
                                   const comm::After& after) const {
  NRL_CHECK(ranks.size() == shape_.ranks() && ranks.rank() == rank_, "rank {} of {} in {}", rank_,
            shape_.ranks(), ranks.label());
  NRL_CHECK(static_cast<int64_t>(table.size()) == table_size());
  /// Contiguous rows of a peer.
  struct Part {
    int64_t first = 0, rows = 0;
    void add(int64_t begin, int64_t n) {
      if (rows == 0) first = begin;
      rows += n;
    }
  };
  // What this rank sends to the experts of each rank, and what it gets from each source.
  std::vector<Part> to(static_cast<size_t>(shape_.ep)), from(static_cast<size_t>(shape_.ranks()));
  for (int p = 0; p < shape_.ep; ++p) {
    if (range.rows == RowRange{}.rows) {  // all of them
      const int64_t first = offset(table, rank_, p * shape_.local());
      to[p].add(first, offset(table, rank_, (p + 1) * shape_.local()) - first);
      continue;
    }
    for_each_group(table, p * shape_.etp, range, [&](int64_t l, int source, int64_t first, int64_t n) {
      if (source == rank_ && n > 0) to[p].add(offset(table, rank_, p * shape_.local() + l) + first, n);
    });
  }
  for_each_group(table, rank_, range,
                 [&](int64_t, int source, int64_t, int64_t n) { from[source].rows += n; });
  int64_t arrived = 0;
  for (Part& part : from) part.first = std::exchange(arrived, arrived + part.rows);

  const int64_t own = sent(table);
  std::vector<comm::Message> messages;
  messages.reserve(2 * rows.size() * static_cast<size_t>(shape_.ranks()));
  for (size_t i = 0; i < rows.size(); ++i) {
    const Rows& x = rows[i];
    const bool same = forth && !x.divided;  // for all T ranks
    const int64_t at_source = same ? own : own * shape_.etp;
    NRL_CHECK(x.in.count >= (forth ? at_source : arrived) * x.width &&
                  x.out.count >= (forth ? arrived : at_source) * x.width && x.in.dtype == x.out.dtype,
              "rows of {}: {} elements in, {} out; {} sent, {} received", x.width, x.in.count, x.out.count,
              own, arrived);
    const int64_t size = size_of(x.in.dtype) * x.width;
    // Rows that return may wait for their sums on some ranks when others are dispatched already.
    const int tag = static_cast<int>(2 * i + (forth ? 0 : 1));
    const auto add = [&](bool send, int64_t first, int64_t n, int peer) {
      if (n == 0) return;
      const void* const base = send ? x.in.data : x.out.data;
      const comm::View part(static_cast<std::byte*>(const_cast<void*>(base)) + first * size, n * x.width,
                            x.in.dtype);
      messages.push_back(send ? comm::Message::send(part, peer, tag) : comm::Message::recv(part, peer, tag));
    };
    // As a source, then as a rank of experts.
    for (int p = 0; p < shape_.ep; ++p)
      for (int t = 0; t < shape_.etp; ++t) {
        const Part& part = to[p];
        add(forth, part.first + (same ? 0 : t * own), part.rows, p * shape_.etp + t);
      }
    for (int source = 0; source < shape_.ranks(); ++source) {
      const Part& part = from[source];
      add(!forth, part.first, part.rows, source);
    }
  }
  return ranks.exchange_async(std::move(messages), after);
}

}  // namespace nrl::parallel
