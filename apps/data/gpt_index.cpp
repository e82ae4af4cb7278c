#include "apps/data/gpt_index.h"

#include <cmath>
#include <numeric>
#include <optional>

#include "core/base/error.h"
#include "core/io/crc32c.h"

namespace nrl::data {
namespace {

constexpr int64_t max_entries = int64_t{UINT32_MAX} - 1;  // beyond this Megatron uses 64-bit indices
constexpr int64_t index_stride = 32;                      // documents per stored token count

template <class T>
std::span<T> reserve(cpu::HostMemory& memory, int64_t count) {
  memory = cpu::HostMemory(static_cast<size_t>(count) * sizeof(T));
  return {reinterpret_cast<T*>(memory.data()), static_cast<size_t>(count)};
}

// The next array of a mapped order. The mapping cannot be written to, and is not.
template <class T>
std::span<T> take(std::span<const std::byte>& arrays, int64_t count) {
  const auto bytes = arrays.first(static_cast<size_t>(count) * sizeof(T));
  arrays = arrays.subspan(bytes.size());
  return {reinterpret_cast<T*>(const_cast<std::byte*>(bytes.data())), static_cast<size_t>(count)};
}

// The file of an order; unset, and `index` is built in memory, if it is too small for `files` or cannot be
// stored. `make` builds an index, at most once; `arrays` returns what of it is stored.
template <class Index, class Key, class Make, class ArraysOf>
std::optional<MappedOrder> map_or_build(Index& index, OrderFiles* files, int64_t bytes, const Key& key,
                                        const Make& make, const ArraysOf& arrays) {
  std::optional<Index> built;
  std::optional<MappedOrder> mapped;
  if (files && bytes >= files->smallest())
    mapped = files->open(key(), bytes, [&] {
      if (!built) built.emplace(make());
      return arrays(*built);
    });
  if (!mapped) index = built ? std::move(*built) : make();
  return mapped;
}

int64_t counts_for(int64_t documents) {
  return (documents + index_stride - 1) / index_stride;
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
    end = begin + shares[static_cast<size_t>(i)] / sum;
  }
  const auto bound = [&](double share) {
    return std::min(static_cast<int64_t>(std::nearbyint(share * static_cast<double>(count))), count);
  };
  return {bound(begin), bound(end)};
}

int64_t SplitPart::tokens(std::span<const int32_t> lengths) const {
  int64_t sum = -skip - drop;
  for (int64_t i = first; i < last; ++i) sum += lengths[static_cast<size_t>(i)];
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
    const int64_t after = before + lengths[static_cast<size_t>(i)];
    if (before <= begin && begin < after) part.first = i, part.skip = begin - before;
    if (before < end && end <= after) part.last = i + 1, part.drop = after - end;
    before = after;
  }
  return part;
}

int64_t GptPlan::bytes() const {
  return documents() * 4 + counts_for(documents()) * 8 + kept * 4;
}

int64_t GptPlan::peak_bytes() const {
  return bytes() + (total - kept) * 4;
}

