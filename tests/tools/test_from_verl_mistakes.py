"""Mistakes in commands, scripts and configurations of verl: each is one line on stderr and exit code 2."""

import sys
from pathlib import Path
from random import Random

import pytest

from perl.__main__ import main
from perl.base.errors import UserError, report_errors
from perl.tools.from_verl.shell import read_script

GOOD = (
    "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
)
COMMAND = f"python3 -m verl.trainer.main_ppo {GOOD}"

WORDS = {
    "nothing": ([], "give a script"),
    "no such script": (["nowhere.sh"], "nowhere.sh: no such file"),
    "no such configuration": (["nowhere.yaml"], "no such file"),
    "one word": (["train"], "no such file"),
    "a folder": (["/tmp"], "/tmp: a folder; give a script"),
    "a rate below 0": ([*GOOD.split(), "actor_rollout_ref.actor.optim.lr=-1"], "optim.lr=-1: -1 is below 0"),
    "no data": ([*GOOD.split(), "data.train_files="], "data.train_files=: it is empty"),
    "unknown key": (["--", *GOOD.split(), "data.train_batchsize=64"], "did you mean data.train_batch_size?"),
    "key of another group": (
        ["--", *GOOD.split(), "actor_rollout_ref.actor.lr=1e-6"],
        "did you mean actor_rollout_ref.actor.optim.lr?",
    ),
    "unknown key alone": (["--", "data.train_batchsize=64"], "did you mean data.train_batch_size?"),
    "unknown new key": (["--", *GOOD.split(), "+trainer.nosie_injection.enabled=True"], "verl has no such key"),
    "no equals sign": (["--", *GOOD.split(), "trainer.nnodes"], "a setting is written KEY=VALUE"),
    "a flag": (["--", *GOOD.split(), "--trainer.nnodes=1"], "--trainer.nnodes: not one of --config-name"),
    "an option without its value": (["--", *GOOD.split(), "--config-name"], "its value is missing"),
    "a configuration that is not there": (["--", *GOOD.split(), "--config-name=mine"], "no mine.yaml in"),
    "an open bracket": (["--", *GOOD.split(), "trainer.logger=[console"], "Hydra cannot read the value"),
    "an open quote": (["--", *GOOD.split(), "data.truncation='left"], "Hydra cannot read the value"),
    "a sweep": (["--", *GOOD.split(), "data.seed=1,2"], "would start one run for each"),
    "a tilde": (["--", *GOOD.split(), "data.train_files=~/train.parquet"], "write $HOME"),
    "an empty word": (["--", *GOOD.split(), ""], "an empty word"),
    "a space in the key": (["--", *GOOD.split(), "data train_files=a"], "is no key"),
    "an interpolation that leads nowhere": (
        ["--", *GOOD.split(), "data.train_files=${data.nowhere}"],
        "Interpolation key 'data.nowhere' not found",
    ),
    "a variable of nobody": (["--", *GOOD.split(), "data.train_files=${oc.env:NOBODY_SETS_IT}"], "NOBODY_SETS_IT"),
    "a text for a number": (["--", *GOOD.split(), "actor_rollout_ref.actor.optim.lr=fast"], "fast is not a number"),
    "half a prompt": (["--", *GOOD.split(), "data.train_batch_size=64.5"], "must be a whole number from 1"),
    "no devices": (["--", *GOOD.split(), "trainer.n_gpus_per_node=0"], "0 is not a whole number from 1"),
    "a mini batch that does not divide": (
        ["--", *GOOD.split(), "data.train_batch_size=100", "actor_rollout_ref.actor.ppo_mini_batch_size=48"],
        "48 does not divide the 100 prompts of a rollout",
    ),
    "a micro batch that does not divide": (
        ["--", *GOOD.split(), "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3"],
        "3 does not divide the 128 completions",
    ),
    "no micro batch": (["--", *GOOD.split()[:2]], "verl has no default"),
    "a group of one": (
        ["--", GOOD.split()[0], GOOD.split()[2], "actor_rollout_ref.rollout.n=1"],
        "a group has 2 or more",
    ),
    "a critic that is updated otherwise": (
        ["--", "algorithm.adv_estimator=gae", *GOOD.split()[1:], "critic.ppo_epochs=2"],
        "it differs from actor_rollout_ref.actor.ppo_epochs, 1",
    ),
    "a value where there is a group": (["--", *GOOD.split(), "data.train_files.x=1"], "data.train_files"),
    "an unknown estimator": (["--", *GOOD.split()[1:], "algorithm.adv_estimator=grop"], "grop"),
    "an unknown truncation": (["--", *GOOD.split(), "data.truncation=both"], "both: error, left, right, middle"),
    "an unknown logger": (["--", *GOOD.split(), "trainer.logger=[console,vemlp]"], "vemlp"),
    "a folder as recipe": (["--output", ".", "--", *GOOD.split()], "is a folder"),
    "a recipe nowhere": (["--output", "no/where/r.yaml", "--", *GOOD.split()], "no such folder no/where"),
    "an unknown flag": (["--ouput", "r.yaml", "--", *GOOD.split()], "did you mean --output?"),
    "no processes": (["--num_processes", "0", "--", *GOOD.split()], "--num_processes 0"),
    "a negative factor": (["--learning_rate_factor", "-1", "--", *GOOD.split()], "--learning_rate_factor -1"),
}
WORDS_32 = " ".join(map(str, range(32)))
LOOPS = "".join(f"for {name} in {WORDS_32}; do\n" for name in "abcdef")
ENDLESS = "SCRIPT: too long to follow"
SCRIPTS = {
    "nothing to train": ("echo hello\n", "no command of verl in it"),
    "another program": ("python3 -m verl.trainer.fsdp_sft_trainer a=b\n", "does not train with rewards"),
    "two trainings": (f"{COMMAND}\n{COMMAND} data.seed=1\n", "several trainings (SCRIPT:1, SCRIPT:2)"),
    "an open quote": (f'{COMMAND} data.seed="1\n', "not bash"),
    "a broken if": (f"if true; then\n{COMMAND}\n", "not bash"),
    "a space behind the backslash": (
        f"{COMMAND} \\ \n  data.seed=1\n",
        "SCRIPT:2: data.seed stands in a command of its own",
    ),
    "a comment in between": (
        f"{COMMAND} \\\n  data.seed=1 \\\n  # data.shuffle=True \\\n  data.truncation=left\n",
        "SCRIPT:4: data.truncation stands in a command of its own",
    ),
    "a loop": (f"for i in 1 2; do\n  {COMMAND} data.seed=$i\ndone\n", "SCRIPT:2: a loop around the training"),
    "a condition of the machine": (f"if [ -d /data ]; then\n  {COMMAND}\nfi\n", "SCRIPT:2: whether this training runs"),
    "a variable of nobody": (f"{COMMAND} data.train_files=$NOBODY/a.parquet\n", "SCRIPT:1: the variable NOBODY is set"),
    "a whole setting of nobody": (f"{COMMAND} $NOBODY\n", "a whole KEY=VALUE depends on it"),
    "an output": (f"{COMMAND} data.train_batch_size=$(cat size)\n", "SCRIPT:1: $(cat size) is only known to a run"),
    "a division by zero": (f"{COMMAND} data.seed=$((1 / 0))\n", "cannot be computed"),
    "eval": (f'eval "{COMMAND}"\n', "SCRIPT:1: eval"),
    "another user's shell": (
        f'su me -c "{COMMAND}"\n',
        "SCRIPT:1: su: the command stands in a text; write it out",
    ),
    "behind a condition of the machine": (
        f"[ -f x ] && A=1 && B=2\n{COMMAND} data.train_files=$A\n",
        "SCRIPT:1: it depends on '[ -f x ] && A=1'",
    ),
    "an exit": (f'if [ -z "" ]; then\n  exit 1\nfi\n{COMMAND}\n', "SCRIPT:2: the script ends here"),
    "a variable in a quoted empty word": (f'EMPTY=\n{COMMAND} "$EMPTY"\n', "a variable in quotes may be empty"),
    "not text": (b"\xff\xfe\x00", "cannot be read as a script: it is no text"),
    "an endless function": (f"f() {{ f; }}\nf\n{COMMAND}\n", "calls itself"),
    "an endless shell": ('X=\'bash -c "$X" # main_ppo\'\nexport X\nbash -c "$X"\n', "SCRIPT:3: bash: the comm"),
    "a text that doubles": (f"A=aaaa\nfor i in {WORDS_32}; do A=$A$A; done\n{COMMAND}\n", ENDLESS),
    "an array that doubles": (f'A=(a a)\nfor i in {WORDS_32}; do A+=("${{A[@]}}"); done\n{COMMAND}\n', ENDLESS),
    "loops in loops": (LOOPS + "X=$a\n" + "done\n" * 6 + COMMAND, ENDLESS),
    "functions that call functions": (
        "".join(f"f{i}() {{ {f'f{i + 1}; ' * 10} }}\n" for i in range(15)) + f"f0\n{COMMAND}\n",
        ENDLESS,
    ),
    "functions that call functions in each branch": (
        "".join(f"f{i}() {{ if [ -f x ]; then f{i + 1}; else f{i + 1}; fi; }}\n" for i in range(18))
        + f"f0\n{COMMAND}\n",
        ENDLESS,
    ),
    "functions that call functions on both sides": (
        "".join(f"f{i}() {{ f{i + 1} && f{i + 1}; }}\n" for i in range(40)) + f"f40() {{ :; }}\nf0\n{COMMAND}\n",
        ENDLESS,
    ),
    "a function that does nothing at length": (
        "f() { if false; then\n" + "A=1\n" * 40000 + "fi; }\n" + LOOPS + "f\n" + "done\n" * 6 + COMMAND,
        ENDLESS,
    ),
    "loops whose turns go on changing": (
        "".join(f"A{i}=0\n" for i in range(3000))
        + "while u; do\n"
        + "".join(f"[ $A{i} = 1 ] && A{i + 1}=1\n" for i in reversed(range(2999)))
        + f"A0=1\ndone\n{COMMAND}\n",
        ENDLESS,
    ),
    "loops of which only a run decides": ("while u; do\n" * 60 + "A=1\n" + "done\n" * 60, "no command of verl in it"),
    "a test of 50,000 parts": (f"if [ {'a -o ' * 50000}a ]; then A=1; fi\n{COMMAND}\n", "nest too deep"),
    "a text that is put in 80,000 times": (f"A={'a' * 1000}\necho {'$A' * 80000}\n{COMMAND}\n", ENDLESS),
    "a home that is long": (f"HOME=/{'a' * 10000}\necho {'~ ' * 50000}\n{COMMAND}\n", ENDLESS),
    "the length of a text again and again": ("A=aaaa\n" + "A=$A$A\n" * 18 + "echo ${#A} ${A:+b}\n" * 5000, ENDLESS),
    "subshells of many variables": ("".join(f"a{i}=\n" for i in range(10000)) + "(:)\n" * 10000, ENDLESS),
    "words that could be programs": (f"echo {'a.py ' * 40000}\n", "no command of verl in it"),
    "a text put into itself": (f"A={'a' * 60000}\nB=${{A//a/{'b' * 60000}}}\n{COMMAND}\n", ENDLESS),
    "a long pattern": (f"A={'a' * 99999}\nB=${{A##*a*a*b}}\n{COMMAND}\n", ENDLESS),
    "powers of powers": ("x=9\n" + "x=$((x**64))\n" * 4 + f"{COMMAND} data.seed=$x\n", "$((x**64)) cannot be computed"),
    "commands in commands": (
        f"A={'$(' * 3000}echo{')' * 3000}\n{COMMAND}\n",
        "SCRIPT: brackets, commands or conditions",
    ),
    "brackets in brackets": (f"{'((' * 3000}1{'))' * 3000}\n{COMMAND}\n", "SCRIPT: brackets, commands or conditions"),
    "conditions in conditions": ("if true; then\n" * 1500 + "A=1\n" + "fi\n" * 1500 + COMMAND, "nest too deep"),
    "a number of 5,000 digits": (f"shift {'9' * 5000}\n{COMMAND} data.seed=$(({'9' * 5000}))\n", "cannot be computed"),
    "a long script": ("A=1\n" * 70000 + COMMAND, "SCRIPT: more than 256 KiB"),
    "long settings": (f"{COMMAND}{' data.seed=1' * 2000}\n", "settings of more than 16,384 characters"),
    "marks of an unknown": (f"A='\ue0000\ue001'\n{COMMAND} trainer.nnodes=$A \n", "Hydra cannot read the value"),
}
CONFIGURATIONS = {
    "not YAML": ("a: [1\n", "not YAML"),
    "a list": ("- a\n- b\n", "must hold keys"),
    "an unknown base": ("defaults:\n  - ppo_traner\n", "did you mean ppo_trainer?"),
    "an unknown key": (
        "algorithm: {adv_estimator: grpo}\nactor_rollout_ref:\n  rollout: {n: 4}\n"
        "  actor: {ppo_micro_batch_size_per_gpu: 4, ppo_minibatch_size: 64}\n",
        "did you mean actor_rollout_ref.actor.ppo_mini_batch_size?",
    ),
    "itself as base": ("defaults:\n  - config\n", "lead back to itself"),
    "an unfinished interpolation": ("data: {train_files: '${data'}\n", "not YAML"),
}  # fmt: skip


