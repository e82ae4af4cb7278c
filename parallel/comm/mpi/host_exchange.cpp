#include "parallel/comm/mpi/host_exchange.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "core/base/log.h"
#include "parallel/comm/reduce.h"

namespace nrl::comm {

namespace {

constexpr int64_t longest_piece = 256
                                  << 10;  // bytes of a message: full speed of a network, and still overlapped
constexpr int64_t block_align = 16;       // elements

/// Blocks of `total` elements for `ranks` ranks.
int64_t block_size(int64_t total, int ranks) {
  return ((total + ranks - 1) / ranks + block_align - 1) / block_align * block_align;
}

}  // namespace

int64_t spanning_window_bytes(const MpiOptions& options, Op op, int64_t bytes, int ranks) {
  const int64_t summed = shared_window_bytes(options, Op::reduce_scatter, bytes, ranks);
  const int64_t shared = shared_window_bytes(options, Op::all_gather, bytes, ranks);
  switch (op) {
    case Op::reduce_scatter:
      return summed;
    case Op::all_gather:
    case Op::broadcast:
      return shared;
    case Op::all_reduce:
      return std::max(summed, shared);
    default:
      return 0;
  }
}

/// A collective of blocks.
struct HostExchange::Job {
  int64_t each = 0, total = 0;  ///< elements of a block (the last ones may be shorter) and of the vector
  DType dtype = DType::u8;
  Reduce op = Reduce::sum;
  const std::byte* in = nullptr;  ///< the vector to sum; null: nothing to sum
  std::byte* own = nullptr;       ///< this rank's block, once it is complete
  std::byte* out = nullptr;       ///< the vector to gather; null: nothing to gather
  int root = -1;                  ///< of a broadcast
  int root_host = -1;

  // Set by run().
  int64_t piece = 0;                     ///< elements of a block
  std::array<std::byte*, 2> sums{};      ///< over this host, of the blocks that this rank carries
  std::array<std::byte*, 2> received{};  ///< sums of this rank's block over the other hosts
  std::array<std::vector<MPI_Request>, 2> partials{}, results{};

