#include "parallel/comm/nccl/nccl_comm.h"

#include <cstdlib>
#include <cstring>
#include <exception>

#include "core/base/log.h"
#include "parallel/comm/executor.h"
#include "parallel/comm/host_transport.h"
#include "parallel/comm/message_groups.h"
#include "parallel/comm/nccl/nccl_group.h"
#include "parallel/comm/self/self_comm.h"

namespace nrl::comm {

namespace {

ncclDataType_t type_of(DType t) {
  switch (t) {
    case DType::f32:
      return ncclFloat32;
    case DType::bf16:
      return ncclBfloat16;
    case DType::f16:
      return ncclFloat16;
    case DType::f64:
      return ncclFloat64;
    case DType::i32:
      return ncclInt32;
    case DType::i64:
      return ncclInt64;
    case DType::u8:
      return ncclUint8;
    default:
      NRL_CHECK(false, "NCCL does not reduce {}", name_of(t));
      return ncclUint8;
  }
}

ncclRedOp_t reduction_of(Reduce op) {
  return op == Reduce::sum ? ncclSum : op == Reduce::max ? ncclMax : ncclMin;
}

/// Runs `f` between ncclGroupStart and ncclGroupEnd and returns the first error; always closes the group.
template <class F>
ncclResult_t grouped(F f) {
  if (const ncclResult_t result = ncclGroupStart(); result != ncclSuccess) return result;
  ncclResult_t first = ncclSuccess;
  f([&](ncclResult_t result) {
    if (first == ncclSuccess) first = result;
  });
  const ncclResult_t end = ncclGroupEnd();
  return first != ncclSuccess ? first : end;
}

/// One message per pair and direction: a safe group of any size (message_groups.h).
ncclResult_t all_to_all(const Call& call, int size, ncclComm_t comm, cudaStream_t stream) {
  const int64_t width = size_of(call.dtype);
  return grouped([&](const auto& note) {
    const auto* in = static_cast<const std::byte*>(call.in);
    auto* out = static_cast<std::byte*>(call.out);
    const bool even = call.op == Op::all_to_all;
    for (int r = 0; r < size; ++r) {
      const auto at = static_cast<size_t>(r);
      const int64_t to = width * (even ? call.count : call.send_counts[at]);
      const int64_t from = width * (even ? call.count : call.recv_counts[at]);
      if (to > 0) note(ncclSend(in, static_cast<size_t>(to), ncclUint8, r, comm, stream));
      if (from > 0) note(ncclRecv(out, static_cast<size_t>(from), ncclUint8, r, comm, stream));
      in += to;
      out += from;
    }
  });
}

/// Several groups where one could deadlock. NCCL pairs the k-th send to a rank with its k-th receive.
ncclResult_t send_recv(const Call& call, int size, ncclComm_t comm, cudaStream_t stream) {
  for (const std::vector<Message>& group : message_groups(call.messages, size)) {
    const ncclResult_t result = grouped([&](const auto& note) {
      for (const Message& m : group) {
        const auto bytes = static_cast<size_t>(m.data.bytes());
        note(m.kind == Message::Kind::send ? ncclSend(m.data.data, bytes, ncclUint8, m.peer, comm, stream)
                                           : ncclRecv(m.data.data, bytes, ncclUint8, m.peer, comm, stream));
      }
    });
    if (result != ncclSuccess) return result;
  }
  return ncclSuccess;
}

/// Of every communicator.
ncclConfig_t config_of(const DeviceCommOptions& options) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  if (options.nccl_max_ctas > 0) config.maxCTAs = options.nccl_max_ctas;
  return config;
}

ncclResult_t launch_one(const Call& call, int size, void* barrier_byte, ncclComm_t comm,
                        cudaStream_t stream) {
  const auto count = static_cast<size_t>(call.count);
  const size_t bytes = count * static_cast<size_t>(size_of(call.dtype));
  switch (call.op) {
    case Op::all_reduce:
      if (count == 0) return ncclSuccess;
      return ncclAllReduce(call.in, call.out, count, type_of(call.dtype), reduction_of(call.reduce), comm,
                           stream);
    case Op::reduce_scatter:
      if (count == 0) return ncclSuccess;
      return ncclReduceScatter(call.in, call.out, count, type_of(call.dtype), reduction_of(call.reduce), comm,
                               stream);
    case Op::all_gather:
      if (count == 0) return ncclSuccess;
      return ncclAllGather(call.in, call.out, bytes, ncclUint8, comm, stream);
    case Op::broadcast:
      if (count == 0) return ncclSuccess;
      return ncclBroadcast(call.in, call.out, bytes, ncclUint8, call.peer, comm, stream);
    case Op::all_to_all:
    case Op::all_to_all_v:
      return all_to_all(call, size, comm, stream);
    case Op::send:
    case Op::recv:
    case Op::exchange:
      return send_recv(call, size, comm, stream);
    case Op::barrier:
      return ncclAllReduce(barrier_byte, barrier_byte, 1, ncclUint8, ncclMax, comm, stream);
    case Op::split:
      break;
  }
  NRL_CHECK(false, "{} is not an operation of a group", name_of(call.op));
  return ncclInternalError;
}

/// Several collectives in one group are one kernel. All ranks have the same, so that a group that NCCL
/// divides is divided alike.
ncclResult_t launch(const Call& call, int size, void* barrier_byte, ncclComm_t comm, cudaStream_t stream) {
  if (call.more.empty()) return launch_one(call, size, barrier_byte, comm, stream);
  return grouped([&](const auto& note) {
    for (const Call& part : call.parts()) note(launch_one(part, size, barrier_byte, comm, stream));
  });
}

class NcclWork final : public Work {
 public:
  NcclWork(std::shared_ptr<NcclGroup> group, std::shared_ptr<std::atomic<int>> unwaited,
           device::StreamHandle stream)
      : Work(nullptr, {}, nullptr, std::move(unwaited)),
        group_(std::move(group)),
        stream_(stream),
        end_of_capture_(group_->order_events().take()) {}
  ~NcclWork() override {
    if (operation_ && !waited_) operation_->wait.store(Wait::unmeasured, std::memory_order_release);
  }

