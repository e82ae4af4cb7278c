#include "apps/data/gpt_index.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "core/base/error.h"

namespace nrl::data {
namespace {

constexpr int64_t kMaxEntries = int64_t{UINT32_MAX} - 1;  // Megatron changes to 64-bit indices here

// The same numbers in the same order for every epoch, then shuffled as one.
void append_documents(GptIndex& index, std::pair<int64_t, int64_t> bounds, int64_t epochs,
                      NumpyRandomState& random) {
  const size_t begin = index.documents.size(), count = static_cast<size_t>(bounds.second - bounds.first);
  index.documents.resize(begin + count * static_cast<size_t>(epochs));
  for (size_t at = begin; at < index.documents.size(); at += count)
    std::iota(index.documents.begin() + static_cast<ptrdiff_t>(at),
              index.documents.begin() + static_cast<ptrdiff_t>(at + count),
              static_cast<int32_t>(bounds.first));
  random.shuffle(std::span(index.documents).subspan(begin));
}

void find_starts(GptIndex& index, std::span<const int32_t> lengths, int64_t sequence_length,
                 int64_t samples) {
  index.start_document.resize(static_cast<size_t>(samples) + 1);
  index.start_offset.resize(static_cast<size_t>(samples) + 1);
  int64_t document = 0;
  int64_t offset = 0;
  for (size_t sample = 1; sample <= static_cast<size_t>(samples); ++sample) {
    int64_t wanted = sequence_length + 1;
    while (true) {
      const int64_t left =
          lengths[static_cast<size_t>(index.documents[static_cast<size_t>(document)])] - offset;
      if (left >= wanted) {
        offset += wanted - 1;  // the last token is also the first of the next sample
        break;
      }
      wanted -= left;
      offset = 0;
      ++document;
      NRL_CHECK(document < static_cast<int64_t>(index.documents.size()), "sample {} of {}", sample, samples);
    }
    index.start_document[sample] = document;
    index.start_offset[sample] = static_cast<int32_t>(offset);
  }
}

}  // namespace

SplitShares parse_split(const std::string& text) {
  SplitShares shares{};
  size_t count = 0, at = 0;
  while (at <= text.size()) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::string part = text.substr(at, comma - at);
    char* end = nullptr;
    const double value = std::strtod(part.c_str(), &end);
    if (count == shares.size() || part.empty() || *end != '\0')
      fail(Exit::config, "split '{}': expected up to three numbers with commas between, such as 969,30,1",
           text);
    shares[count++] = value;
    at = comma + 1;
  }
  split_bounds(shares, Split::train, 0);
  return shares;
}

std::pair<int64_t, int64_t> split_bounds(const SplitShares& shares, Split split, int64_t sequences) {
  for (const double share : shares)
    if (!std::isfinite(share) || share < 0)
      fail(Exit::config, "split: share {} must be a finite number that is not negative", share);
  const double sum = shares[0] + shares[1] + shares[2];
  if (sum <= 0) fail(Exit::config, "split: all shares are 0");
  double begin = 0, end = 0;
  for (int i = 0; i <= static_cast<int>(split); ++i) {
    begin = end;
    end = begin + shares[static_cast<size_t>(i)] / sum;
  }
  const auto place = [&](double share) {
    return std::min(static_cast<int64_t>(std::nearbyint(share * static_cast<double>(sequences))), sequences);
  };
  return {place(begin), place(end)};
}

GptIndex build_gpt_index(std::span<const int32_t> lengths, std::pair<int64_t, int64_t> bounds,
                         int64_t sequence_length, int64_t samples, uint32_t seed, const std::string& name) {
  NRL_CHECK(sequence_length > 0 && sequence_length < INT32_MAX && samples >= 0 && bounds.first >= 0 &&
            bounds.first <= bounds.second && bounds.second <= static_cast<int64_t>(lengths.size()));
  const int64_t count = bounds.second - bounds.first;
  if (bounds.second > INT32_MAX) fail(Exit::data, "{}: more than 2^31 sequences are not supported", name);
  int64_t tokens = 0;
  for (int64_t i = bounds.first; i < bounds.second; ++i) tokens += lengths[static_cast<size_t>(i)];
  if (tokens == 0)
    fail(Exit::data,
         "{}: the split holds no tokens ({} of {} sequences); give it a larger share or more data", name,
         count, lengths.size());

  int64_t needed = 0;
  if (__builtin_mul_overflow(samples, sequence_length, &needed) || samples > kMaxEntries)
    fail(Exit::config, "{}: {} samples are more than an index holds", name, samples);
  GptIndex index;
  index.epochs = needed / tokens + 1;  // the least e with e * tokens >= needed + 1
  const int64_t total_samples_bound = index.epochs > INT64_MAX / tokens ? INT64_MAX : index.epochs * tokens;
  if (index.epochs > kMaxEntries / count || (total_samples_bound - 1) / sequence_length > kMaxEntries)
    fail(Exit::config,
         "{}: {} samples of {} tokens would go {} times through {} tokens in {} sequences: too many", name,
         samples, sequence_length, index.epochs, tokens, count);

  const int64_t total = (index.epochs * tokens - 1) / sequence_length;
  const int64_t before_last = ((index.epochs - 1) * tokens - 1) / sequence_length;
  // A last epoch of which little is used is shuffled by itself, or its documents would be seen more often
  // than others.
  const double full = static_cast<double>((tokens - 1) / sequence_length);
  const bool separate = index.epochs > 1 && samples - before_last < static_cast<int64_t>(0.80 * full);

  NumpyRandomState random(seed);
  append_documents(index, bounds, separate ? index.epochs - 1 : index.epochs, random);
  if (separate) append_documents(index, bounds, 1, random);
  find_starts(index, lengths, sequence_length, total);
  index.shuffle.resize(static_cast<size_t>(total));
  std::iota(index.shuffle.begin(), index.shuffle.end(), 0u);
  const auto all = std::span(index.shuffle);
  const size_t first = separate ? static_cast<size_t>(before_last) : all.size();
  random.shuffle(all.first(first));
  random.shuffle(all.subspan(first));
  return index;
}

std::vector<double> normalised_weights(std::span<const double> weights) {
  double sum = 0;
  for (const double w : weights) {
    if (!std::isfinite(w) || w <= 0)
      fail(Exit::config, "data: weight {} of the blend must be a positive number", w);
    sum += w;
  }
  std::vector<double> shares(weights.begin(), weights.end());
  for (double& w : shares) w /= sum;
  return shares;
}

int64_t blend_request(double weight, int64_t samples) {
  return static_cast<int64_t>(std::ceil(std::ceil(static_cast<double>(samples) * weight) * 1.005));
}

BlendIndex build_blend_index(std::span<const double> weights, int64_t samples) {
  NRL_CHECK(weights.size() <= INT16_MAX && samples >= 0);
  BlendIndex index;
  index.dataset.resize(static_cast<size_t>(samples));
  index.sample.resize(static_cast<size_t>(samples));
  std::vector<int64_t> taken(weights.size(), 0);
  for (int64_t k = 0; k < samples; ++k) {
    const auto scale = static_cast<double>(std::max<int64_t>(k, 1));
    size_t best = 0;
    double most = 0;
    for (size_t d = 0; d < weights.size(); ++d) {
      const double lag = weights[d] * scale - static_cast<double>(taken[d]);
      if (d == 0 || lag > most) most = lag, best = d;
    }
    index.dataset[static_cast<size_t>(k)] = static_cast<int16_t>(best);
    index.sample[static_cast<size_t>(k)] = taken[best]++;
  }
  return index;
}

}  // namespace nrl::data
