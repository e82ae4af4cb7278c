#include "core/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <string>

namespace nrl::log {
namespace {

struct Loggers {
  std::shared_ptr<spdlog::logger> out, err;
  int rank = 0;
  std::string prefix;
};

Loggers& loggers() {
  static Loggers state = [] {
    Loggers made;
    made.out = std::make_shared<spdlog::logger>("out", std::make_shared<spdlog::sinks::stdout_sink_mt>());
    made.err = std::make_shared<spdlog::logger>("err", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    for (auto& logger : {made.out, made.err}) {
      logger->set_pattern("%v");
      logger->flush_on(spdlog::level::trace);
    }
    return made;
  }();
  return state;
}

}  // namespace

void init(int rank, int world_size) {
  loggers().rank = rank;
  loggers().prefix = world_size > 1 ? fmt::format("[rank {}] ", rank) : "";
}

void line(std::string_view text) {
  if (loggers().rank == 0) loggers().out->info(text);
}

void warn_text(std::string_view text) {
  loggers().err->warn("{}warn: {}", loggers().prefix, text);
}

void error_text(std::string_view text) {
  loggers().err->error("{}error: {}", loggers().prefix, text);
}

}  // namespace nrl::log
