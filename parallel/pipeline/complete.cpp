#include <algorithm>
#include <deque>
#include <map>
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
    number_stashes(computation);
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

  /// A chunk's activations of a microbatch.
  struct Item {
    int chunk = -1, microbatch = -1;  // -1: none
  };

  /// Sets Schedule::stashes, and the item that had each stash before.
  void number_stashes(std::span<const Action> computation) {
    before_.assign(static_cast<size_t>(options_.chunks_per_stage),
                   std::vector<Item>(static_cast<size_t>(options_.microbatches)));
    if (training_)
      take_in_order(computation);
    else
      take_in_turn();
  }

  /// Evaluation: the output of one microbatch is sent while the next one is computed. Nothing else is kept.
  void take_in_turn() {
    std::vector<int> counts;
    for (int chunk = 0; chunk < options_.chunks_per_stage; ++chunk) {
      const int count = std::min(options_.microbatches, sends() && !last(chunk) ? 2 : 1);
      for (int m = count; m < options_.microbatches; ++m) before_[chunk][m] = {chunk, m - count};
      counts.push_back(count);
    }
    schedule_.stashes = Stashes::in_turn(counts, options_.microbatches);
  }

  /// Training: every microbatch gets the stash of its chunk's pool that has been free for longest (others
  /// would repeat later) when its input is received or, in the model's first chunk, with its forward pass.
  /// Its last backward pass frees it.
  void take_in_order(std::span<const Action> computation) {
    struct Pool {
      std::vector<Item> items;  // that had each stash last
      std::deque<int> free;     // stashes, the one that has been free for longest first
    };
    std::map<int, Pool> pools;
    std::vector<std::vector<int>> numbers(static_cast<size_t>(options_.chunks_per_stage),
                                          std::vector<int>(static_cast<size_t>(options_.microbatches), -1));
    // By item: the number of backward passes before its own one.
    std::vector<std::vector<int>> backward = numbers;
    for (int passes = 0; const Action& a : computation)
      if (a.kind == Kind::backward || a.kind == Kind::backward_data)
        backward[a.chunk][a.microbatch] = passes++;
    const auto usable = [&](const Item& before, const Action& a) {
      // The last stage takes up the gradients of the first one's chunks when it has had this chunk's whole
      // group: a backward pass that overwrites one earlier would wait for it.
      const bool sent = stage_ == 0 && before.chunk > 0;
      return !sent || backward[a.chunk][a.microbatch] - backward[before.chunk][before.microbatch] >=
                          std::min(options_.group, options_.microbatches);
    };
    const auto take = [&](const Action& a) {
      int& number = numbers[a.chunk][a.microbatch];
      if (a.kind != Kind::forward || number >= 0) return;
      Pool& pool = pools[pool_of(a.chunk)];
      const auto found = std::find_if(pool.free.begin(), pool.free.end(),
                                      [&](int stash) { return usable(pool.items[stash], a); });
      if (found == pool.free.end()) {
        number = static_cast<int>(pool.items.size());
        pool.items.emplace_back();
      } else {
        number = *found;
        pool.free.erase(found);
      }
      before_[a.chunk][a.microbatch] = std::exchange(pool.items[number], {a.chunk, a.microbatch});
    };
    for (size_t i = 0; i < computation.size(); ++i) {
      const Action& a = computation[i];
      take(a);
      // A receive is posted a pass earlier.
      if (posts() && i + 1 < computation.size() && !first(computation[i + 1].chunk)) take(computation[i + 1]);
      if (a.kind != Kind::backward && a.kind != Kind::backward_weight) continue;
      pools[pool_of(a.chunk)].free.push_back(numbers[a.chunk][a.microbatch]);
    }
    for (int chunk = 0; chunk < options_.chunks_per_stage; ++chunk)
      schedule_.stashes.add(pool_of(chunk), std::move(numbers[chunk]));
  }

  int pool_of(int chunk) const { return options_.pools.empty() ? 0 : options_.pools[chunk]; }

  bool posts() const { return options_.overlap_messages && training_ && sends(); }

  /// Adds a pass, and before it posts the receive of the next one. A gradient can only be received when its
  /// chunk has had the forward pass.
  void add_pass(const Action& a) {
    if (posts() && next_) {
      Action of = *next_;
      of.stash = schedule_.stashes.of(of.chunk, of.microbatch);
      const bool forward = of.kind == Kind::forward, weight = of.kind == Kind::backward_weight;
      const bool same = a.kind == Kind::forward && a.chunk == of.chunk && a.microbatch == of.microbatch;
      if (forward && !first(of.chunk)) add(Kind::post_forward, of);
      if (!forward && !weight && !last(of.chunk) && !same) add(Kind::post_backward, of);
    }
    schedule_.actions.push_back(a);
  }

  void add(Action a) {
    const bool last_microbatch = training_ && a.microbatch + 1 == options_.microbatches;
    a.stash = schedule_.stashes.of(a.chunk, a.microbatch);
    const Item before = before_[a.chunk][a.microbatch];  // in this stash
    switch (a.kind) {
      case Kind::forward:
        if (before.chunk >= 0) finish_sends(Kind::send_forward, before.chunk, before.microbatch);
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
        if (before.chunk >= 0) finish_sends(Kind::send_backward, before.chunk, before.microbatch);
        finish_old_gradients();
        a.last = last_microbatch;
        add_pass(a);
        if (sends() && !first(a.chunk)) send(Kind::send_backward, a);
        gradients_.push_back({a.chunk, a.microbatch});
        // On one rank, copy the gradient now: this stash's next microbatch will overwrite it.
        if (!sends() && !first(a.chunk)) {
          const int to = a.chunk - 1;
          add(Kind::receive_backward, {.kind = Kind::backward,
                                       .chunk = to,
                                       .microbatch = a.microbatch,
                                       .stash = schedule_.stashes.of(to, a.microbatch)});
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

  /// Before a backward pass: completes the sends of gradients of earlier ones that must have been received,
  /// so that few are in memory. A stage that does the forward pass before this one has its input, which the
  /// stage before has sent after it received the gradients of the third backward pass back. The last stage
  /// receives the gradients of the first one's chunks a group of microbatches later, and P - 1 passes
  /// earlier.
  void finish_old_gradients() {
    const int group =
        options_.group > 0
            ? options_.group
            : (options_.microbatches - 1) / std::max(1, options_.microbatches / options_.stages) + 1;
    const int late = stage_ == 0 ? std::max(0, group - options_.stages) : 0;
    for (; static_cast<int>(gradients_.size()) > 2 + late; gradients_.pop_front())
      finish_sends(Kind::send_backward, gradients_.front().chunk, gradients_.front().microbatch);
  }

  std::deque<Action>& pending(Kind send, int chunk) {
    return pending_[send == Kind::send_forward ? 0 : 1][chunk];
  }

  const ScheduleOptions& options_;
  const int stage_;
  const bool training_;
  const Action* next_ = nullptr;  // pass after the one that is being added
  Schedule schedule_;
  std::vector<std::vector<Item>> before_;       // by chunk and microbatch: the item that had its stash before
  std::deque<Item> gradients_;                  // of the last backward passes, oldest first
  std::vector<std::deque<Action>> pending_[2];  // unfinished sends per chunk, oldest first
};

}  // namespace

Schedule complete_schedule(std::span<const Action> computation, const ScheduleOptions& options, int stage) {
  return Completion(computation, options, stage).take();
}

}  // namespace nrl::pipeline
