#include "parallel/comm/recording/recording.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "core/base/error.h"
#include "parallel/comm/executor.h"

namespace nrl::comm {

namespace {

bool is_message(const Call& call) {
  return call.op == Op::send || call.op == Op::recv || call.op == Op::exchange;
}

std::string describe(const Call& call) {
  std::string out = fmt::format("{}(", name_of(call.op));
  if (call.op == Op::barrier) return out + ")";
  if (call.op == Op::all_to_all_v || is_message(call)) {  // sizes differ among ranks
    out += fmt::format("{}", name_of(call.dtype));
  } else {
    out += fmt::format("{}", call.count);
    for (const Call::Buffers& b : call.more) out += fmt::format(" + {}", b.count);
    out += fmt::format(" {}", name_of(call.dtype));
  }
  if (call.op == Op::all_reduce || call.op == Op::reduce_scatter) {
    constexpr const char* names[] = {"sum", "max", "min"};
    out += fmt::format(" {}", names[static_cast<int>(call.reduce)]);
  }
  if (call.op == Op::broadcast) out += fmt::format(" root {}", call.peer);
  return out + ")";
}

/// Whether NCCL launches a kernel for it.
bool moves_data(const Call& call, int ranks) {
  return ranks > 1 && (call.op == Op::barrier || call.op == Op::all_to_all_v || call.count > 0 ||
                       std::any_of(call.more.begin(), call.more.end(),
                                   [](const Call::Buffers& b) { return b.count > 0; }) ||
                       std::any_of(call.messages.begin(), call.messages.end(),
                                   [](const Message& m) { return m.data.count > 0; }));
}

}  // namespace

void Recorder::clear() {
  entries_.clear();
  launches_.clear();
  operations_ = 0;
}

class RecordingCommunicator final : public Communicator {
 public:
  RecordingCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<Recorder> recorder,
                        RecordingMode mode)
      : Communicator(inner->name(), inner->rank(), inner->members(), nullptr),
        inner_(std::move(inner)),
        recorder_(std::move(recorder)),
        mode_(mode) {}

  std::unique_ptr<Communicator> split(int color, int key, std::string_view name) override {
    record("split", true);
    return wrap(inner_->split(color, key, name));
  }
  std::unique_ptr<Communicator> subgroup(std::span<const int> ranks, std::string_view name) override {
    return wrap(inner_->subgroup(ranks, name));
  }
  Communicator& host() override {
    Communicator& beneath = inner_->host();
    return &beneath == inner_.get() ? *this : beneath;
  }
  void check() override { inner_->check(); }
  void connect(int sender, int receiver) override { inner_->connect(sender, receiver); }
  std::unique_ptr<Registration> register_memory(void* data, size_t bytes) override {
    return inner_->register_memory(data, bytes);
  }
  bool single_fifo() const override { return inner_->single_fifo(); }
  std::shared_ptr<HostTransport> host_transport() override { return inner_->host_transport(); }

 private:
  std::shared_ptr<Work> submit(Call call, bool blocking) override {
    const bool collective = !is_message(call);
    record(describe(call), collective);
    const int operation = record_launch(call);
    auto work = submit_to(*inner_, std::move(call), blocking);
    return std::make_shared<ForwardedWork>(std::move(work), unwaited(), recorder_, operation);
  }

  /// Forwards to the inner operation and counts the wait for this communicator.
  class ForwardedWork final : public Work {
   public:
    ForwardedWork(std::shared_ptr<Work> inner, std::shared_ptr<std::atomic<int>> unwaited,
                  std::shared_ptr<Recorder> recorder, int operation)
        : Work(nullptr, {}, nullptr, std::move(unwaited)),
          inner_(std::move(inner)),
          recorder_(std::move(recorder)),
          operation_(operation) {}
    /// -1: not an operation of this recorder.
    int operation(const Recorder& recorder) const { return recorder_.get() == &recorder ? operation_ : -1; }
    bool finished() const override { return inner_->finished(); }
    bool host_done() const override { return inner_->host_done(); }
    void order_stream(void* stream) const override { inner_->order_stream(stream); }
    Executor* executor() const override { return inner_->executor(); }
    std::exception_ptr error() const override { return inner_->error(); }

   private:
    void block() override {
      if (operation_ >= 0) recorder_->launches_.push_back({.waited = operation_});
      inner_->wait();
    }
    Advance start() override { return Advance::done; }
    std::shared_ptr<Work> inner_;
    std::shared_ptr<Recorder> recorder_;
    int operation_;  // -1: none
  };

