// Frames: round trip, every refusal, and random and damaged bytes. CONTROL_FRAMES=1000000 control_tests
// "[fuzz]" tries more of them.

#include "parallel/control/frame.h"

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/base/philox.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::control;

namespace {

Key key_of(uint8_t fill) {
  Key key;
  key.fill(std::byte{fill});
  return key;
}

Message message_of(FrameType type, std::string_view text) {
  Message message;
  message.type = type;
  message.length = static_cast<uint16_t>(text.size());
  std::memcpy(message.payload.data(), text.data(), text.size());
  return message;
}

struct Sent {
  std::array<std::byte, max_frame> bytes;
  size_t length;
  std::span<const std::byte> span() const { return {bytes.data(), length}; }
};

Sent send(FrameWriter& writer, const Message& message) {
  Sent sent;
  sent.length = writer.write(message, 17, sent.bytes);
  return sent;
}

bool equal(const Message& a, const Message& b) {
  return a.type == b.type && a.length == b.length &&
         std::memcmp(a.payload.data(), b.payload.data(), a.length) == 0;
}

}  // namespace

TEST_CASE("a frame survives the wire, whole or with the next one behind it") {
  FrameWriter writer(key_of(1), 7, 3);
  FrameReader reader(key_of(1), 7, 3);
  std::vector<std::byte> wire;
  const std::string longest(max_payload, 'x');
  const Message messages[] = {message_of(FrameType::beat, "one"), message_of(FrameType::bye, ""),
                              message_of(FrameType::verdict, longest)};
  for (const Message& m : messages) {
    const Sent sent = send(writer, m);
    CHECK(sent.length == header_bytes + m.length + mac_bytes);
    wire.insert(wire.end(), sent.bytes.begin(), sent.bytes.begin() + static_cast<ptrdiff_t>(sent.length));
  }
  std::span<const std::byte> rest(wire);
  for (const Message& m : messages) {
    Message got;
    size_t used = 0;
    for (size_t part = 0; part < header_bytes + m.length + mac_bytes; part += 5)
      REQUIRE(reader.read(rest.first(part), got, used) == ReadResult::incomplete);
    REQUIRE(reader.read(rest, got, used) == ReadResult::frame);
    CHECK(equal(got, m));
    rest = rest.subspan(used);
  }
  CHECK(rest.empty());
}

TEST_CASE("a frame of another key, sender, attempt or place in the sequence is refused") {
  FrameWriter writer(key_of(1), 7, 3);
  const Sent first = send(writer, message_of(FrameType::beat, "one"));
  const Sent second = send(writer, message_of(FrameType::beat, "two"));
  const Sent third = send(writer, message_of(FrameType::beat, "three"));
  Message got;
  size_t used;
  CHECK(FrameReader(key_of(2), 7, 3).read(first.span(), got, used) == ReadResult::refused);
  CHECK(FrameReader(key_of(1), 8, 3).read(first.span(), got, used) == ReadResult::refused);
  CHECK(FrameReader(key_of(1), 7, 4).read(first.span(), got, used) == ReadResult::refused);
  FrameReader reader(key_of(1), 7, 3);
  CHECK(reader.read(second.span(), got, used) == ReadResult::refused);  // the first is missing
  CHECK(reader.read(first.span(), got, used) == ReadResult::frame);
  CHECK(reader.read(first.span(), got, used) == ReadResult::refused);  // replayed
  CHECK(reader.read(third.span(), got, used) == ReadResult::refused);
  CHECK(reader.read(second.span(), got, used) == ReadResult::frame);

  FrameReader anyone(key_of(1), FrameReader::any_sender, 3);
  CHECK(anyone.read(first.span(), got, used) == ReadResult::frame);
  CHECK(anyone.sender() == 7);
}

TEST_CASE("every changed bit of a frame is noticed") {
  FrameWriter writer(key_of(1), 7, 3);
  const Sent sent = send(writer, message_of(FrameType::suspect, "rank 3 was killed"));
  for (size_t bit = 0; bit < 8 * sent.length; ++bit) {
    Sent damaged = sent;
    damaged.bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    Message got;
    size_t used;
    FrameReader reader(key_of(1), 7, 3);
    // A longer length waits for bytes that never come.
    CHECK(reader.read(damaged.span(), got, used) != ReadResult::frame);
  }
}

