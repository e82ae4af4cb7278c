#include "apps/monitor/tensorboard.h"

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include <protozero/pbf_reader.hpp>

#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/io/record_reader.h"
#include "tests/monitor/sink_run.h"

using namespace nrl;
using protozero::pbf_reader;
using test::contains;
using test::sample_row;
using test::sample_run;

namespace {

/// An Event, flat.
struct Event {
  double time = 0;
  int64_t step = 0;
  std::string version;
  int session = -1;  ///< SessionLog.status
  std::map<std::string, float> scalars;
  std::map<std::string, std::string> texts, plugins;  ///< by tag; plugins: name and content
};

void read_value(Event& out, pbf_reader value) {
  std::string tag, text, plugin;
  while (value.next()) {
    if (value.tag() == 1) {
      tag = value.get_string();
    } else if (value.tag() == 2) {
      out.scalars[tag] = value.get_float();
    } else if (value.tag() == 9) {
      pbf_reader metadata = value.get_message();
      REQUIRE(metadata.next(1));
      pbf_reader data = metadata.get_message();
      while (data.next()) plugin += data.get_string() + " ";
    } else if (value.tag() == 8) {
      pbf_reader tensor = value.get_message();
      while (tensor.next()) {
        if (tensor.tag() == 8)
          text = tensor.get_string();
        else
          tensor.skip();
      }
    } else {
      FAIL("an unknown field of a value");
    }
  }
  if (plugin.starts_with("text")) out.texts[tag] = text;
  if (!plugin.empty()) out.plugins[tag] = plugin;
}

Event event_from(const std::string& record) {
  Event out;
  pbf_reader event(record);
  while (event.next()) {
    if (event.tag() == 1) {
      out.time = event.get_double();
    } else if (event.tag() == 2) {
      out.step = event.get_int64();
    } else if (event.tag() == 3) {
      out.version = event.get_string();
    } else if (event.tag() == 7) {
      pbf_reader log = event.get_message();
      REQUIRE(log.next(1));
      out.session = log.get_enum();
    } else {
      REQUIRE(event.tag() == 5);
      pbf_reader summary = event.get_message();
      while (summary.next(1)) read_value(out, summary.get_message());
    }
  }
  return out;
}

std::vector<Event> events_in(const std::string& file) {
  std::vector<Event> out;
  for (const std::string& record : test::tf_records(read_file(file, 1 << 26)))
    out.push_back(event_from(record));
  return out;
}

}  // namespace

TEST_CASE("event files read back", "[sinks][tensorboard]") {
  const test::TemporaryDirectory dir;
  const auto sink = monitor::tensorboard_sink(dir / "a/b", sample_run());
  for (int64_t step = 1; step <= 5; ++step) sink->row(sample_row(step));
  sink->text(5, 1700017960, "sample", "once\nupon");
  sink->flush();
  const std::vector<std::string> files = list_directory(dir / "a/b");
  REQUIRE(files.size() == 1);
  CHECK(files[0].starts_with("events.out.tfevents.1700017949.node1."));
  sink->close(5, 1700017961, 0);

  const std::vector<Event> events = events_in(join_path(dir / "a/b", files[0]));
  REQUIRE(events.size() == 11);
  CHECK(events[0].version == "brain.Event:2");
  CHECK(events[1].session == 1);
  CHECK(events[1].step == 0);
  CHECK(events[2].plugins.at("_hparams_/experiment").starts_with("hparams"));
  const std::string& start = events[3].plugins.at("_hparams_/session_start_info");
  CHECK(contains(start, "policy.optimizer.lr"));
  CHECK(contains(start, "corpus: a"));
  for (int64_t step = 1; step <= 5; ++step) {
    const Event& e = events[static_cast<size_t>(step + 3)];
    CHECK(e.step == step);
    CHECK(e.time == 1700017950 + static_cast<double>(step));
    CHECK(e.scalars.at("train/loss") == static_cast<float>(8 - static_cast<double>(step) / 64));
    CHECK(std::isnan(e.scalars.at("train/grad_norm")) == (step == 3));
  }
  CHECK(events[9].texts.at("sample") == "once\nupon");
  CHECK(events[9].step == 5);
  CHECK(events[10].plugins.contains("_hparams_/session_end_info"));
  CHECK(sink->next() == "tensorboard --logdir " + dir / "a/b");
}

TEST_CASE("a resumed session begins a later file at its first step", "[sinks][tensorboard]") {
  const test::TemporaryDirectory dir;
  monitor::tensorboard_sink(dir.path(), sample_run());
  monitor::tensorboard_sink(dir.path(), sample_run(50));  // in the same second
  const std::vector<std::string> files = list_directory(dir.path());
  REQUIRE(files.size() == 2);
  CHECK(files[1].starts_with("events.out.tfevents.1700017950."));
  const Event start = events_in(dir / files[1]).at(1);
  CHECK(start.session == 1);
  CHECK(start.step == 51);
}

TEST_CASE("a directory that goes away and a full disk are errors", "[sinks][tensorboard]") {
  const test::TemporaryDirectory dir;
  const auto sink = monitor::tensorboard_sink(dir / "t", sample_run());
  sink->row(sample_row(1));
  remove_tree(dir / "t");
  const test::Caught error = test::error_of([&] { sink->flush(); });
  CHECK(error.code == static_cast<int>(Exit::io));
  CHECK(contains(error.text, "was removed"));
  CHECK(test::fails_on_full_disk(2000, [&] {
    const auto full = monitor::tensorboard_sink(dir / "full", sample_run());
    for (int64_t step = 1; step <= 100; ++step) {
      full->row(sample_row(step));
      full->flush();
    }
  }));
  // Only whole records are left.
  size_t bytes = 0;
  const std::string left = read_file(join_path(dir / "full", list_directory(dir / "full").at(0)), 1 << 20);
  for (const std::string& record : test::tf_records(left)) bytes += record.size() + 16;
  CHECK(bytes == left.size());
}
