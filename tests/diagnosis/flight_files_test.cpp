#include "apps/diagnosis/flight_files.h"

#include <fstream>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "apps/diagnosis/records.h"
#include "apps/monitor/run_file.h"
#include "core/base/process.h"
#include "core/io/atomic_file.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::diagnosis;
using test::error_of;
using test::TemporaryDirectory;

namespace {

// A run of its own in shared memory.
struct SharedRun {
  std::string id = "t" + random_nonce();
  ~SharedRun() {
    remove_tree(flight_directory(id));
    leave_flights(id);
  }
  std::string add(int rank, int attempt, const std::string& text = "x") const {
    const std::string path = join_path(make_flight_directory(id), flight_name(rank, attempt));
    std::ofstream(path) << text;
    return path;
  }
};

}  // namespace

TEST_CASE("names of flight files", "[flight_files]") {
  int rank = -1, attempt = -1;
  REQUIRE(parse_flight_name(flight_name(12, 3), rank, attempt));
  CHECK(rank == 12);
  CHECK(attempt == 3);
  for (const char* bad : {"", "rank-1.flight", "rank-.attempt-1.flight", "rank-1.attempt-.flight",
                          "rank-1.attempt-2", "rank--1.attempt-2.flight", "rank-1.attempt-2x.flight",
                          ".attempt-.flight", "rank-1.attempt-2.flight.tmp"})
    CHECK(!parse_flight_name(bad, rank, attempt));
}

TEST_CASE("flight files of a failed attempt are kept, those of earlier ones move", "[flight_files]") {
  const TemporaryDirectory dir;
  const SharedRun run;
  run.add(0, 1, "one");
  run.add(1, 1);
  run.add(0, 2);
  CHECK(save_flights(dir.path(), run.id, 1) == 2);
  CHECK(read_file(join_path(saved_flights(dir.path(), 1), flight_name(0, 1)), 100) == "one");
  CHECK(list_directory(flight_directory(run.id)) == std::vector<std::string>{flight_name(0, 2)});
  collect_flights(dir.path(), run.id, 3);
  CHECK(list_directory(flight_directory(run.id)).empty());
  CHECK(path_exists(join_path(saved_flights(dir.path(), 2), flight_name(0, 2))));
  // The newest attempts stay.
  for (int attempt = 3; attempt < 9; ++attempt) run.add(0, attempt);
  collect_flights(dir.path(), run.id, 9);
  CHECK(list_directory(join_path(dir.path(), "flight")).size() == kept_attempts);
  CHECK(path_exists(saved_flights(dir.path(), 8)));
  CHECK(!path_exists(saved_flights(dir.path(), 3)));
  leave_flights(run.id);
  CHECK(!path_exists(flight_directory(run.id)));
}

TEST_CASE("old directories of other runs are removed, young ones and those of this run stay",
          "[flight_files]") {
  const TemporaryDirectory dir;
  const SharedRun run, old, young;
  run.add(0, 5);
  const std::string file = old.add(0, 1);
  young.add(0, 1);
  const timespec long_ago[2] = {{.tv_sec = 1000, .tv_nsec = 0}, {.tv_sec = 1000, .tv_nsec = 0}};
  REQUIRE(::utimensat(AT_FDCWD, file.c_str(), long_ago, 0) == 0);
  REQUIRE(::utimensat(AT_FDCWD, flight_directory(old.id).c_str(), long_ago, 0) == 0);
  collect_flights(dir.path(), run.id, 5);
  CHECK(!path_exists(flight_directory(old.id)));
  CHECK(path_exists(flight_directory(young.id)));
  CHECK(path_exists(join_path(flight_directory(run.id), flight_name(0, 5))));
}

TEST_CASE("a directory that others may write to is not used", "[flight_files]") {
  const SharedRun run;
  make_flight_directory(run.id);
  REQUIRE(::chmod(flight_directory(run.id).c_str(), 0777) == 0);
  CHECK(error_of([&] { make_flight_directory(run.id); }).code == 74);
}

TEST_CASE("records are of the last attempt; files that cannot be read are named", "[flight_files]") {
  const TemporaryDirectory dir;
  CHECK(error_of([&] { read_records(dir.path()); }).code == 66);
  monitor::begin_session(dir.path(), 0, 1);
  const monitor::RunFile file = monitor::begin_session(dir.path(), 0, 2);  // the first one was killed
  monitor::Failure failure;
  failure.kind = "io";
  monitor::write_failure(dir.path(), failure);
  Records records = read_records(dir.path());
  CHECK(records.ranks.empty());
  CHECK(records.failure->kind == "io");
  std::ofstream(dir / monitor::failure_file, std::ios::trunc).flush();  // as a power loss leaves it
  records = read_records(dir.path());
  CHECK(!records.failure);
  CHECK(records.unreadable.size() == 1);
  monitor::put_failure_aside(dir.path());
  SharedRun run;
  run.id = file.run_id;
  const auto fly = [&](int rank, int attempt) {
    comm::CollectiveLog log;
    comm::FlightIdentity self = comm::this_process();
    self.run_id = run.id;
    self.attempt = attempt;
    self.rank = rank;
    self.ranks = 2;
    const comm::FlightFile flight(join_path(make_flight_directory(run.id), flight_name(rank, attempt)), self,
                                  log);
  };
  fly(0, 1);
  fly(0, 2);
  fly(1, 2);
  run.add(2, 2, "garbage");
  run.add(1, 1, "garbage");
  records = read_records(dir.path());
  CHECK(records.attempt == 2);
  REQUIRE(records.ranks.size() == 2);
  CHECK(records.ranks[1].flight.identity.rank == 1);
  CHECK(records.ranks[1].life == Life::alive);
  CHECK(records.ranks[1].now_ns > 0);
  CHECK(records.unreadable.size() == 2);
}
