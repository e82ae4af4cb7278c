#pragma once
// Documents out of text files, folders of them, and JSON lines, also compressed ones.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/text_stream.h"

namespace nrl::data {

struct InputFile {
  std::string path;
  int64_t bytes = 0;  ///< on disk
  Compression compression = Compression::none;
  bool jsonl = false;         ///< one document a line, else the file is one document
  bool json_as_text = false;  ///< a .json file that does not begin with such a line
};

/// Files as given; directories become the regular files below them, sorted by the bytes of their paths. Paths
/// that begin with `except` are left out of directories. JSON lines are told by the name (.jsonl, .ndjson),
/// or, for .json, by a first line that is a JSON object with a text under `jsonl_key`; .gz and .zst behind it
/// are compressed. Throws Error: `no_input`; `data` for Parquet files.
std::vector<InputFile> list_inputs(const std::vector<std::string>& inputs, const std::string& except,
                                   const std::string& jsonl_key);

/// A text file, or whole lines of a JSONL file.
struct TextChunk {
  const InputFile* file = nullptr;
  int64_t first_line = 1;
  int64_t offset = 0;      ///< in the (decompressed) text
  int64_t file_bytes = 0;  ///< read from the file for it
  bool last = false;       ///< of its file
  std::string text = {};
};

/// Reads a file as one or more chunks; `take` returns false to stop. Memory is bounded whatever a compressed
/// file expands to. Throws Error: `no_input`, `io`, `data` (damaged or cut; a line or a document that is too
/// long).
void read_chunks(const InputFile& file, const std::function<bool(TextChunk&&)>& take);

/// What to do with text that is not valid UTF-8 or holds a NUL byte: stop; put U+FFFD in place of every
/// maximal subpart of an ill-formed sequence (as the Unicode Standard recommends) and of every NUL; leave the
/// document out.
enum class InvalidUtf8 { error, replace, skip };
/// What to do with a line of a JSONL file that is not a JSON object with a text under the key.
enum class BadLine { error, skip };

struct ChunkOptions {
  std::string jsonl_key = "text";
  InvalidUtf8 invalid_utf8 = InvalidUtf8::error;
  BadLine bad_line = BadLine::error;
};

/// How often something happened, and where first: "FILE:LINE: ...".
struct Incidents {
  static constexpr size_t kMostPlaces = 5;
  int64_t count = 0;
  std::vector<std::string> places;

  void add(std::string place);
  void add(const Incidents& other);
};
struct ChunkCounts {
  Incidents invalid_utf8;  ///< documents, replaced in part or left out
  Incidents bad_lines;
};

/// Calls `document` for every document of a chunk that is not empty; the view is valid during the call. What
/// `options` do not allow is an Error (`data`) "FILE:line: ...".
void for_each_document(const TextChunk& chunk, const ChunkOptions& options, ChunkCounts& counts,
                       const std::function<void(std::string_view)>& document);

}  // namespace nrl::data
