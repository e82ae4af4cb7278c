#include "core/config/schema.h"

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "core/config/convert.h"
#include "tests/catch.h"
#include "tests/config/helpers.h"

using namespace nrl;
using namespace nrl::config_detail;
using namespace nrl::test;

TEST_CASE("every key is fully described, and its default is a value of it", "[config]") {
  int count = 0;
  for (const Key& key : Schema::get().keys()) {
    INFO(key.path);
    CHECK(key.help.size() > 3);
    CHECK(key.help.back() == '.');
    if (!key.get && !key.model) CHECK(!key.built);  // what is supported has a member
    if (key.kind == Kind::choice) CHECK(!key.choices.names.empty());
    if (key.model) continue;
    // An override with the default is accepted, so that a resolved file can be written out and read again.
    const ConfigResult result = key.belongs_to(Algorithm::pretrain)
                                    ? load_base({key.path + "=" + key.default_yaml()})
                                    : load_text(base_yaml);
    for (const Diagnostic& d : result.diagnostics) {
      INFO(render({d}));
      CHECK((contains(d.message, "must be given")));
    }
    ++count;
  }
  CHECK(count > 150);
}

TEST_CASE("every alias leads to its key", "[config]") {
  for (const Key& key : Schema::get().keys())
    for (const Alias& alias : key.aliases) {
      INFO(alias.path);
      if (!key.belongs_to(Algorithm::pretrain)) continue;
      const std::string value = alias.is_switch()            ? "true"
                                : key.default_yaml().empty() ? "1"
                                                             : key.default_yaml();
      const ConfigResult result = load_base({alias.path + "=" + value});
      for (const Diagnostic& d : result.diagnostics) {
        INFO(render({d}));
        CHECK(d.key == key.path);
        CHECK(!contains(d.message, "unknown"));
      }
    }
}

TEST_CASE("a section is also an alias of its first key", "[config]") {
  const auto granularity = [](const std::string& value) {
    const ConfigResult result = load_base({"policy.recompute=" + value});
    CHECK(result.ok());
    return result.config.policy.recompute.granularity;
  };
  CHECK(granularity("full") == RecomputeGranularity::full);
  CHECK(granularity("auto") == RecomputeGranularity::automatic);
  CHECK(granularity("null") == Config{}.policy.recompute.granularity);
  CHECK(granularity("{granularity: full}") == RecomputeGranularity::full);
  CHECK(!load_base({"policy.recompute=3"}).ok());
}

TEST_CASE("explain describes a key, and suggests one for an unknown name", "[config]") {
  bool known = false;
  const std::string lr = explain("policy.optimizer.lr", &known);
  CHECK(known);
  CHECK(contains(lr, "Peak learning rate"));
  CHECK(contains(lr, "default  3e-04"));
  CHECK(contains(lr, "training.learning_rate"));
  CHECK(contains(explain("training.bf16", &known), "true: bfloat16"));
  CHECK(known);
  CHECK(contains(explain("policy.scheduler", &known), "lr_decay_style"));
  CHECK(known);
  CHECK(contains(explain("policy.optimzer.lr", &known), "there is no key"));
  CHECK(!known);
  CHECK(contains(explain("policy.learningrate", &known), "there is no key"));
  CHECK(contains(explain("qqq\x1b[2J", &known), "no key 'qqq\\x1b[2J'"));
  CHECK(!known);
  CHECK(contains(explain("policy.optimizer.lrr", &known), "did you mean 'policy.optimizer.lr'?"));
  CHECK(contains(explain("logger.swanlab_enabled", &known), "Not supported yet: only false is accepted"));
  CHECK(contains(explain("policy.scheduler.unit", &known), "Supported today: optimizer_steps"));
  CHECK(contains(explain("training.batch_size", &known), "train_global_batch_size"));
  CHECK(contains(explain("", &known), "policy."));
}

