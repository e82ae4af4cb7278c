// The keys of the pipeline against each other.
#include <algorithm>

#include "tests/catch.h"
#include "tests/config/helpers.h"

using namespace nrl;
using namespace nrl::test;

namespace {

std::vector<std::string> in_section(std::vector<std::string> keys) {
  for (std::string& key : keys) key = (key.starts_with("logger") ? "" : "distributed.") + key;
  return keys;
}

}  // namespace

TEST_CASE("pipeline keys that contradict each other are refused", "[config]") {
  struct Bad {
    std::vector<std::string> keys;
    std::string text;  // of the message
  };
  const std::string two = "pipeline_parallel_size=2";
  const Bad cases[] = {
      {{two, "pipeline_schedule=interleaved"}, "interleaved needs several chunks per stage"},
      {{two, "virtual_pipeline_size=2", "pipeline_schedule=1f1b"}, "1f1b runs one chunk per stage"},
      {{two, "virtual_pipeline_size=2", "pipeline_schedule=zb_h1"}, "zb_h1 runs one chunk per stage"},
      {{two, "virtual_pipeline_size=2", "microbatch_group_size_per_vp_stage=1"},
       "is less than the pipeline stages"},
      {{two, "pipeline_layout=[1,1]", "num_layers_in_last_pipeline_stage=1"}, "both spread the layers"},
      {{two, "num_layers_in_first_pipeline_stage=1", "account_for_loss_in_pipeline_split=true"},
       "both spread the layers"},
      {{two, "logger.sample_period=1"}, "no rank has all layers to generate text with"},
  };
  for (const Bad& bad : cases) {
    const ConfigResult result = load_base(in_section(bad.keys));
    const std::string text = render(result.diagnostics);
    INFO(bad.text << "\n" << text);
    CHECK(result.exit_code() == Exit::config);
    CHECK(contains(text, bad.text));
    CHECK(contains(text, "set it to") + contains(text, "use ") + contains(text, "remove it") > 0);
  }
  for (const std::vector<std::string>& keys :
       {std::vector<std::string>{two},
        {two, "virtual_pipeline_size=1", "pipeline_schedule=zb_h1"},
        {two, "virtual_pipeline_size=2", "pipeline_schedule=interleaved"},
        {two, "pipeline_schedule=zb_h1", "shard_strategy=optim_grads"},
        {two, "virtual_pipeline_size=2", "shard_strategy=fsdp"},
        {two, "virtual_pipeline_size=2", "microbatch_group_size_per_vp_stage=2",
         "overlap_p2p_communication=true"},
        {two, "num_layers_in_first_pipeline_stage=1", "num_layers_in_last_pipeline_stage=1"},
        {two, "account_for_embedding_in_pipeline_split=true", "account_for_loss_in_pipeline_split=true"}}) {
    const ConfigResult result = load_base(in_section(keys));
    INFO(render(result.diagnostics));
    CHECK(result.ok());
  }
}

TEST_CASE("Megatron's text of a pipeline layout is the layers of its chunks", "[config]") {
  const auto layout = [](const std::string& text) {
    return load_base({"distributed.pipeline_parallel_size=2", "distributed.virtual_pipeline_size=2",
                      "policy.megatron_cfg.pipeline_model_parallel_layout=" + text});
  };
  using Layers = std::vector<int64_t>;
  for (const auto& [text, layers] : {std::pair<std::string, Layers>{"Et*3|(tt|)*2,L", {3, 2, 2, 0}},
                                     {"E|t|t|tL", {0, 1, 1, 1}},
                                     {"E t|((t)*2|)*2 t*4L", {1, 2, 2, 4}},
                                     {"Ett|t|t*12|tL", {2, 1, 12, 1}},
                                     {"EtL", {1}}}) {
    const ConfigResult result = layout(text);
    INFO(text << "\n" << render(result.diagnostics));
    REQUIRE(result.ok());
    CHECK(result.config.distributed.pipeline_layout == layers);
  }
  for (const auto& [text, problem] : {std::pair<std::string, std::string>{"t|tL", "must begin with E"},
                                      {"Et|t", "must end with L"},
                                      {"Et|EtL", "only the first chunk can have E"},
                                      {"EtL|tL", "only the last chunk can have L"},
                                      {"Et|tmL", "multi-token prediction"},
                                      {"Et|dL", "'d' is none of"},
                                      {"E(t|tL", "a '(' without ')'"},
                                      {"Et)|tL", "a ')' without '('"},
                                      {"Et*|tL", "a '*' without a number"},
                                      {"Et*99999999999999999999|L", "too many parts"},
                                      {"E((t*999)*999)*999|L", "too many parts"},
                                      {"E(((((((((t)))))))))|L", "nested too deeply"}}) {
    const ConfigResult result = layout(text);
    const std::string rendered = render(result.diagnostics);
    INFO(text << "\n" << rendered);
    CHECK(result.exit_code() == Exit::config);
    CHECK(contains(rendered, problem));
  }
}

TEST_CASE("Megatron's names of pipeline keys are read", "[config]") {
  const ConfigResult result = load_base({"policy.megatron_cfg.pipeline_model_parallel_size=2",
                                         "policy.megatron_cfg.virtual_pipeline_model_parallel_size=3",
                                         "policy.megatron_cfg.account_for_embedding_in_pipeline_split=true"});
  INFO(render(result.diagnostics));
  REQUIRE(result.ok());
  const DistributedConfig& d = result.config.distributed;
  CHECK(d.pipeline_parallel_size == 2);
  CHECK(d.virtual_pipeline_size == 3);
  CHECK(d.account_for_embedding_in_pipeline_split);
}
