#include "core/base/threads.h"

#include <filesystem>
#include <fstream>
#include <new>
#include <system_error>

#include <unistd.h>

#include "core/base/error.h"
#include "tests/catch.h"

using namespace nrl;
namespace fs = std::filesystem;

namespace {

struct Root {
  fs::path path = fs::temp_directory_path() / ("nrl-threads-" + std::to_string(getpid()));
  Root() { fs::create_directories(path); }
  ~Root() { fs::remove_all(path); }
  void write(const std::string& name, const std::string& text) const {
    fs::create_directories((path / name).parent_path());
    std::ofstream(path / name) << text;
  }
};

}  // namespace

TEST_CASE("the limits of control groups are found at every level", "[base]") {
  const Root root;
  REQUIRE_FALSE(read_thread_limits(root.path).cgroup);
  root.write("proc/sys/kernel/threads-max", "12345\n");
  root.write("proc/self/cgroup", "0::/job/step\n");
  root.write("sys/fs/cgroup/job/step/pids.max", "max\n");
  root.write("sys/fs/cgroup/job/step/pids.current", "7\n");
  REQUIRE_FALSE(read_thread_limits(root.path).cgroup);
  root.write("sys/fs/cgroup/job/pids.max", "20\n");
  root.write("sys/fs/cgroup/job/pids.current", "19\n");
  root.write("sys/fs/cgroup/pids.max", "100\n");
  root.write("sys/fs/cgroup/pids.current", "50\n");
  ThreadLimits limits = read_thread_limits(root.path);
  REQUIRE(limits.cgroup == 20);  // the nearest to being reached
  REQUIRE(limits.cgroup_current == 19);
  REQUIRE(limits.cgroup_path == (root.path / "sys/fs/cgroup/job").string());
  REQUIRE(limits.system == 12345);
  // Version 1; other controllers and malformed lines are ignored.
  root.write("proc/self/cgroup", "3:cpu:/other\nnonsense\n7:pids:/a\n");
  root.write("sys/fs/cgroup/pids/a/pids.max", "5\n");
  limits = read_thread_limits(root.path);
  REQUIRE(limits.cgroup == 5);
  REQUIRE_FALSE(limits.cgroup_current);
}

TEST_CASE("the error for a refused thread names the limit", "[base]") {
  ThreadLimits limits;
  limits.system = 12345;
  REQUIRE(describe_thread_limit(limits).find("kernel.threads-max") != std::string::npos);
  REQUIRE(describe_thread_limit(limits).find("12345") != std::string::npos);
  limits.user = 50;
  REQUIRE(describe_thread_limit(limits).find("ulimit -u") != std::string::npos);
  REQUIRE(describe_thread_limit(limits).find("is 50") != std::string::npos);
  limits.cgroup = 20;
  limits.cgroup_current = 3;
  limits.cgroup_path = "/sys/fs/cgroup/job";
  REQUIRE(describe_thread_limit(limits).find("ulimit -u") != std::string::npos);
  limits.cgroup_current = 19;
  REQUIRE(describe_thread_limit(limits).find("/sys/fs/cgroup/job allows 20") != std::string::npos);
  REQUIRE(describe_thread_limit(limits).find("has 19") != std::string::npos);
  limits.cgroup_current = 3;
  limits.user.reset();
  REQUIRE(describe_thread_limit(limits).find("pids.max") != std::string::npos);
  // The address space counts where the stack of a thread does not fit.
  limits.user = 50;
  limits.address_space = int64_t{1} << 30;
  limits.address_space_used = int64_t{512} << 20;
  limits.stack = int64_t{8} << 20;
  REQUIRE(describe_thread_limit(limits).find("ulimit -v") == std::string::npos);
  limits.address_space_used = int64_t{1020} << 20;
  const std::string full = describe_thread_limit(limits);
  REQUIRE(full.find("may map 1.00 GiB (ulimit -v, RLIMIT_AS), has 1020 MiB, and a thread needs 8.00 MiB") !=
          std::string::npos);
  REQUIRE(full.find("ulimit -u") == std::string::npos);
}

TEST_CASE("exceptions are converted to errors with exit codes", "[base]") {
  REQUIRE(error_from(Error(Exit::data, "x")).code() == Exit::data);
  REQUIRE(error_from(std::bad_alloc()).code() == Exit::out_of_memory);
  const std::system_error refused(std::make_error_code(std::errc::resource_unavailable_try_again));
  REQUIRE(error_from(refused).code() == Exit::out_of_memory);
  REQUIRE(std::string(error_from(refused).what()).starts_with("thread not started"));
  const std::system_error other(std::make_error_code(std::errc::permission_denied));
  REQUIRE(error_from(other).code() == Exit::internal);
}
