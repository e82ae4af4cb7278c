#include <deque>
#include <map>
#include <tuple>

#include "core/base/error.h"
#include "parallel/pipeline/simulate.h"

namespace nrl::pipeline {

namespace {

using Kind = ActionKind;

/// Issues the messages of one stage as a program does.
class Issuer {
 public:
  Issuer(comm::LaunchModel& model, int stages, int stage) : model_(model), stages_(stages), stage_(stage) {}

  void act(const Action& a) {
    switch (a.kind) {
      case Kind::send_forward:
      case Kind::send_backward:
        sent_[{a.chunk, a.microbatch}].push_back(issue(a));
        break;
      case Kind::post_forward:
      case Kind::post_backward:
        posted_[{completed(a.kind), a.chunk, a.microbatch}] = issue(a);
        break;
      case Kind::receive_forward:
      case Kind::receive_backward: {
        const auto posted = posted_.find({a.kind, a.chunk, a.microbatch});
        model_.wait(stage_, posted == posted_.end() ? issue(a) : posted->second);
        break;
      }
      case Kind::finish_send: {
        std::deque<int>& sent = sent_[{a.chunk, a.microbatch}];
        NRL_CHECK(!sent.empty(), "{} without a send", describe(a));
        model_.wait(stage_, sent.front());
        sent.pop_front();
        break;
      }
      default:
        break;
    }
  }

 private:
  static Kind completed(Kind post) {
    return post == Kind::post_forward ? Kind::receive_forward : Kind::receive_backward;
  }

  /// A channel is a communicator of its own (comm/channel.h): a stream, and the only one of its messages.
  int issue(const Action& a) {
    const bool sends = a.kind == Kind::send_forward || a.kind == Kind::send_backward;
    const bool forward =
        a.kind == Kind::send_forward || a.kind == Kind::post_forward || a.kind == Kind::receive_forward;
    const int neighbor = (stage_ + (forward == sends ? 1 : stages_ - 1)) % stages_;
    const std::string channel = fmt::format("{} {}>{}", forward ? "activations" : "gradients",
                                            sends ? stage_ : neighbor, sends ? neighbor : stage_);
    return model_.issue(stage_, channel, {{channel}}, describe(a));
  }

  comm::LaunchModel& model_;
  const int stages_, stage_;
  std::map<std::pair<int, int>, std::deque<int>> sent_;  // unfinished, by chunk and microbatch
  std::map<std::tuple<Kind, int, int>, int> posted_;
};

}  // namespace

comm::LaunchModel message_launches(std::span<const Schedule> stages) {
  const auto count = static_cast<int>(stages.size());
  NRL_CHECK(count > 1, "one stage sends no messages");
  comm::LaunchModel model(count);
  for (int stage = 0; stage < count; ++stage) {
    Issuer issuer(model, count, stage);
    for (const Action& a : stages[stage].actions) issuer.act(a);
  }
  return model;
}

}  // namespace nrl::pipeline
