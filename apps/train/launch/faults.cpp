#include "apps/train/launch/faults.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <iterator>
#include <span>
#include <thread>
#include <utility>

#include <unistd.h>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/text.h"

namespace nrl::train::fault {
namespace {

template <class T>
struct Named {
  std::string_view name;
  T value;
};

constexpr Named<Kind> kinds[] = {{"kill", Kind::kill},   {"segv", Kind::segv}, {"abort", Kind::abort},
                                 {"stop", Kind::stop},   {"hang", Kind::hang}, {"slow", Kind::slow},
                                 {"error", Kind::error}, {"io", Kind::io},     {"flip", Kind::flip},
                                 {"nan", Kind::nan},     {"gpu", Kind::gpu}};
constexpr Named<Site> sites[] = {
    {"weight", Site::weight}, {"gradient", Site::gradient}, {"repeat", Site::repeat}};
constexpr Named<FileOp> operations[] = {
    {"create", FileOp::create},     {"make_directory", FileOp::make_directory},
    {"allocate", FileOp::allocate}, {"truncate", FileOp::truncate},
    {"write", FileOp::write},       {"fsync", FileOp::fsync},
    {"rename", FileOp::rename},     {"remove", FileOp::remove},
    {"touch", FileOp::touch}};
constexpr Named<status::Phase> phases[] = {{"data", status::Phase::data},
                                           {"computing", status::Phase::computing},
                                           {"evaluation", status::Phase::evaluation},
                                           {"checkpoint", status::Phase::checkpoint}};
constexpr Named<int> errors[] = {{"EIO", EIO},       {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT}, {"EROFS", EROFS},
                                 {"EACCES", EACCES}, {"ESTALE", ESTALE}, {"ENOENT", ENOENT}};

template <class Range>
std::string_view name_in(const Range& range, const auto& value) {
  const auto found =
      std::find_if(std::begin(range), std::end(range), [&](const auto& n) { return n.value == value; });
  return found == std::end(range) ? "?" : found->name;
}

bool is_memory(Kind kind) {
  return kind == Kind::flip || kind == Kind::nan;
}

// Reads the text from left to right.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  std::vector<Fault> all() {
    std::vector<Fault> faults;
    do {
      skip_spaces();
      if (at_ == text_.size() && !faults.empty()) break;
      faults.push_back(one());
      skip_spaces();
    } while (accept(';'));
    if (at_ < text_.size()) wrong(at_, "expected ';' or the end");
    return faults;
  }

 private:
  Fault one() {
    Fault f;
    f.kind = choose(kinds, "a kind of fault");
    require(':');
    const size_t target = at_;
    if (const std::string_view word = take(":@=;,#"); word == "rank") {
      require('=');
      f.rank = static_cast<int>(whole(0, 1'000'000));
    } else if (word == "node") {
      require('=');
      f.node = static_cast<int>(whole(0, 1'000'000));
    } else if (word != "all") {
      wrong(target, "expected rank=N, node=N or all");
    }
    require('@');
    const size_t when = at_;
    const std::string_view word = take(":@=;,#");
    if (word == "step" && f.kind != Kind::io) {
      require('=');
      f.step = whole(1, INT64_MAX);
    } else if (word == "op" && f.kind == Kind::io) {
      require('=');
      f.op = choose(operations, "an operation");
      require('#');
      f.count = whole(1, INT64_MAX);
    } else {
      wrong(when, f.kind == Kind::io ? "expected op=NAME#COUNT" : "expected step=N");
    }
    if (accept(':')) {
      do argument(f);
      while (accept(','));
    }
    if (f.kind == Kind::io && f.error == 0 && f.seconds == 0)
      wrong(when, "io needs errno=NAME or delay=SECONDS");
    if (f.kind == Kind::gpu && f.xid == 0) wrong(when, "gpu needs xid=NUMBER");
    if (f.kind == Kind::slow && f.seconds == 0) wrong(when, "slow needs seconds=SECONDS");
    return f;
  }