TEST_CASE("explain of a section describes it and has one line for each key", "[config]") {
  std::vector<std::string> sections{""};
  for (const Key& key : Schema::get().keys())
    for (std::string path = key.section(); !path.empty();
         path = path.find('.') == std::string::npos ? "" : path.substr(0, path.rfind('.')))
      sections.push_back(path);
  for (const std::string& section : sections) {
    INFO(section);
    const Schema& schema = Schema::get();
    CHECK(schema.section_help(section).size() > 5);
    const std::string text = explain(section);
    std::istringstream lines(text.substr(text.rfind(section.empty() ? "(top level)\n" : section + "\n")));
    std::string line;
    std::getline(lines, line);
    std::getline(lines, line);
    CHECK(line == "  " + std::string(schema.section_help(section)));
    for (const std::string_view child : schema.children(section)) {
      REQUIRE(std::getline(lines, line));
      INFO(line);
      CHECK(line.starts_with("  " + std::string(child)));
      CHECK(line.size() > 40);
      CHECK(line.size() < 200);
    }
    REQUIRE(std::getline(lines, line));
    CHECK(contains(line, "describes a key in full"));
    CHECK(!std::getline(lines, line));
  }
  CHECK(explain("policy.scheduler.") == explain("policy.scheduler"));
  bool known = false;
  const std::string foreign = explain("training", &known);
  CHECK(known);
  CHECK(contains(foreign, "training.fp16"));
  CHECK(contains(foreign, "policy.precision (true: float16; false: -)"));
  CHECK(
      contains(foreign, "policy.train_global_batch_size (multiplied by policy.gradient_accumulation_steps)"));
}

TEST_CASE("explain searches names and meanings", "[config]") {
  struct Search {
    const char* text;
    const char* found;
  };
  const Search cases[] = {{"lr", "Peak learning rate"},                      // the end of a key
                          {"learning_rate", "policy.optimizer.lr\n"},        // of another spelling
                          {"learning rate", "policy.optimizer.lr\n"},        // written as words
                          {"LearningRate", "policy.optimizer.lr\n"},         // in another style
                          {"batch_size", "policy.train_global_batch_size"},  // in several keys
                          {"warmup", "policy.scheduler.lr_warmup_iters"},
                          {"leaning_rat", "did you mean 'policy.optimizer.lr'?"},  // near to another spelling
                          {"hub", "there is no key"},
                          {"square root", "there is no key"},
                          {"global norm", "policy.max_grad_norm\n  Clip gradients"}};
  for (const Search& c : cases) {
    const std::string text = explain(c.text);
    INFO(c.text);
    INFO(text);
    CHECK(contains(text, c.found));
  }
  bool known = false;
  CHECK(contains(explain("warmup", &known), "it is found in"));
  CHECK(known);
}

TEST_CASE("the reference page is up to date", "[config]") {
  const char* path = NRL_SOURCE_DIR "/docs/configuration.md";
  if (std::getenv("NRL_UPDATE_DOCS")) std::ofstream(path) << config_markdown();
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  // When it is not: run this test with NRL_UPDATE_DOCS=1.
  CHECK((text.str() == config_markdown()));
}

TEST_CASE("the dump says where every value came from", "[config]") {
  const std::string dump = dump_resolved(load_base({"policy.optimizer.lr=0.001"}));
  CHECK(contains(dump, "lr: 0.001"));
  CHECK(contains(dump, "# command line: policy.optimizer.lr=0.001\n"));
  CHECK(contains(dump, "# t.yaml:4:18\n"));
  CHECK(contains(dump, "  # default\n"));
  for (const Key& key : Schema::get().keys())
    if (key.get && key.belongs_to(Algorithm::pretrain)) CHECK(contains(dump, key.leaf() + ": "));
}

TEST_CASE("the number grammar is decimal and strict", "[config]") {
  for (const char* bad :
       {"", "-", "+1", "01", "-01", "1_0", "0x1", "1e3", "1.0", " 1", "1 ", "9223372036854775808", "1k"})
    CHECK(!parse_integer(bad));
  CHECK(parse_integer("-9223372036854775808") == std::numeric_limits<int64_t>::min());
  CHECK(parse_integer("0") == 0);
  CHECK(parse_size("20k") == 20000);
  CHECK(parse_size("3GiB") == 3221225472);
  for (const char* bad : {"k", "1K", "1kb", "1 k", "9999999999B", "1.5k", "1kk"}) CHECK(!parse_size(bad));
  for (const char* bad : {"", ".5", "1.", "1e", "nan", ".nan", "inf", "1e400", "0x1p3", "1,5", "--1", "1e+"})
    CHECK(!parse_number(bad));
  CHECK(parse_number("1.5e-3") == 1.5e-3);
  CHECK(parse_number("-2") == -2.0);
  for (const double x : {0.1, 1e-300, 3e-4, 123456789.125, -0.0}) CHECK(parse_number(number_text(x)) == x);
}
