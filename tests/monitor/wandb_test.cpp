#include "apps/monitor/wandb.h"

#include <map>
#include <string>
#include <vector>

#include <protozero/pbf_reader.hpp>

#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/io/record_reader.h"
#include "tests/monitor/sample.h"
#include "tests/monitor/sink_run.h"

using namespace nrl;
using protozero::pbf_reader;
using test::contains;
using test::sample_row;
using test::sample_run;

namespace {

using Items = std::map<std::string, JsonValue>;

// The items of a HistoryRecord, SummaryRecord or ConfigRecord.
Items items_of(pbf_reader record) {
  Items out;
  while (record.next()) {
    if (record.tag() != 1) {
      record.skip();
      continue;
    }
    pbf_reader item = record.get_message();
    std::string key, json;
    while (item.next()) (item.tag() == 1 ? key : json) = item.get_string();
    out[key] = parse_json(json, "value_json");
  }
  return out;
}

struct WandbFile {
  std::string producer;
  std::map<int, std::string> run;  ///< text fields by number
  int64_t starting_step = 0;
  bool resume = false;
  Items config, summary;
  std::vector<Items> history;
  int exit = -1;
};

void read_run(WandbFile& out, pbf_reader run) {
  while (run.next()) {
    switch (run.tag()) {
      case 4:
        out.config = items_of(run.get_message());
        break;
      case 14:
        out.starting_step = run.get_int64();
        break;
      case 17:
        run.skip();
        break;
      case 24:
        out.resume = run.get_bool();
        break;
      default:
        out.run[static_cast<int>(run.tag())] = run.get_string();
    }
  }
}

WandbFile read_wandb(const std::string& path) {
  const std::string text = read_file(path, 1 << 26);
  REQUIRE(text.substr(0, 7) == std::string(":W&B\xe1\xbe\0", 7));
  WandbFile out;
  int64_t number = 0;
  for (const std::string& data : test::level_log_records(text, 7)) {
    pbf_reader record(data);
    while (record.next()) {
      switch (record.tag()) {
        case 1:
          CHECK(record.get_int64() == ++number);
          break;
        case 2:
          out.history.push_back(items_of(record.get_message()));
          break;
        case 3:
          out.summary = items_of(record.get_message());
          break;
        case 17:
          read_run(out, record.get_message());
          break;
        case 18: {
          pbf_reader exit = record.get_message();
          REQUIRE(exit.next(1));
          out.exit = exit.get_int32();
          break;
        }
        case 21: {
          pbf_reader header = record.get_message();
          REQUIRE(header.next(1));
          pbf_reader version = header.get_message();
          REQUIRE(version.next(1));
          out.producer = version.get_string();
          break;
        }
        default:
          FAIL("an unknown record");
      }
    }
  }
  return out;
}

}  // namespace

TEST_CASE("an offline run reads back", "[sinks][wandb]") {
  monitor::use_utc();
  const test::TemporaryDirectory dir;
  WandbConfig config;
  config.project = "p";
  config.entity = "e";
  config.group = "g";
  config.name = "n";
  const auto sink = monitor::wandb_sink(dir.path(), config, sample_run());
  for (int64_t step = 1; step <= 2000; ++step) {
    sink->row(sample_row(step));
    if (step == 1000) sink->flush();
    if (step == 4) sink->row({.step = 4, .time = 1700017955, .values = {{"validation/val_loss", 2.5}}});
  }
  sink->text(2000, 1700019999, "sample", "once \"upon\"");
  const std::string run = dir / "offline-run-20231115_031229-0a1b2c3d",
                    path = join_path(run, "run-0a1b2c3d.wandb");
  CHECK(read_wandb(path).history.size() == 999);  // the last row may still grow
  CHECK(read_wandb(path).exit == -1);
  sink->close(2000, 1700020949.25, 75);

  const WandbFile file = read_wandb(path);
  CHECK(file.producer == "0.31.0");
  CHECK(file.run ==
        std::map<int, std::string>{{1, "0a1b2c3d"}, {2, "e"}, {3, "p"}, {6, "g"}, {8, "n"}, {13, "node1"}});
  CHECK(!file.resume);
  CHECK(file.config.at("policy").dump() == R"({"optimizer":{"lr":0.0003},"tie":true})");
  CHECK(file.config.at("data").dump() == R"({"path":"corpus: a"})");
  REQUIRE(file.history.size() == 2000);
  for (int64_t step = 1; step <= 2000; ++step) {
    const Items& row = file.history[static_cast<size_t>(step - 1)];
    REQUIRE(row.at("_step").as_int() == step);
    REQUIRE(row.at("train/loss").as_double() == 8 - static_cast<double>(step) / 64);
    REQUIRE(row.at("training_loss").as_double() == row.at("train/loss").as_double());
  }
  CHECK(file.history[2].at("train/grad_norm").as_string() == "NaN");
  CHECK(file.history[3].at("validation/val_loss").as_double() == 2.5);
  CHECK(file.history[0].at("_timestamp").as_double() == 1700017951);
  CHECK(file.history[0].at("_runtime").as_double() == 1.75);
  CHECK(file.history.back().at("sample").as_string() == "once \"upon\"");
  CHECK(file.summary.at("train/loss").as_double() == 8 - 2000 / 64.);
  CHECK(file.exit == 75);
  CHECK(sink->next() == "wandb sync " + run);
}

