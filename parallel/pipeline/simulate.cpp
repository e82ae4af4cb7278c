#include "parallel/pipeline/simulate.h"

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "core/base/error.h"

namespace nrl::pipeline {

namespace {

using Kind = ActionKind;

/// Runs the stages by a queue of those whose next action can start, by the time of its end. A blocked stage
/// is examined again when the message or the receive that it waits for is there, and not before. Times do not
/// depend on the order of the queue: every FIFO has one sender and one receiver. Without Simulation::order
/// the queue is a stack, so that a stage runs until it is blocked.
class Simulator {
 public:
  Simulator(std::span<const Schedule> lists, const Costs& first, const Costs& middle, const Costs& last,
            bool ordered)
      : lists_(lists),
        ordered_(ordered),
        costs_{&first, &middle, &last},
        stages_(static_cast<int>(lists.size())),
        chunks_(stages_ * lists[0].stashes.chunks()),
        fifos_(2 * lists.size()),
        states_(lists.size()) {
    for (const Costs* costs : costs_)
      NRL_CHECK(costs->size() == 1 || static_cast<int>(costs->size()) == chunks_, "costs of {} chunks for {}",
                costs->size(), chunks_);
    size_t actions = 0;
    for (int stage = 0; stage < stages_; ++stage) {
      State& s = state(stage);
      const Stashes& stashes = list(stage).stashes;
      s.live.resize(stashes.counts().size());
      s.frees.resize(static_cast<size_t>(stashes.chunks()), Kind::forward);
      for (const Action& a : list(stage).actions) {
        microbatches_ = std::max(microbatches_, a.microbatch + 1);
        if (Kind& frees = s.frees[a.chunk]; holds(a.kind) > holds(frees)) frees = a.kind;
      }
      actions += list(stage).actions.size();
      result_.peak_stashes.emplace_back(stashes.counts().size());
    }
    const size_t items = static_cast<size_t>(chunks_) * static_cast<size_t>(microbatches_);
    for (auto& of_value : results_) of_value.assign(items, absent);
    for (auto& of_kind : sent_) of_kind.assign(items, 0);
    posted_.assign(items, false);
    if (ordered_) result_.order.reserve(actions);
  }

  Simulation run() {
    for (int stage = 0; stage < stages_; ++stage) examine(stage);
    while (!ready_.empty()) {
      if (ordered_) std::pop_heap(ready_.begin(), ready_.end(), std::greater<>());
      const auto [end, stage, begin] = ready_.back();
      ready_.pop_back();
      execute(stage, begin, end);
      examine(stage);
    }
    for (const State& s : states_) result_.makespan = std::max(result_.makespan, s.now);
    for (const State& s : states_)
      result_.bubble.push_back(result_.makespan > 0 ? (result_.makespan - s.busy) / result_.makespan : 0);
    explain_deadlock();
    return std::move(result_);
  }

 private:
  /// A result of an action, of a chunk of the model and a microbatch.
  enum class Value : uint8_t { output, input_gradient, received_input, received_gradient };
  struct Result {
    Value value;
    int chunk, microbatch;
    bool operator==(const Result&) const = default;
  };
  struct Message {
    Result received;  // the result of its receive
    double arrival;
  };
  struct Fifo {
    std::deque<Message> messages;
    double free = 0;       // when the last message has arrived
    bool awaited = false;  // by the stage at its end, which is blocked
  };
  struct State {
    size_t next = 0;
    double now = 0, busy = 0;
    std::vector<int> live;               // occupied stashes per pool
    std::vector<Kind> frees;             // the action that frees a stash, per chunk
    std::optional<Result> awaited = {};  // the receive of another stage that it is blocked on
  };
  struct Ready {
    double end;
    int stage;
    double begin;
    bool operator>(const Ready& other) const {
      return std::pair(end, stage) > std::pair(other.end, other.stage);
    }
  };
  static constexpr double absent = -1;

  /// The latest of these kinds in a chunk's list is the one that frees its stashes.
  static int holds(Kind kind) {
    switch (kind) {
      case Kind::backward_weight:
        return 3;
      case Kind::backward:
        return 2;
      case Kind::finish_send:
        return 1;
      default:
        return 0;
    }
  }