def mistake(capsys, *words: str) -> str:
    """The one line on stderr that these words end with; `main` is what `python -m perl` runs."""
    with pytest.raises(SystemExit) as end, report_errors():
        sys.exit(main(["from-verl", *words]))
    assert end.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("words", "said"), WORDS.values(), ids=WORDS)
def test_a_mistake_in_words_is_one_line(capsys, words, said):
    assert said in mistake(capsys, *words)


@pytest.mark.parametrize(("text", "said"), SCRIPTS.values(), ids=SCRIPTS)
def test_a_mistake_in_a_script_is_one_line(capsys, tmp_path, text, said):
    script = tmp_path / "run.sh"
    script.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert said.replace("SCRIPT", "run.sh") in mistake(capsys, "run.sh")


@pytest.mark.parametrize(("text", "said"), CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_a_mistake_in_a_configuration_is_one_line(capsys, tmp_path, text, said):
    (tmp_path / "config.yaml").write_text(text)
    assert said in mistake(capsys, "config.yaml")


def test_nothing_is_written_where_something_is_refused(capsys, tmp_path):
    mistake(capsys, "--output", "r.yaml", "--", *GOOD.split(), "reward_model.enable=True")
    assert list(tmp_path.iterdir()) == []


def test_a_torn_script_is_a_mistake_and_no_traceback(tmp_path):
    """Scripts with characters lost, doubled or put in: read, or refused in one line."""
    wild = sorted((Path(__file__).parents[1] / "verl" / "wild").glob("*.sh"))
    random = Random(0)
    read = refused = 0
    for _ in range(300):
        text = random.choice(wild).read_text()
        for _ in range(random.randint(1, 4)):
            at, other = random.randrange(len(text)), random.randrange(len(text))
            put = random.choice([*"$\"'`\\(){}[]=~+@#|;<*!\n", "${", "$((", "&&", text[other : other + 40]])
            text = text[:at] + put + text[at + random.choice([0, 0, 1, 30]) :]
        (tmp_path / "run.sh").write_text(text)
        try:
            read_script(tmp_path / "run.sh", {"HOME": "/home/user"})
            read += 1
        except UserError:
            refused += 1
    assert min(read, refused) > 50


def test_a_configuration_that_is_too_large_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("a: [" + "1, " * 100_000 + "1]\n")
    assert "config.yaml: 300,007 bytes; a configuration has 262,144 at most" in mistake(capsys, "config.yaml")
