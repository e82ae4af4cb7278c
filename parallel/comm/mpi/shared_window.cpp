#include "parallel/comm/mpi/shared_window.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "core/base/error.h"
#include "core/base/log.h"
#include "parallel/comm/reduce.h"

namespace nrl::comm {

namespace {

constexpr int64_t head = 4096;   // Arrivals has its own page
constexpr int64_t align = 16;    // elements; alignment of the slices of a chunk
constexpr int direct_ranks = 2;  // up to this many, each rank reduces whole chunks itself

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

/// Chunk k of `total` in chunks of `each`.
Range chunk_of(int64_t k, int64_t each, int64_t total) {
  const int64_t begin = k * each;
  return {begin, std::min(each, total - begin)};
}

/// Rank r's slice of a chunk of n elements.
Range slice_of(int r, int size, int64_t n) {
  const int64_t each = ((n + size - 1) / size + align - 1) / align * align;
  const int64_t begin = std::min(r * each, n);
  return {begin, std::min(each, n - begin)};
}

/// Calls f(range, offset) for the parts of elements [begin, begin + size) of `ranges`; `offset` counts from
/// `begin`.
template <class F>
void for_parts(const Ranges& ranges, int64_t begin, int64_t size, F f) {
  int64_t before = 0;
  for (const Range& r : ranges) {
    const int64_t first = std::max(begin, before), last = std::min(begin + size, before + r.size);
    if (first < last) f(Range{r.begin + first - before, last - first}, first - begin);
    before += r.size;
  }
}

// Elements that a rank gets of a reduction: their number, and where a chunk of them lies in the vector.

/// Block r of a vector in equal blocks.
struct EqualBlocks {
  int64_t count;
  int64_t size(int) const { return count; }
  template <class F>
  void for_chunk(int r, const Range& chunk, F f) const {
    f(Range{r * count + chunk.begin, chunk.size}, int64_t{0});
  }
};

struct RangesOfRanks {
  std::vector<Ranges> of_rank;
  int64_t size(int r) const {
    int64_t sum = 0;
    for (const Range& range : of_rank[r]) sum += range.size;
    return sum;
  }
  template <class F>
  void for_chunk(int r, const Range& chunk, F f) const {
    for_parts(of_rank[r], chunk.begin, chunk.size, f);
  }
};

}  // namespace

int64_t shared_window_bytes(const MpiOptions& options, Op op, int64_t bytes, int ranks) {
  const int64_t slot = options.shared_slot_bytes;
  const auto pages = [](int64_t n) { return (n + 4095) / 4096 * 4096; };
  const int64_t arrivals = ranks * head;
  switch (op) {
    case Op::barrier:
      return arrivals;
    case Op::broadcast:  // of all slots only those of the root are used
      return arrivals + 2 * pages(std::min(bytes, slot));
    case Op::all_gather:  // own and all other slots; `bytes` are those of the result
      return arrivals + 2 * ranks * pages(std::min(bytes / ranks, slot));
    case Op::reduce_scatter:
    case Op::all_reduce: {  // its own slots, and a slice of each of the others; results likewise
      const int64_t used = std::min(bytes, slot), slice = pages(used / ranks);
      if (op == Op::all_reduce && ranks <= direct_ranks) return arrivals + 2 * ranks * pages(used);
      const int64_t results = op == Op::all_reduce ? 2 * ranks * slice : 0;
      return arrivals + 2 * (pages(used) + (ranks - 1) * slice) + results;
    }
    default:
      return 0;
  }
}

Task SharedWindow::create(MPI_Comm comm, int64_t slot_bytes, std::unique_ptr<SharedWindow>& out) {
  int rank = 0, size = 0;
  mpi_check(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  mpi_check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  std::unique_ptr<SharedWindow> made(new SharedWindow(slot_bytes, rank, size));
  const int64_t bytes = head + 2 * (slot_bytes + made->result_bytes());
  MPI_Info info = MPI_INFO_NULL;
  mpi_check(MPI_Info_create(&info), "MPI_Info_create");
  mpi_check(MPI_Info_set(info, "alloc_shared_noncontig", "true"), "MPI_Info_set");
  void* base = nullptr;
  co_await mpi_barrier(comm);
  const int rc = MPI_Win_allocate_shared(bytes, 1, info, comm, &base, &made->window_);
  MPI_Info_free(&info);
  int good = rc == MPI_SUCCESS;
  MPI_Request request = MPI_REQUEST_NULL;
  mpi_started(MPI_Iallreduce(MPI_IN_PLACE, &good, 1, MPI_INT, MPI_MIN, comm, &request), "MPI_Iallreduce");
  co_await until([&] { return test_all({&request, 1}, "MPI_Iallreduce"); });
  if (!good) {
    if (rank == 0)
      log::warn("shared memory of {} bytes per rank could not be allocated: collectives use MPI messages",
                bytes);
    co_return;
  }
  ++mpi_counts().windows;
  mpi_check(MPI_Win_lock_all(MPI_MODE_NOCHECK, made->window_), "MPI_Win_lock_all");
  for (int r = 0; r < size; ++r) {
    MPI_Aint length = 0;
    int unit = 0;
    void* segment = nullptr;
    mpi_check(MPI_Win_shared_query(made->window_, r, &length, &unit, &segment), "MPI_Win_shared_query");
    made->segments_.push_back(static_cast<std::byte*>(segment));
  }
  static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);
  new (made->segments_[rank]) Arrivals{};
  for (std::byte* segment : made->segments_)
    made->arrivals_.push_back(std::launder(reinterpret_cast<Arrivals*>(segment)));
  mpi_check(MPI_Win_sync(made->window_), "MPI_Win_sync");
  co_await mpi_barrier(comm);
  made->comm_ = comm;
  out = std::move(made);
}

Task SharedWindow::free() {
  co_await mpi_barrier(comm_);
  mpi_check(MPI_Win_unlock_all(window_), "MPI_Win_unlock_all");
  mpi_check(MPI_Win_free(&window_), "MPI_Win_free");
  --mpi_counts().windows;
}

int64_t SharedWindow::result_bytes() const {
  const int64_t slice = (slot_bytes_ + size_ - 1) / size_ + align * 8;
  return (slice + 63) / 64 * 64;
}

std::byte* SharedWindow::slot(int rank, int64_t parity) const {
  return segments_[rank] + head + (parity & 1) * slot_bytes_;
}

std::byte* SharedWindow::result(int rank, int64_t parity) const {
  return segments_[rank] + head + 2 * slot_bytes_ + (parity & 1) * result_bytes();
}

void SharedWindow::enter() {
  ++entered_;
  seen_ = 0;
  waiting_ = true;
  // Both sides write, then read: either a sleeper sees the new count, or this rank sees the sleeper.
  arrivals_[rank_]->count.store(entered_, std::memory_order_seq_cst);
  for (int i = 1; i < size_; ++i) arrivals_[(rank_ + i) % size_]->doorbell.ring_sleeper();
}

bool SharedWindow::all_entered() {
  while (seen_ < size_ - 1) {
    const Arrivals& other = *arrivals_[(rank_ + seen_ + 1) % size_];
    const uint32_t count = other.count.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(count - entered_) < 0) {
      if (served_ != MPI_COMM_NULL) {
        int unused = 0;
        mpi_check(MPI_Iprobe(MPI_ANY_SOURCE, collective_tag, served_, &unused, MPI_STATUS_IGNORE),
                  "MPI_Iprobe");
      }
      return false;
    }
    ++seen_;
  }
  waiting_ = false;
  return true;
}

