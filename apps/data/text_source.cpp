#include "apps/data/text_source.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>

#include "apps/data/json_line.h"
#include "apps/data/unicode.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::data {
namespace {

namespace fs = std::filesystem;

constexpr int64_t max_text_bytes =
    (int64_t{1} << 31) - 1;  // so that token counts of a document fit in 31 bits
// A compressed document may expand to this multiple of its size, or to free_bytes if that is more.
constexpr int64_t max_expansion = 200, free_bytes = int64_t{64} << 20;
constexpr size_t max_line_bytes = size_t{64} << 20;
constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";
constexpr std::string_view replacement = "\xEF\xBF\xBD";  // U+FFFD

// The text of a JSONL line; an Error (`data`) begins with `source`.
std::string text_of_line(std::string_view line, const std::string& source, const std::string& key) {
  const JsonValue value = parse_json_line(line, source);
  try {
    return value.get_string(key);
  } catch (const Error& e) {
    fail(Exit::data, "{}", place_in_line(e.what(), source));
  }
}

// Reads a stream in pieces of whole lines. `take(text, offset, last)` returns false to stop.
void read_lines(TextStream& stream, const InputFile& input, size_t block_bytes,
                const std::function<bool(std::string&&, int64_t, bool)>& take) {
  std::string rest;
  int64_t offset = 0, line = 1;
  while (true) {
    const size_t kept = rest.size();
    rest.resize(kept + block_bytes);
    const size_t count = stream.read(rest.data() + kept, block_bytes);
    rest.resize(kept + count);
    const bool last = count < block_bytes;
    const size_t end = last ? rest.size() : rest.rfind('\n') + 1;
    if (end == 0 && !last) {
      if (rest.size() > max_line_bytes)
        fail(Exit::data, "{}:{}: the line is too long: more than {}; expected one JSON object per line",
             input.path, line, human_bytes(max_line_bytes));
      continue;
    }
    std::string text = rest.substr(0, end);
    rest.erase(0, end);
    line += std::count(text.begin(), text.end(), '\n');
    if (!take(std::move(text), offset, last) || last) return;
    offset += static_cast<int64_t>(end);
  }
}

bool begins_with_json_line(const InputFile& file, const std::string& key) {
  TextStream stream(file.path, file.compression);
  bool found = false;
  try {
    read_lines(stream, file, default_chunk_bytes, [&](std::string&& text, int64_t, bool) {
      std::string_view line = text;
      if (line.starts_with(byte_order_mark)) line.remove_prefix(byte_order_mark.size());
      const JsonValue value = parse_json_line(line.substr(0, line.find('\n')), file.path);
      if (!key.empty()) (void)value.get_string(key);
      found = true;
      return false;
    });
  } catch (const Error&) {  // not JSON lines; damaged files are reported when they are read
  }
  return found;
}

InputFile describe(const fs::path& path, const std::string& jsonl_key) {
  std::error_code error;
  const auto bytes = fs::file_size(path, error);
  if (error) fail(Exit::no_input, "{}: cannot read: {}", path.string(), error.message());
  InputFile file{.path = path.string(),
                 .bytes = static_cast<int64_t>(bytes),
                 .compression = compression_of(path.string())};
  const fs::path name = file.compression == Compression::none ? path : path.stem();
  if (name.extension() == ".parquet")
    fail(Exit::data,
         "{0}: Parquet files are not supported; expected text or JSON lines. Fix: convert it, for example "
         "with python3 -c \"import pandas; pandas.read_parquet('{0}').to_json('data.jsonl', "
         "orient='records', lines=True)\"",
         file.path);
  const bool json = name.extension() == ".json";
  file.jsonl = name.extension() == ".jsonl" || name.extension() == ".ndjson" ||
               (json && begins_with_json_line(file, jsonl_key));
  file.json_as_text = json && !file.jsonl;
  return file;
}

void list_directory_tree(const fs::path& directory, const fs::path& except, std::vector<fs::path>& out) {
  std::vector<fs::path> paths;
  try {
    for (const auto& entry : fs::recursive_directory_iterator(directory)) {
      std::error_code error;
      if (entry.is_regular_file(error) &&
          !fs::absolute(entry.path()).lexically_normal().string().starts_with(except.string()))
        paths.push_back(entry.path());
    }
  } catch (const fs::filesystem_error& e) {
    fail(Exit::no_input, "{}: cannot read the directory: {}", directory.string(), e.code().message());
  }
  std::sort(paths.begin(), paths.end(),
            [](const fs::path& a, const fs::path& b) { return a.native() < b.native(); });
  out.insert(out.end(), paths.begin(), paths.end());
}

// The first NUL byte or byte of invalid UTF-8, or npos.
size_t find_bad_byte(std::string_view text) {
  return std::min(text.find('\0'), find_invalid_utf8(text));
}

// Length in bytes of the maximal subpart of the ill-formed sequence at `at`, or of a NUL (The Unicode
// Standard, 3.9): the longest prefix of a well-formed sequence, at least one byte.
size_t subpart_bytes(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : 0; };
  const uint8_t first = byte(at);
  const size_t length = first >= 0xF0 && first <= 0xF4 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4) return 1;
  const uint8_t low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  if (byte(at + 1) < low || byte(at + 1) > high) return 1;
  size_t count = 2;
  while (count < length && (byte(at + count) & 0xC0) == 0x80) ++count;
  return count;
}

