#include <csignal>
#include <cstring>
#include <fstream>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/io/atomic_file.h"
#include "core/io/crc32c.h"
#include "core/io/scratch_directory.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using test::contains;
using test::error_of;
using test::TemporaryDirectory;

TEST_CASE("crc32c: known answers, both versions, streaming and combining") {
  CHECK(crc32c("123456789", 9) == 0xe3069283u);
  CHECK(crc32c_portable("123456789", 9) == 0xe3069283u);
  CHECK(crc32c(std::string(32, '\0').data(), 32) == 0x8a9136aau);    // RFC 3720 B.4
  CHECK(crc32c(std::string(32, '\xff').data(), 32) == 0x62a8ab43u);  // RFC 3720 B.4
  CHECK(crc32c("", 0) == 0);
  std::string data(5000, ' ');
  const PhiloxStream random(1, "crc");
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(random.bits(i));
  const uint32_t whole = crc32c(data.data(), data.size());
  for (size_t cut : {size_t{0}, size_t{1}, size_t{7}, size_t{8}, size_t{1023}, size_t{4999}, size_t{5000}}) {
    const uint32_t a = crc32c(data.data(), cut), b = crc32c(data.data() + cut, data.size() - cut);
    CHECK(crc32c(data.data() + cut, data.size() - cut, a) == whole);
    CHECK(crc32c_portable(data.data() + cut, data.size() - cut, a) == whole);
    CHECK(crc32c_combine(a, b, data.size() - cut) == whole);
  }
}

TEST_CASE("an atomic file appears whole or not at all") {
  const TemporaryDirectory dir;
  const std::string path = dir / "a.txt";
  write_file_atomic(path, "old");
  {
    AtomicFile file(path);
    file.write("new but ");
    file.write("given up");
  }
  CHECK(read_file(path, 100) == "old");
  AtomicFile file(path);
  file.write("new ");
  file.write("text");
  CHECK(read_file(path, 100) == "old");
  file.commit();
  CHECK(read_file(path, 100) == "new text");
  write_file_atomic(path, "newer", Durable::no);
  CHECK(read_file(path, 100) == "newer");
  CHECK(list_directory(dir.path()) == std::vector<std::string>{"a.txt"});
}

namespace {
int g_inject = 0;
FileOp g_inject_at = FileOp::fsync;
int inject(FileOp op, const std::string&) {
  return op == g_inject_at ? g_inject : 0;
}
}  // namespace

TEST_CASE("file errors carry path, cause and exit code") {
  const TemporaryDirectory dir;
  auto caught = error_of([&] { read_file(dir / "none", 10); });
  CHECK(caught.code == 66);
  CHECK(contains(caught.text, "none: cannot open: No such file or directory"));
  CHECK(error_of([&] { read_file(dir.path(), 10); }).code == 66);
  REQUIRE(::mkfifo((dir / "fifo").c_str(), 0600) == 0);
  CHECK(error_of([&] { read_file(dir / "fifo", 10); }).code == 66);
  write_file_atomic(dir / "f", "0123456789");
  CHECK(error_of([&] { read_file(dir / "f", 9); }).code == 65);
  CHECK(error_of([&] { File::create(dir / "f"); }).code == 73);
  CHECK(error_of([&] { AtomicFile(dir / "no/f"); }).code == 73);
  CHECK(error_of([&] { make_directory(dir / "f"); }).code == 73);
  char buffer[20];
  CHECK(error_of([&] { File::open_read(dir / "f").pread_all(buffer, 11, 0); }).code == 65);
  REQUIRE(::symlink("f", (dir / "link").c_str()) == 0);
  CHECK(read_file(dir / "link", 10) == "0123456789");
  CHECK(error_of([&] { read_file(dir / "link", 10, File::Links::refuse); }).code == 66);

  // A failing fsync, a full disk: the target stays, the temporary file goes.
  for (const auto& [op, error] :
       {std::pair{FileOp::fsync, EIO}, {FileOp::write, ENOSPC}, {FileOp::rename, EIO}}) {
    g_inject_at = op;
    g_inject = error;
    set_file_op_hook(inject);
    caught = error_of([&] { write_file_atomic(dir / "f", "x"); });
    set_file_op_hook(nullptr);
    CHECK(caught.code == 74);
    CHECK(contains(caught.text, std::strerror(error)));
    CHECK(read_file(dir / "f", 10) == "0123456789");
    CHECK(list_directory(dir.path()).size() == 3);
  }
}

TEST_CASE("paths and trees") {
  const TemporaryDirectory dir;
  CHECK(join_path("a", "b") == "a/b");
  CHECK(join_path("a/", "b") == "a/b");
  CHECK(parent_path("/a/b") == "/a");
  CHECK(parent_path("/a") == "/");
  CHECK(parent_path("a") == ".");
  CHECK(parent_path("a/b/") == "a");
  for (const char* bad : {"", ".", "..", "a/b", "/a"}) CHECK_FALSE(is_plain_name(bad));
  CHECK_FALSE(is_plain_name(std::string("a\0b", 3)));
  CHECK(is_plain_name("model-00001-of-00002.safetensors"));
  make_directories(dir / "x/y/z");
  make_directories(dir / "x/y/z");
  write_file_atomic(dir / "x/y/f", "1");
  write_file_atomic(dir / "keep", "1");
  REQUIRE(::symlink((dir / "keep").c_str(), (dir / "x/link").c_str()) == 0);
  remove_tree(dir / "x");
  remove_tree(dir / "x");
  CHECK(list_directory(dir.path()) == std::vector<std::string>{"keep"});
}

TEST_CASE("a scratch directory does not outlive its owner") {
  const TemporaryDirectory dir;
  {
    const ScratchDirectory scratch(dir.path(), "scratch-");
    CHECK(parent_path(scratch.path()) == dir.path());
    CHECK(is_directory(scratch.path()));
    make_directories(scratch.path() + "/x/y");
    write_file_atomic(scratch.path() + "/x/f", "1");
  }
  CHECK(list_directory(dir.path()).empty());
  CHECK(error_of([&] { const ScratchDirectory none(dir / "none", "scratch-"); }).code == 73);
  // A process that is killed.
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const ScratchDirectory scratch(dir.path(), "scratch-");
    write_file_atomic(scratch.path() + "/f", "1");
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFSIGNALED(status));
  for (int i = 0; i < 1000 && !list_directory(dir.path()).empty(); ++i) ::usleep(10000);
  CHECK(list_directory(dir.path()).empty());
}
