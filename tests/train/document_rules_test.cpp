// Which token ends a document, and runs in which documents are kept apart.

#include "apps/train/start/document_rules.h"

#include "tests/catch.h"
#include "tests/train/training_run.h"

using namespace nrl;
using namespace nrl::test;

namespace {

/// Token files in a directory, with or without a manifest.
class Files : public Workbench {
 public:
  /// `eod`: what the manifest of NAME says, "null" or a number.
  void write(const std::string& name, const std::string& eod) const {
    write_tokens(name, random_tokens(100, 2));
    std::ofstream(*this / (name + ".dataset.json"))
        << fmt::format(R"({{"format":"nrl-train dataset","version":1,"tokenizer":"bytes","tokenizer_file":"",
                           "vocab_size":257,"eod":{},"documents":1,"tokens":100,"text_bytes":100}})",
                       eod);
  }
  Config config(const std::vector<std::string>& train, const std::string& validation = "") const {
    Config c;
    for (const std::string& name : train) c.data.train.data_path.push_back(*this / name);
    if (!validation.empty()) c.data.validation.data_path = {*this / validation};
    c.data.eod_mask_loss = true;
    return c;
  }
};

}  // namespace

TEST_CASE("the end token is the one that the data was made with") {
  const Files files;
  files.write("a", "7");
  files.write("b", "7");
  files.write("other", "8");
  files.write("none", "null");
  const auto end = [](const Config& c) { return train::document_rules(c).end_token; };
  CHECK(end(files.config({"a", "b"})) == 7);
  CHECK(end(files.config({"other"})) == 8);
  // Of data from elsewhere: "corpus" has no manifest.
  Config foreign = files.config({"corpus"});
  foreign.policy.tokenizer.name = "bytes";
  CHECK(end(foreign) == 256);
  foreign.data.train.data_path = {files / "a"};  // what the file says comes first
  CHECK(end(foreign) == 7);
  CHECK(end(files.config({"a", "missing"})) == 7);

  const auto refused = [](const Config& c, const char* text) {
    const Caught caught = error_of([&] { train::document_rules(c); });
    CAPTURE(caught.text);
    CHECK(caught.code == 78);
    CHECK(contains(caught.text, text));
  };
  refused(files.config({"a", "other"}), "documents end with token 7 in ");
  refused(files.config({"a"}, "other"), "but with token 8 in ");
  refused(files.config({"none"}), "was prepared with --no-append-eod");
  refused(files.config({"corpus"}), "set policy.tokenizer.name to its tokenizer");
  // Nothing is asked where documents are not kept apart.
  Config off = files.config({"a", "other"});
  off.data.eod_mask_loss = false;
  CHECK_FALSE(train::document_rules(off).any());
}

TEST_CASE("a rule without an end token is refused at its key, before anything starts") {
  const Workbench bench;
  for (const char* key : {"data.reset_position_ids", "data.reset_attention_mask", "data.eod_mask_loss"}) {
    const Finished run = bench.run("run", {std::string(key) + "=true"});
    INFO(run.err);
    CHECK(run.code == Exit::config);
    CHECK(contains(run.err, std::string("command line: ") + key));
    CHECK(contains(run.err, "set policy.tokenizer.name to its tokenizer"));
    CHECK_FALSE(std::filesystem::exists(bench / "run"));
  }
}

TEST_CASE("a batch in which no token has a loss trains nothing and is no accident") {
  const Workbench bench;
  bench.write_tokens("ends", std::vector<int32_t>(200, 256));
  const Finished run =
      bench.run("run", {"policy.tokenizer.name=bytes", "data.train.data_path=" + bench / "ends",
                        "data.eod_mask_loss=true", "policy.optimizer.weight_decay=0",
                        "checkpointing.save_period=1", "data.split=[1,1,0]", "pretrain.val_at_end=true"});
  INFO(run.err);
  REQUIRE(run.code == Exit::ok);
  CHECK(bench.values("run", "loss") == std::vector<double>(4, 0.0));
  CHECK(bench.values("run", "grad_norm") == std::vector<double>(4, 0.0));
  CHECK(bench.rows("run").back().get_double("val_loss") == 0);
  CHECK(bench.weights("run", 4) == bench.weights("run", 2));
}