/// Applies ChunkOptions to a document of a chunk.
struct RawText {
  const TextChunk& chunk;
  const ChunkOptions& options;
  ChunkCounts& counts;

  // The text to use: `text` itself, `storage` with replacements, or unset if the document is skipped.
  std::optional<std::string_view> valid(std::string_view text, int64_t line, std::string& storage) const {
    const size_t bad = find_bad_byte(text);
    if (bad == std::string_view::npos) return text;
    const auto before = text.substr(0, bad);
    const std::string location =
        fmt::format("{}:{}: not UTF-8 text: byte 0x{:02x} at byte {} of the {}", chunk.file->path,
                    line + std::count(before.begin(), before.end(), '\n'), static_cast<uint8_t>(text[bad]),
                    chunk.offset + (text.data() - chunk.text.data()) + static_cast<ptrdiff_t>(bad),
                    chunk.file->compression == Compression::none ? "file" : "decompressed text");
    if (options.invalid_utf8 == InvalidUtf8::error)
      fail(Exit::data,
           "{}; expected UTF-8. Fix: convert the file (iconv -f LATIN1 -t UTF-8), or use --invalid-utf8 "
           "replace (by U+FFFD) or --invalid-utf8 skip (the document)",
           location);
    counts.invalid_utf8.add(location);
    if (options.invalid_utf8 == InvalidUtf8::skip) return std::nullopt;
    return storage = with_replacements(text);
  }
};

}  // namespace

std::string with_replacements(std::string_view text) {
  std::string out;
  for (size_t bad; (bad = find_bad_byte(text)) != std::string_view::npos;) {
    out += text.substr(0, bad);
    out += replacement;
    text.remove_prefix(bad + subpart_bytes(text, bad));
  }
  return out += text;
}

std::vector<InputFile> list_inputs(const std::vector<std::string>& inputs, const std::string& except,
                                   const std::string& jsonl_key) {
  const fs::path excluded = fs::absolute(except).lexically_normal();
  std::vector<fs::path> paths;
  for (const std::string& input : inputs) {
    std::error_code error;
    const auto status = fs::status(input, error);
    if (fs::is_directory(status)) {
      list_directory_tree(input, excluded, paths);
    } else if (fs::is_regular_file(status)) {
      paths.emplace_back(input);
    } else {
      fail(Exit::no_input, "{}: {}", input,
           fs::exists(status) ? "neither a file nor a directory" : "no such file or directory");
    }
  }
  std::vector<InputFile> files;
  for (const fs::path& path : paths) files.push_back(describe(path, jsonl_key));
  return files;
}

