#pragma once
// Enumerations of the configuration about training examples, with their YAML spellings.

#include "core/base/enum_names.h"

namespace nrl {

/// Content of the data files. `tokens`: token files of `nrl-train prepare`; the others are records with text,
/// of which apps/data/examples makes examples; `prompts`: records that the policy answers while it trains.
NRL_ENUM(ExampleFormat, (tokens, automatic, text, messages, instruction, preference, rollouts, prompts),
         ("tokens", "auto", "text", "messages", "instruction", "preference", "rollouts", "prompts"), ())
/// Tokens that are predicted with loss. `automatic`: all of a text, all assistant messages of a conversation,
/// the completion of a prompt.
NRL_ENUM(TrainOn, (automatic, assistant, last_assistant, completion, all),
         ("auto", "assistant", "last_assistant", "completion", "all"), ())
/// Treatment of examples that are longer than the model's context.
NRL_ENUM(OnOverlong, (truncate, drop, error), ("truncate", "drop", "error"), ())
/// Treatment of records whose text contains the text of a special token, which is tokenized as that token.
NRL_ENUM(SpecialTokensInText, (allow, error, drop), ("allow", "error", "drop"), ())
/// Treatment of records that cannot be used.
NRL_ENUM(OnBadRecord, (error, skip), ("error", "skip"), ())
/// The standard deviation of rewards by which advantages are divided; apps/data/examples/advantages.h has the
/// formulas.
NRL_ENUM(AdvantageStd, (none, group, leave_one_out, batch), ("none", "group", "leave_one_out", "batch"), ())
/// How the ratios of the policy before the update to the sampler weight a loss; docs/post-training.md has the
/// formulas.
NRL_ENUM(ImportanceSampling, (tis, icepop, seq_mask_tis, seq_tis, seq_icepop),
         ("tis", "icepop", "seq-mask-tis", "seq-tis", "seq-icepop"),
         (, {"token_truncate", "tis"}, {"token_mask", "icepop"}, {"sequence_truncate", "seq-tis"},
          {"sequence_mask", "seq-icepop"}))
/// How advantages follow from rewards; apps/data/examples/advantages.h has the formulas.
NRL_ENUM(AdvantageEstimator, (grpo, reinforce_plus_plus, raw), ("grpo", "reinforce_plus_plus", "raw"), ())

}  // namespace nrl
