#include "apps/diagnosis/stale_segments.h"

#include <sys/mman.h>
#include <unistd.h>

#include "core/base/process.h"
#include "core/io/atomic_file.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::diagnosis;
using test::TemporaryDirectory;

TEST_CASE("segments of dead ranks are removed, others stay", "[segments]") {
  const TemporaryDirectory dir;
  const std::string host = host_name(),
                    own = fmt::format("vader_segment.{}.{}.", host.substr(0, host.find('.')), ::geteuid());
  const std::vector<std::string> others{"vader_segment.other." + std::to_string(::geteuid()) + ".1.0",
                                        fmt::format("vader_segment.{}.{}.1.0", host, ::geteuid() + 1),
                                        "nrl-0"};
  for (const std::string& name : others) write_file_atomic(dir / name, "x");
  for (const char* job : {"1.0", "1.1", "2.0"}) write_file_atomic(dir / (own + job), std::string(4096, 'x'));
  CHECK(remove_stale_segments(dir.path(), 60) == 0);  // younger
  const File file = File::open_read(dir / (own + "2.0"));
  void* mapped = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, file.fd(), 0);
  REQUIRE(mapped != MAP_FAILED);
  CHECK(remove_stale_segments(dir.path(), 0) == 2);
  CHECK(path_exists(dir / (own + "2.0")));
  ::munmap(mapped, 4096);
  CHECK(remove_stale_segments(dir.path(), 0) == 1);
  for (const std::string& name : others) CHECK(path_exists(dir / name));
  CHECK(remove_stale_segments(dir / "none", 0) == 0);
}