  const Schedule& list(int stage) const { return lists_[stage]; }
  State& state(int stage) { return states_[stage]; }
  const State& state(int stage) const { return states_[stage]; }
  int model_chunk(int stage, const Action& a) const { return a.chunk * stages_ + stage; }
  bool over(int stage) const { return state(stage).next == list(stage).actions.size(); }
  const Action& next(int stage) const { return list(stage).actions[state(stage).next]; }
  int stage_of(int chunk) const { return (chunk + stages_) % stages_; }
  size_t item(int chunk, int microbatch) const {
    return static_cast<size_t>(chunk) * static_cast<size_t>(microbatches_) + static_cast<size_t>(microbatch);
  }
  /// When it exists; `absent`: not yet.
  double& result(const Result& r) {
    return results_[static_cast<size_t>(r.value)][item(r.chunk, r.microbatch)];
  }

  const ChunkCosts& costs(int chunk, const Action& a) const {
    const bool forward = a.kind == Kind::forward || a.kind == Kind::send_forward;
    const bool first = a.microbatch == 0, last = a.microbatch + 1 == microbatches_;
    const Costs& of = *costs_[first && (forward || !last) ? 0 : last ? 2 : 1];
    return of[of.size() == 1 ? 0 : static_cast<size_t>(chunk)];
  }

  /// The FIFO that ends at the chunk that receives.
  Fifo& fifo(const Result& received) {
    return fifos_[(received.value == Value::received_input ? 0 : stages_) + stage_of(received.chunk)];
  }

  /// Puts the stage's next action into the queue if it can start; else the stage is blocked.
  void examine(int stage) {
    if (over(stage)) return;
    ++result_.visits;
    const std::optional<double> begin = start(stage);
    if (!begin) return;
    ready_.push_back({*begin + duration(stage, next(stage)), stage, *begin});
    if (ordered_) std::push_heap(ready_.begin(), ready_.end(), std::greater<>());
  }

  /// When the stage's next action can start; nullopt: it is blocked. Notes what another stage must do first;
  /// where nothing is noted, it is blocked for good.
  std::optional<double> start(int stage) {
    const Action& a = next(stage);
    const int chunk = model_chunk(stage, a);
    const double now = state(stage).now;
    const auto after = [&](Value value, int of) -> std::optional<double> {
      const double at = of < 0 || of >= chunks_ ? absent : result({value, of, a.microbatch});
      if (at == absent) return std::nullopt;
      return std::max(now, at);
    };
    const auto arrived = [&](Value value) -> std::optional<double> {
      const Result wanted{value, chunk, a.microbatch};
      Fifo& from = fifo(wanted);
      from.awaited = from.messages.empty();
      if (from.awaited || from.messages.front().received != wanted) return std::nullopt;
      return std::max(now, from.messages.front().arrival);
    };
    switch (a.kind) {
      case Kind::forward:
        return chunk == 0 ? now : after(Value::received_input, chunk);
      case Kind::backward:
      case Kind::backward_data:
        if (!after(Value::output, chunk)) return std::nullopt;
        return chunk + 1 == chunks_ ? now : after(Value::received_gradient, chunk);
      case Kind::backward_weight:
        return after(Value::input_gradient, chunk);
      case Kind::send_forward:
        return after(Value::output, chunk);
      case Kind::send_backward:
        return after(Value::input_gradient, chunk);
      case Kind::receive_forward:
        return stages_ == 1 ? after(Value::output, chunk - 1) : arrived(Value::received_input);
      case Kind::receive_backward:
        return stages_ == 1 ? after(Value::input_gradient, chunk + 1) : arrived(Value::received_gradient);
      case Kind::finish_send: {
        const std::optional<Result> received = oldest_send(chunk, a.microbatch);
        if (!received) return std::nullopt;
        const std::optional<double> at = after(received->value, received->chunk);
        if (!at) state(stage).awaited = received;
        return at;
      }
      case Kind::post_forward:
      case Kind::post_backward:
      case Kind::finish_reduce:
      case Kind::step:
        break;
    }
    return now;
  }

