#include "apps/profile/chrome.h"

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "apps/profile/slices.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"
#include "core/io/scratch_directory.h"
#include "tests/catch.h"
#include "tests/profile/sample_recording.h"

namespace nrl::profile {
namespace {

struct SeenEvent {
  std::string name;
  int64_t begin, end;  // nanoseconds
  int64_t stream, correlation;
};

int64_t nanoseconds(double us) {
  return static_cast<int64_t>(us * 1e3 + 0.5);
}

TEST_CASE("a Chrome trace follows the conventions of Kineto") {
  const bool on_device = GENERATE(false, true);
  const ScratchDirectory directory(scratch_parent(), "nrl-profile-test-");
  const std::string path = join_path(directory.path(), "rank-1.pt.trace.json");
  const Recorded recorded = sample_recording(1, on_device);
  write_chrome_trace(path, recorded, 2);
  CHECK_THAT(read_file(path, 1 << 22),
             ContainsSubstring(R"("distributedInfo": {"rank": 1, "world_size": 2,)"));
  const JsonValue json = read_json(path);
  std::map<std::string, std::vector<SeenEvent>> by_category;
  std::map<std::pair<int64_t, int64_t>, std::vector<Slice>> tracks;
  for (const JsonValue& e : json.at("traceEvents").items()) {
    if (e.get_string("ph") != "X") continue;
    const JsonValue& arguments = e.at("args");
    const int64_t begin = nanoseconds(e.get_double("ts")), end = begin + nanoseconds(e.get_double("dur"));
    by_category[e.get_string("cat")].push_back({e.get_string("name"), begin, end,
                                                arguments.get_int("stream", -1),
                                                arguments.get_int("correlation", -1)});
    tracks[{e.get_int("pid"), e.get_int("tid")}].push_back({begin, end, 0});
    if (e.get_string("cat") == "kernel") CHECK(arguments.get_int("stream") == e.get_int("tid"));
  }
  for (auto& [track, slices] : tracks) {
    size_t inside = 0;
    for (const Slice& s : nested(slices)) inside += static_cast<size_t>(s.end - s.begin);
    size_t plain = 0;
    for (const Slice& s : slices) plain += static_cast<size_t>(s.end - s.begin);
    CHECK(inside == plain);  // nothing had to be cut to nest
  }
  std::multiset<std::string> steps;
  for (const SeenEvent& s : by_category["user_annotation"])
    if (s.name.starts_with("ProfilerStep#")) steps.insert(s.name);
  CHECK(steps == std::multiset<std::string>{"ProfilerStep#3", "ProfilerStep#4"});

  std::map<int64_t, int64_t> launched;
  for (const SeenEvent& s : by_category["cuda_runtime"]) {
    CHECK(s.name == "cudaLaunchKernel");
    CHECK(launched.try_emplace(s.correlation, s.begin).second);
  }
  size_t compute = 0, communication = 0;
  for (const SeenEvent& s : by_category["kernel"]) {
    REQUIRE(launched.count(s.correlation) == 1);
    CHECK(launched[s.correlation] <= s.begin);
    (s.name.starts_with("nccl:") ? communication : compute) += 1;
    if (s.name == "linear_forward") CHECK(s.begin - launched[s.correlation] == (on_device ? 50'000 : 0));
  }
  CHECK(compute == recorded.costs.size());
  CHECK(communication == recorded.messages.size());
  CHECK(by_category["cpu_op"].size() == recorded.costs.size());
}

TEST_CASE("a Chrome trace of a rank without ranges is valid") {
  const ScratchDirectory directory(scratch_parent(), "nrl-profile-test-");
  const std::string path = join_path(directory.path(), "empty.pt.trace.json");
  Recorded recorded;
  recorded.host = "a \"name\"\n";
  write_chrome_trace(path, recorded, 1);
  CHECK(read_json(path).at("traceEvents").items().size() == 3);
}

}  // namespace
}  // namespace nrl::profile
