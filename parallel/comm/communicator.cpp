#include "parallel/comm/communicator.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/trace/trace.h"
#include "parallel/comm/executor.h"
#include "parallel/comm/ledger.h"

namespace nrl::comm {

namespace {

std::atomic<int> g_leaked{0};

bool reducible(DType t) {
  switch (t) {
    case DType::f32:
    case DType::bf16:
    case DType::f16:
    case DType::f64:
    case DType::i32:
    case DType::i64:
    case DType::u8:
      return true;
    default:
      return false;
  }
}

}  // namespace

int leaked_communicators() {
  return g_leaked.load();
}

void Handle::wait() {
  if (!work_) return;
  const std::shared_ptr<Work> work = std::exchange(work_, nullptr);
  work->wait();
}

bool Handle::done() const {
  return !work_ || work_->finished();
}

int64_t Call::bytes(int size) const {
  int64_t elements = 0;
  switch (op) {
    case Op::all_gather:
    case Op::reduce_scatter:
    case Op::all_to_all:
      elements = count * size;
      for (const Buffers& b : more) elements += b.count * size;
      break;
    case Op::all_to_all_v:
      for (int64_t n : send_counts) elements += n;
      break;
    case Op::send:
    case Op::recv:
      return messages.front().data.bytes();
    case Op::exchange: {
      int64_t sum = 0;
      for (const Message& m : messages)
        if (m.kind == Message::Kind::send) sum += m.data.bytes();
      return sum;
    }
    default:
      elements = count;
  }
  return elements * size_of(dtype);
}

std::vector<Call> Call::parts() const {
  Call one = *this;
  one.more.clear();
  one.stream = {};
  one.previous = nullptr;
  std::vector<Call> out{one};
  for (const Buffers& b : more) {
    one.in = b.in;
    one.out = b.out;
    one.count = b.count;
    out.push_back(one);
  }
  return out;
}

Communicator::Communicator(std::string name, int rank, std::vector<int> members, CollectiveLog* log)
    : name_(std::move(name)), rank_(rank), members_(std::move(members)), log_(log) {
  NRL_CHECK(rank_ >= 0 && rank_ < size(), "rank {} of {}", rank_, size());
  if (log_) group_ = log_->add_group(name_, label(), size(), members_, members_[rank_]);
}

Communicator::~Communicator() {
  const int open = outstanding();
  if (open == 0 || std::uncaught_exceptions() > 0) return;
  g_leaked.fetch_add(1);
  log::error_text(
      fmt::format("{}: {} operations were never waited for (this is a bug in nrl-train)", label(), open));
}

std::string Communicator::label() const {
  std::string out = name_ + "[";
  for (int i = 0; i < size(); ++i) {
    if (i == 7 && size() > 8) {
      out += fmt::format(",...,{}", members_.back());
      break;
    }
    out += fmt::format("{}{}", i ? "," : "", members_[i]);
  }
  return out + "]";
}

LogTicket Communicator::log_call(const Call& call) {
  if (!log_) return {};
  MessageNumber number;
  if (call.op == Op::send || call.op == Op::recv) {
    const Route route{call.op, call.peer, call.messages.front().tag};
    number = {.lane = route.tag, .message = messages_[route]++};
  }
  // Not all ranks take part in a message.
  const bool message = call.op == Op::send || call.op == Op::recv || call.op == Op::exchange;
  return log_->enqueue(group_, message ? seq_ : seq_++, call.op, call.dtype, call.bytes(size()), call.peer,
                       algorithm(call), number);
}

void Communicator::set_dry(bool dry, Ledger* ledger, int group) {
  NRL_CHECK(outstanding() == 0, "{} has operations in flight", label());
  dry_ = dry;
  ledger_ = ledger;
  ledger_group_ = group;
}

std::shared_ptr<Work> Communicator::start(Call call, bool blocking) {
  if (dry_) {
    return ledger_ ? ledger_->add(ledger_group_, call.op, call.bytes(size()), call.previous.get())
                   : finished_work();
  }
  const trace::Range range(name_of(call.op).data(), trace::Kind::communication, trace::no_call,  // a literal
                           static_cast<double>(call.bytes(size())));
  unwaited_->fetch_add(1, std::memory_order_relaxed);
  try {
    return submit(std::move(call), blocking);
  } catch (...) {
    unwaited_->fetch_sub(1, std::memory_order_relaxed);
    throw;
  }
}

Call Communicator::make(Op op, DType dtype, const void* in, void* out, int64_t count) const {
  int64_t bytes = 0;
  NRL_CHECK(count >= 0 && !__builtin_mul_overflow(count, size_of(dtype) * size(), &bytes),
            "{} on {}: count {}", name_of(op), label(), count);
  NRL_CHECK(count == 0 || (in && out), "{} on {}: null buffer for {} elements", name_of(op), label(), count);
  Call call;
  call.op = op;
  call.dtype = dtype;
  call.in = in;
  call.out = out;
  call.count = count;
  return call;
}

namespace {

void check_reduce(const Communicator& c, Op op, DType t) {
  NRL_CHECK(reducible(t), "{} on {}: cannot reduce {}", name_of(op), c.label(), name_of(t));
}

/// Operands of a blocked collective: `whole` must have size() blocks of `part`.
void check_blocks(const Communicator& c, Op op, ConstView whole, ConstView part) {
  NRL_CHECK(whole.dtype == part.dtype, "{} on {}: {} and {}", name_of(op), c.label(), name_of(whole.dtype),
            name_of(part.dtype));
  NRL_CHECK(part.count >= 0 && whole.count % c.size() == 0 && whole.count / c.size() == part.count,
            "{} on {}: {} elements are not {} blocks of {}", name_of(op), c.label(), whole.count, c.size(),
            part.count);
}

int64_t checked_sum(const Communicator& c, std::span<const int64_t> counts, const char* what) {
  NRL_CHECK(static_cast<int>(counts.size()) == c.size(), "all_to_all_v on {}: {} {} counts", c.label(),
            counts.size(), what);
  int64_t sum = 0;
  for (int64_t n : counts)
    NRL_CHECK(n >= 0 && !__builtin_add_overflow(sum, n, &sum), "all_to_all_v on {}: {} count {}", c.label(),
              what, n);
  return sum;
}

/// A send to oneself needs the matching receive in the same exchange.
void check_messages(const Communicator& c, std::span<const Message> messages, bool group) {
  int own = 0;
  for (const Message& m : messages) {
    NRL_CHECK(m.peer >= 0 && m.peer < c.size(), "message on {}: no rank {}", c.label(), m.peer);
    NRL_CHECK(m.tag >= 0 && m.tag <= max_tag, "message on {}: tag {} is not in 0..{}", c.label(), m.tag,
              max_tag);
    NRL_CHECK(m.data.count >= 0 && (m.data.count == 0 || m.data.data), "message on {}: null buffer",
              c.label());
    if (m.peer != c.rank()) continue;
    NRL_CHECK(group, "message on {}: a rank sends to itself within one exchange only", c.label());
    own += m.kind == Message::Kind::send ? 1 : -1;
  }
  NRL_CHECK(own == 0, "exchange on {}: sends and receives to oneself differ in number", c.label());
}

}  // namespace

Handle Communicator::issue(Call call, const After& after) {
  call.stream = after.stream;
  call.previous = after.previous;
  return Handle(start(std::move(call), blocking_));
}

Handle Communicator::all_reduce_async(View data, Reduce op, const After& after) {
  check_reduce(*this, Op::all_reduce, data.dtype);
  Call call = make(Op::all_reduce, data.dtype, data.data, data.data, data.count);
  call.reduce = op;
  return issue(std::move(call), after);
}

Call Communicator::gather_call(ConstView in, View out) const {
  check_blocks(*this, Op::all_gather, out, in);
  return make(Op::all_gather, in.dtype, in.data, out.data, in.count);
}

Call Communicator::scatter_call(ConstView in, View out, Reduce op) const {
  check_reduce(*this, Op::reduce_scatter, in.dtype);
  check_blocks(*this, Op::reduce_scatter, in, out);
  Call call = make(Op::reduce_scatter, in.dtype, in.data, out.data, out.count);
  call.reduce = op;
  return call;
}

Call Communicator::joined(std::vector<Call> calls) const {
  NRL_CHECK(!calls.empty(), "an operation on {} without buffers", label());
  Call call = std::move(calls.front());
  for (size_t i = 1; i < calls.size(); ++i) {
    NRL_CHECK(calls[i].dtype == call.dtype, "{} on {}: {} and {} in one operation", name_of(call.op), label(),
              name_of(call.dtype), name_of(calls[i].dtype));
    call.more.push_back({calls[i].in, calls[i].out, calls[i].count});
  }
  return call;
}

Handle Communicator::all_gather_async(ConstView in, View out, const After& after) {
  return issue(gather_call(in, out), after);
}

Handle Communicator::all_gather_async(std::span<const Operands> each, const After& after) {
  std::vector<Call> calls;
  for (const Operands& o : each) calls.push_back(gather_call(o.in, o.out));
  return issue(joined(std::move(calls)), after);
}

Handle Communicator::reduce_scatter_async(ConstView in, View out, Reduce op, const After& after) {
  return issue(scatter_call(in, out, op), after);
}

Handle Communicator::reduce_scatter_async(std::span<const Operands> each, Reduce op, const After& after) {
  std::vector<Call> calls;
  for (const Operands& o : each) calls.push_back(scatter_call(o.in, o.out, op));
  return issue(joined(std::move(calls)), after);
}

Handle Communicator::all_to_all_async(ConstView in, View out, const After& after) {
  check_blocks(*this, Op::all_to_all, in, {in.data, in.count / size(), in.dtype});
  NRL_CHECK(out.count == in.count && out.dtype == in.dtype, "all_to_all on {}: {} {} and {} {}", label(),
            in.count, name_of(in.dtype), out.count, name_of(out.dtype));
  NRL_CHECK(in.count == 0 || in.data != out.data, "all_to_all on {}: not in place", label());
  return issue(make(Op::all_to_all, in.dtype, in.data, out.data, in.count / size()), after);
}

Handle Communicator::all_to_all_v_async(ConstView in, std::span<const int64_t> send_counts, View out,
                                        std::span<const int64_t> recv_counts, const After& after) {
  NRL_CHECK(checked_sum(*this, send_counts, "send") == in.count &&
                checked_sum(*this, recv_counts, "receive") == out.count,
            "all_to_all_v on {}: the counts do not add up to {} sent and {} received", label(), in.count,
            out.count);
  NRL_CHECK(in.dtype == out.dtype, "all_to_all_v on {}: {} and {}", label(), name_of(in.dtype),
            name_of(out.dtype));
  const auto at = static_cast<size_t>(rank_);
  NRL_CHECK(send_counts[at] == recv_counts[at], "all_to_all_v on {}: {} sent to and {} received from oneself",
            label(), send_counts[at], recv_counts[at]);
  Call call = make(Op::all_to_all_v, in.dtype, in.data, out.data, 0);
  call.send_counts.assign(send_counts.begin(), send_counts.end());
  call.recv_counts.assign(recv_counts.begin(), recv_counts.end());
  return issue(std::move(call), after);
}

Handle Communicator::broadcast_async(View data, int root, const After& after) {
  NRL_CHECK(root >= 0 && root < size(), "broadcast on {}: no rank {}", label(), root);
  Call call = make(Op::broadcast, data.dtype, data.data, data.data, data.count);
  call.peer = root;
  return issue(std::move(call), after);
}

Handle Communicator::message(Op op, std::vector<Message> messages, const After& after) {
  check_messages(*this, messages, op == Op::exchange);
  Call call;
  call.op = op;
  if (!messages.empty()) call.dtype = messages.front().data.dtype;
  if (op != Op::exchange) call.peer = messages.front().peer;
  call.messages = std::move(messages);
  return issue(std::move(call), after);
}

Handle Communicator::send_async(ConstView data, int to, int tag, const After& after) {
  return message(Op::send, {Message::send(data, to, tag)}, after);
}
Handle Communicator::recv_async(View data, int from, int tag, const After& after) {
  return message(Op::recv, {Message::recv(data, from, tag)}, after);
}
Handle Communicator::exchange_async(std::vector<Message> messages, const After& after) {
  return message(Op::exchange, std::move(messages), after);
}

Handle Communicator::barrier_async(const After& after) {
  return issue(make(Op::barrier, DType::u8, nullptr, nullptr, 0), after);
}

std::vector<std::string> Communicator::gather_texts(std::string_view text) {
  if (&host() != this) return host().gather_texts(text);
  std::vector<int64_t> lengths(members_.size());
  const std::vector<int64_t> own = {static_cast<int64_t>(text.size())};
  all_gather(own, lengths);
  int64_t longest = 0;
  for (int64_t n : lengths) longest = std::max(longest, n);
  std::vector<uint8_t> padded(text.begin(), text.end());
  padded.resize(static_cast<size_t>(longest));
  std::vector<uint8_t> all(static_cast<size_t>(longest) * members_.size());
  all_gather(padded, all);
  std::vector<std::string> out;
  for (size_t r = 0; r < members_.size(); ++r) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(r * static_cast<size_t>(longest));
    out.emplace_back(begin, begin + lengths[r]);
  }
  return out;
}

