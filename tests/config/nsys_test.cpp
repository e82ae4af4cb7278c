// The steps that Nsight Systems captures.

#include "core/config/nsys.h"

#include <cstdlib>
#include <string>

#include "core/base/error.h"
#include "tests/catch.h"

using namespace nrl;

namespace {

// The variables, for the length of a test.
class Variables {
 public:
  Variables(const char* steps, const char* workers) {
    set(nsys_steps_variable, steps);
    set(nsys_workers_variable, workers);
  }
  ~Variables() {
    ::unsetenv(nsys_steps_variable);
    ::unsetenv(nsys_workers_variable);
  }

 private:
  static void set(const char* name, const char* value) {
    if (value)
      ::setenv(name, value, 1);
    else
      ::unsetenv(name);
  }
};

std::string refusal(const ProfilingConfig& config) {
  try {
    (void)nsys_window(config);
  } catch (const Error& e) {
    CHECK(e.code() == Exit::usage);
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("variables of NeMo RL and keys select steps and workers for nsys", "[nsys]") {
  ProfilingConfig config;
  {
    const Variables none(nullptr, nullptr);
    CHECK_FALSE(nsys_window(config));
    config.nsys.steps = "3:5";
    REQUIRE(nsys_window(config));
    CHECK(nsys_window(config)->text() == "3:5");
    CHECK(nsys_window(config)->source == "profiling.nsys.steps: 3:5");
    CHECK(nsys_window(config)->has_worker());  // all
    config.nsys.workers = {"*vllm*"};
    CHECK_FALSE(nsys_window(config)->has_worker());
    config.nsys.steps = "5:3";
    CHECK(refusal(config).find("profiling.nsys.steps: 5:3: expected FIRST:END") == 0);
  }
  const Variables both("2:4", " *vllm* , policy_*,,");
  const auto window = nsys_window(config);  // the variables win
  REQUIRE(window);
  CHECK(window->steps.first == 2);
  CHECK(window->steps.end == 4);
  CHECK(window->workers == std::vector<std::string>{"*vllm*", "policy_*"});
  CHECK(window->has_worker());
}

TEST_CASE("nsys: one variable alone, and steps that are no range", "[nsys]") {
  {
    const Variables one("2:4", nullptr);
    CHECK(refusal({}).find("NRL_NSYS_PROFILE_STEP_RANGE is set without NRL_NSYS_WORKER_PATTERNS") == 0);
  }
  {
    const Variables other(nullptr, "*");
    CHECK(refusal({}).find("NRL_NSYS_WORKER_PATTERNS is set without NRL_NSYS_PROFILE_STEP_RANGE") == 0);
  }
  for (const char* steps : {"3", "0:2", "2:2", "a:b", "2:4:6"}) {
    const Variables bad(steps, "*");
    CHECK(refusal({}).find(steps) != std::string::npos);
  }
  for (const char* name : {"dtensor_policy_worker", "megatron_policy_worker", "*dtensor*"}) {
    const Variables named("2:4", name);
    CHECK(nsys_window({})->has_worker());
  }
}
