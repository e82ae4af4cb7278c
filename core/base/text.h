#pragma once
// Small text utilities for messages.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace nrl {

/// Levenshtein distance, used for "did you mean".
int edit_distance(std::string_view a, std::string_view b);

/// The candidate nearest to `word`: edit distance at most 2 (1 for words under four letters), or the same
/// word with other separators or case; empty when there is none.
std::string_view nearest(std::string_view word, std::span<const std::string_view> candidates);

/// "1.5 GiB", "640 MiB", "12 B".
std::string human_bytes(uint64_t bytes);

/// "1.24 B", "16.9 M", "512".
std::string human_count(double count);

/// "1 file", "1,204 files": `noun` in the singular, whose plural ends with s.
std::string counted(int64_t number, std::string_view noun);

/// "7h01m", "3m20s", "12s".
std::string human_duration(double seconds);

/// Steps [first, end), counted from 1.
struct StepRange {
  int64_t first = 0, end = 0;
};
/// "3:5" with 1 <= first < end; nothing for other texts.
std::optional<StepRange> parse_step_range(std::string_view text);

/// 1234567 -> "1,234,567".
std::string grouped(int64_t number);

}  // namespace nrl