TEST_CASE("keys differ by run, attempt, direction, ranks and nonces") {
  const Nonce a{}, b{std::byte{1}};
  const Secret secret{key_of(1), 5, 1};
  std::vector<Key> keys = {greeting_key(secret), greeting_key({key_of(2), 5, 1}),
                           greeting_key({key_of(1), 6, 1}), greeting_key({key_of(1), 5, 2})};
  keys.push_back(link_key(secret, Direction::up, 3, 0, a, b));
  keys.push_back(link_key(secret, Direction::down, 3, 0, a, b));
  keys.push_back(link_key(secret, Direction::up, 0, 3, a, b));
  keys.push_back(link_key(secret, Direction::up, 3, 0, b, a));
  keys.push_back(link_key(secret, Direction::up, 3, 0, b, b));
  keys.push_back(link_key({key_of(1), 5, 2}, Direction::up, 3, 0, a, b));
  for (size_t i = 0; i < keys.size(); ++i)
    for (size_t j = 0; j < i; ++j) CHECK(keys[i] != keys[j]);
  CHECK(link_key(secret, Direction::up, 3, 0, a, b) == keys[4]);
}

TEST_CASE("random and damaged frames are refused", "[fuzz]") {
  const char* wanted = std::getenv("CONTROL_FRAMES");
  const uint64_t count = wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : 50000;
  const PhiloxStream random(11, "control frames");
  uint64_t element = 0;
  const auto draw = [&](uint64_t below) { return random.bits(element++) % below; };
  uint64_t accepted = 0, refused = 0, incomplete = 0;
  for (uint64_t i = 0; i < count; ++i) {
    FrameWriter writer(key_of(1), 7, 3);
    Message message = message_of(static_cast<FrameType>(1 + draw(9)), "");
    message.length = static_cast<uint16_t>(draw(2) == 0 ? draw(64) : draw(max_payload + 1));
    for (size_t k = 0; k < message.length; k += 7) message.payload[k] = static_cast<std::byte>(draw(256));
    for (size_t k = 0; k < message.length; ++k)
      if (k % 7 != 0) message.payload[k] = std::byte{};
    Sent sent = send(writer, message);
    const uint64_t how = draw(5);
    const std::array<std::byte, max_frame> before = sent.bytes;
    size_t length = sent.length;
    if (how == 0) {  // random bytes, perhaps after a plausible header
      for (size_t k = draw(2) * 8; k < length; ++k) sent.bytes[k] = static_cast<std::byte>(draw(256));
    } else if (how == 1) {
      for (uint64_t flips = 1 + draw(4); flips > 0; --flips)
        sent.bytes[draw(length)] ^= static_cast<std::byte>(1 << draw(8));
    } else if (how == 2) {
      length = draw(length);
    } else if (how == 3) {  // another length
      const auto other = static_cast<uint16_t>(draw(65536));
      std::memcpy(sent.bytes.data() + 6, &other, sizeof other);
    } else {
      sent.bytes[4 + draw(header_bytes - 4)] = static_cast<std::byte>(draw(256));
    }
    // A copy of exactly these bytes: the address sanitizer sees a read beyond them.
    const std::vector<std::byte> wire(sent.bytes.begin(),
                                      sent.bytes.begin() + static_cast<ptrdiff_t>(length));
    FrameReader reader(key_of(1), 7, 3);
    Message got;
    size_t used = 0;
    switch (reader.read(wire, got, used)) {
      case ReadResult::frame:
        ++accepted;
        REQUIRE(std::memcmp(before.data(), wire.data(), sent.length) == 0);  // nothing was changed
        REQUIRE(used <= wire.size());
        break;
      case ReadResult::refused:
        ++refused;
        break;
      case ReadResult::incomplete:
        ++incomplete;
        break;
    }
  }
  CHECK(refused > count / 3);
  CHECK(incomplete > count / 10);
  CHECK(accepted < count / 20);
}
