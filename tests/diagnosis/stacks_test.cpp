#include "apps/diagnosis/stacks.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <string>
#include <thread>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "apps/diagnosis/stacks_text.h"
#include "apps/diagnosis/unwind.h"
#include "core/base/philox.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::diagnosis;
using test::contains;
using test::TemporaryDirectory;

namespace nrl::test {

// Has a name that a stack shows.
[[gnu::noinline]] void waits_for_ever(std::atomic<int>& arrived) {
  volatile uint64_t mark = 0x1234567890abcdef;
  ++arrived;
  while (mark != 0) std::this_thread::sleep_for(std::chrono::seconds(1));
}

}  // namespace nrl::test

namespace {

// A process with a main thread and a second one that wait; a third one saves the stacks and ends it.
int64_t save_of_child(const std::string& path) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::atomic<int> arrived{0};
    std::thread second([&] { test::waits_for_ever(arrived); });
    std::thread helper([&] {
      while (arrived.load() < 2) ::usleep(1000);
      ::usleep(50'000);  // into the sleep
      save_stacks(path, 3, 2, ::getpid());
      ::_exit(7);
    });
    test::waits_for_ever(arrived);
    second.join();
    helper.join();
    ::_exit(1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 7);
  return child;
}

}  // namespace

TEST_CASE("stacks of all threads are copied while they wait, and read back", "[stacks]") {
  const TemporaryDirectory dir;
  const std::string path = dir / stacks_name(3, 2);
  const int64_t pid = save_of_child(path);
  struct stat found {};
  REQUIRE(::stat(path.c_str(), &found) == 0);
  CHECK((found.st_mode & 0777) == 0600);
  const ProcessStacks s = read_stacks(path);
  CHECK(s.rank == 3);
  CHECK(s.attempt == 2);
  CHECK(s.pid == pid);
  REQUIRE(s.threads.size() == 3);
  CHECK(s.threads[0].id == pid);
  CHECK(!executable_mappings(s.maps).empty());
#ifdef __x86_64__
  int copied = 0;
  for (const ThreadStack& t : s.threads) {
    if (!t.copied) continue;
    ++copied;
    CHECK(t.begin == t.registers[stack_pointer]);
    const uint64_t mark = 0x1234567890abcdef;
    CHECK(contains(t.bytes, std::string(reinterpret_cast<const char*>(&mark), sizeof mark)));
    CHECK(!contains(t.bytes, "PATH="));  // no environment
    bool known = false;
    for (const Mapping& m : executable_mappings(s.maps))
      known =
          known || (t.registers[instruction_pointer] >= m.begin && t.registers[instruction_pointer] < m.end);
    CHECK(known);
  }
  CHECK(copied == 2);  // not the one that saves them
  const std::string text = text_of(s);
  CAPTURE(text);
  if (can_unwind())
    CHECK(contains(text, "nrl::test::waits_for_ever"));
  else
    CHECK(contains(text, "addr2line -Cfpe /"));
#endif
  CHECK_THROWS(save_stacks(path, 3, 2, ::getpid() + 100000));  // the first file stays
}

TEST_CASE("a process that is stopped shows its threads without stacks", "[stacks]") {
  const TemporaryDirectory dir;
  const pid_t child = ::fork();
  if (child == 0)
    for (;;) ::pause();
  ::usleep(50'000);
  ::kill(child, SIGSTOP);
  ::waitpid(child, nullptr, WUNTRACED);
  save_stacks(dir / "s", 0, 1, child);
  const ProcessStacks s = read_stacks(dir / "s");
  REQUIRE(s.threads.size() == 1);
  CHECK(s.threads[0].state == 'T');
  CHECK(!s.threads[0].copied);
  CHECK(contains(text_of(s), "(" + std::to_string(child) + ", T"));
  CHECK(contains(describe_live(child), ", T"));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  CHECK(threads_of(child).empty());
  CHECK_THROWS_WITH(describe_live(child), ContainsSubstring("there is no process"));
}

TEST_CASE("files of stacks that are damaged are refused or read, never more", "[stacks]") {
  const TemporaryDirectory dir;
  save_of_child(dir / "good");
  const std::string good = read_file(dir / "good", 8 << 20);
  const auto read = [&](const std::string& text) {
    write_file_atomic(dir / "f", text, Durable::no);
    try {
      const ProcessStacks s = read_stacks(dir / "f");
      CHECK(!text_of(s, std::vector<std::vector<std::string>>(s.threads.size())).empty());
      return true;
    } catch (const Error& e) {
      CHECK(e.code() == Exit::data);
      return false;
    }
  };
  CHECK(read(good));
  CHECK(!read(""));
  CHECK(!read(good.substr(0, good.size() - 1)));
  CHECK(!read(good + "x"));
  PhiloxStream random(11, "damaged stacks");
  for (uint64_t i = 0; i < 300; ++i) {
    std::string text = good;
    for (uint64_t k = 0; k < 4; ++k)
      text[random.bits(8 * i + k) % 3000] = static_cast<char>(random.bits(8 * i + 4 + k));
    if (i % 3 == 0) text.resize(random.bits(1'000'000 + i) % text.size());
    read(text);
  }
}
