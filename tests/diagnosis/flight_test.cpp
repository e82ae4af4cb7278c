#include "parallel/comm/flight.h"

#include <csignal>
#include <cstring>
#include <fstream>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/process.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::comm;
using test::contains;
using test::error_of;
using test::TemporaryDirectory;

namespace {

FlightIdentity identity(int rank) {
  FlightIdentity id = this_process();
  id.run_id = "abc12345";
  id.attempt = 2;
  id.rank = rank;
  id.ranks = 4;
  id.node = 1;
  return id;
}

// Operations of two groups: one that has ended, one that runs, and one that waits.
void work(CollectiveLog& log) {
  const uint32_t dp = log.add_group("dp", "dp[0,2]", 2, {0, 2}),
                 pp = log.add_group("pp", "pp[2,3]", 2, {2, 3});
  LogTicket ended = log.enqueue(dp, 0, Op::all_reduce, DType::f32, 4096, -1);
  log.start(ended);
  log.finish(ended, false);
  LogTicket runs = log.enqueue(pp, 0, Op::send, DType::bf16, 512, 1, "", {.lane = 3, .message = 7});
  log.start(runs);
  const LogTicket waits = log.enqueue(dp, 1, Op::all_gather, DType::bf16, 8192, -1);
  status::Page& page = status::page();
  page.step = 12;
  page.completed = 11;
  page.microbatch = 1;
  page.layer = 5;
  page.wait_id = waits.id;
  page.wait_since = now_ns();
  status::enter(status::Phase::checkpoint);
}

void check_work(const Flight& flight) {
  CHECK(flight.identity.run_id == "abc12345");
  CHECK(flight.identity.attempt == 2);
  CHECK(flight.identity.rank == 2);
  CHECK(flight.identity.ranks == 4);
  CHECK(flight.identity.node == 1);
  CHECK(flight.identity.host == host_name());
  CHECK(flight.identity.boot_id == boot_id());
  CHECK(flight.phase == status::Phase::checkpoint);
  CHECK(flight.step == 12);
  CHECK(flight.completed == 11);
  CHECK(flight.microbatch == 1);
  CHECK(flight.layer == 5);
  REQUIRE(flight.groups.size() == 2);
  CHECK(flight.groups[0].members == std::vector<int>{0, 2});
  CHECK(flight.groups[1].label == "pp[2,3]");
  REQUIRE(flight.entries.size() == 3);
  CHECK(flight.entries[0].progress == Progress::done);
  CHECK(flight.entries[1].progress == Progress::running);
  CHECK(flight.entries[1].lane == 3);
  CHECK(flight.entries[1].message == 7);
  CHECK(flight.entries[2].op == Op::all_gather);
  CHECK(flight.entries[2].bytes == 8192);
  CHECK(flight.wait_id == flight.entries[2].id);
}

std::string bytes_of(const std::string& path) {
  return read_file(path, most_flight_bytes);
}

}  // namespace

TEST_CASE("a flight file is read back while its process works, and after it was killed", "[flight]") {
  const TemporaryDirectory dir;
  const std::string path = dir / "rank-2.flight";
  int ready[2];
  REQUIRE(::pipe(ready) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    CollectiveLog log;
    const FlightFile file(path, identity(2), log);
    work(log);
    [[maybe_unused]] const ssize_t sent = ::write(ready[1], "x", 1);
    for (;;) ::pause();
  }
  char byte;
  REQUIRE(::read(ready[0], &byte, 1) == 1);
  check_work(read_flight(path));
  CHECK(read_flight(path).identity.pid == child);
  CHECK(start_ticks_of(child) == read_flight(path).identity.start_ticks);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  check_work(read_flight(path));
  CHECK(start_ticks_of(child) == 0);
  struct stat found {};
  REQUIRE(::stat(path.c_str(), &found) == 0);
  CHECK((found.st_mode & 0777) == 0600);
}

TEST_CASE("page and log go on in the memory of the process when the file is closed", "[flight]") {
  const TemporaryDirectory dir;
  CollectiveLog log;
  const uint32_t group = log.add_group("dp", "dp[0]", 1, {0});
  log.enqueue(group, 0, Op::barrier, DType::u8, 0, -1);
  {
    FlightFile file(dir / "f", identity(0), log);
    status::page().step = 40;
    log.enqueue(group, 1, Op::all_reduce, DType::f32, 4, -1);
    CHECK(read_flight(file.path()).entries.size() == 2);  // also the one from before
    file.remove();
    CHECK(!path_exists(dir / "f"));
  }
  CHECK(status::page().step == 40);
  log.enqueue(group, 2, Op::all_reduce, DType::f32, 4, -1);
  CHECK(log.latest().size() == 3);
}