GptPlan plan_gpt_index(std::span<const int32_t> lengths, const SplitPart& part, int64_t sequence_length,
                       int64_t samples, const std::string& name) {
  NRL_CHECK(sequence_length > 0 && sequence_length < INT32_MAX && samples >= 0 && part.first >= 0 &&
            part.first <= part.last && part.last <= static_cast<int64_t>(lengths.size()));
  const int64_t count = part.last - part.first;
  if (part.last > INT32_MAX) fail(Exit::data, "{}: more than 2^31 sequences are not supported", name);
  GptPlan plan;
  plan.part = part;
  plan.sequence_length = sequence_length;
  plan.tokens = part.tokens(lengths);
  if (plan.tokens == 0)
    fail(Exit::data,
         "{}: the split has no tokens ({} of {} sequences). Fix: give it a larger share, or add data", name,
         count, lengths.size());

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
    : plan_(plan), lengths_(lengths) {
  NumpyRandomState random(seed);
  shuffle_documents(random);
  count_tokens();
  // All samples must be shuffled to reproduce Megatron's order; unused ones are dropped afterwards.
  shuffle_ = reserve<uint32_t>(shuffle_memory_, plan_.total);
  std::iota(shuffle_.begin(), shuffle_.end(), 0u);
  const auto first = static_cast<size_t>(plan_.first_samples);
  random.shuffle(shuffle_.first(first));
  random.shuffle(shuffle_.subspan(first));
  shuffle_ = shuffle_.first(static_cast<size_t>(plan_.kept));
  shuffle_memory_.shrink(shuffle_.size_bytes());
}

GptIndex::GptIndex(const GptPlan& plan, std::span<const int32_t> lengths, uint32_t seed, OrderFiles* files)
    : plan_(plan), lengths_(lengths) {
  // The order of a version is fixed for ever: a change of it needs another name here.
  const auto key = [&] {
    const SplitPart& p = plan.part;
    return fmt::format(
        "GPT order 1: seed {}; sequence length {}; {} of {} samples in {} epochs, {} first; part {} to {} "
        "without {} and {} tokens; {} lengths, CRC-32C {:08x}, {} tokens",
        seed, plan.sequence_length, plan.kept, plan.total, plan.epochs, plan.first_samples, p.first, p.last,
        p.skip, p.drop, lengths.size(), crc32c(lengths.data(), lengths.size_bytes()), plan.tokens);
  };
  auto mapped = map_or_build(
      *this, files, plan.bytes(), key, [&] { return GptIndex(plan, lengths, seed); },
      [](const GptIndex& built) {
        return std::vector{std::as_bytes(built.tokens_before_), std::as_bytes(built.documents_),
                           std::as_bytes(built.shuffle_)};
      });
  if (!mapped) return;
  file_ = std::move(*mapped);
  std::span<const std::byte> arrays = file_.arrays();
  tokens_before_ = take<int64_t>(arrays, counts_for(plan.documents()));
  documents_ = take<int32_t>(arrays, plan.documents());
  shuffle_ = take<uint32_t>(arrays, plan.kept);
  if (!tokens_before_.empty() && tokens_before_[0] != 0) fail_damaged();
}

void GptIndex::fail_damaged() const {
  fail(Exit::data,
       "the stored sample order is damaged. Fix: remove the directory nrl-train-orders-* in TMPDIR, /var/tmp "
       "or /dev/shm");
}

// The documents of all epochs are shuffled together, except a separate last epoch.
void GptIndex::shuffle_documents(NumpyRandomState& random) {
  documents_ = reserve<int32_t>(document_memory_, plan_.documents());
  const auto count = static_cast<size_t>(plan_.part.last - plan_.part.first);
  for (size_t at = 0; at < documents_.size(); at += count) {
    const auto epoch = documents_.subspan(at, count);
    std::iota(epoch.begin(), epoch.end(), static_cast<int32_t>(plan_.part.first));
  }
  const size_t together = documents_.size() - (plan_.separate_last ? count : 0);
  random.shuffle(documents_.first(together));
  random.shuffle(documents_.subspan(together));
}

void GptIndex::count_tokens() {
  tokens_before_ = reserve<int64_t>(count_memory_, counts_for(plan_.documents()));
  int64_t tokens = 0;
  for (size_t at = 0; at < documents_.size(); ++at) {
    if (at % index_stride == 0) tokens_before_[at / index_stride] = tokens;
    tokens += plan_.part.length(lengths_, documents_[at]);
  }
}

GptIndex::Start GptIndex::find(int64_t token) const {
  const auto after = std::upper_bound(tokens_before_.begin(), tokens_before_.end(), token);
  const int64_t block = after - tokens_before_.begin() - 1;
  int64_t document = block * index_stride, offset = token - tokens_before_[static_cast<size_t>(block)];
  while (true) {
    NRL_CHECK(document < plan_.documents(), "token {} of {} epochs of {}", token, plan_.epochs, plan_.tokens);
    const int64_t length = plan_.part.length(lengths_, sequence(document));
    if (offset < length) return {document, offset};
    offset -= length;
    ++document;
  }
}

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
    : datasets_(shares.size()) {
  NRL_CHECK(datasets_ <= INT16_MAX && available.size() == datasets_ && samples >= 0 &&
            std::accumulate(available.begin(), available.end(), int64_t{0}) >= samples);
  dataset_memory_.reserve(static_cast<size_t>(samples));
  std::vector<int64_t> taken(datasets_, 0);
  for (int64_t k = 0; k < samples; ++k) {
    if (k % stride(datasets_) == 0) taken_memory_.insert(taken_memory_.end(), taken.begin(), taken.end());
    const auto scale = static_cast<double>(std::max<int64_t>(k, 1));
    size_t best = datasets_;
    double most = 0;
    for (size_t d = 0; d < datasets_; ++d) {
      const double lag = shares[d] * scale - static_cast<double>(taken[d]);
      if ((best == datasets_ || lag > most) && taken[d] < available[d]) most = lag, best = d;
    }
    dataset_memory_.push_back(static_cast<uint16_t>(best));
    ++taken[best];
  }
  dataset_ = dataset_memory_;
  taken_ = taken_memory_;
}

BlendIndex::BlendIndex(std::span<const double> shares, std::span<const int64_t> available, int64_t samples,
                       OrderFiles* files)
    : datasets_(shares.size()) {
  const auto key = [&] {
    std::string sources;
    for (size_t d = 0; d < shares.size(); ++d) sources += fmt::format("{:a} of {};", shares[d], available[d]);
    return fmt::format("blend 1: {} samples of {} sources, {}", samples, shares.size(), digest(sources));
  };
  auto mapped = map_or_build(
      *this, files, BlendIndex::bytes(shares.size(), samples), key,
      [&] { return BlendIndex(shares, available, samples); },
      [](const BlendIndex& built) {
        return std::vector{std::as_bytes(built.taken_), std::as_bytes(built.dataset_)};
      });
  if (!mapped) return;
  file_ = std::move(*mapped);
  std::span<const std::byte> arrays = file_.arrays();
  const int64_t rows = (samples + stride(datasets_) - 1) / stride(datasets_);
  taken_ = take<int64_t>(arrays, rows * static_cast<int64_t>(datasets_));
  dataset_ = take<uint16_t>(arrays, samples);
}

BlendIndex::Sample BlendIndex::at(int64_t k) const {
  const int64_t row = k / stride(datasets_);
  const size_t dataset = dataset_[static_cast<size_t>(k)];
  if (dataset >= datasets_) fail(Exit::data, "the stored order of the blend is damaged at sample {}", k);
  const auto first = dataset_.begin() + row * stride(datasets_);
  return {dataset, taken_[static_cast<size_t>(row) * datasets_ + dataset] +
                       std::count(first, dataset_.begin() + k, static_cast<uint16_t>(dataset))};
}

}  // namespace nrl::data
