#include "parallel/comm/mpi/mpi_comm.h"

#include "parallel/comm/host_transport.h"
#include "parallel/comm/mpi/shared_window.h"
#include "parallel/comm/reduce.h"
#include "parallel/comm/self/self_comm.h"

#include <algorithm>
#include <cstring>
#include <functional>

namespace nrl::comm {

namespace {

constexpr int64_t kSmallBytes = 8 << 10;  // below it one gather of everything beats two exchanges of slices

/// The MPI side of a communicator. All methods run in the executor.
struct MpiGroup final : HostTransport {
  std::shared_ptr<MpiState> state;
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0, size = 1;
  bool one_host = false;
  std::unique_ptr<SharedWindow> window;
  bool window_refused = false;
  std::vector<std::byte> scratch;

  SharedWindow* shared(int64_t bytes) {
    if (!one_host || window_refused || bytes < state->options.shared_min_bytes) return nullptr;
    if (!window) window = SharedWindow::create(comm, *state);
    window_refused = window == nullptr;
    return window.get();
  }

  std::byte* scratch_of(int64_t bytes) {
    if (static_cast<int64_t>(scratch.size()) < bytes) scratch.resize(static_cast<size_t>(bytes));
    return scratch.data();
  }

  void wait(std::span<MPI_Request> requests, const char* what) { wait_all(requests, state->backoff(), what); }

  /// All parts at the same time; parts for this rank itself are not allowed.
  void move(std::span<const Part> sends, std::span<const Part> recvs) {
    std::vector<MPI_Request> requests;
    for (const Part& p : recvs) post_recv(p, kCollectiveTag, comm, requests);
    for (const Part& p : sends) post_send(p, kCollectiveTag, comm, requests);
    wait(requests, "messages of a collective");
  }

  /// Calls f(peer) for every other rank, starting behind this one so that no rank is everybody's first.
  template <class F>
  void others(F f) const {
    for (int i = 1; i < size; ++i) f((rank + i) % size);
  }

  void gather(const std::byte* in, std::byte* out, int64_t bytes);
  void all_reduce(std::byte* data, int64_t count, DType dtype, Reduce op);
  void reduce_scatter(const std::byte* in, std::byte* out, int64_t count, DType dtype, Reduce op);
  void all_to_all(const Call& call);
  void broadcast(std::byte* data, int64_t bytes, int root);

