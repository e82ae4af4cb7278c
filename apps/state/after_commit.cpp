#include "apps/state/after_commit.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/spawn.h"
#include "core/base/status.h"
#include "core/base/threads.h"
#include "core/io/atomic_file.h"
#include "core/io/checkpoint_store.h"

namespace nrl::train {
namespace {

constexpr const char* output_file = "after-save.log";
constexpr std::chrono::seconds last_reading(10);  // that the end of a run waits for

// The kernel's ioprio_set() for the calling thread, which libc does not wrap; a refusal changes nothing.
void use_idle_io() {
  constexpr int of_process = 1, idle_class = 3 << 13;
  ::syscall(SYS_ioprio_set, of_process, 0, idle_class);
}

}  // namespace

struct AfterCommit::State {
  struct Saved {
    int64_t step = 0;
    std::string path;
  };

  State(const CheckpointingConfig& c, std::string dir, double limit_s)
      : config(c), log_dir(std::move(dir)), command_s(limit_s) {}

  void verify(const Saved& saved) {
    const auto problems = verify_saved(saved.path, [this] { return leaves.load(); });
    if (!path_exists(saved.path)) return;  // old by now, and removed
    for (const std::string& problem : problems)
      log::warn("the checkpoint of step {} is damaged on disk: {}. An older one is used instead of it",
                saved.step, problem);
  }

  void run_command(const Saved& saved) {
    std::vector<std::string> words = config.after_save;
    words.push_back(saved.path);
    const std::string output = join_path(log_dir, output_file);
    const int fd = ::open(output.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    const std::string problem = run_program(words, "", own_environment(), command_s, fd);
    if (fd >= 0) ::close(fd);
    if (!problem.empty())
      log::warn("checkpointing.after_save of step {}: {}; its output is in {}", saved.step, problem, output);
  }

  // With the mutex.
  void remove_old() {
    if (!config.keep_latest_k) return;
    const auto pinned = [&](int64_t step) {
      const bool needed = working == step && !config.after_save.empty();
      return needed || (config.keep_every > 0 && step % config.keep_every == 0);
    };
    try {
      apply_retention(config.checkpoint_dir, static_cast<int>(*config.keep_latest_k), pinned, &valid);
    } catch (const Error& e) {
      log::warn("older checkpoints were not removed from {}: {}", config.checkpoint_dir, e.what());
    }
  }

  void run() {
    use_idle_io();
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return leaves || waiting; });
      if (!waiting) break;
      const Saved saved = *std::exchange(waiting, std::nullopt);
      working = saved.step;
      lock.unlock();
      try {
        if (!config.after_save.empty()) run_command(saved);
        if (config.verify_saved && !leaves) verify(saved);
      } catch (const Error& e) {
        if (path_exists(saved.path)) log::warn("the checkpoint of step {}: {}", saved.step, e.what());
      }
      lock.lock();
      working.reset();
      remove_old();  // now that another one has been verified, or its command has ended
      changed.notify_all();
    }
  }

  const CheckpointingConfig config;
  const std::string log_dir;
  const double command_s;
  std::set<int64_t> valid;  // steps saved by this run, or seen to be valid
  std::thread thread;
  bool refused = false;  // the system has no thread for it
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<Saved> waiting;
  std::optional<int64_t> working;
  std::atomic<bool> leaves = false;
};

AfterCommit::AfterCommit(const CheckpointingConfig& config, std::string log_dir, double command_s)
    : state_(std::make_shared<State>(config, std::move(log_dir), command_s)) {}

void AfterCommit::committed(int64_t step, const std::string& path) {
  State& s = *state_;
  const bool has_work = s.config.verify_saved || !s.config.after_save.empty();
  {
    const std::lock_guard lock(s.mutex);
    if (has_work) {
      if (s.waiting && !s.config.after_save.empty())
        log::warn(
            "checkpointing.after_save is left out for step {}: it takes longer than the time between two "
            "checkpoints",
            s.waiting->step);
      s.waiting = {step, path};
    }
    s.valid.insert(step);
    s.remove_old();
  }
  if (!has_work) return;
  s.changed.notify_all();
  if (s.thread.joinable() || s.refused) return;
  try {
    s.thread = start_thread_without_signals([state = state_] { state->run(); });
  } catch (const Error& e) {
    s.refused = true;
    log::warn("checkpoints are neither read back nor given to checkpointing.after_save: {}", e.what());
  }
}

void AfterCommit::finish() {
  State& s = *state_;
  if (s.config.after_save.empty() || !s.thread.joinable()) return;
  std::unique_lock lock(s.mutex);
  while (!s.changed.wait_for(lock, std::chrono::seconds(1), [&] { return !s.waiting && !s.working; }))
    status::made_progress();
}

AfterCommit::~AfterCommit() {
  State& s = *state_;
  if (!s.thread.joinable()) return;
  {
    std::unique_lock lock(s.mutex);
    s.changed.wait_for(lock, last_reading, [&] { return !s.waiting && !s.working; });
    s.leaves = true;
    if (s.config.after_save.empty()) s.waiting.reset();
  }
  s.changed.notify_all();
  s.thread.join();
}

}  // namespace nrl::train
