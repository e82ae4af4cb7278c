// The file that keeps examples: when it is made and used, and damage.
#include "apps/data/examples/example_cache.h"

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "apps/data/examples/example_set.h"
#include "apps/data/examples/spool.h"
#include "tests/catch.h"
#include "tests/data/example_files.h"

using namespace nrl;
using namespace nrl::data;
using namespace nrl::test;

namespace {

std::string some_records(int count) {
  std::string lines;
  for (int i = 0; i < count; ++i)
    lines += fmt::format("{{\"prompt\": \"question {}\", \"completion\": \"{}\", \"other\": \"x\"}}\n", i,
                         std::string(static_cast<size_t>(1 + i * 7 % 30), static_cast<char>('a' + i % 26)));
  return lines;
}

std::vector<std::string> caches_in(const std::string& directory) {
  std::vector<std::string> out;
  for (const std::string& name : list_directory(directory))
    if (name.find(".examples-") != std::string::npos) out.push_back(join_path(directory, name));
  return out;
}

// All tokens and masks as one text.
std::string content(const ExampleSet& set) {
  std::string text;
  for (int64_t i = 0; i < set.size(); ++i) {
    text += set.where(i).substr(set.where(i).rfind('/')) +
            fmt::format(" {} {}", set.source_row(i), set.value(i, ExampleValue::margin));
    for (int s = 0; s < set.sequences_per_example(); ++s)
      for (size_t t = 0; t < set.ids(i, s).size(); ++t)
        text += fmt::format(" {}{}", set.ids(i, s)[t], set.in_loss(i, s, static_cast<int64_t>(t)) ? "*" : "");
    text += '\n';
  }
  return text;
}

ino_t inode_of(const std::string& path) {
  struct stat st {};
  REQUIRE(::stat(path.c_str(), &st) == 0);
  return st.st_ino;
}

void make_old(const std::string& path, time_t seconds) {
  const timespec times[2] = {{.tv_sec = ::time(nullptr) - seconds, .tv_nsec = 0},
                             {.tv_sec = ::time(nullptr) - seconds, .tv_nsec = 0}};
  REQUIRE(::utimensat(AT_FDCWD, path.c_str(), times, 0) == 0);
}

}  // namespace

TEST_CASE("examples are made once and then mapped", "[examples][cache]") {
  const Records records(some_records(100));
  const std::string first = content(*records.open());
  const auto caches = caches_in(records.dir.path());
  REQUIRE(caches.size() == 1);
  CHECK(caches[0].ends_with(".cache"));
  const ino_t inode = inode_of(caches[0]);
  CHECK(content(*records.open()) == first);
  CHECK(caches_in(records.dir.path()) == caches);
  CHECK(inode_of(caches[0]) == inode);
}

TEST_CASE("another input, option or tokenizer makes other examples", "[examples][cache]") {
  Records records(some_records(10));
  (void)records.open();
  size_t expected = 1;
  const auto opens_another = [&](const char* change) {
    CAPTURE(change);
    (void)records.open();
    CHECK(caches_in(records.dir.path()).size() == ++expected);
  };
  records.options.max_length = 64;
  opens_another("max_length");
  records.options.train_on = TrainOn::all;
  opens_another("train_on");
  records.options.add_eos = false;
  opens_another("add_eos");
  records.options.vocab_size = 1000;
  opens_another("vocab_size");
  records.options.on_overlong = OnOverlong::drop;
  opens_another("on_overlong");
  records.options.special_tokens_in_text = SpecialTokensInText::error;
  opens_another("special_tokens_in_text");
  records.options.on_bad_record = OnBadRecord::skip;
  opens_another("on_bad_record");
  records.options.output_key = "other";
  opens_another("output_key");
  write_file_atomic(records.dir / "prompt.txt", "{}?");
  records.options.prompt_file = records.dir / "prompt.txt";
  opens_another("prompt_file");
  write_file_atomic(records.dir / "prompt.txt", "{}!");
  opens_another("text of prompt_file");
  records.options.chat_template = plain_turns;
  records.options.add_eos = true;
  opens_another("chat_template");
  records.options.chat_template += " ";
  opens_another("text of chat_template");
  records.options.chat_template_kwargs = JsonValue::object({{"a", 1}});
  opens_another("chat_template_kwargs");
  // The same size, a change in the middle.
  std::string lines = some_records(10);
  lines[lines.find("question 5")] = 'Q';
  write_file_atomic(records.options.inputs[0], lines);
  opens_another("content");
  const std::string before = content(*records.open());
  CHECK(contains(before, fmt::format(" {}*", int{'Q'})));
}

