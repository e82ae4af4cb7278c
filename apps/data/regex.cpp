#include "apps/data/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <algorithm>
#include <array>
#include <new>

#include <pcre2.h>

#include "apps/data/oniguruma.h"
#include "apps/data/unicode.h"
#include "core/base/error.h"

namespace nrl::data {
namespace {

std::string message_of(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

// Per-thread state for any pattern: one pair of offsets and a stack for JIT code.
struct Searcher {
  pcre2_match_data* match = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(32 << 10, 8 << 20, nullptr);

  Searcher() {
    if (!match || !context || !stack) throw std::bad_alloc();
    pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~Searcher() {
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(match);
  }
};

}  // namespace

struct Regex::Code {
  pcre2_code* code = nullptr;
  bool compiled = false, has_classes = false;
  ~Code() { pcre2_code_free(code); }
};

Regex::Regex(const std::string& pattern, bool literal, const std::string& where)
    : code_(std::make_unique<Code>()) {
  int error = 0;
  PCRE2_SIZE at = 0;
  const OnigurumaPattern own = literal ? OnigurumaPattern{.pcre = pattern} : from_oniguruma(pattern, where);
  // In Ruby's syntax ^ and $ match at every line.
  const uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE);
  code_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(own.pcre.data()), own.pcre.size(), options, &error,
                              &at, nullptr);
  if (code_->code == nullptr)
    fail(Exit::data, "{}invalid pattern '{}': {} at byte {}", where, pattern, message_of(error), at);
  code_->has_classes = own.has_classes;
  code_->compiled = pcre2_jit_compile(code_->code, PCRE2_JIT_COMPLETE) == 0;
}

Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;

bool Regex::has_classes() const {
  return code_->has_classes;
}

bool Regex::find(std::string_view text, size_t from, size_t& begin, size_t& end) const {
  thread_local const Searcher searcher;
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  while (from <= text.size()) {
    const int found = code_->compiled ? pcre2_jit_match(code_->code, subject, text.size(), from, 0,
                                                        searcher.match, searcher.context)
                                      : pcre2_match(code_->code, subject, text.size(), from,
                                                    PCRE2_NO_UTF_CHECK, searcher.match, searcher.context);
    if (found == PCRE2_ERROR_NOMATCH) return false;
    if (found < 0)
      fail(Exit::data, "the tokenizer's pattern fails at byte {} of the text: {}", from, message_of(found));
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(searcher.match);
    if (range[0] < range[1]) {
      begin = range[0], end = range[1];
      return true;
    }
    // Skips an empty match and continues after the next character. (With \K the begin may be after the end.)
    from = std::max<size_t>(from, range[1]);
    if (from >= text.size()) return false;
    next_character(text, from);
  }
  return false;
}

}  // namespace nrl::data
