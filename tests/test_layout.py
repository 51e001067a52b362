"""The rules of the tree: which way imports flow, who may know the device, what a file may be called."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "perl").rglob("*.py"))

# Lower may not import higher; packages on one level may import each other only where ALLOWED says so.
LEVELS = [
    {"base", "records", "algorithms", "device", "models", "prompts", "config"},
    {"tasks", "grading"},
    {"rewards", "engines", "adapters", "noise", "scoring", "environments"},
    {"workers", "runs"},
    {"training", "finetuning", "evaluation", "reports"},
    {"tools", "train", "sft", "eval", "__main__"},
]
NEVER_EACH_OTHER = LEVELS[4]


def part(path: Path) -> str:
    return path.relative_to(ROOT / "perl").parts[0].removesuffix(".py")


def level(name: str) -> int:
    return next(index for index, names in enumerate(LEVELS) if name in names)


def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(path: Path) -> set[str]:
    """Modules below perl/ that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            # `from perl.tools import launch` imports the module launch, not a name out of perl/tools/__init__.py.
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if is_module(name) else node.module for name in inner}
    return {name for name in found if name.startswith("perl.")}


def test_imports_flow_down_only():
    wrong = []
    for path in FILES:
        if path == ROOT / "perl" / "__init__.py":
            continue
        here = part(path)
        for module in imports(path):
            there = module.split(".")[1]
            if not any(there in names for names in LEVELS):
                continue  # perl.__version__
            if level(there) > level(here) or (here != there and {here, there} <= NEVER_EACH_OTHER):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_circle_of_imports():
    modules = {module_name(path): path for path in FILES}
    graph = {name: {m for m in imports(path) if m in modules and m != name} for name, path in modules.items()}
    done, on_path = set(), []

    def visit(name):
        if name in on_path:
            pytest.fail(" -> ".join([*on_path[on_path.index(name) :], name]))
        if name in done:
            return
        on_path.append(name)
        for other in sorted(graph[name]):
            visit(other)
        on_path.pop()
        done.add(name)

    for name in sorted(graph):
        visit(name)


def code_without_comments_and_docstrings(path: Path) -> str:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [n for n in body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))] or [
                ast.Pass()
            ]
    return ast.unparse(tree)


def test_only_device_and_doctor_know_the_kinds_of_device():
    """A comparison with "npu" or "cuda", or torch.npu and torch.cuda, belongs in perl/device."""
    pattern = re.compile(r"torch\.(npu|cuda)\b|import torch_npu|[=!]=\s*'(npu|cuda)'|\bin\s*[(\[{]\s*'(npu|cuda)'")
    allowed = (ROOT / "perl" / "device", ROOT / "perl" / "tools" / "doctor")
    wrong = [
        str(path.relative_to(ROOT))
        for path in FILES
        if not any(path == a or a in path.parents for a in allowed)
        and pattern.search(code_without_comments_and_docstrings(path))
    ]
    assert wrong == []


def test_only_device_imports_the_kernels():
    users = [str(path.relative_to(ROOT)) for path in FILES if "perl.device.kernels" in imports(path)]
    assert users == ["perl/device/__init__.py"]


def test_nothing_in_perl_hides_another_module():
    """`python perl/eval.py` puts perl/ first on sys.path."""
    others = {"datasets", "trl", "peft", "vllm", "torch", "transformers", "accelerate", "deepspeed", "ray", "wandb"}
    names = {p.name.removesuffix(".py") for p in (ROOT / "perl").iterdir() if not p.name.startswith("_")}
    assert names & (others | set(sys.stdlib_module_names)) == set()


def test_one_file_alone_imports_trls_internals():
    users = [str(p.relative_to(ROOT)) for p in FILES if re.search(r"\btrl\.(models|trainer)\b", p.read_text())]
    assert users == ["perl/training/policy.py"]


def test_no_file_that_belongs_here_is_ignored_by_git():
    """A pattern such as `outputs/` without a leading slash once kept test data out of every clone."""
    command = ["git", "-C", str(ROOT), "ls-files", "--others", "--ignored", "--exclude-standard", "perl", "tests"]
    found = subprocess.run([*command, "scripts", "docs", "assets", "recipes"], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"not a git checkout: {found.stderr.strip()}")
    assert [name for name in found.stdout.splitlines() if "__pycache__" not in name] == []
