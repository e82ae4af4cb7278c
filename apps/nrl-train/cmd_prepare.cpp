// nrl-train prepare: text to token files, with a progress bar.

#include <unistd.h>

#include <cstdio>

#include "apps/data/prepare.h"
#include "apps/nrl-train/commands.h"
#include "apps/train/run_io/terminal.h"
#include "core/base/log.h"
#include "core/base/text.h"

namespace nrl::app {
namespace {

const char* phase_name(data::PrepareProgress::Phase phase) {
  switch (phase) {
    case data::PrepareProgress::Phase::sampling:
      return "reading a sample";
    case data::PrepareProgress::Phase::training_tokenizer:
      return "training the tokenizer";
    default:
      return "tokenizing";
  }
}

}  // namespace

int run_prepare_command(const PrepareArgs& args) {
  data::PrepareOptions options;
  options.inputs = args.input;
  options.tokenizer = args.tokenizer;
  options.output = args.output;
  options.append_eod = args.append_eod;
  options.jsonl_key = args.jsonl_key;
  options.workers = args.workers;
  const bool bar = terminal_columns(STDOUT_FILENO) > 0;
  auto last = data::PrepareProgress::Phase::tokenizing;
  bool any = false;
  const data::PrepareSummary s = data::run_prepare(options, [&](const data::PrepareProgress& p) {
    if (bar) {
      const double share = p.bytes > 0 ? static_cast<double>(p.bytes_done) / static_cast<double>(p.bytes) : 0;
      constexpr int width = 30;
      std::string cells(static_cast<size_t>(share * width), '#');
      cells.resize(width, '.');
      std::printf("\r\033[K%s [%s] %3.0f%%  %s of %s, %s tokens", phase_name(p.phase), cells.c_str(),
                  share * 100, human_bytes(static_cast<uint64_t>(p.bytes_done)).c_str(),
                  human_bytes(static_cast<uint64_t>(p.bytes)).c_str(),
                  human_count(static_cast<double>(p.tokens)).c_str());
      std::fflush(stdout);
    } else if (!any || p.phase != last) {
      log::info("{} ...", phase_name(p.phase));
    }
    any = true;
    last = p.phase;
  });
  if (bar) std::fputs("\r\033[K", stdout);
  log::info(
      "{} documents from {} files, {} of text -> {} tokens ({:.2f} bytes each), vocabulary {}, in {:.1f} s",
      grouped(s.documents), grouped(s.files), human_bytes(static_cast<uint64_t>(s.text_bytes)),
      grouped(s.tokens),
      s.tokens > 0 ? static_cast<double>(s.text_bytes) / static_cast<double>(s.tokens) : 0.0, s.vocab_size,
      s.seconds);
  if (s.bytes_without_token > 0)
    log::info("{} bytes of text were left out: the tokenizer has no token for them",
              grouped(s.bytes_without_token));
  if (!s.slow_because.empty())
    log::info("the text was encoded by the sentencepiece library, which is slower: {}", s.slow_because);
  if (s.binary_files > 0)
    log::info("{} files were skipped: they are not UTF-8 text", grouped(s.binary_files));
  log::info("wrote {0}.bin and {0}.idx; train on it with data.train.data_path: {0}", args.output);
  return 0;
}

}  // namespace nrl::app
