"""python -m perl from-verl: conditions of a script, what decides them, and each key in one list.

What a condition comes to is bash's own answer: `test_conditions_are_bashs` asks it.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from random import Random

import pytest

from perl.__main__ import main
from perl.base.errors import UserError
from perl.tools.from_verl.outcomes import Choices
from perl.tools.from_verl.overrides import read_command
from perl.tools.from_verl.shell import read_script
from perl.tools.from_verl.translate import Translation, translate

SCRIPTS = Path(__file__).parents[1] / "verl"
BY_DEVICE = SCRIPTS / "devices" / "grpo_by_device.sh"
FLAGS = SCRIPTS / "devices" / "functions_and_flags.sh"
ALL = sorted(SCRIPTS.rglob("*.sh"))
COMMAND = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
    " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
)
KEYS = COMMAND.split()[3:]
MODEL = "actor_rollout_ref.model.path"


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/user")
    for name in ("DEVICE", "ENGINE", "BATCH", "MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def of(source, *words, **settings) -> Translation:
    return translate(read_command(str(source) if source else None, words, settings), Choices())


def written(text: str, **settings) -> Translation:
    Path("run.sh").write_text(text)
    return of("run.sh", **settings)


def train_files(before: str, **settings) -> str:
    """What `$Y` is after some lines of a script."""
    result = written(f'{before}\n{COMMAND} data.train_files="[$Y]"\n', **settings)
    return result.refused.get("data.train_files") or result.values["data.train_files"][1:-1]


# Each key in one list


@pytest.mark.parametrize("script", ALL, ids=lambda script: script.name)
def test_each_word_of_a_launch_is_in_exactly_one_list(script):
    launch, _ = read_script(script, {"HOME": "/home/user"}, {"DEVICE": "npu"} if script == BY_DEVICE else {})
    result = of(script, **({"DEVICE": "npu"} if script == BY_DEVICE else {}))
    keys = {word.partition("=")[0].lstrip("+") for word in launch.words if "=" in word and not word.startswith("-")}
    assert keys or "--config-name" in " ".join(launch.words)
    lists = [*result.translated, *result.no_effect, *result.refused]
    for key in keys:
        assert lists.count(key) == 1, key
    assert all(result.no_effect.values())
    assert all(result.refused.values())


# What decides


@pytest.mark.parametrize("way", ["environment", "set", "argument"])
def test_a_device_decides(monkeypatch, way):
    if way == "environment":
        monkeypatch.setenv("DEVICE", "npu")
        result = of(BY_DEVICE)
    else:
        result = of(BY_DEVICE, DEVICE="npu")
    assert result.refused == {}
    assert (result.batch.devices, result.batch.n) == (16, 8)
    assert "actor_rollout_ref.actor.use_torch_compile" in result.no_effect
    assert "HCCL_CONNECT_TIMEOUT" in result.no_effect
    assert of(BY_DEVICE, DEVICE="cuda").batch.devices == 8


def test_without_a_device_one_line_says_what_to_set():
    with pytest.raises(UserError) as error:
        of(BY_DEVICE)
    assert str(error.value) == (
        f"{BY_DEVICE}:24: it depends on 'case \"$DEVICE\" in cuda) PER_NODE=${{PER_NODE:-8}} memory=0.8 ;', which only"
        " a run decides; write --set DEVICE=cuda or --set DEVICE=npu; a whole KEY=VALUE depends on it"
    )


def test_functions_flags_and_placeholders():
    result = of(FLAGS)
    assert result.refused == {}
    assert result.values["actor_rollout_ref.model.path"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert result.values["data.train_batch_size"] == "128"
    placeholders = [note for note in result.notes if "placeholder" in note]
    file = "data.train_files=<your file>/train.parquet"
    assert placeholders == [f"{file}: <your file> is a placeholder; write your own"]
    assert of(FLAGS, BATCH="64").values["actor_rollout_ref.model.path"] == "none"


def test_a_setting_stands_in_for_what_only_a_run_shows():
    lines = f"COUNT=$(nvidia-smi -L | wc -l)\n{COMMAND} trainer.n_gpus_per_node=$COUNT\n"
    line = "run.sh:1: $(nvidia-smi -L | wc -l) is only known to a run; write --set COUNT=VALUE"
    assert line in written(lines).refused["trainer.n_gpus_per_node"]
    assert written(lines, COUNT="4").batch.devices == 4
    nobody = f"{COMMAND} data.train_files=$FOLDER/a.parquet\n"
    assert "; write --set FOLDER=VALUE" in written(nobody).refused["data.train_files"]
    assert written(nobody, FOLDER="/d").values["data.train_files"] == "/d/a.parquet"


@pytest.mark.parametrize(
    ("lines", "name", "said"),
    [
        ("A=${DEVICE:-cuda}", "DEVCE", "--set DEVCE: run.sh does not read DEVCE before it sets it; did you mean DEV"),
        ("DEVICE=cuda", "DEVICE", "--set DEVICE: run.sh does not read DEVICE before it sets it"),
    ],
)
def test_a_setting_that_the_script_does_not_read_is_one_line(lines, name, said):
    with pytest.raises(UserError) as error:
        written(f"{lines}\n{COMMAND}\n", **{name: "1"})
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("word", ["DEVICE", "=npu", "1A=b"])
def test_a_setting_has_a_name_and_a_value(word):
    with pytest.raises(UserError, match="write --set NAME=VALUE, such as --set DEVICE=npu"):
        main(["from-verl", "--set", word, str(BY_DEVICE)])


def test_settings_go_to_scripts_alone():
    for words in (["--", *KEYS], [str(SCRIPTS / "npu_aqn_settings.yaml")]):
        with pytest.raises(UserError, match="--set: only a script has variables"):
            main(["from-verl", "--set", "A=b", *words])


# What stays undecided


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        ("Y=a; if [ -f x ]; then Y=a; fi", "a"),
        ("if [ -f x ]; then Y=b; exit 1; else Y=a; fi", "a"),
        ("Y=b; if [ -f x ]; then Y=a; else echo; exit 1; fi", "a"),
        ("Y=a; [ -f x ] && { Y=b; exit 1; }", "a"),
        ("Y=a; X=1; if [ -f x ]; then if [ $X = 2 ]; then Y=b; fi; fi", "a"),
        ("for i in 1 2 3; do curl x && break; sleep 5; done; Y=a", "a"),
        ("Y=a; for i in 1 2; do [ -f x ] && continue; Y=a; done", "a"),
        ("Y=a; f() { local Y=b; cd /; }; [ -f x ] && (f); f; cd /usr; Y=$Y$PWD", "a/usr"),
        ("if [ -f x ]; then echo; exit 1; fi; Y=a", "a"),
        ("Y=a; case $(uname) in Linux) ;; *) exit 1 ;; esac", "a"),
        ("f() { if [ -f x ]; then exit 1; fi; Y=a; }; f", "a"),
        ("Y=a; pip install x || true", "a"),
        ("Y=a; [ -f x ] && Z=1", "a"),
        ("[ -f x ] && [ a = b ] && Y=b; Y=${Y:-a}", "a"),
        ("f() { local Y=b; }; Y=a; f", "a"),
        ("f() { declare Y=b; }; Y=a; f", "a"),
        ("g() { Y=a; }; f() { g; g; }; f", "a"),
        ('test "$X" = "" && Y=a', "a"),
        ("[ -f x ] && cd /tmp; cd /usr/lib; Y=$PWD", "/usr/lib"),
        ("cd /usr; cd lib/..; Y=$(pwd)/data", "/usr/data"),
        ("cd /usr; Y=$(cd lib && pwd)", "/usr/lib"),
        ("cd /usr; Y=$(realpath lib)", "/usr/lib"),
        ("Y=1; (cd /usr; Y=2; export Y=3); Y=$Y", "1"),
        ("cd /usr; (cd /); Y=$PWD", "/usr"),
        ("Y=1; f() { Y=2; }; f | cat; { Y=3; } & Y=4$Y", "41"),
        ("LR=1; f() { Y=$LR; }; LR=6 f; Y=$Y$LR", "61"),
        ("LR=1; f() { [ $LR = 6 ]; }; if LR=6 f; then Y=a; fi", "a"),
        ("M=a/b/c; Y=${M//\\//_}", "a_b_c"),
        ("M=a/b/c; Y=${M/\\//-}", "a-b/c"),
        ("M=a/b; Y=${M/a}", "/b"),
        ("A=$(uname)b; Y=${A:+a}", "a"),
        ("while [ $# -gt 0 ]; do shift; Y=b; done; Y=${Y:-a}", "a"),
        ("for i in 1 2 3; do [ $i = 2 ] && break; Y=$i; done", "1"),
        ("Y=$(( 9007199254740993 / -1 ))$(( -7 / 2 ))$(( -7 % 3 ))", "-9007199254740993-3-1"),
        ('A=(a b c d); Y="${A[*]:1:2}"', "b c"),
        ('A=(a b); set -- "${A[@]:0:1}" c d; Y="${*:2:1}${@:3}"', "cd"),
        ("A=1 B=2\nexport Y=a", "a"),
        ("A=$(C=1 D=2\necho a) B=2\nexport Y=a", "a"),
        ("A=1 B=2 # one line\n[ $A = 1 ] && Y=a", "a"),
        ("set -- a b; for i; do Y=$i; done", "b"),
        ("f() { Y=a; } > /dev/null; f", "a"),
    ],
)
def test_what_does_not_matter_is_passed_over(lines, value):
    assert train_files(lines) == value


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("if [ -f x ]; then Y=a; else Y=b; fi", "Y"),
        ("if command -v uv; then Y=a; else Y=a; fi", "Y"),
        ("D=$(uname); case a in $D) Y=a ;; *) Y=a ;; esac", "D"),
        ("D=$(uname); case $D in Linux) N=1 ;; esac; [ $N = 1 ] && Y=a", "D"),
        ("Y=b; [ -f x ] && Y=a", "Y"),
        ("command -v npu-smi > /dev/null && Y=npu || Y=gpu", "Y"),
        ("D=$(uname); if [ $D = Linux ]; then Y=a; fi", "D"),
        ("f() { if [ -f x ]; then return; fi; Y=a; }; Y=b; f", "Y"),
        ("for i in *; do Y=$i; done", "Y"),
        ("Y=b; for i in 1 2; do if [ -f x ]; then break; fi; Y=a; done", "Y"),
        ("read Y", "Y"),
        ("Y=b; [ -f x ] && unset Y", "Y"),
        ("[ -f x ] && : ${Y:=b}; Y=${Y:-a}", "Y"),
        ("[ -f x ] && printf -v Y a", "Y"),
        ("[ -f x ] && { ((Y=1)); }", "Y"),
        ("Y=b; set -- a; [ -f x ] && { shift; Y=$1; }", "Y"),
        ("Y=b; f() { [ -f x ] || return 0; Y=a; }; g() { f; }; X=1 g", "Y"),
        ("Y=b; for i in 1 2; do [ -f x ] && continue; Y=a; done", "Y"),
        ("Y=b; for i in 1 2; do for j in 1 2; do [ -f x ] && break; Y=a; done; done", "Y"),
        ("Y=b; A=1; while read l; do [ $A = 2 ] && Y=a; A=2; done", "Y"),
        ("Y=b; A=1; for i in *; do case $A in 2) Y=a ;; esac; ((A++)); done", "Y"),
        ("Y=b; until [ -f x ]; do if true; then Y=a; fi; done", "Y"),
        ("for ((Y=0; Y<3; Y++)); do true; done", "Y"),
        ("select Y in a b; do break; done", "Y"),
        ("Y=$(cat x) || Y=b", "Y"),
        ("( [ -f x ] && exit 1; true ) || Y=2", "Y"),
        ("case 7 in [[:digit:]]) Y=a ;; *) Y=b ;; esac", "Y"),
        ('M=a/b; Y=${M//"/"/_}', "Y"),
        ('A=(a b); IFS=$(cat x); Y="${A[*]}"', "Y"),
        ("A=(a b); A+=c; Y=${A[0]}", "A"),
        ("M=a/b; a=b; Y=${M/$a/Q}", "Y"),
        ("M=a/b; a=b; Y=${M/b/$a}", "Y"),
        ("M=a/b; s=/b; Y=${M%$s}", "Y"),
        ("M=a/b; Y=${M/b/[&]}", "Y"),
        ("nvidia-smi; if [ $? -ne 0 ]; then Y=16; else Y=8; fi", "Y"),
        ("Y=1; ((Y=1, Y++))", "Y"),
        ("Y=1; for ((i=0; i<3; i++)); do ((Y*=2)); done", "Y"),
        ("Y=1; ((Y+=$(nproc)))", "Y"),
        ("D=$(uname); case Linux in $D) Y=a ;; *) Y=b ;; esac", "D"),
        ("case qwen in @(qwen|llama)) Y=a ;; *) Y=b ;; esac", "Y"),
        ("for i in 1 2; do [ -f x ] && break; Y=$i; done", "Y"),
        ("f() { if command -v npu-smi; then return 0; fi; return 1; }; if f; then Y=npu; else Y=cuda; fi", "Y"),
        ("f() { command -v npu-smi || return 1; return 0; }; if f; then Y=npu; else Y=cuda; fi", "Y"),
        ("f() { [ -f x ] || return 1; }; Y=a; f || Y=b", "Y"),
        ("f() { [ -f x ] && return; return 1; }; Y=a; ! f && Y=b", "Y"),
        ("f() { case $(uname) in Linux) return 0 ;; esac; return 1; }; if f; then Y=a; else Y=b; fi", "Y"),
        ("f() { [ -f x ] || { Y=a; return 1; }; Y=b; }; f", "Y"),
        ("f() { if [ -f x ]; then return 1; fi; Y=a; }; f", "Y"),
        ("f() { command -v uv; return $?; }; if f; then Y=a; else Y=b; fi", "Y"),
        ("f() { command -v uv; return; }; if f; then Y=a; else Y=b; fi", "Y"),
        ("f() { [ -f x ] && return 0; exit 1; }; Y=a; [ -f y ] && Y=b; f", "Y"),
        ("f() { [ -f x ] || return 1; return 3; }; if f; then Y=b; else Y=a; fi", "Y"),
        ("f() { Y=b; }; for i in *; do f; done", "Y"),
        ("( exit 1 ) || Y=2", "Y"),
        ("((Y+=1))", "Y"),
        ("X=abcdef; Y=${X: -2}", "Y"),
        ("Y=0; while [ $Y -lt 3 ]; do Y=$((Y + 1)); done", "Y"),
        ("[[ 123 =~ ^[0-9]+$ ]] && Y=a", "Y"),
        ("[[ b > a ]] && Y=a", "Y"),
    ],
)
def test_what_matters_names_the_variable_to_set(lines, name):
    reason = train_files(lines)
    assert "run.sh:1: " in reason
    assert f"; write --set {name}=" in reason
    value = "Linux" if name == "D" else "z"
    assert train_files(lines, **{name: value}) == ("a" if name == "D" else "z")


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ('[[ "$OSTYPE" == linux* ]] && Y=a || Y=b', "OSTYPE"),
        ("if [ $EUID -eq 0 ]; then Y=a; else Y=b; fi", "EUID"),
        ("Y=${HOSTNAME-a}", "HOSTNAME"),
        ("cd $(mktemp -d); cd ..; Y=$PWD/a", "PWD"),
        ("cd -; Y=$(pwd)", "PWD"),
        ("V=$(nproc); Y=${V:+5}", "V"),
        ("[ -f x ] && V=1; Y=${V+set}", "V"),
        ("[ -f x ] && V=1; [ -v V ] && Y=a || Y=b", "V"),
        ("A=(a); [ -f x ] && A=(a b); Y=${#A[@]}", "Y"),
        ("A=(a); [ -f x ] && A=(a b); A+=(c); Y=${A[1]}", "A"),
        ("A=($(ls)); Y=${#A[@]}", "Y"),
        ("set -- a b; [ -f x ] && shift; Y=${2:-c}$#", ""),
        ('set -- a b; [ -f x ] && set -- c; f() { Y=${2:-c}; }; f "$@"', ""),
        ("[ $(uname) = Linux ] && Y=a || Y=b", "Y"),
    ],
)
def test_what_a_run_sets_is_unknown(monkeypatch, lines, name):
    monkeypatch.delenv(name or "Y", raising=False)
    said = train_files(lines)
    assert "run.sh:1: " in said
    assert "Linux" not in said.partition("--set")[2]
    assert f"; write --set {name}=" in said or not name


@pytest.mark.parametrize("line", ["source a/b.sh", ". a/b.sh", "eval X=2", "export $(cat .env)"])
def test_a_file_that_is_not_read_is_one_note(line):
    notes = written(f"f() {{ {line}; }}; f; f; {line}; [ -f x ] && f || f\n{COMMAND}\n").notes
    assert len([note for note in notes if "not read" in note]) == 1
    said = line.replace("source ", "").replace(". a", "a")
    assert f"run.sh:1: {said}: not read; what it sets is written as --set NAME=VALUE" in notes


def test_a_setting_holds_behind_a_file_that_is_not_read():
    lines = f"Y=1; [ -f e.sh ] && source e.sh\n{COMMAND} data.seed=$Y\n"
    assert (written(lines).values["data.seed"], written(lines, Y="2").values["data.seed"]) == ("1", "2")
    with pytest.raises(UserError, match=r"--set X: run.sh does not read X"):
        written(lines, X="2")


def test_what_programs_see_of_the_variables(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    lines = "WANDB_MODE=offline; A=1; set -a; HF_HOME=/x; set +a; set -o allexport; D=1; set +o allexport; B=1"
    lines += "; export C=1; unset C; C=2; env HF_TOKEN=~/t"
    Path("run.sh").write_text(f"{lines} {COMMAND}\n")
    launch, _ = read_script(Path("run.sh"), os.environ)
    assert launch.environment == {"WANDB_MODE": "offline", "HF_HOME": "/x", "D": "1", "HF_TOKEN": "/home/user/t"}


@pytest.mark.parametrize("end", ["| tee log", "&", "2>&1 | tee log &"])
def test_a_training_in_a_pipe_counts(end):
    assert written(f"X=1; f() {{ {COMMAND} data.seed=$X {end}\n}}\n(X=2; f)\n").values["data.seed"] == "2"


@pytest.mark.parametrize(
    "lines", ["if [ -f x ]; then {}; fi", "{}", "f() {{ {}; }}; for i in 1; do f; done", "f() {{ [ -f x ] && {}; }}; f"]
)
@pytest.mark.parametrize("word", ["break", "continue"])
def test_a_break_outside_of_a_loop_is_one_line(word, lines):
    with pytest.raises(UserError, match=f"run.sh:1: {word} stands in no loop; take the line out of the script"):
        written(f"{lines.format(word)}\n{COMMAND}\n")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("for i in 1; do for j in 1; do break 2; done; done", "run.sh:1: break 2: only break alone is followed"),
        ("case 7 in\n7) Y=a ;&\n8) Y=b ;;\nesac", "run.sh:2: ;& is not followed; end each part of the case in ;;"),
        (f"while true; do {COMMAND}; done", "run.sh:1: a loop around the training; give a script with the one command"),
        ("f() { local -n r=$1; r=5; }; f Y", "run.sh:1: local -n r=$1: another name of a variable, or one that change"),
        ("declare -i Y; Y=2+3", "run.sh:1: declare -i Y: another name of a variable, or one that changes what is"),
        ("f() { Y=1; }; unset -f f", "run.sh:1: unset -f f: not followed; take the line out of the script"),
        ("V=#$PWD", "run.sh:1: V=#: where its value ends is not understood; put it in quotes"),
        ("V=\\\n /x", "run.sh:1: V=\\ /x: where its value ends is not understood; put it in quotes"),
        ("shopt -s nocasematch", "run.sh:1: shopt -s nocasematch: not followed; write each pattern out"),
        ("return 0", "run.sh:1: return stands in no function; take the line out of the script"),
    ],
)
def test_what_is_not_followed_is_one_line(lines, said):
    with pytest.raises(UserError) as error:
        written(f"{lines}\n{COMMAND}\n")
    assert str(error.value).startswith(said)


def test_arguments_of_the_script_are_set_by_number():
    lines = f'MODEL=${{1:?usage}}\nshift\n{COMMAND} actor_rollout_ref.model.path=$MODEL data.seed=$1 "${{@:2}}"\n'
    assert "the variable 1 is not set: usage; write --set 1=VALUE" in written(lines).refused[MODEL]
    result = written(lines, **{"1": "/m", "2": "7", "3": "data.train_batch_size=64"})
    assert [result.values[key] for key in (MODEL, "data.seed", "data.train_batch_size")] == ["/m", "7", "64"]
    with pytest.raises(UserError, match=r"--set 3: an argument of the script; give --set 2=VALUE too"):
        written(lines, **{"1": "/m", "3": "7"})
    with pytest.raises(UserError, match=r"--set 1: run.sh does not read 1"):
        written(f"{COMMAND}\n", **{"1": "/m"})


def test_a_training_in_a_branch_runs_where_the_others_end_the_script():
    lines = f"X=1; if [ -f x ]; then\nX=2\n{COMMAND} data.seed=$X\nelse\nX=3; exit 1\nfi\n"
    assert written(lines).values["data.seed"] == "2"
    for other in ("X=3", COMMAND, "[ -f y ] && exit 1"):
        with pytest.raises(UserError, match=r"run.sh:3: whether this training runs .* decides; give a script with the"):
            written(lines.replace("X=3; exit 1", other))


@pytest.mark.parametrize(
    "lines",
    [
        "if [ -f x ]; then\nT; exit 0; fi",
        "[ -f x ] && {\nT; exit 0; }",
        "[ -f x ] || {\nT; exit; }",
        "if [ -f x ]; then Y=1; else\nT; exit; fi",
        "case $(uname) in Linux)\nT; exit ;; esac",
        "go() {\nT; }; [ -f x ] && { go; exit; }",
        "X='T'; [ -f x ] && {\n$X; exit; }",
    ],
)
def test_a_training_in_a_branch_that_ends_the_script_counts(lines):
    with pytest.raises(UserError, match=r"run.sh:2: whether this training runs .* decides; give a script with the"):
        written(f"{lines.replace('T', COMMAND)}\n{COMMAND} data.seed=2\n")


@pytest.mark.parametrize(
    "lines",
    [
        "M=verl.trainer.main_ppo; if [ $D = Linux ]; then\npython3 -m $M a.b=1; fi",
        f"f() {{\n{COMMAND}\n}}; [ $D = Linux ] && f",
        f"f() {{ [ $D = Linux ] || return; true;\n{COMMAND}\n}}; f",
    ],
)
def test_a_training_that_may_not_run_names_what_decides(lines):
    with pytest.raises(UserError) as error:
        written(f"D=$(uname); {lines}\n")
    why = "run.sh:2: whether this training runs depends on what only a run decides; write --set D=Linux"
    assert str(error.value) == f"{why}; or give a script with the one command"


def test_a_function_that_may_be_there_is_one_line():
    with pytest.raises(UserError, match=r"run.sh:1: it depends on .*; whether run.sh:2 calls a function depends on it"):
        written(f"[ -f x ] && f() {{ Y=a; }}\nf\n{COMMAND}\n")


def test_a_variable_that_may_be_exported_may_be_seen():
    result = written(f"VERL_USE_MODELSCOPE=True; [ -f x ] && export VERL_USE_MODELSCOPE\n{COMMAND}\n")
    assert "which only a run decides" in result.no_effect["VERL_USE_MODELSCOPE"]


PRELUDE = """
u() { N=$((N + 1)); [ $N -lt 12 ] || exit; [ "${TAPE:$((N % 16)):1}" = 1 ]; }
python3() { printf '%s\\n' "${@:3}"; printf 'E=%s\\n' "$(printenv E)"; }
for TAPE in TAPES; do (unset A B C L; N=0; . ./run.sh) 2> /dev/null; echo END; done
"""
"""`u` is what only a run decides."""


def statement(random: Random, depth: int, inside: str = "") -> str:
    """A random statement of bash; `inside`: of a "loop", a "function"."""
    name, block = random.choice("ABC"), lambda inside=inside: statement(random, depth - 1, inside)
    values = ["1", "2", '"$A"', '"${B:-2}"', '"${C:=1}"', "$#", '"$2"', '"${@:2}"', '"${#L[@]}"', '"${L[*]}"']
    condition = random.choice(["u", f'[ "${name}" = 1 ]', f'[ "${name}" != 2 ]', "[ $# -gt 1 ]", "! u && f", "f"])
    value, ends = random.choice(values), {"loop": ["break", "continue"], "function": ["return", "return 1"]}
    simple = [f"{name}={value}", f"{name}+={value}", f"E={value}", f"L+=({value})", f"L=({value} {value})", "f 1"]
    simple += [
        "export E",
        *[f"unset {name}"] * (not inside),
        "shift",
        'set -- "$@" 1',
        f"set -- {value}",
        "read A <<< 2",
        "((B=3))",
    ]
    simple += [f"{name}=2 f 2", "(exit)", *ends.get(inside, []) * 3]
    if depth == 0:
        return random.choice(simple)
    loop = random.choice([f"for {name} in 1 2", "while u", "until u", f"for {name}", f"for {name} in $(seq 2)"])
    return random.choice(
        [
            f"{random.choice(simple)}\n{block()}\n{block()}",
            f"if {condition}; then\n{block()}\nelif {condition}; then\n{block()}\nfi\n{block()}",
            f"if {condition}; then\n{block()}\nelse\n{block()}\n{random.choice(['exit', 'true'])}\nfi",
            f'case "${name}" in 1) {block()} ;; 2*) {block()} ;; *) {block()} ;; esac',
            f"{condition} {random.choice(['&&', '||'])} {{ {block()}\n}}\n{block()}",
            f"{loop}; do\n{block('loop')}\n{block('loop')}\ndone",
            f"( {block('')}\n)\n{block()}",
        ]
    )


@pytest.mark.parametrize("seed", range(200))
def test_no_run_does_otherwise(seed):
    """What is known of a random script's training is so in each run of it by bash, whatever `u` comes to."""
    random = Random(seed)
    words = ['a.A="$A"', 'a.B="$B"', 'a.C="${C-none}"', 'a.n="$#"', 'a.s="$*"', 'a.m="${#L[@]}"']
    body = re.sub(r"\bf\b", "true", "\n".join(statement(random, 1, "function") for _ in range(2)))
    lines = "\n".join(statement(random, 2) for _ in range(5))
    text = f"set -- 1 2 3\nf() {{\n{body}\n}}\n{lines}\npython3 -m verl.trainer.main_ppo {' '.join(words)}\n"
    Path("run.sh").write_text(text)
    tapes = " ".join(f"{random.getrandbits(16):016b}" for _ in range(6))
    bash = ["bash", "-c", PRELUDE.replace("TAPES", tapes)]
    runs = [it.splitlines() for it in subprocess.run(bash, capture_output=True, text=True).stdout.split("END\n")[:-1]]
    try:
        launch, script = read_script(Path("run.sh"), {})
    except UserError:
        return
    known = {at: word for at, word in enumerate(launch.words) if not script.reasons_in(word)}
    seen = launch.environment.get("E", "")
    for run in filter(None, runs):
        assert {at: run[at] for at in known} == known, text
        assert len(run) == len(launch.words) + 1, text
        assert script.reasons_in(seen) or run[-1] == f"E={seen}", text