TEST_CASE("a thread that counts while the flight file is closed goes on", "[flight]") {
  const TemporaryDirectory dir;
  CollectiveLog log;
  const uint64_t before = status::page().progress;
  status::Page* seen = nullptr;  // as a thread has it between reading the address and counting
  {
    const FlightFile file(dir / "f", identity(0), log);
    seen = &status::page();
  }
  CHECK(seen != &status::page());
  seen->progress.fetch_add(1);
  CHECK(read_flight(dir / "f").progress <= before + 1);
}

TEST_CASE("of more operations than a flight file has space for, the latest are kept", "[flight]") {
  const TemporaryDirectory dir;
  CollectiveLog log;
  const uint32_t group = log.add_group("dp", "dp[0]", 1, {0});
  const FlightFile file(dir / "f", identity(0), log);
  for (uint64_t i = 0; i < CollectiveLog::capacity + 100; ++i)
    log.enqueue(group, i, Op::all_reduce, DType::f32, 4, -1);
  const Flight flight = read_flight(file.path());
  REQUIRE(flight.entries.size() == CollectiveLog::capacity);
  CHECK(flight.entries.front().seq == 100);
  CHECK(flight.entries.back().seq == CollectiveLog::capacity + 99);
}

TEST_CASE("a group is a line", "[flight]") {
  for (const std::vector<int>& members :
       {std::vector<int>{0}, {0, 1, 2}, {3, 7, 11}, {0, 1, 5}, std::vector<int>{}, {5, 3}}) {
    LogGroup read;
    REQUIRE(from_line(to_line({.name = "tp", .label = "tp[a label]", .ranks = 9, .members = members}), read));
    CHECK(read.name == "tp");
    CHECK(read.label == "tp[a label]");
    CHECK(read.ranks == 9);
    CHECK(read.members == members);
  }
  LogGroup read;
  for (const char* bad : {"", "tp", "tp x 0:1:2 l", "tp 2 0:1:2000000 l", "tp 2 0:1: l", "tp 2 -1:1:2 l",
                          "tp 2 1,x, l", "tp 2 2147483647:2147483647:1000000 l"})
    CHECK(!from_line(bad, read));
}

TEST_CASE("a file that is no flight file of this version is refused", "[flight]") {
  const TemporaryDirectory dir;
  CollectiveLog log;
  FlightFile file(dir / "whole", identity(1), log);
  work(log);
  const std::string whole = bytes_of(file.path());
  const auto refused = [&](const std::string& text) {
    std::ofstream(dir / "f", std::ios::binary) << text;
    return error_of([&] { read_flight(dir / "f"); });
  };
  CHECK(refused("").code == 65);
  CHECK(refused("NRLFLT0").code == 65);
  CHECK(contains(refused(whole.substr(0, whole.size() - 1)).text, "another size"));
  std::string other = whole;
  other[8] ^= 1;  // its size
  CHECK(contains(refused(other).text, "another version"));
  CHECK(error_of([&] { read_flight(dir / "absent"); }).code == 66);
  REQUIRE(::symlink((dir / "whole").c_str(), (dir / "link").c_str()) == 0);
  CHECK(error_of([&] { read_flight(dir / "link"); }).code == 66);
}

// A damaged file gives an error of its data, or a flight that names only what exists.
TEST_CASE("damaged flight files are read without harm", "[flight]") {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  CollectiveLog log;
  FlightFile file(dir / "whole", identity(1), log);
  work(log);
  const std::string whole = bytes_of(file.path());
  const int iterations = test::fuzz_iterations() / 40;
  for (int i = 0; i < iterations; ++i) {
    // Most of the file is free space: the bytes in use.
    const size_t used = 4096,
                 begin = i % 2 == 0 ? 0 : whole.size() - sizeof(LogEntry) * CollectiveLog::capacity;
    std::string text = whole;
    std::string part = test::mutated(text.substr(begin, used), static_cast<uint64_t>(i));
    part.resize(used);
    text.replace(begin, used, part);
    std::ofstream(dir / "f", std::ios::binary | std::ios::trunc) << text;
    const auto caught = error_of([&] {
      const Flight flight = read_flight(dir / "f");
      for (const LogEntry& e : flight.entries) {
        REQUIRE(e.group < flight.groups.size());
        REQUIRE(!name_of(e.op).empty());
        REQUIRE(!nrl::name_of(e.dtype).empty());
      }
    });
    REQUIRE((caught.code == 0 || caught.code == 65));
  }
}
