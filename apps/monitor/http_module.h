#pragma once
// The interface of the module that holds cpp-httplib. Program and module are built together, so both have the
// same types.

#include <functional>
#include <string>
#include <vector>

namespace nrl::monitor {

struct HttpReply {
  std::string body, type;
};

/// Answers GET requests in threads of its own. Thread-safe handlers only.
class HttpServer {
 public:
  using Handler = std::function<HttpReply(const std::string& accept)>;
  struct Route {
    std::string path;  ///< "/metrics"
    Handler answer;
  };
  virtual ~HttpServer() = default;  ///< ends the threads
  virtual int port() const = 0;
};

/// A server that listens at address and port (0: any), or null if it cannot. The caller deletes it.
using OpenHttpServer = HttpServer*(const char* address, int port,
                                   const std::vector<HttpServer::Route>& routes);
inline constexpr const char* open_http_server_name = "nrl_open_http_server";

}  // namespace nrl::monitor
