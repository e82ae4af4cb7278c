#pragma once
// Telemetry, alerts and live views of a run, those that the configuration asks for. What they need runs in
// threads of their own; the training thread hands numbers over.

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "apps/monitor/alerts.h"
#include "apps/monitor/http.h"
#include "apps/monitor/leak_detector.h"
#include "apps/monitor/metrics.h"
#include "apps/monitor/notify.h"
#include "apps/monitor/prometheus.h"
#include "apps/monitor/telemetry.h"
#include "core/config/config.h"

namespace nrl::monitor {

inline constexpr const char* target_file = "prometheus.json";  ///< for file_sd of Prometheus

class Live {
 public:
  /// This rank's place in the run.
  struct Place {
    int rank = 0, node = 0;
    bool first_of_node = true;
    std::string host = {};
    std::vector<std::string> gpus = {};  ///< uuids of the node's GPUs, on its first rank
    bool on_gpu = false;
    int64_t step = 0;  ///< of the checkpoint that the run resumes from
  };
  /// Get what is to be shown on the terminal, in the training thread.
  struct Show {
    std::function<void(const Alert&)> alert;
    std::function<void(const std::string&)> note, warn;
  };

  /// Null if the configuration asks for nothing on this rank. Nothing that cannot be opened ends the run: it
  /// is reported by show.warn.
  static std::unique_ptr<Live> open(const Config& config, Place place, Show show);
  ~Live();  ///< ends the threads
  Live(const Live&) = delete;
  Live& operator=(const Live&) = delete;

  // Gatherings of telemetry, and of leaks that become alerts, on every rank.

  /// Rank 0: a gathering is due. The caller requests it from all ranks.
  bool due(double now) const { return first() && now >= next_gathering_; }
  /// A step of this rank: seconds of its own work and of waiting for others.
  void work(double own, double waiting);
  /// This rank's part of the gathering; starts counting anew.
  std::string contribution(double now);
  /// Rank 0: the parts of all ranks. Nothing without telemetry.
  void gathered(int64_t step, double time, std::span<const std::string> contributions);

  // Rank 0; nothing on others.

  void step(const StepFacts& facts);  ///< with its time
  void evaluation(const EvalFacts& facts);
  void event(std::string_view rule, AlertLevel level, int64_t step, const std::string& message);
  /// A warning of a leak detector of a rank, which runs on `host`.
  void leak(int64_t step, int rank, const std::string& host, const Leak& leak);
  void rolled_back(int64_t from, const std::string& message);
  void checkpoint(double bytes);
  /// Until the next step() no step is expected: evaluations and checkpoints take their time.
  void pause();
  /// The port of the server; 0: there is none.
  int port() const { return server_ ? server_->port() : 0; }

 private:
  Live(const Config& config, Place place, Show show);
  bool first() const { return place_.rank == 0; }
  void serve();
  HttpReply page();
  void raise(const std::vector<Alert>& alerts, bool in_training_thread);
  void write_telemetry(bool now);
  void run();
  template <class F>
  void guarded(const F& f);

  const Config& config_;
  Place place_;
  Show show_;
  std::unique_ptr<NodeSampler> sampler_;  // of a node's first rank
  std::optional<HostStats> process_;      // for this process's own numbers
  double gather_interval_;                // infinite: nothing is gathered
  double next_gathering_, own_ = 0, waiting_ = 0;
  int64_t steps_ = 0;
  std::optional<MetricsLog> telemetry_log_, alerts_log_;
  std::vector<JsonValue> unwritten_;  // rows of telemetry.jsonl
  double next_write_ = 0;
  std::optional<Notifier> notifier_;

  std::mutex raising_;  // of alerts_log_ and notifier_
  std::mutex mutex_;    // of everything below, which other threads use
  MetricsState state_;
  std::optional<Alerts> alerts_;
  bool paused_ = true, stop_ = false, failed_ = false;
  HttpReply page_;
  double page_time_ = 0;
  std::condition_variable changed_;
  std::thread thread_;
  std::unique_ptr<HttpServer> server_;  // ends before what its handlers use
};

}  // namespace nrl::monitor