  Executor& executor() override { return state->executor; }
  void execute(const Call& call) override;
  std::unique_ptr<PendingMessages> post(std::vector<Message> messages) override;
  Backoff backoff() const override { return state->backoff(); }
  bool dropped() const override { return state->failed || state->finished; }
};

void MpiGroup::gather(const std::byte* in, std::byte* out, int64_t bytes) {
  if (bytes <= kSmallBytes) {
    MPI_Request request = MPI_REQUEST_NULL;
    const std::byte* own = out + rank * bytes;
    mpi_check(MPI_Iallgather(in == own ? MPI_IN_PLACE : in, static_cast<int>(bytes), MPI_BYTE, out,
                             static_cast<int>(bytes), MPI_BYTE, comm, &request),
              "MPI_Iallgather");
    wait({&request, 1}, "MPI_Iallgather");
    return;
  }
  if (in != out + rank * bytes) std::memcpy(out + rank * bytes, in, static_cast<size_t>(bytes));
  std::vector<Part> sends, recvs;
  others([&](int r) {
    sends.push_back({out + rank * bytes, bytes, r});
    recvs.push_back({out + r * bytes, bytes, r});
  });
  move(sends, recvs);
}

void MpiGroup::all_reduce(std::byte* data, int64_t count, DType dtype, Reduce op) {
  const int64_t width = size_of(dtype);
  std::vector<const void*> parts(static_cast<size_t>(size));
  if (count * width <= kSmallBytes) {
    std::byte* all = scratch_of(size * count * width);
    gather(data, all, count * width);
    for (int r = 0; r < size; ++r) parts[static_cast<size_t>(r)] = all + r * count * width;
    reduce_into(data, parts, count, dtype, op);
    return;
  }
  // Each rank collects its slice of a chunk from all, reduces it in rank order and hands it out.
  const int64_t slice = std::max<int64_t>(state->options.scratch_bytes / size / width, 1);
  std::byte* buffer = scratch_of(size * slice * width);
  for (int64_t begin = 0; begin < count; begin += slice * size) {
    const int64_t n = std::min(slice * size, count - begin);
    const int64_t each = (n + size - 1) / size;
    const auto first = [&](int r) { return std::min(r * each, n); };
    const auto bytes = [&](int r) { return (std::min((r + 1) * each, n) - first(r)) * width; };
    const auto at = [&](int r) { return data + (begin + first(r)) * width; };
    std::vector<Part> out, in, own, rest;
    others([&](int r) {
      out.push_back({at(r), bytes(r), r});
      in.push_back({buffer + r * slice * width, bytes(rank), r});
      own.push_back({at(rank), bytes(rank), r});
      rest.push_back({at(r), bytes(r), r});
    });
    move(out, in);
    for (int r = 0; r < size; ++r) parts[static_cast<size_t>(r)] = buffer + r * slice * width;
    parts[static_cast<size_t>(rank)] = at(rank);
    reduce_into(at(rank), parts, bytes(rank) / width, dtype, op);
    move(own, rest);
  }
}

void MpiGroup::reduce_scatter(const std::byte* in, std::byte* out, int64_t count, DType dtype, Reduce op) {
  const int64_t width = size_of(dtype);
  std::vector<const void*> parts(static_cast<size_t>(size));
  const int64_t each = std::max<int64_t>(state->options.scratch_bytes / size / width, 1);
  std::byte* buffer = scratch_of(size * std::min(each, count) * width);
  for (int64_t begin = 0; begin < count; begin += each) {
    const int64_t n = std::min(each, count - begin);
    std::vector<Part> sends, recvs;
    others([&](int r) {
      sends.push_back({const_cast<std::byte*>(in) + (r * count + begin) * width, n * width, r});
      recvs.push_back({buffer + r * n * width, n * width, r});
    });
    move(sends, recvs);
    for (int r = 0; r < size; ++r) parts[static_cast<size_t>(r)] = buffer + r * n * width;
    parts[static_cast<size_t>(rank)] = in + (rank * count + begin) * width;
    reduce_into(out + begin * width, parts, n, dtype, op);
  }
}

void MpiGroup::all_to_all(const Call& call) {
  const int64_t width = size_of(call.dtype);
  auto* in = static_cast<std::byte*>(const_cast<void*>(call.in));
  auto* out = static_cast<std::byte*>(call.out);
  std::vector<Part> sends, recvs;
  const bool even = call.op == Op::all_to_all;
  for (int r = 0; r < size; ++r) {
    const auto at = static_cast<size_t>(r);
    const int64_t to = width * (even ? call.count : call.send_counts[at]);
    const int64_t from = width * (even ? call.count : call.recv_counts[at]);
    if (r != rank) {
      sends.push_back({in, to, r});
      recvs.push_back({out, from, r});
    } else if (to > 0) {
      std::memcpy(out, in, static_cast<size_t>(to));
    }
    in += to;
    out += from;
  }
  const auto behind = [&](const Part& p) { return p.peer > rank; };
  std::stable_partition(sends.begin(), sends.end(), behind);
  move(sends, recvs);
}

void MpiGroup::broadcast(std::byte* data, int64_t bytes, int root) {
  constexpr int64_t kMost = int64_t{1} << 30;
  for (int64_t begin = 0; begin < bytes; begin += kMost) {
    MPI_Request request = MPI_REQUEST_NULL;
    mpi_check(MPI_Ibcast(data + begin, static_cast<int>(std::min(kMost, bytes - begin)), MPI_BYTE, root, comm,
                         &request),
              "MPI_Ibcast");
    wait({&request, 1}, "MPI_Ibcast");
  }
}

void MpiGroup::execute(const Call& call) {
  const auto* in = static_cast<const std::byte*>(call.in);
  auto* out = static_cast<std::byte*>(call.out);
  const int64_t bytes = call.count * size_of(call.dtype);
  if (bytes == 0 && call.op != Op::barrier && call.op != Op::all_to_all_v) return;
  SharedWindow* near = call.op == Op::all_to_all || call.op == Op::all_to_all_v ? nullptr : shared(bytes);
  switch (call.op) {
    case Op::all_reduce:
      return near ? near->all_reduce(out, call.count, call.dtype, call.reduce)
                  : all_reduce(out, call.count, call.dtype, call.reduce);
    case Op::reduce_scatter:
      return near ? near->reduce_scatter(in, out, call.count, call.dtype, call.reduce)
                  : reduce_scatter(in, out, call.count, call.dtype, call.reduce);
    case Op::all_gather:
      return near ? near->all_gather(in, out, bytes) : gather(in, out, bytes);
    case Op::broadcast:
      return near ? near->broadcast(out, bytes, call.peer) : broadcast(out, bytes, call.peer);
    case Op::all_to_all:
    case Op::all_to_all_v:
      return all_to_all(call);
    case Op::barrier: {
      if (near) return near->barrier();
      MPI_Request request = MPI_REQUEST_NULL;
      mpi_check(MPI_Ibarrier(comm, &request), "MPI_Ibarrier");
      return wait({&request, 1}, "MPI_Ibarrier");
    }
    default:
      NRL_CHECK(false, "{} is no collective", name_of(call.op));
  }
}

class FunctionWork final : public Work {
 public:
  FunctionWork(const MpiState& state, const LedgerTicket& ticket, std::shared_ptr<std::atomic<int>> unwaited,
               std::function<void()> body)
      : Work(state.ledger, ticket, const_cast<Executor*>(&state.executor), std::move(unwaited)),
        body_(std::move(body)) {}