@pytest.mark.parametrize(
    "before",
    ["cd /x && git pull && ", "(git pull || true) && ", "yes | pip install x > log && ", "mkdir /x || exit 1; "],
)
def test_steps_before_a_training_are_taken_to_succeed(before):
    assert written(f"{before}{COMMAND}\n").refused == {}


WORDS = [
    ("T d.y=1 2>&1 d.z=2", ["d.y=1", "d.z=2"]),
    ("set -- d.q=1; T d.y=1 > log 2>&1 $@", ["d.y=1", "d.q=1"]),
    ('T d.y=1 &> log "d.z=2" < /dev/null d.a=3 | cat', ["d.y=1", "d.z=2", "d.a=3"]),
    ("python3 > log -m verl.trainer.main_ppo d.y=1 > log \\\n d.z=2", ["d.y=1", "d.z=2"]),
    ('run() { "$@" d.seed=7; }; run T d.y=1', ["d.y=1", "d.seed=7"]),
    ('dist() { python3 "$@" d.n=2; }; dist -m verl.trainer.main_ppo d.y=1', ["d.y=1", "d.n=2"]),
    ('log() { echo "$*"; }; log T d.y=0; T d.y=1', ["d.y=1"]),
    ("CMD='T d.y=1'; echo $CMD; printf '%s' \"$CMD\"; : $CMD; $CMD", ["d.y=1"]),
    ("T d.a=$((8%3)) d.b=$((1+7%4)) d.c=$((2==2)) d.d=$((7%4/2))", ["d.a=2", "d.b=4", "d.c=1", "d.d=1"]),
    ("G=8; ((8==G)) && Y=1; T d.y=$Y d.a=$((G*1024/2)) d.b=${X:-$((G * 2))}", ["d.y=1", "d.a=4096", "d.b=16"]),
    ("A=3; T d.a=$((-A+1)) d.b=$((-1+3)) d.c=$((-(A)+1)) d.d=$((1- -A))", ["d.a=-2", "d.b=2", "d.c=-2", "d.d=4"]),
    ("N=8; T d.a=$((-1 * N + 3)) d.b=$((N*-1+2)) d.c=$((!N + 1))", ["d.a=-5", "d.b=-6", "d.c=1"]),
    ('A=-3; T d.a=$((5-$A)) d.b=$((5-A)) d.c=$((-$A)) d.d=$(("$A" * 2))', ["d.a=8", "d.b=8", "d.c=3", "d.d=-6"]),
    ("N=4; T d.y=$(( N > 2 ? 8 : 1 )) d.z=$((N<<1)) d.w=$((2**3))", ["d.y=8", "?", "?"]),
    ("i=0; n=1; m=3; ((i++)); n=$((n+1)); T d.i=$i d.n=$n d.m=$((--m)) d.z=$((i = 5))", ["?", "d.n=2", "?", "?"]),
    ("X=1; f() { local X; Y=${X:-2}${X-3}; X=4; }; f; T d.y=$Y d.x=$X", ["d.y=23", "d.x=1"]),
    ("X=1; f() { declare X; [ a = b ] && X=2; T d.y=1 $X d.x=$X; }; f", ["d.y=1", "d.x="]),
    ("X=1; f() { local X; Y=$X; }; X=2 f; T d.y=$Y d.x=$X", ["d.y=2", "d.x=1"]),
    ("Y=1; f() { declare -g Y=2; }; f; T d.y=$Y", ["d.y=2"]),
    ("f() { g() { local Y; }; Y=5; }; f; T d.y=$Y", ["d.y=5"]),
    ("f() { Y=5; if [ a = b ]; then local Y=1; fi; (local Y=2); }; f; T d.y=$Y", ["d.y=5"]),
    ("Y=1; f() { [ -f x ] && local Y=2; Y=3; }; f; T d.y=$Y", ["?"]),
    ("Y=1; f() { [ -f x ] && return; local Y=2; Y=3; }; f; T d.y=$Y", ["d.y=1"]),
    ('Y=1; export "Y=2"; f() { local "Z=3"; W=$Z; }; f; T d.y=$Y d.z=$W d.v=${Z:-4}', ["d.y=2", "d.z=3", "d.v=4"]),
    ("set -- $(cat f) b; Y=$2; T d.y=$Y d.n=$#", ["?", "?"]),
    ("A=($(cat f) b); T d.y=${A[1]} d.z=${#A[@]}", ["?", "?"]),
    ("f() { Y=${2:-none}; }; f $NOPE b; T d.y=$Y", ["?"]),
    ("set -- $NOPE x y; shift; T d.y=$1 d.n=$#", ["?", "?"]),
    ('A=(d.a=$NOPE/x d.b=2); T "${A[@]}"', ["?", "d.b=2"]),
    ("T $(echo d.a=1 d.b=2)", ["d.a=1", "d.b=2"]),
    ("for i in $(echo 1 2); do Y=$i; done; A=($(echo a b)); T d.y=$Y d.n=${#A[@]}", ["d.y=2", "d.n=2"]),
    ("T d.y=\"$(echo 'a\n')x\"", ["d.y=ax"]),
    ('T ${X:-"d.x=a b"} ${HOME:+"d.y=a b"} ${X:-d.z=1 d.w=2}', ["d.x=a b", "d.y=a b", "d.z=1", "d.w=2"]),
    ('A=(d.x=1 "d.y=2 3"); B=(); T "${A[@]+"${A[@]}"}" "${B[@]+"${B[@]}"}" "${B[@]:-}"', ["d.x=1", "d.y=2 3", ""]),
    (
        """T d.a="${X:-'a'}" d.b=${X:-'a'} d.c="${X:-~/a}" d.d=${X:-~/a}""",
        ["d.a='a'", "d.b=a", "d.c=~/a", "d.d=/home/user/a"],
    ),
    ("""A=1; T d.a="${X:-'$A'}" d.b="${X:-"$A b"}" d.c="${X:-a\\b\\}}" """, ["?", "d.b=1 b", "d.c=a\\b}"]),
    ("T d.y={a,b} +d.z={a:1,b:2} d.x={a..c}", ["?", "?", "?"]),
    (
        'T d.y={a} d.z={"a,b"} d.x="{a,b}" +d.w=[{a:1}] d.v={"a":1}',
        ["d.y={a}", "d.z={a,b}", "d.x={a,b}", "+d.w=[{a:1}]", "d.v={a:1}"],
    ),
    ("for i in {1,2}; do Y=$i; done; T d.y=$Y", ["?"]),
    ("A=(/data/*.parquet); T d.y=${A[0]} d.n=${#A[@]}", ["?", "?"]),
    ("for f in g[12].parquet; do Y=$f; done; set -- *.x; T d.y=$Y d.z=$1", ["?", "?"]),
    ('A=*.parquet; T "$A" $A d.y=[a-b]', ["*.parquet", "?", "d.y=[a-b]"]),
    ('IFS=,; L=a,b; for i in $L; do Y=$i; done; T d.y=$Y d.z="$L" d.w=${HOME}', ["?", "d.z=a,b", "d.w=/home/user"]),
    ('A=(a b); OLD=$IFS; IFS=,; Y="${A[*]}"; IFS=$OLD; X="1 d.x=2"; T d.y=$Y d.z=$X', ["?", "d.z=1", "d.x=2"]),
    ("f() { cd /usr || return 1; mkdir -p /tmp || { Y=2; return; }; T d.y=$Y; }; Y=1; f", ["d.y=1"]),
    ("IFS=$'\\n\\t'; X='a b'; T d.x=$X", ["d.x=a b"]),
    ("for i in 1 2 # three\ndo Y=$i; done; T d.y=$Y", ["d.y=2"]),
    ('A=q; X="$A "; T d.x="${X}z" "d.y= $A  ${A} " "d.z=5$ b"', ["d.x=q z", "d.y= q  q ", "?"]),
    (
        'A=q; T d.y=1\\\nd.z=2 d.a=\\[$A\\] d.b=[\\"$A\\"] d.c=[a,$A,b]',
        ["d.y=1d.z=2", "d.a=[q]", 'd.b=["q"]', "d.c=[a,q,b]"],
    ),
    ("set -- '' b c d e f g h i j; T d.a=${1-x} d.b=$10 d.c=${10} d.d=${11-k}", ["d.a=", "d.b=0", "d.c=j", "d.d=k"]),
    ("T 'd.x=[$A]' \"d.z=<path> \" d.y=<path>", ["d.x=[$A]", "d.z=<path> ", "d.y=<path>"]),
    (
        'T d.a=${X:-[a.parquet,b]} d.b="${F:-[\'/a/b.parquet\']}" d.c=${W:-{"a":1}}',
        ["d.a=[a.parquet,b]", "d.b=['/a/b.parquet']", "d.c={a:1}"],
    ),
    ('set -- d.a=1; shift 2; T "$@"', ["d.a=1"]),
    ('set -- -b 4 d.z=3; while getopts "b:" o; do :; done; shift $((OPTIND-1)); T "$@"', ["?"]),
    ('m=5; while getopts "m:b:" o; do M=1; done; shift $((OPTIND-1)); T d.y=$m d.z=${M:-q} $@', ["d.y=5", "d.z=q"]),
    ('Y=1; read -rp "text" X <<< 7; printf -v Z %s a; T d.y=$Y d.x=$X d.z=$Z', ["d.y=1", "?", "?"]),
    ("mapfile -t A < <(echo a); IFS=, read -ra B <<< x,y; T d.a=${A[0]} d.b=${B[1]}", ["?", "?"]),
    (
        "f() { return 1; }; f || Y=2; g() { [ $1 = a ] && return 0; return 1; }; g a && Z=3; T d.y=$Y d.z=$Z",
        ["d.y=2", "d.z=3"],
    ),
    ('set -x d.a=1; T "$@"', ["d.a=1"]),
    ('set -- d.a=1; set -; set -eo pipefail; T "$@"', ["d.a=1"]),
    ('set -- d.a=1; set - d.b=2; T "$@"', ["d.b=2"]),
    ("cd /; command cd /usr; Y=$PWD; builtin cd /tmp; T d.y=$Y d.z=$(pwd)", ["d.y=/usr", "d.z=/tmp"]),
    ('cd() { builtin cd "$@"; }; cd /usr; T d.y=$PWD', ["d.y=/usr"]),
    ("f() { Y=2; }; Y=1; time f; Z=1; builtin read Z <<< 2; T d.y=$Y d.z=$Z", ["d.y=2", "?"]),
    (
        "M=/a/b/; T d.y=$(dirname $M)$(basename $M) d.z=$(basename .sh .sh) d.v=$(dirname a)",
        ["d.y=/ab", "d.z=.sh", "d.v=."],
    ),
    ('HOME=/tmp; T d.y=$(cd && pwd) d.z=$(cd -- "$(dirname -- /usr/x)" &> /dev/null && pwd)', ["d.y=/tmp", "d.z=/usr"]),
    ("basename() { echo z; }; T d.y=$(basename /a/b)", ["?"]),
    ("cd /nope || cd /usr; mkdir /tmp 2> /dev/null || Z=1; T d.y=$PWD d.z=${Z:-0}", ["?", "?"]),
    ('A=(d.a=1 d.b=2); A=d.c=3; B=""; B+=(d.d=4); T "${A[@]}" "${B[@]}"', ["d.c=3", "d.b=2", "", "d.d=4"]),
    ("A=(d.a=1 d.b=2); unset 'A[0]'; B=([0]=x); T \"${A[@]}\" d.b=${B[0]}", ["?", "?"]),
    ('Y=1; Z=1; N=Z; unset "Y"; unset $N; T d.y=${Y:-2} d.z=${Z:-2}', ["d.y=2", "d.z=2"]),
    ("""X='a"b'; case $X in a\\"b) Y=1;; esac; [[ $X == a\\"* ]] && Z=1; T d.y=$Y d.z=$Z""", ["d.y=1", "d.z=1"]),
    ('X=abcdef; A=(a b); T d.x=${X:0:3} d.a=${A[-1]} "${NEVER[@]}" d.n=${#NEVER[@]}', ["d.x=abc", "d.a=b", "d.n=0"]),
    ("cat <<EOF > f && Y=2\nY=3\nEOF\ncat <<- 'E' | cat || Z=1\n\tit's\n\tE\nT d.y=$Y", ["?"]),
    ("cat <<EOF | T d.y=1\nY=3\nEOF", ["d.y=1"]),
    ("A[0]=1 echo hi; gpus[0]=1 T d.y=1", ["d.y=1"]),
    (
        'A=q; X="$A\\ $A \\ $(echo b)"; T "d.e=$X" d.a="$A $(echo b)" d.b=" $(echo b) $((1))" d.d="${Y:- $A}"',
        ["d.e=q\\ q \\ b", "d.a=q b", "d.b= b 1", "d.d= q"],
    ),
    (
        'A=q; export V=\\[$A\\] W=$A\\,$A U="a"\\[\\]b; T d.v=$V d.w=$W d.u=$U d.l=[\\"$A\\"\\,\\\'$A\\\']',
        ["d.v=[q]", "d.w=q,q", "d.u=a[]b", "d.l=[\"q\",'q']"],
    ),
    ('V=1; V=/c/`basename /a/b`/$HOME; T d.v=$V d.w=/a`basename "/x/y z"`', ["d.v=/c/b//home/user", "d.w=/ay", "z"]),
    ('V=`echo "a \\`basename /x/b\\`"`; T d.v="$V" d.w="`basename \\"/a/b c\\"`"', ["d.v=a b", "d.w=b c"]),
    ("export V=/c/`whoami`/$HOME; V=1; V=/c/`whoami`; T d.v=$V", ["?"]),
    ("A=2; V=1; export W=$A\\\n,b Z=3; V=$A\\\n,c; T d.v=$V d.w=$W d.z=$Z", ["d.v=2,c", "d.w=2,b", "d.z=3"]),
    ("A=2; V=1\nV=$A\\\n W=3\nT d.v=$V d.w=$W", ["d.v=2", "d.w=3"]),
    (
        'A=q; V=~$A W=~/$A; T d.v=$V d.w=$W d.x=~ d.y="$A\\\n$(echo b)"',
        ["d.v=~q", "d.w=/home/user/q", "d.x=~", "d.y=qb"],
    ),
    ("T d.c=$HOME\\ b d.d=[$HOME\\,1] d.e=${HOME}\\$X", ["d.c=/home/user b", "d.d=[/home/user,1]", "d.e=/home/user$X"]),
    (
        'V=\\ ${HOME}x; A=(\\ y b); T d.v="$V" d.a="${A[*]}" \\ z d.b=\\\n\\ ""1',
        ["d.v= /home/userx", "d.a= y b", " z", "d.b= 1"],
    ),
    ('T d.a=run_$$ d.b="run_$$" d.c=\\${d.x} "d.e=\\${d.x}\\}"', ["?", "?", "d.c=${d.x}", "d.e=${d.x}\\}"]),
    ('set -- d.a=1; T d.a=${X:-`pwd`/x} d.b="${X:-`pwd`}" ${X:-$@} d.c="${X:-$#}"', ["?", "?", "?", "?"]),
    ('A="d.a=1 \\\n d.b=$HOME\\\n"; T $A d.c="$HOME\\\n"', ["d.a=1", "d.b=/home/user", "d.c=/home/user"]),
    ("""L="${L:-'["console","wandb"]'}"; T d.l=$L d.m=${M:-'["console"]'}""", ["?", 'd.m=["console"]']),
    ("A=${B:-{a:1\\}}; T d.a=$A", ["?"]),
    ('for v in $(env | cut -d= -f1); do unset "$v"; done; T d.a=1', ["d.a=1"]),
    ("T d.a=1 \\\n  `# how many` \\\n  d.b=2", ["d.a=1", "d.b=2"]),
    ("[ -d / ] && Y=1; T d.a=1", ["d.a=1"]),
    ("Y=1; [ -f x ] && f() { Y=2; }; T d.y=$Y", ["d.y=1"]),
    ('IFS=$\'\\n\\t\'; A=(a b); T d.x=$HOME d.y="${A[*]}" "${A[@]}"', ["d.x=/home/user", "?", "a", "b"]),
]
"""A line, and the words behind the module; "?" is unknown, all others are bash's own."""


