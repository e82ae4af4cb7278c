#include "apps/launch/launcher.h"

#include <chrono>
#include <csignal>
#include <fstream>
#include <thread>

#include <unistd.h>

#include "apps/launch/health.h"
#include "apps/launch/process.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::launch;
using test::error_of;
using test::TemporaryDirectory;
using Words = std::vector<std::string>;

TEST_CASE("a launcher is a list of words", "[launch]") {
  const auto words = [](const char* text, int ranks, const Words& hosts) {
    const Launcher launcher{.text = text, .ranks_per_node = 2, .program = {}};
    launcher.check();
    return launcher.words(ranks, hosts, "/logs/launch.hosts");
  };
  CHECK(words("", 1, {}).empty());
  CHECK(words("mpirun", 4, {}) == Words{"mpirun", "--oversubscribe", "-n", "4"});
  CHECK(words("mpirun", 4, {"a", "b"}) == Words{"mpirun", "-n", "4", "--host", "a:2,b:2"});
  CHECK(words("srun", 0, {}) ==
        Words{"srun", "--mpi=pmix", "--kill-on-bad-exit=0", "--wait=60", "--overlap"});
  CHECK(words("srun", 4, {"a", "b"}) == Words{"srun", "--mpi=pmix", "--kill-on-bad-exit=0", "--wait=60",
                                              "--overlap", "--ntasks=4", "--nodes=2", "--ntasks-per-node=2",
                                              "--nodelist=a,b"});
  CHECK(words("  my run -n{ranks}/{ranks}\t-H {hosts} -f {hostfile} ; $(x)", 4, {"a", "b"}) ==
        Words{"my", "run", "-n4/4", "-H", "a,b", "-f", "/logs/launch.hosts", ";", "$(x)"});
  for (const char* bad : {" ", "run {rank}", "run {", "run {}"})
    CHECK(error_of([&] { words(bad, 1, {}); }).code == 64);
}

TEST_CASE("files of hosts", "[launch]") {
  int slots = 0;
  CHECK(hosts_from("node0 slots=4\n# none\n\n  node1.x slots=4 # last\n", "f", &slots) ==
        Words{"node0", "node1.x"});
  CHECK(slots == 4);
  CHECK(hosts_from(host_file_text({"a", "b"}, 3), "f", &slots) == Words{"a", "b"});
  CHECK(slots == 3);
  CHECK(hosts_from("a\nb", "f", &slots) == Words{"a", "b"});
  CHECK(slots == 0);
  for (const char* bad : {"", "# none\n", "a b", "a slots=0", "a slots=x", "a slots=2 x=1\nb c d", "-x",
                          "a,b", "a\na", "a slots=1\nb slots=2", "a slots=2\nb", "a;b", "a:2"}) {
    INFO(bad);
    CHECK(error_of([&] { hosts_from(bad, "hosts.txt", &slots); }).code == 64);
  }
  CHECK(
      test::contains(error_of([&] { hosts_from("a\n-b", "hosts.txt", &slots); }).text, "hosts.txt:2: '-b'"));
  for (int i = 0; i < test::fuzz_iterations() / 20; ++i) {
    const int code =
        error_of([&] {
          hosts_from(test::mutated("node0 slots=4\nnode1 slots=4\n", static_cast<uint64_t>(i)), "f", &slots);
        }).code;
    REQUIRE((code == 0 || code == 64));
  }
}

namespace {

int end_of(Process& process) {
  for (int i = 0; i < 6000; ++i) {
    if (const auto code = process.ended()) return *code;
    ::usleep(10'000);
  }
  return -1;
}

}  // namespace

TEST_CASE("processes end with a code, and with their group", "[launch]") {
  const TemporaryDirectory dir;
  Process seven({"sh", "-c", "exit 7"});
  CHECK(end_of(seven) == 7);
  // Words are no shell's text.
  Process literal({"test", "$HOME;", "=", "$HOME;"});
  CHECK(end_of(literal) == 0);
  const std::string pid_file = dir / "pid";
  Process group({"sh", "-c", "sleep 1000 & echo $! >\"$0\"; kill -TERM $$", pid_file});
  CHECK(end_of(group) == 128 + SIGTERM);
  int child = 0;
  std::ifstream(pid_file) >> child;
  REQUIRE(child > 0);
  bool gone = false;
  for (int i = 0; i < 500 && !gone; ++i) {
    std::ifstream stat("/proc/" + std::to_string(child) + "/stat");
    std::string number, name, state;
    gone = !(stat >> number >> name >> state) || state == "Z";
    ::usleep(10'000);
  }
  CHECK(gone);
  const test::Caught caught = error_of([] { Process none({"nrl-no-such-launcher"}); });
  CHECK(caught.code == 69);
  CHECK(test::contains(caught.text, "cannot start 'nrl-no-such-launcher': No such file"));
}

TEST_CASE("the health of a host", "[launch]") {
  const Health health = examine(0.01);
  CHECK(health.products > 0);
  CHECK(problem_in("a line of a launcher\n" + to_json(health).dump() + "\nanother") ==
        (health.problems.empty() ? "" : health.problems.front()));
  Health bad = health;
  bad.problems = {"/dev/shm has room for 1 B only", "x"};
  const std::string text = to_json(bad).dump();
  CHECK(problem_in(text) == "/dev/shm has room for 1 B only");
  for (const std::string& none : {std::string(), std::string("{\"host\""), std::string("{\"host\": 3}"),
                                  text.substr(0, text.size() / 2), std::string("no json")})
    CHECK(problem_in(none) == "the health check does not answer");
  for (int i = 0; i < test::fuzz_iterations() / 20; ++i)
    problem_in(test::mutated(text, static_cast<uint64_t>(i)));
}

TEST_CASE("processes are found by words of their command lines", "[launch]") {
  const Words words{"NRL_RUN_ID=words-of-this-test", "NRL_ATTEMPT=3"};
  CHECK(processes_with(words).empty());
  Words command{"sh", "-c", "sleep 60; :", "sh"};
  command.insert(command.end(), words.begin(), words.end());
  const Process process(command);
  const Words other{words[0], "NRL_ATTEMPT=4"}, part{"NRL_RUN_ID=words-of-this"};
  // The shell's child has its command line until it is sleep.
  for (int i = 0; i < 500 && processes_with(words).size() != 1; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(processes_with(words).size() == 1);
  CHECK(processes_with(other).empty());
  CHECK(processes_with(part).empty());
}
