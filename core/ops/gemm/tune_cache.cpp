#include "core/ops/gemm/tune_cache.h"

#include <cstdio>
#include <fstream>
#include <sstream>

#include <unistd.h>

#include "core/base/log.h"

namespace nrl::ops::gemm {

TuneCache::TuneCache(std::string path, std::string header)
    : path_(std::move(path)), header_(std::move(header)) {
  if (path_.empty()) return;
  std::ifstream file(path_);
  std::string line;
  if (!file || !std::getline(file, line) || line != header_) return;
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string key;
    Algorithm algorithm{};
    fields >> key >> std::hex;
    for (uint64_t& word : algorithm) fields >> word;
    std::string rest;
    // A damaged line costs one measurement, no more.
    if (!fields || fields >> rest || key.empty()) continue;
    entries_[key] = algorithm;
  }
}

std::optional<TuneCache::Algorithm> TuneCache::find(const std::string& key) const {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return std::nullopt;
  return it->second;
}

void TuneCache::store(const std::string& key, const Algorithm& algorithm) {
  entries_[key] = algorithm;
  if (path_.empty()) return;
  const std::string temporary = fmt::format("{}.{}.tmp", path_, getpid());
  std::ofstream file(temporary);
  file << header_ << '\n';
  for (const auto& [name, words] : entries_) {
    file << name << std::hex;
    for (uint64_t word : words) file << ' ' << word;
    file << std::dec << '\n';
  }
  file.close();
  if (file && std::rename(temporary.c_str(), path_.c_str()) == 0) return;
  std::remove(temporary.c_str());
  if (!warned_) log::warn("GEMM tuning results cannot be saved in {}", path_);
  warned_ = true;
}

}  // namespace nrl::ops::gemm
