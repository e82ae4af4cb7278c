#pragma once
// HTTP requests to services of the user: webhooks, rewards.

#include <cstddef>
#include <string>

namespace nrl {

struct HttpAnswer {
  std::string problem;  ///< what went wrong; empty: the status is below 300
  std::string body;     ///< of the answer
  bool passing =
      false;  ///< the problem may pass: no connection, a time limit, or a status of 429 or from 500
};

/// A URL that may be a secret, by what a configuration says of it: "env:NAME", the value of an environment
/// variable; "file:PATH", the first line of a file of at most 4 KiB; else the URL itself. Error
/// (Exit::no_input), without the URL, if there is no such variable or file, or if it holds no http(s) URL.
/// `key`: for messages.
std::string url_named(const std::string& text, const std::string& key);

/// Posts JSON and waits for the answer, at most `limit_s` seconds; an answer of more than `most_bytes` is a
/// problem. libcurl is opened by the first call. Thread-safe; redirections are not followed.
HttpAnswer http_post(const std::string& url, const std::string& body, double limit_s, size_t most_bytes);

}  // namespace nrl
