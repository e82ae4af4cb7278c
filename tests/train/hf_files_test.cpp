// The chat template of a run in its checkpoints.

#include "apps/state/hf_files.h"

#include <string>
#include <vector>

#include "apps/data/chat/chat_template.h"
#include "apps/data/tokenizer.h"
#include "core/base/error.h"
#include "core/config/config.h"
#include "core/io/atomic_file.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::test;
using train::HfFiles;

namespace {

/// A run on conversations with a template; the model and the tokenizer of `directory`, else bytes.
Config config_of(const std::string& chat_template, const std::string& directory = "") {
  Config c;
  c.algorithm = Algorithm::sft;
  c.policy.tokenizer.chat_template = chat_template;
  if (directory.empty())
    c.policy.tokenizer.name = "bytes";
  else
    c.policy.model_name = directory;
  return c;
}

/// The contents of all chat_template.jinja.
std::vector<std::string> templates_in(const HfFiles& hf) {
  std::vector<std::string> found;
  for (const data::Tokenizer::File& file : hf.files)
    if (file.name == "chat_template.jinja") found.push_back(file.content);
  return found;
}

std::vector<std::string> templates_of(const Config& c) {
  return templates_in(train::collect_hf_files(c));
}

Exit refused(const Config& c) {
  return static_cast<Exit>(error_of([&] { (void)train::collect_hf_files(c); }).code);
}

using Texts = std::vector<std::string>;

}  // namespace

TEST_CASE("checkpoints have the chat template of their run", "[train]") {
  const std::string zephyr = data::builtin_chat_template("zephyr");
  const TemporaryDirectory dir;
  for (const auto& file : train::collect_hf_files(config_of("zephyr")).files)
    write_file_atomic(dir / file.name, file.content);
  CHECK(data::tokenizer_in(dir.path())->chat_template() == zephyr);

  // A run from that checkpoint keeps the template unless it has another one.
  CHECK(templates_of(config_of("default", dir.path())) == Texts{zephyr});
  CHECK(templates_of(config_of("none", dir.path())) == Texts{zephyr});
  CHECK(templates_of(config_of("chatml", dir.path())) == Texts{data::builtin_chat_template("chatml")});
  CHECK(templates_of(config_of("{{ messages }}", dir.path())) == Texts{"{{ messages }}"});
  write_file_atomic(dir / "mine.jinja", "{{ 1 }}\n");
  CHECK(templates_of(config_of(dir / "mine.jinja", dir.path())) == Texts{"{{ 1 }}\n"});
  // One of the tokenizer's other templates becomes its usual one.
  make_directories(dir / "chat_templates");
  write_file_atomic(dir / "chat_templates/tools.jinja", "{{ tools }}");
  CHECK(templates_of(config_of("tools", dir.path())) == Texts{"{{ tools }}"});

  CHECK(templates_of(config_of("default")).empty());
  CHECK(templates_of(config_of("none")).empty());
  CHECK(refused(config_of("nowhere")) == Exit::config);
  CHECK(refused(config_of("{{ 1 +")) == Exit::data);
  // Token files have no template.
  Config tokens = config_of("zephyr");
  tokens.algorithm = Algorithm::pretrain;
  CHECK(templates_of(tokens).empty());
}
