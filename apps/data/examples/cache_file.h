#pragma once
// The place of a cache of examples: its name, and the processes that make it.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "apps/data/examples/example_cache.h"
#include "apps/data/examples/example_options.h"
#include "apps/data/text_source.h"
#include "apps/data/tokenizer.h"

namespace nrl::data {

/// A text that differs if the examples may. Reads samples of the files and the prompt files. `options` must
/// have a format, and a date if the template prints one. Throws Error (`no_input`, `io`).
std::string example_key(const ExampleOptions& options, const std::vector<InputFile>& files,
                        const Tokenizer& tokenizer, const std::string& template_text);

/// Files NAME.examples-DIGEST.cache in data.cache_dir or beside the first input, NAME. One that was not used
/// for 30 days is removed when another one of NAME is written.
class CacheDirectory {
 public:
  /// Throws nothing for inputs that do not exist.
  explicit CacheDirectory(const ExampleOptions& options);

  /// Begins the paths of all caches and temporary files of this input.
  const std::string& stem() const { return stem_; }
  /// The files that are not caches of this or another input.
  static std::vector<InputFile> without_caches(std::vector<InputFile> files);

  /// Maps the cache of `key`, with `build(path)` before if it is missing or damaged. Only one process of
  /// those that call open() builds it where the directory's file system has locks between them; `waiting` is
  /// called several times per second meanwhile, and may throw. Adds a note about a damaged cache. Throws
  /// Error: `cannot_create`, `io`, and what `build` throws.
  std::unique_ptr<const ExampleCache> open(const std::string& key, int64_t vocab_size, int threads,
                                           const std::function<void(const std::string&)>& build,
                                           const std::function<void()>& waiting,
                                           std::vector<std::string>& notes) const;

 private:
  void remove_unused() const;

  std::string directory_, stem_;
};

}  // namespace nrl::data
