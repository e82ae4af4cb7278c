#include "parallel/context/bounds.h"

#include <algorithm>
#include <bit>

#include "core/base/error.h"

namespace nrl::parallel {

ContextExchange context_exchange(CpCommType type, int size, int inner) {
  switch (type) {
    case CpCommType::p2p:
      return {};
    case CpCommType::all_gather:
      return {.gather = true};
    case CpCommType::a2a:
      return {.a2a = size};
    case CpCommType::a2a_p2p:
      NRL_CHECK(inner >= 1 && size % inner == 0, "a2a of {} in {} ranks", inner, size);
      return {.a2a = inner};
  }
  return {};
}

namespace {

/// The share of the ring's rank: the all-to-all joins the chunks of neighboring ranks.
ZigZag joined(const ContextExchange& x, const ZigZag& z) {
  return {z.samples(), z.length(), z.size() / x.a2a, z.rank() / x.a2a};
}

struct Interval {
  int64_t begin, end;
};

/// The document that holds `row`.
Interval document_at(std::span<const int32_t> documents, int64_t row) {
  const auto after = std::upper_bound(documents.begin(), documents.end(), static_cast<int32_t>(row));
  return {*(after - 1), *after};
}

/// Sequences of a call with their padding.
int64_t padded_count(int64_t sequences) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(sequences, 2))));
}

}  // namespace

/// Appends calls, each as cu_q followed by cu_k.
class ContextBounds::Writer {
 public:
  Writer(int32_t* to, int32_t* device, std::span<CallBounds> views)
      : to_(to), device_(device), views_(views) {}

  /// A sequence of the current call. Empty ones are left out.
  void sequence(int64_t queries, int64_t keys) {
    NRL_CHECK(queries >= 0 && keys >= 0);
    if (queries > 0 || keys > 0) lengths_.push_back({queries, keys});
  }
  /// Ends the call, with at least `count` sequences.
  void end_call(int64_t count = 1) {
    count = std::max(count, static_cast<int64_t>(lengths_.size()));
    lengths_.resize(static_cast<size_t>(count));
    CallBounds& view = views_[call_++];
    view.cu_q = make_tensor(device_ + at_, DType::i32, {count + 1});
    write([](const Lengths& l) { return l.queries; });
    view.cu_k = make_tensor(device_ + at_, DType::i32, {count + 1});
    write([](const Lengths& l) { return l.keys; });
    lengths_.clear();
  }
  /// Appends an i32 per element to a table of the last call: value(0), value(1), ...
  template <class Value>
  void table(Tensor CallBounds::*which, int64_t count, const Value& value) {
    views_[call_ - 1].*which = make_tensor(device_ + at_, DType::i32, {count});
    for (int64_t i = 0; i < count; ++i) to_[at_++] = static_cast<int32_t>(value(i));
  }
  int64_t sequences() const { return static_cast<int64_t>(lengths_.size()); }
  int64_t written() const { return at_; }

 private:
  struct Lengths {
    int64_t queries = 0, keys = 0;
  };
  template <class Select>
  void write(const Select& select) {
    int64_t sum = 0;
    to_[at_++] = 0;
    for (const Lengths& l : lengths_) to_[at_++] = static_cast<int32_t>(sum += select(l));
  }

  int32_t* to_;
  int32_t* device_;
  std::span<CallBounds> views_;
  size_t call_ = 0;
  int64_t at_ = 0;
  std::vector<Lengths> lengths_;
};

ContextBounds::ContextBounds(const ContextExchange& exchange, const ZigZag& zigzag, int64_t window,
                             bool dropout)
    : exchange_(exchange), own_(joined(exchange, zigzag)), window_(window), dropout_(dropout) {
  NRL_CHECK(window == 0 || exchange.gather || own_.size() == 1, "a window of {} in a ring of {} ranks",
            window, own_.size());
}

int ContextBounds::calls() const {
  return exchange_.gather ? static_cast<int>(2 * own_.samples()) : own_.size();
}

int64_t ContextBounds::capacity() const {
  // A ring's first step has at most one sequence per row, padded; the others five per sample. all_gather has
  // at most one per row and one of keys before them.
  if (exchange_.gather)
    return calls() *
           (2 * (padded_count(own_.chunk() + 1) + 1) + (dropout_ ? own_.chunk() + own_.length() : 0));
  return (dropout_ ? own_.size() * 2 * own_.rows() : 0) + 2 * (padded_count(sequences_of_own()) + 1) +
         (own_.size() - 1) * 2 * (5 * own_.samples() + 1);
}

