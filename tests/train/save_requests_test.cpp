// When a run saves besides save_period, and when it stops to save in time.

#include "apps/train/loop/save_requests.h"

#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>

#include "core/config/time_span.h"
#include "core/io/atomic_file.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using train::SaveRequests;
using train::SaveTimes;

TEST_CASE("a checkpoint is due save_seconds after the last one") {
  SaveTimes times(10, std::nullopt, 100);
  times.look(109);
  CHECK_FALSE(times.save_due());
  times.look(110);
  CHECK(times.save_due());
  times.saved(112, 2);
  times.look(121);
  CHECK_FALSE(times.save_due());
  times.look(122.5);
  CHECK(times.save_due());
  CHECK_FALSE(times.stop_due());
  SaveTimes never(std::nullopt, std::nullopt, 0);
  never.look(1e9);
  CHECK_FALSE(never.save_due());
  CHECK_FALSE(never.stop_due());
}

TEST_CASE("a run stops when two steps and a save would not end before checkpoint_must_save_by") {
  SaveTimes times(std::nullopt, 1000, 0);
  times.look(10);
  times.look(14);  // a step of 4 s
  times.saved(34, 20);
  times.look(40);  // not a step: what lies between was the save
  times.look(961);
  CHECK(times.stop_due());  // the longest step is 921 s now
  SaveTimes quick(std::nullopt, 1000, 0);
  quick.look(10);
  quick.look(14);
  quick.saved(34, 20);
  for (double now = 35; now <= 961; now += 1) quick.look(now);
  CHECK_FALSE(quick.stop_due());  // 961 + 2 x 4 + 1.5 x 20 = 999
  quick.look(962);
  CHECK(quick.stop_due());
}

TEST_CASE("spans of time are read as NeMo writes them") {
  CHECK(parse_time_span("00:03:45:00") == 3 * 3600 + 45 * 60);
  CHECK(parse_time_span("2:00:00:01") == 2 * 86400 + 1);
  CHECK(parse_time_span("30:00") == 1800);
  CHECK(parse_time_span("90") == 90);
  CHECK(parse_time_span("48:00:00") == 2 * 86400);
  for (const char* text : {"", ":", "1:", ":30", "1:60", "1:00:60", "1:24:00:00", "1:2:3:4:5", "-1", "1.5",
                           "3h", "00001", "1: 2", "99999999999999999999"}) {
    CAPTURE(text);
    CHECK_FALSE(parse_time_span(text).has_value());
  }
}

TEST_CASE("files in the log directory ask for a checkpoint and for the end") {
  const test::TemporaryDirectory dir;
  Config config;
  config.logger.log_dir = dir.path();
  write_file_atomic(dir / "save", "");  // of an earlier run
  SaveRequests requests(config, true);
  CHECK_FALSE(path_exists(dir / "save"));
  CHECK_FALSE(requests.look().save);
  write_file_atomic(dir / "save", "");
  write_file_atomic(dir / "stop", "");
  SaveRequests other(config, false);  // on another rank
  CHECK_FALSE(other.look().save);
  CHECK(path_exists(dir / "save"));
  SaveRequests::Asked asked;
  bool saved = false;
  for (int i = 0; i < 200 && !asked.stop; ++i) {
    asked = requests.look();
    saved = saved || asked.save;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK(saved);
  CHECK(asked.stop);
  CHECK_FALSE(path_exists(dir / "save"));
  CHECK_FALSE(path_exists(dir / "stop"));
  CHECK(requests.look().stop);  // until the end
  CHECK_FALSE(requests.look().save);
}

TEST_CASE("the end of a Slurm job is a deadline as checkpoint_must_save_by is") {
  const test::TemporaryDirectory dir;
  Config config;
  config.logger.log_dir = dir.path();
  const auto stops = [&](double end_in) {
    const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
    setenv("SLURM_JOB_END_TIME", std::to_string(static_cast<int64_t>(now.count() + end_in)).c_str(), 1);
    return SaveRequests(config, true).look().stop;
  };
  CHECK(stops(20));  // within the margin
  CHECK_FALSE(stops(3600));
  config.checkpointing.enabled = false;  // nothing to save
  CHECK_FALSE(stops(20));
  config.checkpointing.enabled = true;
  for (const char* text : {"", "soon", "0", "12x"}) {
    setenv("SLURM_JOB_END_TIME", text, 1);
    CHECK_FALSE(SaveRequests(config, true).look().stop);
  }
  unsetenv("SLURM_JOB_END_TIME");
  config.checkpointing.checkpoint_must_save_by = "00:00:01:00";
  CHECK_FALSE(SaveRequests(config, true).look().stop);
}
