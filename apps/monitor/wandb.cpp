#include "apps/monitor/wandb.h"

#include <cmath>
#include <ctime>
#include <filesystem>
#include <map>
#include <optional>

#include <protozero/pbf_reader.hpp>
#include <protozero/pbf_writer.hpp>

#include "apps/monitor/settings.h"
#include "core/base/error.h"
#include "core/io/append_file.h"
#include "core/io/record_files.h"

namespace nrl::monitor {
namespace {

using protozero::pbf_writer;

// The format, a magic number and the version.
constexpr std::string_view file_header{":W&B\xe1\xbe\x00", 7};

std::string json_of(double value) {
  if (std::isnan(value)) return R"("NaN")";
  if (std::isinf(value)) return value > 0 ? R"("Infinity")" : R"("-Infinity")";
  return JsonValue(value).dump();
}

// A new directory for a session, named by its local time, as W&B does; by a later one if it is taken.
std::string session_directory(const std::string& directory, double time, const std::string& id) {
  for (auto seconds = static_cast<std::time_t>(time);; ++seconds) {
    std::tm local{};
    ::localtime_r(&seconds, &local);
    char text[32] = {};
    std::strftime(text, sizeof text, "%Y%m%d_%H%M%S", &local);
    const std::string path = join_path(directory, fmt::format("offline-run-{}-{}", text, id));
    if (!path_exists(path)) return path;
  }
}

// HistoryItem, SummaryItem and ConfigItem: key = 1, value_json = 16.
void add_item(pbf_writer& out, uint32_t field, std::string_view key, const std::string& json) {
  pbf_writer item(out, field);
  item.add_string(1, key.data(), key.size());
  item.add_string(16, json);
}

// The keys of a configuration as sections; W&B would not show "policy.optimizer.lr" as one.
JsonValue nested(const std::vector<std::pair<std::string, std::string>>& settings) {
  JsonValue root = JsonValue::object();
  for (const auto& [path, value] : settings) {
    JsonObject* section = &root.members();
    size_t begin = 0;
    for (size_t dot; (dot = path.find('.', begin)) != std::string::npos; begin = dot + 1) {
      const std::string name = path.substr(begin, dot - begin);
      JsonValue* inner = section->find(name);
      if (inner == nullptr || !inner->is_object()) inner = &section->set(name, JsonValue::object());
      section = &inner->members();
    }
    section->set(path.substr(begin), setting_value(value));
  }
  return root;
}

// The step of a record of history; unset for other records, -1 for one that is malformed.
std::optional<int64_t> history_step(const std::string& data) {
  try {
    protozero::pbf_reader record(data);
    if (!record.next(2)) return std::nullopt;
    protozero::pbf_reader history = record.get_message();
    if (!history.next(2)) return -1;
    protozero::pbf_reader step = history.get_message();
    return step.next(1) ? step.get_int64() : 0;
  } catch (const protozero::exception&) {
    return -1;
  }
}

// Cuts the files of earlier sessions at their first row of the step `first` or a later one. Of a file that
// was uploaded, W&B has these rows already.
void drop_rows_from(const std::string& directory, const std::string& id, int64_t first) {
  for (const std::string& name : list_directory(directory)) {
    if (!name.starts_with("offline-run-") || !name.ends_with("-" + id)) continue;
    const std::string path = join_path(join_path(directory, name), fmt::format("run-{}.wandb", id));
    if (!path_exists(path) || path_exists(path + ".synced")) continue;
    const File file = File::open_read(path);
    LevelLogReader reader(file, file_header.size());
    while (const auto record = reader.next()) {
      const auto step = history_step(record->data);
      if (!step || (*step >= 0 && *step < first)) continue;
      std::filesystem::resize_file(path, record->offset);
      break;
    }
  }
}

class Wandb : public Sink {
 public:
  Wandb(const std::string& directory, const WandbConfig& config, const RunInfo& run)
      : run_(run), all_(directory), directory_(session_directory(directory, run.time, run.id)) {
    std::filesystem::create_directories(directory_);
    if (run.resumed) drop_rows_from(directory, run.id, run.first_row());
    file_ = AppendFile(join_path(directory_, fmt::format("run-{}.wandb", run.id)));
    waiting_ = file_header;
    record([](pbf_writer& r) {
      pbf_writer header(r, 21);
      pbf_writer version(header, 1);
      version.add_string(1, "0.31.0");  // producer
      version.add_string(2, "0.0.1");   // the oldest reader
    });
    record([&](pbf_writer& r) { add_run(r, config); });
    flush();
  }