@pytest.mark.parametrize(("lines", "words"), WORDS)
def test_words_are_bashs(lines, words):
    text = re.sub(r"\bT\b", "python3 -m verl.trainer.main_ppo", lines)
    Path("run.sh").write_text(f"{text}\n")
    launch, script = read_script(Path("run.sh"), {"HOME": "/home/user"})
    assert ["?" if script.reasons_in(word) else word for word in launch.words] == words
    if "?" not in words and "<path>" not in lines:
        python = """python3() { printf '%s\\0' "${@:3}" >&3; }; . ./run.sh"""
        bash = ["bash", "-c", f"exec 3> seen; {python}"]
        subprocess.run(bash, check=True, capture_output=True, env={"HOME": "/home/user", "PATH": os.environ["PATH"]})
        assert Path("seen").read_text().split("\0")[:-1] == words


CONDITIONS = [
    "[ abc = a* ]",
    "[[ abc = a* ]]",
    '[[ abc = "a*" ]]',
    "[[ abc == a?c && ! x == y ]]",
    "[ -z '' ] && [ -n a ]",
    "[ 3 -gt 2 -a 1 -eq 1 ]",
    "[ a = b -o ! c = d ]",
    "(( 7 / 2 == 3 && 1 ))",
    "! [ a = b ]",
    "{ [ a = b ] || [ c = c ]; } && true",
    "{ false; [ 1 = 1 ]; }",
    "test a != b",
    "test ! -z a",
    "true && false || true",
    "[ x ]",
    "[[ '' ]]",
    "[[ a-b == [!a]* ]]",
    '[[ Qwen3-8B == *"wen2"* ]]',
    '[[ Qwen3-8B == *"wen3"* || a = b ]]',
    '[[ $HOME/x == "$HOME"* && -n "$HOME"x ]]',
    "[ a = b -o ! c = d -a x = x ]",
    "[[ a-b == [^a]* ]]",
    "[[ b-b == [^a]* ]]",
    "[[ a = a || a = a && b = c ]]",
    "[[ a = a && c = c ]]",
    "[[ a = b && c = d || ! e = f ]]",
    "[[ ( a = a || b = c ) && e = f ]]",
    "[[ ! ( a = a && b = c ) && 3 -gt 1 ]]",
    "[[ -z '' && -n a || a = b ]]",
    "[ $((5%2)) -eq 1 ]",
    "(( 9%2 == 1 ))",
    '[ "$NOPE" -eq 0 ]',
    "[ $NOPE -lt 1 ]",
    '[ "$NOPE" -le 1 ]',
    "[[ $NOPE -eq 0 ]]",
    "[ 08 -eq 8 ]",
    "[ -n $NOPE ]",
    "[ ! -n $NOPE ]",
    "[ -z $NOPE ]",
    "[ $NOPE ]",
    "[ $NOPE != npu ]",
    '[ "$NOPE" != npu ]',
    'X="a b"; [ $X = "a b" ]',
    'X="a b"; [ -n $X ]',
    'X="x = x"; [ $X ]',
    "test ! $NOPE = npu -o a = a",
    '[ "$NOPE" = a -o ! b = c -a "x" ]',
]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_conditions_are_bashs(condition):
    lines = f"if {condition}; then Y=yes; else Y=no; fi"
    bash = subprocess.run(["bash", "-c", f"{lines}; echo $Y"], capture_output=True, text=True, check=True)
    assert train_files(lines) == bash.stdout.strip()