  void enqueue(const NcclLabel& label, const LogTicket& ticket, const Work* previous,
               const NcclGroup::Issue& issue) {
    operation_ = group_->enqueue(label, ticket, stream_, previous, *end_of_capture_, issue);
  }

  bool finished() const override { return group_->failed() || !operation_ || operation_->end->done(); }
  bool host_done() const override { return true; }
  void order_stream(void* stream) const override {
    (operation_ ? operation_->end : end_of_capture_)->wait_in(stream);
  }

 private:
  using Wait = NcclOperation::Wait;

  Advance start() override { return Advance::done; }
  void block() override {
    group_->check();
    if (!operation_) {  // captured
      end_of_capture_->wait_in(stream_);
      return;
    }
    waited_ = true;
    if (!stream_) {
      operation_->wait.store(Wait::unmeasured, std::memory_order_release);
      return group_->wait_for(*operation_);
    }
    operation_->waited = group_->timed_events().take();
    operation_->waited->record(stream_);
    operation_->end->wait_in(stream_);
    operation_->wait.store(Wait::recorded, std::memory_order_release);
  }

  std::shared_ptr<NcclGroup> group_;
  device::StreamHandle stream_;
  EventPool::Pooled end_of_capture_;
  std::shared_ptr<NcclOperation> operation_;  // null when captured
  bool waited_ = false;
};

class NcclRegistration final : public Registration {
 public:
  NcclRegistration(std::shared_ptr<NcclGroup> group, void* data, size_t bytes)
      : group_(std::move(group)), handle_(group_->register_memory(data, bytes)) {}
  ~NcclRegistration() override { group_->unregister_memory(handle_); }

