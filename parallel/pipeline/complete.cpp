#include <algorithm>
#include <deque>
#include <utility>

#include "parallel/pipeline/schedule.h"

namespace nrl::pipeline {

namespace {

using Kind = ActionKind;

/// Implements complete_schedule().
class Completion {
 public:
  Completion(std::span<const Action> computation, const ScheduleOptions& options, int stage)
      : options_(options),
        stage_(stage),
        training_(std::any_of(computation.begin(), computation.end(),
                              [](const Action& a) { return a.kind != Kind::forward; })) {
    pending_[0].resize(static_cast<size_t>(options.chunks_per_stage));
    pending_[1].resize(static_cast<size_t>(options.chunks_per_stage));
    for (int chunk = 0; chunk < options.chunks_per_stage; ++chunk)
      schedule_.stashes.push_back(count_stashes(computation, chunk));
    for (size_t i = 0; i < computation.size(); ++i) {
      next_ = i + 1 < computation.size() ? &computation[i + 1] : nullptr;
      add(computation[i]);
    }
    for (int chunk = 0; chunk < options.chunks_per_stage; ++chunk)
      for (const Kind send : {Kind::send_forward, Kind::send_backward})
        finish_sends(send, chunk, options.microbatches);
    if (!training_) return;
    schedule_.actions.push_back({Kind::finish_reduce});
    schedule_.actions.push_back({Kind::step});
  }

  Schedule take() { return std::move(schedule_); }

 private:
  bool first(int chunk) const { return chunk == 0 && stage_ == 0; }
  bool last(int chunk) const {
    return chunk + 1 == options_.chunks_per_stage && stage_ + 1 == options_.stages;
  }
  bool sends() const { return options_.stages > 1; }

  int count_stashes(std::span<const Action> computation, int chunk) const {
    // In evaluation, the output of one microbatch is sent while the next one is computed.
    if (!training_) return std::min(options_.microbatches, sends() && !last(chunk) ? 2 : 1);
    int live = 0, peak = 0;
    const auto begins = [&](const Action& a) { return a.kind == Kind::forward && a.chunk == chunk; };
    const bool posted = posts() && !first(chunk);  // a pass earlier, but for the first one
    for (size_t i = 0; i < computation.size(); ++i) {
      const Action& a = computation[i];
      if (begins(a) && (!posted || i == 0)) ++live;
      if (posted && i + 1 < computation.size() && begins(computation[i + 1])) ++live;
      peak = std::max(peak, live);
      if (a.chunk == chunk && (a.kind == Kind::backward || a.kind == Kind::backward_weight)) --live;
    }
    // The last stage takes up the gradients of the first one's chunks when it has had this chunk's whole
    // group: a stash that is used again before would wait for it.
    return stage_ == 0 && chunk > 0 ? std::max(peak, std::min(options_.group, options_.microbatches)) : peak;
  }

  bool posts() const { return options_.overlap_messages && training_ && sends(); }

  /// Adds a pass, and before it posts the receive of the next one. A gradient can only be received when its
  /// chunk has had the forward pass.
  void add_pass(const Action& a) {
    if (posts() && next_) {
      Action of = *next_;
      of.stash = of.microbatch % schedule_.stashes[of.chunk];
      const bool forward = of.kind == Kind::forward, weight = of.kind == Kind::backward_weight;
      const bool same = a.kind == Kind::forward && a.chunk == of.chunk && a.microbatch == of.microbatch;
      if (forward && !first(of.chunk)) add(Kind::post_forward, of);
      if (!forward && !weight && !last(of.chunk) && !same) add(Kind::post_backward, of);
    }
    schedule_.actions.push_back(a);
  }

  void add(Action a) {
    const int stashes = schedule_.stashes[a.chunk];
    const bool last_microbatch = training_ && a.microbatch + 1 == options_.microbatches;
    a.stash = a.microbatch % stashes;
    switch (a.kind) {
      case Kind::forward:
        finish_sends(Kind::send_forward, a.chunk, a.microbatch - stashes);
        if (!first(a.chunk)) add(Kind::receive_forward, a);
        a.last = last_microbatch && last(a.chunk);
        add_pass(a);
        if (sends() && !last(a.chunk)) send(Kind::send_forward, a);
        break;
      case Kind::backward:
      case Kind::backward_data:
        if (sends() && !last(a.chunk)) add(Kind::receive_backward, a);
        // The next chunk has sent this gradient, so it has received the activations: does not block.
        finish_sends(Kind::send_forward, a.chunk, a.microbatch);
        finish_sends(Kind::send_backward, a.chunk, a.microbatch - stashes);
        a.last = last_microbatch;
        add_pass(a);
        if (sends() && !first(a.chunk)) send(Kind::send_backward, a);
        // On one rank, copy the gradient now: this stash's next microbatch will overwrite it.
        if (!sends() && !first(a.chunk)) {
          const int before = a.chunk - 1;
          add(Kind::receive_backward, {.kind = Kind::backward,
                                       .chunk = before,
                                       .microbatch = a.microbatch,
                                       .stash = a.microbatch % schedule_.stashes[before]});
        }
        break;
      default:
        a.last = last_microbatch;
        add_pass(a);
    }
  }

  void add(Kind kind, const Action& of) {
    schedule_.actions.push_back(
        {.kind = kind, .chunk = of.chunk, .microbatch = of.microbatch, .stash = of.stash});
  }

  void send(Kind kind, const Action& of) {
    add(kind, of);
    pending(kind, of.chunk).push_back(schedule_.actions.back());
  }

  /// Completes the sends of microbatches up to `newest`.
  void finish_sends(Kind kind, int chunk, int newest) {
    for (auto& sent = pending(kind, chunk); !sent.empty() && sent.front().microbatch <= newest;
         sent.pop_front())
      add(Kind::finish_send, sent.front());
  }

  std::deque<Action>& pending(Kind send, int chunk) {
    return pending_[send == Kind::send_forward ? 0 : 1][chunk];
  }

  const ScheduleOptions& options_;
  const int stage_;
  const bool training_;
  const Action* next_ = nullptr;  // pass after the one that is being added
  Schedule schedule_;
  std::vector<std::deque<Action>> pending_[2];  // unfinished sends per chunk, oldest first
};

}  // namespace

Schedule complete_schedule(std::span<const Action> computation, const ScheduleOptions& options, int stage) {
  return Completion(computation, options, stage).take();
}

}  // namespace nrl::pipeline
