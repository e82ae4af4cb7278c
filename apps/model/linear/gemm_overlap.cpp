#include "apps/model/linear/gemm_overlap.h"

#include <algorithm>

#include "core/ops/merge.h"
#include "core/ops/transfer.h"

namespace nrl::model {
namespace {

bool divides_gemms(const CommOverlap& overlap) {
  return overlap.method == TpCommOverlap::pipelined || overlap.method == TpCommOverlap::ring;
}

int64_t piece_count(const CommOverlap& overlap, int64_t n) {
  return std::clamp<int64_t>(overlap.splits, 1, std::max<int64_t>(n, 1));
}

/// The ranks' equal shares of the rows of a tensor.
struct Blocks {
  int64_t ranks, own, n;

  Blocks(const Run& r, const Tensor& all)
      : ranks(r.layout().tensor), own(r.layout().tensor_rank), n(all.dim(0) / ranks) {}
  /// The rank that is `steps` before this one in the ring.
  int64_t before(int64_t steps) const { return (own + ranks - steps % ranks) % ranks; }
  int next() const { return static_cast<int>((own + 1) % ranks); }
  Tensor of(const Tensor& all, int64_t rank) const { return all.rows(rank * n, n); }
};

/// While it lives, GEMMs are on this many parts of the rows.
class InPieces {
 public:
  InPieces(const Run& r, int64_t pieces) : exec_(r.exec()) { exec_.pieces = static_cast<int>(pieces); }
  InPieces(const InPieces&) = delete;
  InPieces& operator=(const InPieces&) = delete;
  ~InPieces() { exec_.pieces = 1; }

