"""How calls are written: what is one, what is none, and what can't be read."""

import pytest

from perl.environments.calls import PARSERS, read_calls


def calls(name: str, text: str):
    """Names and arguments, or errors; and what is left of the text."""
    rest, found = read_calls(text, PARSERS[name])
    return [call.get("error") or (call["function"]["name"], call["function"]["arguments"]) for call in found], rest


@pytest.mark.parametrize(
    ("text", "made", "rest"),
    [
        ("the answer is 5", [], "the answer is 5"),
        ('a <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', [("f", {"x": 1})], "a"),
        (
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
            [("f", {}), ("g", {})],
            "",
        ),
        ('<tool_call>{"name": "f", "arguments": {"x": "a\nb"}}', [("f", {"x": "a\nb"})], ""),  # not closed
        ('<tool_call>{"name": "f"}<tool_call>{"name": "g"}</tool_call>', [("f", {}), ("g", {})], ""),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [("f", {"x": 1})], ""),  # OpenAI's text
        ("<tool_call>f(1)</tool_call>", ["the call is no JSON: Expecting value: line 1 column 1 (char 0)"], ""),
        ('<tool_call>["f"]</tool_call>', ['the call names no tool; write {"name": "...", "arguments": {...}}'], ""),
        (
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            ["the arguments of the call are no JSON object"],
            "",
        ),
        (
            '<think><tool_call>{"name": "f"}</tool_call></think>5',
            [],
            '<think><tool_call>{"name": "f"}</tool_call></think>5',
        ),
        ('<think>so <tool_call>{"name": "f"}</tool_call>', [], '<think>so <tool_call>{"name": "f"}</tool_call>'),
        ('so</think><tool_call>{"name": "f"}</tool_call>', [("f", {})], "so</think>"),
        ('<tool_call>{"name": "f", "arguments": {"x": "</think>"}}</tool_call>', [("f", {"x": "</think>"})], ""),
        ('a <tool_call>{"name": "f", "arguments": {"x": "<think>"}}</tool_call>', [("f", {"x": "<think>"})], "a"),
        (
            '<think>so</think><tool_call>{"name": "f", "arguments": {"x": "</think>"}}</tool_call>',
            [("f", {"x": "</think>"})],
            "<think>so</think>",
        ),
    ],
)
def test_hermes(text, made, rest):
    assert calls("hermes", text) == (made, rest)


@pytest.mark.parametrize(
    ("text", "made", "rest"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', [("f", {"x": 1})], ""),
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": 2}}', [("f", {}), ("g", {"x": 2})], ""),
        ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}', [("f", {"x": 1})], ""),
        ("<|python_tag|>print(1)", [("python", {"code": "print(1)"})], ""),
        ('{"answer": 5}', [], '{"answer": 5}'),
        ('{"name": "Ada", "age": 3}', [], '{"name": "Ada", "age": 3}'),
        ('{"answer": {"name": "f", "parameters": {}}}', [], '{"answer": {"name": "f", "parameters": {}}}'),
        ('{"name": "f", "arguments": {"x": "a\nb"}}', [("f", {"x": "a\nb"})], ""),
        (
            '{"name": "f", "parameters": {"x": "a\nb"}}; {"name": "g", "parameters": {}} Done.',
            [("f", {"x": "a\nb"}), ("g", {})],
            "Done.",
        ),
        ("it is 5", [], "it is 5"),
        (
            '{"name": "f", "parameters": {',
            [
                "the call is no JSON: Expecting property name enclosed in double quotes: line 1 column 30 (char 29)",
            ],
            "",
        ),
    ],
)
def test_llama3_json(text, made, rest):
    assert calls("llama3_json", text) == (made, rest)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_number_that_is_none_is_no_json(number):
    """It stood in samples.jsonl, which other programs could not read then."""
    ((said,), _) = calls("hermes", f'<tool_call>{{"name": "f", "arguments": {{"x": {number}}}}}</tool_call>')
    assert said.startswith("the call is no JSON: Out of range")


def test_a_thought_that_the_prompt_has_opened():
    """One that does not end calls nothing."""
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert read_calls(f"so {call}", PARSERS["hermes"], thinking=True) == (f"so {call}", [])
    rest, found = read_calls(f"so {call}</think>{call}", PARSERS["hermes"], thinking=True)
    assert (rest, len(found)) == (f"so {call}</think>", 1)


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("```python\nprint(1)\n```", ["print(1)\n"]),
        ("a\n```py\n1\n```\nb\n```python\n2\n```", ["1\n", "2\n"]),
        ("```\nprint(1)\n```", []),
        ("```python\nprint(1)", []),
        ("<think>```python\n1\n```</think>5", []),
    ],
)
def test_python_fences(text, codes):
    found, rest = calls("python_fence", text)
    assert (found, rest) == ([("python", {"code": code}) for code in codes], text)


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
@pytest.mark.parametrize("call", [
    '{"name": "add", "arguments": ' + "[" * 100_000,
    '{"name": "\\ud800", "arguments": {}}',
    '{"name": "add", "arguments": {"a": "\\udfff"}}',
    '{"name": "add", "arguments": {"a": ' + "[" * 64 + "]" * 64 + "}}",
])  # fmt: skip
def test_no_text_of_the_policy_ends_the_run(parser, call):
    text = f"<tool_call>{call}</tool_call>" if parser == "hermes" else call
    _, calls = read_calls(text, PARSERS[parser])
    assert [each["error"].partition(":")[0] for each in calls] == ["the call is no JSON"]


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
@pytest.mark.parametrize("arguments", [r"{\"code\": \"\\ud800\"}", r"{\"a\": " + "[" * 64 + "]" * 64 + "}"])
def test_nor_one_in_a_text_of_arguments(parser, arguments):
    call = f'{{"name": "add", "arguments": "{arguments}"}}'
    text = f"<tool_call>{call}</tool_call>" if parser == "hermes" else call
    assert calls(parser, text) == (["the arguments of the call are no JSON object"], "")
    deep = f'{{"name": "add", "arguments": {{"a": {"[" * 60}{"]" * 60}}}}}'
    (found,), _ = calls("hermes", f"<tool_call>{deep}</tool_call>")
    assert found[0] == "add"
