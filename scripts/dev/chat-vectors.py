#!/usr/bin/env python3
"""Writes the test vectors of chat templates: texts that transformers and jinja2 make.

chat-vectors.py OUT [--templates DIR...] [--sums FILE]
  OUT/expressions.json    expressions and small templates with their results (chat_expressions.py)
  OUT/NAME.json           for each template OUT/templates/**/NAME.jinja: the texts of all conversations
                          (chat_conversations.py)
With --templates, the vectors of the templates *.jinja of other directories are written instead; they go to files
that are not part of the sources. --sums FILE writes the SHA-256 of these templates and of their vectors.
Needs `pip install transformers jinja2`.
"""

import argparse
import datetime
import hashlib
import json
import pathlib

import tokenizers
import transformers
from transformers.utils import chat_template_utils

import chat_conversations
import chat_expressions

NOW = datetime.datetime(2025, 7, 26, 14, 5, 9)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def failed(error):
    """The record of an exception. Errors of syntax and of values have other texts in the product."""
    return {"error": str(error), "type": type(error).__name__}


def byte_regions(text, regions):
    return [[len(text[:begin].encode()), len(text[:end].encode())] for begin, end in regions]


def expression_vectors():
    vectors, contexts = [], []
    for source, context, own_errors in chat_expressions.templates():
        if context not in contexts:
            contexts.append(context)
        vector = {"source": source, "context": contexts.index(context)}
        try:
            compiled = chat_template_utils._compile_jinja_template(source)
            vector["text"] = compiled.render(messages=chat_expressions.MESSAGES, tools=None, documents=None,
                                             add_generation_prompt=False, **context)
        except Exception as error:
            vector.update({"error": "", "type": "any"} if own_errors else failed(error))
        vectors.append(vector)
    return {"now": NOW.isoformat(), "messages": chat_expressions.MESSAGES, "contexts": contexts, "vectors": vectors}


def cases():
    for name in chat_conversations.CONVERSATIONS:
        yield name, {}
        yield name, {"add_generation_prompt": True}
    for name in chat_conversations.CONTINUED:
        yield name, {"continue_final_message": True}


def template_vectors(tokenizer, source):
    vectors = []
    for name, options in cases():
        messages, tools, kwargs = chat_conversations.CONVERSATIONS[name]
        vector = {"conversation": name, **options}
        try:
            text = tokenizer.apply_chat_template(messages, tools=tools, chat_template=source, tokenize=False,
                                                 **options, **kwargs)
            vector["text"] = text
            if "{%- generation" in source.replace("{% ", "{%- ") and not options.get("continue_final_message"):
                chats, regions = chat_template_utils.render_jinja_template(
                    [chat_template_utils._normalize_chat_messages(messages)], tools=tools, chat_template=source,
                    return_assistant_tokens_mask=True, **options, **{**SPECIAL, **kwargs})
                assert chats[0] == text
                vector["generation"] = byte_regions(text, regions[0])
        except Exception as error:
            vector.update(failed(error))
        vectors.append(vector)
    return vectors


def write(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=0, separators=(",", ":"))
        file.write("\n")
    print(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--templates", type=pathlib.Path, nargs="+")
    parser.add_argument("--sums", type=pathlib.Path)
    arguments = parser.parse_args()
    chat_template_utils.datetime = Clock
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>")), **SPECIAL)
    arguments.out.mkdir(parents=True, exist_ok=True)
    directories = arguments.templates or [arguments.out / "templates"]
    files = [file for directory in directories for file in sorted(directory.glob("**/*.jinja"))]
    conversations = {name: {"messages": messages, "tools": tools, "kwargs": kwargs}
                     for name, (messages, tools, kwargs) in chat_conversations.CONVERSATIONS.items()}
    write(arguments.out / "conversations.json", {"now": NOW.isoformat(), "special_tokens": SPECIAL,
                                                 "conversations": conversations})
    if not arguments.templates:
        write(arguments.out / "expressions.json", expression_vectors())
    sums = []
    for file in files:
        source = file.read_text(encoding="utf-8")
        out = arguments.out / (file.stem + ".json")
        write(out, {"name": file.stem, "source": source, "vectors": template_vectors(tokenizer, source)})
        sums += [f"{hashlib.sha256(part.read_bytes()).hexdigest()}  {part.name}\n" for part in (file, out)]
    if arguments.sums:
        arguments.sums.write_text("".join(sums))


if __name__ == "__main__":
    main()
