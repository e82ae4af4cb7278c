#include "apps/data/block_shuffle.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "core/base/threads.h"
#include "core/device/cpu/memory.h"

namespace nrl::data {
namespace {

constexpr size_t read_at_once = size_t{1} << 18;  // elements of a group that are read at once
constexpr size_t prefetch_distance = 32;          // elements between a prefetch and the access
constexpr int buffers_to_exchange = 5;            // of a block each: see BlockShuffle::exchange()
constexpr int buffers_to_order = 2;               // and BlockShuffle::put_in_order()

class Buffer {
 public:
  explicit Buffer(int64_t count)
      : memory_(static_cast<size_t>(count) * 4),
        values_(reinterpret_cast<uint32_t*>(memory_.data()), static_cast<size_t>(count)) {}
  std::span<uint32_t> first(int64_t count) const { return values_.first(static_cast<size_t>(count)); }

 private:
  cpu::HostMemory memory_;
  std::span<uint32_t> values_;
};

struct Joined {
  std::thread thread;
  ~Joined() {
    if (thread.joinable()) thread.join();
  }
};

class BlockShuffle {
 public:
  BlockShuffle(const OrderSpace& space, int64_t at, int64_t count, int64_t block)
      : space_(space),
        at_(at),
        count_(count),
        block_(block),
        scratch_(space.make_scratch()),
        blocks_(static_cast<size_t>((count + block - 1) / block)) {
    scratch_.allocate(static_cast<uint64_t>(count) * 4);
  }

  // Executes all steps. Another thread draws the partners of the next block meanwhile.
  void exchange(NumpyRandomState& random, const InitialValues& initial) {
    const Buffer values(block_), partners(block_), next_partners(block_), grouped(block_), targets(block_);
    const Buffer *drawn = &partners, *next = &next_partners;
    const auto draw_block = [&](int64_t b, const Buffer& out) {
      of(b).random = random;
      draw(b, begin(b) + size(b) - 1, random, out.first(size(b)));
    };
    draw_block(blocks() - 1, *drawn);
    for (int64_t b = blocks(); b-- > 0; std::swap(drawn, next)) {
      Joined drawing;
      if (b > 0) drawing.thread = start_thread([&draw_block, b, next] { draw_block(b - 1, *next); });
      const auto own = values.first(size(b));
      initial(begin(b), own);
      for (int64_t from = blocks(); --from > b;) receive(from, b, own, grouped, targets);
      run_steps(b, own, drawn->first(size(b)), grouped.first(size(b)), targets.first(size(b)));
    }
  }

  // The blocks are independent of each other.
  void put_in_order(int threads) {
    std::atomic<int64_t> next = 0;
    std::vector<std::exception_ptr> errors(static_cast<size_t>(threads));
    const auto work = [&](std::exception_ptr& error) {
      try {
        const Buffer grouped(block_), ordered(block_);
        for (int64_t b; (b = next++) < blocks();)
          order_block(b, grouped.first(size(b)), ordered.first(size(b)));
      } catch (...) {
        error = std::current_exception();
        next = blocks();
      }
    };
    {
      std::vector<Joined> workers(errors.size() - 1);
      for (size_t t = 0; t < workers.size(); ++t)
        workers[t].thread = start_thread([&work, &error = errors[t + 1]] { work(error); });
      work(errors[0]);
    }
    for (const std::exception_ptr& error : errors)
      if (error) std::rethrow_exception(error);
  }

 private:
  struct Block {
    NumpyRandomState random{0};      // before the steps of the block
    std::vector<uint32_t> group_at;  // first element of each group, by block of the partner; and the end
  };

  int64_t blocks() const { return static_cast<int64_t>(blocks_.size()); }
  int64_t begin(int64_t b) const { return b * block_; }
  int64_t size(int64_t b) const { return std::min(block_, count_ - begin(b)); }
  Block& of(int64_t b) { return blocks_[b]; }
  int64_t byte(int64_t element) const { return at_ + element * 4; }
  int shift() const { return std::countr_zero(static_cast<uint64_t>(block_)); }

  // The partners of the steps of a block; element 0, which has no step, is its own.
  void draw(int64_t b, int64_t last, NumpyRandomState& random, std::span<uint32_t> partners) const {
    if (begin(b) == 0 && last + 1 == static_cast<int64_t>(partners.size())) {
      partners.back() = 0;
      partners = partners.first(partners.size() - 1);
    }
    random.draw(static_cast<uint64_t>(last), partners, [](uint32_t) {});
  }

