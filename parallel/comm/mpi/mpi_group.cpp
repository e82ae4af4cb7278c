#include "parallel/comm/mpi/mpi_group.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/error.h"
#include "parallel/comm/reduce.h"

namespace nrl::comm {

namespace {

constexpr int64_t small_bytes = 8 << 10;  // below it, one all-gather is faster than two exchanges of slices

Task no_operation() {
  co_return;
}

/// Ranks in `world` of a communicator's members.
std::vector<int> ranks_in(MPI_Comm world, MPI_Comm comm, int size) {
  std::vector<int> here(static_cast<size_t>(size)), ranks(here.size());
  for (int i = 0; i < size; ++i) here[i] = i;
  MPI_Group ours = MPI_GROUP_NULL, all = MPI_GROUP_NULL;
  mpi_check(MPI_Comm_group(comm, &ours), "MPI_Comm_group");
  mpi_check(MPI_Comm_group(world, &all), "MPI_Comm_group");
  mpi_check(MPI_Group_translate_ranks(ours, size, here.data(), all, ranks.data()),
            "MPI_Group_translate_ranks");
  MPI_Group_free(&ours);
  MPI_Group_free(&all);
  return ranks;
}

class MpiMessages final : public PendingMessages {
 public:
  MpiMessages(MPI_Comm comm, int rank, std::span<const Message> messages) : rank_(rank) {
    for (const Message& m : messages) {
      const Part part{static_cast<std::byte*>(m.data.data), m.data.bytes(), m.peer};
      if (m.kind == Message::Kind::recv) {
        const size_t before = requests_.size();
        post_recv(part, m.tag, comm, requests_);
        for (size_t i = before; i < requests_.size(); ++i) expected_.push_back({i, part.bytes, m.peer});
      }
    }
    for (const Message& m : messages) {
      const Part part{static_cast<std::byte*>(m.data.data), m.data.bytes(), m.peer};
      if (m.kind == Message::Kind::send) post_send(part, m.tag, comm, requests_);
    }
    statuses_.resize(requests_.size());
  }

  bool test() override {
    int over = 0;
    mpi_check(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &over, statuses_.data()),
              "a message between ranks");
    if (!over) return false;
    mpi_counts().requests -= static_cast<int64_t>(requests_.size());
    for (size_t e = 0; e < expected_.size();) {  // the pieces of one message are adjacent
      int64_t got = 0;
      const auto [first, bytes, peer] = expected_[e];
      int64_t posted = 0;
      for (; e < expected_.size() && posted < bytes; ++e) {
        int n = 0;
        mpi_check(MPI_Get_count(&statuses_[expected_[e].request], MPI_BYTE, &n), "MPI_Get_count");
        got += n;
        posted += std::min<int64_t>(bytes - posted, int64_t{1} << 30);
      }
      NRL_CHECK(got == bytes, "rank {} expected {} bytes from rank {}; received {}", rank_, bytes, peer, got);
    }
    return true;
  }

 private:
  struct Expected {
    size_t request;
    int64_t bytes;
    int peer;
  };
  int rank_;
  std::vector<MPI_Request> requests_;
  std::vector<MPI_Status> statuses_;
  std::vector<Expected> expected_;
};

}  // namespace

Task MpiGroup::create(std::shared_ptr<MpiState> state, MPI_Comm comm, std::shared_ptr<MpiGroup>& out) {
  const auto group = std::make_shared<MpiGroup>();
  group->state_ = std::move(state);
  group->comm_ = comm;
  ++mpi_counts().communicators;
  mpi_check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  mpi_check(MPI_Comm_rank(comm, &group->rank_), "MPI_Comm_rank");
  mpi_check(MPI_Comm_size(comm, &group->size_), "MPI_Comm_size");
  group->members_ = ranks_in(group->state_->ordered, comm, group->size_);
  out = group;
  std::vector<int> host_of;
  for (const int r : group->members_) host_of.push_back(group->state_->host_of[r]);
  group->layout_ = HostLayout(host_of);
  const MpiOptions& options = group->state_->options;
  if (group->layout_.spans())
    co_await HostExchange::create(options, comm, group->layout_, group->host_exchange_);
  else if (group->layout_.hosts.size() == 1 && group->size_ > 1)
    co_await SharedWindow::create(comm, options.shared_slot_bytes, group->window_);
}

Task MpiGroup::free() {
  if (window_) co_await window_->free();
  if (host_exchange_) co_await host_exchange_->free();
  mpi_check(MPI_Comm_free(&comm_), "MPI_Comm_free");
  --mpi_counts().communicators;
}

std::byte* MpiGroup::scratch(int64_t bytes) {
  if (static_cast<int64_t>(scratch_.size()) < bytes) scratch_.resize(static_cast<size_t>(bytes));
  return scratch_.data();
}

