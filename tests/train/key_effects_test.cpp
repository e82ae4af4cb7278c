// Every key has an effect: two values of it give different rows, plans, files, lines or verdicts. A key of
// the schema without an entry in key_effects.h fails here.

#include "tests/train/key_effects.h"

#include <map>
#include <set>

#include <spdlog/fmt/ranges.h>

#include "apps/plan/run_plan.h"
#include "apps/state/model_source.h"
#include "core/config/schema.h"
#include "tests/catch.h"
#include "tests/train/training_run.h"

using namespace nrl;
using namespace nrl::test;

namespace {

const std::map<std::string, std::string> models{
    {"gpt2",
     "{model_type: gpt2, vocab_size: 272, n_embd: 16, n_layer: 2, n_head: 4, n_positions: 64, attn_pdrop: 0, "
     "resid_pdrop: 0, embd_pdrop: 0, initializer_range: 0.2}"},
    {"llama",
     "{model_type: llama, vocab_size: 272, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
     "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64, initializer_range: 0.2}"},
    {"mistral",
     "{model_type: mistral, vocab_size: 272, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
     "num_attention_heads: 4, max_position_embeddings: 64, initializer_range: 0.2}"},
    {"mixtral",
     "{model_type: mixtral, vocab_size: 272, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
     "num_attention_heads: 4, num_local_experts: 4, max_position_embeddings: 64, initializer_range: 0.2}"},
    {"qwen2_moe",
     "{model_type: qwen2_moe, vocab_size: 272, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
     "num_attention_heads: 4, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 8, "
     "shared_expert_intermediate_size: 8, max_position_embeddings: 64, initializer_range: 0.2}"},
    {"qwen3",
     "{model_type: qwen3, vocab_size: 272, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
     "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64, "
     "rope_theta: 100, initializer_range: 0.2}"},
    {"gemma3_text",
     "{model_type: gemma3_text, vocab_size: 272, hidden_size: 16, intermediate_size: 24, num_hidden_layers: "
     "2, "
     "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64, "
     "sliding_window: 4, query_pre_attn_scalar: 8, rope_theta: 100, initializer_range: 0.2}"}};

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

class EffectBench : public Workbench {
 public:
  EffectBench() {
    write_tokens("other", random_tokens(2000, 9));
    std::vector<int32_t> documents = random_tokens(2000, 8);
    for (size_t i = 0; i < documents.size(); i += 5) documents[i] = 256;  // the end token of `bytes`
    write_tokens("documents", documents);
    write_examples();
  }

  std::string observe(Observed what, const std::vector<std::string>& overrides) {
    if (what == Observed::plan) return plan(overrides);
    std::filesystem::remove_all(*this / "run");
    const Finished finished = run("run", overrides);
    if (what == Observed::exit || what == Observed::refused)
      return finished.code == Exit::ok ? "runs" : "refused";
    if (what == Observed::banner) {  // none where the machine lacks the device or the instruction set
      const size_t at = finished.out.find("\ndevice ");
      return at == std::string::npos ? "none" : finished.out.substr(at, 60);
    }
    INFO(finished.err);
    REQUIRE(finished.code == Exit::ok);
    switch (what) {
      case Observed::rows:
        return rows_text();
      case Observed::files:
        return files();
      case Observed::config:
        return read("run/checkpoints/step-4/config.json");
      default:
        return lines(finished.out);
    }
  }

