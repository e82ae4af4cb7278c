#include "core/base/log.h"

#include <string>

#include "core/base/output.h"
#include "core/base/text.h"

namespace nrl::log {
namespace {

constexpr std::string_view continued = "  ";
int this_rank = 0;
std::string prefix;

}  // namespace

void init(int rank, int world_size) {
  this_rank = rank;
  prefix = world_size > 1 ? fmt::format("[rank {}] ", rank) : "";
}

void line(std::string_view text) {
  if (this_rank == 0) output::write(output::Stream::out, fmt::format("{}\n", message_text(text)));
}

void warn_text(std::string_view text) {
  output::write(output::Stream::err,
                fmt::format("{}warn: {}\n", prefix, bounded_lines(message_text(text, continued))));
}

void error_text(std::string_view text) {
  output::write(output::Stream::err,
                fmt::format("{}error: {}\n", prefix, bounded_lines(message_text(text, continued))));
}

}  // namespace nrl::log