void MpiGroup::reduce(void* out, std::span<const void* const> parts, int64_t count, DType dtype,
                      Reduce op) const {
  if (layout_.spans())
    reduce_by_group(out, parts, layout_.hosts, count, dtype, op);
  else
    reduce_into(out, parts, count, dtype, op);
}

Task MpiGroup::exchange(const std::vector<Part>& sends, const std::vector<Part>& recvs) {
  std::vector<MPI_Request> requests;
  for (const Part& p : recvs) post_recv(p, collective_tag, comm_, requests);
  for (const Part& p : sends) post_send(p, collective_tag, comm_, requests);
  co_await until([&] { return test_all(requests, "a message within a collective"); });
}

Task MpiGroup::gather(const std::byte* in, std::byte* out, int64_t bytes) {
  if (bytes <= small_bytes) {
    MPI_Request request = MPI_REQUEST_NULL;
    const std::byte* own = out + rank_ * bytes;
    mpi_started(MPI_Iallgather(in == own ? MPI_IN_PLACE : in, static_cast<int>(bytes), MPI_BYTE, out,
                               static_cast<int>(bytes), MPI_BYTE, comm_, &request),
                "MPI_Iallgather");
    co_await until([&] { return test_all({&request, 1}, "MPI_Iallgather"); });
    co_return;
  }
  if (in != out + rank_ * bytes) std::memcpy(out + rank_ * bytes, in, static_cast<size_t>(bytes));
  std::vector<Part> sends, recvs;
  for_each_peer([&](int r) {
    sends.push_back({out + rank_ * bytes, bytes, r});
    recvs.push_back({out + r * bytes, bytes, r});
  });
  co_await exchange(sends, recvs);
}

Task MpiGroup::all_reduce(std::byte* data, int64_t count, DType dtype, Reduce op) {
  const int64_t width = size_of(dtype);
  std::vector<const void*> parts(static_cast<size_t>(size_));
  if (count * width <= small_bytes) {
    std::byte* all = scratch(size_ * count * width);
    co_await gather(data, all, count * width);
    for (int r = 0; r < size_; ++r) parts[r] = all + r * count * width;
    reduce(data, parts, count, dtype, op);
    co_return;
  }
  // Per chunk: each rank receives its slice from all peers, reduces it and sends the result.
  const int64_t slice = std::max<int64_t>(state_->options.scratch_bytes / size_ / width, 1);
  std::byte* buffer = scratch(size_ * slice * width);
  for (int64_t begin = 0; begin < count; begin += slice * size_) {
    const int64_t n = std::min(slice * size_, count - begin);
    const int64_t each = (n + size_ - 1) / size_;
    const auto first = [&](int r) { return std::min(r * each, n); };
    const auto bytes = [&](int r) { return (std::min((r + 1) * each, n) - first(r)) * width; };
    const auto at = [&](int r) { return data + (begin + first(r)) * width; };
    std::vector<Part> out, in, own, rest;
    for_each_peer([&](int r) {
      out.push_back({at(r), bytes(r), r});
      in.push_back({buffer + r * slice * width, bytes(rank_), r});
      own.push_back({at(rank_), bytes(rank_), r});
      rest.push_back({at(r), bytes(r), r});
    });
    co_await exchange(out, in);
    for (int r = 0; r < size_; ++r) parts[r] = buffer + r * slice * width;
    parts[rank_] = at(rank_);
    reduce(at(rank_), parts, bytes(rank_) / width, dtype, op);
    co_await exchange(own, rest);
  }
}

Task MpiGroup::reduce_scatter(const std::byte* in, std::byte* out, int64_t count, DType dtype, Reduce op) {
  const int64_t width = size_of(dtype);
  std::vector<const void*> parts(static_cast<size_t>(size_));
  const int64_t each = std::max<int64_t>(state_->options.scratch_bytes / size_ / width, 1);
  std::byte* buffer = scratch(size_ * std::min(each, count) * width);
  for (int64_t begin = 0; begin < count; begin += each) {
    const int64_t n = std::min(each, count - begin);
    std::vector<Part> sends, recvs;
    for_each_peer([&](int r) {
      sends.push_back({const_cast<std::byte*>(in) + (r * count + begin) * width, n * width, r});
      recvs.push_back({buffer + r * n * width, n * width, r});
    });
    co_await exchange(sends, recvs);
    for (int r = 0; r < size_; ++r) parts[r] = buffer + r * n * width;
    parts[rank_] = in + (rank_ * count + begin) * width;
    reduce(out + begin * width, parts, n, dtype, op);
  }
}

