#pragma once
// Private to the MPI backend: the operations of one group, through MPI messages or the host's shared memory.

#include <memory>
#include <vector>

#include "parallel/comm/communicator.h"
#include "parallel/comm/host_transport.h"
#include "parallel/comm/mpi/mpi_internal.h"
#include "parallel/comm/mpi/shared_window.h"

namespace nrl::comm {

/// All but doorbell(), executor() and lane() must be called from the executor.
class MpiGroup final : public HostTransport {
 public:
  /// Takes ownership of `comm` and maps shared memory if all ranks are on one host. Collective.
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
  SharedWindow* window_for(const Call& call) const;  // null: through messages
  Task gather(const std::byte* in, std::byte* out, int64_t bytes);
  Task all_reduce(std::byte* data, int64_t count, DType dtype, Reduce op);
  Task reduce_scatter(const std::byte* in, std::byte* out, int64_t count, DType dtype, Reduce op);
  Task all_to_all(const Call& call);
  Task broadcast(std::byte* data, int64_t bytes, int root);

  std::shared_ptr<MpiState> state_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  std::vector<int> members_;
  Lane lane_;
  std::unique_ptr<SharedWindow> window_;  // null on several hosts, or when the allocation failed
  std::vector<std::byte> scratch_;
};

}  // namespace nrl::comm
