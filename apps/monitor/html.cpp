#include "apps/monitor/html.h"

#include <spdlog/fmt/fmt.h>

namespace nrl::monitor {
namespace {

constexpr std::string_view page_style = R"(
:root { color-scheme: light dark; --text: #1d2733; --soft: #66727f; --grid: #dfe4ea; --page: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e9ee; --soft: #9aa6b2; --grid: #35404b; --page: #14191f; } }
body { font: 14px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); margin: 24px auto;
  max-width: 1180px; padding: 0 16px; }
h1 { font-size: 20px; } svg { width: 100%; height: auto; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 16px; }
.title { font-size: 14px; font-weight: 600; fill: var(--text); } .tick { font-size: 11px; fill: var(--soft); }
.grid { stroke: var(--grid); } .line { fill: none; stroke-width: 1.6; } .band { opacity: 0.16; }
table { border-collapse: collapse; margin: 16px 0; display: block; overflow-x: auto; }
th, td { text-align: right; padding: 4px 12px; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 500; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 8px; }
)";

}  // namespace

std::string html_escaped(std::string_view text) {
  std::string out;
  for (char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

std::string page_begin(std::string_view title, std::string_view heading, std::string_view more_style) {
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n<meta name=\"viewport\" "
      "content=\"width=device-width, "
      "initial-scale=1\">\n<title>{}</title>\n<style>{}{}</style></head>\n<body>\n<h1>{}</h1>\n",
      html_escaped(title), page_style, more_style, html_escaped(heading));
}

}  // namespace nrl::monitor