Task MpiGroup::all_to_all(const Call& call) {
  const int64_t width = size_of(call.dtype);
  auto* in = static_cast<std::byte*>(const_cast<void*>(call.in));
  auto* out = static_cast<std::byte*>(call.out);
  std::vector<Part> sends, recvs;
  const bool even = call.op == Op::all_to_all;
  for (int r = 0; r < size_; ++r) {
    const auto at = static_cast<size_t>(r);
    const int64_t to = width * (even ? call.count : call.send_counts[at]);
    const int64_t from = width * (even ? call.count : call.recv_counts[at]);
    if (r != rank_) {
      sends.push_back({in, to, r});
      recvs.push_back({out, from, r});
    } else if (to > 0) {
      std::memcpy(out, in, static_cast<size_t>(to));
    }
    in += to;
    out += from;
  }
  const auto behind = [&](const Part& p) { return p.peer > rank_; };
  std::stable_partition(sends.begin(), sends.end(), behind);
  co_await exchange(sends, recvs);
}

Task MpiGroup::broadcast(std::byte* data, int64_t bytes, int root) {
  constexpr int64_t most = int64_t{1} << 30;
  for (int64_t begin = 0; begin < bytes; begin += most) {
    MPI_Request request = MPI_REQUEST_NULL;
    mpi_started(MPI_Ibcast(data + begin, static_cast<int>(std::min(most, bytes - begin)), MPI_BYTE, root,
                           comm_, &request),
                "MPI_Ibcast");
    co_await until([&] { return test_all({&request, 1}, "MPI_Ibcast"); });
  }
}

SharedWindow* MpiGroup::window_for(const Call& call) const {
  switch (call.op) {
    case Op::all_reduce:
    case Op::reduce_scatter:
    case Op::all_gather:
    case Op::broadcast:
    case Op::barrier:
      return in_shared_memory(call) ? window_.get() : nullptr;
    default:
      return nullptr;
  }
}

HostExchange* MpiGroup::exchange_for(const Call& call) const {
  const int64_t bytes = call.count * size_of(call.dtype);
  switch (call.op) {
    case Op::all_reduce:
    case Op::reduce_scatter:
    case Op::all_gather:
      // Few bytes arrive sooner without the steps inside a host.
      return in_shared_memory(call) && size_ * bytes > small_bytes ? host_exchange_.get() : nullptr;
    case Op::broadcast:
      return in_shared_memory(call) && bytes > small_bytes ? host_exchange_.get() : nullptr;
    default:
      return nullptr;
  }
}

bool MpiGroup::in_shared_memory(const Call& call) const {
  return call.count * size_of(call.dtype) >= state_->options.shared_min_bytes;
}

std::string_view MpiGroup::algorithm(const Call& call) const {
  if (exchange_for(call)) return "shared memory and messages";
  return window_for(call) ? "shared memory" : "messages";
}

Task MpiGroup::execute_parts(std::vector<Call> parts) {
  for (const Call& part : parts) co_await execute(part);
}

Task MpiGroup::execute(const Call& call) {
  if (!call.more.empty()) return execute_parts(call.parts());
  const auto* in = static_cast<const std::byte*>(call.in);
  auto* out = static_cast<std::byte*>(call.out);
  const int64_t bytes = call.count * size_of(call.dtype);
  if (bytes == 0 && call.op != Op::barrier && call.op != Op::all_to_all_v) return no_operation();
  SharedWindow* window = window_for(call);
  HostExchange* hosts = exchange_for(call);
  switch (call.op) {
    case Op::all_reduce:
      if (hosts) return hosts->all_reduce(out, call.count, call.dtype, call.reduce);
      return window ? window->all_reduce(out, call.count, call.dtype, call.reduce)
                    : all_reduce(out, call.count, call.dtype, call.reduce);
    case Op::reduce_scatter:
      if (hosts) return hosts->reduce_scatter(in, out, call.count, call.dtype, call.reduce);
      return window ? window->reduce_scatter(in, out, call.count, call.dtype, call.reduce)
                    : reduce_scatter(in, out, call.count, call.dtype, call.reduce);
    case Op::all_gather:
      if (hosts) return hosts->all_gather(in, out, bytes);
      return window ? window->all_gather(in, out, bytes) : gather(in, out, bytes);
    case Op::broadcast:
      if (hosts) return hosts->broadcast(out, bytes, call.peer);
      return window ? window->broadcast(out, bytes, call.peer) : broadcast(out, bytes, call.peer);
    case Op::all_to_all:
    case Op::all_to_all_v:
      return all_to_all(call);
    case Op::barrier:
      return window ? window->barrier() : mpi_barrier(comm_);
    default:
      NRL_CHECK(false, "{} is not a collective", name_of(call.op));
  }
  return no_operation();
}

std::unique_ptr<PendingMessages> MpiGroup::post(std::vector<Message> messages) {
  return std::make_unique<MpiMessages>(comm_, rank_, messages);
}

}  // namespace nrl::comm
