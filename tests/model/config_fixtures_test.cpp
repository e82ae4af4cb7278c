// Reading and writing config.json against transformers: tests/model/fixtures holds files with the logits that
// transformers 4 or 5 computes from them (scripts/dev/config-fixtures.py).

#include <algorithm>
#include <cmath>

#include "apps/model/families/hf_config.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/model/fixture.h"

using namespace nrl;

namespace {

/// Greatest difference of the logits of the model in `directory` from the fixture's, over the greatest logit.
double difference(const std::string& directory, const test::Fixture& f) {
  test::LoadedModel m(directory);
  model::Inference session = m.inference(static_cast<int64_t>(f.tokens.size()));
  size_t done = 0;
  double largest = 0, worst = 0;
  for (size_t i = 0; i < f.positions.size(); ++i) {
    const size_t end = f.positions[i] + 1;
    const auto logits = session.append(std::span(f.tokens).subspan(done, end - done));
    done = end;
    REQUIRE(logits.size() == f.logits[i].size());
    if (!std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); })) return INFINITY;
    for (size_t v = 0; v < logits.size(); ++v) {
      largest = std::max(largest, std::abs(f.logits[i][v]));
      worst = std::max(worst, std::abs(static_cast<double>(logits[v]) - f.logits[i][v]));
    }
  }
  return worst / largest;
}

JsonValue without(const JsonValue& config, const std::vector<std::string>& keys) {
  JsonValue kept = JsonValue::object();
  for (const JsonMember& member : config.members())
    if (std::find(keys.begin(), keys.end(), member.key) == keys.end()) kept.set(member.key, member.value);
  return kept;
}

}  // namespace

TEST_CASE("models read from config.json have the logits of transformers", "[model][config]") {
  const test::TemporaryDirectory directory(test::TemporaryDirectory::Where::memory);
  const std::vector<test::Fixture> fixtures = test::all_fixtures();
  REQUIRE(fixtures.size() == 73);
  for (const test::Fixture& f : fixtures) {
    INFO(f.name);
    const auto check = [&](const char* which, const JsonValue& config) {
      INFO(which);
      try {
        test::write_model(directory.path(), config, f.tensors);
        // Rounding to fp32 makes up to 2e-6.
        CHECK(difference(directory.path(), f) < 1e-5);
      } catch (const Error& e) {
        FAIL_CHECK(e.what());
      }
    };
    check("as it is", f.config);
    // As a checkpoint has it, for transformers 5 and for transformers 4.
    const JsonValue written = parse_json(
        model::hugging_face_config(model::parse_model_config(f.config.dump(), f.name), "float32"), "written");
    check("written", written);
    if (f.config.get_string("model_type") == "gpt2") continue;
    check("rope_parameters alone", without(written, {"rope_theta", "rope_scaling"}));
    check("rope_theta and rope_scaling alone", without(written, {"rope_parameters"}));
  }
}