void read_chunks(const InputFile& input, const std::function<bool(TextChunk&&)>& take, size_t chunk_bytes) {
  TextStream stream(input.path, input.compression);
  if (!input.jsonl) {
    const int64_t limit = input.compression == Compression::none
                              ? max_text_bytes
                              : std::min(max_text_bytes, std::max(free_bytes, input.bytes * max_expansion));
    std::string text;
    for (size_t count = chunk_bytes; count == chunk_bytes;) {
      const size_t kept = text.size();
      text.resize(kept + chunk_bytes);
      count = stream.read(text.data() + kept, chunk_bytes);
      text.resize(kept + count);
      if (static_cast<int64_t>(text.size()) > limit)
        fail(Exit::data,
             "{}: the document is too long: more than {}{}. Fix: split it, or convert it to JSON lines",
             input.path, human_bytes(static_cast<uint64_t>(limit)),
             input.compression == Compression::none
                 ? ""
                 : fmt::format(", out of {} on disk", human_bytes(static_cast<uint64_t>(input.bytes))));
    }
    take({.file = &input, .file_bytes = stream.file_position(), .last = true, .text = std::move(text)});
    return;
  }
  int64_t line = 1, read = 0;
  read_lines(stream, input, chunk_bytes, [&](std::string&& text, int64_t offset, bool last) {
    TextChunk chunk{.file = &input,
                    .first_line = line,
                    .offset = offset,
                    .file_bytes = stream.file_position() - read,
                    .last = last,
                    .text = std::move(text)};
    read = stream.file_position();
    line += std::count(chunk.text.begin(), chunk.text.end(), '\n');
    return take(std::move(chunk));
  });
}

void for_each_line(const TextChunk& chunk,
                   const std::function<void(std::string_view line, int64_t number)>& take) {
  std::string_view text = chunk.text;
  if (chunk.offset == 0 && text.starts_with(byte_order_mark)) text.remove_prefix(byte_order_mark.size());
  for (int64_t number = chunk.first_line; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.find_first_not_of(" \t\r") != std::string_view::npos) take(line, number);
  }
}

JsonValue parse_json_line(std::string_view line, const std::string& source, size_t most_values) {
  const JsonLimits limits{
      .depth = 64, .string_bytes = max_line_bytes, .text_bytes = max_line_bytes, .values = most_values};
  try {
    JsonValue value = parse_json(line, source, limits);
    if (!value.is_object()) fail(Exit::data, "{}: expected a JSON object, found {}", source, value.kind());
    return value;
  } catch (const Error& e) {
    fail(Exit::data, "{}", place_in_line(e.what(), source));
  }
}

std::string place_in_line(std::string text, const std::string& source) {
  if (text.starts_with(source + ":1:")) text.erase(source.size(), 2);
  return text;
}

void Incidents::add(std::string location) {
  ++count;
  if (locations.size() < max_locations) locations.push_back(std::move(location));
}

void Incidents::add(const Incidents& other) {
  count += other.count;
  for (const std::string& location : other.locations)
    if (locations.size() < max_locations) locations.push_back(location);
}

void for_each_document(const TextChunk& chunk, const ChunkOptions& options, ChunkCounts& counts,
                       const std::function<void(std::string_view)>& document) {
  const RawText raw{chunk, options, counts};
  std::string storage;
  if (!chunk.file->jsonl) {
    std::string_view text = chunk.text;
    if (text.starts_with(byte_order_mark)) text.remove_prefix(byte_order_mark.size());
    if (const auto valid = raw.valid(text, 1, storage); valid && !valid->empty()) document(*valid);
    return;
  }
  for_each_line(chunk, [&](std::string_view line, int64_t number) {
    const auto valid = raw.valid(line, number, storage);
    if (!valid) return;
    std::string content;
    try {
      auto plain =
          valid->size() <= max_line_bytes ? text_of_plain_line(*valid, options.jsonl_key) : std::nullopt;
      content = plain
                    ? *std::move(plain)
                    : text_of_line(*valid, fmt::format("{}:{}", chunk.file->path, number), options.jsonl_key);
    } catch (const Error& e) {
      if (options.bad_line == BadLine::error)
        fail(Exit::data, "{}. Fix: correct the line, or use --on-bad-line skip", e.what());
      counts.bad_lines.add(e.what());
      return;
    }
    if (!content.empty()) document(content);
  });
}

}  // namespace nrl::data