  /// The number of the operation; -1 if it moves nothing.
  int record_launch(const Call& call) {
    if (!moves_data(call, size())) return -1;
    Recorder::Launch launch{.stream = label(), .label = fmt::format("{} on {}", describe(call), label())};
    if (const auto* previous = dynamic_cast<const ForwardedWork*>(call.previous.get()))
      launch.after = previous->operation(*recorder_);
    if (!is_message(call)) launch.points.push_back({label(), size()});
    for (const Message& m : call.messages) {
      if (m.data.count == 0 || m.peer == rank()) continue;
      const bool sends = m.kind == Message::Kind::send;
      launch.points.push_back(
          {fmt::format("{} {}>{} tag {}", label(), sends ? rank() : m.peer, sends ? m.peer : rank(), m.tag)});
    }
    const bool channel = call.op != Op::exchange && is_message(call) && call.messages.front().tag != 0;
    if (channel) launch.stream = launch.points.front().name;
    recorder_->launches_.push_back(std::move(launch));
    return recorder_->operations_++;
  }

  void record(std::string call, bool collective) {
    recorder_->entries_.push_back({label(), std::move(call), collective});
    if (mode_ != RecordingMode::check || !collective) return;
    const std::string& own = recorder_->entries_.back().call;
    const std::vector<std::string> all = inner_->gather_texts(own);
    const uint64_t number = count_++;
    for (size_t r = 1; r < all.size(); ++r) {
      if (all[r] == all[0]) continue;
      fail(Exit::internal, "order mismatch at #{} on {}: rank {} {}, rank {} {}", number, label(),
           members()[0], all[0], members()[r], all[r]);
    }
  }

  std::unique_ptr<Communicator> wrap(std::unique_ptr<Communicator> inner) {
    return inner ? make_recording(std::move(inner), recorder_, mode_) : nullptr;
  }

  std::unique_ptr<Communicator> inner_;
  std::shared_ptr<Recorder> recorder_;
  RecordingMode mode_;
  uint64_t count_ = 0;
};

std::unique_ptr<Communicator> make_recording(std::unique_ptr<Communicator> inner,
                                             std::shared_ptr<Recorder> recorder, RecordingMode mode) {
  return std::make_unique<RecordingCommunicator>(std::move(inner), std::move(recorder), mode);
}

std::string order_mismatch(Communicator& all, const Recorder& recorder) {
  std::string own;
  for (const Recorder::Entry& e : recorder.entries())
    if (e.collective) own += e.group + '\t' + e.call + '\n';
  using Lines = std::vector<std::pair<std::string, std::string>>;  // (group, call)
  std::vector<Lines> ranks;
  std::vector<std::set<std::string>> groups;
  for (const std::string& text : all.gather_texts(own)) {
    Lines& lines = ranks.emplace_back();
    std::set<std::string>& used = groups.emplace_back();
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) {
      const size_t tab = line.find('\t');
      lines.emplace_back(line.substr(0, tab), line.substr(tab + 1));
      used.insert(lines.back().first);
    }
  }
  const auto common = [&](size_t of, size_t with) {
    Lines out;
    for (const auto& line : ranks[of])
      if (groups[with].count(line.first)) out.push_back(line);
    return out;
  };
  const auto at = [](const Lines& lines, size_t i) {
    return i < lines.size() ? lines[i].second + " on " + lines[i].first : std::string("nothing more");
  };
  for (size_t a = 0; a < ranks.size(); ++a) {
    for (size_t b = a + 1; b < ranks.size(); ++b) {
      const Lines left = common(a, b), right = common(b, a);
      for (size_t i = 0; i < std::max(left.size(), right.size()); ++i) {
        if (i < left.size() && i < right.size() && left[i] == right[i]) continue;
        return fmt::format("order mismatch at #{} between rank {} and rank {}: {}, {}", i, all.members()[a],
                           all.members()[b], at(left, i), at(right, i));
      }
    }
  }
  return "";
}

LaunchModel recorded_launches(Communicator& all, const Recorder& recorder) {
  // A line each: the number of a wait, or stream, label, after and points with their numbers of ranks,
  // between tabs.
  std::string own;
  for (const Recorder::Launch& l : recorder.launches()) {
    own +=
        l.waited >= 0 ? fmt::format("{}", l.waited) : fmt::format("\t{}\t{}\t{}", l.stream, l.label, l.after);
    for (const MeetingPoint& point : l.points) own += fmt::format("\t{}\t{}", point.name, point.ranks);
    own += '\n';
  }
  LaunchModel model(all.size());
  const std::vector<std::string> ranks = all.gather_texts(own);
  for (int rank = 0; rank < all.size(); ++rank) {
    std::istringstream in(ranks[rank]);
    for (std::string line; std::getline(in, line);) {
      std::vector<std::string> fields;
      std::istringstream words(line);
      for (std::string word; std::getline(words, word, '\t');) fields.push_back(word);
      if (fields.size() == 1) {
        model.wait(rank, std::stoi(fields[0]));
        continue;
      }
      std::vector<MeetingPoint> points;
      for (size_t f = 4; f + 1 < fields.size(); f += 2)
        points.push_back({fields[f], std::stoi(fields[f + 1])});
      model.issue(rank, fields[1], points, fields[2], std::stoi(fields[3]));
    }
  }
  return model;
}

}  // namespace nrl::comm
