#include "apps/data/text_source.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "apps/data/unicode.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::data {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaxTextBytes = (uint64_t{1} << 31) - 1;  // a document's tokens are counted in 31 bits
constexpr size_t kMaxLineBytes = size_t{64} << 20;
constexpr size_t kBlockBytes = size_t{1} << 20;
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

InputFile describe(const fs::path& path, bool required) {
  std::error_code error;
  const auto bytes = fs::file_size(path, error);
  if (error) fail(Exit::no_input, "{}: cannot read: {}", path.string(), error.message());
  return {path.string(), static_cast<int64_t>(bytes), path.extension() == ".jsonl", required};
}

void list_folder(const fs::path& folder, const std::string& except, std::vector<InputFile>& out) {
  std::vector<fs::path> paths;
  try {
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      std::error_code error;
      if (entry.is_regular_file(error) && !(!except.empty() && entry.path().string().starts_with(except)))
        paths.push_back(entry.path());
    }
  } catch (const fs::filesystem_error& e) {
    fail(Exit::no_input, "{}: cannot read the folder: {}", folder.string(), e.code().message());
  }
  std::sort(paths.begin(), paths.end(),
            [](const fs::path& a, const fs::path& b) { return a.native() < b.native(); });
  for (const fs::path& path : paths) out.push_back(describe(path, false));
}

// One line of a JSONL file; "" stands for a blank line.
std::string text_of_line(std::string_view line, const std::string& source, const std::string& key) {
  static constexpr JsonLimits limits{.depth = 64, .string_bytes = kMaxLineBytes, .text_bytes = kMaxLineBytes};
  try {
    const JsonValue value = parse_json(line, source, limits);
    if (!value.is_object()) fail(Exit::data, "{}: expected a JSON object, found {}", source, value.kind());
    return value.get_string(key);
  } catch (const Error& e) {
    // The parser counts lines inside the line: "FILE:7:1:12" is FILE:7:12.
    std::string text = e.what();
    if (text.starts_with(source + ":1:")) text.erase(source.size(), 2);
    fail(Exit::data, "{}", text);
  }
}

}  // namespace

std::vector<InputFile> list_inputs(const std::vector<std::string>& inputs, const std::string& except) {
  std::vector<InputFile> files;
  for (const std::string& input : inputs) {
    std::error_code error;
    const auto status = fs::status(input, error);
    if (fs::is_directory(status)) {
      list_folder(input, except, files);
    } else if (fs::is_regular_file(status)) {
      files.push_back(describe(input, true));
    } else {
      fail(Exit::no_input, "{}: {}", input,
           fs::exists(status) ? "neither a file nor a folder" : "no such file or folder");
    }
  }
  return files;
}

void read_chunks(const InputFile& input, const std::function<bool(TextChunk&&)>& take) {
  if (!input.jsonl) {
    std::string text = read_file(input.path, kMaxTextBytes);
    const auto bytes = static_cast<int64_t>(text.size());
    take({&input, 1, bytes, std::move(text)});
    return;
  }
  const File file = File::open_read(input.path);
  const uint64_t size = file.size();
  uint64_t at = 0;
  int64_t line = 1;
  std::string rest;
  while (at < size || !rest.empty()) {
    const size_t kept = rest.size();
    const auto count = static_cast<size_t>(std::min<uint64_t>(kBlockBytes, size - at));
    rest.resize(kept + count);
    file.pread_all(rest.data() + kept, count, at);
    at += count;
    size_t end = at == size ? rest.size() : rest.rfind('\n') + 1;
    if (end == 0) {
      if (rest.size() > kMaxLineBytes)
        fail(Exit::data, "{}:{}: the line is longer than {}", input.path, line, human_bytes(kMaxLineBytes));
      continue;
    }
    TextChunk chunk{&input, line, static_cast<int64_t>(end), rest.substr(0, end)};
    line += std::count(chunk.text.begin(), chunk.text.end(), '\n');
    rest.erase(0, end);
    if (!take(std::move(chunk))) return;
  }
}

void for_each_document(const TextChunk& chunk, const ChunkOptions& options, ChunkCounts& counts,
                       const std::function<void(std::string_view)>& document) {
  std::string_view text = chunk.text;
  if (chunk.first_line == 1 && text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  if (!chunk.file->jsonl) {
    const size_t nul = text.find('\0');
    if (const size_t bad = std::min(nul, find_invalid_utf8(text)); bad != std::string_view::npos) {
      if (chunk.file->required)
        fail(Exit::data, "{}:{}: not UTF-8 text: byte 0x{:02x} at offset {}", chunk.file->path,
             1 + std::count(text.begin(), text.begin() + static_cast<ptrdiff_t>(bad), '\n'),
             static_cast<uint8_t>(text[bad]), bad);
      ++counts.binary_files;
    } else if (!text.empty()) {
      document(text);
    }
    return;
  }
  for (int64_t number = chunk.first_line; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    std::string content;
    try {
      content = text_of_line(line, fmt::format("{}:{}", chunk.file->path, number), options.jsonl_key);
    } catch (const Error&) {
      if (!options.skip_bad_lines) throw;
      ++counts.bad_lines;
      continue;
    }
    if (!content.empty()) document(content);
  }
}

}  // namespace nrl::data
