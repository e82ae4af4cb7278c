#include "apps/monitor/metrics.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

#include "apps/monitor/communication.h"
#include "apps/monitor/layers.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"

namespace nrl::monitor {
namespace {

constexpr size_t read_bytes = size_t{1} << 20;
constexpr size_t max_line = size_t{1} << 20;  // far longer than any row
constexpr size_t most_unwritten = size_t{4} << 20;

// `where` ("path:line") is for the error message.
JsonValue parse_row(std::string_view line, const std::string& where) {
  JsonLimits limits;
  limits.text_bytes = max_line;
  return parse_json(line, where, limits);
}

}  // namespace

JsonValue step_row(const StepFacts& f) {
  JsonValue row = JsonValue::object({{"step", f.step},
                                     {"time", time_or_now(f.time)},
                                     {"loss", f.loss},
                                     {"grad_norm", f.grad_norm},
                                     {"lr", f.lr},
                                     {"tokens", f.tokens},
                                     {"tokens_per_s", f.tokens_per_s},
                                     {"mfu", f.mfu ? JsonValue(*f.mfu) : JsonValue()},
                                     {"step_ms", f.step_ms},
                                     {"data_ms", f.data_ms},
                                     {"comm_ms", f.comm_ms},
                                     {"gemm_ms", f.gemm_ms},
                                     {"attention_ms", f.attention_ms},
                                     {"skipped", f.skipped}});
  if (f.loss_scale) row.set("loss_scale", *f.loss_scale);
  if (f.straggler_ratio) row.set("straggler_ratio", *f.straggler_ratio);
  if (f.router) {
    if (f.router->aux_loss) row.set("router_aux_loss", *f.router->aux_loss);
    row.set("router_z_loss", f.router->z_loss);
    row.set("expert_load", f.router->load);
    row.set("expert_rounds", f.router->rounds);
  }
  for (const Metric& metric : f.metrics) row.set(metric.name, metric.value);
  if (f.offload) {
    row.set("offload_bytes", f.offload->bytes);
    if (f.offload->ms > 0) {
      row.set("offload_ms", f.offload->ms);
      row.set("offload_exposed_ms", f.offload->exposed_ms);
    }
  }
  if (f.examples) {
    row.set("global_valid_toks", f.examples->loss_tokens);
    row.set("packing_efficiency", f.examples->efficiency);
    row.set("packing_imbalance", f.examples->imbalance);
  }
  if (f.layers) row.set("layers", to_json(*f.layers));
  for (const auto& [category, bytes] : f.memory) row.set("mem_" + category + "_bytes", bytes);
  return row;
}

JsonValue eval_row(const EvalFacts& f) {
  JsonValue row = JsonValue::object({{"step", f.step}, {"time", time_or_now(f.time)}});
  for (const auto& [name, loss] : f.losses) row.set(name, loss);
  for (const Metric& metric : f.metrics) row.set(metric.name, metric.value);
  row.set("eval_s", f.seconds);
  return row;
}

JsonValue summary_row(const RunSummary& s) {
  const auto optional = [](const std::optional<double>& value) {
    return value ? JsonValue(*value) : JsonValue();
  };
  return JsonValue::object({{"outcome", s.outcome},
                            {"steps", s.steps},
                            {"max_steps", s.max_steps},
                            {"tokens", s.tokens},
                            {"wall_s", s.wall_s},
                            {"mean_tokens_per_s", s.mean_tokens_per_s},
                            {"median_tokens_per_s", s.median_tokens_per_s},
                            {"mfu", optional(s.mfu)},
                            {"best_val_loss", optional(s.best_val_loss)},
                            {"best_val_step", s.best_val_loss ? JsonValue(s.best_val_step) : JsonValue()},
                            {"compute_s", s.times[RunSection::compute]},
                            {"comm_s", s.times[RunSection::comm]},
                            {"data_s", s.times[RunSection::data]},
                            {"eval_s", s.times[RunSection::eval]},
                            {"checkpoint_s", s.times[RunSection::checkpoint]},
                            {"other_s", s.times[RunSection::other]},
                            {"communication", to_json(Communication{s.steps, s.comm})},
                            {"checkpoint", s.checkpoint.empty() ? JsonValue() : JsonValue(s.checkpoint)},
                            {"next", s.next}});
}

MetricsLog::MetricsLog(const std::string& log_dir, int64_t resume_step, bool active, const char* name)
    : path_(join_path(log_dir, name)) {
  if (!active) return;
  make_directories(log_dir);
  if (path_exists(path_)) drop_rows_after(resume_step);
  file_ = AppendFile(path_);
}

void MetricsLog::drop_rows_after(int64_t resume_step) {
  const File old = File::open_read(path_);
  const uint64_t size = old.size();
  struct Range {
    uint64_t begin, end;
  };
  std::vector<Range> kept;  // adjacent ranges are merged

  std::string buffer;  // bytes [begin - head, read) of the file
  size_t head = 0;     // start of the next line in the buffer
  uint64_t begin = 0, read = 0;
  int64_t line_number = 0;
  while (begin < size) {
    size_t end = buffer.find('\n', head);
    bool too_long = false;
    while (end == std::string::npos && read < size) {
      // The content of a line that is too long is not needed.
      too_long = too_long || buffer.size() - head > max_line;
      buffer.erase(0, too_long ? buffer.size() : head);
      head = 0;
      const size_t had = buffer.size();
      const auto bytes = static_cast<size_t>(std::min<uint64_t>(read_bytes, size - read));
      buffer.resize(had + bytes);
      old.pread_all(buffer.data() + had, bytes, read);
      read += bytes;
      end = buffer.find('\n', had);
    }
    line_number += 1;
    const std::string where = fmt::format("{}:{}", path_, line_number);
    if (end == std::string::npos) {
      log::warn("{}: removing an incomplete last line, probably left by a crash", where);
      break;
    }
    if (too_long || end - head > max_line)
      fail(Exit::data,
           "{}: not a metrics file: the line is longer than {} bytes. Fix: move the file away, or change "
           "logger.log_dir",
           where, max_line);
    const uint64_t next = begin + (end - head) + 1;
    bool keep = false;
    try {
      const JsonValue row = parse_row(std::string_view(buffer).substr(head, end - head), where);
      keep = row.get_int("step") <= resume_step;
      if (keep && !row.get_bool("skipped", false)) kept_ms_ += row.get_double("step_ms", 0);
    } catch (const Error& error) {
      if (next < size) fail(Exit::data, "{}. Fix: repair the line or move the file away", error.what());
      log::warn("{}: removing an invalid last line, probably left by a crash", where);
    }
    if (keep) {
      if (!kept.empty() && kept.back().end == begin) {
        kept.back().end = next;
      } else {
        kept.push_back({begin, next});
      }
    }
    head = end + 1;
    begin = next;
  }

  if (size == 0) return;
  if (kept.size() == 1 && kept[0].begin == 0 && kept[0].end == size) return;
  AtomicFile fresh(path_);
  for (const Range& range : kept) {
    for (uint64_t at = range.begin; at < range.end; at += read_bytes) {
      buffer.resize(static_cast<size_t>(std::min<uint64_t>(read_bytes, range.end - at)));
      old.pread_all(buffer.data(), buffer.size(), at);
      fresh.write(buffer);
    }
  }
  fresh.commit();
}

void MetricsLog::append(const JsonValue& row) {
  if (!file_.is_open()) return;
  row.get_int("step");  // drop_rows_after() relies on it
  const bool failed = !unwritten_.empty();
  unwritten_ += row.dump() + "\n";
  try {
    file_.append(unwritten_);
    unwritten_.clear();
  } catch (const Error& e) {
    if (unwritten_.size() > most_unwritten)
      unwritten_.erase(0, unwritten_.find('\n', unwritten_.size() - most_unwritten) + 1);
    if (!failed)
      fail(e.code(), "{}; rows stay in memory, at most {}, until they can be written", e.what(),
           human_bytes(most_unwritten));
  }
}

}  // namespace nrl::monitor
