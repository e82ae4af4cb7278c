#include <algorithm>
#include <cerrno>
#include <cstring>
#include <tuple>

#include <sys/stat.h>
#include <sys/statvfs.h>

#include "core/base/log.h"
#include "core/base/text.h"
#include "core/io/checkpoint_store.h"
#include "core/io/crc32c.h"
#include "core/io/slice_plan.h"

namespace nrl {
namespace {

void check_space(const std::string& store, uint64_t wanted, uint64_t reserve) {
  struct statvfs fs;
  if (::statvfs(store.c_str(), &fs) != 0) {
    fail(Exit::io, "{}: cannot determine the free space: {}", store, std::strerror(errno));
  }
  const uint64_t have = uint64_t{fs.f_bavail} * fs.f_frsize;
  const uint64_t need = wanted + wanted / 20 + reserve;
  if (have < need) {
    fail(Exit::io, "{}: No space left on device for a checkpoint: need {}, {} of it to remain free; have {}",
         store, human_bytes(need), human_bytes(reserve), human_bytes(have));
  }
}

// `owners` in ascending order.
std::string file_of_owner(const std::string& stem, const std::vector<int>& owners, int owner) {
  if (owners.size() == 1) return stem + ".safetensors";
  const auto at = std::lower_bound(owners.begin(), owners.end(), owner) - owners.begin();
  return fmt::format("{}-{:05}-of-{:05}.safetensors", stem, at + 1, owners.size());
}

std::string index_of(const SlicePlan& plan, const std::string& stem) {
  const std::vector<int> owners = plan.owners();
  std::map<std::string, std::string> files;  // by tensor
  uint64_t total = 0;
  for (const SlicePlan::Tensor& t : plan.tensors) {
    files[t.name] = file_of_owner(stem, owners, t.owner);
    total += static_cast<uint64_t>(t.bytes());
  }
  return safetensors_index(files, total);
}

std::string numbers_to_text(const std::vector<int>& numbers) {
  JsonValue out = JsonValue::array();
  for (const int n : numbers) out.push_back(n);
  return out.dump();
}

std::vector<int> numbers_from_text(const std::string& text) {
  std::vector<int> out;
  const JsonValue list = parse_json(text, "the owners of tensors");
  for (const JsonValue& v : list.items()) out.push_back(static_cast<int>(v.as_int()));
  return out;
}

}  // namespace

ShardSpec ShardSpec::whole(std::string name, DType dtype, std::vector<int64_t> shape) {
  return {name, shape, name, dtype, shape};
}

ShardSpec ShardSpec::flat(std::string key, std::string logical, DType dtype, std::vector<int64_t> shape,
                          int64_t offset, int64_t count) {
  return {std::move(key), {count}, std::move(logical), dtype, std::move(shape), offset};
}

CheckpointWriter::CheckpointWriter(std::string store, int64_t step, uint64_t local_bytes, RankGroup group)
    : CheckpointWriter(std::move(store), step, local_bytes, std::move(group), Options()) {}

CheckpointWriter::CheckpointWriter(std::string store, int64_t step, uint64_t local_bytes, RankGroup group,
                                   Options options)
    : store_(std::move(store)), step_(step), group_(std::move(group)), options_(std::move(options)) {
  NRL_CHECK(step >= 0, "negative step {}", step);
  const std::vector<std::string> bytes = group_.gather(std::to_string(local_bytes));
  final_ = join_path(store_, step_directory_name(step));
  temporary_ = on_rank_zero(group_, [&] {
    uint64_t total = 0;
    for (const std::string& b : bytes) total += std::stoull(b);
    make_directories(store_);
    check_space(store_, total, options_.reserve_bytes);
    const std::string nonce = options_.nonce.empty() ? random_nonce() : options_.nonce;
    NRL_CHECK(nonce.size() == 16, "the nonce \"{}\" must be 16 hexadecimal digits", nonce);
    const std::string path = fmt::format("{}.tmp-{}", final_, nonce);
    make_directory(path);
    return path;
  });
}

CheckpointWriter::~CheckpointWriter() {
  if (done_ || group_.rank != 0 || renamed_) return;
  try {
    remove_tree(temporary_);
  } catch (const std::exception& e) {
    log::warn("{}: the incomplete checkpoint could not be removed; the next start removes it: {}", temporary_,
              e.what());
  }
}

void CheckpointWriter::guard(const std::function<void()>& work) {
  if (error_) return;
  try {
    work();
  } catch (const Error& e) {
    error_ = e;
  } catch (const std::exception& e) {
    error_ = Error(Exit::internal, e.what());
  }
}

void CheckpointWriter::add_tensors(const std::string& file, const std::vector<ShardSpec>& shards,
                                   const std::function<void(SafetensorsWriter&)>& fill) {
  add_tensors(file, shards, fill, shared_);
}

void CheckpointWriter::add_tensors(const std::string& file, const std::vector<ShardSpec>& shards,
                                   const std::function<void(SafetensorsWriter&)>& fill, Written& written) {
  guard([&] {
    NRL_CHECK(is_plain_name(file) && file != manifest_name, "file name \"{}\"", file);
    std::vector<TensorSpec> specs;
    for (const ShardSpec& s : shards) specs.push_back({s.key, s.dtype, s.stored_shape});
    SafetensorsWriter::Options options;
    options.refuse_non_finite = options_.refuse_non_finite;
    SafetensorsWriter writer(join_path(temporary_, file), std::move(specs), std::move(options));
    fill(writer);
    if (error_) return;
    writer.finish();
    record(file, shards, writer, written);
  });
}

void CheckpointWriter::add_tensor_set(const std::string& stem, const std::vector<ShardSpec>& shards,
                                      const std::function<void(SafetensorsWriter&)>& fill) {
  std::string writes;  // by rank: '1' if it writes a file
  for (const std::string& one : group_.gather(shards.empty() ? "0" : "1")) writes += one;
  writes = group_.broadcast(writes);
  if (shards.empty()) return;
  const auto before = std::count(writes.begin(), writes.begin() + group_.rank, '1');
  const auto all = std::count(writes.begin(), writes.end(), '1');
  add_tensors(fmt::format("{}-{:05}-of-{:05}.safetensors", stem, before + 1, all), shards, fill,
              group_.rank == 0 ? shared_ : own_);
}

// Collective; that of the previous save if no rank's slices have changed.
SliceShare CheckpointWriter::share_of(const std::string& stem, const std::vector<TensorSlice>& slices,
                                      bool one_file) {
  std::string own = slices_to_text(slices);
  SavePlans none;
  auto& kept = (options_.plans ? *options_.plans : none).slices;
  const auto previous = kept.find(stem);
  const bool unchanged = previous != kept.end() && previous->second.slices == own;
  const std::vector<std::string> votes = group_.gather(unchanged ? "1" : "0");
  const bool all = std::count(votes.begin(), votes.end(), "1") == group_.size;
  if (group_.broadcast(all ? "1" : "0") == "1") return previous->second;
  kept.erase(stem);

  const std::vector<std::string> texts = group_.gather(own);
  std::vector<std::string> parts;
  SliceShare share;
  const std::string owners = on_rank_zero(group_, [&] {
    const SlicePlan plan = plan_slices(texts, one_file);
    for (const SlicePlan& part : plan.parts(group_.size)) parts.push_back(part.to_text());
    share.owners = plan.owners();
    if (share.owners.size() > 1) share.index = index_of(plan, stem);
    return numbers_to_text(share.owners);
  });
  share.owners = numbers_from_text(owners);
  share.plan = SlicePlan::from_text(scatter_texts(group_, parts));
  share.slices = std::move(own);
  return kept[stem] = std::move(share);
}

void CheckpointWriter::add_slices(const std::string& stem, const std::vector<TensorSlice>& slices,
                                  bool one_file) {
  SliceShare share;
  try {
    share = share_of(stem, slices, one_file);
  } catch (const Error& e) {  // the same on every rank
    if (!error_) error_ = e;
    return;
  }
  const SlicePlan& plan = share.plan;
  std::vector<ShardSpec> own;
  for (const SlicePlan::Tensor& t : plan.tensors)
    if (t.owner == group_.rank) own.push_back(ShardSpec::whole(t.name, t.dtype, t.shape));
  const auto fill = [&](SafetensorsWriter* file) { write_slices(plan, slices, file); };
  if (own.empty()) {
    fill(nullptr);
  } else {
    bool filled = false;
    add_tensors(file_of_owner(stem, share.owners, group_.rank), own, [&](SafetensorsWriter& file) {
      filled = true;
      fill(&file);
    });
    if (!filled) fill(nullptr);  // still take part in the exchange
  }

  if (!share.index.empty()) add_file(stem + ".safetensors.index.json", share.index);
}

namespace {

// Rows of a tensor that are written together.
int64_t block_rows_of(const SlicePlan::Tensor& t) {
  return std::min(t.height(), slice_block_rows(t.width() * size_of(t.dtype)));
}

// The rows of a source that lie in the block [row, row + rows).
struct SourceRows {
  int64_t begin, count;
  SourceRows(const SlicePlan::Source& s, int64_t row, int64_t rows)
      : begin(std::max(row, s.row)), count(std::min(row + rows, s.row + s.rows) - begin) {}
};

}  // namespace

// The slices of this rank. Those in a memory with staging are read ahead in the order of write_slices().
class CheckpointWriter::LocalSlices {
 public:
  LocalSlices(CheckpointWriter& writer, const SlicePlan& plan, const std::vector<TensorSlice>& slices)
      : writer_(writer), staging_(writer.options_.staging) {
    for (const TensorSlice& s : slices) held_[{s.name, s.row, s.column}] = &s;
    if (staging_) writer_.guard([&] { read_ahead(plan); });
  }

