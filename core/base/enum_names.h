#pragma once
// Enumerations that declare the spellings of their values.

#include <string_view>

namespace nrl {

/// The spellings of an enumeration: `names[i]` is the enumerator of value i; `synonyms` are other accepted
/// spellings that configurations may have, reported as translated.
template <class E>
struct EnumNames;

struct Synonym {
  std::string_view spelling;
  std::string_view name;
};

// NRL_ENUM(Type, enumerators..., names..., synonyms...): the enumeration and its table in one place.
#define NRL_ENUM(Type, ENUMERATORS, NAMES, SYNONYMS)                      \
  enum class Type { NRL_UNWRAP ENUMERATORS };                             \
  template <>                                                             \
  struct EnumNames<Type> {                                                \
    static constexpr std::string_view names[] = {NRL_UNWRAP NAMES};       \
    static constexpr Synonym synonyms[] = {{"", ""} NRL_UNWRAP SYNONYMS}; \
  };
#define NRL_UNWRAP(...) __VA_ARGS__

/// The spelling of an enumerator.
template <class E>
requires requires {
  EnumNames<E>::names;
}
constexpr std::string_view name_of(E value) {
  return EnumNames<E>::names[static_cast<int>(value)];
}

}  // namespace nrl