std::vector<std::string> Communicator::gather_texts_to(std::string_view text, int root) {
  if (&host() != this) return host().gather_texts_to(text, root);
  NRL_CHECK(root >= 0 && root < size(), "gather on {}: no rank {}", label(), root);
  std::vector<int64_t> lengths(members_.size());
  const std::vector<int64_t> own = {static_cast<int64_t>(text.size())};
  all_gather(own, lengths);
  if (rank() != root) {
    if (!text.empty()) send(ConstView{text.data(), own[0], DType::u8}, root);
    return {};
  }
  std::vector<std::string> out(members_.size());
  for (int r = 0; r < size(); ++r) {
    std::string& of_rank = out[r];
    const int64_t length = lengths[r];
    of_rank.resize(static_cast<size_t>(length));
    if (r == root)
      of_rank = text;
    else if (length > 0)
      recv(View(of_rank.data(), length, DType::u8), r);
  }
  return out;
}

void Communicator::broadcast_text(std::string& text, int root) {
  if (&host() != this) return host().broadcast_text(text, root);
  std::vector<int64_t> length = {static_cast<int64_t>(text.size())};
  broadcast(length, root);
  text.resize(static_cast<size_t>(length[0]));
  broadcast(View(text.data(), length[0], DType::u8), root);
}

}  // namespace nrl::comm