 private:
  bool start() override {
    body_();
    return true;
  }
  std::function<void()> body_;
};

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
    for (size_t e = 0; e < expected_.size();) {  // the pieces of one message stand together
      int64_t got = 0;
      const auto [first, bytes, peer] = expected_[e];
      int64_t posted = 0;
      for (; e < expected_.size() && posted < bytes; ++e) {
        int n = 0;
        mpi_check(MPI_Get_count(&statuses_[expected_[e].request], MPI_BYTE, &n), "MPI_Get_count");
        got += n;
        posted += std::min<int64_t>(bytes - posted, int64_t{1} << 30);
      }
      NRL_CHECK(got == bytes, "rank {} expected {} bytes from rank {} and got {}", rank_, bytes, peer, got);
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

std::unique_ptr<PendingMessages> MpiGroup::post(std::vector<Message> messages) {
  return std::make_unique<MpiMessages>(comm, rank, messages);
}

class MessageWork final : public Work {
 public:
  MessageWork(std::shared_ptr<MpiGroup> group, const LedgerTicket& ticket,
              std::shared_ptr<std::atomic<int>> unwaited, std::vector<Message> messages)
      : Work(group->state->ledger, ticket, &group->state->executor, std::move(unwaited)),
        group_(std::move(group)),
        messages_(std::move(messages)) {}

 private:
  bool start() override {
    pending_ = group_->post(std::move(messages_));
    return poll();
  }
  bool poll() override { return pending_->test(); }

  std::shared_ptr<MpiGroup> group_;
  std::vector<Message> messages_;
  std::unique_ptr<PendingMessages> pending_;
};

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(std::shared_ptr<MpiGroup> group, std::string_view name, std::vector<int> members)
      : Communicator(std::string(name), group->rank, std::move(members), group->state->ledger),
        group_(std::move(group)) {}

  ~MpiCommunicator() override {
    if (group_->state->failed || group_->state->finished || std::uncaught_exceptions() > 0) return;
    try {
      run([group = group_.get()] {
        if (group->window) group->window->free();
        mpi_check(MPI_Comm_free(&group->comm), "MPI_Comm_free");
      });
    } catch (const std::exception&) {  // a peer is gone; the launcher ends this process as well
    }
  }

  std::unique_ptr<Communicator> split(int color, int key, std::string_view name) override {
    MPI_Comm comm = MPI_COMM_NULL;
    run([&] {
      meet(group_->comm, group_->backoff());
      mpi_check(MPI_Comm_split(group_->comm, color < 0 ? MPI_UNDEFINED : color, key, &comm),
                "MPI_Comm_split");
    });
    return adopt(comm, name);
  }

  std::unique_ptr<Communicator> subgroup(std::span<const int> ranks, std::string_view name) override {
    if (ranks.empty()) return nullptr;
    NRL_CHECK(std::find(ranks.begin(), ranks.end(), rank()) != ranks.end(),
              "subgroup {} of {}: rank {} is no member", name, label(), rank());
    for (int r : ranks) NRL_CHECK(r >= 0 && r < size(), "subgroup {} of {}: no rank {}", name, label(), r);
    if (ranks.size() == 1) return make_self(name, members()[static_cast<size_t>(ranks[0])], ledger());
    MPI_Comm comm = MPI_COMM_NULL;
    run([&] {
      MPI_Group all = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
      mpi_check(MPI_Comm_group(group_->comm, &all), "MPI_Comm_group");
      mpi_check(MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some), "MPI_Group_incl");
      mpi_check(MPI_Comm_create_group(group_->comm, some, kCollectiveTag, &comm), "MPI_Comm_create_group");
      MPI_Group_free(&some);
      MPI_Group_free(&all);
    });
    return adopt(comm, name);
  }

