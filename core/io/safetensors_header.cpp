#include <algorithm>

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/safetensors.h"
#include "core/io/safetensors_common.h"

namespace nrl::detail {
namespace {

// Tensors of language models have up to 4 dimensions. These limits bound the memory for a
// header by 4 times its text.
constexpr size_t max_dimensions = 8, max_metadata = 4096, max_string = size_t{1} << 20, max_number = 40;

// SAX handler; refuses every event that the format does not allow at its position.
class HeaderReader {
 public:
  HeaderReader(const std::string& path, size_t tensors) : path_(path) { header_.tensors.reserve(tensors); }
  SafetensorsHeader take() { return std::move(header_); }

  bool null() { refuse("null"); }
  bool boolean(bool) { refuse("a boolean"); }
  bool number_integer(int64_t v) {
    if (place_ == Place::shape && v < 0) fail("negative dimension {}", v);
    refuse("a negative number");
  }
  bool number_unsigned(uint64_t v) {
    if (place_ == Place::shape) {
      if (dimensions_ < max_dimensions) shape_[dimensions_] = static_cast<int64_t>(v);
      if (v > static_cast<uint64_t>(INT64_MAX)) fail("a dimension is not an integer in the range of int64");
      ++dimensions_;
      return true;
    }
    if (place_ != Place::offsets) refuse("a number");
    if (offsets_ < 2) offset_[offsets_] = v;
    ++offsets_;
    return true;
  }
  bool number_float(double, const std::string&) {
    if (place_ == Place::shape || place_ == Place::offsets)
      fail("a number is not an integer of zero or more");
    refuse("a number with a fraction");
  }
  bool string(std::string& text) {
    if (place_ == Place::metadata) {
      if (header_.metadata.size() >= max_metadata) fail("more than {} entries", max_metadata);
      if (!header_.metadata.emplace(std::move(key_), std::move(text)).second) fail("a key occurs twice");
      return true;
    }
    if (place_ != Place::tensor || field_ != "dtype") refuse("a string");
    dtype_ = find_safetensors_dtype(text);
    if (dtype_ == nullptr) fail("has the unknown dtype \"{}\"", clipped(text, 40));
    return true;
  }
  bool binary(std::vector<uint8_t>&) { refuse("binary data"); }
  bool start_object(size_t) {
    if (place_ == Place::start) return go(Place::top);
    if (place_ != Place::top) refuse("an object");
    if (name_ == "__metadata__") return go(Place::metadata);
    dtype_ = nullptr;
    seen_ = dimensions_ = offsets_ = 0;
    return go(Place::tensor);
  }
  bool start_array(size_t) {
    if (place_ == Place::tensor && field_ == "shape") return go(Place::shape);
    if (place_ == Place::tensor && field_ == "data_offsets") return go(Place::offsets);
    refuse("an array");
  }
  bool key(std::string& text) {
    if (place_ == Place::top) {
      name_ = std::move(text);
      if (name_ == "__metadata__" && std::exchange(metadata_seen_, true)) fail("occurs twice");
      return true;
    }
    if (place_ == Place::metadata) {
      key_ = std::move(text);
      return true;
    }
    static constexpr std::string_view fields[] = {"dtype", "shape", "data_offsets"};
    const auto* field = std::find(std::begin(fields), std::end(fields), text);
    if (field == std::end(fields))
      fail("has more than dtype, shape and data_offsets: \"{}\"", clipped(text, 40));
    const unsigned bit = 1u << (field - fields);
    if (seen_ & bit) fail("has {} twice", *field);
    seen_ |= bit;
    field_ = *field;
    return true;
  }
  bool end_array() { return go(Place::tensor); }
  bool end_object() {
    if (place_ == Place::tensor) finish_tensor();
    return go(place_ == Place::top ? Place::done : Place::top);
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& e) {
    std::string_view what = e.what();
    if (const size_t colon = what.find(": "); colon != std::string_view::npos) what.remove_prefix(colon + 2);
    nrl::fail(Exit::data, "{}: byte {} of the header: {}", path_, position, clipped(what, 300));
  }

 private:
  enum class Place : uint8_t { start, top, tensor, shape, offsets, metadata, done };

  bool go(Place place) {
    place_ = place;
    return true;
  }
  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> text, Args&&... args) const {
    nrl::fail(Exit::data, "{}: {} {}", path_, quoted_tensor(name_),
              fmt::format(text, std::forward<Args>(args)...));
  }
  [[noreturn]] void refuse(std::string_view found) const {
    if (place_ == Place::start)
      nrl::fail(Exit::data, "{}: the header is {}; expected an object", path_, found);
    fail("holds {}; expected an object with dtype, shape and data_offsets", found);
  }

