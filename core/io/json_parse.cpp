#include <algorithm>
#include <cstring>
#include <iterator>

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl {
namespace {

// Feeds nlohmann's lexer and tracks its position: SAX events carry none.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, const char** cursor) : at_(at), cursor_(cursor) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    *cursor_ = ++at_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator old = *this;
    ++*this;
    return old;
  }
  bool operator==(const CountingIterator& o) const { return at_ == o.at_; }
  bool operator!=(const CountingIterator& o) const { return at_ != o.at_; }

 private:
  const char* at_;
  const char** cursor_;
};

bool number_char(char c) {
  return (c >= '0' && c <= '9') || (c != 0 && std::strchr("+-.eE", c) != nullptr);
}

// Builds the value, enforces the limits, and converts positions to lines and columns.
class JsonBuilder {
 public:
  JsonBuilder(std::string_view text, std::string_view source, const JsonLimits& limits)
      : text_(text),
        source_(std::make_shared<std::string>(source)),
        limits_(limits),
        cursor_(text.data()),
        line_start_(text.data()),
        line_scan_(text.data()) {}

  const char** cursor() { return &cursor_; }
  JsonValue take() { return std::move(root_); }

  bool null() { return put(JsonValue(), literal_start(4)); }
  bool boolean(bool v) { return put(JsonValue(v), literal_start(v ? 4 : 5)); }
  bool number_integer(int64_t v) { return put(JsonValue(v), number_start()); }
  bool number_unsigned(uint64_t v) { return put(JsonValue(v), number_start()); }
  bool number_float(double v, const std::string&) { return put(JsonValue(v), number_start()); }
  bool string(std::string& v) {
    const char* start = string_start();
    check_string(v, start);
    return put(JsonValue(std::move(v)), start);
  }
  bool binary(std::vector<uint8_t>&) { return false; }  // not in JSON text
  bool start_object(size_t) { return open(JsonValue(JsonObject())); }
  bool start_array(size_t) { return open(JsonValue(JsonValue::Array())); }
  bool key(std::string& k) {
    const char* start = string_start();
    check_string(k, start);
    if (frames_.back().value.members().find(k) != nullptr) {
      refuse(start, fmt::format("the key \"{}\" occurs twice in one object", clipped(k)));
    }
    frames_.back().key = std::move(k);
    return true;
  }
  bool end_object() { return close(); }
  bool end_array() { return close(); }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& e) {
    std::string_view what = e.what();
    // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error ..."
    if (const size_t id = what.find("] "); id != std::string_view::npos) what.remove_prefix(id + 2);
    if (what.starts_with("parse error at ")) {
      if (const size_t colon = what.find(": "); colon != std::string_view::npos)
        what.remove_prefix(colon + 2);
    }
    const size_t offset = std::min(position > 0 ? position - 1 : 0, text_.size());
    refuse(text_.data() + offset, clipped(what, 300));
  }

  [[noreturn]] void refuse(const char* at, const std::string& what) {
    const auto [line, column] = place(at);
    fail(Exit::data, "{}:{}:{}: {}", *source_, line, column, what);
  }

 private:
  struct Frame {
    JsonValue value;
    std::string key;
  };

  // Line and column (from 1, columns in bytes). Positions are nearly always queried in increasing order.
  std::pair<uint32_t, uint32_t> place(const char* at) {
    if (at < line_start_) {
      line_ = 1;
      line_start_ = line_scan_ = text_.data();
    }
    for (; line_scan_ < at; ++line_scan_) {
      if (*line_scan_ == '\n') {
        ++line_;
        line_start_ = line_scan_ + 1;
      }
    }
    return {line_, static_cast<uint32_t>(at - line_start_) + 1};
  }

  const char* literal_start(std::ptrdiff_t length) const { return cursor_ - length; }
  const char* number_start() const {
    // The lexer has read one character beyond the number, except at the end of the text.
    const char* p = cursor_;
    if (p > text_.data() && !number_char(p[-1])) --p;
    while (p > text_.data() && number_char(p[-1])) --p;
    return p;
  }
  const char* string_start() const {
    const char* p = cursor_ - 2;  // before the closing quote
    for (; p > text_.data(); --p) {
      if (*p != '"') continue;
      const char* b = p;
      while (b > text_.data() && b[-1] == '\\') --b;
      if ((p - b) % 2 == 0) break;
    }
    return p;
  }

  void check_string(const std::string& s, const char* start) {
    if (s.size() > limits_.string_bytes) {
      refuse(start, fmt::format("this string has {} bytes, more than {}", s.size(), limits_.string_bytes));
    }
  }

  void count_value(const char* start) {
    if (++values_ > limits_.values) refuse(start, fmt::format("more than {} values", limits_.values));
  }

  bool put(JsonValue v, const char* start) {
    count_value(start);
    const auto [line, column] = place(start);
    v.set_place(source_, line, column);
    attach(std::move(v));
    return true;
  }

  bool open(JsonValue v) {
    const char* start = cursor_ - 1;
    count_value(start);
    if (static_cast<int>(frames_.size()) >= limits_.depth) {
      refuse(start, fmt::format("nested deeper than {}", limits_.depth));
    }
    const auto [line, column] = place(start);
    v.set_place(source_, line, column);
    frames_.push_back({std::move(v), {}});
    return true;
  }

  bool close() {
    JsonValue v = std::move(frames_.back().value);
    frames_.pop_back();
    attach(std::move(v));
    return true;
  }

  void attach(JsonValue v) {
    if (frames_.empty()) {
      root_ = std::move(v);
    } else if (Frame& f = frames_.back(); f.value.is_array()) {
      f.value.push_back(std::move(v));
    } else {
      f.value.set(std::move(f.key), std::move(v));
    }
  }

  std::string_view text_;
  std::shared_ptr<const std::string> source_;
  JsonLimits limits_;
  const char* cursor_;
  const char* line_start_;
  const char* line_scan_;
  uint32_t line_ = 1;
  size_t values_ = 0;
  std::vector<Frame> frames_;
  JsonValue root_;
};

}  // namespace

JsonValue parse_json(std::string_view text, std::string_view source, const JsonLimits& limits) {
  if (text.size() > limits.text_bytes) {
    fail(Exit::data, "{}: {} bytes of JSON, more than the {} that are read", source, text.size(),
         limits.text_bytes);
  }
  JsonBuilder builder(text, source, limits);
  // nlohmann treats NUL as the end of the text and skips a byte order mark.
  if (const auto nul = text.find('\0'); nul != std::string_view::npos) {
    builder.refuse(text.data() + nul, "a NUL byte");
  }
  if (text.starts_with("\xef\xbb\xbf"))
    builder.refuse(text.data(), "a byte order mark. Fix: save the file without it");
  const CountingIterator first(text.data(), builder.cursor()),
      last(text.data() + text.size(), builder.cursor());
  const bool whole = nlohmann::json::sax_parse(first, last, &builder);
  NRL_CHECK(whole, "the JSON parser stopped without an error");
  return builder.take();
}

JsonValue read_json(const std::string& path, const JsonLimits& limits) {
  return parse_json(read_file(path, limits.text_bytes), path, limits);
}

}  // namespace nrl
