#include "apps/data/prepare_report.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::data {
namespace {

using Phase = PrepareProgress::Phase;

constexpr double plain_seconds = 5;

std::string_view name_of(Phase phase) {
  switch (phase) {
    case Phase::sampling:
      return "reading a sample";
    case Phase::training_tokenizer:
      return "training the tokenizer";
    default:
      return "tokenizing";
  }
}

double fraction_of(const PrepareProgress& p) {
  return p.bytes > 0 ? std::min(1.0, static_cast<double>(p.bytes_done) / static_cast<double>(p.bytes)) : 0;
}

std::string bytes_text(double bytes) {
  return human_bytes(static_cast<uint64_t>(bytes));
}

}  // namespace

std::string progress_text(const PrepareProgress& p) {
  if (p.phase == Phase::training_tokenizer)
    return fmt::format("{}: {} so far", name_of(p.phase), human_duration(p.seconds));
  const auto done = static_cast<double>(p.bytes_done);
  std::string text = fmt::format("{}: {:.0f}%, {} of {}", name_of(p.phase), 100 * fraction_of(p),
                                 bytes_text(done), bytes_text(static_cast<double>(p.bytes)));
  if (p.bytes_done > 0 && p.seconds >= 1) {
    const double rate = done / p.seconds;
    text +=
        fmt::format(", {}/s, {} left", bytes_text(rate),
                    human_duration(static_cast<double>(std::max<int64_t>(p.bytes - p.bytes_done, 0)) / rate));
  }
  if (p.phase == Phase::tokenizing)
    text += fmt::format(", {} tokens", human_count(static_cast<double>(p.tokens)));
  return text;
}

void PrepareReport::operator()(const PrepareProgress& p) {
  const bool begins = !any_ || p.phase != phase_;
  any_ = true;
  phase_ = p.phase;
  if (columns_ > 0) {
    constexpr size_t width = 20;
    std::string line;
    if (p.phase != Phase::training_tokenizer) {
      line = '[' + std::string(static_cast<size_t>(fraction_of(p) * width), '#');
      line.resize(width + 1, '.');
      line += "] ";
    }
    line += progress_text(p);
    write_("\r\033[K" + line.substr(0, static_cast<size_t>(columns_ - 1)));
    return;
  }
  if (!begins && p.seconds < next_) return;
  next_ = p.seconds + plain_seconds;
  write_((begins ? std::string(name_of(p.phase)) + " ..." : progress_text(p)) + "\n");
}

void PrepareReport::finish() {
  if (columns_ > 0 && any_) write_("\r\033[K");
}

}  // namespace nrl::data