  // Exchanges the values that block `from` stored for `b` for those of `own`, the elements of b.
  void receive(int64_t from, int64_t b, std::span<uint32_t> own, const Buffer& value_buffer,
               const Buffer& target_buffer) {
    const auto& group_at = of(from).group_at;
    const int64_t end = begin(from) + group_at[static_cast<size_t>(b) + 1];
    for (int64_t at = begin(from) + group_at[b]; at < end;) {
      const int64_t count = std::min({end - at, static_cast<int64_t>(read_at_once), block_});
      const auto values = value_buffer.first(count), targets = target_buffer.first(count);
      space_.read(byte(at), values);
      scratch_.pread_all(targets.data(), targets.size_bytes(), static_cast<uint64_t>(at) * 4);
      for (size_t k = 0; k < values.size(); ++k) {
        if (k + prefetch_distance < values.size())
          __builtin_prefetch(own.data() + targets[k + prefetch_distance], 1);
        std::swap(values[k], own[targets[k]]);
      }
      space_.write(byte(at), values);
      at += count;
    }
  }

  // Executes the steps of block b with partners in it, and stores the values of the others in groups.
  void run_steps(int64_t b, std::span<uint32_t> own, std::span<const uint32_t> partners,
                 std::span<uint32_t> grouped, std::span<uint32_t> targets) {
    std::vector<uint32_t>& group_at = of(b).group_at;
    group_at.assign(static_cast<size_t>(b) + 2, 0);
    for (const uint32_t partner : partners) ++group_at[(partner >> shift()) + 1];
    for (size_t g = 1; g < group_at.size(); ++g) group_at[g] += group_at[g - 1];
    std::vector<uint32_t> next(group_at.begin(), group_at.end() - 1);
    const uint32_t own_group = static_cast<uint32_t>(b), in_block = static_cast<uint32_t>(block_ - 1);
    for (size_t k = 0; k < partners.size(); ++k) {
      if (k + prefetch_distance < partners.size() && partners[k + prefetch_distance] >> shift() == own_group)
        __builtin_prefetch(own.data() + (partners[k + prefetch_distance] & in_block), 1);
      const uint32_t group = partners[k] >> shift(), target = partners[k] & in_block;
      uint32_t value = own[own.size() - 1 - k];
      if (group == own_group) std::swap(value, own[target]);
      grouped[next[group]] = value;
      targets[next[group]++] = target;
    }
    space_.write(byte(begin(b)), grouped);
    const auto sent = targets.first(group_at[b]);
    scratch_.pwrite_all(sent.data(), sent.size_bytes(), static_cast<uint64_t>(begin(b)) * 4);
  }

  void order_block(int64_t b, std::span<uint32_t> grouped, std::span<uint32_t> ordered) {
    space_.read(byte(begin(b)), grouped);
    NumpyRandomState random = of(b).random;
    std::vector<uint32_t> next(of(b).group_at.begin(), of(b).group_at.end() - 1);
    std::array<uint32_t, 1024> partners;
    for (size_t left = ordered.size(); left > 0;) {
      const std::span batch(partners.data(), std::min(left, partners.size()));
      draw(b, begin(b) + static_cast<int64_t>(left) - 1, random, batch);
      for (const uint32_t partner : batch) ordered[--left] = grouped[next[partner >> shift()]++];
    }
    space_.write(byte(begin(b)), ordered);
  }

  const OrderSpace& space_;
  int64_t at_, count_, block_;
  File scratch_;
  std::vector<Block> blocks_;
};

}  // namespace

int64_t ShuffleOptions::memory(int64_t count) const {
  if (count <= block) return count * 4;
  return std::max(buffers_to_exchange, threads * buffers_to_order) * block * 4;
}

int64_t ShuffleOptions::scratch(int64_t count) const {
  return count <= block ? 0 : count * 4;
}

void shuffle_into(const OrderSpace& space, int64_t at, int64_t count, NumpyRandomState& random,
                  const InitialValues& initial, const ShuffleOptions& options) {
  NRL_CHECK(count >= 0 && count <= int64_t{UINT32_MAX} &&
                std::has_single_bit(static_cast<uint64_t>(options.block)) &&
                options.block <= int64_t{1} << 31 && options.threads > 0,
            "{} elements in blocks of {}", count, options.block);
  if (const auto memory = space.memory(); !memory.empty()) {
    const auto bytes = memory.subspan(static_cast<size_t>(at), static_cast<size_t>(count) * 4);
    const std::span values(reinterpret_cast<uint32_t*>(bytes.data()), static_cast<size_t>(count));
    initial(0, values);
    random.shuffle(values);
  } else if (count <= options.block) {
    const Buffer buffer(count);
    const auto values = buffer.first(count);
    initial(0, values);
    random.shuffle(values);
    space.write(at, values);
  } else {
    BlockShuffle shuffle(space, at, count, options.block);
    shuffle.exchange(random, initial);
    shuffle.put_in_order(options.threads);
  }
}

}  // namespace nrl::data