TEST_CASE("a resumed session is a directory of the same run", "[sinks][wandb]") {
  monitor::use_utc();
  const test::TemporaryDirectory dir;
  monitor::wandb_sink(dir.path(), {}, sample_run());
  const auto sink = monitor::wandb_sink(dir.path(), {}, sample_run(50, 1700018949.25));
  sink->row(sample_row(51));
  sink->close(51, 1700018950, 0);
  const std::vector<std::string> runs = list_directory(dir.path());
  REQUIRE(runs == std::vector<std::string>{"offline-run-20231115_031229-0a1b2c3d",
                                           "offline-run-20231115_032909-0a1b2c3d"});
  const WandbFile file = read_wandb(join_path(dir / runs[1], "run-0a1b2c3d.wandb"));
  CHECK(file.run.at(1) == "0a1b2c3d");
  CHECK(file.run.at(8) == "tiny");
  CHECK(file.resume);
  CHECK(file.starting_step == 51);
  CHECK(file.history.at(0).at("_runtime").as_double() == 51.75);
  CHECK(sink->next() == "wandb sync " + dir / "offline-run-*-0a1b2c3d");
  monitor::wandb_sink(dir.path(), {}, sample_run(50, 1700018949.25));  // in the same second
  CHECK(list_directory(dir.path()).back() == "offline-run-20231115_032910-0a1b2c3d");
}

TEST_CASE("superseded rows are removed from files that were not uploaded", "[sinks][wandb]") {
  monitor::use_utc();
  const test::TemporaryDirectory dir;
  const std::string name = "offline-run-20231115_031229-0a1b2c3d/run-0a1b2c3d.wandb";
  const auto sink = monitor::wandb_sink(dir.path(), {}, sample_run());
  for (int64_t step = 1; step <= 400; ++step) sink->row(sample_row(step));
  sink->end_step();
  sink->flush();
  CHECK(read_wandb(dir / name).history.size() == 400);
  sink->close(400, 1700018000, 75);
  const std::string all = read_file(dir / name, 1 << 26);
  monitor::wandb_sink(dir.path(), {}, sample_run(1000, 1700018949.25));
  CHECK(read_file(dir / name, 1 << 26) == all);
  write_file_atomic(dir / name + ".synced", "");
  monitor::wandb_sink(dir.path(), {}, sample_run(300, 1700018949.25));
  CHECK(read_file(dir / name, 1 << 26) == all);
  remove_tree(dir / name + ".synced");
  monitor::wandb_sink(dir.path(), {}, sample_run(300, 1700018949.25));
  const WandbFile cut = read_wandb(dir / name);
  CHECK(cut.history.size() == 300);
  CHECK(cut.exit == -1);
  CHECK(all.starts_with(read_file(dir / name, 1 << 26)));
}

TEST_CASE("a removed directory and a full disk are errors of an offline run", "[sinks][wandb]") {
  const test::TemporaryDirectory dir;
  const auto sink = monitor::wandb_sink(dir / "w", {}, sample_run());
  remove_tree(dir / "w");
  sink->row(sample_row(1));
  sink->row(sample_row(2));
  CHECK(contains(test::error_of([&] { sink->flush(); }).text, "was removed"));
  CHECK(test::fails_on_full_disk(2000, [&] {
    const auto full = monitor::wandb_sink(dir / "full", {}, sample_run());
    for (int64_t step = 1; step <= 100; ++step) {
      full->row(sample_row(step));
      full->flush();
    }
  }));
}
