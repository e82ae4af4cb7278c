#include "apps/monitor/mlflow.h"

#include <charconv>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>

#include "core/base/error.h"
#include "core/io/append_file.h"
#include "core/io/json.h"

namespace nrl::monitor {
namespace {

constexpr uint64_t max_metric_bytes = uint64_t{1} << 30, max_meta_bytes = 1 << 20;
constexpr size_t max_parameter = 6000;  // MLflow's limit
enum class RunStatus { running = 1, finished = 3, failed = 4, killed = 5 };

int64_t milliseconds(double time) {
  return static_cast<int64_t>(std::llround(time * 1e3));
}

// A double-quoted YAML scalar: JSON is YAML.
std::string quoted(const std::string& text) {
  return JsonValue(text).dump();
}

std::string number_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return JsonValue(value).dump();
}

// The value of `key` in a meta.yaml, one flat mapping; empty if there is none.
std::string meta_value(const std::string& text, std::string_view key) {
  const std::string begin = fmt::format("{}: ", key);
  size_t at = text.starts_with(begin) ? 0 : text.find("\n" + begin);
  if (at == std::string::npos) return {};
  at = text.find(": ", at) + 2;
  std::string value = text.substr(at, text.find('\n', at) - at);
  if (value.size() >= 2 && value.front() == '\'' && value.back() == '\'')
    return value.substr(1, value.size() - 2);
  if (value.size() >= 2 && value.front() == '"') return parse_json(value, "meta.yaml").as_string();
  return value;
}

// The directory of the experiment `name` in the store, and its id; a new one if there is none.
std::string experiment_id(const std::string& store, const std::string& name, int64_t now) {
  uint64_t number = 14695981039346656037ULL;  // FNV-1a: the same name gets the same id
  for (const char c : name) number = (number ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  const std::string fresh =
      name == "Default" ? "0" : fmt::format("{:018}", number % 1'000'000'000'000'000'000U);
  for (const std::string& id : list_directory(store)) {
    const std::string meta = join_path(join_path(store, id), "meta.yaml");
    if (path_exists(meta) && meta_value(read_file(meta, max_meta_bytes), "name") == name) return id;
  }
  const std::string directory = join_path(store, fresh);
  std::filesystem::create_directories(directory);
  write_file_atomic(join_path(directory, "meta.yaml"),
                    fmt::format("artifact_location: {}\ncreation_time: {}\nexperiment_id: '{}'\n"
                                "last_update_time: {}\nlifecycle_stage: active\nname: {}\n",
                                quoted(directory), now, fresh, now, quoted(name)));
  return fresh;
}

// The step of "MILLISECONDS VALUE STEP"; -1: something else.
int64_t metric_step(std::string_view line) {
  const size_t first = line.find(' '), last = line.rfind(' ');
  if (first == std::string_view::npos || first == last) return -1;
  int64_t step = -1;
  const auto result = std::from_chars(line.data() + last + 1, line.data() + line.size(), step);
  return result.ec == std::errc() && result.ptr == line.data() + line.size() ? step : -1;
}

// Keeps the lines of steps before `first`. An incomplete last line, left by a crash, goes.
void drop_steps_from(const std::string& path, int64_t first) {
  const std::string text = read_file(path, max_metric_bytes);
  std::string kept;
  int64_t number = 1;
  for (size_t begin = 0; begin < text.size(); ++number) {
    const size_t end = text.find('\n', begin);
    if (end == std::string::npos) break;
    const int64_t step = metric_step(std::string_view(text).substr(begin, end - begin));
    if (step < 0)
      fail(Exit::data,
           "{}:{}: not a metric of MLflow: expected \"milliseconds value step\". Fix: move {} away", path,
           number, path);
    if (step < first) kept += text.substr(begin, end + 1 - begin);
    begin = end + 1;
  }
  if (kept.size() != text.size()) write_file_atomic(path, kept);
}

class Mlflow : public Sink {
 public:
  Mlflow(const std::string& directory, const MlflowConfig& config, const RunInfo& run)
      : run_(run), run_name_(config.run_name.value_or(run.name)), given_(directory) {
    store_ = std::filesystem::absolute(directory).lexically_normal().string();
    std::filesystem::create_directories(store_);
    experiment_ = experiment_id(store_, config.experiment_name.value_or("Default"), milliseconds(run.time));
    directory_ = join_path(join_path(store_, experiment_), run.id);
    for (const char* name : {"metrics", "params", "tags", "artifacts"})
      std::filesystem::create_directories(join_path(directory_, name));
    write_meta(RunStatus::running, 0);
    write("tags/mlflow.runName", run_name_);
    write("tags/mlflow.source.name", "nrl-train");
    for (const auto& [key, value] : run.settings) write("params/" + key, value.substr(0, max_parameter));
    for (const auto& entry : std::filesystem::recursive_directory_iterator(join_path(directory_, "metrics")))
      if (entry.is_regular_file()) drop_steps_from(entry.path(), run.first_row());
  }

  std::string_view name() const override { return "mlflow"; }

  void row(const Row& row) override {
    for (const auto& [name, value] : row.values)
      waiting_[name] += fmt::format("{} {} {}\n", milliseconds(row.time), number_text(value), row.step);
  }

  void text(int64_t step, double, std::string_view tag, std::string_view text) override {
    const std::string directory = join_path(join_path(directory_, "artifacts"), tag);
    if (!is_directory(directory)) std::filesystem::create_directory(directory);
    write(fmt::format("artifacts/{}/step-{:08}.txt", tag, step), text);
  }

  void flush() override {
    // A directory of a metric is made when it is needed, which must not bring a removed store back.
    if (!is_directory(join_path(directory_, "metrics"))) fail(Exit::io, "{} was removed", directory_);
    for (auto& [name, lines] : waiting_) {
      if (lines.empty()) continue;
      const std::string path = join_path(join_path(directory_, "metrics"), name);
      if (known_.insert(name).second) std::filesystem::create_directories(parent_path(path));
      AppendFile(path).append(lines);
      lines.clear();
    }
  }

  void close(int64_t, double time, int exit_code) override {
    flush();
    const bool stopped = exit_code == static_cast<int>(Exit::stopped);
    write_meta(exit_code == 0 ? RunStatus::finished : stopped ? RunStatus::killed : RunStatus::failed, time);
  }

  std::string next() const override {
    return fmt::format("mlflow migrate-filestore --source {} --target sqlite:///mlflow.db", given_);
  }

 private:
  void write(const std::string& name, std::string_view text) const {
    const std::string path = join_path(directory_, name);
    std::filesystem::remove(path);
    AppendFile(path).append(text);
  }

  void write_meta(RunStatus status, double end) const {
    write_file_atomic(
        join_path(directory_, "meta.yaml"),
        fmt::format("artifact_uri: {}\nend_time: {}\nentry_point_name: ''\nexperiment_id: '{}'\n"
                    "lifecycle_stage: active\nrun_id: '{}'\nrun_name: {}\nrun_uuid: '{}'\n"
                    "source_name: ''\nsource_type: 4\nsource_version: ''\nstart_time: {}\nstatus: {}\n"
                    "tags: []\nuser_id: ''\n",
                    quoted(join_path(directory_, "artifacts")),
                    status == RunStatus::running ? "null" : std::to_string(milliseconds(end)), experiment_,
                    run_.id, quoted(run_name_), run_.id, milliseconds(run_.created),
                    static_cast<int>(status)),
        status == RunStatus::running ? Durable::no : Durable::yes);  // a resumed run writes it again
  }

  RunInfo run_;
  std::string run_name_, given_, store_, experiment_, directory_;  // given_: the store as the user wrote it
  std::map<std::string, std::string> waiting_;                     // lines by metric
  std::set<std::string> known_;                                    // metrics whose directory exists
};

}  // namespace

std::string mlflow_directory(const std::string& uri) {
  constexpr std::string_view scheme = "file://";
  return uri.starts_with(scheme) ? uri.substr(scheme.size()) : uri;
}

std::unique_ptr<Sink> mlflow_sink(const std::string& directory, const MlflowConfig& config,
                                  const RunInfo& run) {
  return std::make_unique<Mlflow>(directory, config, run);
}

}  // namespace nrl::monitor
