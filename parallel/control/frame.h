#pragma once
// Frames of the control plane: fixed layout, little-endian, authenticated with BLAKE2b. A frame is a header,
// a payload and a MAC over both. Bytes of a peer are untrusted until FrameReader accepts them.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace nrl::control {

/// Nanoseconds of CLOCK_MONOTONIC, or a duration. Times of other hosts are only sent as ages.
using Nanos = int64_t;
constexpr double in_seconds(Nanos t) {
  return static_cast<double>(t) * 1e-9;
}

enum class FrameType : uint8_t {
  hello = 1,
  challenge,
  proof,
  beat,
  suspect,
  ask,
  answer,
  verdict,
  bye,
  pace
};
inline constexpr FrameType last_frame_type = FrameType::pace;

inline constexpr size_t header_bytes = 32, mac_bytes = 16, max_payload = 1024;
inline constexpr size_t max_frame = header_bytes + max_payload + mac_bytes;

using Key = std::array<std::byte, 32>;
using Nonce = std::array<std::byte, 16>;

/// A frame without its header's bookkeeping: type and payload. A copy costs no more than the payload's
/// length.
struct Message {
  FrameType type = FrameType::beat;
  uint16_t length = 0;
  std::array<std::byte, max_payload> payload;

  Message() = default;
  Message(const Message& other) { *this = other; }
  Message& operator=(const Message& other);
  std::span<const std::byte> bytes() const { return {payload.data(), length}; }
};

/// The secret of an attempt; the keys of its links derive from it.
struct Secret {
  Key key{};
  uint64_t run = 0;  ///< digest of the run id
  uint32_t attempt = 0;
};
enum class Direction : uint8_t { up, down };  ///< child to parent, parent to child
/// Key of HELLO and CHALLENGE frames, which precede a link key.
Key greeting_key(const Secret& secret);
/// Key of a link in one direction. Both sides contribute a nonce, hence no frame of another link or time
/// verifies.
Key link_key(const Secret& secret, Direction direction, uint32_t child, uint32_t parent,
             const Nonce& of_child, const Nonce& of_parent);
/// Keeps a secret out of swap and core dumps, where the system allows it; forget() overwrites it.
void protect(std::span<std::byte> secret);
void forget(std::span<std::byte> secret);
/// Fills with random bytes of the system.
void fill_random(std::span<std::byte> bytes);
/// BLAKE2b of `text`, 64 bits.
uint64_t digest(std::span<const std::byte> text);

/// Produces the frames of one direction of a link.
class FrameWriter {
 public:
  FrameWriter() = default;
  FrameWriter(const Key& key, uint32_t sender, uint32_t attempt)
      : key_(key), sender_(sender), attempt_(attempt) {}
  /// Writes `message` at the start of `out`; returns the bytes of the frame.
  size_t write(const Message& message, Nanos now, std::span<std::byte, max_frame> out);

 private:
  Key key_{};
  uint32_t sender_ = 0, attempt_ = 0;
  uint64_t sequence_ = 0;
};

enum class ReadResult : uint8_t { frame, incomplete, refused };

/// Checks the frames of one direction of a link: MAC, sender, attempt, and a sequence that increases by one.
class FrameReader {
 public:
  static constexpr uint32_t any_sender = UINT32_MAX;
  FrameReader() = default;
  FrameReader(const Key& key, uint32_t sender, uint32_t attempt)
      : key_(key), sender_(sender), attempt_(attempt) {}
  /// Reads the frame at the start of `bytes` and sets `used` to its length. After `refused` the link must be
  /// closed.
  ReadResult read(std::span<const std::byte> bytes, Message& message, size_t& used);
  uint32_t sender() const { return sender_; }  ///< of the last frame, if any sender is accepted

 private:
  Key key_{};
  uint32_t sender_ = any_sender, attempt_ = 0;
  bool open_ = false;  // accepts any sender
  uint64_t sequence_ = 0;
};

}  // namespace nrl::control