@pytest.mark.parametrize("value", ["gpu", "gpu-2", "npu", "a*", "x"])
def test_case_is_bashs(value):
    lines = f"X='{value}'\ncase \"$X\" in gpu*|cuda) Y=1 ;; [m-o]pu) Y=2 ;; 'a*') Y=3 ;; *) Y=4 ;; esac"
    bash = subprocess.run(["bash", "-c", f"{lines}; echo $Y"], capture_output=True, text=True, check=True)
    assert train_files(lines) == bash.stdout.strip()


# What is put right, and what grows


def test_stray_braces_are_one_warning_each():
    Path("run.sh").write_text(f"{COMMAND} actor_rollout_ref.model.path=/m}} data.train_files=/a/b }}\n}}\n")
    result = of("run.sh")
    assert result.refused == {}
    assert (result.values["actor_rollout_ref.model.path"], result.values["data.train_files"]) == ("/m", "/a/b")
    assert [note for note in result.notes if "stray" in note] == [
        "run.sh:1: actor_rollout_ref.model.path: a stray } is left out",
        "run.sh:1: a stray } is left out",
    ]


def test_a_list_may_begin_with_a_variable():
    lines = f"A=/a; B=/b\n{COMMAND} data.train_files=[$A,$B]\n"
    result = written(lines)
    assert result.values["data.train_files"] == "[/a,/b]"