  std::shared_ptr<HostTransport> host_transport() override { return group_; }

  MPI_Comm raw() const { return group_->comm; }

 private:
  std::shared_ptr<Work> submit(Call call, bool blocking) override {
    NRL_CHECK(call.stream.native == nullptr, "{} on {}: host memory takes no stream", name_of(call.op),
              label());
    const LedgerTicket ticket = enroll(call);
    std::shared_ptr<Work> work;
    if (call.messages.empty() && call.op != Op::exchange) {
      work =
          std::make_shared<FunctionWork>(*group_->state, ticket, unwaited(),
                                         [group = group_, call = std::move(call)] { group->execute(call); });
    } else {
      work = std::make_shared<MessageWork>(group_, ticket, unwaited(), std::move(call.messages));
    }
    group_->state->executor.submit(work, blocking);
    return work;
  }

  /// Carries out `body` in the order of the executor and returns when it is over.
  void run(std::function<void()> body) {
    Call call;
    call.op = Op::split;
    auto work = std::make_shared<FunctionWork>(*group_->state, enroll(call), nullptr, std::move(body));
    group_->state->executor.submit(work, true);
    work->wait();
  }

  std::unique_ptr<Communicator> adopt(MPI_Comm comm, std::string_view name) {
    if (comm == MPI_COMM_NULL) return nullptr;
    std::vector<int> ranks;
    run([&] {
      int n = 0;
      mpi_check(MPI_Comm_size(comm, &n), "MPI_Comm_size");
      std::vector<int> here(static_cast<size_t>(n));
      ranks.resize(here.size());
      for (int i = 0; i < n; ++i) here[static_cast<size_t>(i)] = i;
      MPI_Group ours = MPI_GROUP_NULL, all = MPI_GROUP_NULL;
      mpi_check(MPI_Comm_group(comm, &ours), "MPI_Comm_group");
      mpi_check(MPI_Comm_group(MPI_COMM_WORLD, &all), "MPI_Comm_group");
      mpi_check(MPI_Group_translate_ranks(ours, n, here.data(), all, ranks.data()),
                "MPI_Group_translate_ranks");
      MPI_Group_free(&ours);
      MPI_Group_free(&all);
    });
    return make_mpi(group_->state, comm, name, std::move(ranks));
  }

  std::shared_ptr<MpiGroup> group_;
};

}  // namespace

std::unique_ptr<Communicator> make_mpi(std::shared_ptr<MpiState> state, MPI_Comm comm, std::string_view name,
                                       std::vector<int> members) {
  if (members.size() == 1) {
    const int world_rank = members[0];
    mpi_check(MPI_Comm_free(&comm), "MPI_Comm_free");
    return make_self(name, world_rank, state->ledger);
  }
  auto group = std::make_shared<MpiGroup>();
  group->comm = comm;
  mpi_check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  mpi_check(MPI_Comm_rank(comm, &group->rank), "MPI_Comm_rank");
  mpi_check(MPI_Comm_size(comm, &group->size), "MPI_Comm_size");
  const int host = state->host_of[static_cast<size_t>(members[0])];
  group->one_host = std::all_of(members.begin(), members.end(),
                                [&](int r) { return state->host_of[static_cast<size_t>(r)] == host; });
  group->state = std::move(state);
  return std::make_unique<MpiCommunicator>(std::move(group), name, std::move(members));
}

bool plain_mpi_all_reduce(Communicator& communicator, std::span<float> data) {
  auto* mpi = dynamic_cast<MpiCommunicator*>(&communicator);
  if (!mpi) return false;
  NRL_CHECK(data.size() < (size_t{1} << 31), "plain MPI_Allreduce of {} elements", data.size());
  mpi_check(
      MPI_Allreduce(MPI_IN_PLACE, data.data(), static_cast<int>(data.size()), MPI_FLOAT, MPI_SUM, mpi->raw()),
      "MPI_Allreduce");
  return true;
}

}  // namespace nrl::comm
