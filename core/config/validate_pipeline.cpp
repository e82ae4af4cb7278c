// Keys of the pipeline against each other.
#include <array>
#include <utility>

#include "core/config/validate.h"

namespace nrl::config_detail {
namespace {

constexpr const char* stages_key = "distributed.pipeline_parallel_size";
constexpr const char* chunks_key = "distributed.virtual_pipeline_size";
constexpr const char* schedule_key = "distributed.pipeline_schedule";
constexpr const char* group_key = "distributed.microbatch_group_size_per_vp_stage";
constexpr const char* layout_key = "distributed.pipeline_layout";

class PipelineCheck {
 public:
  explicit PipelineCheck(Checker c) : c_(c), d_(c.result.config.distributed) {}

  void run() {
    if (!c_.sound({stages_key, chunks_key})) return;
    check_schedule();
    check_group();
    check_split();
    const LoggerConfig& logger = c_.result.config.logger;
    if (logger.sample_period > 0 && d_.pipeline_parallel_size > 1)
      error("logger.sample_period", "logger.sample_period: no rank has all layers to generate text with",
            {at(stages_key, d_.pipeline_parallel_size),
             "set it to 0, and use nrl-train generate on a checkpoint"});
  }

 private:
  void check_schedule() {
    const int64_t chunks = d_.virtual_pipeline_size.value_or(1);
    if (d_.pipeline_schedule.is_auto()) return;
    const ScheduleKind schedule = d_.pipeline_schedule.value();
    if (schedule == ScheduleKind::interleaved && chunks == 1)
      error(schedule_key, fmt::format("{}: interleaved needs several chunks per stage", schedule_key),
            {at(chunks_key, 1), "use 1f1b, or set virtual_pipeline_size above 1"});
    else if (schedule != ScheduleKind::interleaved && chunks > 1)
      error(schedule_key, fmt::format("{}: {} runs one chunk per stage", schedule_key, name_of(schedule)),
            {at(chunks_key, chunks), "use interleaved, or set virtual_pipeline_size to 1"});
  }

  void check_group() {
    const int64_t stages = d_.pipeline_parallel_size;
    const auto& group = d_.microbatch_group_size_per_vp_stage;
    if (group && *group < stages)
      error(group_key, fmt::format("{}: {} is less than the pipeline stages", group_key, *group),
            {at(stages_key, stages), fmt::format("set it to {} or more", stages)});
  }

  void check_split() {
    const std::array<std::pair<const char*, bool>, 5> ways{
        {{layout_key, d_.pipeline_layout.has_value()},
         {"distributed.num_layers_in_first_pipeline_stage",
          d_.num_layers_in_first_pipeline_stage.has_value()},
         {"distributed.num_layers_in_last_pipeline_stage", d_.num_layers_in_last_pipeline_stage.has_value()},
         {"distributed.account_for_embedding_in_pipeline_split", d_.account_for_embedding_in_pipeline_split},
         {"distributed.account_for_loss_in_pipeline_split", d_.account_for_loss_in_pipeline_split}}};
    const auto method = [](size_t way) { return (way + 1) / 2; };  // a layout, sizes of stages, or accounts
    for (size_t i = 0; i < ways.size(); ++i) {
      const auto [key, given] = ways[i];
      if (!given) continue;
      for (size_t before = 0; before < i; ++before)
        if (ways[before].second && method(before) != method(i)) {
          error(key, fmt::format("{} and {} both spread the layers", ways[before].first, key),
                {fmt::format("{} is at {}; use one of them", ways[before].first,
                             c_.where(ways[before].first))});
          break;
        }
    }
  }

  std::string at(const char* key, int64_t value) const {
    return fmt::format("{} is {} ({})", key, value, c_.where(key));
  }
  void error(const char* key, std::string message, std::vector<std::string> notes) {
    c_.error(key, std::move(message), "", std::move(notes));
  }

  Checker c_;
  const DistributedConfig& d_;
};

}  // namespace

void check_pipeline(Checker c) {
  PipelineCheck(c).run();
}

}  // namespace nrl::config_detail