 private:
  std::shared_ptr<NcclGroup> group_;
  void* handle_;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::unique_ptr<Communicator> own, Communicator& host, std::shared_ptr<NcclGroup> group)
      : Communicator(host.name(), host.rank(), host.members(), host.collective_log()),
        own_(std::move(own)),
        host_(host),
        transport_(host.host_transport()),
        group_(std::move(group)),
        barrier_byte_(group_->runtime(), device::Memory::Kind::device, 256) {
    NRL_CHECK(transport_, "{} cannot carry communication of device memory", label());
  }

  ~NcclCommunicator() override {
    if (std::uncaught_exceptions() > 0 || transport_->dropped())
      group_->abandon();
    else
      group_->finish();
  }

  std::unique_ptr<Communicator> split(int color, int key, std::string_view name) override {
    auto host = host_.split(color, key, name);
    // ncclCommSplit is collective: ranks without a new group, or alone in theirs, take part as well.
    const bool needed = host && host->size() > 1;
    group_->check();
    auto made = [parent = group_->raw(), color = needed ? color : NCCL_SPLIT_NOCOLOR,
                 at = host ? host->rank() : 0,
                 config = config_of(group_->options())](ncclComm_t* comm) mutable {
      config.splitShare = 0;
      return ncclCommSplit(parent, color, at, comm, &config);
    };
    if (!needed) {
      nccl_connect(group_->runtime(), group_->options(), label(), world_rank(), std::move(made));
      return host ? make_device_self(std::move(host), group_->runtime()) : nullptr;
    }
    return adopt(std::move(host), std::move(made));
  }

  std::unique_ptr<Communicator> subgroup(std::span<const int> ranks, std::string_view name) override;

  Communicator& host() override { return host_; }
  // NCCL connects two ranks in their first message.
  void connect(int sender, int receiver) override {
    const View byte(barrier_byte_.data(), 1, DType::u8);
    if (rank() == sender)
      send_async(byte, receiver).wait();
    else
      recv_async(byte, sender).wait();
  }
  std::unique_ptr<Registration> register_memory(void* data, size_t bytes) override {
    return std::make_unique<NcclRegistration>(group_, data, bytes);
  }
  bool single_fifo() const override { return true; }
  void check() override { group_->check(); }

 private:
  int world_rank() const { return members()[rank()]; }

  std::unique_ptr<Communicator> adopt(std::unique_ptr<Communicator> host,
                                      std::function<ncclResult_t(ncclComm_t*)> make) const {
    const std::string name = host->label();
    const ncclComm_t comm =
        nccl_connect(group_->runtime(), group_->options(), name, world_rank(), std::move(make));
    auto group = std::make_shared<NcclGroup>(group_->runtime(), group_->options(), collective_log(), name,
                                             world_rank(), comm);
    Communicator& beneath = *host;
    return std::make_unique<NcclCommunicator>(std::move(host), beneath, std::move(group));
  }

  std::string_view algorithm(const Call&) const override { return "nccl"; }
  std::shared_ptr<Work> submit(Call call, bool) override {
    if (call.op == Op::send || call.op == Op::recv)
      NRL_CHECK(call.messages.front().tag == 0,
                "{} on {} with tag {}: nccl supports tags within one exchange only", name_of(call.op),
                label(), call.messages.front().tag);
    if (call.previous) {
      NRL_CHECK(call.previous->host_done(),
                "{} on {}: an nccl operation may only depend on one that the host has finished issuing",
                name_of(call.op), label());
      if (const std::exception_ptr error = call.previous->error()) std::rethrow_exception(error);
    }
    const LogTicket ticket = log_call(call);
    auto work = std::make_shared<NcclWork>(group_, unwaited(), call.stream.native);
    const NcclLabel what{call.op, call.dtype, number_++, call.bytes(size())};
    work->enqueue(what, ticket, call.previous.get(), [&](ncclComm_t comm, device::StreamHandle stream) {
      return launch(call, size(), barrier_byte_.data(), comm, static_cast<cudaStream_t>(stream));
    });
    return work;
  }

