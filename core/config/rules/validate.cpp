#include "core/config/loader.h"
#include "core/config/rules/tables.h"

namespace nrl::config_detail {

ConfigRule row(std::vector<std::string> keys, std::function<bool(const Config&)> broken, Broken texts) {
  return {std::move(keys),
          [broken = std::move(broken), texts = std::move(texts)](const ConfigResult& r) -> Verdict {
            if (!broken(r.config)) return {};
            Broken out = texts;
            out.reason = filled_in(r, out.reason);
            for (std::string& note : out.remedy) note = filled_in(r, note);
            return {std::move(out)};
          }};
}

ConfigRule row(std::vector<Condition> all, Broken texts) {
  std::vector<std::string> keys;
  for (const Condition& condition : all) keys.push_back(condition.key);
  return row(
      std::move(keys),
      [all = std::move(all)](const Config& c) {
        return std::all_of(all.begin(), all.end(), [&](const Condition& one) { return one.holds(c); });
      },
      std::move(texts));
}

ConfigRule not_empty(std::vector<std::string> keys, std::string reason, std::vector<std::string> remedy) {
  const std::string key = keys[0];
  return {std::move(keys), [=](const ConfigResult& r) -> Verdict {
            const std::string value = value_text(r.config, key);
            if (value != "[]" && value != "\"\"") return {};
            return {{!reason.empty() ? reason : key + (value == "[]" ? " is an empty list" : " is empty"),
                     remedy}};
          }};
}

std::vector<std::string> set_keys(const Config& config, std::vector<std::string> keys) {
  std::erase_if(keys, [&](const std::string& key) { return value_text(config, key) == value_text({}, key); });
  return keys;
}

Diagnostics validate(const ConfigResult& result) {
  const Config& config = result.config;
  Diagnostics out = judge(training_rules(), result);
  out += judge(objective_rules(), result);
  out += judge(parallel_rules(), result);
  if (config.device != DeviceKind::automatic && result.sound("device"))
    out += validate_device({result,
                            {.gpu = config.device == DeviceKind::cuda,
                             .why = filled_in(result, "device: <device> is at <@device>")}});
  out += judge(memory_rules(), result);
  out += judge(precision_rules(), result);
  return out;
}

}  // namespace nrl::config_detail
