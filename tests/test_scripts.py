"""The numbered scripts as scripts, and the README's word about them.    Run: ./run_tests.sh tests/test_scripts.py"""

import ast
import re
import shlex
import subprocess
import sys

import pytest
from conftest import REPO, load_script, processor_seconds, run_script

SCRIPTS = sorted(p.name for p in REPO.glob("0[0-9]_*.py"))
FIELDS = ("Run", "Reads", "Writes", "Needs", "Fails", "Next")


def test_all_stages_are_there():
    """01 to 08 exist, one file each."""
    assert [s[:2] for s in SCRIPTS] == [f"{i:02d}" for i in range(1, 9)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_answers_in_a_second(script):
    """--help exits 0 within a second of a processor, names the stage's purpose, and an abbreviated or unknown flag is exit 2."""
    with processor_seconds(1):
        answer = run_script(script, "--help")
    assert answer.returncode == 0
    assert load_script(script.removesuffix(".py")).__doc__.splitlines()[0].split(":")[0][:40] in " ".join(answer.stdout.split())
    assert run_script(script, "--no-such-flag").returncode == 2


@pytest.mark.parametrize("script", SCRIPTS)
def test_docstring_has_its_fields(script):
    """The header has one sentence, then Run, Reads, Writes, Needs, Fails, Next, in this order."""
    doc = load_script(script.removesuffix(".py")).__doc__
    found = [m for m in re.findall(r"^(\w+):", doc, re.M) if m in FIELDS]
    assert doc.splitlines()[0].endswith(".") and tuple(found) == FIELDS


def imported(path) -> set[str]:
    """The common/ modules that a file imports anywhere, functions included, and what those import in turn."""
    found, queue = set(), [path]
    while queue:
        for node in ast.walk(ast.parse(queue.pop().read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "common":
                names = {a.name for a in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("common."):
                names = {node.module.split(".")[1]}
            else:
                continue
            queue += [REPO / "common" / f"{n}.py" for n in names - found]
            found |= names
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_needs_lists_the_imports(script):
    """`Needs:` names exactly the common/ files that the script imports, directly or through another, and the stats file with the normalizer."""
    doc = load_script(script.removesuffix(".py")).__doc__
    needs = re.search(r"^Needs:(.*?)^Fails:", doc, re.M | re.S)[1]
    expected = {f"common/{n}.py" for n in imported(REPO / script)}
    if "common/quantile.py" in expected:
        expected.add("common/libero_stats_20fps.json")
    assert set(re.findall(r"common/\w+\.(?:py|json)", needs)) == expected


def test_scripts_import_no_scripts_and_common_makes_no_circles():
    """A script imports from common/ alone; a common module never reaches itself."""
    for module in (REPO / "common").glob("*.py"):
        assert module.stem not in imported(module), module
    for script in SCRIPTS:
        text = (REPO / script).read_text()
        assert not re.search(r"import_module|spec_from_file_location|from tests|import tests", text), script


@pytest.mark.parametrize("script", ["01_check_env.py", "03_base_to_dcp.py", "05_train_fsdp2.py", "06_convert_ckpt.py"])
def test_json_replaces_nothing_but_json(script, tmp_path, capsys):
    """--json on a file of something else is a usage error that names it, and the file stays; on JSON, or nothing, it is taken."""
    stage, precious = load_script(script.removesuffix(".py")), tmp_path / "precious.md"
    precious.write_text("# mine")
    with pytest.raises(SystemExit) as caught:
        stage.parse_args(["--json", str(precious)])
    assert caught.value.code == 2 and "precious.md exists and is not JSON" in capsys.readouterr().err and precious.read_text() == "# mine"
    precious.write_text("{}")
    for path in (precious, tmp_path / "new.json"):
        assert stage.parse_args(["--json", str(path), *(["--sizes"] if script[:2] == "06" else [])]).json == path


def snapshot(folder):
    return sorted((str(p.relative_to(folder)), p.stat().st_mtime_ns) for p in folder.rglob("*"))


def test_dry_runs_change_nothing(walk, tmp_path):
    """--dry-run of every stage prints a plan, exits 0 and leaves both the inputs and the outputs as they were."""
    out, base = tmp_path / "out", walk / "models/Cosmos3-Nano"
    lines = {
        "01_check_env.py": ["--work", out],
        "02_cache_models.py": ["download", "--tiny", "--work", out],
        "03_base_to_dcp.py": ["--base", base, "--out", out],
        "04_fetch_libero.py": ["encode", "--data", walk / "data", "--base", base, "--out", out],
        "05_train_fsdp2.py": ["--base", base, "--cache", walk / "cache", "--out", out, "--global-batch", 8, "--micro-batch", 4],
        "06_convert_ckpt.py": ["--src", walk / "run/checkpoints/global_step_40", "--base", base, "--out", out],
        "07_read_tb.py": [walk / "run", "--csv", out],
        "08_eval_policy.py": ["openloop", "--model", walk / "policy/model_diffusers", "--data", walk / "data", "--out", out],
    }
    assert sorted(lines) == SCRIPTS
    before = snapshot(walk)
    extra = [["fetch", "--tiny", "--data", out], ["check", "--data", walk / "data"], ["stats", "--data", walk / "data", "--out", out]]
    model = ["--model", walk / "policy/model_diffusers"]
    evals = [["latency", *model], ["serve", *model], ["closedloop", "--out", out], ["closedloop", "--setup-sim", "--sim", out]]
    for script, argv in [*lines.items(), *(("04_fetch_libero.py", a) for a in extra), *(("08_eval_policy.py", a) for a in evals)]:
        done = run_script(script, *argv, "--dry-run")
        assert done.returncode == 0 and "[plan]" in done.stdout and "[done]" not in done.stdout, (script, argv, done.stderr)
    assert not out.exists() and snapshot(walk) == before and not list(tmp_path.iterdir())


def test_run_all_refuses_unknown_flags():
    """A misspelt flag of run_all.sh is exit 2 before anything runs; --help prints the header."""
    assert subprocess.run(["./run_all.sh", "--gpu", "8"], check=False, cwd=REPO, capture_output=True).returncode == 2
    text = subprocess.run(["./run_all.sh", "--help"], check=True, cwd=REPO, capture_output=True, text=True).stdout
    assert "tmux new-session" in text and "tee -a" in text and "--global-batch" in text


def commands(file):
    """The command lines of a markdown file's bash blocks, comments cut."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (REPO / file).read_text(), re.M | re.S)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("file", ["README.md"])
def test_documented_commands_parse(file):
    """Each command of the README names an existing file, and its flags parse with that script's own parser."""
    seen = 0
    for words in commands(file):
        script = next((w for w in words if w.endswith((".py", ".sh"))), None)
        assert script and (REPO / script).is_file(), words
        seen += 1
        if re.match(r"0\d_", script):
            load_script(script.removesuffix(".py")).parse_args(words[words.index(script) + 1 :])
    assert seen >= 11


def test_wrong_input_is_a_message_and_no_traceback(tmp_path):
    """A base, a checkpoint, a cache, a run that do not exist: exit 3, one [FAIL] line with all three parts, no traceback."""
    nothing = tmp_path / "nothing"
    for argv in (
        ["03_base_to_dcp.py", "--base", nothing, "--out", tmp_path / "o"],
        ["04_fetch_libero.py", "check", "--data", nothing],
        ["04_fetch_libero.py", "encode", "--data", nothing, "--base", nothing, "--out", tmp_path / "o"],
        ["05_train_fsdp2.py", "--base", nothing, "--cache", nothing, "--out", tmp_path / "o"],
        ["06_convert_ckpt.py", "--src", nothing, "--base", nothing, "--out", tmp_path / "o"],
        ["07_read_tb.py", nothing],
        ["08_eval_policy.py", "openloop", "--model", nothing, "--out", tmp_path / "o"],
        ["08_eval_policy.py", "closedloop", "--policy", "zero", "--sim", nothing, "--out", tmp_path / "o"],
    ):
        done = run_script(*argv)
        assert done.returncode == 3, (argv, done.stderr)
        assert re.fullmatch(r"\[FAIL\] \w+: expected .*; found .*; to mend: .*\n", done.stderr), (argv, done.stderr)
    assert not list(tmp_path.iterdir())


def test_python_version_is_pinned():
    """.python-version, the interpreter of the tests and requirements.txt agree on 3.12."""
    assert (REPO / ".python-version").read_text().strip() == "3.12" == f"{sys.version_info[0]}.{sys.version_info[1]}"
