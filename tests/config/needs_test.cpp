// Keys that need another key to have an effect: refused, or ignored with a warning where that key is written
// out with the value that turns it off. Every need of the option table is tried.

#include <algorithm>
#include <map>

#include "tests/catch.h"
#include "tests/config/helpers.h"
#include "tests/config/key_needs.h"

using namespace nrl;
using namespace nrl::config_detail;
using namespace nrl::test;

namespace {

/// A value that asks for something.
std::string asking_value(const Key& key) {
  for (const std::string& text : values_of(key)) {
    const std::string canonical = yaml_text(value_of(key, text));
    if (canonical != key.default_yaml() &&
        std::find(key.idle.begin(), key.idle.end(), canonical) == key.idle.end() && text != "\"\"")
      return text;
  }
  FAIL("no value of " << key.path);
  return "";
}

const Diagnostic* about(const ConfigResult& result, const std::string& key) {
  for (const Diagnostic& d : result.diagnostics)
    if (contains(d.message, key) && contains(d.message, " no effect without ")) return &d;
  return nullptr;
}

/// A YAML file of keys "a.b=v".
struct Tree {
  std::map<std::string, Tree> children;
  std::string value;
  void set(const std::string& key) {
    const size_t dot = key.find('.'), equals = key.find('=');
    if (dot < equals)
      children[key.substr(0, dot)].set(key.substr(dot + 1));
    else
      children[key.substr(0, equals)].value = key.substr(equals + 1);
  }
  std::string text(size_t indent = 0) const {
    std::string out;
    for (const auto& [name, child] : children)
      out += std::string(indent, ' ') + name + ":" +
             (child.children.empty() ? " " + child.value + "\n" : "\n" + child.text(indent + 2));
    return out;
  }
};

/// A file of these keys, and what makes a configuration complete.
ConfigResult load_file(const std::vector<std::string>& keys, const std::vector<std::string>& overrides = {}) {
  Tree tree;
  for (const char* complete :
       {"policy.model.model_type=llama", "loop.max_num_steps=10", "data.train.data_path=corpus"})
    tree.set(complete);
  for (const std::string& key : keys) tree.set(key);
  return load_text(tree.text(), overrides);
}

struct Tried {
  const Key* key;
  const Need* need;
  std::string assignment;        ///< of the key
  std::vector<std::string> on;   ///< of its other needs
  std::vector<std::string> off;  ///< of this need
};

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::vector<Tried> all_needs() {
  std::vector<Tried> out;
  for (const Key& key : Schema::get().keys())
    for (const Need& need : key.needs) {
      Tried tried{&key, &need, key.path + "=" + asking_value(key), {}, {}};
      const auto meets = [&](Algorithm a) {
        return std::ranges::any_of(need, [&](const Condition& c) {
          return c.key == "algorithm" && c.is == (std::ranges::find(c.values, name_of(a)) != c.values.end());
        });
      };
      for (const Algorithm a : key.algorithms)
        if (!meets(a)) tried.on = {fmt::format("algorithm={}", name_of(a))};
      for (const Need& other : key.needs)
        if (&other != &need) tried.on.push_back(assignment_of(other.front(), true));
      for (const Condition& condition : need)
        if (condition.key != "algorithm" || key.algorithms.empty())
          tried.off.push_back(assignment_of(condition, false));
      out.push_back(std::move(tried));
    }
  return out;
}

}  // namespace

TEST_CASE("every key that needs another one is an error without it, and a warning beside its off value",
          "[config][needs]") {
  int refused = 0, warned = 0;
  for (const auto& [key, need, assignment, on, off] : all_needs()) {
    CAPTURE(assignment, on, off);
    const bool off_by_default =
        std::none_of(need->begin(), need->end(), [](const Condition& c) { return c.holds(Config{}); });
    // The algorithm of a key that few have is given, as another one than the need has.
    const bool given = !key->algorithms.empty() &&
                       std::ranges::any_of(*need, [](const Condition& c) { return c.key == "algorithm"; });
    if (off_by_default && !given) {
      const ConfigResult alone = load_file(on + std::vector{assignment});
      const Diagnostic* problem = about(alone, key->path);
      REQUIRE(problem);
      CHECK(problem->severity == Severity::error);
      CHECK(problem->key == key->path);
      CHECK(problem->line > 0);
      CHECK(contains(render({*problem}), "Fix: remove it, or set "));
      CHECK(static_cast<int>(alone.exit_code()) == 78);
      ++refused;
    }
    const ConfigResult parked = load_file(on + off + std::vector{assignment});
    INFO(render(parked.diagnostics));
    const Diagnostic* warning = about(parked, key->path);
    REQUIRE(warning);
    CHECK(warning->severity == Severity::warning);
    // The run has the default, as if the key were not there.
    CHECK(yaml_text(key->get(parked.config)) == key->default_yaml());
    CHECK(parked.sound(key->path));
    if (parked.ok()) {
      ++warned;
      const ConfigResult again = load_text(dump_resolved(parked));
      INFO(render(again.diagnostics));
      CHECK(again.ok());
      CHECK(!about(again, key->path));
    }
    // On the command line over such a file it is a mistake; with its switch it is not.
    const ConfigResult late = load_file(on + off, {assignment});
    REQUIRE(about(late, key->path));
    CHECK(about(late, key->path)->severity == Severity::error);
    const ConfigResult turned_off = load_file(on + std::vector{assignment}, off);
    CHECK(!about(turned_off, key->path));
    CHECK(yaml_text(key->get(turned_off.config)) == key->default_yaml());
    // A default that is written out is harmless, and so are values that ask for nothing.
    std::vector<std::string> harmless = key->idle;
    harmless.push_back(key->default_yaml());
    for (const std::string& value : harmless)
      CHECK(!about(load_file(on + off + std::vector{key->path + "=" + value}), key->path));
  }
  CHECK(refused > 30);
  CHECK(warned > 45);
}

