#include "parallel/comm/self/self_comm.h"

#include "core/base/error.h"
#include "parallel/comm/executor.h"

#include <cstring>
#include <map>

namespace nrl::comm {

namespace {

void copy(const void* in, void* out, int64_t bytes) {
  if (bytes > 0 && in != out) std::memmove(out, in, static_cast<size_t>(bytes));
}

/// Messages to oneself: the k-th send of a tag meets the k-th receive of it.
void deliver(const std::vector<Message>& messages) {
  std::map<int, std::vector<const Message*>> sends;
  std::map<int, size_t> taken;
  for (const Message& m : messages)
    if (m.kind == Message::Kind::send) sends[m.tag].push_back(&m);
  for (const Message& m : messages) {
    if (m.kind == Message::Kind::send) continue;
    const std::vector<const Message*>& of_tag = sends[m.tag];
    const size_t at = taken[m.tag]++;
    NRL_CHECK(at < of_tag.size(), "exchange with oneself: nothing is sent with tag {}", m.tag);
    const Message& from = *of_tag[at];
    NRL_CHECK(from.data.bytes() == m.data.bytes(), "exchange with oneself: {} bytes sent, {} expected",
              from.data.bytes(), m.data.bytes());
    copy(from.data.data, m.data.data, m.data.bytes());
  }
}

class SelfWork final : public Work {
 public:
  SelfWork(Ledger* ledger, const LedgerTicket& ticket, std::shared_ptr<std::atomic<int>> unwaited, Call call)
      : Work(ledger, ticket, nullptr, std::move(unwaited)), call_(std::move(call)) {}

 private:
  bool start() override {
    switch (call_.op) {
      case Op::all_gather:
      case Op::reduce_scatter:
      case Op::all_to_all:
        copy(call_.in, call_.out, call_.count * size_of(call_.dtype));
        break;
      case Op::all_to_all_v:
        copy(call_.in, call_.out, call_.send_counts[0] * size_of(call_.dtype));
        break;
      case Op::exchange:
        deliver(call_.messages);
        break;
      default:
        break;
    }
    return true;
  }
  Call call_;
};

class SelfCommunicator final : public Communicator {
 public:
  SelfCommunicator(std::string_view name, int world_rank, Ledger* ledger)
      : Communicator(std::string(name), 0, {world_rank}, ledger) {}

  std::unique_ptr<Communicator> split(int color, int, std::string_view name) override {
    return color < 0 ? nullptr : make_self(name, members()[0], ledger());
  }
  std::unique_ptr<Communicator> subgroup(std::span<const int> ranks, std::string_view name) override {
    if (ranks.empty()) return nullptr;
    NRL_CHECK(ranks.size() == 1 && ranks[0] == 0, "subgroup of {}: {} ranks", label(), ranks.size());
    return make_self(name, members()[0], ledger());
  }

 private:
  std::shared_ptr<Work> submit(Call call, bool) override {
    NRL_CHECK(call.stream.native == nullptr, "{} on {}: host memory takes no stream", name_of(call.op),
              label());
    const LedgerTicket ticket = enroll(call);
    auto work = std::make_shared<SelfWork>(ledger(), ticket, unwaited(), std::move(call));
    work->run_now();
    return work;
  }
};

}  // namespace

std::unique_ptr<Communicator> make_self(std::string_view name, int world_rank, Ledger* ledger) {
  return std::make_unique<SelfCommunicator>(name, world_rank, ledger);
}

}  // namespace nrl::comm
