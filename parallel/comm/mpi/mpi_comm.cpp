#include "parallel/comm/mpi/mpi_comm.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <utility>

#include "core/base/error.h"
#include "parallel/comm/mpi/mpi_group.h"
#include "parallel/comm/self/self_comm.h"

namespace nrl::comm {

namespace {

class MpiCollective final : public Work {
 public:
  MpiCollective(std::shared_ptr<MpiGroup> group, const LogTicket& ticket,
                std::shared_ptr<std::atomic<int>> unwaited, Call call)
      : Work(group->state().log, ticket, &group->state().executor, std::move(unwaited)),
        group_(std::move(group)),
        call_(std::move(call)) {}

 private:
  Advance start() override {
    task_ = group_->execute(call_);
    return task_.resume();
  }
  Advance poll() override { return task_.resume(); }
  Doorbell* doorbell() override { return group_->doorbell(); }

  std::shared_ptr<MpiGroup> group_;
  Call call_;
  Task task_;  // refers to the others
};

class MpiMessageWork final : public Work {
 public:
  MpiMessageWork(std::shared_ptr<MpiGroup> group, const LogTicket& ticket,
                 std::shared_ptr<std::atomic<int>> unwaited, std::vector<Message> messages)
      : Work(group->state().log, ticket, &group->state().executor, std::move(unwaited)),
        group_(std::move(group)),
        messages_(std::move(messages)) {}

 private:
  Advance start() override {
    pending_ = group_->post(std::move(messages_));
    return poll();
  }
  Advance poll() override { return pending_->test() ? Advance::done : Advance::waiting; }

  std::shared_ptr<MpiGroup> group_;
  std::vector<Message> messages_;
  std::unique_ptr<PendingMessages> pending_;
};

/// Creates or frees a group.
class SetupWork final : public Work {
 public:
  SetupWork(std::shared_ptr<MpiGroup> group, const LogTicket& ticket, Task task)
      : Work(group->state().log, ticket, &group->state().executor, nullptr),
        group_(std::move(group)),
        task_(std::move(task)) {}

 private:
  Advance start() override { return task_.resume(); }
  Advance poll() override { return task_.resume(); }
  std::shared_ptr<MpiGroup> group_;  // owns the lane
  Task task_;
};

/// Barrier of a subset of `comm`.
Task barrier_of(MPI_Comm comm, int rank, std::vector<int> ranks) {
  std::byte in{}, out{};
  std::vector<MPI_Request> arrived, released;
  if (rank != ranks[0]) {
    post_send({&out, 1, ranks[0]}, setup_tag, comm, arrived);
    post_recv({&in, 1, ranks[0]}, setup_tag, comm, arrived);
    co_await until([&] { return test_all(arrived, "the barrier of a subgroup"); });
    co_return;
  }
  std::vector<std::byte> from(ranks.size());
  for (size_t i = 1; i < ranks.size(); ++i) post_recv({&from[i], 1, ranks[i]}, setup_tag, comm, arrived);
  co_await until([&] { return test_all(arrived, "the barrier of a subgroup"); });
  for (size_t i = 1; i < ranks.size(); ++i) post_send({&out, 1, ranks[i]}, setup_tag, comm, released);
  co_await until([&] { return test_all(released, "the barrier of a subgroup"); });
}

Task split_group(MpiGroup& parent, int color, int key, std::shared_ptr<MpiGroup>& out) {
  co_await mpi_barrier(parent.raw());
  MPI_Comm comm = MPI_COMM_NULL;
  mpi_check(MPI_Comm_split(parent.raw(), color < 0 ? MPI_UNDEFINED : color, key, &comm), "MPI_Comm_split");
  if (comm != MPI_COMM_NULL) co_await MpiGroup::create(parent.shared_state(), comm, out);
}

Task make_subgroup(MpiGroup& parent, std::vector<int> ranks, std::shared_ptr<MpiGroup>& out) {
  co_await barrier_of(parent.raw(), parent.rank(), ranks);
  MPI_Group all = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  mpi_check(MPI_Comm_group(parent.raw(), &all), "MPI_Comm_group");
  mpi_check(MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some), "MPI_Group_incl");
  mpi_check(MPI_Comm_create_group(parent.raw(), some, setup_tag, &comm), "MPI_Comm_create_group");
  MPI_Group_free(&some);
  MPI_Group_free(&all);
  co_await MpiGroup::create(parent.shared_state(), comm, out);
}

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(std::shared_ptr<MpiGroup> group, std::string_view name)
      : Communicator(std::string(name), group->rank(), group->members(), group->state().log),
        group_(std::move(group)) {}