  std::string_view name() const override { return "wandb"; }

  // A row of history has a step of its own: the rows of a step are joined.
  void row(const Row& row) override {
    begin_step(row.step, row.time);
    for (const auto& [name, value] : row.values) {
      add_value(name, json_of(value));
      if (name == "train/loss") add_value("training_loss", json_of(value));
    }
  }

  void text(int64_t step, double time, std::string_view tag, std::string_view text) override {
    begin_step(step, time);
    add_value(std::string(tag), JsonValue(text).dump());
  }

  void end_step() override { write_step(); }

  void flush() override {
    if (waiting_.empty()) return;
    file_.require_name();
    file_.append(waiting_);
    waiting_.clear();
  }

  void close(int64_t, double time, int exit_code) override {
    write_step();
    record([&](pbf_writer& r) {
      pbf_writer summary(r, 3);
      for (const auto& [name, json] : summary_) add_item(summary, 1, name, json);
    });
    record([&](pbf_writer& r) {
      pbf_writer exit(r, 18);
      exit.add_int32(1, exit_code);
      exit.add_int32(2, static_cast<int32_t>(time - run_.created));
    });
    flush();
  }

  std::string next() const override {
    return "wandb sync " + (run_.resumed ? join_path(all_, "offline-run-*-" + run_.id) : directory_);
  }

 private:
  void add_run(pbf_writer& r, const WandbConfig& config) const {
    pbf_writer run(r, 17);
    run.add_string(1, run_.id);
    if (config.entity) run.add_string(2, *config.entity);
    if (config.project) run.add_string(3, *config.project);
    {
      pbf_writer c(run, 4);
      const JsonValue settings = nested(run_.settings);
      for (const JsonMember& m : settings.members()) add_item(c, 1, m.key, m.value.dump());
    }
    if (config.group) run.add_string(6, *config.group);
    run.add_string(8, config.name.value_or(run_.name));
    run.add_string(13, run_.host);
    if (run_.resumed) run.add_int64(14, run_.first_row());
    {
      pbf_writer time(run, 17);
      time.add_int64(1, static_cast<int64_t>(run_.time));
      time.add_int32(2, static_cast<int32_t>((run_.time - std::floor(run_.time)) * 1e9));
    }
    if (run_.resumed) run.add_bool(24, true);
  }

  template <class F>
  void record(const F& fill) {
    std::string data;
    pbf_writer record(data);
    record.add_int64(1, ++records_);
    fill(record);
    waiting_ += frames_.frame(data);
  }

  void begin_step(int64_t step, double time) {
    if (step_ && *step_ != step) write_step();
    if (step_) return;
    step_ = step;
    add_value("_step", std::to_string(step));
    add_value("_timestamp", json_of(time));
    add_value("_runtime", json_of(time - run_.created));
  }

  void add_value(const std::string& name, std::string json) {
    values_.emplace_back(name, json);
    summary_[name] = std::move(json);
  }

  void write_step() {
    if (!step_) return;
    record([&](pbf_writer& r) {
      pbf_writer history(r, 2);
      for (const auto& [name, json] : values_) add_item(history, 1, name, json);
      pbf_writer step(history, 2);
      step.add_int64(1, *step_);
    });
    step_.reset();
    values_.clear();
  }

  RunInfo run_;
  std::string all_, directory_;  // of all sessions, and of this one
  AppendFile file_;
  LevelLogFrames frames_{file_header.size()};
  std::string waiting_;
  int64_t records_ = 0;
  std::optional<int64_t> step_;                              // of the row that is not complete
  std::vector<std::pair<std::string, std::string>> values_;  // its values, as JSON
  std::map<std::string, std::string> summary_;               // the last value of each name
};

}  // namespace

std::unique_ptr<Sink> wandb_sink(const std::string& directory, const WandbConfig& config,
                                 const RunInfo& run) {
  return std::make_unique<Wandb>(directory, config, run);
}

}  // namespace nrl::monitor
