#pragma once
// Reads documents from text files, directories and JSON lines, optionally compressed.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/text_stream.h"
#include "core/io/json.h"

namespace nrl::data {

struct InputFile {
  std::string path;
  int64_t bytes = 0;  ///< on disk
  Compression compression = Compression::none;
  bool jsonl = false;         ///< one document per line, else the file is one document
  bool json_as_text = false;  ///< a .json file whose first line is not such a document
};

/// Lists the input files. Directories are replaced by the regular files below them, sorted by the bytes of
/// their paths, without paths that begin with `except`. JSON lines are recognized by the name (.jsonl,
/// .ndjson), or, for .json, by a first line that is a JSON object with a text under `jsonl_key` (any JSON
/// object if `jsonl_key` is empty); an additional .gz or .zst means compression. Throws Error: `no_input`;
/// `data` for Parquet files.
std::vector<InputFile> list_inputs(const std::vector<std::string>& inputs, const std::string& except,
                                   const std::string& jsonl_key);

/// A text file, or whole lines of a JSONL file.
struct TextChunk {
  const InputFile* file = nullptr;
  int64_t first_line = 1;
  int64_t offset = 0;      ///< in the (decompressed) text
  int64_t file_bytes = 0;  ///< bytes of the file on disk that it corresponds to
  bool last = false;       ///< the last chunk of its file
  std::string text = {};
};

inline constexpr size_t default_chunk_bytes = size_t{1} << 20;

/// Reads a file as one or more chunks; `take` returns false to stop. A chunk of lines has about `chunk_bytes`
/// bytes, or is one longer line. Memory is bounded regardless of the compression ratio. Throws Error:
/// `no_input`, `io`, `data` (damaged or truncated; a line or document that is too long).
void read_chunks(const InputFile& file, const std::function<bool(TextChunk&&)>& take,
                 size_t chunk_bytes = default_chunk_bytes);

/// Calls `take` for every line of a chunk of a JSONL file that is not blank, with its number in the file. The
/// line is a view into the chunk, without its end and without a byte order mark at the beginning of the file.
void for_each_line(const TextChunk& chunk,
                   const std::function<void(std::string_view line, int64_t number)>& take);

/// Parses a line of a JSONL file: a JSON object of at most 64 MiB. `source`: "FILE:line", with which errors
/// begin: "FILE:line:column: ...". Throws Error (`data`).
JsonValue parse_json_line(std::string_view line, const std::string& source,
                          size_t most_values = JsonLimits().values);
/// The message of an error about a value of such a line. The parser counts lines within the line:
/// "FILE:7:1:12" becomes "FILE:7:12".
std::string place_in_line(std::string message, const std::string& source);

/// Action for a document that is not valid UTF-8 or contains a NUL byte: stop with an error; replace every
/// maximal subpart of an ill-formed sequence (as the Unicode Standard recommends) and every NUL by U+FFFD;
/// skip the document.
enum class InvalidUtf8 { error, replace, skip };
/// The text with the replacements of InvalidUtf8::replace.
std::string with_replacements(std::string_view text);
/// Action for a line of a JSONL file that is not a JSON object with a text under the key.
enum class BadLine { error, skip };

struct ChunkOptions {
  std::string jsonl_key = "text";
  InvalidUtf8 invalid_utf8 = InvalidUtf8::error;
  BadLine bad_line = BadLine::error;
};

/// Number of incidents of one kind, and the locations of the first ones: "FILE:LINE: ...".
struct Incidents {
  static constexpr size_t max_locations = 5;
  int64_t count = 0;
  std::vector<std::string> locations;

  void add(std::string location);
  void add(const Incidents& other);
};
struct ChunkCounts {
  Incidents invalid_utf8;  ///< documents with replacements, or skipped
  Incidents bad_lines;
};

/// Calls `document` for every non-empty document of a chunk; the view is valid during the call. Throws Error
/// (`data`) "FILE:line: ..." for input that `options` do not accept.
void for_each_document(const TextChunk& chunk, const ChunkOptions& options, ChunkCounts& counts,
                       const std::function<void(std::string_view)>& document);

}  // namespace nrl::data
