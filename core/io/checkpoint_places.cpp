#include "core/io/checkpoint_places.h"

#include <algorithm>
#include <charconv>
#include <climits>
#include <tuple>

#include "core/base/error.h"
#include "core/io/safetensors.h"

namespace nrl {
namespace {

constexpr int64_t max_runs = int64_t{4} << 20;

// Takes the text up to `separator` or the end off `text`.
std::string_view take(std::string_view& text, char separator) {
  const size_t end = std::min(text.find(separator), text.size());
  const std::string_view out = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return out;
}

[[noreturn]] void refuse(std::string_view entry) {
  fail(Exit::data, "\"{}\" is not the place of a piece", entry.substr(0, 100));
}

int64_t to_number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) refuse(text);
  return value;
}

std::vector<int64_t> numbers_of(std::string_view text) {
  std::vector<int64_t> out;
  while (!text.empty()) out.push_back(to_number(take(text, ',')));
  return out;
}

// `places` in this order, with as many as possible in one entry.
std::string packed_in_order(const std::vector<PiecePlace>& places) {
  std::string out;
  for (size_t i = 0, n = 0; i < places.size(); i += n) {
    const PiecePlace& first = places[i];
    int64_t ranks = 0, elements = 0;
    for (n = 1; i + n < places.size(); ++n) {
      const PiecePlace &last = places[i + n - 1], &next = places[i + n];
      if (n == 1) {
        ranks = next.rank - last.rank;
        elements = next.offset - last.offset;
      }
      if (std::tuple(next.count, next.run, next.stride) != std::tuple(first.count, first.run, first.stride) ||
          next.rank - last.rank != ranks || next.offset - last.offset != elements)
        break;
    }
    if (n == 2) n = 1;  // two entries are as short
    fmt::format_to(std::back_inserter(out), "{}{},{},{}", out.empty() ? "" : " ", first.rank, first.offset,
                   first.count);
    if (first.run != first.count) fmt::format_to(std::back_inserter(out), ",{},{}", first.run, first.stride);
    if (n > 1) fmt::format_to(std::back_inserter(out), ",{},{},{}", n, ranks, elements);
  }
  return out;
}

}  // namespace

std::string pack_places(std::vector<PiecePlace> places) {
  const auto sort_by = [&](auto key) {
    std::sort(places.begin(), places.end(),
              [&](const PiecePlace& a, const PiecePlace& b) { return key(a) < key(b); });
    return packed_in_order(places);
  };
  // Ranges of one axis of ranks grow with the rank; columns of tensor-parallel ranks do within one range.
  std::string by_offset = sort_by([](const PiecePlace& p) { return std::tuple(p.offset, p.rank); });
  std::string by_rank = sort_by([](const PiecePlace& p) { return std::tuple(p.rank, p.offset); });
  return by_rank.size() < by_offset.size() ? by_rank : by_offset;
}

std::vector<PiecePlace> unpack_places(std::string_view packed) {
  std::vector<PiecePlace> out;
  while (!packed.empty()) {
    const std::string_view entry = take(packed, ' ');
    const std::vector<int64_t> fields = numbers_of(entry);
    const bool strided = fields.size() == 5 || fields.size() == 8, several = fields.size() >= 6;
    if (fields.size() != 3u + (strided ? 2 : 0) + (several ? 3 : 0)) refuse(entry);
    const int64_t* steps = fields.data() + (strided ? 5 : 3);
    const int64_t n = several ? steps[0] : 1;
    if (n < 1 || n > max_runs - static_cast<int64_t>(out.size())) refuse(entry);
    for (int64_t i = 0; i < n; ++i) {
      int64_t rank = 0, offset = 0;
      const bool fits = !several || (!__builtin_mul_overflow(i, steps[1], &rank) &&
                                     !__builtin_mul_overflow(i, steps[2], &offset));
      if (!fits || __builtin_add_overflow(rank, fields[0], &rank) ||
          __builtin_add_overflow(offset, fields[1], &offset) || rank < 0 || rank > INT_MAX)
        refuse(entry);
      const int64_t count = fields[2];
      out.push_back(
          {static_cast<int>(rank), offset, count, strided ? fields[3] : count, strided ? fields[4] : count});
    }
  }
  return out;
}

// A line for each tensor: its name, of which the first characters are those of the line before, dtype, shape
// and packed places.
std::string places_to_text(const std::map<std::string, LogicalTensor>& tensors, int rank) {
  std::string out;
  std::string_view previous;
  for (const auto& [name, tensor] : tensors) {
    std::vector<PiecePlace> places;
    for (const CheckpointShard& s : tensor.shards)
      if (s.count > 0) places.push_back({rank, s.offset, s.count, s.run, s.stride});
    if (places.empty()) continue;
    const auto same = std::mismatch(name.begin(), name.end(), previous.begin(), previous.end()).first;
    std::string shape;
    for (const int64_t d : tensor.shape) fmt::format_to(std::back_inserter(shape), "{},", d);
    fmt::format_to(std::back_inserter(out), "{}\t{}\t{}\t{}\t{}\n", same - name.begin(),
                   std::string_view(same, name.end()), static_cast<int>(tensor.dtype), shape,
                   pack_places(std::move(places)));
    previous = name;
  }
  return out;
}

