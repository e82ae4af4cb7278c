#include "apps/reward/http.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "core/base/status.h"
#include "core/base/text.h"
#include "core/base/threads.h"
#include "core/io/http_post.h"

namespace nrl::reward {
namespace {

constexpr size_t longest_body = size_t{16} << 20;

// The completions of one request.
struct Batch {
  size_t first = 0, count = 0;
  std::string body;
  std::vector<std::optional<double>> rewards;
  std::string problem;
};

std::string read_rewards(const std::string& body, Batch& batch) {
  try {
    const JsonValue json = parse_json(body, "answer", {.depth = 8});
    if (!json.is_object() || !json.contains("rewards") || !json.at("rewards").is_array())
      return "an answer without the list \"rewards\"";
    std::vector<char> seen(batch.count, 0);
    for (const JsonValue& one : json.at("rewards").items()) {
      if (!one.is_object() || !one.contains("id") || !one.at("id").is_integer())
        return "a reward without an id";
      const int64_t id = one.get_int("id"), at = id - static_cast<int64_t>(batch.first);
      if (at < 0 || at >= static_cast<int64_t>(batch.count))
        return fmt::format("a reward of another id: {}", id);
      if (std::exchange(seen[static_cast<size_t>(at)], 1) != 0)
        return fmt::format("two rewards of id {}", id);
      if (std::string why = read_answer(one, static_cast<size_t>(id), batch.rewards[static_cast<size_t>(at)]);
          !why.empty())
        return why;
    }
    if (std::find(seen.begin(), seen.end(), 0) != seen.end()) return "an answer that lacks rewards";
    return {};
  } catch (const Error&) {
    return "an answer that is no JSON: " + printable(body.substr(0, 80));
  }
}

void send(const HttpOptions& options, Batch& batch) {
  for (int64_t attempt = 0;; ++attempt) {
    const HttpAnswer answer = http_post(options.url, batch.body, options.time_limit_s, longest_body);
    batch.problem = answer.problem;
    status::made_progress();
    if (batch.problem.empty()) batch.problem = read_rewards(answer.body, batch);
    if (answer.problem.empty() || !answer.passing || attempt >= options.retries) break;
    // Requests that failed together do not come back together.
    const PhiloxStream random(batch.first, static_cast<uint64_t>(attempt));
    const double jitter = 0.5 + static_cast<double>(random.bits(0) % 1000) / 1000.0;
    std::this_thread::sleep_for(std::chrono::duration<double>(
        0.25 * static_cast<double>(1 << std::min<int64_t>(attempt, 5)) * jitter));
  }
  if (!batch.problem.empty()) std::fill(batch.rewards.begin(), batch.rewards.end(), std::nullopt);
}

}  // namespace

HttpOptions http_options(const Spec& spec) {
  HttpOptions options{.url = {},
                      .shown = spec.options.get_string("url"),
                      .batch = spec.options.get_int("batch", 32),
                      .workers = spec.options.get_int("workers", 4),
                      .retries = spec.options.get_int("retries", 3),
                      .time_limit_s = spec.options.get_double("time_limit_s", 30)};
  const std::string& url = options.shown;
  const bool named = url.starts_with("env:") || url.starts_with("file:/");
  if (!named && !url.starts_with("http://") && !url.starts_with("https://"))
    fail(Exit::config, "{}.url: expected http://..., https://..., env:NAME or file:/PATH, found '{}'",
         spec.where, clipped(url, 60));
  // Configurations are printed and copied.
  if (!named && url.find_first_of("?@") != std::string::npos)
    fail(Exit::config,
         "{}.url: a URL with a user, a password or a query may be a secret. Fix: url: env:NAME, the name of "
         "an "
         "environment variable that has it, or file:/PATH",
         spec.where);
  options.url = url_named(url, spec.where + ".url");
  return options;
}

std::vector<std::optional<double>> HttpJudge::judge(std::span<const Item> items) {
  std::vector<Batch> batches;
  for (size_t first = 0; first < items.size();) {
    const size_t count = std::min(static_cast<size_t>(options_.batch), items.size() - first);
    Batch& batch =
        batches.emplace_back(Batch{.first = first, .count = count, .body = {}, .rewards = {}, .problem = {}});
    batch.rewards.resize(count);
    JsonValue list = JsonValue::array();
    for (size_t i = 0; i < count; ++i) list.push_back(request_of(items[first + i], first + i));
    batch.body = JsonValue::object({{"items", std::move(list)}}).dump();
    first += count;
  }
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next++) < batches.size();) send(options_, batches[i]);
  };
  {
    const BlockedSignals blocked;  // SIGPIPE too
    std::vector<std::thread> threads;
    const size_t wanted = std::min(batches.size(), static_cast<size_t>(options_.workers));
    for (size_t i = 1; i < wanted; ++i) threads.push_back(start_thread(work));
    work();
    for (std::thread& thread : threads) thread.join();
  }
  std::vector<std::optional<double>> rewards;
  for (Batch& batch : batches) {
    rewards.insert(rewards.end(), batch.rewards.begin(), batch.rewards.end());
    if (batch.problem.empty())
      answered();
    else
      failed(std::move(batch.problem),
             "it must answer a POST of {\"items\": [...]} with {\"rewards\": [{\"id\": ID, \"reward\": "
             "NUMBER}, ...]}",
             static_cast<int64_t>(batch.count));
  }
  return rewards;
}

std::string HttpJudge::note() const {
  return "the service " + clipped(options_.shown);
}

}  // namespace nrl::reward
