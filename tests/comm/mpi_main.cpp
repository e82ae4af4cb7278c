// Runs the cases on every rank; the exit code is the worst of all ranks, 77 where there is nothing to run on.
// The first failed assertion of a rank aborts all ranks: its peers may wait for it in a collective.
#define CATCH_CONFIG_RUNNER
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>

#include "parallel/comm/agreement.h"
#include "tests/catch.h"
#include "tests/comm/backends.h"
#include "tests/comm/world_fixture.h"

namespace {

nrl::comm::World* g_world = nullptr;
int64_t g_slot_bytes = 0;

#if defined(CATCH_VERSION_MAJOR) && CATCH_VERSION_MAJOR >= 3
using ListenerBase = Catch::EventListenerBase;
using AssertionEnded = void;
#else
using ListenerBase = Catch::TestEventListenerBase;
using AssertionEnded = bool;
#endif

class AbortOnFailure : public ListenerBase {
 public:
  using ListenerBase::ListenerBase;

  void testCaseStarting(const Catch::TestCaseInfo& info) override { test_case_ = info.name; }

  // Called before the reporter sees the assertion, so this must print the whole failure.
  AssertionEnded assertionEnded(const Catch::AssertionStats& stats) override {
    const Catch::AssertionResult& result = stats.assertionResult;
    // A signal ends this process and with it all: Catch2 reports fatal signals from the handler, where few
    // calls are async-signal-safe.
    const bool signal = result.getResultType() == Catch::ResultWas::FatalErrorCondition;
    if (g_world->size() > 1 && !result.isOk() && !signal) {
      std::ostringstream text;
      text << "\nrank " << g_world->rank() << " of " << g_world->size() << " failed in \"" << test_case_
           << "\"\n"
           << result.getSourceInfo() << ": " << result.getExpressionInMacro() << "\n";
      if (result.hasExpandedExpression())
        text << "  with expansion: " << result.getExpandedExpression() << "\n";
      if (!result.getMessage().empty()) text << "  " << result.getMessage() << "\n";
      for (const Catch::MessageInfo& info : stats.infoMessages) text << "  " << info.message << "\n";
      std::fflush(stdout);
      std::fputs(text.str().c_str(), stderr);
      std::fflush(stderr);
      g_world->abort(nrl::Exit::internal);
    }
    return AssertionEnded(true);
  }

 private:
  std::string test_case_;
};
CATCH_REGISTER_LISTENER(AbortOnFailure)

}  // namespace

nrl::comm::World& test_world() {
  return *g_world;
}

int64_t test_slot_bytes() {
  return g_slot_bytes;
}

int main(int argc, char** argv) {
  nrl::comm::WorldOptions options;
  // 0: everything through shared memory; a large number: everything through messages.
  if (const char* text = std::getenv("NRL_TEST_SHARED_MIN")) options.mpi.shared_min_bytes = std::stoll(text);
  if (const char* text = std::getenv("NRL_TEST_SHARED_SLOT"))
    options.mpi.shared_slot_bytes = std::stoll(text);
  if (const char* text = std::getenv("NRL_TEST_SCRATCH")) options.mpi.scratch_bytes = std::stoll(text);
  // Hosts of the launched ranks, as in "0,1,0,1".
  if (const char* text = std::getenv("NRL_TEST_HOSTS")) {
    std::istringstream in(text);
    for (std::string host; std::getline(in, host, ',');) options.mpi.hosts.push_back(std::stoi(host));
  }
  g_slot_bytes = options.mpi.shared_slot_bytes;
  const auto world = nrl::comm::World::init(options);
  g_world = world.get();
  std::string why_not;
  if (!open_backends(*world, why_not)) {
    if (world->rank() == 0) std::printf("skipped: %s\n", why_not.c_str());
    world->finalize();
    return 77;
  }
  int failures = Catch::Session().run(argc, argv);
  backends().clear();
  const auto consensus = nrl::comm::agree_on_error(
      world->comm(), failures ? nrl::Exit::internal : nrl::Exit::ok, "tests failed on this rank");
  if (consensus.code != nrl::Exit::ok && world->rank() == 0)
    std::fprintf(stderr, "first failing rank: %d\n", consensus.rank);
  try {
    world->finalize();
  } catch (const nrl::Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return static_cast<int>(e.code());
  }
  return static_cast<int>(consensus.code);
}