  void argument(Fault& f) {
    skip_spaces();
    const size_t begin = at_;
    const std::string_view name = take(":@=;,#");
    const bool file = f.kind == Kind::io;
    if (name == "attempt") {
      require('=');
      if (text_.substr(at_).starts_with("any")) {
        at_ += 3;
        f.attempt = 0;
      } else {
        f.attempt = static_cast<int>(whole(1, 1'000'000));
      }
    } else if (is_memory(f.kind) && name == "site") {
      require('=');
      f.site = choose(sites, "a site");
    } else if (is_memory(f.kind) && name == "tensor") {
      require('=');
      f.tensor = take(",:;@=# ");
      if (f.tensor.empty()) wrong(at_, "expected the name of a tensor");
    } else if (is_memory(f.kind) && name == "element") {
      require('=');
      f.element = whole(0, INT64_MAX);
    } else if (f.kind == Kind::flip && name == "bit") {
      require('=');
      f.bit = static_cast<int>(whole(0, 31));
    } else if (name == "phase" && !file && !is_memory(f.kind)) {
      require('=');
      f.phase = choose(phases, "a phase");
    } else if ((name == "for" && f.kind == Kind::hang) || (name == "seconds" && f.kind == Kind::slow) ||
               (name == "delay" && file)) {
      require('=');
      f.seconds = seconds();
    } else if ((name == "steps" && f.kind == Kind::slow) || (name == "times" && file)) {
      require('=');
      f.times = whole(1, INT64_MAX);
    } else if (name == "xid" && f.kind == Kind::gpu) {
      require('=');
      f.xid = static_cast<int>(whole(1, 999));
    } else if (name == "errno" && file) {
      require('=');
      f.error = choose(errors, "an error");
    } else {
      wrong(begin, fmt::format("'{}' is no argument of {}", name, name_in(kinds, f.kind)));
    }
  }

  template <class T, size_t n>
  T choose(const Named<T> (&from)[n], std::string_view what) {
    const size_t begin = at_;
    const std::string_view word = take(":@=;,# ");
    std::string names;
    std::vector<std::string_view> list;
    for (const Named<T>& one : from) {
      if (one.name == word) return one.value;
      names += (names.empty() ? "" : ", ") + std::string(one.name);
      list.push_back(one.name);
    }
    wrong(begin,
          fmt::format("'{}' is not {} ({}){}", word, what, names, did_you_mean(nearest(word, list), "; ")));
  }

  int64_t whole(int64_t least, int64_t most) {
    int64_t value = 0;
    number(value);
    if (value < least || value > most)
      wrong(at_, fmt::format("expected a whole number from {}{}", least,
                             most < 1000 ? fmt::format(" to {}", most) : ""));
    return value;
  }
  double seconds() {
    double value = 0;
    number(value);
    if (!(value > 0 && value <= 1e6)) wrong(at_, "expected seconds above 0, at most 1,000,000");
    return value;
  }
  template <class T>
  void number(T& value) {
    const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
    if (error != std::errc()) wrong(at_, "expected a number");
    at_ = static_cast<size_t>(end - text_.data());
  }