 private:
  ops::Exec& exec_;
};

/// Every rank sends a piece of its rows to every other.
std::vector<comm::Handle> send_pieces(const Run& r, const CommOverlap& overlap, const Tensor& all) {
  const Blocks b(r, all);
  const int64_t pieces = piece_count(overlap, b.n);
  std::vector<comm::Handle> out;
  for (int64_t i = 0; i < pieces; ++i) {
    const Slice rows = even_part(b.n, pieces, i);
    std::vector<comm::Message> messages;
    for (int64_t step = 1; step < b.ranks; ++step) {
      const auto to = static_cast<int>(b.before(b.ranks - step)), from = static_cast<int>(b.before(step));
      const auto tag = static_cast<int>(i);
      messages.push_back(
          comm::Message::send(view_of(b.of(all, b.own).rows(rows.begin, rows.count)), to, tag));
      messages.push_back(
          comm::Message::recv(view_of(b.of(all, from).rows(rows.begin, rows.count)), from, tag));
    }
    out.push_back(r.exchange_async(std::move(messages)));
  }
  return out;
}

/// In step i every rank sends on the rows that it has got in the step before.
std::vector<comm::Handle> send_around(const Run& r, const Tensor& all) {
  const Blocks b(r, all);
  std::vector<comm::Handle> out;
  for (int64_t step = 1; step < b.ranks; ++step) {
    const auto tag = static_cast<int>(step);
    std::vector<comm::Message> messages{
        comm::Message::send(view_of(b.of(all, b.before(step - 1))), b.next(), tag),
        comm::Message::recv(view_of(b.of(all, b.before(step))), static_cast<int>(b.before(1)), tag)};
    const comm::Handle previous = out.empty() ? comm::Handle{} : out.back();
    out.push_back(r.exchange_async(std::move(messages), previous));
  }
  return out;
}

/// Sends this rank's rows, in pieces or around the ring.
void send_block(const Run& r, const CommOverlap& overlap, Slot all) {
  r.in_flight().add(
      all, overlap.method == TpCommOverlap::ring ? send_around(r, r[all]) : send_pieces(r, overlap, r[all]));
}

/// The output of a GEMM is written piece by piece, each with the rows of all ranks together, so that the
/// collective of a piece finds them in one place.
void sum_pieces(const Run& r, const CommOverlap& overlap, const Tensor& partial, const Tensor& out,
                const GemmOfRows& gemm) {
  const Blocks b(r, partial);
  const int64_t pieces = piece_count(overlap, b.n);
  const InPieces in_pieces(r, pieces * b.ranks);
  std::vector<comm::Handle> in_flight;
  for (int64_t i = 0; i < pieces; ++i) {
    const Slice rows = even_part(b.n, pieces, i);
    const int64_t begin = rows.begin * b.ranks;
    for (int64_t rank = 0; rank < b.ranks; ++rank)
      gemm({.in = rank * b.n + rows.begin, .count = rows.count, .out = begin + rank * rows.count});
    in_flight.push_back(
        r.reduce_scatter_async(partial.rows(begin, rows.count * b.ranks), out.rows(rows.begin, rows.count)));
  }
  for (comm::Handle& h : in_flight) h.wait();
}

void all_reduce_pieces(const Run& r, const CommOverlap& overlap, const Tensor& out, const GemmOfRows& gemm) {
  const int64_t n = out.dim(0), pieces = piece_count(overlap, n);
  const InPieces in_pieces(r, pieces);
  std::vector<comm::Handle> in_flight;
  for (int64_t i = 0; i < pieces; ++i) {
    const Slice rows = even_part(n, pieces, i);
    gemm({.in = rows.begin, .count = rows.count, .out = rows.begin});
    in_flight.push_back(r.all_reduce_async(out.rows(rows.begin, rows.count)));
  }
  for (comm::Handle& h : in_flight) h.wait();
}

/// The sum of the rows of rank b begins at rank b + 1 and ends at b, where `out` has room for it. On the way
/// `out` holds the sum that has just arrived.
void sum_around(const Run& r, const Tensor& partial, const Tensor& out, const GemmOfRows& gemm) {
  const Blocks b(r, partial);
  const InPieces in_pieces(r, b.ranks);
  comm::Handle in_flight;
  for (int64_t step = 1; step <= b.ranks; ++step) {
    const int64_t owner = b.before(step);
    const Tensor rows = b.of(partial, owner);
    gemm({.in = owner * b.n, .count = b.n, .out = owner * b.n});
    in_flight.wait();
    if (step == b.ranks) {
      ops::add_rows(r.exec(), {.x = rows, .out = out, .accumulate = true});
      return;
    }
    if (step > 1) ops::add_rows(r.exec(), {.x = out, .out = rows, .accumulate = true});
    const auto tag = static_cast<int>(step);
    in_flight = r.exchange_async({comm::Message::send(view_of(rows), b.next(), tag),
                                  comm::Message::recv(view_of(out), static_cast<int>(b.before(1)), tag)});
  }
}

}  // namespace

void start_gather(const Run& r, const CommOverlap& overlap, Slot own, Slot all) {
  const Tensor from = r[own], to = r[all];
  // The second gather feeds wgrad, which runs one GEMM later.
  const bool later = overlap.method != TpCommOverlap::none && r.recomputes();
  if (!later && !divides_gemms(overlap)) {
    r.all_gather_async(from, to).wait();
    return;
  }
  // Only `all` stays alive until the GEMM.
  const Blocks b(r, to);
  const Tensor block = b.of(to, b.own);
  ops::copy(r.exec(), from, block);
  if (later)
    r.in_flight().add(all, {r.all_gather_async(block, to)});
  else
    send_block(r, overlap, all);
}

void start_gather_in_place(const Run& r, const CommOverlap& overlap, Slot all) {
  if (divides_gemms(overlap) && !r.recomputes()) return send_block(r, overlap, all);
  const Tensor to = r[all];
  const Blocks b(r, to);
  r.all_gather_async(b.of(to, b.own), to).wait();
}

void wait_for(const Run& r, Slot slot) {
  for (comm::Handle& h : r.in_flight().take(slot)) h.wait();
}

void multiply_gathered(const Run& r, const CommOverlap& overlap, Slot all, const Tensor& rows,
                       const GemmOfRows& gemm) {
  const Blocks b(r, rows);
  const auto whole = [&](int64_t rank) { gemm({.in = rank * b.n, .count = b.n, .out = rank * b.n}); };
  // The pieces are the same when all rows are there: when they were gathered again for another GEMM.
  if (r.recomputes()) wait_for(r, all);
  std::vector<comm::Handle> arriving = r.in_flight().take(all);
  const auto wait = [&](int64_t i) {
    if (!arriving.empty()) arriving.at(static_cast<size_t>(i)).wait();
  };
  if (overlap.method == TpCommOverlap::ring) {
    const InPieces in_pieces(r, b.ranks);
    for (int64_t step = 0; step < b.ranks; ++step) {
      if (step > 0) wait(step - 1);
      whole(b.before(step));
    }
  } else if (overlap.method == TpCommOverlap::pipelined) {
    const int64_t pieces = piece_count(overlap, b.n);
    const InPieces in_pieces(r, 1 + pieces * (b.ranks - 1));
    whole(b.own);
    for (int64_t i = 0; i < pieces; ++i) {
      const Slice piece = even_part(b.n, pieces, i);
      wait(i);
      for (int64_t step = 1; step < b.ranks; ++step) {
        const int64_t begin = b.before(step) * b.n + piece.begin;
        gemm({.in = begin, .count = piece.count, .out = begin});
      }
    }
  } else {
    gemm({.in = 0, .count = rows.dim(0), .out = 0});
  }
}

void multiply_and_sum(const Run& r, const CommOverlap& overlap, Slot partial, Slot out,
                      const GemmOfRows& gemm) {
  const Tensor parts = r[partial], sum = r[out];
  const bool scatters = partial.id != out.id;
  if (divides_gemms(overlap)) {
    if (!scatters) return all_reduce_pieces(r, overlap, sum, gemm);
    if (overlap.method == TpCommOverlap::ring) return sum_around(r, parts, sum, gemm);
    return sum_pieces(r, overlap, parts, sum, gemm);
  }
  gemm({.in = 0, .count = parts.dim(0), .out = 0});
  (scatters ? r.reduce_scatter_async(parts, sum) : r.all_reduce_async(sum)).wait();
}

}  // namespace nrl::model
