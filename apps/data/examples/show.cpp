#include "apps/data/examples/show.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "core/base/text.h"

namespace nrl::data {
namespace {

constexpr std::string_view green = "\x1b[32m", inverse = "\x1b[7m", red = "\x1b[31m", plain = "\x1b[0m";
constexpr std::string_view no_end_sign = "\u2403";

std::string share(int64_t part, int64_t whole) {
  return fmt::format("{:.1f} %",
                     whole > 0 ? 100.0 * static_cast<double>(part) / static_cast<double>(whole) : 0.0);
}

/// Incidents with their description.
struct IncidentText {
  const char* name;
  const RecordIncidents* incidents;
  const char* text;
};
std::vector<IncidentText> incidents_of(const ExampleCounts& c) {
  return {{"truncated", &c.truncated, "truncated to the longest length allowed"},
          {"end_lost", &c.end_lost, "of them without their last end token"},
          {"no_end_token", &c.no_end_token, "without an end token to train"},
          {"special_text", &c.special_text, "with the text of a special token, tokenized as that token"},
          {"dropped", &c.dropped, "left out: too long"},
          {"special_dropped", &c.special_dropped, "left out: the text of a special token"},
          {"without_loss", &c.without_loss, "left out: no token to train"},
          {"skipped", &c.skipped, "left out: bad records"}};
}

std::vector<std::string> places_of(const ExampleSet& set, const RecordIncidents& incidents) {
  std::vector<std::string> places;
  for (const RecordIncidents::Place& place : incidents.places) places.push_back(set.where(place));
  return places;
}

std::string_view sequence_name(const ExampleSet& set, int sequence) {
  if (set.sequences_per_example() == 1) return "";
  return sequence == 0 ? "chosen" : "rejected";
}

// The mean over the tokens with a loss.
double mean_log_prob(const ExampleSet& set, int64_t example, TokenLogProbs kind) {
  double sum = 0;
  for (const float log_prob : set.log_probs(example, kind)) sum += log_prob;
  return sum / set.length(example, 0).loss_tokens;
}

/// A number of an example with its name.
struct NamedNumber {
  const char* name;
  JsonValue number;
};
std::vector<NamedNumber> numbers_of(const ExampleSet& set, int64_t example) {
  const ExampleColumns columns = set.columns();
  std::vector<NamedNumber> numbers;
  const auto add = [&](const char* name, bool given, const auto& number) {
    if (given) numbers.push_back({name, JsonValue(number())});
  };
  using enum ExampleValue;
  for (const auto& [value, name] :
       {std::pair(margin, "margin"), std::pair(reward, "reward"), std::pair(advantage, "advantage")})
    add(name, columns.has(value), [&] { return set.value(example, value); });
  add("group", columns.groups, [&] { return set.group(example); });
  for (const auto& [kind, name] :
       {std::pair(TokenLogProbs::sampler, "mean_logprob"), std::pair(TokenLogProbs::old, "mean_old_logprob")})
    add(name, columns.has(kind), [&] { return mean_log_prob(set, example, kind); });
  add("top_k", columns.top_k > 0, [&] { return columns.top_k; });
  return numbers;
}

// ", reward 0.5"; a margin of 0 says nothing.
std::string text_of(const NamedNumber& n) {
  std::string name = n.name;
  std::replace(name.begin(), name.end(), '_', ' ');
  if (n.number.is_integer()) return fmt::format(", {} {}", name, n.number.as_int());
  const double number = n.number.as_double();
  return name == "margin" && number == 0 ? "" : fmt::format(", {} {:.4g}", name, number);
}

/// The mean reward and the groups of a set of rollouts.
struct RolloutSummary {
  double mean_reward = 0;
  int64_t groups = 0, smallest = 0, largest = 0;  ///< examples of a group
};
RolloutSummary summarize_rollouts(const ExampleSet& set) {
  RolloutSummary summary;
  int64_t size = 0;
  for (int64_t i = 0; i < set.size(); ++i) {
    summary.mean_reward += set.value(i, ExampleValue::reward) / static_cast<double>(set.size());
    ++size;
    if (i + 1 < set.size() && set.group(i + 1) == set.group(i)) continue;
    summary.smallest = summary.groups == 0 ? size : std::min(summary.smallest, size);
    summary.largest = std::max(summary.largest, size);
    ++summary.groups;
    size = 0;
  }
  return summary;
}

}  // namespace

LengthSummary summarize_lengths(const ExampleSet& set) {
  std::vector<int32_t> lengths;
  lengths.reserve(static_cast<size_t>(set.size() * set.sequences_per_example()));
  for (int64_t i = 0; i < set.size(); ++i)
    for (int s = 0; s < set.sequences_per_example(); ++s) lengths.push_back(set.length(i, s).tokens);
  const auto quantile = [&](double q) -> int64_t {
    const auto rank = static_cast<ptrdiff_t>(std::ceil(q * static_cast<double>(lengths.size()))) - 1;
    std::nth_element(lengths.begin(), lengths.begin() + rank, lengths.end());
    return lengths[static_cast<size_t>(rank)];
  };
  if (lengths.empty()) return {};
  return {.p50 = quantile(0.5), .p90 = quantile(0.9), .max = quantile(1)};
}

std::vector<TokenRun> token_runs(const ExampleSet& set, const Tokenizer& tokenizer, int64_t example,
                                 int sequence) {
  std::unordered_map<int32_t, std::string> special;
  for (const Tokenizer::SpecialToken& token : tokenizer.special_token_list()) special[token.id] = token.text;
  const auto ids = set.ids(example, sequence);
  std::vector<TokenRun> runs;
  for (size_t t = 0; t < ids.size(); ++t) {
    const auto named = special.find(ids[t]);
    const bool is_special = named != special.end();
    const bool loss = set.in_loss(example, sequence, static_cast<int64_t>(t));
    const auto at = static_cast<int64_t>(t);
    if (runs.empty() || is_special || runs.back().special || runs.back().loss != loss)
      runs.push_back(
          {.text = is_special ? named->second : "", .loss = loss, .special = is_special, .begin = at});
    runs.back().end = at + 1;
  }
  // Some tokenizers drop a space at the beginning of the tokens that they decode: all from the first on are
  // decoded, and the text before is taken off.
  size_t before = 0;
  for (TokenRun& run : runs) {
    const std::string text = tokenizer.decode(ids.first(static_cast<size_t>(run.end)));
    if (!run.special) run.text = text.substr(std::min(before, text.size()));
    before = text.size();
  }
  return runs;
}

std::string example_text(const ExampleSet& set, const Tokenizer& tokenizer, int64_t example,
                         const ShowStyle& style) {
  std::string out;
  for (int s = 0; s < set.sequences_per_example(); ++s) {
    const SequenceLength length = set.length(example, s);
    out += fmt::format("example {}  {}  {}{}{} tokens, {} with loss", example, printable(set.where(example)),
                       sequence_name(set, s), sequence_name(set, s).empty() ? "" : "  ",
                       grouped(length.tokens), grouped(length.loss_tokens));
    if (s == 0)
      for (const NamedNumber& number : numbers_of(set, example)) out += text_of(number);
    out += '\n';
    const auto runs = token_runs(set, tokenizer, example, s);
    for (size_t i = 0; i < runs.size(); ++i) {
      const TokenRun& run = runs[i];
      const bool first = run.loss && (i == 0 || !runs[i - 1].loss);
      const bool last = run.loss && (i + 1 == runs.size() || !runs[i + 1].loss);
      if (style.color) {
        out += fmt::format("{}{}{}{}", run.loss ? green : "", run.special ? inverse : "", printable(run.text),
                           run.loss || run.special ? plain : "");
      } else {
        out += fmt::format("{}{}", first ? "[" : "", printable(run.text));
      }
      if (last && !run.special && set.train_on() != TrainOn::all)
        out += style.color ? fmt::format("{}{}{}", red, no_end_sign, plain) : std::string(no_end_sign);
      if (last && !style.color) out += ']';
    }
    out += '\n';
    if (!style.ids) continue;
    const auto ids = set.ids(example, s);
    out += "ids";
    for (size_t t = 0; t < ids.size(); ++t)
      out += fmt::format(" {}{}", ids[t], set.in_loss(example, s, static_cast<int64_t>(t)) ? "*" : "");
    out += '\n';
  }
  return out;
}

JsonValue example_json(const ExampleSet& set, const Tokenizer& tokenizer, int64_t example) {
  JsonValue sequences = JsonValue::array();
  for (int s = 0; s < set.sequences_per_example(); ++s) {
    JsonValue ids = JsonValue::array(), loss = JsonValue::array(), parts = JsonValue::array();
    for (const int32_t id : set.ids(example, s)) ids.push_back(id);
    for (int64_t t = 0; t < set.length(example, s).tokens; ++t)
      loss.push_back(set.in_loss(example, s, t) ? 1 : 0);
    for (const TokenRun& run : token_runs(set, tokenizer, example, s))
      parts.push_back(JsonValue::object({{"text", run.text}, {"loss", run.loss}, {"special", run.special}}));
    sequences.push_back(JsonValue::object(
        {{"tokens", std::move(ids)}, {"loss", std::move(loss)}, {"parts", std::move(parts)}}));
  }
  JsonValue json = JsonValue::object({{"example", example},
                                      {"record", set.source_row(example)},
                                      {"where", set.where(example)},
                                      {"sequences", std::move(sequences)}});
  for (NamedNumber& number : numbers_of(set, example)) json.set(number.name, std::move(number.number));
  return json;
}

std::string set_text(const ExampleSet& set) {
  const ExampleCounts& c = set.counts();
  const LengthSummary lengths = summarize_lengths(set);
  std::string out;
  for (const std::string& note : set.notes()) out += printable(note) + '\n';
  out += fmt::format("train_on: {}\n", name_of(set.train_on()));
  out += fmt::format("{} -> {}{}, {} tokens, {} with loss\n", counted(c.records, "record"),
                     counted(c.examples, "example"), set.sequences_per_example() == 2 ? " (pairs)" : "",
                     grouped(c.tokens), share(c.loss_tokens, c.tokens));
  out += fmt::format("tokens of a sequence: p50 {}, p90 {}, max {}\n", grouped(lengths.p50),
                     grouped(lengths.p90), grouped(lengths.max));
  if (set.columns().groups) {
    const RolloutSummary rollouts = summarize_rollouts(set);
    out += fmt::format("{} of {}", counted(rollouts.groups, "group"), grouped(rollouts.smallest));
    if (rollouts.largest > rollouts.smallest) out += fmt::format(" to {}", grouped(rollouts.largest));
    if (set.columns().has(ExampleValue::reward))
      out += fmt::format(", mean reward {:.4g}", rollouts.mean_reward);
    out += '\n';
  }
  for (const IncidentText& incident : incidents_of(c)) {
    if (incident.incidents->count == 0) continue;
    out += fmt::format("{} {}", grouped(incident.incidents->count), incident.text);
    for (const std::string& place : places_of(set, *incident.incidents)) out += "\n  " + clipped(place, 300);
    if (const int64_t more =
            incident.incidents->count - static_cast<int64_t>(incident.incidents->places.size());
        more > 0)
      out += fmt::format("\n  and {} more", grouped(more));
    out += '\n';
  }
  if (c.duplicates > 0) out += fmt::format("{} duplicates of other examples\n", grouped(c.duplicates));
  if (c.bytes_without_token > 0)
    out += fmt::format("{} bytes of text without a token were left out\n", grouped(c.bytes_without_token));
  return out;
}

JsonValue set_json(const ExampleSet& set) {
  const ExampleCounts& c = set.counts();
  const LengthSummary lengths = summarize_lengths(set);
  JsonValue json = JsonValue::object({{"format", name_of(set.format())},
                                      {"train_on", name_of(set.train_on())},
                                      {"notes", JsonValue(set.notes())},
                                      {"records", c.records},
                                      {"examples", c.examples},
                                      {"sequences", c.sequences},
                                      {"tokens", c.tokens},
                                      {"loss_tokens", c.loss_tokens},
                                      {"length_p50", lengths.p50},
                                      {"length_p90", lengths.p90},
                                      {"length_max", lengths.max},
                                      {"duplicates", c.duplicates},
                                      {"bytes_without_token", c.bytes_without_token}});
  if (set.columns().groups) {
    const RolloutSummary rollouts = summarize_rollouts(set);
    json.set("groups", rollouts.groups);
    json.set("smallest_group", rollouts.smallest);
    json.set("largest_group", rollouts.largest);
    if (set.columns().has(ExampleValue::reward)) json.set("mean_reward", rollouts.mean_reward);
  }
  for (const IncidentText& incident : incidents_of(c))
    json.set(incident.name, JsonValue::object({{"count", incident.incidents->count},
                                               {"first", JsonValue(places_of(set, *incident.incidents))}}));
  json.set("warnings", JsonValue(set_warnings(set)));
  return json;
}

std::vector<std::string> set_warnings(const ExampleSet& set) {
  const ExampleCounts& c = set.counts();
  std::vector<std::string> warnings;
  // Completions of rollouts end where the sampler stopped.
  if (c.no_end_token.count > 0 && set.format() != ExampleFormat::rollouts)
    warnings.push_back(fmt::format(
        "no end token is trained in {} of {}: the model does not learn to stop. Fix: end the turns of "
        "the chat template with a special token of the tokenizer",
        grouped(c.no_end_token.count), counted(c.examples, "example")));
  constexpr double many = 0.2;
  if (static_cast<double>(c.truncated.count) > many * static_cast<double>(c.examples))
    warnings.push_back(
        fmt::format("{} of the examples are truncated. Fix: raise policy.max_total_sequence_length",
                    share(c.truncated.count, c.examples)));
  return warnings;
}

}  // namespace nrl::data
