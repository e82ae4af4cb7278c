#include "apps/diagnosis/records.h"

#include <algorithm>
#include <charconv>
#include <map>

#include "apps/diagnosis/flight_files.h"
#include "apps/monitor/run_file.h"
#include "core/base/process.h"
#include "core/io/atomic_file.h"

namespace nrl::diagnosis {
namespace {

Life life_of(const comm::FlightIdentity& of) {
  if (of.host != host_name() || of.boot_id != boot_id()) return Life::unknown;
  const auto process = read_process(of.pid);
  // Its number may be another process's by now.
  if (!process || static_cast<int64_t>(process->start_ticks) != of.start_ticks || process->state == 'Z')
    return Life::ended;
  return process->state == 'T' || process->state == 't' ? Life::stopped : Life::alive;
}

std::vector<std::string> flights_in(const std::string& directory) {
  std::vector<std::string> paths;
  if (!is_directory(directory)) return paths;
  for (const std::string& name : list_directory(directory))
    if (int rank = 0, attempt = 0; parse_flight_name(name, rank, attempt))
      paths.push_back(join_path(directory, name));
  return paths;
}

}  // namespace

Records read_records(const std::string& log_dir) {
  Records records;
  const monitor::RunFile run = monitor::read_run_file(log_dir);
  records.run_id = run.run_id;
  records.attempt = run.attempt();
  std::vector<std::string> paths = flights_in(flight_directory(records.run_id));
  const std::string saved = join_path(log_dir, "flight");
  if (is_directory(saved))
    for (const std::string& name : list_directory(saved))
      for (std::string& path : flights_in(join_path(saved, name))) paths.push_back(std::move(path));
  std::map<int, Rank> ranks;
  for (const std::string& path : paths) {
    try {
      Rank rank{.flight = comm::read_flight(path)};
      const comm::FlightIdentity& of = rank.flight.identity;
      if (of.run_id != records.run_id || of.attempt != records.attempt) continue;
      rank.life = life_of(of);
      if (rank.life == Life::alive || rank.life == Life::stopped) rank.now_ns = comm::now_ns();
      ranks.insert_or_assign(of.rank, std::move(rank));
    } catch (const Error& e) {
      records.unreadable.emplace_back(e.what());
    }
  }
  for (auto& [number, rank] : ranks) {
    if (!records.ranks.empty() && rank.flight.identity.ranks != records.ranks.front().flight.identity.ranks) {
      records.unreadable.push_back(fmt::format("the flight file of rank {} is of a run of {} ranks", number,
                                               rank.flight.identity.ranks));
      continue;
    }
    records.ranks.push_back(std::move(rank));
  }
  const std::string directory = saved_flights(log_dir, records.attempt);
  if (is_directory(directory))
    for (const std::string& name : list_directory(directory)) {
      if (!name.ends_with(".stacks")) continue;
      try {
        records.stacks.push_back(read_stacks(join_path(directory, name)));
      } catch (const Error& e) {
        records.unreadable.emplace_back(e.what());
      }
    }
  std::sort(records.stacks.begin(), records.stacks.end(),
            [](const ProcessStacks& a, const ProcessStacks& b) { return a.rank < b.rank; });
  try {
    records.failure = monitor::read_failure(log_dir);
  } catch (const Error& e) {
    records.unreadable.emplace_back(e.what());  // e.g. empty, after a power loss
  }
  return records;
}

}  // namespace nrl::diagnosis
