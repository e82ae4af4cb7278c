#include "core/ops/gemm/tune_cache.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <sys/stat.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/text.h"

namespace nrl::ops::gemm {
namespace {

constexpr const char* first_line = "nrl-gemm-tuning 2";

std::optional<TuneCache::Algorithm> parse_words(std::istringstream& fields) {
  TuneCache::Algorithm words{};
  for (uint64_t& word : words) {
    std::string text;
    fields >> text;
    const bool hexadecimal =
        !text.empty() && text.size() <= 16 &&
        std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isxdigit(c) != 0; });
    if (!hexadecimal) return std::nullopt;
    word = std::strtoull(text.c_str(), nullptr, 16);
  }
  std::string rest;
  if (fields >> rest) return std::nullopt;
  return words;
}

}  // namespace

std::string TuneTarget::file_name() const {
  std::string name = gpu + "_" + library;
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.' && c != '_') c = '-';
  return name + ".txt";
}

TuneCache::TuneCache(const std::string& path, TuneTarget target, Access access)
    : target_(std::move(target)), access_(access) {
  if (path.empty()) return;
  file_ = path.ends_with(".txt") ? path : (std::filesystem::path(path) / target_.file_name()).string();
  read(access);
}

void TuneCache::read(Access access) {
  std::ifstream in(file_);
  if (!in) {
    if (access == Access::extend) return;
    fail(Exit::no_input,
         "there are no GEMM choices for {} with {}: {} cannot be read. Fix: make them by a run with "
         "kernels.autotune: true, or remove kernels.gemm_tuning",
         target_.gpu, target_.library, file_);
  }
  int number = 0;
  std::string text;
  const auto malformed = [&](const std::string& expected) {
    fail(Exit::data,
         "{}:{}: \"{}\"; expected {}. Fix: remove the file and make it again by a run with kernels.autotune: "
         "true",
         file_, number, clipped(text, 60), expected);
  };
  const auto header = [&](const std::string& name, const std::string& wanted) {
    ++number;
    if (!std::getline(in, text)) text.clear();
    if (text == name + wanted) return;
    if (name.empty() || !text.starts_with(name)) malformed(fmt::format("\"{}{}\"", name, wanted));
    fail(Exit::data,
         "{}:{}: these GEMM choices were timed with {}, but this run has {}. Fix: give kernels.gemm_tuning a "
         "directory with a file for each, or make one by a run with kernels.autotune: true",
         file_, number, clipped(text.substr(name.size()), 60), wanted);
  };
  header("", first_line);
  header("gpu ", target_.gpu);
  header("library ", target_.library);
  while (std::getline(in, text)) {
    ++number;
    std::istringstream fields(text);
    std::string key;
    fields >> key;
    const auto words = parse_words(fields);
    if (key.empty() || !words) malformed("a GEMM and eight hexadecimal words");
    if (!entries_.emplace(key, *words).second) malformed("every GEMM once");
  }
}

std::optional<TuneCache::Algorithm> TuneCache::find(const std::string& key) const {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return std::nullopt;
  return it->second;
}

void TuneCache::store(const std::string& key, const Algorithm& algorithm) {
  NRL_CHECK(access_ == Access::extend);
  entries_[key] = algorithm;
  if (file_.empty() || write()) return;
  if (!warned_) log::warn("GEMM tuning results cannot be saved in {}", file_);
  warned_ = true;
}

bool TuneCache::write() const {
  std::error_code error;
  const std::filesystem::path directory = std::filesystem::path(file_).parent_path();
  if (!directory.empty()) std::filesystem::create_directories(directory, error);
  std::string text = fmt::format("{}\ngpu {}\nlibrary {}\n", first_line, target_.gpu, target_.library);
  for (const auto& [key, words] : entries_) {
    text += key;
    for (const uint64_t word : words) text += fmt::format(" {:x}", word);
    text += '\n';
  }
  // Ranks of several nodes may write the same file: every one needs a temporary name of its own.
  std::string temporary = file_ + ".XXXXXX";
  const int fd = mkstemp(temporary.data());
  if (fd < 0) return false;
  FILE* out = fdopen(fd, "w");
  bool good =
      out != nullptr && fchmod(fd, 0644) == 0 && std::fwrite(text.data(), 1, text.size(), out) == text.size();
  if (out == nullptr)
    close(fd);
  else
    good = std::fclose(out) == 0 && good;
  good = good && std::rename(temporary.c_str(), file_.c_str()) == 0;
  if (!good) std::remove(temporary.c_str());
  return good;
}

}  // namespace nrl::ops::gemm
