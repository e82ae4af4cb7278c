#pragma once
// Files of records, and the examples made of them as text, for tests.

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "apps/data/examples/example_set.h"
#include "apps/data/tokenizer.h"
#include "core/io/crc32c.h"
#include "core/io/json.h"
#include "tests/io/io_test_util.h"

namespace nrl::test {

/// A template of our own wording. The end token ends a turn.
inline constexpr const char* plain_turns =
    "{% for m in messages %}"
    "{% if loop.index0 > 0 and messages[loop.index0 - 1].role == m.role %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}"
    "{{ '<|' ~ m.role ~ '|>' ~ m.content ~ eos_token ~ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}";

/// Records in a temporary directory, and options to open them.
struct Records {
  TemporaryDirectory dir{TemporaryDirectory::Where::memory};
  data::ExampleOptions options;
  std::shared_ptr<const data::Tokenizer> tokenizer;

  explicit Records(const std::string& lines, const std::string& chat_template = "none",
                   const std::string& name = "data.jsonl")
      : tokenizer(data::make_byte_tokenizer()) {
    write_file_atomic(dir / name, lines);
    options.inputs = {dir / name};
    options.max_length = 4096;
    options.chat_template = chat_template;
  }
  std::shared_ptr<const data::ExampleSet> open(int threads = 1) const {
    return data::open_examples(options, *tokenizer, threads);
  }
  /// The message of the error without the directory.
  Caught error() const {
    Caught caught = error_of([&] { open(); });
    for (size_t at; (at = caught.text.find(dir.path() + "/")) != std::string::npos;)
      caught.text.erase(at, dir.path().size() + 1);
    return caught;
  }
};

/// The text of a sequence, loss tokens in brackets, the end token of the bytes as $.
inline std::string marked(const data::ExampleSet& set, const data::Tokenizer& tokenizer, int64_t example,
                          int sequence = 0) {
  std::string text;
  const auto ids = set.ids(example, sequence);
  bool inside = false;
  for (size_t t = 0; t < ids.size(); ++t) {
    if (const bool loss = set.in_loss(example, sequence, static_cast<int64_t>(t)); loss != inside) {
      text += loss ? '[' : ']';
      inside = loss;
    }
    text += tokenizer.eos() == ids[t] ? "$" : tokenizer.decode(ids.subspan(t, 1));
  }
  return inside ? text + ']' : text;
}
inline std::string marked(const Records& records, int64_t example = 0, int sequence = 0) {
  return marked(*records.open(), *records.tokenizer, example, sequence);
}

/// The largest cache of a test.
inline constexpr uint64_t most_cache_bytes = uint64_t{1} << 30;

/// Corrects the checksums of a changed cache.
inline void seal(std::string& cache) {
  const auto put = [&](size_t at, uint32_t value) { std::memcpy(cache.data() + at, &value, sizeof value); };
  put(16, crc32c(cache.data() + 4096, cache.size() - 4096));
  put(12, 0);
  put(12, crc32c(cache.data(), 4096));
}

/// The key in the text of a cache.
inline std::string key_in(const std::string& cache) {
  const size_t facts = cache.find("{\"key\":");
  return parse_json(cache.substr(facts, cache.rfind('}') + 1 - facts), "facts").get_string("key");
}

}  // namespace nrl::test
