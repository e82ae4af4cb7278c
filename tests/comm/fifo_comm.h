#pragma once
// A communicator whose operations run strictly one after another, messages included, and whose pairs of ranks
// block the host in their first message unless they are connected: the weakest rules of the backends (nccl),
// on host memory.
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "parallel/comm/communicator.h"
#include "parallel/comm/executor.h"
#include "parallel/comm/host_transport.h"

class FifoCommunicator final : public nrl::comm::Communicator {
 public:
  explicit FifoCommunicator(std::unique_ptr<Communicator> inner)
      : Communicator(inner->name(), inner->rank(), inner->members(), nullptr), inner_(std::move(inner)) {}

  std::unique_ptr<Communicator> split(int color, int key, std::string_view name) override {
    return wrap(inner_->split(color, key, name));
  }
  std::unique_ptr<Communicator> subgroup(std::span<const int> ranks, std::string_view name) override {
    return wrap(inner_->subgroup(ranks, name));
  }
  void connect(int, int) override {
    if (connected_) return;
    connected_ = true;
    uint8_t own = 1, other = 0;
    const int peer = 1 - rank();
    inner_->exchange({nrl::comm::Message::send(std::span(&own, 1), peer, nrl::comm::max_tag),
                      nrl::comm::Message::recv(std::span(&other, 1), peer, nrl::comm::max_tag)});
  }
  bool single_fifo() const override { return true; }
  /// Names or labels of the communicators of this process that memory is registered with.
  static std::multiset<std::string>& registered() {
    static std::multiset<std::string> names;
    return names;
  }
  std::unique_ptr<nrl::comm::Registration> register_memory(void*, size_t) override {
    struct Entry final : nrl::comm::Registration {
      explicit Entry(std::string n) : name(std::move(n)) { registered().insert(name); }
      ~Entry() override { registered().erase(registered().find(name)); }
      std::string name;
    };
    return std::make_unique<Entry>(name().find('>') == std::string::npos ? label() : name());
  }
  std::shared_ptr<nrl::comm::HostTransport> host_transport() override { return inner_->host_transport(); }

 private:
  using Advance = nrl::comm::Advance;
  using Call = nrl::comm::Call;
  using Work = nrl::comm::Work;

  class Step final : public Work {
   public:
    Step(nrl::comm::Executor* executor, std::shared_ptr<std::atomic<int>> unwaited, Communicator& inner,
         Call call, std::shared_ptr<nrl::comm::Lane> lane)
        : Work(nullptr, {}, executor, std::move(unwaited)),
          inner_(inner),
          call_(std::move(call)),
          lane_(std::move(lane)) {}

   private:
    Advance start() override {
      work_ = submit_to(inner_, std::move(call_), false);
      return Advance::waiting;
    }
    Advance poll() override { return work_->host_done() ? Advance::done : Advance::waiting; }
    void block() override {
      Work::block();
      work_->wait();
    }
    // A plain pointer, used only before the caller has waited: the executor may release this object later,
    // and must not destroy the communicator, which is collective.
    Communicator& inner_;
    Call call_;
    std::shared_ptr<nrl::comm::Lane> lane_;
    std::shared_ptr<Work> work_;
  };

  static std::shared_ptr<Work> submit_to(Communicator& inner, Call call, bool blocking) {
    return Communicator::submit_to(inner, std::move(call), blocking);
  }

  std::shared_ptr<Work> submit(Call call, bool blocking) override {
    if (call.op == nrl::comm::Op::send || call.op == nrl::comm::Op::recv) connect(0, 1);
    nrl::comm::Executor& executor = inner_->host_transport()->executor();
    nrl::comm::Executor::Order order{lane_.get(), std::exchange(call.previous, nullptr)};
    auto work = std::make_shared<Step>(&executor, unwaited(), *inner_, std::move(call), lane_);
    executor.submit(work, std::move(order), blocking);
    return work;
  }

  static std::unique_ptr<Communicator> wrap(std::unique_ptr<Communicator> inner) {
    if (!inner || inner->size() == 1) return inner;
    auto made = std::make_unique<FifoCommunicator>(std::move(inner));
    made->connected_ = made->size() > 2;
    return made;
  }

  std::unique_ptr<Communicator> inner_;
  bool connected_ = true;
  std::shared_ptr<nrl::comm::Lane> lane_ = std::make_shared<nrl::comm::Lane>();
};