  int64_t width() const { return size_of(dtype); }
  /// Piece `s` of a block, in elements of the vector.
  Range range(int block, int64_t s) const {
    const int64_t base = block * each;
    const int64_t begin = std::min(base + s * piece, total);
    return {begin, std::clamp<int64_t>(std::min(base + each, total) - begin, 0, piece)};
  }
  Part part(int block, int64_t s, int peer) const {
    const Range r = range(block, s);
    return {out + r.begin * width(), r.size * width(), peer};
  }
};

HostExchange::HostExchange(const MpiOptions& options, MPI_Comm comm, const HostLayout& layout, int rank)
    : comm_(comm), layout_(layout), rank_(rank), host_(layout.host_of[rank]), index_(layout.index_of[rank]) {
  // Two pieces are in flight, each with the sums of carried blocks and what other hosts send for the own one.
  const auto blocks = layout.most_carried() + static_cast<int64_t>(layout.hosts.size()) - 1;
  piece_bytes_ = std::min(longest_piece, options.scratch_bytes / (2 * blocks));
  carried_.resize(layout.hosts[host_].size());
  for (int block = 0; block < layout.ranks(); ++block) {
    const auto carrier = static_cast<size_t>(layout.carrier(block, host_));
    carried_[layout.index_of[carrier]].push_back(block);
  }
}

Task HostExchange::create(const MpiOptions& options, MPI_Comm comm, const HostLayout& layout,
                          std::unique_ptr<HostExchange>& out) {
  int rank = 0;
  mpi_check(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  std::unique_ptr<HostExchange> made(new HostExchange(options, comm, layout, rank));
  co_await mpi_barrier(comm);
  mpi_check(MPI_Comm_split(comm, made->host_, rank, &made->local_), "MPI_Comm_split");
  ++mpi_counts().communicators;
  co_await SharedWindow::create(made->local_, options.shared_slot_bytes, made->window_);
  int good = made->window_ != nullptr;
  MPI_Request request = MPI_REQUEST_NULL;
  mpi_started(MPI_Iallreduce(MPI_IN_PLACE, &good, 1, MPI_INT, MPI_MIN, comm, &request), "MPI_Iallreduce");
  co_await until([&] { return test_all({&request, 1}, "MPI_Iallreduce"); });
  if (!good) {
    co_await made->free();
    co_return;
  }
  made->window_->serve_messages(comm);
  out = std::move(made);
}

Task HostExchange::free() {
  if (window_) co_await window_->free();
  mpi_check(MPI_Comm_free(&local_), "MPI_Comm_free");
  --mpi_counts().communicators;
}

template <class F>
void HostExchange::for_carriers(F f) const {
  const int hosts = static_cast<int>(layout_.hosts.size());
  for (int i = 1; i < hosts; ++i) {
    const int host = (host_ + i) % hosts;
    f(host, layout_.carrier(rank_, host));
  }
}

std::vector<Ranges> HostExchange::ranges(const Job& job, int64_t piece) const {
  std::vector<Ranges> out(carried_.size());
  for (size_t i = 0; i < out.size(); ++i)
    for (const int block : carried_[i]) out[i].push_back(job.range(block, piece));
  return out;
}

/// Sums a piece of every block over this host and sends the sums; a broadcast sends the root's blocks.
Task HostExchange::start(Job& job, int64_t piece) {
  const auto parity = static_cast<size_t>(piece & 1);
  const int64_t width = job.width();
  std::vector<MPI_Request>& requests = job.partials[parity];
  if (job.in) {
    const int64_t expected = job.range(rank_, piece).size * width;
    std::byte* at = job.received[parity];
    for_carriers([&](int, int carrier) {
      post_recv({at, expected, carrier}, collective_tag, comm_, requests);
      at += expected;
    });
    co_await window_->reduce_ranges(job.in, ranges(job, piece), job.sums[parity], job.dtype, job.op);
    at = job.sums[parity];
    for (const int block : carried()) {
      const int64_t bytes = job.range(block, piece).size * width;
      if (!is_here(block)) post_send({at, bytes, block}, collective_tag, comm_, requests);
      at += bytes;
    }
  } else if (job.root_host == host_) {
    std::vector<Ranges> whole(carried_.size());
    for (int block = 0; block < layout_.ranks(); ++block)
      whole[layout_.index_of[job.root]].push_back(job.range(block, piece));
    co_await window_->share_ranges(job.out, whole, width);
    for (const int block : carried())
      if (!is_here(block)) post_send(job.part(block, piece, block), collective_tag, comm_, requests);
  } else if (job.root_host >= 0) {
    post_recv(job.part(rank_, piece, layout_.carrier(rank_, job.root_host)), collective_tag, comm_, requests);
  }
}

/// The partials of a piece have arrived: completes this rank's block and sends it to the other hosts.
void HostExchange::finish(Job& job, int64_t piece) {
  const auto parity = static_cast<size_t>(piece & 1);
  const int64_t width = job.width(), size = job.range(rank_, piece).size;
  if (job.in) {
    std::vector<const void*> parts(layout_.hosts.size());
    const std::byte* at = job.sums[parity];
    for (const int block : carried()) {
      if (block == rank_) parts[host_] = at;
      at += job.range(block, piece).size * width;
    }
    at = job.received[parity];
    for_carriers([&](int host, int) {
      parts[host] = at;
      at += size * width;
    });
    reduce_into(job.own + piece * job.piece * width, parts, size, job.dtype, job.op);
  }
  if (!job.out) return;
  std::vector<MPI_Request>& requests = job.results[parity];
  if (job.root_host != host_)
    for (const int block : carried())
      if (!is_here(block)) post_recv(job.part(block, piece, block), result_tag, comm_, requests);
  for_carriers([&](int host, int carrier) {
    if (host != job.root_host) post_send(job.part(rank_, piece, carrier), result_tag, comm_, requests);
  });
}

/// The results of a piece have arrived: all ranks of this host get them.
Task HostExchange::share(Job& job, int64_t piece) {
  if (job.root_host == host_) co_return;
  co_await window_->share_ranges(job.out, ranges(job, piece), job.width());
}

Task HostExchange::run(Job job) {
  const int64_t width = job.width();
  job.piece = std::clamp<int64_t>(piece_bytes_ / width, 1, job.each);
  if (job.in) {
    const int64_t sums = static_cast<int64_t>(carried().size()) * job.piece * width;
    const int64_t received = (static_cast<int64_t>(layout_.hosts.size()) - 1) * job.piece * width;
    const auto needed = static_cast<size_t>(2 * (sums + received));
    if (scratch_.size() < needed) scratch_.resize(needed);
    for (int64_t i = 0; i < 2; ++i) {
      job.sums[i] = scratch_.data() + i * (sums + received);
      job.received[i] = job.sums[i] + sums;
    }
  }
  const int64_t pieces = (job.each + job.piece - 1) / job.piece;
  for (int64_t s = 0; s < pieces + 2; ++s) {
    if (s < pieces) co_await start(job, s);
    if (s >= 1 && s - 1 < pieces) {
      std::vector<MPI_Request>& partials = job.partials[(s - 1) & 1];
      co_await until([&] { return test_all(partials, "a message between hosts"); });
      partials.clear();
      finish(job, s - 1);
    }
    if (s >= 2 && job.out) {
      std::vector<MPI_Request>& results = job.results[s & 1];
      co_await until([&] { return test_all(results, "a message between hosts"); });
      results.clear();
      co_await share(job, s - 2);
    }
  }
}

Task HostExchange::all_reduce(std::byte* data, int64_t count, DType dtype, Reduce op) {
  const int64_t each = block_size(count, layout_.ranks());
  return run({.each = each,
              .total = count,
              .dtype = dtype,
              .op = op,
              .in = data,
              .own = data + rank_ * each * size_of(dtype),
              .out = data});
}

Task HostExchange::reduce_scatter(const std::byte* in, std::byte* out, int64_t count, DType dtype,
                                  Reduce op) {
  return run(
      {.each = count, .total = count * layout_.ranks(), .dtype = dtype, .op = op, .in = in, .own = out});
}

Task HostExchange::all_gather(const std::byte* in, std::byte* out, int64_t bytes) {
  std::byte* own = out + rank_ * bytes;
  if (in != own) std::memcpy(own, in, static_cast<size_t>(bytes));
  return run({.each = bytes, .total = bytes * layout_.ranks(), .out = out});
}

Task HostExchange::broadcast(std::byte* data, int64_t bytes, int root) {
  return run({.each = block_size(bytes, layout_.ranks()),
              .total = bytes,
              .out = data,
              .root = root,
              .root_host = layout_.host_of[root]});
}

}  // namespace nrl::comm
