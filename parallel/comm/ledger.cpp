#include "parallel/comm/ledger.h"

#include <algorithm>
#include <utility>

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

void Ledger::add(int group, Op op, int64_t bytes) {
  const Purpose purpose = PurposeScope::current();
  auto sum = std::find_if(sums_.begin(), sums_.end(), [&](const Sum& s) {
    return s.group == group && s.op == op && s.purpose == purpose;
  });
  if (sum == sums_.end()) sum = sums_.insert(sum, {group, op, purpose});
  ++sum->count;
  sum->bytes += bytes;
}

}  // namespace nrl::comm
