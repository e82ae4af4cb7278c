#pragma once
// Rewards by a program of any language: workers that live as long as the run, with JSON lines over pipes.

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/reward/external.h"

namespace nrl::reward {

struct CommandOptions {
  std::string command;  ///< for sh -c
  int64_t workers = 2;
  double time_limit_s = 10;   ///< of one completion
  int64_t memory_mib = 4096;  ///< address space of a worker
  bool network = false;       ///< false: the worker has none, where the system can deny it
  std::string log;            ///< file that gets the first MiB of the workers' standard error; empty: none
};
CommandOptions command_options(const Spec& spec);

/// A worker reads one line for each completion,
///
///   {"id": 7, "prompt": TEXT, "completion": TEXT, "ended": BOOL, "record": {...}}
///
/// (request_of()) and answers with one line {"id": 7, "reward": NUMBER or null} before it reads the next. It
/// runs in a process group of its own, without new privileges, with the environment variables HOME, LANG,
/// LC_ALL, PATH, TMPDIR and TZ only, with limits of memory and of processor time, and is killed with its
/// children after the time limit, after another line than an answer, with the run, and at its end. It is then
/// replaced.
class CommandWorkers final : public ExternalJudge {
 public:
  explicit CommandWorkers(CommandOptions options);
  ~CommandWorkers() override;
  CommandWorkers(const CommandWorkers&) = delete;
  CommandWorkers& operator=(const CommandWorkers&) = delete;

  std::vector<std::optional<double>> judge(std::span<const Item> items) override;
  std::string note() const override;

  /// True if the workers have no network.
  bool without_network() const;

 private:
  struct Worker;
  void start(Worker& worker);
  void stop(Worker& worker);
  void worker_failed(Worker& worker, std::string why);
  void read_errors(Worker& worker);

  const CommandOptions options_;
  std::vector<std::unique_ptr<Worker>> workers_;
  size_t logged_ = 0;  ///< bytes in the log
};

/// True if `unshare` can start a program without network here.
bool can_deny_network();

}  // namespace nrl::reward