def test_a_script_may_end_in_a_backslash():
    assert written(f"{COMMAND} \\").refused == {}


@pytest.mark.parametrize("link", ["${{trainer.k{0}}}${{trainer.k{0}}}", "${{.k{0}}}${{.k{0}}}", "a${{trainer.k{0}}}b"])
def test_interpolations_that_grow_are_one_line(link):
    chain = [f"+trainer.k{i}={link.format(i + 1)}" for i in range(150)]
    with pytest.raises(UserError, match="its interpolations grow without end; give the value itself"):
        of(None, *KEYS, *chain, "+trainer.k150=aa")


def test_interpolations_in_the_name_of_another_are_one_line():
    with pytest.raises(UserError, match="its interpolations nest; give the value itself"):
        of(None, *KEYS, "+trainer.a='${trainer.${trainer.b}}'", "+trainer.b=c")


def test_a_file_of_verls_for_a_group_is_refused_with_its_keys():
    result = of(None, *KEYS, "critic=mine", "critic.optim.lr=1e-5")
    assert set(result.refused) == {"critic"}
    assert result.refused["critic"] == "it chooses mine, a file of verl's for the group critic; write its keys"
    assert "it chooses far" in of(None, *KEYS, "+remote=far", "+remote.port=1").refused["remote"]


