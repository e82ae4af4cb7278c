#include "apps/bench/claims_page.h"

#include <algorithm>
#include <map>

#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::bench {
namespace {

constexpr const char* intro = R"(# What guides promise, and what was measured

Guides for other trainers say what a feature saves or costs, for models and machines that they do not always name. This
page has such statements beside a measurement on one machine, of one model. `scripts/bench-claims.sh` runs the comparisons
of `configs/suites/claims.yaml`, and the program writes this page (`--page`); run it on your machine and model.

Every variant trains on random tokens in an engine of its own. Time is the median of three rounds in which the variants
take turns, relative to the first variant of the same round. Memory is the arena of a rank, which is what the plan says.

A verdict compares the ratio to the first variant with the promised one: *held*, *smaller* or *larger*. A saving with the
verdict *larger* leaves more bytes than promised. A statement about GPUs is *not measurable on a CPU*; one whose variant this
machine refuses is *not here*, with the reason.

)";

constexpr uint64_t most_bytes = 64 << 20;

std::string mib(double bytes) {
  const auto tenths = static_cast<int64_t>(bytes / (1 << 20) * 10 + 0.5);
  return fmt::format("{}.{}", grouped(tenths / 10), tenths % 10);
}

/// Text in a cell: a bar would end it.
std::string cell(std::string_view text) {
  std::string out;
  for (const char c : text) out += c == '|' ? std::string("\\|") : c == '\n' ? " " : std::string(1, c);
  return out;
}

/// The rows of one comparison.
struct Section {
  const JsonValue* about = nullptr;
  std::vector<const JsonValue*> variants, claims;
  std::string skipped;
};

std::string text_of(const JsonValue& result, const std::string& name, const Section& s) {
  std::string out = fmt::format("## {}\n\n`nrl-train bench compare {} {} --only {}`: {}; ranks: {}; {}.\n",
                                name, result.get_string("suite"), s.about->get_string("config"), name,
                                s.about->get_string("model"), result.get_int("ranks"),
                                result.at("device").get_string("name"));
  if (const std::string& note = s.about->get_string("note"); !note.empty()) out += note + "\n";
  out += "\n| promised | by | here | verdict |\n|---|---|---|---|\n";
  for (const JsonValue* c : s.claims)
    out += fmt::format("| {}: {} | {} | {} (`{}`) | {} |\n", cell(c->get_string("claim")),
                       cell(c->get_string("promised")), cell(c->get_string("source")),
                       cell(c->get_string("measured")), cell(c->get_string("variant")),
                       cell(c->get_string("verdict")));
  const bool sends = std::any_of(s.variants.begin(), s.variants.end(),
                                 [](const JsonValue* v) { return v->get_double("sent_bytes", 0) > 0; });
  out +=
      fmt::format("\n| variant | time | weights | gradients | optimizer | activations | MiB planned | |{}\n",
                  sends ? " MiB sent per step |" : "");
  out += fmt::format("|---|---|---|---|---|---|---|---|{}\n", sends ? "---|" : "");
  double base = 0;
  for (const JsonValue* v : s.variants) {
    if (v->contains("refused")) {
      out += fmt::format("| {} | refused: {} | | | | | | |{}\n", cell(v->get_string("name")),
                         cell(v->get_string("refused")), sends ? " |" : "");
      continue;
    }
    const double planned = v->get_double("planned_bytes");
    if (base == 0) base = planned;
    out += fmt::format("| {} | {} |", cell(v->get_string("name")), change_text(v->get_double("time_ratio")));
    for (const char* part : {"weights", "gradients", "optimizer", "activations", "planned_bytes"})
      out += fmt::format(" {} |", mib(v->get_double(part)));
    out += fmt::format(" {} |", change_text(base > 0 ? planned / base : 1));
    if (sends) out += fmt::format(" {} |", mib(v->get_double("sent_bytes")));
    out += "\n";
  }
  return out + "\n";
}

}  // namespace

std::string change_text(double ratio) {
  return fmt::format("{:+.1f} %", 100 * (ratio - 1));
}

std::string claims_page(const std::vector<std::string>& results) {
  std::string out = intro;
  std::map<std::string, std::string> skipped;  // why, by name of the comparison
  std::vector<std::string> measured;
  for (const std::string& path : results) {
    const JsonValue result = parse_json(read_file(path, most_bytes), path);
    std::vector<std::string> order;
    std::map<std::string, Section> sections;
    for (const JsonValue& row : result.at("rows").items()) {
      const std::string& name = row.get_string("comparison");
      if (!sections.contains(name)) order.push_back(name);
      Section& s = sections[name];
      if (row.contains("skipped"))
        skipped[name] = row.get_string("skipped");
      else if (row.contains("model"))
        s.about = &row;
      else if (row.contains("claim"))
        s.claims.push_back(&row);
      else
        s.variants.push_back(&row);
    }
    for (const std::string& name : order) {
      if (!sections[name].about) continue;
      if (std::find(measured.begin(), measured.end(), name) != measured.end()) continue;
      out += text_of(result, name, sections[name]);
      measured.push_back(name);
    }
  }
  for (const auto& [name, why] : skipped)
    if (std::find(measured.begin(), measured.end(), name) == measured.end())
      out += fmt::format("## {}\n\nNot measured: {}.\n\n", name, why);
  out.pop_back();  // one newline at the end
  return out;
}

}  // namespace nrl::bench
