#include <string_view>

#include "apps/data/chat/chat_template.h"

namespace nrl::data {
namespace {

constexpr const char* chatml = R"({%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' -%}
{%- generation -%}
{{ message.content + '<|im_end|>' }}
{%- endgeneration -%}
{{ '\n' }}
{%- else -%}
{{ message.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- endif -%}
)";

constexpr const char* llama3 = R"({{- bos_token | default('<|begin_of_text|>') -}}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
{%- if message.role == 'assistant' -%}
{%- generation -%}
{{ message.content | trim + '<|eot_id|>' }}
{%- endgeneration -%}
{%- else -%}
{{ message.content | trim + '<|eot_id|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif -%}
)";

constexpr const char* zephyr = R"({%- set end = eos_token | default('</s>') -%}
{%- for message in messages -%}
{{ '<|' + message.role + '|>\n' }}
{%- if message.role == 'assistant' -%}
{%- generation -%}
{{ message.content + end }}
{%- endgeneration -%}
{%- else -%}
{{ message.content + end }}
{%- endif -%}
{{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|assistant|>\n' }}
{%- endif -%}
)";

}  // namespace

const char* builtin_chat_template(std::string_view name) {
  if (name == "chatml") return chatml;
  if (name == "llama3") return llama3;
  if (name == "zephyr") return zephyr;
  return nullptr;
}

}  // namespace nrl::data
