// Keys of the data.
#include "core/config/schema.h"

namespace nrl::config_detail {
namespace {

constexpr std::string_view reordered = "the sample order changes: some samples may repeat or be missed";

}  // namespace

void add_data_keys(Table& t) {
  t.section("data", "Training and validation data.");
  t.section("data.train", "The token files to train on.");
  NRL_KEY(t, data.train.data_path)
      .resume(OnResume::unrelated)
      .alias("data.data_path")
      .alias("data.train_files")
      .alias("data.train_dataset")
      .help("Token file prefix (PREFIX.bin and PREFIX.idx), or a list of them (a blend).");
  NRL_KEY(t, data.train.weights)
      .resume(ResumeChange::data, reordered)
      .above(0)
      .help(
          "Shares of the blend, one per path, on any scale; null: in proportion to the samples of each "
          "path.");
  t.section("data.validation", "The token files of evaluations.");
  t.resume("data.validation", OnResume::unrelated);
  NRL_KEY(t, data.validation.data_path)
      .alias("data.val_files")
      .alias("data.eval_dataset")
      .help("Token files for evaluation, instead of a share of data.split.")
      .only_with(evaluates());
  NRL_KEY(t, data.validation.weights).above(0).help("Shares of the validation blend.").only_with(evaluates());
  NRL_KEY(t, data.split)
      .resume(ResumeChange::data, reordered)
      .comma()
      .at_least(0)
      .help(
          "Shares of data.train for training, validation and test, on any scale (\"969,30,1\"); null: all "
          "of it for training.");
  NRL_KEY(t, data.seed)
      .resume(ResumeChange::seed, reordered)
      .at_least(0)
      .help("Seed of the data order; null: pretrain.seed.");
  NRL_KEY(t, data.shuffle)
      .resume(OnResume::unrelated)
      .not_built()
      .help("Visit the sequences in random order.");
  NRL_KEY(t, data.num_workers)
      .resume(OnResume::unrelated)
      .at_least(0)
      .at_most(256)
      .help("Threads that read ahead; 0: read on demand.");
  NRL_KEY(t, data.prefetch_batches)
      .resume(OnResume::unrelated)
      .at_least(1)
      .at_most(1024)
      .help("Batches read ahead.")
      .only_with({is_not("data.num_workers", "0", "above 0")});
  NRL_KEY(t, data.pin_memory)
      .resume(OnResume::unrelated)
      .help(
          "Page-locked host buffers of batches. GPU runs always have them: false is refused there, and true "
          "has no effect on a CPU.");
  NRL_KEY(t, data.reset_position_ids)
      .resume(OnResume::reported)
      .help(
          "Positions restart after the end token of every document of a sample (docs/data.md), as in "
          "Megatron-LM.");
  NRL_KEY(t, data.reset_attention_mask)
      .resume(OnResume::reported)
      .help("A token attends to its own document only; the end token belongs to the document that it ends.");
  NRL_KEY(t, data.eod_mask_loss)
      .resume(OnResume::reported)
      .help("No loss where the input is an end token, which would predict how the next document begins.");
}

}  // namespace nrl::config_detail