  std::string_view take(std::string_view ends) {
    const size_t end = std::min(text_.find_first_of(ends, at_), text_.size());
    const std::string_view word = text_.substr(at_, end - at_);
    at_ = end;
    return word;
  }
  bool accept(char c) {
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void require(char c) {
    if (!accept(c)) wrong(at_, fmt::format("expected '{}'", c));
  }
  void skip_spaces() {
    while (accept(' ')) continue;
  }
  [[noreturn]] void wrong(size_t at, std::string_view what) const {
    fail(Exit::usage, "NRL_FAULTS:{}: {}. Fix: KIND:TARGET@WHEN[:KEY=VALUE,...], such as kill:rank=3@step=5",
         at + 1, what);
  }

  std::string_view text_;
  size_t at_ = 0;
};

// This rank has these. File operations of all threads are counted together.
std::vector<Fault> own;
std::array<std::atomic<int64_t>, std::size(operations)> operations_seen;
bool hooked = false;
std::function<void(int xid)> gpu_hook;

void sleep(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

void act(const Fault& f, int64_t step) {
  switch (f.kind) {
    case Kind::kill:
      ::raise(SIGKILL);
      break;
    case Kind::segv:
      ::raise(SIGSEGV);
      break;
    case Kind::abort:
      ::raise(SIGABRT);
      break;
    case Kind::stop:
      ::kill(::getpid(), SIGSTOP);  // all threads
      break;
    case Kind::hang:
      do sleep(f.seconds > 0 ? f.seconds : 3600);
      while (f.seconds == 0);
      break;
    case Kind::slow:
      sleep(f.seconds);
      break;
    case Kind::error:
      fail(Exit::internal, "step {}: an error that NRL_FAULTS asked for", step);
    case Kind::gpu:
      if (!gpu_hook)
        fail(Exit::usage, "NRL_FAULTS: a fault of kind gpu, but this rank has no GPU. Fix: set device: cuda");
      gpu_hook(f.xid);
      break;
    case Kind::io:
    case Kind::flip:
    case Kind::nan:
      break;
  }
}

int at_file(FileOp op, const std::string&) {
  const int64_t seen = ++operations_seen[static_cast<size_t>(op)];
  for (const Fault& f : own) {
    if (f.kind != Kind::io || f.op != op || seen < f.count || seen >= f.count + f.times) continue;
    if (f.seconds > 0) sleep(f.seconds);
    if (f.error != 0) return f.error;
  }
  return 0;
}

}  // namespace

void set_gpu_hook(std::function<void(int xid)> hook) {
  gpu_hook = std::move(hook);
}

std::vector<Fault> requested() {
  const char* text = std::getenv("NRL_FAULTS");
  return text && *text ? parse(text) : std::vector<Fault>();
}

std::vector<Fault> parse(std::string_view text) {
  return Parser(text).all();
}

std::string describe(const Fault& f) {
  std::string text(name_in(kinds, f.kind));
  text += f.rank >= 0   ? fmt::format(" of rank {}", f.rank)
          : f.node >= 0 ? fmt::format(" of node {}", f.node)
                        : " of every rank";
  if (f.kind == Kind::io)
    text += fmt::format(" at {} {}", name_in(operations, f.op), f.count);
  else if (is_memory(f.kind))
    text += fmt::format(" in step {} ({}{}{}, element {}{})", f.step, name_in(sites, f.site),
                        f.tensor.empty() ? "" : " ", f.tensor, f.element,
                        f.kind == Kind::flip ? fmt::format(", bit {}", f.bit) : "");
  else
    text += fmt::format(" in step {} ({})", f.step, status::name_of(f.phase));
  return text + (f.attempt > 0 ? fmt::format(", attempt {}", f.attempt) : ", every attempt");
}

namespace detail {

bool armed = false;

void reach(status::Phase phase, int64_t step) {
  for (const Fault& f : own) {
    const int64_t steps = f.kind == Kind::slow ? f.times : 1;
    if (f.kind != Kind::io && !is_memory(f.kind) && f.phase == phase && step >= f.step &&
        step < f.step + steps)
      act(f, step);
  }
}

std::vector<Fault> planted(Site site, int64_t step) {
  std::vector<Fault> faults;
  std::copy_if(own.begin(), own.end(), std::back_inserter(faults),
               [&](const Fault& f) { return is_memory(f.kind) && f.site == site && f.step == step; });
  return faults;
}

}  // namespace detail

void arm(const std::vector<Fault>& faults, int rank, int node, int attempt) {
  own.clear();
  for (auto& seen : operations_seen) seen = 0;
  for (const Fault& f : faults) {
    const bool here = f.rank >= 0 ? f.rank == rank : f.node < 0 || f.node == node;
    if (here && (f.attempt == 0 || f.attempt == attempt)) own.push_back(f);
  }
  detail::armed = !own.empty();
  const bool files = std::any_of(own.begin(), own.end(), [](const Fault& f) { return f.kind == Kind::io; });
  if (std::exchange(hooked, files) || files) set_file_op_hook(files ? at_file : nullptr);
}

}  // namespace nrl::train::fault
