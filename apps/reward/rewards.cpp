#include "apps/reward/rewards.h"

#include <utility>

#include "apps/reward/command.h"
#include "apps/reward/http.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"

namespace nrl::reward {

struct Rewards::Entry {
  Spec spec;
  std::unique_ptr<Verifier> verifier;
  std::unique_ptr<ExternalJudge> external;
  int64_t told = 0;  ///< of its lost completions
};

Rewards::Rewards(const std::vector<Spec>& specs, const std::string& log_dir) {
  for (const Spec& spec : specs) {
    Entry& entry = entries_.emplace_back();
    entry.spec = spec;
    entry.verifier = make_verifier(spec);
    if (spec.type == "http") {
      entry.external = std::make_unique<HttpJudge>(http_options(spec));
    } else if (!entry.verifier) {
      CommandOptions options = command_options(spec);
      if (!log_dir.empty()) options.log = join_path(log_dir, fmt::format("reward-{}.log", spec.name));
      entry.external = std::make_unique<CommandWorkers>(std::move(options));
    }
    names_.push_back(spec.name);
  }
}

Rewards::~Rewards() = default;

void Rewards::check(const JsonValue& record, const std::string& where) const {
  for (const Entry& entry : entries_)
    if (entry.verifier) entry.verifier->check(record, where);
}

std::vector<Judgement> Rewards::judge(std::span<const Item> items) {
  std::vector<Judgement> out(items.size(), Judgement{.total = 0.0, .parts = {}});
  for (Entry& entry : entries_) {
    std::vector<std::optional<double>> parts;
    if (entry.external)
      parts = entry.external->judge(items);
    else
      for (const Item& item : items) parts.push_back(entry.verifier->judge(item));
    for (size_t i = 0; i < items.size(); ++i) {
      out[i].parts.push_back(parts[i]);
      if (!parts[i])
        out[i].total.reset();
      else if (out[i].total)
        *out[i].total += entry.spec.weight * *parts[i];
    }
  }
  return out;
}

std::vector<std::string> Rewards::notes() const {
  std::vector<std::string> out;
  for (const Entry& entry : entries_)
    if (entry.external) out.push_back(fmt::format("{}: {}", entry.spec.name, entry.external->note()));
  return out;
}

std::string Rewards::take_failures() {
  std::vector<std::string> out;
  for (Entry& entry : entries_) {
    if (!entry.external || entry.external->lost() == entry.told) continue;
    out.push_back(fmt::format("{} of reward {}, {}: {}", entry.external->lost() - entry.told, entry.spec.name,
                              entry.external->note(), entry.external->last_failure()));
    entry.told = entry.external->lost();
  }
  return joined(out, "; ");
}

}  // namespace nrl::reward