Task SharedWindow::barrier() {
  enter();
  co_await until([this] { return all_entered(); });
}

template <class CopyIn, class Reduction, class CopyOut>
Task SharedWindow::pipeline(int64_t chunks, int depth, CopyIn copy_in, Reduction reduction,
                            CopyOut copy_out) {
  const int64_t last = chunks - 1 + depth;
  for (int64_t s = 0; s <= last; ++s) {
    if (s < chunks) copy_in(s, step_);
    if (s >= 1 && s - 1 < chunks) reduction(s - 1, step_ - 1, step_);
    if (depth == 2 && s >= 2) copy_out(s - 2, step_ - 1);
    if (s < last) {
      enter();
      co_await until([this] { return all_entered(); });
      ++step_;
    }
  }
}

Task SharedWindow::all_reduce(std::byte* data, int64_t count, DType dtype, Reduce op) {
  const int64_t width = size_of(dtype);
  const int64_t each = slot_bytes_ / width;
  const int64_t chunks = (count + each - 1) / each;
  std::vector<const void*> parts(static_cast<size_t>(size_));
  const auto copy_in = [&](int64_t k, int64_t parity) {
    const Range c = chunk_of(k, each, count);
    copy_bytes(slot(rank_, parity), data + c.begin * width, c.size * width);
  };
  if (size_ <= direct_ranks) {
    co_await pipeline(
        chunks, 1, copy_in,
        [&](int64_t k, int64_t parity, int64_t) {
          const Range c = chunk_of(k, each, count);
          for (int r = 0; r < size_; ++r) parts[r] = slot(r, parity);
          parts[rank_] = data + c.begin * width;
          reduce_into(data + c.begin * width, parts, c.size, dtype, op);
        },
        [](int64_t, int64_t) {});
    co_return;
  }
  co_await pipeline(
      chunks, 2, copy_in,
      [&](int64_t k, int64_t parity, int64_t to) {
        const Range s = slice_of(rank_, size_, chunk_of(k, each, count).size);
        for (int r = 0; r < size_; ++r) parts[r] = slot(r, parity) + s.begin * width;
        reduce_into(result(rank_, to), parts, s.size, dtype, op);
      },
      [&](int64_t k, int64_t parity) {
        const Range c = chunk_of(k, each, count);
        for (int r = 0; r < size_; ++r) {
          const Range s = slice_of(r, size_, c.size);
          copy_bytes(data + (c.begin + s.begin) * width, result(r, parity), s.size * width);
        }
      });
}

