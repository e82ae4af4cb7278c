#pragma once
// The HTTP server of live views. cpp-httplib lies in a module that is opened on use: it brings a TLS library
// that takes longer to load than this program.

#include <memory>
#include <string>
#include <vector>

#include "apps/monitor/http_module.h"

namespace nrl::monitor {

/// Listens at `address`: `port`, or the next free one of 20, or any if it is 0. Throws
/// Error(Exit::unavailable) if the module cannot be opened or none of them is free.
std::unique_ptr<HttpServer> open_http_server(const std::string& address, int port,
                                             std::vector<HttpServer::Route> routes);

}  // namespace nrl::monitor