  ~MpiCommunicator() override {
    if (group_->dropped() || std::uncaught_exceptions() > 0) return;
    try {
      run(group_->free(), &group_->lane());
    } catch (const std::exception&) {  // a peer is lost; the launcher ends this process as well
    }
  }

  std::unique_ptr<Communicator> split(int color, int key, std::string_view name) override {
    std::shared_ptr<MpiGroup> made;
    run(split_group(*group_, color, key, made), &group_->lane());
    return adopt(std::move(made), name);
  }

  std::unique_ptr<Communicator> subgroup(std::span<const int> ranks, std::string_view name) override {
    if (ranks.empty()) return nullptr;
    NRL_CHECK(std::find(ranks.begin(), ranks.end(), rank()) != ranks.end(),
              "subgroup {} of {}: rank {} is no member", name, label(), rank());
    for (int r : ranks) NRL_CHECK(r >= 0 && r < size(), "subgroup {} of {}: no rank {}", name, label(), r);
    if (ranks.size() == 1) return make_self(name, members()[ranks[0]], collective_log());
    std::shared_ptr<MpiGroup> made;
    run(make_subgroup(*group_, {ranks.begin(), ranks.end()}, made), nullptr);
    return adopt(std::move(made), name);
  }

  std::shared_ptr<HostTransport> host_transport() override { return group_; }

  MPI_Comm raw() const { return group_->raw(); }

 private:
  std::string_view algorithm(const Call& call) const override { return group_->algorithm(call); }
  std::shared_ptr<Work> submit(Call call, bool blocking) override {
    NRL_CHECK(call.stream.native == nullptr, "{} on {}: host memory takes no stream", name_of(call.op),
              label());
    const LogTicket ticket = log_call(call);
    Executor::Order order{nullptr, std::move(call.previous)};
    std::shared_ptr<Work> work;
    if (call.messages.empty() && call.op != Op::exchange) {
      order.lane = &group_->lane();
      work = std::make_shared<MpiCollective>(group_, ticket, unwaited(), std::move(call));
    } else {
      work = std::make_shared<MpiMessageWork>(group_, ticket, unwaited(), std::move(call.messages));
    }
    group_->executor().submit(work, std::move(order), blocking);
    return work;
  }

  /// Runs `task` in the executor and returns when it has completed.
  void run(Task task, Lane* lane) {
    Call call;
    call.op = Op::split;
    auto work = std::make_shared<SetupWork>(group_, log_call(call), std::move(task));
    group_->executor().submit(work, {lane, nullptr}, true);
    work->wait();
  }

  std::unique_ptr<Communicator> adopt(std::shared_ptr<MpiGroup> made, std::string_view name) {
    if (!made) return nullptr;
    if (made->members().size() > 1) return std::make_unique<MpiCommunicator>(std::move(made), name);
    const int world_rank = made->members()[0];
    run(made->free(), nullptr);
    return make_self(name, world_rank, collective_log());
  }

  std::shared_ptr<MpiGroup> group_;
};

}  // namespace

std::unique_ptr<Communicator> make_mpi(std::shared_ptr<MpiState> state, MPI_Comm comm,
                                       std::string_view name) {
  std::shared_ptr<MpiGroup> made;
  run_now(MpiGroup::create(state, comm, made));
  if (made->members().size() > 1) return std::make_unique<MpiCommunicator>(std::move(made), name);
  run_now(made->free());
  return make_self(name, made->members()[0], state->log);
}

MPI_Comm raw_mpi(Communicator& communicator) {
  const auto* mpi = dynamic_cast<MpiCommunicator*>(&communicator);
  return mpi ? mpi->raw() : MPI_COMM_NULL;
}

}  // namespace nrl::comm