  // Rows of the slice behind `s`, in host memory until the next call.
  TensorSlice rows(const SlicePlan::Tensor& t, const SlicePlan::Source& s, const SourceRows& rows) {
    const TensorSlice& slice = at(t, s);
    if (!staging_) return slice;
    TensorSlice out = slice;
    if (s.transposed) {  // read whole with its first rows
      std::vector<char>& whole = whole_[{t.name, s.row, s.column}];
      if (rows.begin == s.row) read(slice_bytes(slice), whole);
      out.data = whole.data();
      if (rows.begin + rows.count == s.row + s.rows) {
        rows_ = std::move(whole);
        whole_.erase({t.name, s.row, s.column});
        out.data = rows_.data();
      }
      return out;
    }
    out.row = rows.begin;
    out.rows = rows.count;
    const auto bytes = static_cast<size_t>(rows.count * s.columns * size_of(t.dtype));
    out.data = nullptr;
    if (bytes <= staging_->piece_bytes())
      writer_.guard([&] { out.data = const_cast<void*>(staging_->next()); });
    if (!out.data) {
      read(bytes, rows_);
      out.data = rows_.data();
    }
    return out;
  }

 private:
  using Key = std::tuple<std::string_view, int64_t, int64_t>;

  const TensorSlice& at(const SlicePlan::Tensor& t, const SlicePlan::Source& s) const {
    return *held_.at({t.name, s.row, s.column});
  }
  static size_t slice_bytes(const TensorSlice& s) {
    return static_cast<size_t>(s.rows * s.columns * size_of(s.dtype));
  }
  // The next `bytes` bytes; zeros after an error, which commit() reports.
  void read(size_t bytes, std::vector<char>& out) {
    out.assign(bytes, 0);
    writer_.guard([&] {
      for (size_t at = 0; at < bytes; at += staging_->piece_bytes())
        std::memcpy(out.data() + at, staging_->next(), std::min(bytes - at, staging_->piece_bytes()));
    });
  }
  void read_ahead(const SlicePlan& plan) {
    std::vector<MemoryRange> ranges;
    for (const SlicePlan::Tensor& t : plan.tensors) {
      const int64_t block = block_rows_of(t), unit = size_of(t.dtype);
      for (int64_t row = 0; row < t.height(); row += block)
        for (const SlicePlan::Source& s : t.sources) {
          const SourceRows rows(s, row, std::min(block, t.height() - row));
          if (rows.count <= 0 || s.rank != writer_.group_.rank) continue;
          const TensorSlice& slice = at(t, s);
          const auto* data = static_cast<const char*>(slice.data);
          if (!s.transposed)
            append_pieces(*staging_, data + (rows.begin - s.row) * s.columns * unit,
                          static_cast<size_t>(rows.count * s.columns * unit), ranges);
          else if (rows.begin == s.row)
            append_pieces(*staging_, data, slice_bytes(slice), ranges);
        }
    }
    staging_->read_ahead(std::move(ranges));
  }

