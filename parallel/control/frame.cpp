#include "parallel/control/frame.h"

#include <bit>
#include <cstring>

#include <sodium.h>

#include "core/base/error.h"

namespace nrl::control {

namespace {

static_assert(std::endian::native == std::endian::little, "frames are copied as they lie in memory");

constexpr uint32_t frame_magic = 0x434C524E;  // "NRLC"
constexpr uint8_t frame_version = 1;

struct Header {
  uint32_t magic;
  uint8_t version;
  uint8_t type;
  uint16_t length;
  uint32_t sender;
  uint32_t attempt;
  uint64_t sequence;
  int64_t sent;
};
static_assert(sizeof(Header) == header_bytes);

const unsigned char* raw(const std::byte* bytes) {
  return reinterpret_cast<const unsigned char*>(bytes);
}
unsigned char* raw(std::byte* bytes) {
  return reinterpret_cast<unsigned char*>(bytes);
}

void start_sodium() {
  static const bool started = sodium_init() >= 0;
  NRL_CHECK(started, "libsodium found no random numbers");
}

void compute_mac(std::span<const std::byte> bytes, const Key& key, std::byte* mac) {
  crypto_generichash(raw(mac), mac_bytes, raw(bytes.data()), bytes.size(), raw(key.data()), key.size());
}

Key derive(const Key& secret, std::span<const std::byte> context) {
  Key key;
  crypto_generichash(raw(key.data()), key.size(), raw(context.data()), context.size(), raw(secret.data()),
                     secret.size());
  return key;
}

struct KeyContext {
  char purpose[16];
  uint64_t run;
  uint32_t attempt;
  uint32_t direction;
  uint32_t child, parent;
  Nonce of_child, of_parent;
};
static_assert(sizeof(KeyContext) == 72);

}  // namespace

Message& Message::operator=(const Message& other) {
  type = other.type;
  length = other.length;
  std::memcpy(payload.data(), other.payload.data(), length);
  return *this;
}

Key greeting_key(const Secret& secret) {
  start_sodium();
  const KeyContext context{"nrl-greeting-1", secret.run, secret.attempt, 0, 0, 0, {}, {}};
  return derive(secret.key, std::as_bytes(std::span(&context, 1)));
}

Key link_key(const Secret& secret, Direction direction, uint32_t child, uint32_t parent,
             const Nonce& of_child, const Nonce& of_parent) {
  const KeyContext context{"nrl-control-1", secret.run, secret.attempt, static_cast<uint32_t>(direction),
                           child,           parent,     of_child,       of_parent};
  return derive(secret.key, std::as_bytes(std::span(&context, 1)));
}

void protect(std::span<std::byte> secret) {
  start_sodium();
  sodium_mlock(secret.data(), secret.size());
}
void forget(std::span<std::byte> secret) {
  sodium_munlock(secret.data(), secret.size());
}

void fill_random(std::span<std::byte> bytes) {
  start_sodium();
  randombytes_buf(bytes.data(), bytes.size());
}

uint64_t digest(std::span<const std::byte> text) {
  std::array<unsigned char, 16> hash;
  crypto_generichash(hash.data(), hash.size(), raw(text.data()), text.size(), nullptr, 0);
  uint64_t value;
  std::memcpy(&value, hash.data(), sizeof value);
  return value;
}

size_t FrameWriter::write(const Message& message, Nanos now, std::span<std::byte, max_frame> out) {
  const Header header{frame_magic,
                      frame_version,
                      static_cast<uint8_t>(message.type),
                      message.length,
                      sender_,
                      attempt_,
                      ++sequence_,
                      now};
  std::memcpy(out.data(), &header, sizeof header);
  std::memcpy(out.data() + header_bytes, message.payload.data(), message.length);
  const size_t signed_bytes = header_bytes + message.length;
  compute_mac(out.first(signed_bytes), key_, out.data() + signed_bytes);
  return signed_bytes + mac_bytes;
}

ReadResult FrameReader::read(std::span<const std::byte> bytes, Message& message, size_t& used) {
  if (bytes.size() < header_bytes) return ReadResult::incomplete;
  Header header;
  std::memcpy(&header, bytes.data(), sizeof header);
  const bool from_anyone = open_ || sender_ == any_sender;
  if (header.magic != frame_magic || header.version != frame_version || header.type == 0 ||
      header.type > static_cast<uint8_t>(last_frame_type) || header.length > max_payload ||
      header.attempt != attempt_ || (!from_anyone && header.sender != sender_))
    return ReadResult::refused;
  if (header.sequence != sequence_ + 1) return ReadResult::refused;
  const size_t signed_bytes = header_bytes + header.length;
  if (bytes.size() < signed_bytes + mac_bytes) return ReadResult::incomplete;
  std::array<std::byte, mac_bytes> mac;
  compute_mac(bytes.first(signed_bytes), key_, mac.data());
  if (sodium_memcmp(mac.data(), bytes.data() + signed_bytes, mac_bytes) != 0) return ReadResult::refused;
  open_ = from_anyone;
  sender_ = header.sender;
  sequence_ = header.sequence;
  message.type = static_cast<FrameType>(header.type);
  message.length = header.length;
  std::memcpy(message.payload.data(), bytes.data() + header_bytes, header.length);
  used = signed_bytes + mac_bytes;
  return ReadResult::frame;
}

}  // namespace nrl::control
