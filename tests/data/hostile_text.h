#pragma once
// Documents on which tokenizers tend to differ, for comparisons of two of them.

#include <string>
#include <vector>

#include "apps/data/unicode.h"
#include "core/base/philox.h"

namespace nrl::test {

inline std::vector<std::string> hostile_documents(int count) {
  const std::vector<std::string> parts = {"",
                                          " ",
                                          "  ",
                                          "\n",
                                          "\t",
                                          "\r\n",
                                          "\u00a0",
                                          "\u3000",
                                          "\u180e",
                                          "\u2581",
                                          "\u2581\u2581a \u2581",
                                          " leading",
                                          "trailing ",
                                          "  two  spaces  ",
                                          "</s>",
                                          "<s>",
                                          "<unk>",
                                          "<0x41>",
                                          "<ctl>",
                                          "<ud>",
                                          "the",
                                          "int",
                                          "e\u0301",
                                          "\u00e9",
                                          "abababab",
                                          "aabaab",
                                          "   \n   ",
                                          "1234567890",
                                          "\u0661\u0662",
                                          "don't",
                                          "a\u0323\u0307",
                                          "\u1100\u1161\u11a8",
                                          "\U0001f468\u200d\U0001f469\u200d\U0001f467",
                                          "\u0915\u094d\u0937\u093f",
                                          "\u4e2d\u6587\uff0c",
                                          "for (int i = 0; i < n; ++i)",
                                          std::string(1, '\0'),
                                          "\x1b[31m",
                                          "\U0010ffff",
                                          std::string(70, ' '),
                                          std::string(90, 'a'),
                                          "\ufb01",
                                          "\uff28",
                                          "\u2460",
                                          "\U00011f02",
                                          "\U0001e030",
                                          "\u0897",
                                          "\U00010d4a"};
  constexpr uint32_t starts[] = {0x20,   0x20,    0xA0,    0x300,   0x400,   0x5D0,  0x900,
                                 0xE00,  0x1100,  0x2000,  0x3040,  0x4E00,  0xA7C0, 0xAC00,
                                 0xFE00, 0x10D40, 0x11F00, 0x1F300, 0x20000, 0x31350};
  std::vector<std::string> documents = parts;
  const PhiloxStream random(7, 0);
  uint64_t counter = 0;
  const auto below = [&](uint64_t n) { return random.bits(counter++) % n; };
  while (static_cast<int>(documents.size()) < count) {
    std::string text;
    const uint64_t kind = below(3), pieces = below(40);
    for (uint64_t i = 0; i < pieces; ++i) {
      if (kind == 0) text += "ab "[below(3)];
      if (kind == 1) text += parts[below(parts.size())];
      if (kind == 2)
        data::append_utf8(text, starts[below(std::size(starts))] + static_cast<uint32_t>(below(0x60)));
    }
    documents.push_back(text);
  }
  return documents;
}

}  // namespace nrl::test