void ContextBounds::write(std::span<const int32_t> documents, bool padded, int32_t* to, int32_t* device,
                          std::span<CallBounds> views) const {
  NRL_CHECK(views.size() == static_cast<size_t>(calls()) && documents.size() > 1 && documents.front() == 0 &&
            documents.back() == own_.samples() * own_.length());
  Writer w(to, device, views);
  const auto end_call = [&] { w.end_call(padded ? padded_count(w.sequences()) : 1); };
  if (exchange_.gather) {
    for (int64_t s = 0; s < own_.samples(); ++s)
      for (int half = 0; half < 2; ++half) {
        write_prefix(documents, s, half, w);
        end_call();
        const int64_t token = own_.first_token(half), key = first_key(token, window_);
        write_rows(
            documents, own_.chunk(), [&](int64_t i) { return s * own_.length() + token + i; },
            token + own_.chunk() - key, [&](int64_t i) { return s * own_.length() + key + i; }, w);
      }
  } else {
    write_own(documents, w);
    end_call();
    write_step_rows(documents, own_.rank(), w);
    for (int step = 1; step < own_.size(); ++step) {
      const int from = (own_.rank() - step + own_.size()) % own_.size();
      write_step(documents, from, w);
      w.end_call();
      write_step_rows(documents, from, w);
    }
  }
  const bool whole = !padded && documents.size() == static_cast<size_t>(own_.samples()) + 1;
  for (CallBounds& view : views) view.whole = whole;
  NRL_CHECK(w.written() <= capacity());
}

template <class Query, class Key>
void ContextBounds::write_rows(std::span<const int32_t> documents, int64_t queries, const Query& query,
                               int64_t keys, const Key& key, Writer& w) const {
  if (!dropout_) return;
  w.table(&CallBounds::rows, queries, query);
  // On one rank a sequence is a document.
  w.table(&CallBounds::key_places, keys, [&](int64_t i) {
    const int64_t row = key(i);
    return row - document_at(documents, row).begin;
  });
}

// With one sample only the halves that write_step() has.
void ContextBounds::write_step_rows(std::span<const int32_t> documents, int from, Writer& w) const {
  const ZigZag other(own_.samples(), own_.length(), own_.size(), from);
  const bool cut = own_.samples() == 1 && from != own_.rank(), earlier = from < own_.rank();
  const int64_t chunk = own_.chunk(), query = cut && !earlier ? chunk : 0;
  write_rows(
      documents, own_.rows() - query, [&](int64_t i) { return own_.global_row(query + i); },
      cut && earlier ? chunk : own_.rows(), [&](int64_t i) { return other.global_row(i); }, w);
}

// The rank's own rows: a new sequence begins wherever a row belongs to another document than the row before.
void ContextBounds::write_own(std::span<const int32_t> documents, Writer& w) const {
  for (int64_t s = 0; s < own_.samples(); ++s) {
    int64_t rows = 0, document = -1;
    for (int half = 0; half < 2; ++half) {
      const int64_t begin = s * own_.length() + own_.first_token(half), end = begin + own_.chunk();
      for (int64_t row = begin; row < end;) {
        const Interval d = document_at(documents, row);
        if (d.begin != document) {
          w.sequence(rows, rows);
          rows = 0, document = d.begin;
        }
        const int64_t next = std::min(end, d.end);
        rows += next - row;
        row = next;
      }
    }
    w.sequence(rows, rows);
  }
}

// Keys of rank `from` that this rank's queries see. With one sample the tensors are only the halves that can
// see each other: the low keys of an earlier rank, the high queries for a later one.
void ContextBounds::write_step(std::span<const int32_t> documents, int from, Writer& w) const {
  const bool earlier = from < own_.rank(), cut = own_.samples() == 1;
  const int64_t chunk = own_.chunk();
  for (int64_t s = 0; s < own_.samples(); ++s) {
    const int64_t base = s * own_.length();
    // The first of the queries that see any key, and the document it is in.
    const int64_t first = base + own_.first_token(earlier ? 0 : 1);
    const Interval d = document_at(documents, first);
    int64_t queries = std::min(d.end - first, chunk), keys = 0;
    if (earlier && queries == chunk)  // the document goes on to the high chunk, or ends before it
      queries += std::clamp<int64_t>(d.end - base - own_.first_token(1), 0, chunk);
    for (int half = 0; half < (earlier ? 1 : 2); ++half)
      keys += std::clamp<int64_t>(base + own_.chunk_begin(from, half) + chunk - d.begin, 0, chunk);
    const int64_t query_rows = cut && !earlier ? chunk : 2 * chunk,
                  key_rows = cut && earlier ? chunk : 2 * chunk;
    const int64_t queries_before = query_rows == 2 * chunk && !earlier ? chunk : 0,
                  keys_before = (earlier ? chunk : 2 * chunk) - keys;
    if (keys == 0) {
      w.sequence(query_rows, 0);
      w.sequence(0, key_rows);
      continue;
    }
    w.sequence(queries_before, 0);
    w.sequence(0, keys_before);
    w.sequence(queries, keys);
    w.sequence(query_rows - queries_before - queries, 0);
    w.sequence(0, key_rows - keys_before - keys);
  }
}

// Queries of one chunk and the keys of its sample up to the chunk's end.
void ContextBounds::write_prefix(std::span<const int32_t> documents, int64_t sample, int half,
                                 Writer& w) const {
  const int64_t base = sample * own_.length(), begin = base + own_.first_token(half),
                end = begin + own_.chunk();
  int64_t key = base + first_key(own_.first_token(half), window_);
  for (int64_t row = begin; row < end;) {
    const Interval d = document_at(documents, row);
    if (d.begin > key) {
      w.sequence(0, d.begin - key);
      key = d.begin;
    }
    const int64_t next = std::min(end, d.end);
    w.sequence(next - row, next - key);
    row = key = next;
  }
}

}  // namespace nrl::parallel
