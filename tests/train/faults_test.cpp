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
  const auto memory = fault::parse(
      "flip:rank=2@step=4:tensor=exp_avg/"
      "model.norm.weight,bit=31,element=7;nan:all@step=1:site=gradient,attempt=any");
  REQUIRE(memory.size() == 2);
  CHECK(memory[0].kind == fault::Kind::flip);
  CHECK(memory[0].tensor == "exp_avg/model.norm.weight");
  CHECK(memory[0].bit == 31);
  CHECK(memory[0].element == 7);
  CHECK(memory[0].site == fault::Site::weight);
  CHECK(memory[1].kind == fault::Kind::nan);
  CHECK(memory[1].site == fault::Site::gradient);
  CHECK(memory[1].tensor.empty());
  CHECK(fault::describe(memory[0]) ==
        "flip of rank 2 in step 4 (weight exp_avg/model.norm.weight, element 7, bit 31), attempt 1");
  CHECK(fault::describe(memory[1]) == "nan of every rank in step 1 (gradient, element 0), every attempt");
  const auto gpu = fault::parse("gpu:rank=1@step=3:xid=79");
  CHECK(gpu.at(0).xid == 79);
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
  CHECK(contains(message("gpu:rank=1@step=1"), "gpu needs xid=NUMBER"));
  CHECK(contains(message("kill:rank=1@step=1:for=2"), "'for' is no argument of kill"));
  CHECK(contains(message("hang:rank=1@step=1:for=-2"), "seconds above 0"));
  CHECK(contains(message("kill:rank=1@step=1 x"), "expected ';'"));
  CHECK(contains(message("flip:rank=1@step=1:bit=32"), "expected a whole number from 0 to 31"));
  CHECK(contains(message("nan:rank=1@step=1:bit=3"), "'bit' is no argument of nan"));
  CHECK(contains(message("flip:rank=1@step=1:phase=data"), "'phase' is no argument of flip"));
  CHECK(contains(message("kill:rank=1@step=1:tensor=x"), "'tensor' is no argument of kill"));
  CHECK(contains(message("flip:rank=1@step=1:site=wieght"), "did you mean 'weight'"));
  CHECK(contains(message("flip:rank=1@step=1:tensor=,bit=3"), "expected the name of a tensor"));
  message("");
  message("kill");
  message("kill:rank=99999999999999999999@step=1");
}

TEST_CASE("random texts are read or refused", "[faults]") {
  const std::string good =
      "hang:node=1@step=7:for=2.5,phase=checkpoint;io:rank=0@op=fsync#2:errno=EIO,times=3;"
      "flip:rank=2@step=4:tensor=exp_avg/model.norm.weight,bit=31,element=7,site=repeat";
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
      std::signal(signal, SIG_DFL);  // Catch has a handler
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

TEST_CASE("faults of memory are planted at their site and step", "[faults]") {
  fault::arm(fault::parse("flip:rank=1@step=3:bit=5;nan:all@step=3:site=gradient"), 1, 0, 1);
  const auto weights = fault::planted(fault::Site::weight, 3);
  REQUIRE(weights.size() == 1);
  CHECK(weights[0].bit == 5);
  CHECK(fault::planted(fault::Site::gradient, 3).size() == 1);
  CHECK(fault::planted(fault::Site::repeat, 3).empty());
  CHECK(fault::planted(fault::Site::weight, 2).empty());
  fault::reach(status::Phase::computing, 3);  // they are no events of a phase
  fault::arm(fault::parse("flip:rank=1@step=3:bit=5"), 0, 0, 1);
  CHECK(fault::planted(fault::Site::weight, 3).empty());
  fault::arm({}, 0, 0, 1);
}