std::map<std::string, LogicalTensor> merge_places(std::vector<std::string>& by_rank) {
  std::map<std::string, LogicalTensor> tensors;
  std::map<std::string, std::vector<PiecePlace>> places;
  for (std::string& text : by_rank) {
    std::string_view lines = text;
    std::string name;
    while (!lines.empty()) {
      std::string_view line = take(lines, '\n');
      name.resize(static_cast<size_t>(to_number(take(line, '\t'))));
      name += take(line, '\t');
      const auto dtype = static_cast<DType>(to_number(take(line, '\t')));
      const std::vector<int64_t> shape = numbers_of(take(line, '\t'));
      const auto [it, added] = tensors.try_emplace(name, LogicalTensor{dtype, shape, {}, {}});
      NRL_CHECK(it->second.dtype == dtype && it->second.shape == shape,
                "two shapes or dtypes of tensor \"{}\"", name);
      std::vector<PiecePlace>& all = places[name];
      for (const PiecePlace& p : unpack_places(line)) all.push_back(p);
    }
    text = {};
  }
  for (auto& [name, all] : places) tensors[name].elsewhere = pack_places(std::move(all));
  return tensors;
}

namespace {

// Number of runs of a piece. Fails unless all of it lies inside the tensor; `what()` describes it.
template <class What>
int64_t count_runs(std::string_view name, const PiecePlace& p, const What& what, int64_t elements) {
  if (p.count == 0) return 0;
  const bool shape_ok = p.offset >= 0 && p.count > 0 && p.run > 0 && p.count % p.run == 0 &&
                        (p.run == p.count || p.stride >= p.run);
  int64_t end = 0;
  if (!shape_ok || (p.run != p.count && __builtin_mul_overflow(p.count / p.run - 1, p.stride, &end)) ||
      __builtin_add_overflow(end, p.offset, &end) || __builtin_add_overflow(end, p.run, &end) ||
      end > elements) {
    fail(Exit::data,
         "tensor \"{}\" with {} elements: the piece {} (offset {}, count {}, run {}, stride {}) lies outside "
         "of "
         "it",
         name, elements, what(), p.offset, p.count, p.run, p.stride);
  }
  return p.count / p.run;
}

}  // namespace

TensorPieces tensor_pieces(std::string_view name, const LogicalTensor& tensor) {
  const auto elements = checked_product(tensor.shape, size_of(tensor.dtype));
  if (!elements) fail(Exit::data, "tensor \"{}\": the shape {} overflows", name, shape_text(tensor.shape));
  const int64_t total = *elements / size_of(tensor.dtype);
  TensorPieces out;
  try {
    out.elsewhere = unpack_places(tensor.elsewhere);
  } catch (const Error& e) {
    fail(e.code(), "tensor \"{}\": {}", name, e.what());
  }
  const size_t here = tensor.shards.size();
  const auto place = [&](size_t i) {
    if (i >= here) return out.elsewhere[i - here];
    const CheckpointShard& s = tensor.shards[i];
    return PiecePlace{-1, s.offset, s.count, s.run, s.stride};
  };
  const auto what = [&](size_t i) {
    return i < here ? fmt::format("{} in {}", tensor.shards[i].key, tensor.shards[i].file)
                    : fmt::format("of rank {}", out.elsewhere[i - here].rank);
  };
  int64_t runs = 0;
  for (size_t i = 0; i < here + out.elsewhere.size(); ++i) {
    runs += count_runs(
        name, place(i), [&] { return what(i); }, total);
    if (runs > max_runs) {
      fail(Exit::data, "tensor \"{}\" has more than {} runs", name, max_runs);
    }
  }
  out.runs.reserve(static_cast<size_t>(runs));
  for (size_t i = 0; i < here + out.elsewhere.size(); ++i) {
    const PiecePlace p = place(i);
    for (int64_t r = 0; p.count > 0 && r < p.count / p.run; ++r) {
      out.runs.push_back({p.offset + r * p.stride, p.run, static_cast<uint32_t>(i), r * p.run});
    }
  }
  std::sort(out.runs.begin(), out.runs.end(),
            [](const PieceRun& a, const PieceRun& b) { return a.begin < b.begin; });
  int64_t expected = 0;
  for (const PieceRun& r : out.runs) {
    if (r.begin != expected) {
      fail(Exit::data, "tensor \"{}\": elements [{}, {}) are stored {}{}", name, std::min(r.begin, expected),
           std::max(r.begin, expected), r.begin > expected ? "nowhere" : "twice, again in the piece ",
           r.begin > expected ? "" : what(r.piece));
    }
    expected += r.count;
  }
  if (expected != total)
    fail(Exit::data, "tensor \"{}\": elements [{}, {}) are stored nowhere", name, expected, total);
  return out;
}

}  // namespace nrl