TEST_CASE("the name of the input does not matter, so that a moved directory keeps its cache",
          "[examples][cache]") {
  Records records(some_records(10));
  records.options.cache_dir = records.dir / "cache";
  const std::string first = content(*records.open());
  rename_path(records.options.inputs[0], records.dir / "data.jsonl.new");
  make_directory(records.dir / "moved");
  rename_path(records.dir / "data.jsonl.new", records.dir / "moved/data.jsonl");
  records.options.inputs[0] = records.dir / "moved/data.jsonl";
  const auto set = records.open();
  CHECK(content(*set) == first);
  CHECK(set->where(0) == records.dir / "moved/data.jsonl:1");
  CHECK(caches_in(records.dir / "cache").size() == 1);
}

TEST_CASE("a damaged cache is made again", "[examples][cache]") {
  const Records records(some_records(50));
  const std::string first = content(*records.open());
  const std::string path = caches_in(records.dir.path()).at(0);
  const std::string whole = read_file(path, most_cache_bytes);
  const auto check_with = [&](const std::string& damaged) {
    write_file_atomic(path, damaged);
    const auto set = records.open();
    CHECK(content(*set) == first);
    bool noted = false;
    for (const std::string& note : set->notes()) noted = noted || contains(note, "made again");
    CHECK(noted == (damaged != whole));
    CHECK(read_file(path, most_cache_bytes) == whole);
  };
  check_with(whole);
  check_with("");
  check_with(whole.substr(0, 100));
  check_with(whole.substr(0, 4096));
  check_with(whole.substr(0, whole.size() - 1));
  check_with(whole + "x");
  check_with(std::string(whole.size(), '\0'));
  for (size_t at = 0; at < whole.size(); at += at < 64 ? 1 : 257) {
    CAPTURE(at);
    std::string damaged = whole;
    damaged[at] ^= 0x10;
    check_with(damaged);
  }
}

TEST_CASE("a forged index of a cache is refused", "[examples][cache]") {
  const Records records(some_records(5));
  (void)records.open();
  const std::string path = caches_in(records.dir.path()).at(0);
  const std::string whole = read_file(path, most_cache_bytes);
  const size_t facts = whole.find("{\"key\":");
  REQUIRE(facts != std::string::npos);
  const std::string key = key_in(whole);
  CHECK(ExampleCache(path, key, 257, 2).examples() == 5);
  CHECK(contains(error_of([&] { ExampleCache(path, key + "x", 257, 1); }).text, "other data"));
  CHECK(
      contains(error_of([&] { ExampleCache(path, key, 256, 3); }).text, "ids outside the vocabulary of 256"));
  const auto refused = [&](size_t at, uint64_t value, const char* message) {
    std::string forged = whole;
    std::memcpy(forged.data() + at, &value, sizeof value);
    seal(forged);
    write_file_atomic(path, forged);
    const Caught caught = error_of([&] { ExampleCache(path, key, 257, 1); });
    CHECK(caught.code == static_cast<int>(Exit::data));
    CHECK(contains(caught.text, message));
  };
  refused(24, uint64_t{1} << 60, "out of range");  // examples
  refused(32, uint64_t{1} << 60, "out of range");  // tokens
  refused(24, 6, "bytes; expected");
  uint64_t tokens = 0;
  std::memcpy(&tokens, whole.data() + 32, 8);
  const size_t first = 4096 + (tokens * 4 + 7) / 8 * 8 + (tokens + 63) / 64 * 8;
  refused(first, 1, "inconsistent");
  refused(first + 8, tokens + 1, "inconsistent");
  refused(first + 8, 0, "inconsistent");
  refused(first + 5 * 8, tokens - 1, "inconsistent");
  refused(first + 6 * 8, ~uint64_t{0}, "inconsistent");  // loss tokens
  refused(4096, uint64_t{1} << 31, "ids outside");
  refused(facts, 0, "a NUL byte");
}

TEST_CASE("no mutation of a cache does harm", "[examples][cache][fuzz]") {
  const Records records(some_records(5));
  (void)records.open();
  const std::string path = caches_in(records.dir.path()).at(0);
  const std::string whole = read_file(path, most_cache_bytes);
  const std::string rest = whole.substr(4096);
  int opened = 0;
  for (int i = 0; i < fuzz_iterations() / 40; ++i) {
    std::string text = i % 2 == 0 ? whole.substr(0, 4096) + mutated(rest, static_cast<uint64_t>(i))
                                  : mutated(whole, static_cast<uint64_t>(i));
    if (text.size() >= 4096) seal(text);
    write_file_atomic(path, text);
    const Caught caught = error_of([&] {
      const ExampleCache cache(path, "key", 257, 1);
      ++opened;
    });
    CHECK(caught.code == static_cast<int>(Exit::data));
  }
  CHECK(opened == 0);  // none has that key
}

