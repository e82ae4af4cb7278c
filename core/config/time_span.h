#pragma once
// Spans of time as NeMo writes them: DD:HH:MM:SS.

#include <cstdint>
#include <optional>
#include <string_view>

namespace nrl {

/// Seconds of "DD:HH:MM:SS", where leading fields may be missing: "30:00" is half an hour. Fields have at
/// most 4 digits; hours below 24, minutes and seconds below 60, unless they come first. Unset: it is no span.
std::optional<int64_t> parse_time_span(std::string_view text);

}  // namespace nrl
