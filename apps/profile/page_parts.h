#pragma once
// Parts that the pages of profiles and plans are made of. Every shape of a drawing must have a title, which a
// browser shows under the pointer.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace nrl::profile {

/// The width of a drawing of the page, and its margins: names of rows to the left.
inline constexpr double svg_width = 1140, svg_left = 150, svg_right = 28;

/// The rules of CSS of a page besides the common style and svg_style().
extern const std::string_view page_style;

std::string svg_ms(double seconds);
std::string svg_bytes(double bytes);
/// The begin of a drawing; it ends with "</svg>".
std::string open_svg(double width, double height, std::string_view label);
/// A time axis below a drawing of `seconds` in a drawing of svg_width.
std::string time_axis(double seconds, double top, double bottom);

/// A colored square with its text. `shape_class`: "s0".
std::string legend_entry(std::string_view shape_class, std::string_view text);

class Table {
 public:
  explicit Table(const std::vector<std::string_view>& headings);
  /// Texts, which are escaped.
  void row(const std::vector<std::string>& cells);
  std::string end() { return std::move(html_) + "</table>\n"; }

 private:
  std::string html_;
};

}  // namespace nrl::profile