TEST_CASE("the defaults of all keys, written out, have no problems", "[config][needs]") {
  const ConfigResult result = load_text(dump_resolved(load_base({})));
  INFO(render(result.diagnostics));
  CHECK(result.diagnostics.empty());
}

TEST_CASE("a file of NeMo RL with features that are off is read with one warning for each",
          "[config][needs]") {
  const ConfigResult result =
      load_text(base_yaml +
                    "distributed: {pipeline_parallel_size: 1, tensor_parallel_size: 1,\n"
                    "  sequence_parallel: false, pipeline_schedule: zb_h1,\n"
                    "  overlap_p2p_comm: true, virtual_pipeline_size: 2}\n"
                    "checkpointing: {enabled: false, save_period: 10, keep_top_k: 3}\n"
                    "logger: {sample_period: 0}\n",
                {});
  const std::string text = render(result.diagnostics);
  INFO(text);
  CHECK(result.ok());
  CHECK(result.diagnostics.size() == 2);
  CHECK(
      contains(text,
               "distributed.virtual_pipeline_size, distributed.pipeline_schedule, "
               "distributed.overlap_p2p_comm have no effect without distributed.pipeline_parallel_size above "
               "1"));
  CHECK(contains(text, "distributed.pipeline_parallel_size is 1 (t.yaml:7:39)"));
  CHECK(contains(text, "checkpointing.save_period has no effect without checkpointing.enabled: true"));
  CHECK(result.config.distributed.pipeline_schedule.is_auto());
  CHECK(!result.config.distributed.virtual_pipeline_size);
}

TEST_CASE("what a key lacks is named from the root", "[config][needs]") {
  const auto text = [](std::vector<std::string> keys) {
    return render(load_base(std::move(keys)).diagnostics);
  };
  // Delayed scales are there, but FP8 is not.
  CHECK(contains(text({"policy.fp8_cfg.fp8_recipe=delayed", "policy.fp8_cfg.fp8_amax_history_len=4"}),
                 "fp8_amax_history_len: 4 has no effect without policy.fp8_cfg.enabled: true"));
  CHECK(contains(text({"policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_amax_history_len=4"}),
                 "fp8_amax_history_len: 4 has no effect without policy.fp8_cfg.fp8_recipe: delayed"));
  CHECK(text({"policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_recipe=delayed",
              "policy.fp8_cfg.fp8_amax_history_len=4"})
            .empty());
  CHECK(contains(text({"distributed.tp_comm_overlap=pipelined", "distributed.tp_comm_overlap_splits=8"}),
                 "tp_comm_overlap_splits: 8 has no effect without distributed.tensor_parallel_size above 1"));
  // Any of several.
  CHECK(contains(text({"pretrain.val_batches=3"}),
                 "pretrain.val_batches: 3 has no effect without pretrain.val_period above 0, "
                 "pretrain.val_at_start: true or pretrain.val_at_end: true"));
  CHECK(text({"pretrain.val_batches=3", "pretrain.val_at_end=true", "data.split=9,1,0"}).empty());
  CHECK(text({"policy.scheduler.lr_decay_style=constant", "policy.scheduler.warmup_ratio=0.5",
              "policy.scheduler.lr_decay_iters=10"})
            .empty());  // the warm-up is a share of it
  // An element of a list.
  const std::string sizes = "distributed.hierarchical_context_parallel_sizes=[2,2]",
                    ranks = "distributed.context_parallel_size=4";
  CHECK(contains(text({ranks, sizes}), "without distributed.cp_comm_type: a2a+p2p"));
  CHECK(text({ranks, sizes, "distributed.cp_comm_type=[p2p,a2a+p2p]"}).empty());
  // Nothing is said of a key whose switch has an invalid value.
  CHECK(!contains(text({"policy.fp8_cfg.enabled=maybe", "policy.fp8_cfg.fp8_margin=1"}), "no effect"));
}

TEST_CASE("explain and the reference page say what a key needs", "[config][needs]") {
  CHECK(contains(explain("policy.fp8_cfg.fp8_margin"),
                 "only     with policy.fp8_cfg.enabled: true\n  only     with policy.fp8_cfg.fp8_recipe: "
                 "tensorwise or delayed\n"));
  CHECK(contains(config_markdown(),
                 "*Only with* `enabled: true`. *Only with* `fp8_recipe: tensorwise or delayed`."));
  CHECK(contains(config_markdown(), "*Only with* `tp_comm_overlap: pipelined`."));
}
