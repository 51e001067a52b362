"""python -m perl from-verl with verl's tools: multi_turn keys, and tool configs in the form of verl's own examples."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from perl.config.load import parse
from perl.environments.tools import load_environment
from perl.tools.from_verl.cli import recipe_text
from perl.tools.from_verl.outcomes import Choices
from perl.tools.from_verl.overrides import read_command
from perl.tools.from_verl.translate import Translation, translate

TURNS = "actor_rollout_ref.rollout.multi_turn"
GOOD = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    f"{TURNS}.enable=True",
]
RETOOL = """\
tools:
  - class_name: "recipe.retool.retool.CustomSandboxFusionTool"
    config:
      sandbox_fusion_url: "http://localhost:8080/run_code"
      num_workers: 128
      enable_global_rate_limit: true
      rate_limit: 128
      default_timeout: 30
      default_language: "python"
      memory_limit_mb: 1024
      type: native

    tool_schema:
      type: "function"
      function:
        name: "code_interpreter"
        description: "A tool for executing code."
        parameters:
          type: "object"
          properties:
            code:
              type: "string"
              description: "The code to execute."
          required: ["code"]
"""
"""As verl's recipe/retool has it."""
FUSION = """\
tools:
  - class_name: "verl.tools.sandbox_fusion_tools.SandboxFusionTool"
    config: {
      "sandbox_fusion_url": "https://xxx.apigateway-cn-beijing.volceapi.com/run_code"
    }
    tool_schema:
      type: "function"
      function:
        name: "code_interpreter"
        description: "A tool for executing code."
        parameters:
          type: "object"
          properties:
            code:
              type: "string"
              description: "The code to execute."
          required: ["code"]
"""
GSM8K = """\
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "A tool for calculating the reward of gsm8k."
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The model's answer to the GSM8K math problem, must be a digits"
          required: ["answer"]
"""
MCP = """\
tools:
  - class_name: verl.tools.mcp_search_tool.MCPSearchTool
    config:
      rate_limit: 120
      timeout: 120
      type: mcp
    mcp:
      mcp_servers_config_path: ./mcp_server.json
      tool_selected_list:
        - tavily_search_tool
"""


def of(*words: str) -> Translation:
    return translate(read_command(None, [*GOOD, *words]), Choices())


def values(result: Translation) -> dict:
    return {name: value for name, (value, _) in result.recipe().items()}


def with_tools(folder: Path, text: str, *words: str) -> Translation:
    file = folder / "tool_config.yaml"
    file.write_text(text, encoding="utf-8")
    return of(f"{TURNS}.tool_config_path={file}", *words)


@pytest.mark.parametrize("text", [RETOOL, FUSION])
def test_the_sandbox_is_ours(tmp_path, text):
    result = with_tools(tmp_path, text, f"{TURNS}.max_assistant_turns=8", f"{TURNS}.max_user_turns=8")
    assert result.refused == {}
    fields = values(result)
    assert fields["environment.tools"] == ["code_interpreter"]
    assert fields["environment.max_turns"] == 8
    assert fields["environment.max_observation_tokens"] == 256  # verl's default
    assert fields["environment.tool_call_parser"] == "hermes"
    assert any("not at sandbox_fusion_url, with 5 s and 512 MB a call" in note for note in result.notes)
    assert any("taken out" in note for note in result.notes) == (text is RETOOL)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_text(result), encoding="utf-8")
    config = parse(["--recipe", str(recipe), "--config.training.use_cpu", "true"]).build()
    (schema,) = load_environment(config.environment).schemas
    assert schema["function"]["name"] == "code_interpreter"
    assert schema["function"]["parameters"]["required"] == ["code"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["max_assistant_turns=5"], 5),
        (["max_user_turns=3"], 4),
        (["max_assistant_turns=2", "max_user_turns=3"], 2),
        (["max_assistant_turns=null"], 512),
    ],
)
def test_turns(tmp_path, words, expected):
    """Without a limit the tokens are one: verl's max_response_length is 512 by default."""
    assert (
        values(with_tools(tmp_path, FUSION, *(f"{TURNS}.{word}" for word in words)))["environment.max_turns"]
        == expected
    )