template <class Blocks>
Task SharedWindow::reduce_blocks(const std::byte* in, std::byte* out, DType dtype, Reduce op, Blocks blocks) {
  const int64_t width = size_of(dtype);
  // A chunk is the same range of every rank's block.
  const int64_t each = std::max<int64_t>(1, slot_bytes_ / width / size_);
  int64_t longest = 0;
  for (int r = 0; r < size_; ++r) longest = std::max(longest, blocks.size(r));
  const auto chunk = [&](int r, int64_t k) {
    const Range c = chunk_of(k, each, blocks.size(r));
    return Range{c.begin, std::max<int64_t>(c.size, 0)};
  };
  std::vector<const void*> parts(static_cast<size_t>(size_));
  co_await pipeline((longest + each - 1) / each, 1,
                    [&](int64_t k, int64_t parity) {
                      for (int r = 0; r < size_; ++r) {
                        if (r == rank_) continue;
                        blocks.for_chunk(r, chunk(r, k), [&](const Range& part, int64_t offset) {
                          copy_bytes(slot(rank_, parity) + (r * each + offset) * width,
                                     in + part.begin * width, part.size * width);
                        });
                      }
                    },
                    [&](int64_t k, int64_t parity, int64_t) {
                      const Range c = chunk(rank_, k);
                      blocks.for_chunk(rank_, c, [&](const Range& part, int64_t offset) {
                        for (int r = 0; r < size_; ++r)
                          parts[r] = slot(r, parity) + (rank_ * each + offset) * width;
                        parts[rank_] = in + part.begin * width;
                        reduce_into(out + (c.begin + offset) * width, parts, part.size, dtype, op);
                      });
                    },
                    [](int64_t, int64_t) {});
}

Task SharedWindow::reduce_scatter(const std::byte* in, std::byte* out, int64_t count, DType dtype,
                                  Reduce op) {
  return reduce_blocks(in, out, dtype, op, EqualBlocks{count});
}

Task SharedWindow::reduce_ranges(const std::byte* in, std::vector<Ranges> of_rank, std::byte* out,
                                 DType dtype, Reduce op) {
  return reduce_blocks(in, out, dtype, op, RangesOfRanks{std::move(of_rank)});
}

Task SharedWindow::share_ranges(std::byte* data, std::vector<Ranges> of_rank, int64_t width) {
  const RangesOfRanks blocks{std::move(of_rank)};
  const int64_t each = slot_bytes_ / width;
  int64_t longest = 0;
  for (int r = 0; r < size_; ++r) longest = std::max(longest, blocks.size(r));
  co_await pipeline(
      (longest + each - 1) / each, 1,
      [&](int64_t k, int64_t parity) {
        blocks.for_chunk(rank_, {k * each, each}, [&](const Range& part, int64_t offset) {
          copy_bytes(slot(rank_, parity) + offset * width, data + part.begin * width, part.size * width);
        });
      },
      [&](int64_t k, int64_t parity, int64_t) {
        for (int i = 1; i < size_; ++i) {
          const int r = (rank_ + i) % size_;
          blocks.for_chunk(r, {k * each, each}, [&](const Range& part, int64_t offset) {
            copy_bytes(data + part.begin * width, slot(r, parity) + offset * width, part.size * width);
          });
        }
      },
      [](int64_t, int64_t) {});
}

Task SharedWindow::all_gather(const std::byte* in, std::byte* out, int64_t bytes) {
  const int64_t each = slot_bytes_;
  co_await pipeline((bytes + each - 1) / each, 1,
                    [&](int64_t k, int64_t parity) {
                      const Range c = chunk_of(k, each, bytes);
                      copy_bytes(slot(rank_, parity), in + c.begin, c.size);
                    },
                    [&](int64_t k, int64_t parity, int64_t) {
                      const Range c = chunk_of(k, each, bytes);
                      for (int i = 0; i < size_; ++i) {
                        const int r = (rank_ + i) % size_;
                        const std::byte* from = i == 0 ? in + c.begin : slot(r, parity);
                        std::byte* to = out + r * bytes + c.begin;
                        if (to != from) copy_bytes(to, from, c.size);
                      }
                    },
                    [](int64_t, int64_t) {});
}

Task SharedWindow::broadcast(std::byte* data, int64_t bytes, int root) {
  const int64_t each = slot_bytes_;
  co_await pipeline((bytes + each - 1) / each, 1,
                    [&](int64_t k, int64_t parity) {
                      const Range c = chunk_of(k, each, bytes);
                      if (rank_ == root) copy_bytes(slot(root, parity), data + c.begin, c.size);
                    },
                    [&](int64_t k, int64_t parity, int64_t) {
                      const Range c = chunk_of(k, each, bytes);
                      if (rank_ != root) copy_bytes(data + c.begin, slot(root, parity), c.size);
                    },
                    [](int64_t, int64_t) {});
}

}  // namespace nrl::comm
