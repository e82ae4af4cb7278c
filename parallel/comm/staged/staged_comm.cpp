#include "parallel/comm/staged/staged_comm.h"

#include <exception>
#include <utility>

#include "core/base/error.h"
#include "parallel/comm/self/self_comm.h"
#include "parallel/comm/staged/staged_work.h"

namespace nrl::comm {

namespace {

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(std::unique_ptr<Communicator> own, Communicator& host, device::Runtime& device,
                     const DeviceCommOptions& options)
      : Communicator(host.name(), host.rank(), host.members(), host.collective_log()),
        own_(std::move(own)),
        host_(host),
        options_(options) {
    const int64_t least = int64_t{128} * size();
    if (options.staged_slot_bytes < least)
      fail(Exit::config, "host staging of {}: buffers of {} bytes; at least {} are required", label(),
           options.staged_slot_bytes, least);
    group_ = std::make_shared<StagedGroup>(device, options);
    group_->transport = host.host_transport();
    NRL_CHECK(group_->transport, "{} cannot carry communication of device memory", label());
    group_->log = collective_log();
    group_->rank = rank();
    group_->size = size();
    group_->label = label();
  }

  ~StagedCommunicator() override {
    Executor& executor = group_->transport->executor();
    constexpr double no_timeout = 1e9, patience = 2;
    if (std::uncaught_exceptions() == 0 && !group_->transport->dropped()) {
      executor.release_finished(no_timeout);
      return;
    }
    // Operations may wait for lost ranks forever; they must not use the device after this.
    group_->canceled = true;
    if (!executor.release_finished(patience)) new std::shared_ptr<StagedGroup>(group_);
  }

  std::unique_ptr<Communicator> split(int color, int key, std::string_view name) override {
    return adopt(host_.split(color, key, name));
  }
  std::unique_ptr<Communicator> subgroup(std::span<const int> ranks, std::string_view name) override {
    return adopt(host_.subgroup(ranks, name));
  }
  Communicator& host() override { return host_; }

 private:
  std::unique_ptr<Communicator> adopt(std::unique_ptr<Communicator> host) const {
    if (!host) return nullptr;
    if (host->size() == 1) return make_device_self(std::move(host), group_->runtime);
    Communicator& beneath = *host;
    return std::make_unique<StagedCommunicator>(std::move(host), beneath, group_->runtime, options_);
  }

  std::string_view algorithm(const Call& call) const override {
    const std::string_view host = group_->transport->algorithm(call);
    if (host == "messages") return "staged, messages";
    return host == "shared memory" ? "staged, shared memory" : "staged, shared memory and messages";
  }
  std::shared_ptr<Work> submit(Call call, bool blocking) override {
    if (call.stream.native && group_->runtime.capturing(call.stream.native))
      fail(Exit::internal,
           "{} on {}: host-staged communication cannot be captured into a graph. Fix: set "
           "distributed.backend: nccl, or policy.cuda_graph: false",
           name_of(call.op), label());
    const LogTicket ticket = log_call(call);
    Executor::Order order{nullptr, call.previous};
    std::shared_ptr<Work> work;
    if (call.messages.empty() && call.op != Op::exchange) {
      order.lane = &group_->transport->lane();
      work = make_staged_collective(group_, ticket, unwaited(), std::move(call));
    } else {
      work = make_staged_messages(group_, ticket, unwaited(), std::move(call));
    }
    group_->transport->executor().submit(work, std::move(order), blocking);
    return work;
  }

  std::unique_ptr<Communicator> own_;  // host_, if owned
  Communicator& host_;
  DeviceCommOptions options_;
  std::shared_ptr<StagedGroup> group_;
};

}  // namespace

std::unique_ptr<Communicator> make_staged(Communicator& host, device::Runtime& device,
                                          const DeviceCommOptions& options) {
  const std::vector<int64_t> own = {options.staged_slot_bytes};
  std::vector<int64_t> all(static_cast<size_t>(host.size()));
  host.all_gather(own, all);
  for (size_t r = 0; r < all.size(); ++r)
    NRL_CHECK(all[r] == all[0], "host staging of {}: rank 0 has buffers of {} bytes, rank {} of {}",
              host.label(), all[0], r, all[r]);
  return std::make_unique<StagedCommunicator>(nullptr, host, device, options);
}

}  // namespace nrl::comm
