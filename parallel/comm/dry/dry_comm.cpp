#include "parallel/comm/dry/dry_comm.h"

#include "core/base/error.h"

namespace nrl::comm {

namespace {

class DryCommunicator final : public Communicator {
 public:
  DryCommunicator(std::string_view name, int rank, std::vector<int> members, Ledger& ledger, int group)
      : Communicator(std::string(name), rank, std::move(members), nullptr) {
    set_dry(true, &ledger, group);
  }
  std::unique_ptr<Communicator> split(int, int, std::string_view) override {
    NRL_CHECK(false, "{} is of a dry run and cannot be divided", label());
    return nullptr;
  }
  std::unique_ptr<Communicator> subgroup(std::span<const int>, std::string_view name) override {
    return split(0, 0, name);
  }

 private:
  std::shared_ptr<Work> submit(Call, bool) override {
    NRL_CHECK(false, "{} is of a dry run and executes nothing", label());
    return nullptr;
  }
};

}  // namespace

std::unique_ptr<Communicator> make_dry(std::string_view name, int rank, std::vector<int> members,
                                       Ledger& ledger, int group) {
  return std::make_unique<DryCommunicator>(name, rank, std::move(members), ledger, group);
}

}  // namespace nrl::comm