def test_the_longest_answer(tmp_path):
    words = f"{TURNS}.max_tool_response_length=1000", f"{TURNS}.max_parallel_calls=3"
    result = with_tools(tmp_path, FUSION, *words)
    assert values(result)["environment.max_observation_tokens"] == 3000


@pytest.mark.parametrize(("words", "made"), [([], 1), ([f"{TURNS}.max_parallel_calls=3"], 3)])
def test_how_many_calls_of_a_turn_verl_makes_is_said_to_be_no_limit_here(tmp_path, words, made):
    """By verl's default too: one."""
    said = f"{TURNS}.max_parallel_calls is no limit here: verl makes the first {made} of a turn's calls; here up to 16"
    assert [note.startswith(said) for note in with_tools(tmp_path, FUSION, *words).notes].count(True) == 1
    assert not any("max_parallel_calls" in note for note in of(f"{TURNS}.enable=False", *words).notes)


def test_a_validation_has_the_tools_too(tmp_path):
    result = with_tools(tmp_path, FUSION, "trainer.test_freq=5", "trainer.val_before_train=True", "data.val_files=x")
    assert values(result)["validation.datasets"] == ["x"]
    assert values(result)["validation.every_steps"] == 20  # five of verl's steps, of four updates each


def test_a_validation_with_tools_draws_without_do_sample(tmp_path):
    """As verl's agent loop, which does not read it; by verl's defaults the temperature is 0."""
    drawn = ["n=30", "temperature=1.0", "top_p=0.6"]
    words = [f"actor_rollout_ref.rollout.val_kwargs.{word}" for word in drawn]
    due = "trainer.test_freq=5", "data.val_files=x"
    fields = values(with_tools(tmp_path, FUSION, *due, *words))
    assert [fields[f"validation.{name}"] for name in ("n", "temperature", "top_p")] == [30, 1.0, 0.6]
    one_turn = [f"{TURNS}.enable=False", "actor_rollout_ref.rollout.mode=sync"]
    assert values(of(*one_turn, *due, *words))["validation.n"] == 1
    assert values(with_tools(tmp_path, FUSION, *due))["validation.temperature"] == 0.0


@pytest.mark.parametrize(
    "word",
    ["tokenization_sanity_check_mode=off", "use_inference_chat_template=True", "tool_response_truncate_side=middle"],
)
def test_what_has_no_effect(tmp_path, word):
    result = with_tools(
        tmp_path, FUSION, f"{TURNS}.{word}", "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
    )
    assert result.refused == {}
    assert f"{TURNS}.{word.partition('=')[0]}" in result.no_effect


def test_off_is_off():
    result = of(f"{TURNS}.enable=False", f"{TURNS}.tool_config_path=there/is/none.yaml", f"{TURNS}.format=gpt-oss")
    assert result.refused == {}
    assert not [name for name in values(result) if name.startswith("environment.")]
    assert result.no_effect[f"{TURNS}.format"] == "multi_turn.enable is False"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GSM8K, "write def calc_gsm8k_reward(answer: str) -> str in a file of your own"),
        (MCP, "tools of MCP servers are not there"),
        (RETOOL.replace('"python"', '"cpp"'), "tools[0]: default_language cpp: only python is there"),
        (FUSION.replace('"code_interpreter"', '"run"'), "is called python or code_interpreter here, not run"),
        (FUSION + GSM8K.removeprefix("tools:\n"), "tools[1]: verl.tools.gsm8k_tool.Gsm8kTool is a class on verl's"),
        ("tools: []\n", "no list of tools"),
        ("- a: [\n", "is no YAML file"),
        ("tools:\n  - config: {}\n", "no class_name"),
    ],
)
def test_tools_that_are_not_there(tmp_path, text, said):
    result = with_tools(tmp_path, text)
    assert set(result.refused) == {f"{TURNS}.tool_config_path"}
    (why,) = result.refused.values()
    assert said in why
    assert "\n" not in why