  /// The receive that completes the oldest unfinished send of a chunk and microbatch.
  std::optional<Result> oldest_send(int chunk, int microbatch) const {
    const size_t at = item(chunk, microbatch);
    const size_t forward = sent_[0][at], backward = sent_[1][at];
    if (forward > 0 && (backward == 0 || forward < backward))
      return Result{Value::received_input, chunk + 1, microbatch};
    if (backward > 0) return Result{Value::received_gradient, chunk - 1, microbatch};
    return std::nullopt;
  }

  double duration(int stage, const Action& a) const {
    const ChunkCosts& c = costs(model_chunk(stage, a), a);
    switch (a.kind) {
      case Kind::forward:
        return c.forward;
      case Kind::backward:
        return c.backward_data + c.backward_weight;
      case Kind::backward_data:
        return c.backward_data;
      case Kind::backward_weight:
        return c.backward_weight;
      default:
        return 0;
    }
  }

  void execute(int stage, double begin, double end) {
    State& s = state(stage);
    const Action& a = next(stage);
    const int chunk = model_chunk(stage, a);
    s.now = end;
    s.busy += end - begin;
    const auto done = [&](Value value) { result({value, chunk, a.microbatch}) = s.now; };
    const auto send = [&](const Result& received) {
      Fifo& to = fifo(received);
      to.free = std::max(to.free, s.now) + costs(chunk, a).message;
      to.messages.push_back({received, to.free});
      sent_[a.kind == Kind::send_forward ? 0 : 1][item(chunk, a.microbatch)] = ++sends_;
      if (!std::exchange(to.awaited, false)) return;
      examine(stage_of(received.chunk));
    };
    const auto receive = [&](Value value) {
      done(value);
      if (stages_ == 1) return;
      const Result received{value, chunk, a.microbatch};
      fifo(received).messages.pop_front();
      const int sender = stage_of(value == Value::received_input ? chunk - 1 : chunk + 1);
      if (state(sender).awaited != received) return;
      state(sender).awaited.reset();
      examine(sender);
    };
    switch (a.kind) {
      case Kind::forward:
        done(Value::output);
        if (chunk == 0) occupy(stage, a);
        break;
      case Kind::backward:
      case Kind::backward_data:
        done(Value::input_gradient);
        break;
      case Kind::send_forward:
        send({Value::received_input, chunk + 1, a.microbatch});
        break;
      case Kind::send_backward:
        send({Value::received_gradient, chunk - 1, a.microbatch});
        break;
      case Kind::receive_forward:
        receive(Value::received_input);
        if (!posted_[item(chunk, a.microbatch)]) occupy(stage, a);
        posted_[item(chunk, a.microbatch)] = false;
        break;
      case Kind::receive_backward:
        receive(Value::received_gradient);
        break;
      case Kind::finish_send:
        sent_[oldest_send(chunk, a.microbatch)->value == Value::received_input ? 0 : 1]
             [item(chunk, a.microbatch)] = 0;
        break;
      case Kind::post_forward:
        posted_[item(chunk, a.microbatch)] = true;
        occupy(stage, a);
        break;
      case Kind::post_backward:
      case Kind::backward_weight:
      case Kind::finish_reduce:
      case Kind::step:
        break;
    }
    if (a.kind == s.frees[a.chunk]) --s.live[list(stage).stashes.pool(a.chunk)];
    if (ordered_) result_.order.push_back({stage, s.next, begin, end});
    ++s.next;
    ++result_.visits;
  }

  void occupy(int stage, const Action& a) {
    const int pool = list(stage).stashes.pool(a.chunk);
    int& peak = result_.peak_stashes[stage][pool];
    peak = std::max(peak, ++state(stage).live[pool]);
  }

  void explain_deadlock() {
    std::string& text = result_.deadlock;
    const auto add = [&](const std::string& line) { text += (text.empty() ? "" : "; ") + line; };
    for (int stage = 0; stage < stages_; ++stage)
      if (!over(stage))
        add(fmt::format("stage {} waits at action {}, {}", stage, state(stage).next, describe(next(stage))));
    for (const Fifo& fifo : fifos_) {
      if (fifo.messages.empty()) continue;
      const auto& [value, chunk, microbatch] = fifo.messages.front().received;
      add(fmt::format("the next message to stage {} is the {} of chunk {}, microbatch {}", stage_of(chunk),
                      value == Value::received_input ? "input" : "gradient", chunk / stages_, microbatch));
    }
  }

