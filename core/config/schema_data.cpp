// Keys of the data.
#include "core/config/schema.h"

namespace nrl::config_detail {
namespace {

constexpr std::string_view rendered = "examples are tokenized again",
                           reordered = "the sample order changes: some samples may repeat or be missed";

}  // namespace

void add_data_keys(Table& t) {
  t.section("data", "Training and validation data.");
  t.section("data.train", "The token files to train on.");
  NRL_KEY(t, data.train.data_path)
      .alias("data.train_data_path")
      .resume(OnResume::unrelated)
      .alias("data.data_path")
      .alias("data.train_files")
      .alias("data.train_dataset")
      .help(
          "Token file prefix (PREFIX.bin and PREFIX.idx), or a list of them (a blend). Of algorithms other "
          "than pretrain: JSON lines, compressed or not, directories of them, or a list.");
  NRL_KEY(t, data.train.weights)
      .resume(ResumeChange::data, reordered)
      .above(0)
      .help(
          "Shares of the blend, one per path, on any scale; null: in proportion to the samples of each "
          "path.")
      .only_with(on_tokens());
  NRL_KEY(t, data.train.format)
      .resume(ResumeChange::data, reordered)
      .help(
          "Content of the files: of pretrain tokens, of sft text, messages or instruction, of dpo and rm "
          "preference, of grpo rollouts. auto: by the first record.");
  t.section("data.validation", "The token files of evaluations.");
  t.resume("data.validation", OnResume::unrelated);
  NRL_KEY(t, data.validation.data_path)
      .alias("data.val_data_path")
      .alias("data.val_files")
      .alias("data.eval_dataset")
      .help("Token files for evaluation, instead of a share of data.split.")
      .only_with(evaluates());
  NRL_KEY(t, data.validation.weights)
      .above(0)
      .help("Shares of the validation blend.")
      .only_with(evaluates())
      .only_with(on_tokens());
  NRL_KEY(t, data.validation.format)
      .help("Content of the files of evaluations, as data.train.format.")
      .only_with(evaluates());
  NRL_KEY(t, data.split)
      .resume(ResumeChange::data, reordered)
      .comma()
      .at_least(0)
      .help(
          "Shares of data.train for training, validation and test, on any scale (\"969,30,1\"); null: all "
          "of it for training.")
      .only_with(on_tokens());
  NRL_KEY(t, data.seed)
      .resume(ResumeChange::seed, reordered)
      .at_least(0)
      .help("Seed of the data order; null: the loop's seed.");
  NRL_KEY(t, data.shuffle)
      .resume(OnResume::unrelated)
      .not_built()
      .help("Visit the sequences in random order.");
  NRL_KEY(t, data.num_workers)
      .resume(OnResume::unrelated)
      .at_least(0)
      .at_most(256)
      .help("Threads that read ahead; 0: read on demand.")
      .only_with(on_tokens());
  NRL_KEY(t, data.prefetch_batches)
      .resume(OnResume::unrelated)
      .at_least(1)
      .at_most(1024)
      .help("Batches read ahead.")
      .only_with({is_not("data.num_workers", "0", "above 0")})
      .only_with(on_tokens());
  NRL_KEY(t, data.pin_memory)
      .resume(OnResume::unrelated)
      .help(
          "Page-locked host buffers of batches. GPU runs always have them: false is refused there, and true "
          "has no effect on a CPU.");
  NRL_KEY(t, data.reset_position_ids)
      .resume(OnResume::reported)
      .help(
          "Positions restart after the end token of every document of a sample (docs/data.md), as in "
          "Megatron-LM.")
      .only_with(on_tokens());
  NRL_KEY(t, data.reset_attention_mask)
      .resume(OnResume::reported)
      .help("A token attends to its own document only; the end token belongs to the document that it ends.")
      .only_with(on_tokens());
  NRL_KEY(t, data.eod_mask_loss)
      .resume(OnResume::reported)
      .help("No loss where the input is an end token, which would predict how the next document begins.")
      .only_with(on_tokens());
  NRL_KEY(t, data.train_on)
      .on_off("sft.only_unmask_final", "last_assistant", "")
      .on_off("training.assistant_only_loss", "assistant", "")
      .on_off("training.completion_only_loss", "completion", "")
      .resume(ResumeChange::data, rendered)
      .help(
          "Tokens with a loss: of the assistant's turns, of the last of them, of the completion, or all. "
          "auto: "
          "assistant of conversations, completion of instructions and preferences, all of text.")
      .only_with({is("algorithm", {"sft", "dpo"})});
  NRL_KEY(t, data.chat_key)
      .resume(ResumeChange::data, rendered)
      .help("Key of the messages in a record of format messages; null: messages or conversations.")
      .only_with({is("algorithm", {"sft"})});
  NRL_KEY(t, data.input_key)
      .alias("data.train.input_key")
      .alias("data.default.input_key")
      .resume(ResumeChange::data, rendered)
      .help("Key of the prompt in a record of format instruction or rollouts.")
      .only_with(on_prompts());
  NRL_KEY(t, data.output_key)
      .alias("data.train.output_key")
      .alias("data.default.output_key")
      .resume(ResumeChange::data, rendered)
      .help("Key of the completion in a record of format instruction or rollouts.")
      .only_with(on_prompts());
  NRL_KEY(t, data.system_prompt_file)
      .alias("data.default.system_prompt_file")
      .resume(ResumeChange::data, rendered)
      .help("File whose text becomes the system message of every record of format instruction or rollouts.")
      .only_with(on_prompts());
  NRL_KEY(t, data.prompt_file)
      .alias("data.default.prompt_file")
      .resume(ResumeChange::data, rendered)
      .help(
          "File whose text, with {} replaced by the prompt, becomes the prompt of format instruction or "
          "rollouts.")
      .only_with(on_prompts());
  NRL_KEY(t, data.special_tokens_in_text)
      .resume(ResumeChange::data, rendered)
      .help("A record whose text contains the name of a special token: allow, stop with an error, or drop.")
      .only_with(on_examples());
  NRL_KEY(t, data.on_bad_record)
      .resume(ResumeChange::data, rendered)
      .help(
          "A record that no example can be made of: stop with an error that names it, or skip and count it.")
      .only_with(on_examples());
  NRL_KEY(t, data.template_date)
      .resume(ResumeChange::data, rendered)
      .help("Date (YYYY-MM-DD) that templates print as today's; null: the date of the start.")
      .only_with(on_examples());
  NRL_KEY(t, data.cache_dir)
      .resume(OnResume::unrelated)
      .help("Directory of the tokenized examples; null: beside the file.")
      .only_with(on_examples());
}

}  // namespace nrl::config_detail
