// The module that http.cpp opens: cpp-httplib, in one file, without anything else of this program.

#include "apps/monitor/http_module.h"

#include <memory>
#include <string>
#include <thread>

#include <httplib.h>

namespace nrl::monitor {
namespace {

constexpr size_t threads = 2, most_request_bytes = 16384;

class Server final : public HttpServer {
 public:
  explicit Server(const std::vector<Route>& routes) {
    server_.new_task_queue = [] { return new httplib::ThreadPool(threads); };
    server_.set_read_timeout(5);
    server_.set_write_timeout(5);
    server_.set_keep_alive_timeout(1);
    server_.set_payload_max_length(most_request_bytes);
    // A second run must not share a port with this one.
    server_.set_socket_options([](socket_t socket) {
      const int yes = 1;
      ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    });
    for (const Route& route : routes)
      server_.Get(route.path,
                  [answer = route.answer](const httplib::Request& request, httplib::Response& response) {
                    HttpReply reply = answer(request.get_header_value("Accept"));
                    response.set_content(reply.body, reply.type.c_str());
                  });
  }
  ~Server() override {
    server_.stop();
    if (thread_.joinable()) thread_.join();
  }

  bool listen(const char* address, int port) {
    port_ = port == 0 ? server_.bind_to_any_port(address) : server_.bind_to_port(address, port) ? port : -1;
    if (port_ <= 0) return false;
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    // stop() before this would be lost.
    while (!server_.is_running()) std::this_thread::yield();
    return true;
  }
  int port() const override { return port_; }

 private:
  httplib::Server server_;
  std::thread thread_;
  int port_ = 0;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) HttpServer* nrl_open_http_server(
    const char* address, int port, const std::vector<HttpServer::Route>& routes) {
  auto server = std::make_unique<Server>(routes);
  return server->listen(address, port) ? server.release() : nullptr;
}

}  // namespace nrl::monitor