  CheckpointWriter& writer_;
  Staging* staging_;
  std::map<Key, const TensorSlice*> held_;
  std::vector<char> rows_;
  std::map<Key, std::vector<char>> whole_;  // transposed slices that are being written
};

// Every rank walks all blocks of all tensors in the same order, even after its own error: the
// messages stay matched.
void CheckpointWriter::write_slices(const SlicePlan& plan, const std::vector<TensorSlice>& slices,
                                    SafetensorsWriter* file) {
  LocalSlices local(*this, plan, slices);
  std::vector<char> block, message;
  for (const SlicePlan::Tensor& t : plan.tensors) {
    const int64_t unit = size_of(t.dtype), width = t.width();
    const int64_t block_rows = block_rows_of(t);
    const bool owner = t.owner == group_.rank;
    for (int64_t row = 0; row < t.height(); row += block_rows) {
      const int64_t rows = std::min(block_rows, t.height() - row);
      const char* complete = nullptr;  // set if the block is contiguous in memory already
      for (const SlicePlan::Source& s : t.sources) {
        const bool mine = s.rank == group_.rank;
        const SourceRows part(s, row, rows);
        const int64_t begin = part.begin, count = part.count;
        if (count <= 0 || (!owner && !mine)) continue;
        const TensorSlice slice = mine ? local.rows(t, s, part) : TensorSlice{};
        const auto bytes = static_cast<size_t>(count * s.columns * unit);
        const char* direct = mine && !s.transposed ? static_cast<const char*>(slice.data) +
                                                         (begin - slice.row) * s.columns * unit
                                                   : nullptr;
        if (!owner) {
          if (!direct) {
            message.resize(bytes);
            copy_rows(slice, begin, count, message.data(), s.columns);
          }
          group_.send(t.owner, direct ? direct : message.data(), bytes);
          continue;
        }
        if (direct && s.columns == width && count == rows) {
          complete = direct;
          continue;
        }
        block.resize(static_cast<size_t>(rows * width * unit));
        char* const place = block.data() + ((begin - row) * width + s.column) * unit;
        if (mine) {
          copy_rows(slice, begin, count, place, width);
        } else {
          message.resize(bytes);
          group_.receive(s.rank, message.data(), bytes);
          const TensorSlice dense{t.name,   t.dtype,   t.shape,        begin, count,
                                  s.column, s.columns, message.data(), false};
          copy_rows(dense, begin, count, place, width);
        }
      }
      if (!owner || !file) continue;
      // A storage error ends the writing of the file, not the message exchange.
      guard([&] {
        file->write_slice(t.name, static_cast<uint64_t>(row * width * unit),
                          complete ? complete : block.data(), static_cast<size_t>(rows * width * unit));
      });
    }
  }
}

}  // namespace nrl