  const std::span<const Schedule> lists_;
  const bool ordered_;
  const std::array<const Costs*, 3> costs_;  // of the first, middle and last microbatches
  const int stages_, chunks_;
  int microbatches_ = 0;
  std::vector<Fifo> fifos_;  // by kind and receiving stage
  std::vector<State> states_;
  std::array<std::vector<double>, 4> results_;  // when they exist, by value and item()
  std::array<std::vector<size_t>, 2> sent_;     // unfinished sends forward and backward: their numbers
  size_t sends_ = 0;
  std::vector<bool> posted_;  // inputs that are being received
  std::vector<Ready> ready_;  // a heap if ordered_, else a stack
  Simulation result_;
};

}  // namespace

Simulation simulate(std::span<const Schedule> stages, const Costs& costs) {
  NRL_CHECK(!stages.empty());
  return Simulator(stages, costs, costs, costs, /*ordered=*/true).run();
}

Simulation simulate(std::span<const Schedule> stages, const MicrobatchCosts& costs) {
  NRL_CHECK(!stages.empty());
  return Simulator(stages, costs.first, costs.middle, costs.last, /*ordered=*/true).run();
}

double makespan(std::span<const Schedule> stages, const MicrobatchCosts& costs) {
  NRL_CHECK(!stages.empty());
  const Simulation simulation =
      Simulator(stages, costs.first, costs.middle, costs.last, /*ordered=*/false).run();
  NRL_CHECK(simulation.deadlock.empty(), "{}", simulation.deadlock);
  return simulation.makespan;
}

double least_makespan(const ScheduleOptions& o, const MicrobatchCosts& costs) {
  const auto of = [](const Costs& all, int chunk) -> const ChunkCosts& {
    return all[all.size() == 1 ? 0 : static_cast<size_t>(chunk)];
  };
  const auto backward = [](const ChunkCosts& c) { return c.backward_data + c.backward_weight; };
  double out = 0, beside = 0;  // passes of the stages before, and messages
  for (int stage = 0; stage < o.stages; ++stage) {
    double own = 0;
    for (int chunk = stage; chunk < o.stages * o.chunks_per_stage; chunk += o.stages) {
      const ChunkCosts &first = of(costs.first, chunk), &middle = of(costs.middle, chunk),
                       &last = of(costs.last, chunk);
      own += first.forward + backward(last);
      if (o.microbatches > 1)
        own += backward(first) + last.forward + (o.microbatches - 2) * (middle.forward + backward(middle));
    }
    out = std::max(out, beside + own);
    if (stage + 1 == o.stages) break;
    beside += of(costs.first, stage).forward + of(costs.first, stage).message;
    // zb_h1 ends with weight gradients, which no other stage waits for.
    if (o.kind != ScheduleKind::zb_h1)
      beside += of(costs.last, stage + 1).message + backward(of(costs.last, stage));
  }
  return out;
}

Schedule merge(std::span<const Schedule> stages, const Simulation& simulation) {
  NRL_CHECK(simulation.deadlock.empty(), "{}", simulation.deadlock);
  const int count = static_cast<int>(stages.size());
  Schedule out;
  for (int chunk = 0; chunk < stages[0].stashes.chunks(); ++chunk)
    for (int pools = 0; const Schedule& stage : stages) {
      out.stashes.add(pools + stage.stashes.pool(chunk), stage.stashes.numbers(chunk));
      pools += static_cast<int>(stage.stashes.counts().size());
    }
  bool trains = false;
  for (const Simulation::Completed& done : simulation.order) {
    const int stage = done.stage;
    Action a = stages[stage].actions[done.action];
    switch (a.kind) {
      case Kind::send_forward:
      case Kind::send_backward:
      case Kind::post_forward:
      case Kind::post_backward:
      case Kind::finish_send:
        break;
      case Kind::finish_reduce:
      case Kind::step:
        trains = true;
        break;
      default:
        a.chunk = a.chunk * count + stage;
        out.actions.push_back(a);
    }
  }
  if (trains) {
    out.actions.push_back({Kind::finish_reduce});
    out.actions.push_back({Kind::step});
  }
  return out;
}

}  // namespace nrl::pipeline