# A fragment, and the refusals of --json


def test_a_fragment_says_what_is_missing_first(capsys):
    words = ["data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
    words += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16"]
    assert main(["from-verl", "--", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: actor_rollout_ref.rollout.n: is missing, and verl's default is 1: a fragment goes be"
    )
    assert of(SCRIPTS / "npu_aqn_launch.sh", *words).refused == {}


def test_json_of_a_refusal_names_file_line_and_reason(capsys):
    Path("run.sh").write_text(f"# data.seed=1\n{COMMAND} \\\n  data.seed=$(date +%s) \\\n  reward_model.enable=True\n")
    assert main(["from-verl", "--json", "run.sh"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert [(it["file"], it["line"], it["key"]) for it in found["refusals"]] == [
        ("run.sh", 3, "data.seed"),
        ("run.sh", 4, "reward_model.enable"),
    ]
    assert [it["reason"] for it in found["refusals"]] == list(found["refused"].values())


def test_json_of_a_script_that_cannot_be_read(capsys):
    Path("run.sh").write_text(f"A=1\nfor i in 1 2; do\n{COMMAND}\ndone\n")
    with pytest.raises(UserError, match="a loop around the training"):
        main(["from-verl", "--json", "run.sh"])
    found = json.loads(capsys.readouterr().out)
    (refusal,) = found["refusals"]
    assert (refusal["file"], refusal["line"], refusal["key"]) == ("run.sh", 3, "")
    assert "a loop around the training" in refusal["reason"]
    assert (found["translated"], found["command"], found["notes"]) == ({}, "", [])
