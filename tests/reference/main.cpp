// reference_trainer COMMAND ARGS...: compares files that nrl-train wrote with the reference (see usage).

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "tests/reference/compare.h"
#include "tests/reference/compare_run.h"
#include "tests/reference/data.h"
#include "tests/reference/initial.h"

namespace reference {
namespace {

using Args = std::vector<std::string>;

const char* const usage =
    "reference_trainer train CONFIG.yaml INITIAL SAMPLES VALIDATION METRICS LAST [bf16] [poison TOKEN]\n"
    "    trains CONFIG from the model directory INITIAL and compares: SAMPLES and VALIDATION (`data show\n"
    "    --json` of all steps and of an evaluation), METRICS (metrics.jsonl), LAST (the last checkpoint).\n"
    "    Steps with TOKEN are skipped.\n"
    "reference_trainer eval MODEL PREFIX LENGTH MAX_TOKENS BYTES RESULT\n"
    "    compares RESULT (`eval --json`) with the loss on windows of LENGTH tokens of the first MAX_TOKENS\n"
    "    (0: all), which are BYTES of text (0: not known)\n"
    "reference_trainer greedy MODEL PROMPT COUNT     PROMPT and its likeliest continuation, in bytes as "
    "tokens\n"
    "reference_trainer initial MODEL OTHER     initial weights, and those of another seed\n"
    "reference_trainer data PREFIX VOCAB DOCUMENTS SEED [END]     writes a token file; END: ends documents\n"
    "reference_trainer poison MODEL TOKEN     makes the token's embedding overflow float\n";

// Every token but the first of the stream is predicted once, from those before it in its window.
int compare_evaluation(const Args& args) {
  const Config config = read_config(args.at(0));
  const Tensors weights = read_weights(config, args.at(0));
  const auto length = static_cast<size_t>(std::stoul(args.at(2))),
             most = static_cast<size_t>(std::stoul(args.at(3)));
  Tokens stream;
  for (const Tokens& document : read_token_file(args.at(1)))
    stream.insert(stream.end(), document.begin(), document.end());
  if (most > 0 && most < stream.size()) stream.resize(most);
  double sum = 0;
  for (size_t begin = 0; begin + 1 < stream.size(); begin += length) {
    const size_t count = std::min(length, stream.size() - 1 - begin);
    const auto at = stream.begin() + static_cast<std::ptrdiff_t>(begin),
               end = at + static_cast<std::ptrdiff_t>(count);
    sum += loss(config, weights, Tokens(at, end), Tokens(at + 1, end + 1));
  }
  const double expected = sum / static_cast<double>(stream.size() - 1);
  Comparison c;
  const std::vector<nrl::JsonValue> rows = read_lines(args.at(5));
  c.require(!rows.empty(), "there is no result");
  for (const nrl::JsonValue& row : rows) {
    c.require(row.get_uint("tokens") == stream.size() - 1, "another number of tokens");
    c.check("loss", "eval", relative(row.get_double("loss"), expected), 1e-6);
    const double bytes = std::stod(args.at(4)), bits = sum / std::log(2.0) / bytes;
    if (bytes > 0) c.check("bits per byte", "eval", relative(row.get_double("bits_per_byte"), bits), 1e-6);
    c.require(bytes > 0 || row.at("bits_per_byte").is_null(), "bits per byte of data without a tokenizer");
    c.check("perplexity", "eval", relative(row.get_double("perplexity"), std::exp(expected)), 1e-5);
  }
  return c.report();
}

// What `generate --temperature 0` prints with the byte tokenizer: COUNT tokens, or up to the end token.
int print_greedy(const Args& args) {
  constexpr size_t ids = 257;  // of the tokenizer, the last ends a document; the model may have more
  Config config = read_config(args.at(0));
  Tensors weights = read_weights(config, args.at(0));
  for (const char* name : {"embedding.weight", "head.weight"})
    if (weights.count(name)) {
      weights[name].rows = ids;
      weights[name].values.resize(ids * config.hidden);
    }
  config.vocab_size = ids;
  Tokens tokens;
  std::string text;
  for (const char c : args.at(1)) tokens.push_back(static_cast<unsigned char>(c));
  const size_t prompt = tokens.size();
  tokens = greedy(config, weights, tokens, std::stoul(args.at(2)));
  // Where two tokens are nearly as likely, rounding could choose the other one.
  const Tensor y = logits(config, weights, Tokens(tokens.begin(), tokens.end() - 1));
  double gap = INFINITY;
  for (size_t t = prompt; t < tokens.size(); ++t)
    for (size_t i = 0; i < ids; ++i) {
      const auto chosen = static_cast<size_t>(tokens[t]);
      if (i != chosen) gap = std::min(gap, y(t - 1, chosen) - y(t - 1, i));
    }
  std::fprintf(stderr, "the likeliest token is ahead by at least %.1e\n", gap);
  for (const int32_t token : tokens) {
    if (token == ids - 1) break;
    text += static_cast<char>(token);
  }
  // A UTF-8 character whose last bytes are missing is not shown.
  size_t lead = text.size() - 1;
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  while (lead > 0 && byte(lead) >> 6 == 2) --lead;
  const size_t length = byte(lead) >= 0xf0 ? 4 : byte(lead) >= 0xe0 ? 3 : byte(lead) >= 0xc0 ? 2 : 1;
  if (length > text.size() - lead) text.resize(lead);
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::putchar('\n');
  return 0;
}

int run_command(const Args& args) {
  const std::string command = args.at(0);
  const Args rest(args.begin() + 1, args.end());
  if (command == "train") {
    const std::string option = rest.size() > 6 ? rest[6] : "";
    return compare_run({rest.at(0), rest.at(1), rest.at(2), rest.at(3), rest.at(4), rest.at(5),
                        option == "bf16", option == "poison" ? std::stoi(rest.at(7)) : -1});
  }
  if (command == "eval") return compare_evaluation(rest);
  if (command == "greedy") return print_greedy(rest);
  if (command == "initial") return compare_initial_weights(rest.at(0), rest.at(1));
  if (command == "poison") return poison_embedding(rest.at(0), std::stoi(rest.at(1)));
  if (command != "data") throw std::out_of_range(command);
  write_token_file(rest.at(0), std::stoi(rest.at(1)), std::stoi(rest.at(2)),
                   static_cast<uint32_t>(std::stoul(rest.at(3))), rest.size() > 4 ? std::stoi(rest[4]) : -1);
  return 0;
}

}  // namespace
}  // namespace reference

int main(int argc, char** argv) {
  try {
    return reference::run_command({argv + 1, argv + argc});
  } catch (const std::out_of_range&) {
    std::fputs(reference::usage, stderr);
    return 64;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
