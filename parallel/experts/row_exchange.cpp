#include "parallel/experts/row_exchange.h"

#include <algorithm>

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
      table[static_cast<size_t>(r * (shape_.experts + 1) + e)] = static_cast<int32_t>(e * capacity);
}

int64_t RowExchange::received(std::span<const int32_t> table) const {
  const int64_t first = first_expert(), end = first + shape_.local();
  int64_t sum = 0;
  for (int r = 0; r < shape_.ranks(); ++r) sum += offset(table, r, end) - offset(table, r, first);
  return sum;
}

void RowExchange::local_offsets(std::span<const int32_t> table, std::span<int32_t> offsets) const {
  int64_t sum = 0;
  for (int64_t l = 0; l < shape_.local(); ++l) {
    offsets[static_cast<size_t>(l)] = static_cast<int32_t>(sum);
    for (int r = 0; r < shape_.ranks(); ++r) sum += count(table, r, first_expert() + l);
  }
  offsets[static_cast<size_t>(shape_.local())] = static_cast<int32_t>(sum);
}

comm::Handle RowExchange::dispatch(comm::Communicator& ranks, std::span<const int32_t> table,
                                   std::span<const Rows> rows, const comm::After& after) const {
  return exchange(ranks, table, rows, true, after);
}

comm::Handle RowExchange::combine(comm::Communicator& ranks, std::span<const int32_t> table,
                                  std::span<const Rows> rows, const comm::After& after) const {
  return exchange(ranks, table, rows, false, after);
}

// The rows of an expert lie together on their source as well as, source after source, on the expert's ranks.
comm::Handle RowExchange::exchange(comm::Communicator& ranks, std::span<const int32_t> table,
                                   std::span<const Rows> rows, bool forth, const comm::After& after) const {
  constexpr size_t most = 2;
  NRL_CHECK(ranks.size() == shape_.ranks() && ranks.rank() == rank_, "rank {} of {} in {}", rank_,
            shape_.ranks(), ranks.label());
  NRL_CHECK(static_cast<int64_t>(table.size()) == table_size() && rows.size() <= most);
  const int64_t own = sent(table), arrived = received(table);
  std::vector<comm::Message> messages;
  messages.reserve(rows.size() * static_cast<size_t>((shape_.local() + shape_.experts) * shape_.ranks()));
  for (size_t i = 0; i < rows.size(); ++i) {
    const Rows& x = rows[i];
    const int64_t at_source = forth ? own : own * shape_.etp;
    NRL_CHECK(x.in.count >= (forth ? at_source : arrived) * x.width &&
                  x.out.count >= (forth ? arrived : at_source) * x.width && x.in.dtype == x.out.dtype,
              "rows of {}: {} elements in, {} out; {} sent, {} received", x.width, x.in.count, x.out.count,
              own, arrived);
    const int64_t size = size_of(x.in.dtype) * x.width;
    const auto part = [&](const void* base, int64_t first, int64_t n) {
      return comm::View(static_cast<std::byte*>(const_cast<void*>(base)) + first * size, n * x.width,
                        x.in.dtype);
    };
    const auto add = [&](bool send, int64_t first, int64_t n, int peer, int64_t local) {
      if (n == 0) return;
      const int tag = static_cast<int>(local * static_cast<int64_t>(most) + static_cast<int64_t>(i));
      messages.push_back(send ? comm::Message::send(part(x.in.data, first, n), peer, tag)
                              : comm::Message::recv(part(x.out.data, first, n), peer, tag));
    };
    // As a source.
    for (int64_t e = 0; e < shape_.experts; ++e)
      for (int t = 0; t < shape_.etp; ++t) {
        const auto peer = static_cast<int>(e / shape_.local()) * shape_.etp + t;
        add(forth, offset(table, rank_, e) + (forth ? 0 : t * own), count(table, rank_, e), peer,
            e % shape_.local());
      }
    // As a rank of experts.
    int64_t at = 0;
    for (int64_t l = 0; l < shape_.local(); ++l)
      for (int source = 0; source < shape_.ranks(); ++source) {
        const int64_t n = count(table, source, first_expert() + l);
        add(!forth, at, n, source, l);
        at += n;
      }
  }
  return ranks.exchange_async(std::move(messages), after);
}

}  // namespace nrl::parallel
