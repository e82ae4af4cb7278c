#pragma once
// Private to the MPI backend: the operations of one group, through the host's shared memory on one host, MPI
// messages on hosts of one rank each, and both otherwise (host_exchange.h).
//
// Sums add in rank order on one host, and on hosts of one rank each. Otherwise the values of each host's
// ranks are added in rank order, and the hosts' sums in the order of the hosts' first ranks; bf16 and f16 are
// rounded once per host and once more. The order depends on nothing else: all paths, operations and sizes
// give the same bits.

#include <memory>
#include <span>
#include <vector>

#include "parallel/comm/communicator.h"
#include "parallel/comm/host_transport.h"
#include "parallel/comm/mpi/host_exchange.h"
#include "parallel/comm/mpi/host_layout.h"
#include "parallel/comm/mpi/mpi_internal.h"
#include "parallel/comm/mpi/shared_window.h"

namespace nrl::comm {

/// All but doorbell(), executor() and lane() must be called from the executor.
class MpiGroup final : public HostTransport {
 public:
  /// Takes ownership of `comm` and maps shared memory where ranks share a host. Collective.
  static Task create(std::shared_ptr<MpiState> state, MPI_Comm comm, std::shared_ptr<MpiGroup>& out);
  /// Frees everything. Collective.
  Task free();

  MpiState& state() { return *state_; }
  const std::shared_ptr<MpiState>& shared_state() const { return state_; }
  MPI_Comm raw() const { return comm_; }
  int rank() const { return rank_; }
  /// World ranks, in the order of ranks here.
  const std::vector<int>& members() const { return members_; }

  Executor& executor() override { return state_->executor; }
  Lane& lane() override { return lane_; }
  Doorbell* doorbell() override { return window_ ? window_->doorbell() : nullptr; }
  Task execute(const Call& call) override;
  std::string_view algorithm(const Call& call) const override;
  std::unique_ptr<PendingMessages> post(std::vector<Message> messages) override;
  bool dropped() const override { return state_->failed || state_->finished; }

 private:
  std::byte* scratch(int64_t bytes);
  /// All parts concurrently. A part must not have this rank as its peer.
  Task exchange(const std::vector<Part>& sends, const std::vector<Part>& recvs);
  /// Calls f(peer) for every other rank, starting after this one to spread the load.
  template <class F>
  void for_each_peer(F f) const {
    for (int i = 1; i < size_; ++i) f((rank_ + i) % size_);
  }
  // Null: through messages.
  SharedWindow* window_for(const Call& call) const;
  HostExchange* exchange_for(const Call& call) const;
  bool in_shared_memory(const Call& call) const;
  void reduce(void* out, std::span<const void* const> parts, int64_t count, DType dtype, Reduce op) const;
  Task gather(const std::byte* in, std::byte* out, int64_t bytes);
  Task all_reduce(std::byte* data, int64_t count, DType dtype, Reduce op);
  Task reduce_scatter(const std::byte* in, std::byte* out, int64_t count, DType dtype, Reduce op);
  Task all_to_all(const Call& call);
  Task execute_parts(std::vector<Call> parts);
  Task broadcast(std::byte* data, int64_t bytes, int root);

  std::shared_ptr<MpiState> state_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  std::vector<int> members_;
  Lane lane_;
  HostLayout layout_;
  // Null where the ranks lie otherwise, or when the allocation failed.
  std::unique_ptr<SharedWindow> window_;         // one host
  std::unique_ptr<HostExchange> host_exchange_;  // several hosts with several ranks
  std::vector<std::byte> scratch_;
};

}  // namespace nrl::comm
