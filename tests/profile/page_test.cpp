#include "apps/profile/page.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "apps/profile/lifetimes.h"
#include "core/base/error.h"
#include "tests/catch.h"
#include "tests/profile/check_page.h"
#include "tests/profile/sample_profile.h"
#include "tests/profile/sample_recording.h"

namespace nrl::profile {
namespace {

using test::check_page;
using test::occurrences;

TEST_CASE("the page of a profile has all parts") {
  const Timeline timeline = timeline_of(sample_recording(1));
  const std::string page = html_page(sample_profile(2), timeline);
  check_page(page);
  for (const char* heading : {"Verdicts", "Split of a step", "Step 3 of rank 1", "Operations", "Roofline",
                              "Memory of rank 0", "Communication", "Ranks", "Configuration"})
    CHECK(occurrences(page, std::string("<h2>") + heading) >= 1);
  CHECK(occurrences(page, "<code>distributed.overlap_grad_reduce=true</code>") >= 1);
  CHECK(occurrences(page, "predicted: 97.80 ms per step (-13.0 %), model error 3.1 %") >= 1);
  CHECK(occurrences(page, "rank 1 works &lt;8 %&gt; longer") >= 1);
  CHECK(occurrences(page, "  note: &lt;a&gt; &amp; &quot;b&quot;\n") >= 1);
  CHECK(occurrences(page, "<title>wire 17.9 ms, 15.9 % of the step</title>") >= 1);
  CHECK(occurrences(page, "<title>arithmetic: 200 GFLOP/s</title>") >= 1);
  CHECK(occurrences(page, "<title>memory: 40 GB/s</title>") >= 1);
  CHECK(occurrences(page, "<circle") == 4);  // one operation has no FLOPs
  CHECK(occurrences(page, "Peak 302 MiB of 309 MiB in the arena (97.7 %)") >= 1);
  CHECK(occurrences(page, "<td>31.20</td><td>27.8 %</td><td>6.20</td><td>80.1 %</td><td>arithmetic</td>") >=
        1);  // the mean of the ranks
  CHECK(occurrences(page, "prefers-color-scheme: dark") >= 1);
}

TEST_CASE("pages stay small") {
  Recorded recorded = sample_recording(0);
  recorded.step_begins = {recorded.window.begin, recorded.window.end};
  recorded.last_step = recorded.first_step;
  recorded.window.events.clear();
  for (int64_t i = 0; i < 100'000; ++i)
    recorded.window.events.push_back({.name = i % 1000 ? "op" : "long_op",
                                      .begin = recorded.window.begin + i * 200,
                                      .end = recorded.window.begin + i * 200 + (i % 1000 ? 100 : 190),
                                      .tag = {},
                                      .kind = trace::Kind::op});
  const Timeline timeline = timeline_of(recorded);
  size_t bars = 0;
  int64_t ranges = 0;
  for (const Lane& lane : timeline.lanes) {
    bars += lane.bars.size();
    for (size_t i = 1; i < lane.bars.size(); ++i) CHECK(lane.bars[i].begin >= lane.bars[i - 1].end);
    if (lane.name == "operations")
      for (const Bar& bar : lane.bars) ranges += bar.count;
  }
  CHECK(bars <= most_bars);
  CHECK(bars > 1000);
  CHECK(ranges == 100'000);
  const std::string page = html_page(sample_profile(16), timeline);
  check_page(page);
  CHECK(page.size() < 5'000'000);
  if (std::getenv("NRL_VERBOSE")) WARN(page.size() << " bytes for 16 ranks, " << bars << " bars");
  const std::string many = html_page(sample_profile(1024), timeline);
  check_page(many);
  CHECK(many.size() < 5'000'000);
  CHECK(occurrences(many, "The 32 ranks with most own work and the 32 with least, of 1024.") == 2);
  CHECK(occurrences(many, "<div>rank ") == 64);
  CHECK(occurrences(many, "<div>rank 1</div>") == 1);
}

TEST_CASE("a page of an empty profile is valid") {
  check_page(html_page({}, {}));
  check_page(memory_page({}));
  Profile profile;
  profile.ranks.resize(1);
  profile.operations.resize(1);
  check_page(html_page(profile, timeline_of({})));
}

TEST_CASE("a timeline shows the step of median duration") {
  Recorded recorded = sample_recording(1);
  const int64_t begin = recorded.window.begin;
  recorded.step_begins = {begin, begin + 10'000'000, begin + 20'000'000, begin + 20'000'001};
  const Timeline timeline = timeline_of(recorded);
  CHECK(timeline.rank == 1);
  CHECK(timeline.step == 3);
  CHECK(timeline.seconds == Approx(10e-3));
  std::vector<std::string> names;
  for (const Lane& lane : timeline.lanes) names.push_back(lane.name);
  CHECK(names ==
        std::vector<std::string>{"phases", "operations", "waiting", "dp[0,1]", "dp[0,1]", "pp[0,1]"});
  CHECK(timeline.lanes[1].bars.size() == 33);
  CHECK(timeline.lanes[1].bars[1].paint == Paint::gemm);
  CHECK(timeline.lanes[1].bars.back().paint == Paint::optimizer);
  CHECK(timeline.lanes[2].bars[0].paint == Paint::data);
  CHECK(timeline.lanes[5].bars[0].paint == Paint::message);
  CHECK(timeline.lanes[1].bars[0].begin == Approx(200e-6));
}

TEST_CASE("a timeline shows recomputation on a device by the range of the host") {
  Recorded recorded = sample_recording(0, true);
  auto& events = recorded.window.events;
  const auto host = std::find_if(events.begin(), events.end(), [](const trace::Event& e) {
    return e.row == 0 && std::string_view(e.name) == "linear_forward";
  });
  REQUIRE(host != events.end());
  trace::Event around = *host;
  around.name = "recompute";
  around.kind = trace::Kind::recompute;
  around.call = trace::no_call;
  events.insert(host, around);
  const Timeline timeline = timeline_of(recorded);
  REQUIRE(timeline.lanes.size() > 1);
  CHECK(timeline.lanes[1].name == "compute stream");
  std::vector<Paint> seen;
  for (const Bar& bar : timeline.lanes[1].bars) seen.push_back(bar.paint);
  CHECK(std::count(seen.begin(), seen.end(), Paint::recompute) == 1);
  CHECK(std::count(seen.begin(), seen.end(), Paint::gemm) == 15);
  CHECK(std::count(seen.begin(), seen.end(), Paint::optimizer) == 1);
}

TEST_CASE("a timeline survives JSON, and malformed ones are refused") {
  const Timeline timeline = timeline_of(sample_recording(0));
  const std::string text = to_json(timeline).dump();
  const Timeline read = timeline_from(parse_json(text, "t"));
  CHECK(to_json(read).dump() == text);
  CHECK(read.lanes.size() == timeline.lanes.size());
  const auto refused = [&](std::string from, std::string to) {
    std::string broken = text;
    const size_t at = broken.find(from);
    REQUIRE(at != std::string::npos);
    broken.replace(at, from.size(), to);
    CHECK_THROWS_AS(timeline_from(parse_json(broken, "t")), Error);
  };
  refused("\"rank\":0", "\"rank\":-1");
  refused("\"seconds\":0.01", "\"seconds\":0.001");
  refused("\"bars\":[[", "\"bars\":[[1,");
  refused("\"bars\":[[0.0002,", "\"bars\":[[-1,");
  refused("\"names\":[", "\"names\":{},\"rest\":[");
  refused(",10,0,1]", ",11,0,1]");
  refused(",10,0,1]", ",10,99,1]");
  refused(",10,0,1]", ",10,0,0]");
}

TEST_CASE("lifetimes follow the clock") {
  const Recorded recorded = sample_recording(0);
  const int64_t begin = recorded.window.begin;
  const std::vector<LiveRange> ranges = live_ranges(recorded, 3);
  REQUIRE(ranges.size() == 7);
  CHECK(ranges[0].begin == begin);
  CHECK(ranges[0].end == begin + 10'000'000);
  // Ticks 1 to 14: from the GEMM of layer 0 until tick 15, the last GEMM of the first microbatch.
  CHECK(ranges[1].begin - begin == 300'000);
  CHECK(ranges[1].end - begin == 200'000 + 1'600'000 + 3 * 400'000 + 100'000);
  const std::string page = memory_page(recorded);
  check_page(page);
  CHECK(occurrences(page, "<rect class=\"life") == 7);
  CHECK_THAT(page,
             ContainsSubstring("<td>layer 0 qkv</td><td>activations</td><td>device</td><td>1.00 MiB</td>"));
}

}  // namespace
}  // namespace nrl::profile
