#include "parallel/comm/ledger.h"

#include <algorithm>
#include <utility>

#include "parallel/comm/executor.h"

namespace nrl::comm {

namespace {
thread_local Purpose current_purpose = Purpose::layers;
}

PurposeScope::PurposeScope(Purpose purpose) : before_(std::exchange(current_purpose, purpose)) {}

PurposeScope::~PurposeScope() {
  current_purpose = before_;
}

Purpose PurposeScope::current() {
  return current_purpose;
}

/// A complete operation that tells the ledger when it is waited for.
class Ledger::Observed final : public Work {
 public:
  Observed(Ledger& ledger, int operation)
      : Work(nullptr, {}, nullptr, nullptr), ledger_(ledger), operation_(operation) {
    run_now();
  }
  int operation() const { return operation_; }

 private:
  Advance start() override { return Advance::done; }
  void block() override {
    if (ledger_.observer_) ledger_.observer_({.wait = true, .operation = operation_});
  }

  Ledger& ledger_;
  int operation_;
};

std::shared_ptr<Work> Ledger::add(int group, Op op, int64_t bytes, const Work* previous) {
  const Purpose purpose = PurposeScope::current();
  auto sum = std::find_if(sums_.begin(), sums_.end(), [&](const Sum& s) {
    return s.group == group && s.op == op && s.purpose == purpose;
  });
  if (sum == sums_.end()) sum = sums_.insert(sum, {group, op, purpose});
  ++sum->count;
  sum->bytes += bytes;
  if (!observer_) return finished_work();
  const auto* const before = dynamic_cast<const Observed*>(previous);
  const int operation = operations_++;
  observer_({.operation = operation,
             .after = before ? before->operation() : -1,
             .group = group,
             .op = op,
             .purpose = purpose,
             .bytes = bytes});
  return std::make_shared<Observed>(*this, operation);
}

}  // namespace nrl::comm
