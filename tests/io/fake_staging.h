#pragma once
// Staging between two parts of host memory, as strict as a GPU: buffers that were given back are overwritten,
// and writes arrive as late as allowed.

#include <cstring>
#include <vector>

#include "core/io/staging.h"
#include "tests/catch.h"

namespace nrl::test {

class FakeStaging final : public Staging {
 public:
  explicit FakeStaging(size_t piece_bytes) : piece_(piece_bytes) {}

  size_t piece_bytes() const override { return piece_; }
  void read_ahead(std::vector<MemoryRange> ranges) override {
    ranges_ = std::move(ranges);
    read_ = 0;
  }
  const void* next() override {
    REQUIRE(read_ < ranges_.size());
    const MemoryRange range = ranges_[read_++];
    REQUIRE(range.bytes <= piece_);
    std::fill(current_.begin(), current_.end(), '\x7f');
    // A buffer of exactly this size in other memory: the sanitizers see reads behind its end.
    std::vector<char> copy(range.bytes);
    std::memcpy(copy.data(), range.data, range.bytes);
    previous_ = std::exchange(current_, std::move(copy));
    ++transfers;
    return current_.data();
  }
  void* buffer() override {
    if (writes_.size() == 2) arrive();
    filling_.assign(piece_, '\x7f');
    return filling_.data();
  }
  void write(void* to, size_t bytes) override {
    REQUIRE(bytes <= piece_);
    filling_.resize(bytes);
    writes_.push_back({to, std::move(filling_)});
    ++transfers;
  }
  void finish() override {
    while (!writes_.empty()) arrive();
  }

  int transfers = 0;

 private:
  struct Write {
    void* to;
    std::vector<char> data;
  };
  void arrive() {
    std::memcpy(writes_.front().to, writes_.front().data.data(), writes_.front().data.size());
    writes_.erase(writes_.begin());
  }

  size_t piece_;
  std::vector<MemoryRange> ranges_;
  size_t read_ = 0;
  std::vector<char> current_, previous_, filling_;
  std::vector<Write> writes_;
};

}  // namespace nrl::test
