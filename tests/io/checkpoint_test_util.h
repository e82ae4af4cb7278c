#pragma once
// Ranks as threads, and a small model whose values are functions of name and element.

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/io/checkpoint_reader.h"
#include "core/io/checkpoint_store.h"
#include "tests/io/io_test_util.h"

namespace nrl::test {

/// The RankGroups of `size` threads of this process.
class ThreadRanks {
 public:
  explicit ThreadRanks(int size) : texts_(static_cast<size_t>(size)), size_(size) {}

  RankGroup group(int rank) {
    RankGroup g;
    g.rank = rank;
    g.size = size_;
    g.broadcast = [this, rank](const std::string& text) { return exchange(rank, text)[0]; };
    g.gather = [this, rank](const std::string& text) { return exchange(rank, text); };
    g.send = [this, rank](int to, const void* data, size_t bytes) {
      const std::lock_guard lock(mutex_);
      mail_[{rank, to}].emplace_back(static_cast<const char*>(data), bytes);
      changed_.notify_all();
    };
    g.receive = [this, rank](int from, void* data, size_t bytes) {
      std::unique_lock lock(mutex_);
      std::deque<std::string>& box = mail_[{from, rank}];
      const bool came = changed_.wait_for(lock, std::chrono::seconds(60), [&] { return !box.empty(); });
      if (!came || box.front().size() != bytes) fail(Exit::internal, "a message that nobody sent");
      std::memcpy(data, box.front().data(), bytes);
      box.pop_front();
    };
    return g;
  }

  /// Runs `work(rank)` on every rank and returns the error of each.
  template <class F>
  std::vector<Caught> run(F&& work) {
    std::vector<Caught> errors(static_cast<size_t>(size_));
    std::vector<std::thread> threads;
    for (int r = 0; r < size_; ++r) {
      threads.emplace_back([&, r] { errors[r] = error_of([&] { work(r); }); });
    }
    for (std::thread& t : threads) t.join();
    return errors;
  }

 private:
  std::vector<std::string> exchange(int rank, const std::string& text) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !leaving_; });
    texts_[rank] = text;
    if (++inside_ == size_) {
      leaving_ = true;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return leaving_; });
    std::vector<std::string> all = texts_;
    if (--inside_ == 0) {
      leaving_ = false;
      changed_.notify_all();
    }
    return all;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> texts_;
  std::map<std::pair<int, int>, std::deque<std::string>> mail_;  // by sender and receiver
  int size_, inside_ = 0;
  bool leaving_ = false;
};

/// The bytes of a logical tensor: every element is different from its neighbors, and no float is
/// NaN or infinite.
inline std::string tensor_bytes(const TensorSpec& t, uint64_t salt) {
  const auto n = static_cast<size_t>(*checked_product(t.shape));
  const auto unit = static_cast<size_t>(size_of(t.dtype));
  std::string bytes(n * unit, '\0');
  for (size_t i = 0; i < n; ++i) {
    const uint64_t word = (i * 2654435761u + name_hash(t.name) + salt * 977) & 0x3fff3fff3fff3fffull;
    std::memcpy(bytes.data() + i * unit, &word, unit);
  }
  return bytes;
}

inline std::vector<TensorSpec> model_tensors(int64_t big = 700) {
  return {{"w", DType::f32, {7, 5}},  {"columns", DType::bf16, {6, 8}}, {"big", DType::f32, {big}},
          {"scalar", DType::i64, {}}, {"empty", DType::f32, {0, 3}},    {"norm", DType::f32, {11}}};
}

/// Adds this rank's part: "w" as slices of its rows, "columns" cut by columns, "norm" and "scalar" on rank 0,
/// the others cut into flat ranges.
inline void add_model(CheckpointWriter& writer, int rank, int size, uint64_t salt, int64_t big = 700) {
  std::vector<ShardSpec> shards;
  std::vector<std::string> data;
  for (const TensorSpec& t : model_tensors(big)) {
    const std::string all = tensor_bytes(t, salt);
    const int64_t n = *checked_product(t.shape), unit = size_of(t.dtype);
    if (t.name == "w") {
      const int64_t begin = 7 * rank / size, end = 7 * (rank + 1) / size;
      std::string rows = all.substr(begin * 5 * unit, (end - begin) * 5 * unit);
      std::vector<TensorSlice> slices{{t.name, t.dtype, t.shape, begin, end - begin, 0, 5, rows.data()}};
      if (begin == end) slices.clear();
      writer.add_slices("model", slices);
    } else if (t.name == "columns") {
      const int64_t c0 = 8 * rank / size, c1 = 8 * (rank + 1) / size;
      ShardSpec s = ShardSpec::flat(t.name, t.name, t.dtype, t.shape, c0, 0);
      s.stored_shape = {6, c1 - c0};
      s.run = c1 - c0;
      s.stride = 8;
      std::string part;
      for (int64_t row = 0; row < 6; ++row) part += all.substr((row * 8 + c0) * unit, (c1 - c0) * unit);
      shards.push_back(s);
      data.push_back(part);
    } else if (t.name == "norm" || t.name == "scalar") {
      if (rank != 0) continue;
      shards.push_back(ShardSpec::whole(t.name, t.dtype, t.shape));
      data.push_back(all);
    } else {
      const int64_t begin = n * rank / size, end = n * (rank + 1) / size;
      shards.push_back(ShardSpec::flat(t.name + ".part", t.name, t.dtype, t.shape, begin, end - begin));
      data.push_back(all.substr(begin * unit, (end - begin) * unit));
    }
  }
  writer.add_tensor_set("optimizer", shards, [&](SafetensorsWriter& w) {
    for (size_t i = 0; i < shards.size(); ++i) w.write(shards[i].key, data[i].data(), data[i].size());
  });
  if (rank == 0) writer.add_file("config.json", "{\"hidden_size\": 5}\n");
}

/// Saves step 7 of a model by several ranks; returns the checkpoint's directory.
inline std::string save_by_ranks(const std::string& store, int ranks, int64_t big = 700) {
  ThreadRanks threads(ranks);
  const auto errors = threads.run([&](int rank) {
    CheckpointWriter writer(store, 7, 1000, threads.group(rank));
    add_model(writer, rank, ranks, 3, big);
    writer.commit(JsonValue::object());
  });
  for (const Caught& e : errors) REQUIRE(e.text.empty());
  return store + "/step-7";
}

/// Commits a checkpoint written by one rank.
inline std::string save(const std::string& store, int64_t step, uint64_t salt) {
  CheckpointWriter writer(store, step, 10000);
  add_model(writer, 0, 1, salt);
  return writer.commit(JsonValue::object({{"salt", salt}}));
}

/// Whether the checkpoint holds exactly the model of `salt`.
inline bool holds_model(const std::string& path, uint64_t salt, int64_t big = 700) {
  CheckpointReader reader(path);
  reader.check_names(model_tensors(big));
  for (const TensorSpec& t : model_tensors(big)) {
    const std::string wanted = tensor_bytes(t, salt);
    std::string got(wanted.size(), '\1');
    reader.read_logical(t.name, got.data(), got.size());
    if (got != wanted) return false;
  }
  return true;
}

inline void overwrite(const std::string& path, const std::string& bytes) {
  remove_tree(path);
  const File file = File::create(path);
  file.pwrite_all(bytes.data(), bytes.size(), 0);
}

}  // namespace nrl::test