TEST_CASE("the number of threads does not change a cache", "[examples][cache]") {
  // Several chunks.
  const Records records(some_records(20000));
  const auto one = records.open(1);
  const std::string path = caches_in(records.dir.path()).at(0);
  const std::string first = read_file(path, most_cache_bytes);
  remove_tree(path);
  const auto four = records.open(4);
  CHECK(read_file(path, most_cache_bytes) == first);
  CHECK(four->size() == 20000);
  CHECK(four->source_row(19999) == 19999);
  CHECK(four->where(19999) == records.dir / "data.jsonl:20000");
}

TEST_CASE("the first error in input order is reported by any number of threads", "[examples][cache]") {
  std::string lines = some_records(20000);
  const size_t at = lines.find("question 15000");
  lines.insert(lines.rfind('\n', at) + 1, "{\"prompt\": \"bad\"}\n");
  lines += "{}\n";
  const Records records(lines);
  for (const int threads : {1, 4})
    CHECK(contains(error_of([&] { (void)records.open(threads); }).text, "data.jsonl:15001:"));
  CHECK(caches_in(records.dir.path()).empty());
}

TEST_CASE("duplicates are counted", "[examples][cache]") {
  const std::string one = "{\"prompt\": \"a\", \"completion\": \"b\"}\n";
  Records records(one + "{\"prompt\": \"a\", \"completion\": \"c\"}\n" + one + one +
                  "{\"prompt\": \"\\u0061b\", \"completion\": \"\\u0020\"}\n");
  CHECK(records.open()->counts().duplicates == 2);
  // The same tokens with other masks are no duplicates.
  Records masks("{\"prompt\": \"ab\", \"completion\": \"c\"}\n{\"prompt\": \"a\", \"completion\": \"bc\"}\n");
  CHECK(masks.open()->counts().duplicates == 0);
  masks.options.train_on = TrainOn::all;
  CHECK(masks.open()->counts().duplicates == 1);
}

TEST_CASE("several processes and threads that need a cache at once make it once", "[examples][cache]") {
  const Records records(some_records(3000));
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      // Ends with 1 if it made the cache, with 2 on an error.
      static std::atomic<int> created{0};
      set_file_op_hook([](FileOp op, const std::string& path) {
        if (op == FileOp::create && path.find(".tmp-") != std::string::npos) ++created;
        return 0;
      });
      int code = 2;
      try {
        if (records.open()->size() == 3000) code = created > 0 ? 1 : 0;
      } catch (...) {
      }
      ::_exit(code);
    }
    children.push_back(child);
  }
  int made = 0;
  for (const pid_t child : children) {
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status));
    REQUIRE(WEXITSTATUS(status) < 2);
    made += WEXITSTATUS(status);
  }
  CHECK(made == 1);
  const auto caches = caches_in(records.dir.path());
  REQUIRE(caches.size() == 1);  // no lock, no temporary file

  remove_tree(caches[0]);
  std::vector<std::shared_ptr<const ExampleSet>> sets(4);
  std::vector<std::thread> threads;
  for (auto& set : sets) threads.emplace_back([&] { set = records.open(); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& set : sets) CHECK(content(*set) == content(*sets[0]));
  CHECK(caches_in(records.dir.path()) == caches);
}

TEST_CASE("a process that waits gets the error of the one that makes the cache", "[examples][cache]") {
  const Records records(some_records(20000) + "{}\n");  // several chunks
  std::atomic<bool> making = false, waiting = false, other_made = false;
  Caught first, second;
  std::thread maker([&] {
    first = error_of([&] {
      open_examples(records.options, *records.tokenizer, 1, [&](const ExampleProgress&) {
        making = true;
        while (!waiting) std::this_thread::yield();
      });
    });
    making = true;
  });
  while (!making) std::this_thread::yield();
  std::thread waiter([&] {
    second = error_of([&] {
      open_examples(records.options, *records.tokenizer, 1, [&](const ExampleProgress& progress) {
        (progress.phase == ExampleProgress::Phase::waiting ? waiting : other_made) = true;
      });
    });
  });
  maker.join();
  waiter.join();
  CHECK(contains(first.text, "data.jsonl:20001:1: \"prompt\" is missing"));
  CHECK(second.code == first.code);
  CHECK(second.text == first.text);
  CHECK_FALSE(other_made);
  CHECK(caches_in(records.dir.path()).empty());
}

