#include "apps/monitor/http.h"

#include <array>
#include <exception>
#include <utility>

#include <dlfcn.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/base/threads.h"

namespace nrl::monitor {
namespace {

constexpr int ports_to_try = 20;

// The directory of this program.
std::string program_directory() {
  std::array<char, 4096> path;
  const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size());
  const std::string program(path.data(), length > 0 ? static_cast<size_t>(length) : 0);
  return program.substr(0, program.rfind('/'));
}

}  // namespace

std::unique_ptr<HttpServer> open_http_server(const std::string& address, int port,
                                             std::vector<HttpServer::Route> routes) {
  const std::string path = program_directory() + "/" NRL_HTTP_MODULE;
  void* module = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  const char* problem = module ? nullptr : dlerror();
  const auto open =
      module ? reinterpret_cast<OpenHttpServer*>(dlsym(module, open_http_server_name)) : nullptr;
  if (!open)
    fail(Exit::unavailable,
         "no HTTP server: {}. Fix: install libcpp-httplib's shared library, or set "
         "monitoring.visualization.prometheus and dashboard to false",
         problem ? problem : "the module has another version");
  const BlockedSignals blocked;
  for (int i = 0; i < (port == 0 ? 1 : ports_to_try) && port + i <= 65535; ++i) try {
      if (auto* server = open(address.c_str(), port == 0 ? 0 : port + i, routes))
        return std::unique_ptr<HttpServer>(server);
    } catch (const std::exception& e) {
      throw error_from(e);
    }
  fail(Exit::unavailable,
       "no HTTP server: cannot listen at {}, ports {} to {}. Fix: another "
       "monitoring.visualization.port (0: any), or an address of this machine as "
       "monitoring.visualization.bind",
       address, port, port + ports_to_try - 1);
}

}  // namespace nrl::monitor
