#include "parallel/pipeline/simulate.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "core/base/error.h"

namespace nrl::pipeline {

namespace {

using Kind = ActionKind;

class Simulator {
 public:
  Simulator(std::span<const Schedule> lists, const Costs& costs)
      : lists_(lists),
        costs_(costs),
        stages_(static_cast<int>(lists.size())),
        chunks_(stages_ * static_cast<int>(lists[0].stashes.size())),
        states_(lists.size()) {
    NRL_CHECK(costs.size() == 1 || static_cast<int>(costs.size()) == chunks_, "costs of {} chunks for {}",
              costs.size(), chunks_);
    for (int stage = 0; stage < stages_; ++stage) {
      const size_t chunks = list(stage).stashes.size();
      state(stage).live.resize(chunks);
      state(stage).frees.resize(chunks, Kind::forward);
      for (const Action& a : list(stage).actions)
        if (Kind& frees = state(stage).frees[a.chunk]; holds(a.kind) > holds(frees)) frees = a.kind;
      result_.peak_stashes.emplace_back(chunks);
    }
  }

  Simulation run() {
    for (auto next = earliest(); next; next = earliest()) execute(next->first, next->second);
    for (const State& s : states_) result_.makespan = std::max(result_.makespan, s.now);
    for (const State& s : states_)
      result_.bubble.push_back(result_.makespan > 0 ? (result_.makespan - s.busy) / result_.makespan : 0);
    explain_deadlock();
    return std::move(result_);
  }

 private:
  /// A result of an action, by the model's chunk.
  enum class Value : uint8_t { output, input_gradient, received_input, received_gradient };
  using Result = std::tuple<Value, int /*chunk*/, int /*microbatch*/>;
  struct Message {
    Result received;  // the result of its receive
    double arrival;
  };
  struct Fifo {
    std::deque<Message> messages;
    double free = 0;  // when the last message has arrived
  };
  struct Send {
    Action action;
    Result received;
  };
  struct State {
    size_t next = 0;
    double now = 0, busy = 0;
    std::deque<Send> unfinished;
    std::vector<int> live;    // occupied stashes per chunk
    std::vector<Kind> frees;  // the action that frees a stash, per chunk
  };

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
  const ChunkCosts& costs(int chunk) const {
    return costs_[costs_.size() == 1 ? 0 : static_cast<size_t>(chunk)];
  }
  int model_chunk(int stage, const Action& a) const { return a.chunk * stages_ + stage; }
  bool over(int stage) const { return state(stage).next == list(stage).actions.size(); }
  const Action& next(int stage) const { return list(stage).actions[state(stage).next]; }

  /// The FIFO that ends at the chunk that receives.
  Fifo& fifo(const Result& received) {
    return fifos_[{std::get<0>(received), std::get<1>(received) % stages_}];
  }

  /// When the stage's next action can start; nullopt: it is blocked on another stage.
  std::optional<double> start(int stage) {
    const Action& a = next(stage);
    const int chunk = model_chunk(stage, a);
    const double now = state(stage).now;
    const auto after = [&](Value value, int of) -> std::optional<double> {
      const auto found = results_.find({value, of, a.microbatch});
      if (found == results_.end()) return std::nullopt;
      return std::max(now, found->second);
    };
    const auto arrived = [&](Value value) -> std::optional<double> {
      const Result wanted{value, chunk, a.microbatch};
      const auto& messages = fifo(wanted).messages;
      if (messages.empty() || messages.front().received != wanted) return std::nullopt;
      return std::max(now, messages.front().arrival);
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
        const auto sent = unfinished(stage, a);
        if (sent == state(stage).unfinished.end()) return std::nullopt;
        return after(std::get<0>(sent->received), std::get<1>(sent->received));
      }
      case Kind::post_forward:
      case Kind::post_backward:
      case Kind::finish_reduce:
      case Kind::step:
        break;
    }
    return now;
  }

  std::deque<Send>::iterator unfinished(int stage, const Action& a) {
    auto& sends = state(stage).unfinished;
    return std::find_if(sends.begin(), sends.end(), [&](const Send& s) {
      return s.action.chunk == a.chunk && s.action.microbatch == a.microbatch;
    });
  }

