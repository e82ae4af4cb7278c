#pragma once
// Rewards by a service over HTTP.

#include <string>
#include <vector>

#include "apps/reward/external.h"

namespace nrl::reward {

struct HttpOptions {
  std::string url;
  std::string shown;         ///< the URL, or the place where it is kept (url_named())
  int64_t batch = 32;        ///< completions of a request
  int64_t workers = 4;       ///< requests at a time
  int64_t retries = 3;       ///< of a request whose problem may pass, after 0.25, 0.5, 1, ... s
  double time_limit_s = 30;  ///< of one request
};
HttpOptions http_options(const Spec& spec);

/// Posts {"items": [request_of(), ...]} and reads {"rewards": [{"id": ID, "reward": NUMBER or null}, ...]},
/// in any order. A request that fails leaves its completions without a reward.
class HttpJudge final : public ExternalJudge {
 public:
  explicit HttpJudge(HttpOptions options) : options_(std::move(options)) {}
  std::vector<std::optional<double>> judge(std::span<const Item> items) override;
  std::string note() const override;

 private:
  const HttpOptions options_;
};

}  // namespace nrl::reward
