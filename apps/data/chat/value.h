#pragma once
// Values of chat templates. They lie in the arena of one rendering and are copied by reference.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

namespace nrl::data::chat {

struct Value;
struct Dict;
struct List;
struct Loop;
struct Macro;
struct Missing;
struct Namespace;
enum class Method : uint8_t;
enum class Function : uint8_t;

/// Counts evaluation steps down, so that a template cannot run without end.
class Budget {
 public:
  static constexpr int64_t most_steps = 10'000'000;

  /// Error (Exit::data) once the steps are spent.
  void spend(size_t steps) {
    left_ -= static_cast<int64_t>(steps);
    if (left_ < 0) [[unlikely]]
      exhausted();
  }
  /// Steps for work on this many bytes of text.
  void spend_bytes(size_t bytes) { spend(bytes / 256); }

 private:
  [[noreturn]] static void exhausted();

  int64_t left_ = most_steps;
};

/// Memory that is freed with the rendering: objects in it are never destroyed one by one.
class Arena {
 public:
  static constexpr size_t most_bytes = size_t{256} << 20;

  /// Bytes aligned to 8. Error (Exit::data) above most_bytes in total.
  void* allocate(size_t bytes) {
    bytes = (bytes + 7) & ~size_t{7};
    if (bytes > left_) return allocate_block(bytes);
    void* const result = at_;
    at_ += bytes;
    left_ -= bytes;
    return result;
  }
  template <class T>
  T* make(T value) {
    return new (allocate(sizeof(T))) T(value);
  }
  /// Uninitialized elements.
  template <class T>
  T* array(size_t count) {
    return static_cast<T*>(allocate(count * sizeof(T)));
  }
  /// A copy of a text.
  std::string_view keep(std::string_view text);

 private:
  void* allocate_block(size_t bytes);

  std::vector<std::unique_ptr<std::byte[]>> blocks_;
  std::byte* at_ = nullptr;
  size_t left_ = 0, total_ = 0;
};

enum class Kind : uint8_t {
  undefined,
  none,
  boolean,
  integer,
  real,
  string,
  list,  ///< every sequence and iterator, see Flavor
  dict,
  name_space,
  macro,
  method,    ///< bound to a value
  function,  ///< a global
  loop,
};

/// The Python type of a List. Iterators give each item once.
enum class Flavor : uint8_t { list, tuple, range, dict_keys, dict_values, dict_items, iterator };

struct Value {
  Kind kind = Kind::none;
  bool safe = false;  ///< of a string: markup, to which other strings are added escaped
  Method method{};
  Function function{};
  uint32_t size = 0;  ///< bytes of a string
  union {
    int64_t integer = 0;
    bool boolean;
    double real;
    const char* bytes;
    List* list;
    const Dict* dict;
    Namespace* space;
    const Macro* macro;
    Loop* loop;
    const Value* self;       // receiver of a method
    const Missing* missing;  // null: nothing is known about an undefined value
  };

  static Value undefined(const Missing* missing = nullptr) {
    Value value;
    value.kind = Kind::undefined;
    value.missing = missing;
    return value;
  }
  static Value of(bool b) {
    Value value;
    value.kind = Kind::boolean;
    value.boolean = b;
    return value;
  }
  static Value of(int64_t i) {
    Value value;
    value.kind = Kind::integer;
    value.integer = i;
    return value;
  }
  static Value of(double d) {
    Value value;
    value.kind = Kind::real;
    value.real = d;
    return value;
  }
  /// The bytes must live as long as the rendering, and be fewer than 2^32.
  static Value of(std::string_view text, bool safe = false) {
    Value value;
    value.kind = Kind::string;
    value.safe = safe;
    value.size = static_cast<uint32_t>(text.size());
    value.bytes = text.data();
    return value;
  }
  static Value of(List* list) {
    Value value;
    value.kind = Kind::list;
    value.list = list;
    return value;
  }
  static Value of(const Dict* dict) {
    Value value;
    value.kind = Kind::dict;
    value.dict = dict;
    return value;
  }

  bool is(Kind k) const { return kind == k; }
  bool is_whole() const { return kind == Kind::integer || kind == Kind::boolean; }
  bool is_number() const { return is_whole() || kind == Kind::real; }
  std::string_view text() const { return {bytes, size}; }
  /// Value of an integer or a boolean.
  int64_t whole() const { return kind == Kind::boolean ? boolean : integer; }
  double number() const { return kind == Kind::real ? real : static_cast<double>(whole()); }
};

/// The reason why a value is undefined, for messages.
struct Missing {
  enum class What : uint8_t { name, attribute, element, text, unsafe } what = What::name;
  Value owner;  ///< of an attribute or an element
  Value key;    ///< the name, the index, or the whole message
};

struct List {
  const Value* items = nullptr;
  size_t size = 0;
  Flavor flavor = Flavor::list;
  size_t taken = 0;                       ///< items that an iterator has given
  int64_t start = 0, stop = 0, step = 1;  ///< of a range

  bool is_indexed() const {
    return flavor == Flavor::list || flavor == Flavor::tuple || flavor == Flavor::range;
  }
};

struct Entry {
  Value key, value;
};

struct Dict {
  const Entry* entries = nullptr;
  size_t size = 0;
  int64_t message = -1;  ///< index of the message that this is
};

/// A growing list of trivial elements in an arena.
template <class T>
struct Buffer {
  T* data = nullptr;
  size_t size = 0, capacity = 0;

  void push(Arena& arena, T value) {
    if (size == capacity) {
      capacity = capacity == 0 ? 4 : 2 * capacity;
      T* const wider = arena.array<T>(capacity);
      for (size_t i = 0; i < size; ++i) wider[i] = data[i];
      data = wider;
    }
    new (data + size++) T(value);
  }
};

/// An object whose attributes a template may set.
struct Namespace {
  Buffer<Entry> entries;
};

/// Depth up to which nested values are compared and printed.
inline constexpr int most_value_depth = 200;

/// Name of the Python type: "str", "dict", "NoneType".
std::string_view type_name(const Value& value);

/// Python's bool(value).
bool truth(const Value& value);

/// The value of an entry; null if there is none.
const Value* find(const Entry* entries, size_t size, const Value& key, Budget& budget);

/// Python's a == b. Error (Exit::data) for values that are nested too deeply.
bool equal(const Value& a, const Value& b, Budget& budget, int depth = 0);

/// Sign of a - b, for numbers, strings and lists of these. Error (Exit::data) with Python's message, in
/// which `sign` is the operator, for others.
int order(const Value& a, const Value& b, std::string_view sign, Budget& budget, int depth = 0);

/// True for values that may be keys of a dict.
bool hashable(const Value& value, Budget& budget, int depth = 0);

}  // namespace nrl::data::chat