SANDBOX = """\
tools:
  - class_name: verl.tools.sandbox_fusion_tools.SandboxFusionTool
    config: {%s}
    tool_schema: {function: {name: %s, parameters: {properties: {1: 2}}}}
"""
NESTED = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (NESTED + SANDBOX % ("default_language: *a9", "python"), "an alias in line 2; write out what it stands for"),
        (SANDBOX % ("default_language: &c [*c]", "python"), "an alias in line 3"),
        ("tools: &t\n  - <<: *t\n", "an alias in line 2"),
        ("tools: " + "[" * 5000 + "]" * 5000, "brackets nest too deep"),
        ("tools: []  # " + "x" * (1 << 16), "more than 64 KiB"),
        (SANDBOX % ("default_timeout: " + "9" * 400, "python"), "default_timeout: 999"),
        (SANDBOX % ("default_timeout: -3", "python"), "tools[0]: default_timeout: -3 is not above 0"),
        (SANDBOX % ("default_timeout: 0", "python"), "0 is not above 0"),
        (SANDBOX % ("", "[a, b]"), "tools[0]: its function's name is no name"),
        (SANDBOX % ("", '"a\\nb"'), "its function's name is no name"),
        (SANDBOX % ('default_language: "a\\e[31m"', "python"), "default_language is no name"),
        ("tools:\n  - class_name: " + "a" * 201, "class_name is no name"),
        (GSM8K.replace("            answer:", '            "a\\nb":'), "def calc_gsm8k_reward(...)"),
        (FUSION + FUSION.removeprefix("tools:\n"), "two tools are called code_interpreter; leave one out"),
    ],
)
def test_a_hostile_tool_config_is_one_line(tmp_path, text, said):
    (why,) = with_tools(tmp_path, text).refused.values()
    assert said in why
    assert why.isprintable()


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_tool_config_that_is_no_file(tmp_path, kind):
    place = tmp_path / "tools"
    os.mkfifo(place) if kind == "pipe" else place.mkdir()
    (why,) = of(f"{TURNS}.tool_config_path={place}").refused.values()
    assert "a folder, a device or a pipe; name a YAML file" in why


def test_a_number_beyond_a_floats_range():
    result = translate(read_command(None, [*GOOD[:-1], "actor_rollout_ref.actor.optim.lr=" + "9" * 400]), Choices())
    assert "is not a number" in result.refused["actor_rollout_ref.actor.optim.lr"]


@pytest.mark.parametrize(
    ("word", "key", "said"),
    [
        ("format=gpt-oss", "format", "hermes and llama3_json"),
        ("tool_response_truncate_side=left", "tool_response_truncate_side", "write middle"),
        ("function_tool_path=tools.py", "function_tool_path", "write them without it"),
        ("interaction_config_path=x.yaml", "interaction_config_path", "reset and step"),
        ("max_assistant_turns=-1", "max_assistant_turns", "not a whole number"),
    ],
)
def test_what_is_refused(tmp_path, word, key, said):
    result = with_tools(tmp_path, FUSION, f"{'+' if key == 'interaction_config_path' else ''}{TURNS}.{word}")
    assert said in result.refused[f"{TURNS}.{key}"]


def test_no_tools_are_named():
    assert "no tools are named" in of().refused[f"{TURNS}.enable"]
    assert "no such file here" in of(f"{TURNS}.tool_config_path=no.yaml").refused[f"{TURNS}.tool_config_path"]


def test_the_report_shows_each(tmp_path):
    """The command, in its own process, where verl is started: the path of the tool config is relative."""
    (tmp_path / "tool_config.yaml").write_text(RETOOL, encoding="utf-8")
    words = [*GOOD, f"{TURNS}.tool_config_path=tool_config.yaml", f"{TURNS}.max_assistant_turns=8"]
    command = [sys.executable, "-m", "perl", "from-verl", "--output", "recipe.yaml", "--", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"{TURNS}.enable=True -> environment.max_turns 8" in done.stdout
    assert f"{TURNS}.tool_config_path=tool_config.yaml -> environment.tools [code_interpreter]" in done.stdout
    assert f"{TURNS}.max_tool_response_length -> environment.max_observation_tokens 256" in done.stdout
    written = yaml.safe_load((tmp_path / "recipe.yaml").read_text(encoding="utf-8"))
    assert written["environment"]["max_turns"] == 8
