#include "apps/data/gpt_index.h"

#include <cmath>
#include <functional>
#include <numeric>

#include "core/base/error.h"
#include "core/io/crc32c.h"
#include "core/io/indexed_dataset.h"

namespace nrl::data {
namespace {

constexpr int64_t max_entries = int64_t{UINT32_MAX} - 1;  // beyond this Megatron uses 64-bit indices
constexpr int64_t index_stride = 32;                      // documents per stored token count
constexpr int64_t counted_at_once = 1 << 18;              // documents

// The next array of an order.
template <class T>
std::span<const T> take(std::span<const std::byte>& arrays, int64_t count) {
  const auto bytes = arrays.first(static_cast<size_t>(count) * sizeof(T));
  arrays = arrays.subspan(bytes.size());
  return {reinterpret_cast<const T*>(bytes.data()), static_cast<size_t>(count)};
}

// An order that can be built.
struct OrderSource {
  OrderBytes bytes;
  std::function<std::string()> key;
  OrderFiles::Build build;

  bool belongs_in(const OrderFiles& files) const { return bytes.arrays >= files.smallest(); }
  void prepare(OrderFiles& files) const {
    if (belongs_in(files)) files.prepare(key(), bytes, build);
  }
  // The arrays: from `files`, unless it is too small for them or cannot be stored; else built in `memory`.
  std::span<const std::byte> arrays(OrderFiles* files, MappedOrder& file, cpu::HostMemory& memory) const {
    if (files && belongs_in(*files))
      if (auto mapped = files->open(key(), bytes, build)) {
        file = std::move(*mapped);
        return file.arrays();
      }
    memory = cpu::HostMemory(static_cast<size_t>(bytes.built));
    build(OrderSpace({memory.data(), memory.size()}));
    memory.shrink(static_cast<size_t>(bytes.arrays));
    return {memory.data(), memory.size()};
  }
};

int64_t counts_for(int64_t documents) {
  return (documents + index_stride - 1) / index_stride;
}

// Shuffles the documents of all epochs together, except a separate last epoch.
void shuffle_documents(const GptPlan& plan, NumpyRandomState& random, const ShuffleOptions& options,
                       const OrderSpace& space) {
  const int64_t count = plan.part.last - plan.part.first, at = counts_for(plan.documents()) * 8;
  const int64_t together = plan.documents() - (plan.separate_last ? count : 0);
  const auto epochs_in_order = [&](int64_t first, std::span<uint32_t> values) {
    int64_t document = first % count;
    for (uint32_t& value : values) {
      value = static_cast<uint32_t>(plan.part.first + document);
      if (++document == count) document = 0;
    }
  };
  shuffle_into(space, at, together, random, epochs_in_order, options);
  shuffle_into(space, at + together * 4, plan.documents() - together, random, epochs_in_order, options);
}

// Stores the number of tokens before every index_stride-th document.
void count_tokens(const GptPlan& plan, std::span<const int32_t> lengths, const OrderSpace& space) {
  constexpr size_t ahead = 16;
  std::vector<int32_t> documents(counted_at_once);
  std::vector<int64_t> before(counted_at_once / index_stride);
  const int64_t documents_at = counts_for(plan.documents()) * 8;
  int64_t tokens = 0;
  for (int64_t first = 0; first < plan.documents(); first += counted_at_once) {
    const auto part =
        std::span(documents).first(static_cast<size_t>(std::min(counted_at_once, plan.documents() - first)));
    space.read(documents_at + first * 4, part);
    for (size_t k = 0; k < part.size(); ++k) {
      if (k + ahead < part.size()) __builtin_prefetch(&lengths[part[k + ahead]]);
      if (k % index_stride == 0) before[k / index_stride] = tokens;
      tokens += plan.part.length(lengths, part[k]);
    }
    space.write(first / index_stride * 8,
                std::span(before).first(static_cast<size_t>(counts_for(static_cast<int64_t>(part.size())))));
  }
}

void shuffle_samples(const GptPlan& plan, NumpyRandomState& random, const ShuffleOptions& options,
                     const OrderSpace& space) {
  const int64_t at = counts_for(plan.documents()) * 8 + plan.documents() * 4;
  const auto shuffle_range = [&](int64_t begin, int64_t end) {
    const auto in_order = [begin](int64_t first, std::span<uint32_t> values) {
      std::iota(values.begin(), values.end(), static_cast<uint32_t>(begin + first));
    };
    shuffle_into(space, at + begin * 4, end - begin, random, in_order, options);
  };
  // All samples must be shuffled to reproduce Megatron's order; unused ones are dropped afterwards.
  shuffle_range(0, plan.first_samples);
  shuffle_range(plan.first_samples, plan.total);
}

OrderSource gpt_order(const GptPlan& plan, std::span<const int32_t> lengths, uint32_t seed,
                      const ShuffleOptions& options) {
  // The order of a version is fixed for ever: a change of it needs another name here.
  const auto key = [plan, lengths, seed] {
    const SplitPart& p = plan.part;
    return fmt::format(
        "GPT order 1: seed {}; sequence length {}; {} of {} samples in {} epochs, {} first; part {} to {} "
        "without {} and {} tokens; {} lengths, CRC-32C {:08x}, {} tokens",
        seed, plan.sequence_length, plan.kept, plan.total, plan.epochs, plan.first_samples, p.first, p.last,
        p.skip, p.drop, lengths.size(), crc32c(lengths.data(), lengths.size_bytes()), plan.tokens);
  };
  const auto build = [plan, lengths, seed, options](const OrderSpace& space) {
    NumpyRandomState random(seed);
    shuffle_documents(plan, random, options, space);
    count_tokens(plan, lengths, space);
    shuffle_samples(plan, random, options, space);
  };
  return {plan.bytes(options), key, build};
}

}  // namespace

std::pair<int64_t, int64_t> split_bounds(const SplitShares& shares, Split split, int64_t count) {
  for (const double share : shares)
    if (!std::isfinite(share) || share < 0)
      fail(Exit::config, "split: share {}; expected a finite number >= 0", share);
  const double sum = shares[0] + shares[1] + shares[2];
  if (sum <= 0) fail(Exit::config, "split: all shares are 0; expected a positive one");
  double begin = 0, end = 0;
  for (int i = 0; i <= static_cast<int>(split); ++i) {
    begin = end;
    end = begin + shares[i] / sum;
  }
  const auto bound = [&](double share) {
    return std::min(static_cast<int64_t>(std::nearbyint(share * static_cast<double>(count))), count);
  };
  return {bound(begin), bound(end)};
}

int64_t SplitPart::tokens(std::span<const int32_t> lengths) const {
  int64_t sum = -skip - drop;
  for (int64_t i = first; i < last; ++i) sum += lengths[i];
  return sum;
}

SplitPart split_part(const SplitShares& shares, Split split, std::span<const int32_t> lengths) {
  const auto whole = [&](Split which) {
    const auto [first, last] = split_bounds(shares, which, static_cast<int64_t>(lengths.size()));
    return SplitPart{first, last};
  };
  const auto lacks_tokens = [&](Split which) {
    const SplitPart part = whole(which);
    return shares[static_cast<size_t>(which)] > 0 &&
           std::all_of(lengths.begin() + part.first, lengths.begin() + part.last,
                       [](int32_t length) { return length == 0; });
  };
  if (!lacks_tokens(Split::train) && !lacks_tokens(Split::validation)) return whole(split);

  const int64_t tokens = SplitPart{0, static_cast<int64_t>(lengths.size())}.tokens(lengths);
  const auto [begin, end] = split_bounds(shares, split, tokens);
  SplitPart part{.by_tokens = true};
  if (begin == end) return part;
  int64_t before = 0;
  for (int64_t i = 0; before < end; ++i) {
    const int64_t after = before + lengths[i];
    if (before <= begin && begin < after) part.first = i, part.skip = begin - before;
    if (before < end && end <= after) part.last = i + 1, part.drop = after - end;
    before = after;
  }
  return part;
}

// Elements that are shuffled together at most.
int64_t GptPlan::longest_shuffle() const {
  return std::max({first_samples, total - first_samples, documents()});
}

OrderBytes GptPlan::bytes(const ShuffleOptions& shuffle) const {
  const int64_t samples_at = counts_for(documents()) * 8 + documents() * 4;
  return {.arrays = samples_at + kept * 4,
          .built = samples_at + total * 4,
          .scratch = shuffle.scratch(longest_shuffle())};
}

int64_t GptPlan::build_memory(const ShuffleOptions& shuffle) const {
  return shuffle.memory(longest_shuffle());
}

GptPlan plan_gpt_index(std::span<const int32_t> lengths, const SplitPart& part, int64_t sequence_length,
                       int64_t samples, const std::string& name) {
  NRL_CHECK(part.first >= 0 && part.first <= part.last && part.last <= static_cast<int64_t>(lengths.size()));
  return plan_gpt_index(part.tokens(lengths), part, sequence_length, samples, name);
}

GptPlan plan_gpt_index(int64_t tokens, const SplitPart& part, int64_t sequence_length, int64_t samples,
                       const std::string& name) {
  NRL_CHECK(sequence_length > 0 && sequence_length < INT32_MAX && samples >= 0 && tokens >= 0);
  const int64_t count = part.last - part.first;
  if (part.last > max_sequences)
    fail(Exit::data, "{}: {} sequences; expected at most {}. Fix: divide the data into several sources", name,
         part.last, max_sequences);
  GptPlan plan;
  plan.part = part;
  plan.sequence_length = sequence_length;
  plan.tokens = tokens;
  if (plan.tokens == 0)
    fail(Exit::data, "{}: the split has no tokens ({} sequences). Fix: give it a larger share, or add data",
         name, count);

  int64_t needed = 0;
  if (__builtin_mul_overflow(samples, sequence_length, &needed) || samples > max_entries)
    fail(Exit::config, "{}: too many samples for an index: {}; expected at most {}", name, samples,
         max_entries);
  plan.epochs = needed / plan.tokens + 1;  // the smallest e with e * tokens >= needed + 1
  const int64_t all_tokens = plan.epochs > INT64_MAX / plan.tokens ? INT64_MAX : plan.epochs * plan.tokens;
  if (plan.epochs > max_entries / count || (all_tokens - 1) / sequence_length > max_entries)
    fail(Exit::config,
         "{}: too many epochs for an index: {} samples of {} tokens need {} epochs of {} tokens in {} "
         "sequences",
         name, samples, sequence_length, plan.epochs, plan.tokens, count);

  plan.total = (plan.epochs * plan.tokens - 1) / sequence_length;
  plan.kept = samples;
  const int64_t before_last = ((plan.epochs - 1) * plan.tokens - 1) / sequence_length;
  // If little of the last epoch is used, it is shuffled separately, so that the earlier epochs stay complete.
  const auto full = static_cast<double>((plan.tokens - 1) / sequence_length);
  plan.separate_last = plan.epochs > 1 && samples - before_last < static_cast<int64_t>(0.80 * full);
  plan.first_samples = plan.separate_last ? before_last : plan.total;
  return plan;
}

GptIndex::GptIndex(const GptPlan& plan, std::span<const int32_t> lengths, uint32_t seed)
    : GptIndex(plan, lengths, seed, nullptr) {}

GptIndex::GptIndex(const GptPlan& plan, std::span<const int32_t> lengths, uint32_t seed, OrderFiles* files,
                   const ShuffleOptions& shuffle)
    : plan_(plan), lengths_(lengths) {
  set_arrays(gpt_order(plan, lengths, seed, shuffle).arrays(files, file_, memory_));
  if (!tokens_before_.empty() && tokens_before_[0] != 0) fail_damaged();
}

void GptIndex::prepare(const GptPlan& plan, std::span<const int32_t> lengths, uint32_t seed,
                       OrderFiles& files) {
  gpt_order(plan, lengths, seed, {}).prepare(files);
}

void GptIndex::set_arrays(std::span<const std::byte> arrays) {
  tokens_before_ = take<int64_t>(arrays, counts_for(plan_.documents()));
  documents_ = take<int32_t>(arrays, plan_.documents());
  shuffle_ = take<uint32_t>(arrays, plan_.kept);
}

void GptIndex::fail_damaged() const {
  fail(Exit::data,
       "the stored sample order is damaged. Fix: remove the directory nrl-train-orders-* in TMPDIR, /var/tmp "
       "or /dev/shm");
}

GptIndex::Start GptIndex::find(int64_t token) const {
  const auto after = std::upper_bound(tokens_before_.begin(), tokens_before_.end(), token);
  const int64_t block = after - tokens_before_.begin() - 1;
  int64_t document = block * index_stride, offset = token - tokens_before_[block];
  while (true) {
    NRL_CHECK(document < plan_.documents(), "token {} of {} epochs of {}", token, plan_.epochs, plan_.tokens);
    const int64_t length = plan_.part.length(lengths_, sequence(document));
    if (offset < length) return {document, offset};
    offset -= length;
    ++document;
  }
}

namespace {

// Writes the counts before each stride, then the source of each sample.
void build_blend(std::span<const double> shares, std::span<const int64_t> available, int64_t samples,
                 int64_t stride, const OrderSpace& space) {
  const size_t datasets = shares.size();
  const auto row_bytes = static_cast<int64_t>(datasets) * 8;
  const int64_t sources_at = (samples + stride - 1) / stride * row_bytes;
  std::vector<int64_t> taken(datasets, 0);
  std::vector<uint16_t> sources(static_cast<size_t>(stride));
  for (int64_t first = 0; first < samples; first += stride) {
    space.write(first / stride * row_bytes, std::span(taken));
    const int64_t end = std::min(first + stride, samples);
    for (int64_t k = first; k < end; ++k) {
      const auto scale = static_cast<double>(std::max<int64_t>(k, 1));
      size_t best = datasets;
      double most = 0;
      for (size_t d = 0; d < datasets; ++d) {
        const double lag = shares[d] * scale - static_cast<double>(taken[d]);
        if ((best == datasets || lag > most) && taken[d] < available[d]) most = lag, best = d;
      }
      sources[k - first] = static_cast<uint16_t>(best);
      ++taken[best];
    }
    space.write(sources_at + first * 2, std::span(sources).first(static_cast<size_t>(end - first)));
  }
}

// `shares` and `available` must outlive it.
OrderSource blend_order(std::span<const double> shares, std::span<const int64_t> available, int64_t samples,
                        int64_t stride) {
  NRL_CHECK(shares.size() <= INT16_MAX && available.size() == shares.size() && samples >= 0 &&
            std::accumulate(available.begin(), available.end(), int64_t{0}) >= samples);
  const auto key = [shares, available, samples] {
    std::string sources;
    for (size_t d = 0; d < shares.size(); ++d) sources += fmt::format("{:a} of {};", shares[d], available[d]);
    return fmt::format("blend 1: {} samples of {} sources, {}", samples, shares.size(), digest(sources));
  };
  const int64_t bytes = BlendIndex::bytes(shares.size(), samples);
  return {{.arrays = bytes, .built = bytes}, key, [=](const OrderSpace& space) {
            build_blend(shares, available, samples, stride, space);
          }};
}

}  // namespace

std::vector<double> normalized_weights(std::span<const double> weights) {
  double sum = 0;
  for (const double w : weights) {
    if (!std::isfinite(w) || w <= 0)
      fail(Exit::config, "data: weight {} of a blend; expected a positive number", w);
    sum += w;
  }
  std::vector<double> shares(weights.begin(), weights.end());
  for (double& w : shares) w /= sum;
  return shares;
}

int64_t blend_request(double weight, int64_t samples) {
  return static_cast<int64_t>(std::ceil(std::ceil(static_cast<double>(samples) * weight) * 1.005));
}

// With this stride taken_ needs at most one byte per sample.
int64_t BlendIndex::stride(size_t datasets) {
  return std::max<int64_t>(4096, 8 * static_cast<int64_t>(datasets));
}

int64_t BlendIndex::bytes(size_t datasets, int64_t samples) {
  const int64_t rows = (samples + stride(datasets) - 1) / stride(datasets);
  return samples * 2 + rows * static_cast<int64_t>(datasets) * 8;
}

BlendIndex::BlendIndex(std::span<const double> shares, std::span<const int64_t> available, int64_t samples)
    : BlendIndex(shares, available, samples, nullptr) {}

BlendIndex::BlendIndex(std::span<const double> shares, std::span<const int64_t> available, int64_t samples,
                       OrderFiles* files)
    : datasets_(shares.size()) {
  set_arrays(blend_order(shares, available, samples, stride(datasets_)).arrays(files, file_, memory_),
             samples);
}

void BlendIndex::prepare(std::span<const double> shares, std::span<const int64_t> available, int64_t samples,
                         OrderFiles& files) {
  blend_order(shares, available, samples, stride(shares.size())).prepare(files);
}

void BlendIndex::set_arrays(std::span<const std::byte> arrays, int64_t samples) {
  const int64_t rows = (samples + stride(datasets_) - 1) / stride(datasets_);
  taken_ = take<int64_t>(arrays, rows * static_cast<int64_t>(datasets_));
  dataset_ = take<uint16_t>(arrays, samples);
}

BlendIndex::Sample BlendIndex::at(int64_t k) const {
  const int64_t row = k / stride(datasets_);
  const size_t dataset = dataset_[k];
  if (dataset >= datasets_) fail(Exit::data, "the stored order of the blend is damaged at sample {}", k);
  const auto first = dataset_.begin() + row * stride(datasets_);
  return {dataset, taken_[static_cast<size_t>(row) * datasets_ + dataset] +
                       std::count(first, dataset_.begin() + k, static_cast<uint16_t>(dataset))};
}

}  // namespace nrl::data
