#include "apps/launch/process.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <ctime>
#include <fstream>
#include <set>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/base/process.h"

namespace nrl::launch {
namespace {

sigset_t handled() {
  sigset_t set;
  sigemptyset(&set);
  for (int number : {SIGINT, SIGTERM, SIGUSR1, SIGCHLD}) sigaddset(&set, number);
  struct sigaction hangup = {};
  if (::sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler != SIG_IGN) sigaddset(&set, SIGHUP);
  return set;
}

// In the new process: only calls that are safe after fork() in a program with threads.
[[noreturn]] void become(char* const* words, int output, pid_t parent, int report) {
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(127);  // it has ended before the line above
  const int null = ::open("/dev/null", O_RDONLY);
  if (null >= 0) ::dup2(null, STDIN_FILENO);
  if (output >= 0) ::dup2(output, STDOUT_FILENO);
  ::execvp(words[0], words);
  const int error = errno;
  [[maybe_unused]] const ssize_t ignored = ::write(report, &error, sizeof error);
  ::_exit(127);
}

}  // namespace

Process::Process(const std::vector<std::string>& words, int output) {
  std::vector<char*> pointers;
  for (const std::string& word : words) pointers.push_back(const_cast<char*>(word.c_str()));
  pointers.push_back(nullptr);
  int report[2];
  if (::pipe2(report, O_CLOEXEC) != 0) fail(Exit::io, "cannot make a pipe: {}", std::strerror(errno));
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ == 0) become(pointers.data(), output, parent, report[1]);
  int error = pid_ < 0 ? errno : 0;
  ::close(report[1]);
  ssize_t n = 0;
  while (pid_ > 0 && (n = ::read(report[0], &error, sizeof error)) < 0 && errno == EINTR) {
  }
  ::close(report[0]);
  if (pid_ > 0 && n == 0) return;
  if (pid_ > 0) ::waitpid(pid_, nullptr, 0);
  fail(Exit::unavailable, "cannot start '{}': {}. Fix: install it, or name another --launcher", words.front(),
       std::strerror(error));
}

Process::~Process() {
  if (code_) return;
  kill_group();
  ::waitpid(pid_, nullptr, 0);
}

std::optional<int> Process::ended() {
  if (code_) return code_;
  siginfo_t seen = {};
  if (::waitid(P_PID, static_cast<id_t>(pid_), &seen, WEXITED | WNOHANG | WNOWAIT) != 0 || seen.si_pid == 0)
    return {};
  kill_group();  // before its number can be another's
  int status = 0;
  ::waitpid(pid_, &status, 0);
  code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return code_;
}

void Process::signal(int number) {
  if (!code_) ::kill(pid_, number);
}

void Process::kill_group() {
  ::kill(-pid_, SIGKILL);
}

std::vector<pid_t> processes_with(std::span<const std::string> words) {
  std::vector<pid_t> out;
  for (const int64_t pid : process_numbers()) {
    const std::string directory = fmt::format("/proc/{}", pid);
    struct stat st = {};
    if (pid == ::getpid() || ::stat(directory.c_str(), &st) != 0 || st.st_uid != ::getuid()) continue;
    std::ifstream file(directory + "/cmdline", std::ios::binary);
    std::set<std::string> found;
    for (std::string word; std::getline(file, word, '\0');) found.insert(std::move(word));
    if (std::all_of(words.begin(), words.end(), [&](const std::string& w) { return found.contains(w); }))
      out.push_back(static_cast<pid_t>(pid));
  }
  return out;
}

void block_signals() {
  const sigset_t set = handled();
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

int wait_signal(double seconds) {
  const sigset_t set = handled();
  timespec time{static_cast<time_t>(seconds), 0};
  time.tv_nsec = static_cast<long>((seconds - std::floor(seconds)) * 1e9);
  const int number = ::sigtimedwait(&set, nullptr, &time);
  return number < 0 || number == SIGCHLD ? 0 : number;
}

}  // namespace nrl::launch
