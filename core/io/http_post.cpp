#include "core/io/http_post.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <type_traits>
#include <utility>

#include <dlfcn.h>

#include <curl/curl.h>

#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"

namespace nrl {
namespace {

/// libcurl, which brings twenty libraries along: opened on use.
struct Curl {
  decltype(&curl_easy_init) init = nullptr;
  CURLcode (*setopt)(CURL*, CURLoption, ...) = nullptr;
  decltype(&curl_easy_perform) perform = nullptr;
  CURLcode (*getinfo)(CURL*, CURLINFO, ...) = nullptr;
  decltype(&curl_easy_cleanup) cleanup = nullptr;
  decltype(&curl_easy_strerror) strerror = nullptr;
  curl_slist* (*append)(curl_slist*, const char*) = nullptr;
  void (*free_all)(curl_slist*) = nullptr;
  bool loaded = false;

  Curl() {
    void* library = nullptr;
    for (const char* name : {"libcurl.so.4", "libcurl-gnutls.so.4"})
      if (!library) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) return;
    const auto load = [&](auto*& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      return function != nullptr;
    };
    loaded = load(init, "curl_easy_init") && load(setopt, "curl_easy_setopt") &&
             load(perform, "curl_easy_perform") && load(getinfo, "curl_easy_getinfo") &&
             load(cleanup, "curl_easy_cleanup") && load(strerror, "curl_easy_strerror") &&
             load(append, "curl_slist_append") && load(free_all, "curl_slist_free_all");
  }
};

struct Body {
  std::string text;
  size_t most = 0;
};

// Fewer bytes than it was given end the transfer.
size_t receive(char* data, size_t size, size_t count, void* to) {
  Body& body = *static_cast<Body*>(to);
  if (body.text.size() + size * count > body.most) return 0;
  body.text.append(data, size * count);
  return size * count;
}

bool is_url(std::string_view text) {
  return text.starts_with("http://") || text.starts_with("https://");
}

}  // namespace

std::string url_named(const std::string& text, const std::string& key) {
  std::string url = text;
  if (text.starts_with("env:")) {
    const char* value = std::getenv(text.c_str() + 4);
    if (!value)
      fail(Exit::no_input, "{}: the environment variable {} is not set", key, printable(text.substr(4)));
    url = value;
  } else if (text.starts_with("file:")) {
    url = read_file(text.substr(5), 4096);
    url.resize(std::min(url.find('\n'), url.size()));
    if (url.ends_with('\r')) url.pop_back();
  }
  if (!is_url(url))
    fail(Exit::no_input, "{}: expected http://... or https://..., as the value of {}", key, printable(text));
  return url;
}

HttpAnswer http_post(const std::string& url, const std::string& body, double limit_s, size_t most_bytes) {
  HttpAnswer answer;
  const auto problem = [&](std::string text) {
    answer.problem = std::move(text);
    return answer;
  };
  if (!is_url(url)) return problem("the URL is neither http:// nor https://");
  static const Curl curl;
  if (!curl.loaded) return problem("libcurl.so.4 cannot be opened. Fix: install libcurl4");
  CURL* handle = curl.init();
  if (!handle) return problem("libcurl does not start");
  Body received{.text = {}, .most = most_bytes};
  curl_slist* headers = curl.append(nullptr, "Content-Type: application/json");
  curl.setopt(handle, CURLOPT_URL, url.c_str());
  curl.setopt(handle, CURLOPT_HTTPHEADER, headers);
  curl.setopt(handle, CURLOPT_POSTFIELDS, body.c_str());
  curl.setopt(handle, CURLOPT_POSTFIELDSIZE, static_cast<long>(body.size()));
  curl.setopt(handle, CURLOPT_WRITEFUNCTION, &receive);
  curl.setopt(handle, CURLOPT_WRITEDATA, &received);
  curl.setopt(handle, CURLOPT_NOSIGNAL, 1L);
  curl.setopt(handle, CURLOPT_TIMEOUT_MS, static_cast<long>(limit_s * 1e3));
  const CURLcode failed = curl.perform(handle);
  long status = 0;
  curl.getinfo(handle, CURLINFO_RESPONSE_CODE, &status);
  if (failed == CURLE_WRITE_ERROR)
    answer.problem = fmt::format("an answer of more than {} bytes", most_bytes);
  else if (failed != CURLE_OK)
    answer.problem = curl.strerror(failed);
  else if (status >= 300)
    answer.problem = fmt::format("HTTP status {}", status);
  answer.passing = failed == CURLE_OK ? status == 429 || status >= 500
                                      : failed != CURLE_WRITE_ERROR && failed != CURLE_UNSUPPORTED_PROTOCOL &&
                                            failed != CURLE_URL_MALFORMAT;
  answer.body = std::move(received.text);
  curl.free_all(headers);
  curl.cleanup(handle);
  return answer;
}

}  // namespace nrl
