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

/// "did you mean 'NEAR'?" after `before`; empty if `near` is.
std::string did_you_mean(std::string_view near, std::string_view before = "");

/// Length (1 to 4) of the valid UTF-8 sequence at the start of `text`; 0 when it is invalid or empty.
size_t utf8_length(std::string_view text);

/// Length of `text` without an incomplete UTF-8 sequence at its end.
size_t complete_utf8(std::string_view text);

/// `text` made safe for a terminal: control characters except newline and tab (C0, DEL, C1), invalid UTF-8,
/// line separators and bidirectional controls are escaped as \x1b, \xff, \u202e. Every message sink applies
/// it; callers need not.
std::string printable(std::string_view text);

/// The same with one '?' per character, which preserves columns.
std::string masked(std::string_view text);

/// A value quoted in a message: printable, on one line (newlines and tabs escaped), and cut after at most
/// `most` bytes, at a character boundary, with "..." for the rest.
std::string clipped(std::string_view value, size_t most = 200);

/// A whole message as a sink writes it: printable, with the middle of lines above 1000 bytes left out.
/// `indent` precedes every line but the first, so that a newline in a value cannot forge another message.
std::string message_text(std::string_view text, std::string_view indent = "");

/// Most bytes of a warning or an error, without its prefix.
inline constexpr size_t max_message = 3900;

/// Lines cut to at most `most` bytes: the first ones and the last ones, which tell the fix, with the number
/// of those between.
std::string bounded_lines(std::string text, size_t most = max_message);

/// "a, b, c and 7 more": the first `most` items. A separator that begins a new line does so for the last
/// part.
std::string joined(std::span<const std::string> items, std::string_view separator = ", ", size_t most = 10);

/// "a, b or c".
std::string alternatives(std::span<const std::string_view> items);

/// "1.5 GiB", "640 MiB", "12 B".
std::string human_bytes(uint64_t bytes);

/// "1.24 B", "16.9 M", "512".
std::string human_count(double count);

/// "6.2310": a fixed number of digits. "nan" whatever its sign, "inf", "-inf".
std::string decimal(double value, int digits);

/// "1 file", "1,204 files": `noun` in the singular; the plural appends s.
std::string counted(int64_t number, std::string_view noun);

/// "7h01m", "3m20s", "12s".
std::string human_duration(double seconds);

/// Steps [first, end), counted from 1.
struct StepRange {
  int64_t first = 0, end = 0;
};
/// Parses "3:5" with 1 <= first < end; nullopt for other texts.
std::optional<StepRange> parse_step_range(std::string_view text);

/// 1234567 -> "1,234,567".
std::string grouped(int64_t number);

}  // namespace nrl