  void finish_tensor() {
    static constexpr const char* fields[] = {"dtype", "shape", "data_offsets"};
    for (unsigned i = 0; i < 3; ++i)
      if (!(seen_ & (1u << i)) || (i == 0 && !dtype_)) fail("has no {}", fields[i]);
    if (dimensions_ > max_dimensions) fail("has {} dimensions, more than {}", dimensions_, max_dimensions);
    if (offsets_ != 2) fail("data_offsets has {} entries, not 2", offsets_);
    TensorInfo t;
    t.name = name_;
    t.dtype_name = dtype_->name;
    t.dtype = dtype_->ours;
    t.shape.assign(shape_, shape_ + dimensions_);
    t.begin = offset_[0];
    t.end = offset_[1];
    const std::optional<int64_t> bits = checked_product(t.shape, dtype_->bits);
    if (!bits) fail("has the shape {}, which overflows", shape_text(t.shape));
    if (*bits % 8 != 0)
      fail("of shape {} and type {} does not fill whole bytes", shape_text(t.shape), t.dtype_name);
    if (t.end < t.begin || t.end - t.begin != static_cast<uint64_t>(*bits) / 8)
      fail("data_offsets [{}, {}] are not the {} bytes of {} {}", t.begin, t.end, *bits / 8, t.dtype_name,
           shape_text(t.shape));
    header_.tensors.push_back(std::move(t));
  }

  const std::string& path_;
  SafetensorsHeader header_;
  Place place_ = Place::start;
  std::string name_, key_;
  std::string_view field_;
  const SafetensorsDType* dtype_ = nullptr;
  unsigned seen_ = 0;
  size_t dimensions_ = 0, offsets_ = 0;
  int64_t shape_[max_dimensions] = {};
  uint64_t offset_[2] = {};
  bool metadata_seen_ = false;
};

// Refuses tokens that the parser would buffer completely, and bytes that it would take for the end of the
// text. Returns an upper bound on the number of tensors.
size_t check_tokens(std::string_view json, const std::string& path) {
  size_t tensors = 0, string_begin = 0, number = 0;
  bool in_string = false;
  for (size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (c == 0) fail(Exit::data, "{}: byte {} of the header is NUL", path, i + 1);
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
        if (i - string_begin > max_string)
          fail(Exit::data, "{}: byte {} of the header: a string of {} bytes, more than {}", path,
               string_begin + 1, i - string_begin, max_string);
        tensors += json.substr(string_begin + 1, i - string_begin - 1) == "data_offsets";
      }
    } else if (c == '"') {
      in_string = true;
      string_begin = i;
      number = 0;
    } else {
      number = c >= '0' && c <= '9' ? number + 1 : 0;
      if (number > max_number)
        fail(Exit::data, "{}: byte {} of the header: a number of more than {} digits", path, i + 1,
             max_number);
    }
  }
  if (in_string) fail(Exit::data, "{}: byte {} of the header: the string has no end", path, string_begin + 1);
  if (json.starts_with("\xef\xbb\xbf"))
    fail(Exit::data, "{}: the header begins with a byte order mark", path);
  return tensors;
}

}  // namespace

std::string quoted_tensor(std::string_view name) {
  return fmt::format("tensor \"{}\"", clipped(name));
}

SafetensorsHeader parse_safetensors_header(std::string_view json, const std::string& path) {
  // The shortest tensor takes 50 bytes.
  HeaderReader reader(path, std::min(check_tokens(json, path), json.size() / 50));
  const bool whole = nlohmann::json::sax_parse(json.begin(), json.end(), &reader);
  NRL_CHECK(whole, "the JSON parser stopped without an error");
  return reader.take();
}

std::string foreign_format(std::string_view head) {
  static constexpr std::string_view save =
      "save the model again with transformers: model.save_pretrained(DIR, safe_serialization=True)";
  struct Magic {
    std::string_view bytes, what, advice;
  };
  using namespace std::string_view_literals;
  static constexpr Magic magics[] = {
      {"PK\3\4"sv, "a zip archive, as torch.save writes it (PyTorch)", save},
      {"PK\5\6"sv, "an empty zip archive", save},
      {"\x80\2"sv, "a Python pickle, as older versions of torch.save write it (PyTorch)", save},
      {"\x80\3"sv, "a Python pickle", save},
      {"\x80\4"sv, "a Python pickle", save},
      {"\x80\5"sv, "a Python pickle", save},
      {"GGUF"sv, "a GGUF file (llama.cpp)", "use the safetensors files that it was made from"},
      {"\x93NUMPY"sv, "a NumPy array (.npy)", "save the tensors with safetensors.numpy.save_file"},
      {"\x89HDF\r\n\x1a\n"sv, "an HDF5 file (Keras, TensorFlow)", save},
      {"version https://git-lfs"sv, "a Git LFS pointer: the file itself was not downloaded",
       "run `git lfs install && git lfs pull` in its directory"},
      {"\x1f\x8b"sv, "gzip data", "decompress it first"},
      {"\x28\xb5\x2f\xfd"sv, "Zstandard data", "decompress it first"},
  };
  std::string_view text = head.substr(std::min(head.find_first_not_of(" \t\r\n"), head.size()));
  std::string lower(text.substr(0, 16));
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; });
  if (lower.starts_with("<!doctype") || lower.starts_with("<html"))
    return "an HTML page. Fix: download the file itself; the page may ask to log in or to accept a license";
  if (text.starts_with('{') && text.size() > 1 && (text[1] == '\n' || text[1] == ' ' || text[1] == '"'))
    return "plain JSON. Fix: download the file again; this looks like a server's answer or an index";
  for (const Magic& magic : magics)
    if (head.starts_with(magic.bytes)) return fmt::format("{}. Fix: {}", magic.what, magic.advice);
  return "";
}

}  // namespace nrl::detail
