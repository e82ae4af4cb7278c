// Requests for windows.

#include "apps/profile/request.h"

#include <filesystem>
#include <fstream>

#include "core/base/error.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;

TEST_CASE("a request is taken once", "[profile]") {
  const test::TemporaryDirectory directory;
  CHECK_FALSE(profile::take_request(directory.path()));
  profile::write_request(directory.path(), 7);
  CHECK(profile::take_request(directory.path()) == 7);
  CHECK_FALSE(profile::take_request(directory.path()));
  profile::write_request(directory.path(), 1);
  profile::remove_request(directory.path());
  CHECK_FALSE(profile::take_request(directory.path()));
}

TEST_CASE("a file that is no request is refused and removed", "[profile]") {
  const test::TemporaryDirectory directory;
  for (const std::string& text :
       {std::string("{"), std::string("{}"), std::string("[]"), std::string("{\"steps\": 0}"),
        std::string("{\"steps\": 10001}"), std::string("{\"steps\": \"3\"}"), std::string(2000, ' ')}) {
    CAPTURE(text);
    std::ofstream(directory.path() + "/" + profile::request_file) << text;
    CHECK_THROWS_AS(profile::take_request(directory.path()), Error);
    CHECK_FALSE(profile::take_request(directory.path()));
  }
}
