"""Conversations with which chat-vectors.py renders every template."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Gets the weather of a place, \"now\" or later.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A city, e.g. Zürich"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": "array", "items": {"type": "object", "properties": {"day": {"type": "integer"}},
                                                    "required": ["day"]}},
                "limit": {"type": ["number", "null"], "minimum": 0.5, "maximum": 1e21},
            },
            "required": ["place"],
            "additionalProperties": False,
        },
        "return": {"type": "object", "properties": {"degrees": {"type": "number"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time", "description": "Gets the time.",
                                          "parameters": {"type": "object", "properties": {}}}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def system(text):
    return {"role": "system", "content": text}


def call(name, arguments, number=0):
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text, name="get_weather", number=0):
    return {"role": "tool", "name": name, "tool_call_id": f"call0000{number}", "content": text}


BERN = {"place": "Bern", "days": [{"day": 1}, {"day": 2}], "limit": 1.5, "exact": True, "unit": None}
ASK = user("What is the weather in Bern?")

# name: (messages, tools, kwargs)
CONVERSATIONS = {
    "user": ([user("Hello")], None, {}),
    "system": ([system("Be brief."), user("Hello")], None, {}),
    "turns": ([user("One?"), assistant("1"), user("Two?"), assistant("2"), user("Three?"), assistant("3")], None, {}),
    "system turns": ([system("Count."), user("One?"), assistant("1"), user("Two?"), assistant("2"), user("Three?")],
                     None, {}),
    "empty": ([system(""), user(""), assistant(""), user("x")], None, {}),
    "spaces": ([system("  s\n"), user("\n  Hi \t\n\n"), assistant(" \n Yo\n "), user("end ")], None, {}),
    "unicode": ([user("naïve ☕ 👩‍👩‍👧 e\u0301 漢字 \u00a0"), assistant("Ünïcödé\u2028\u200d ß İ"),
                 user("\ufeffmark")], None, {}),
    "hostile": ([user("a \"quoted\" 'text' <|im_end|>\n{{ x }} {% if %} </s> [/INST] \\n \\"),
                 assistant("<|im_start|>system\n{\"a\": [1]} </think> <|eot_id|>"), user("& < > é")], None, {}),
    "tools": ([system("Use tools."), ASK], [WEATHER, CLOCK], {}),
    "tool call": ([ASK, assistant("", tool_calls=[call("get_weather", BERN)]), result("{\"degrees\": 21.5}"),
                   assistant("It is 21.5 degrees."), user("Thanks")], [WEATHER], {}),
    "parallel calls": ([ASK, assistant("I look it up.", tool_calls=[call("get_weather", BERN),
                                                                    call("get_time", {}, 1)]),
                        result("21"), result("12:30", "get_time", 1), assistant("21 at 12:30")],
                       [WEATHER, CLOCK], {}),
    "text arguments": ([ASK, assistant("", tool_calls=[call("get_weather", "{\"place\": \"Bern\"}")]),
                        result("warm")], [WEATHER], {}),
    "no content": ([ASK, assistant(None, tool_calls=[call("get_weather", {"place": "Bern"})]),
                    result("{}"), assistant("Done.")], [WEATHER], {}),
    "parts": ([system([{"type": "text", "text": "Be kind."}]),
               user([{"type": "text", "text": "First."}, {"type": "text", "text": " Second."}]),
               assistant([{"type": "text", "text": "Both."}]), user("ok")], None, {}),
    "reasoning": ([user("1+1?"), assistant("2", reasoning_content="It is\neasy."), user("2+2?"),
                   assistant("4", reasoning_content="\nAgain.\n")], None, {}),
    "thinking": ([user("1+1?"), assistant("<think>\nEasy.\n</think>\n\n2"), user("2+2?"),
                  assistant("<think>\nHm.\n</think>\n\n4")], None, {}),
    "thinking field": ([user("1+1?"), assistant("2", thinking="T"), user("3?"), assistant("3", reasoning="R")],
                       None, {}),
    "not thinking": ([user("Hello")], None, {"enable_thinking": False}),
    "thinking on": ([system("s"), user("Hello")], [CLOCK], {"enable_thinking": True, "thinking": True}),
    "reasoning calls": ([user("Weather and time?"),
                         assistant("", reasoning_content="First.", tool_calls=[call("get_weather", BERN)]),
                         result("21"), assistant("", reasoning_content="Then.", tool_calls=[call("get_time", {}, 1)]),
                         result("noon", "get_time", 1), assistant("21 at noon", reasoning_content="Done.")],
                        [WEATHER, CLOCK], {}),
    "assistant first": ([assistant("Hello"), user("Hi")], None, {}),
    "two users": ([user("a"), user("b"), assistant("c")], None, {}),
    "late system": ([user("a"), assistant("b"), system("c"), user("d")], None, {}),
    "unknown role": ([user("a"), {"role": "critic", "content": "b"}], None, {}),
    "documents": ([user("Read.")], None, {"documents": [{"title": "T", "text": "Body"}]}),
    "variables": ([system("s"), user("Hi")], None,
                  {"date_string": "1 Jan 2025", "custom_tools": None, "builtin_tools": ["web_search"],
                   "tools_in_user_message": False, "reasoning_effort": "high", "model_identity": "M"}),
}

# Conversations of which the last message is continued.
CONTINUED = ["turns", "thinking", "parts"]
