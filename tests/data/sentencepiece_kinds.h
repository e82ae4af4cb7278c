#pragma once
// Small sentencepiece models of all kinds, trained in the test.

#include <string>
#include <unordered_map>
#include <vector>

#include <sentencepiece_trainer.h>

#include "core/base/error.h"
#include "tests/catch.h"

namespace nrl::test {

using Options = std::unordered_map<std::string, std::string>;

class Sentences final : public sentencepiece::SentenceIterator {
 public:
  Sentences() {
    for (int i = 0; i < 120; ++i) {
      lines_.push_back(fmt::format("  for (int i{} = 0; i < {}; ++i) total += value[i];", i, i * 37));
      lines_.push_back(fmt::format("the {} other  caf\u00e9 and the mother, naively {}", i, i + 1000));
      std::string periodic;
      for (int k = 0; k < 40; ++k) periodic += "ab "[(i * 7919 + k * k * (i + 3)) % 5 % 3];
      lines_.push_back(periodic);
    }
  }
  bool done() const override { return at_ == lines_.size(); }
  void Next() override { ++at_; }
  const std::string& value() const override { return lines_[at_]; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  std::vector<std::string> lines_;
  size_t at_ = 0;
};

inline std::string train(const Options& extra) {
  Options options = {{"model_type", "bpe"},
                     {"vocab_size", "500"},
                     {"hard_vocab_limit", "false"},
                     {"normalization_rule_name", "identity"},
                     {"remove_extra_whitespaces", "false"},
                     {"minloglevel", "2"}};
  for (const auto& [key, value] : extra) options[key] = value;
  Sentences sentences;
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(options, &sentences, &model);
  INFO(status.message());
  REQUIRE(status.ok());
  return model;
}

struct Kind {
  const char* name;
  Options options;
  const char* slow_reason;  // why it is encoded by the library; empty: it is not
  bool json;                // tokenizer.json represents the model
};

inline const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {"llama", {{"byte_fallback", "true"}}, "", true},
      {"no prefix",
       {{"byte_fallback", "true"},
        {"add_dummy_prefix", "false"},
        {"split_digits", "true"},
        {"allow_whitespace_only_pieces", "true"}},
       "",
       true},
      {"no byte fallback", {}, "", true},
      {"collapsed spaces", {{"remove_extra_whitespaces", "true"}}, "", true},
      {"pieces across words",
       {{"split_by_whitespace", "false"}, {"vocab_size", "900"}, {"allow_whitespace_only_pieces", "true"}},
       "",
       true},
      {"user-defined and control pieces",
       {{"byte_fallback", "true"},
        {"user_defined_symbols", "<ud>,for,\u2581\u2581,ab,int,\n,e\u0301"},
        {"control_symbols", "<ctl>,the"}},
       "",
       false},
      {"nmt_nfkc", {{"normalization_rule_name", "nmt_nfkc"}}, "", false},
      {"nmt_nfkc_cf with collapsed spaces and user-defined pieces",
       {{"normalization_rule_name", "nmt_nfkc_cf"},
        {"remove_extra_whitespaces", "true"},
        {"byte_fallback", "true"},
        {"user_defined_symbols", "<ud>,The,\uff28,\u2581\u2581"}},
       "",
       false},
      {"suffix",
       {{"treat_whitespace_as_suffix", "true"}},
       "it does not attach spaces to the beginning of words",
       false},
      {"suffix with nmt_nfkc and byte pieces",
       {{"treat_whitespace_as_suffix", "true"},
        {"byte_fallback", "true"},
        {"normalization_rule_name", "nmt_nfkc"}},
       "it does not attach spaces to the beginning of words",
       false},
      {"unigram", {{"model_type", "unigram"}, {"vocab_size", "300"}}, "", false},
      {"unigram with nmt_nfkc, user-defined and byte pieces",
       {{"model_type", "unigram"},
        {"vocab_size", "600"},
        {"normalization_rule_name", "nmt_nfkc"},
        {"remove_extra_whitespaces", "true"},
        {"byte_fallback", "true"},
        {"user_defined_symbols", "<ud>,for,\u2581\u2581,ab,int,\n,e\u0301"},
        {"control_symbols", "<ctl>,the"}},
       "",
       false},
      {"characters", {{"model_type", "char"}}, "it is neither a BPE nor a unigram model", false}};
  return all;
}

}  // namespace nrl::test
