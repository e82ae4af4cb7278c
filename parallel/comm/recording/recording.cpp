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
    out += fmt::format("{} {}", call.count, name_of(call.dtype));
  }
  if (call.op == Op::all_reduce || call.op == Op::reduce_scatter) {
    constexpr const char* names[] = {"sum", "max", "min"};
    out += fmt::format(" {}", names[static_cast<int>(call.reduce)]);
  }
  if (call.op == Op::broadcast) out += fmt::format(" root {}", call.peer);
  return out + ")";
}

}  // namespace

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
  bool single_fifo() const override { return inner_->single_fifo(); }
  std::shared_ptr<HostTransport> host_transport() override { return inner_->host_transport(); }

 private:
  std::shared_ptr<Work> submit(Call call, bool blocking) override {
    const bool collective = !is_message(call);
    record(describe(call), collective);
    auto work = submit_to(*inner_, std::move(call), blocking);
    return std::make_shared<ForwardedWork>(std::move(work), unwaited());
  }

  /// Forwards to the inner operation and counts the wait for this communicator.
  class ForwardedWork final : public Work {
   public:
    ForwardedWork(std::shared_ptr<Work> inner, std::shared_ptr<std::atomic<int>> unwaited)
        : Work(nullptr, {}, nullptr, std::move(unwaited)), inner_(std::move(inner)) {}
    bool finished() const override { return inner_->finished(); }
    bool host_done() const override { return inner_->host_done(); }
    void order_stream(void* stream) const override { inner_->order_stream(stream); }
    Executor* executor() const override { return inner_->executor(); }
    std::exception_ptr error() const override { return inner_->error(); }

   private:
    void block() override { inner_->wait(); }
    Advance start() override { return Advance::done; }
    std::shared_ptr<Work> inner_;
  };

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

}  // namespace nrl::comm
