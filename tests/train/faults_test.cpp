#include "apps/train/launch/faults.h"

#include <cerrno>
#include <csignal>

#include <sys/wait.h>
#include <unistd.h>

#include "core/base/clock.h"
#include "core/base/philox.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::train;
using test::contains;
using test::error_of;
using test::TemporaryDirectory;

TEST_CASE("faults are read", "[faults]") {
  const auto list = fault::parse(
      "kill:rank=3@step=5; hang:node=1@step=7:for=2.5,phase=checkpoint,attempt=any;"
      "io:rank=0@op=fsync#2:errno=ENOSPC,times=3;slow:all@step=1:seconds=0.5,steps=10,attempt=2;");
  REQUIRE(list.size() == 4);
  CHECK(list[0].kind == fault::Kind::kill);
  CHECK(list[0].rank == 3);
  CHECK(list[0].step == 5);
  CHECK(list[0].attempt == 1);
  CHECK(list[1].node == 1);
  CHECK(list[1].rank == -1);
  CHECK(list[1].seconds == 2.5);
  CHECK(list[1].phase == status::Phase::checkpoint);
  CHECK(list[1].attempt == 0);
  CHECK(list[2].op == FileOp::fsync);
  CHECK(list[2].count == 2);
  CHECK(list[2].times == 3);
  CHECK(list[2].error == ENOSPC);
  CHECK(list[3].times == 10);
  CHECK(fault::describe(list[0]) == "kill of rank 3 in step 5 (computing), attempt 1");
  CHECK(fault::describe(list[2]) == "io of rank 0 at fsync 2, attempt 1");
}

TEST_CASE("a mistake in NRL_FAULTS is named with its place", "[faults]") {
  const auto message = [](const char* text) {
    const auto caught = error_of([&] { fault::parse(text); });
    CHECK(caught.code == 64);
    return caught.text;
  };
  CHECK(contains(message("kil:rank=1@step=1"), "NRL_FAULTS:1: 'kil' is not a kind of fault"));
  CHECK(contains(message("kil:rank=1@step=1"), "did you mean 'kill'"));
  CHECK(contains(message("kill:rank=1@step=1; stop:rnak=1@step=1"), "NRL_FAULTS:26: expected rank=N"));
  CHECK(contains(message("kill:rank=1@step=0"), "whole number from 1"));
  CHECK(contains(message("kill:rank=1@op=write#1"), "expected step=N"));
  CHECK(contains(message("io:rank=1@step=1"), "expected op=NAME#COUNT"));
  CHECK(contains(message("io:rank=1@op=write#1"), "io needs errno=NAME"));
  CHECK(contains(message("slow:rank=1@step=1"), "slow needs seconds"));
  CHECK(contains(message("kill:rank=1@step=1:for=2"), "'for' is no argument of kill"));
  CHECK(contains(message("hang:rank=1@step=1:for=-2"), "seconds above 0"));
  CHECK(contains(message("kill:rank=1@step=1 x"), "expected ';'"));
  message("");
  message("kill");
  message("kill:rank=99999999999999999999@step=1");
}

TEST_CASE("random texts are read or refused", "[faults]") {
  const std::string good =
      "hang:node=1@step=7:for=2.5,phase=checkpoint;io:rank=0@op=fsync#2:errno=EIO,times=3";
  for (int i = 0; i < test::fuzz_iterations(); ++i) {
    const std::string text = test::mutated(good, static_cast<uint64_t>(i));
    const int code = error_of([&] { fault::parse(text); }).code;
    REQUIRE((code == 0 || code == 64));
  }
}

TEST_CASE("faults happen to their rank, step, phase and attempt only", "[faults]") {
  const auto happens = [](const char* text, int rank, int node, int attempt, status::Phase phase,
                          int64_t step) {
    fault::arm(fault::parse(text), rank, node, attempt);
    const int code = error_of([&] { fault::reach(phase, step); }).code;
    fault::arm({}, 0, 0, 1);
    return code == 70;
  };
  using status::Phase;
  CHECK(happens("error:rank=1@step=3", 1, 0, 1, Phase::computing, 3));
  CHECK(!happens("error:rank=1@step=3", 0, 0, 1, Phase::computing, 3));
  CHECK(!happens("error:rank=1@step=3", 1, 0, 1, Phase::computing, 4));
  CHECK(!happens("error:rank=1@step=3", 1, 0, 1, Phase::data, 3));
  CHECK(!happens("error:rank=1@step=3", 1, 0, 2, Phase::computing, 3));
  CHECK(happens("error:rank=1@step=3:attempt=any", 1, 0, 2, Phase::computing, 3));
  CHECK(happens("error:node=2@step=3:phase=evaluation", 7, 2, 1, Phase::evaluation, 3));
  CHECK(!happens("error:node=2@step=3", 7, 1, 1, Phase::computing, 3));
  CHECK(happens("error:all@step=3", 7, 1, 1, Phase::computing, 3));
}

TEST_CASE("file operations fail from the counted one on", "[faults]") {
  const TemporaryDirectory dir;
  fault::arm(fault::parse("io:all@op=create#2:errno=ENOSPC,times=1"), 0, 0, 1);
  CHECK(error_of([&] { File::create(dir / "a"); }).code == 0);
  const auto caught = error_of([&] { File::create(dir / "b"); });
  CHECK(caught.code != 0);
  CHECK(contains(caught.text, "No space left"));
  CHECK(error_of([&] { File::create(dir / "c"); }).code == 0);
  fault::arm({}, 0, 0, 1);
}

TEST_CASE("a slow step sleeps, a killed process dies by the signal", "[faults]") {
  fault::arm(fault::parse("slow:all@step=2:seconds=0.05,steps=2"), 0, 0, 1);
  const auto seconds = [](int64_t step) {
    const double begin = steady_seconds();
    fault::reach(status::Phase::computing, step);
    return steady_seconds() - begin;
  };
  CHECK(seconds(1) < 0.05);
  CHECK(seconds(2) >= 0.05);
  CHECK(seconds(3) >= 0.05);
  CHECK(seconds(4) < 0.05);
  for (const auto& [text, signal] :
       {std::pair("kill:all@step=1", SIGKILL), {"segv:all@step=1", SIGSEGV}, {"abort:all@step=1", SIGABRT}}) {
    const pid_t child = ::fork();
    if (child == 0) {
      fault::arm(fault::parse(text), 0, 0, 1);
      fault::reach(status::Phase::computing, 1);
      ::_exit(0);
    }
    int how = 0;
    ::waitpid(child, &how, 0);
    CHECK(WIFSIGNALED(how));
    CHECK(WTERMSIG(how) == signal);
  }
  fault::arm({}, 0, 0, 1);
}
