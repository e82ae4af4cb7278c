#include "apps/monitor/tensorboard.h"

#include <algorithm>
#include <charconv>
#include <filesystem>

#include <unistd.h>

#include <protozero/pbf_writer.hpp>

#include "apps/monitor/settings.h"
#include "core/base/error.h"
#include "core/io/append_file.h"
#include "core/io/record_files.h"

namespace nrl::monitor {
namespace {

using protozero::pbf_writer;

constexpr std::string_view file_prefix = "events.out.tfevents.";

// The time in the name of the next file: readers take the files of a directory in the order of their names.
int64_t file_time(const std::string& directory, double now) {
  auto time = static_cast<int64_t>(now);
  for (const std::string& name : list_directory(directory)) {
    if (!name.starts_with(file_prefix)) continue;
    int64_t other = 0;
    std::from_chars(name.data() + file_prefix.size(), name.data() + name.size(), other);
    if (other >= time && other < 9'999'999'999) time = other + 1;  // 10 digits sort as text
  }
  return time;
}

// Event: wall_time = 1, step = 2, and one member that `fill` adds.
template <class F>
std::string event(double time, int64_t step, const F& fill) {
  std::string data;
  pbf_writer event(data);
  event.add_double(1, time);
  if (step != 0) event.add_int64(2, step);
  fill(event);
  return tf_record(data);
}

// Summary (Event 5) with one value (1) of a plugin: tag = 1, metadata = 9 {plugin_data = 1 {plugin_name = 1,
// content = 2}}, and what `fill` adds.
template <class F>
void add_plugin_value(pbf_writer& event, std::string_view tag, std::string_view plugin,
                      const std::string& content, const F& fill) {
  pbf_writer summary(event, 5);
  pbf_writer value(summary, 1);
  value.add_string(1, tag.data(), tag.size());
  {
    pbf_writer metadata(value, 9);
    pbf_writer data(metadata, 1);
    data.add_string(1, plugin.data(), plugin.size());
    if (!content.empty()) data.add_bytes(2, content);
  }
  fill(value);
}

// google.protobuf.Value: number = 2, string = 3, bool = 4.
void add_value(pbf_writer& out, const std::string& yaml) {
  const JsonValue json = setting_value(yaml);
  if (json.is_bool())
    out.add_bool(4, json.as_bool());
  else if (json.is_number())
    out.add_double(2, json.as_double());
  else
    out.add_string(3, json.is_string() ? json.as_string() : yaml);
}

// HParamsPluginData: experiment = 2, session_start_info = 3, session_end_info = 4.
std::string experiment(const RunInfo& run) {
  std::string content;
  pbf_writer data(content);
  pbf_writer experiment(data, 2);
  experiment.add_string(1, run.name);
  experiment.add_double(4, run.created);
  for (const auto& [key, value] : run.settings) {
    pbf_writer info(experiment, 5);  // HParamInfo
    info.add_string(1, key);
    const JsonValue json = setting_value(value);
    info.add_enum(4, json.is_bool() ? 2 : json.is_number() ? 3 : 1);
  }
  for (const std::string_view tag : {"train/loss", "validation/val_loss"}) {
    pbf_writer info(experiment, 6);  // MetricInfo
    pbf_writer name(info, 1);
    name.add_string(2, tag.data(), tag.size());
  }
  return content;
}

std::string session_start(const RunInfo& run) {
  std::string content;
  pbf_writer data(content);
  pbf_writer start(data, 3);
  for (const auto& [key, value] : run.settings) {
    pbf_writer entry(start, 1);  // of a map
    entry.add_string(1, key);
    pbf_writer v(entry, 2);
    add_value(v, value);
  }
  start.add_string(4, run.id);
  start.add_double(5, run.time);
  return content;
}

std::string session_end(double time, int exit_code) {
  std::string content;
  pbf_writer data(content);
  pbf_writer end(data, 4);
  end.add_enum(1, exit_code == 0 ? 1 : 2);  // success, failure
  end.add_double(2, time);
  return content;
}

class Tensorboard : public Sink {
 public:
  Tensorboard(const std::string& directory, const RunInfo& run) : directory_(directory) {
    std::filesystem::create_directories(directory);
    file_ =
        AppendFile(join_path(directory, fmt::format("{}{:010}.{}.{}.0", file_prefix,
                                                    file_time(directory, run.time), run.host, ::getpid())));
    add(event(run.time, 0, [](pbf_writer& e) { e.add_string(3, "brain.Event:2"); }));
    add(event(run.time, run.first_row(), [](pbf_writer& e) {
      pbf_writer log(e, 7);  // SessionLog
      log.add_enum(1, 1);    // START
    }));
    add_hparams(run.time, "_hparams_/experiment", experiment(run));
    add_hparams(run.time, "_hparams_/session_start_info", session_start(run));
    flush();
  }

  std::string_view name() const override { return "tensorboard"; }

  void row(const Row& row) override {
    add(event(row.time, row.step, [&](pbf_writer& e) {
      pbf_writer summary(e, 5);
      for (const auto& [name, number] : row.values) {
        pbf_writer value(summary, 1);
        value.add_string(1, name);
        value.add_float(2, static_cast<float>(number));
      }
    }));
  }

  void text(int64_t step, double time, std::string_view tag, std::string_view text) override {
    add(event(time, step, [&](pbf_writer& e) {
      add_plugin_value(e, tag, "text", {}, [&](pbf_writer& value) {
        pbf_writer tensor(value, 8);
        tensor.add_enum(1, 7);  // DT_STRING
        {
          pbf_writer shape(tensor, 2);
          pbf_writer dimension(shape, 2);
          dimension.add_int64(1, 1);
        }
        tensor.add_bytes(8, text.data(), text.size());
      });
    }));
  }

  void flush() override {
    if (waiting_.empty()) return;
    file_.require_name();
    file_.append(waiting_);
    waiting_.clear();
  }

  void close(int64_t, double time, int exit_code) override {
    add_hparams(time, "_hparams_/session_end_info", session_end(time, exit_code));
    flush();
  }

  std::string next() const override { return "tensorboard --logdir " + directory_; }

 private:
  void add(const std::string& record) { waiting_ += record; }
  void add_hparams(double time, std::string_view tag, const std::string& content) {
    add(event(time, 0, [&](pbf_writer& e) {
      add_plugin_value(e, tag, "hparams", content, [](pbf_writer& value) {
        pbf_writer tensor(value, 8);  // the plugin wants one, and reads the metadata only
        tensor.add_enum(1, 1);        // DT_FLOAT, a scalar
      });
    }));
  }

  std::string directory_;
  AppendFile file_;
  std::string waiting_;
};

}  // namespace

std::unique_ptr<Sink> tensorboard_sink(const std::string& directory, const RunInfo& run) {
  return std::make_unique<Tensorboard>(directory, run);
}

}  // namespace nrl::monitor