TEST_CASE("without locks every process makes the cache, with the same content", "[examples][cache]") {
  const Records records(some_records(3000));
  const std::string expected = content(*records.open());
  const std::string path = caches_in(records.dir.path()).at(0);
  remove_tree(path);
  make_directory(path + ".lock");  // cannot be opened as a file
  std::vector<std::shared_ptr<const ExampleSet>> sets(3);
  std::vector<std::thread> threads;
  for (auto& set : sets) threads.emplace_back([&] { set = records.open(); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& set : sets) CHECK(content(*set) == expected);
}

TEST_CASE("a process that is killed while it makes a cache leaves none, and blocks no other",
          "[examples][cache]") {
  const Records records(some_records(200));
  const std::string expected = content(*records.open());
  const std::string path = caches_in(records.dir.path()).at(0);
  static int left = 0;
  bool killed = true;
  for (int ended = 0; killed; ++ended) {
    remove_tree(path);
    const pid_t child = ::fork();
    if (child == 0) {
      left = ended;
      set_file_op_hook([](FileOp, const std::string&) {
        if (left-- == 0) ::_exit(7);
        return 0;
      });
      (void)records.open();
      ::_exit(0);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status));
    killed = WEXITSTATUS(status) != 0;
    CHECK(content(*records.open()) == expected);
    CHECK(path_exists(path));
  }
}

TEST_CASE("an exception of the caller's progress ends the work without a trace", "[examples][cache]") {
  const Records records(some_records(200));
  struct Stopped {};
  CHECK_THROWS_AS(
      open_examples(records.options, *records.tokenizer, 1, [](const ExampleProgress&) { throw Stopped(); }),
      Stopped);
  CHECK(caches_in(records.dir.path()).empty());
}

TEST_CASE("caches that were not used for a month are removed when another is made", "[examples][cache]") {
  Records records(some_records(10));
  write_file_atomic(records.dir / "other.jsonl", some_records(3));
  (void)records.open();
  const std::string old = caches_in(records.dir.path()).at(0);
  const std::string leftover = old + ".tmp-0123456789abcdef",
                    of_other = records.dir / "other.jsonl.examples-0.cache";
  write_file_atomic(leftover, "x");
  write_file_atomic(of_other, "x");
  for (const std::string& path : {old, leftover, of_other}) make_old(path, 40 * 24 * 3600);
  (void)records.open();  // used: now it is new
  records.options.max_length = 100;
  (void)records.open();
  CHECK(path_exists(old));
  CHECK_FALSE(path_exists(leftover));
  make_old(old, 40 * 24 * 3600);
  records.options.max_length = 101;
  (void)records.open();
  CHECK_FALSE(path_exists(old));
  CHECK(path_exists(of_other));
}

TEST_CASE("caches are no inputs, and lie where the options say", "[examples][cache]") {
  Records records(some_records(10));
  (void)records.open();
  Records directory("", "none", "unused");
  directory.options.inputs = {records.dir.path()};
  CHECK(directory.open()->size() == 10);
  directory.options.cache_dir = directory.dir / "a/b";
  CHECK(directory.open()->size() == 10);
  CHECK(caches_in(directory.dir / "a/b").size() == 1);
  directory.options.cache_dir = directory.dir / "unused/b";
  const Caught caught = directory.error();
  CHECK(caught.code == static_cast<int>(Exit::cannot_create));
  CHECK(contains(caught.text, "Fix: set data.cache_dir"));
  for (const std::string& path : caches_in(parent_path(records.dir.path())))
    if (contains(path, records.dir.path())) remove_tree(path);
}

TEST_CASE("a spool gives back more numbers than it keeps in memory", "[examples][cache]") {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  for (const int64_t count :
       {int64_t{0}, int64_t{1}, int64_t{1} << 17, (int64_t{1} << 17) + 1, int64_t{400000}}) {
    Spool<uint64_t> spool(dir / "numbers");
    for (int64_t i = 0; i < count; ++i) spool.add(static_cast<uint64_t>(i * i));
    CHECK(spool.size() == count);
    int64_t next = 0;
    bool same = true;
    spool.read([&](std::span<const uint64_t> block) {
      for (const uint64_t value : block) {
        same = same && value == static_cast<uint64_t>(next * next);
        ++next;
      }
    });
    CHECK(same);
    CHECK(next == count);
    CHECK(list_directory(dir.path()).empty());
  }
}