  double duration(int stage, const Action& a) const {
    const ChunkCosts& c = costs(model_chunk(stage, a));
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

  /// The stage whose next action is complete first, with the time at which it starts.
  std::optional<std::pair<int, double>> earliest() {
    std::optional<std::pair<int, double>> best;
    double best_end = 0;
    for (int stage = 0; stage < stages_; ++stage) {
      const auto begin = over(stage) ? std::nullopt : start(stage);
      const double end = begin ? *begin + duration(stage, next(stage)) : 0;
      if (!begin || (best && end >= best_end)) continue;
      best = {stage, *begin};
      best_end = end;
    }
    return best;
  }

  void execute(int stage, double begin) {
    State& s = state(stage);
    const Action& a = next(stage);
    const int chunk = model_chunk(stage, a);
    const double length = duration(stage, a);
    s.now = begin + length;
    s.busy += length;
    const auto done = [&](Value value) { results_[{value, chunk, a.microbatch}] = s.now; };
    const auto send = [&](const Result& received) {
      Fifo& to = fifo(received);
      to.free = std::max(to.free, s.now) + costs(chunk).message;
      to.messages.push_back({received, to.free});
      s.unfinished.push_back({a, received});
    };
    const auto receive = [&](Value value) {
      if (stages_ > 1) fifo({value, chunk, a.microbatch}).messages.pop_front();
      done(value);
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
        if (posted_.erase({chunk, a.microbatch}) == 0) occupy(stage, a);
        break;
      case Kind::receive_backward:
        receive(Value::received_gradient);
        break;
      case Kind::finish_send:
        s.unfinished.erase(unfinished(stage, a));
        break;
      case Kind::post_forward:
        posted_.emplace(chunk, a.microbatch);
        occupy(stage, a);
        break;
      case Kind::post_backward:
      case Kind::backward_weight:
      case Kind::finish_reduce:
      case Kind::step:
        break;
    }
    if (a.kind == s.frees[a.chunk]) --s.live[a.chunk];
    result_.order.push_back({stage, s.next++});
  }

  void occupy(int stage, const Action& a) {
    const auto chunk = static_cast<size_t>(a.chunk);
    int& peak = result_.peak_stashes[stage][chunk];
    peak = std::max(peak, ++state(stage).live[chunk]);
  }

  void explain_deadlock() {
    std::string& text = result_.deadlock;
    const auto add = [&](const std::string& line) { text += (text.empty() ? "" : "; ") + line; };
    for (int stage = 0; stage < stages_; ++stage)
      if (!over(stage))
        add(fmt::format("stage {} waits at action {}, {}", stage, state(stage).next, describe(next(stage))));
    for (const auto& [end, fifo] : fifos_) {
      if (fifo.messages.empty()) continue;
      const auto& [value, chunk, microbatch] = fifo.messages.front().received;
      add(fmt::format("the next message to stage {} is the {} of chunk {}, microbatch {}", end.second,
                      value == Value::received_input ? "input" : "gradient", chunk / stages_, microbatch));
    }
  }

  const std::span<const Schedule> lists_;
  const Costs& costs_;
  const int stages_, chunks_;
  std::vector<State> states_;
  std::map<Result, double> results_;             // when they exist
  std::map<std::pair<Value, int>, Fifo> fifos_;  // by kind and receiving stage
  std::set<std::pair<int, int>> posted_;         // inputs that are being received: model chunk, microbatch
  Simulation result_;
};

}  // namespace

Simulation simulate(std::span<const Schedule> stages, const Costs& costs) {
  NRL_CHECK(!stages.empty());
  return Simulator(stages, costs).run();
}

Schedule merge(std::span<const Schedule> stages, const Simulation& simulation) {
  NRL_CHECK(simulation.deadlock.empty(), "{}", simulation.deadlock);
  const int count = static_cast<int>(stages.size());
  Schedule out;
  for (size_t chunk = 0; chunk < stages[0].stashes.size(); ++chunk)
    for (const Schedule& stage : stages) out.stashes.push_back(stage.stashes[chunk]);
  bool trains = false;
  for (const auto& [stage, index] : simulation.order) {
    Action a = stages[stage].actions[index];
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
