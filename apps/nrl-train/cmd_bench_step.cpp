// nrl-train bench step: training steps of a configuration on random tokens, by the trainer itself.

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <sstream>

#include "apps/model/spec.h"
#include "apps/nrl-train/cmd_bench.h"
#include "apps/plan/run_plan.h"
#include "apps/train/model_source.h"
#include "apps/train/run_io/stop_signal.h"
#include "apps/train/run_io/timers.h"
#include "apps/train/session.h"
#include "apps/train/trainer.h"
#include "core/base/log.h"
#include "core/base/philox.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"
#include "core/io/indexed_dataset.h"

namespace nrl::app::bench {
namespace {

// Not timed: kernels are chosen and loaded, memory is touched, and a CUDA graph is recorded in the third.
constexpr int warmup_steps = 4;

/// A folder that goes with its owner.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    const char* base = std::getenv("TMPDIR");
    path_ = std::string(base && *base ? base : "/tmp") + "/nrl-bench-XXXXXX";
    if (!mkdtemp(path_.data())) fail(Exit::cannot_create, "cannot make a folder like {}", path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string operator/(const char* name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

/// Wall-clock time at which this process was started (exec), to a hundredth of a second.
double process_start() {
  const std::string stat = [] {
    std::string text(4096, '\0');
    FILE* file = std::fopen("/proc/self/stat", "r");
    if (!file) return std::string();
    text.resize(std::fread(text.data(), 1, text.size(), file));
    std::fclose(file);
    return text;
  }();
  // Field 22, counted from behind the name, which may hold anything.
  std::istringstream fields(stat.substr(std::min(stat.size(), stat.rfind(')') + 1)));
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;
  timespec boot{};
  clock_gettime(CLOCK_BOOTTIME, &boot);
  const double since_boot = static_cast<double>(boot.tv_sec) + 1e-9 * static_cast<double>(boot.tv_nsec);
  const double started = std::strtod(field.c_str(), nullptr) / static_cast<double>(sysconf(_SC_CLK_TCK));
  return wall_seconds() - (since_boot - started);
}

/// PREFIX.{bin,idx}: `count` tokens without a pattern.
void write_tokens(const std::string& prefix, int64_t vocab, int64_t count) {
  IndexedDatasetWriter writer(prefix, vocab);
  const PhiloxStream stream(3, "bench tokens");
  std::vector<int32_t> tokens;
  for (int64_t begin = 0; begin < count; begin += static_cast<int64_t>(tokens.size())) {
    tokens.resize(static_cast<size_t>(std::min<int64_t>(count - begin, 1 << 20)));
    for (size_t i = 0; i < tokens.size(); i += 4) {
      const PhiloxBlock four = stream.block((static_cast<uint64_t>(begin) + i) / 4);
      for (size_t k = 0; k < std::min<size_t>(4, tokens.size() - i); ++k)
        tokens[i + k] = static_cast<int32_t>(four[k] % static_cast<uint64_t>(vocab));
    }
    writer.add_sequence(tokens);
    writer.end_document();
  }
  writer.finish();
}

struct Steps {
  std::vector<JsonValue> rows;  ///< of metrics.jsonl
  /// Median over the timed steps.
  double median(const char* key) const {
    std::vector<double> values;
    for (size_t i = warmup_steps; i < rows.size(); ++i) values.push_back(rows[i].get_double(key, 0));
    std::sort(values.begin(), values.end());
    const size_t n = values.size();
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
  }
};

Steps read_steps(const std::string& path, int64_t wanted) {
  Steps steps;
  std::istringstream lines(read_file(path, uint64_t{64} << 20));
  for (std::string line; std::getline(lines, line);) steps.rows.push_back(parse_json(line, path));
  if (static_cast<int64_t>(steps.rows.size()) != wanted)
    fail(Exit::internal, "{} has {} rows, wanted {}", path, steps.rows.size(), wanted);
  return steps;
}

// Trains on random tokens; `start` is when the process was started.
int measure(comm::World& world, const BenchArgs& args, double start) {
  const TemporaryFolder folder;
  const int64_t timed = args.quick ? 2 : args.steps, steps = warmup_steps + timed;
  std::vector<std::string> overrides = args.config.overrides;
  for (const std::string& ours :
       {"data.train.data_path=" + (folder / "tokens"), std::string("data.split=null"),
        "logger.log_dir=" + (folder / "logs"), std::string("checkpointing.enabled=false"),
        fmt::format("pretrain.max_num_steps={}", steps), std::string("pretrain.max_num_epochs=null"),
        std::string("pretrain.val_period=0"), std::string("pretrain.val_at_start=false"),
        std::string("pretrain.val_at_end=false"), std::string("logger.progress=plain"),
        std::string("logger.sample_period=0"), std::string("data.reset_position_ids=false"),
        std::string("data.reset_attention_mask=false"), std::string("data.eod_mask_loss=false")})
    overrides.push_back(ours);
  if (args.device != "auto") overrides.push_back("device=" + args.device);
  // The tokens first: the checks of the configuration look for them.
  if (const ConfigResult draft = load_config(args.config.path, overrides); draft.ok())
    write_tokens(folder / "tokens", train::load_model_spec(draft).vocab_size,
                 steps * resolve_batch(draft.config, 1).tokens_per_step + 1);
  const ConfigResult config = train::load_config_together(world, args.config.path, overrides);
  const Config& c = config.config;
  std::string why;
  const DeviceType device = train::choose_device(c, why);
  const model::ModelSpec spec = train::load_model_spec(config);
  const BatchPlan batch = resolve_batch(c, 1);
  if (const Exit code = train::train(world, config); code != Exit::ok) return static_cast<int>(code);
  const Steps run = read_steps((folder / "logs") + "/metrics.jsonl", steps);
  const double step_ms = run.median("step_ms"), first = run.rows.front().get_double("time") - start;
  const double tokens_per_s = static_cast<double>(batch.tokens_per_step) / step_ms * 1e3;
  const double mfu = run.median("mfu");
  int64_t planned = 0;
  for (int i = 0; i < memory::category_count; ++i)
    planned += run.rows.front().get_int(
        fmt::format("mem_{}_bytes", memory::name_of(static_cast<memory::Category>(i))));
  const char* precision = plan::recipe_for(c, device).activations == DType::bf16 ? "bfloat16" : "float32";

  Report report(args, Machine(device == DeviceType::cuda ? "cuda" : "cpu", true).describe());
  report.set("config", args.config.path);
  report.set("sequences", batch.global);
  report.set("micro_batch", batch.micro);
  report.set("length", c.policy.max_total_sequence_length);
  report.set("tokens_per_step", batch.tokens_per_step);
  report.set("precision", precision);
  report.set("cuda_graph", c.policy.cuda_graph);
  report.set("timed_steps", timed);
  report.set("step_ms", step_ms);
  report.set("tokens_per_s", tokens_per_s);
  report.set("mfu", mfu > 0 ? JsonValue(mfu) : JsonValue());
  report.set("flops_per_token", model::training_flops_per_token(spec, c.policy.max_total_sequence_length));
  report.set("planned_bytes", planned);
  report.set("peak_resident_bytes", cpu::peak_resident_bytes());
  report.set("first_step_s", first);
  report.set("loss_first", run.rows.front().get_double("loss"));
  report.set("loss_last", run.rows.back().get_double("loss"));
  report.set("model", parse_json(model::hugging_face_config(spec, precision), "model"));
  for (const JsonValue& row : run.rows) report.add(row);
  log::info("");
  log::info("step        {:.2f} ms (median of {})", step_ms, timed);
  log::info("speed       {} tokens/s{}", grouped(std::llround(tokens_per_s)),
            mfu > 0 ? fmt::format(", mfu {:.1f} %", mfu * 100) : "");
  log::info("memory      {} planned{}", human_bytes(static_cast<uint64_t>(planned)),
            device == DeviceType::cuda
                ? ""
                : fmt::format(", {} resident", human_bytes(cpu::peak_resident_bytes())));
  log::info("first step  done {:.2f} s after exec", first);
  return report.finish();
}

}  // namespace

int step(const BenchArgs& args) {
  if (args.config.path.empty())
    fail(Exit::usage, "bench step takes a configuration, e.g. nrl-train bench step configs/bench-tiny.yaml");
  if (comm::launched_with_peers())
    fail(Exit::usage, "bench step measures one rank; on several, train and read LOG_DIR/metrics.jsonl");
  const double start = process_start();
  stop::handle_at_start();
  return run_in_world([&](comm::World& world) { return measure(world, args, start); });
}

}  // namespace nrl::app::bench