 private:
  void write_examples() const {
    const auto write = [&](const char* name, const std::string& text) {
      std::ofstream(*this / name) << text;
    };
    std::string chat, instructions;
    for (int i = 0; i < 12; ++i) {
      const auto turns = [&](int n) {
        std::string out;
        for (int t = 0; t < n; ++t)
          out += fmt::format(R"({}{{"role":"{}","content":"{}"}})", t ? "," : "",
                             t % 2 ? "assistant" : "user", i * 7 + t);
        return out;
      };
      chat += fmt::format(R"({{"messages":[{}],"other":[{}]}})", turns(4), turns(2)) + "\n";
      instructions +=
          fmt::format(R"({{"prompt":"a{0}","completion":"b{0}","question":"c{0}","answer":"d{0}"}})", i) +
          "\n";
    }
    // Ratios of all sizes, with advantages of both signs and completions of several lengths.
    std::string pairs, rollouts, rewarded, lessons;
    for (int i = 0; i < 12; ++i) {
      pairs += fmt::format(R"({{"prompt":"a{}","chosen":"{}","rejected":"c{}"}})", i,
                           std::string(1 + i % 5, 'b'), i * 7) +
               "\n";
      const auto list = [&](auto element) {
        std::vector<std::string> elements;
        for (int t = 0; t < 1 + i % 4; ++t) elements.push_back(fmt::format("{}", element(t)));
        return fmt::format("[{}]", fmt::join(elements, ","));
      };
      rollouts +=
          fmt::format(
              R"({{"prompt_ids":[65,{}],"completion_ids":{},"advantage":{},"old_logprobs":{},"logprobs":{}}})",
              66 + i, list([&](int t) { return 70 + i + t; }), i % 3 ? 0.5 : -1.0,
              list([&](int t) { return -1 - (i + 3 * t) % 9; }), list([](int) { return -4; })) +
          "\n";
      rewarded +=
          fmt::format(R"({{"prompt_ids":[65],"completion_ids":{},"reward":{},"group":{},"logprobs":{}}})",
                      list([&](int t) { return 70 + i + t; }), i % 5, i / 4, list([](int) { return -4; })) +
          "\n";
      lessons +=
          fmt::format(R"({{"prompt_ids":[65],"completion_ids":{},"topk_ids":{},"topk_logprobs":{}}})",
                      list([&](int t) { return 70 + i + t; }),
                      list([&](int t) { return fmt::format("[{},{},{}]", 70 + i + t, 80 + i, 65); }),
                      list([&](int t) { return fmt::format("[-0.5,-{},-{}]", 1 + t % 2, 2 + i % 3); })) +
          "\n";
    }
    write("pairs.jsonl", pairs);
    write("rollouts.jsonl", rollouts);
    write("rewarded.jsonl", rewarded);
    write("lessons.jsonl", lessons);
    write("chat.jsonl", chat);
    write("instructions.jsonl", instructions);
    write("bad.jsonl", chat + R"({"messages":[{"role":"user","content":"a"}]})" + "\n");
    write("chat.jinja", "{% for m in messages %}{{ m.content }};{% endfor %}");
    write("one.txt", "one {}");
    write("two.txt", "two {}");
    write("date.jinja", "{{ strftime_now('%d %m') }}{% for m in messages %}{{ m.content }}{% endfor %}");
  }
  std::string rows_text() const {
    std::string text;
    for (const JsonValue& row : rows("run")) {
      for (const char* field : {"step", "loss", "grad_norm", "lr", "val_loss", "text"})
        if (const JsonValue* value = row.find(field)) text += value->dump() + " ";
      text += "\n";
    }
    return text;
  }
  std::string files() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(*this / "run"))
      names.insert(entry.path());
    std::string text;
    for (const std::string& name : names) text += name + "\n";
    return text;
  }
  static std::string lines(const std::string& out) {
    std::string text;
    for (char c : out)
      if (c < '0' || c > '9') text += c;
    return text;
  }
  std::string plan(const std::vector<std::string>& overrides) const {
    const ConfigResult result = load_config_text(yaml("run"), "run.yaml", overrides);
    INFO(render(result.diagnostics));
    REQUIRE(result.ok());
    const auto p =
        plan::make_run_plan(result.config, train::load_model_spec(result), resolve_batch(result.config, 2),
                            plan::grid_position(result.config, 2, 0), DeviceType::cpu, 1);
    std::string text = fmt::format("{} {} {} {} {} {} {}", p->batch.global, p->batch.micro,
                                   p->batch.accumulation, p->sequence_length, p->parameters.total(),
                                   p->spec.ffn, p->groups.at(0).layout.buckets().size());
    for (int i = 0; i < memory::category_count; ++i)
      text += fmt::format(" {}", p->memory.bytes(static_cast<memory::Category>(i)));
    return text;
  }
};

struct Named {
  std::string key;
  const Effect* effect;
  std::string section = {};  ///< of a rotary scaling
};

std::vector<Named> all_effects() {
  std::vector<Named> all;
  for (const Effect& e : effects) all.push_back({e.key, &e});
  for (const Effect& e : model_effects) all.push_back({std::string("policy.model.") + e.key, &e});
  for (const std::string section : {"policy.model.rope_scaling", "policy.model.rope_parameters"})
    for (const Effect& e : rope_effects) all.push_back({section + "." + e.key, &e, section});
  return all;
}

}  // namespace

TEST_CASE("every key has an entry in the table of effects, and every entry is a key") {
  std::map<std::string, int> entries;
  for (const Named& named : all_effects()) ++entries[named.key];
  for (const auto& key : config_detail::Schema::get().keys()) {
    CAPTURE(key.path);
    const auto& choices = key.choices;
    const bool single = choices.built.size() == 1;  // nothing else is accepted
    CHECK(entries[key.path] == (key.built && !single ? 1 : 0));
    entries.erase(key.path);
  }
  for (const auto& [key, count] : entries) {
    CAPTURE(key);
    CHECK(count == 0);
  }
}

TEST_CASE("every key changes what its entry in the table of effects says") {
  EffectBench bench;
  for (const auto& [key, effect, section] : all_effects()) {
    CAPTURE(key, effect->a, effect->b, effect->context);
    if (effect->observed == Observed::nothing) continue;
    if (effect->observed == Observed::elsewhere) {
      const std::string test = read_file(std::string(NRL_SOURCE_DIR "/tests/") + effect->b, 1 << 20);
      CHECK(contains(test, effect->a));
      continue;
    }
    std::istringstream context(effect->context);
    std::string word;
    context >> word;
    bench.model = models.at(word);
    std::vector<std::string> overrides;
    while (context >> word) {
      if (word.starts_with("@.")) word = section + word.substr(1);
      if (word.starts_with("=")) word = "policy.model." + word.substr(1);
      overrides.push_back(replaced(word, "DIR", bench.path()));
    }
    const auto with = [&](const std::string& value) {
      std::vector<std::string> all = overrides;
      all.push_back(key + "=" + replaced(value, "DIR", bench.path()));
      return bench.observe(effect->observed, all);
    };
    const std::string a = with(effect->a), b = with(effect->b);
    if (effect->observed == Observed::refused)
      CHECK(a + b == "refusedrefused");
    else
      CHECK(a != b);
  }
}
