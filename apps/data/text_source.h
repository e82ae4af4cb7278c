#pragma once
// Documents out of text files, folders of them, and JSON lines.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace nrl::data {

struct InputFile {
  std::string path;
  int64_t bytes = 0;
  bool jsonl = false;    ///< one document a line, by name (.jsonl), else the file is one document
  bool required = true;  ///< named by the user: must be text. Files found in a folder may be skipped
};

/// Files as given; folders become the regular files below them, sorted by path. Paths that begin with
/// `except` are left out of folders. Throws Error (`no_input`).
std::vector<InputFile> list_inputs(const std::vector<std::string>& inputs, const std::string& except);

/// A text file, or whole lines of a JSONL file.
struct TextChunk {
  const InputFile* file = nullptr;
  int64_t first_line = 1;
  int64_t file_bytes = 0;  ///< of the file, up to the end of this chunk minus the chunk before
  std::string text;
};

/// Reads a file as one or more chunks; `take` returns false to stop. Throws Error: `no_input`, `io`, `data`
/// (a line that is too long).
void read_chunks(const InputFile& file, const std::function<bool(TextChunk&&)>& take);

struct ChunkOptions {
  std::string jsonl_key = "text";
  bool skip_bad_lines = false;
};
struct ChunkCounts {
  int64_t binary_files = 0, bad_lines = 0;
};

/// Calls `document` for every document of a chunk that is not empty; the view is valid during the call. A
/// line that is not a JSON object with a text under the key is counted, or an Error (`data`) "FILE:line:
/// ...".
void for_each_document(const TextChunk& chunk, const ChunkOptions& options, ChunkCounts& counts,
                       const std::function<void(std::string_view)>& document);

}  // namespace nrl::data