  std::unique_ptr<Communicator> own_;  // host_, if owned
  Communicator& host_;
  std::shared_ptr<HostTransport> transport_;
  std::shared_ptr<NcclGroup> group_;
  device::Memory barrier_byte_;
  uint64_t number_ = 0;
};

/// Shares the first rank's ncclUniqueId; returns the call that connects the ranks of `host`
/// with it. Collective.
std::function<ncclResult_t(ncclComm_t*)> share_unique_id(Communicator& host,
                                                         const DeviceCommOptions& options) {
  ncclUniqueId id{};
  ncclResult_t result = ncclSuccess;
  if (host.rank() == 0) result = ncclGetUniqueId(&id);
  std::vector<int32_t> outcome = {static_cast<int32_t>(result)};
  host.broadcast(outcome, 0);
  if (outcome[0] != ncclSuccess)
    fail(Exit::unavailable, "NCCL cannot start on the first rank of {}: {}", host.label(),
         nccl_text(static_cast<ncclResult_t>(outcome[0])));
  host.broadcast(View(id.internal, NCCL_UNIQUE_ID_BYTES, DType::u8), 0);
  return [id, rank = host.rank(), size = host.size(), config = config_of(options)](ncclComm_t* comm) mutable {
    return ncclCommInitRankConfig(comm, size, id, rank, &config);
  };
}

std::unique_ptr<Communicator> NcclCommunicator::subgroup(std::span<const int> ranks, std::string_view name) {
  auto host = host_.subgroup(ranks, name);
  if (!host) return nullptr;
  if (host->size() == 1) return make_device_self(std::move(host), group_->runtime());
  // Not ncclCommSplit: it is collective over the whole parent.
  auto make = share_unique_id(*host, group_->options());
  return adopt(std::move(host), std::move(make));
}

}  // namespace

NcclSupport nccl_support() {
  NcclSupport out;
  out.built = true;
  if (ncclGetVersion(&out.version) != ncclSuccess) out.version = 0;
  const char* several = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  out.multi_rank_gpu = several && std::strcmp(several, "1") == 0;
  return out;
}

device::Allocator nccl_allocator() {
  return {[](size_t bytes) {
            void* data = nullptr;
            if (const ncclResult_t result = ncclMemAlloc(&data, bytes); result != ncclSuccess)
              fail(Exit::out_of_memory, "ncclMemAlloc of {} bytes failed: {}", bytes, nccl_text(result));
            return data;
          },
          [](void* data) noexcept { (void)ncclMemFree(data); }};
}

std::unique_ptr<Communicator> make_nccl(Communicator& host, device::Runtime& device,
                                        const DeviceCommOptions& options) {
  // Ranks do not issue operations of different groups in one order, so an order of launches would deadlock
  // (launch_model.h). Set, so that no file of NCCL's turns it on.
  static constexpr const char* launch_order = "NCCL_LAUNCH_ORDER_IMPLICIT";
  if (const char* set = std::getenv(launch_order); set && std::strcmp(set, "0") != 0) {
    if (host.rank() == 0) log::warn("{}={} is set to 0: pipelines would deadlock with it", launch_order, set);
  }
  setenv(launch_order, "0", 1);
  const std::string reason =
      nccl_unsupported_reason(host.gather_texts(device.properties().uuid), nccl_support());
  if (!reason.empty())
    fail(Exit::unavailable,
         "{} cannot use NCCL: {}. Fix: set distributed.backend: staged, which goes through host memory",
         host.label(), reason);
  const int world_rank = host.members()[host.rank()];
  const ncclComm_t comm =
      nccl_connect(device, options, host.label(), world_rank, share_unique_id(host, options));
  return std::make_unique<NcclCommunicator>(
      nullptr, host,
      std::make_shared<NcclGroup>(device, options, host.collective_log(), host.label(), world_rank, comm));
}

}  // namespace nrl::comm
