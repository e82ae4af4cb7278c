#include "apps/nrl-train/nsys.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>

#include <unistd.h>

#include "apps/train/launch/device_choice.h"
#include "core/base/error.h"
#include "core/config/load.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::app {
namespace {

constexpr const char* extra_variable = "NRL_NSYS_EXTRA_OPTIONS";

std::string read_all(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The configuration is read a second time only if something may ask for nsys.
bool mentions_nsys(const ConfigArgs& args) {
  for (const char* name : {nsys_steps_variable, nsys_workers_variable})
    if (const char* value = std::getenv(name); value && *value) return true;
  const auto names = [](const std::string& text) { return text.find("nsys") != std::string::npos; };
  return std::any_of(args.overrides.begin(), args.overrides.end(), names) || names(read_all(args.path));
}

/// This program and its arguments.
std::vector<std::string> own_command() {
  std::vector<std::string> out{std::filesystem::read_symlink("/proc/self/exe").string()};
  const std::string text = read_all("/proc/self/cmdline");
  for (size_t at = text.find('\0') + 1; at != 0 && at < text.size();) {
    const size_t end = std::min(text.find('\0', at), text.size());
    out.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

bool on_path(const char* program) {
  const char* const path = std::getenv("PATH");
  std::string_view rest = path ? path : "";
  while (!rest.empty()) {
    const size_t colon = std::min(rest.find(':'), rest.size());
    if (::access(join_path(std::string(rest.substr(0, colon)), program).c_str(), X_OK) == 0) return true;
    rest.remove_prefix(std::min(colon + 1, rest.size()));
  }
  return false;
}

}  // namespace

std::vector<std::string> nsys_command(const NsysWindow& window, const std::string& log_dir,
                                      const std::string& extra, const std::vector<std::string>& program) {
  std::vector<std::string> out{
      "nsys",
      "profile",
      "--trace=cuda,nvtx,osrt,cublas,cudnn",
      "--capture-range=cudaProfilerApi",
      "--capture-range-end=stop",
      "--kill=none",
      "--stop-on-exit=true",
      "--output=" + join_path(join_path(log_dir, "profile"), "policy_worker_" + window.text() + "_%p")};
  if (!extra.empty()) {
    JsonValue options;
    try {
      options = parse_json(extra, extra_variable);
      for (const JsonMember& m : options.members()) {
        std::string option = (m.key.size() == 1 ? "-" : "--") + m.key;
        const std::string value = m.value.is_string() ? m.value.as_string() : m.value.dump();
        if (m.key.size() == 1) {
          out.push_back(std::move(option));
          if (!value.empty()) out.push_back(value);
        } else {
          out.push_back(value.empty() ? option : option + "=" + value);
        }
      }
    } catch (const Error& e) {
      fail(Exit::usage, "{}. Fix: {} is a JSON object of options of nsys, such as {{\"sample\": \"none\"}}",
           e.what(), extra_variable);
    }
  }
  out.insert(out.end(), program.begin(), program.end());
  return out;
}

void start_under_nsys(const ConfigArgs& args) {
  if (!mentions_nsys(args) || under_profiler()) return;
  const ConfigResult config = load_config(args.path, args.overrides);
  if (!config.ok()) return;  // the run reports why
  const auto window = nsys_window(config.config.profiling);
  if (!window || !window->has_worker() || train::choose_device(config.config.device).type == DeviceType::cpu)
    return;  // the check of the run refuses what cannot be
  if (!on_path("nsys"))
    fail(Exit::unavailable,
         "{}: nsys is not on PATH. Fix: install Nsight Systems, or profiling.enabled: true, which needs no "
         "tool",
         window->source);
  const std::string& log_dir = config.config.logger.log_dir;
  make_directories(join_path(log_dir, "profile"));
  const char* const extra = std::getenv(extra_variable);
  const std::vector<std::string> command = nsys_command(*window, log_dir, extra ? extra : "", own_command());
  std::vector<char*> pointers;
  for (const std::string& word : command) pointers.push_back(const_cast<char*>(word.c_str()));
  pointers.push_back(nullptr);
  // The version that nsys starts must not start nsys again, whatever nsys sets.
  ::setenv("NSYS_PROFILING_SESSION_ID", "nrl-train", 0);
  ::execvp("nsys", pointers.data());
  fail(Exit::unavailable, "nsys cannot be started: {}", std::strerror(errno));
}

}  // namespace nrl::app
