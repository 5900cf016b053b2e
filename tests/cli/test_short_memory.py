"""Where memory is short, who only looks at a server ends before it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import anabranch

from anabranch.core.errors import OUTCOMES, TooLarge

OF_THIS = Path("/proc/self/oom_score_adj")
PROGRAM = f"""
import sys
from anabranch.cli.main import main
sys.argv[0] = "anabranch"
try:
    main()
finally:
    print(open("{OF_THIS}").read(), end="")
"""


def test_a_machine_too_small_for_its_model_is_told_so(tmp_path: Path) -> None:
    model = 'def model(self): return {"w": numpy.broadcast_to(numpy.float32(0), (10**13,))}'
    app = f"import anabranch, numpy\nclass App(anabranch.App):\n    {model}\n    def data(self, shard): ...\n"
    (tmp_path / "large.py").write_text(app)
    done = anabranch(tmp_path, "client", "large.py:App", "--server", "127.0.0.1:1", "--state-dir", "state")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: no memory: Unable to allocate 36.4 TiB")
    assert "give the process more, or take a smaller model" in line
    assert done.returncode == OUTCOMES[TooLarge].exit_code


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone bounds what a process maps")
def test_a_process_that_may_start_no_more_threads_is_told_so(tmp_path: Path) -> None:
    """Their stacks would be larger than its memory, which holds for root as well."""
    limited = 'ulimit -s 8000000; ulimit -v 4000000; exec "$@"'
    program = [sys.executable, "-m", "anabranch.cli.main"]
    words = ["sh", "-c", limited, "sh", *program, "simulate", "--set", "run.workload=synthetic"]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: no more threads may be started: allow more processes")
    assert done.returncode == OUTCOMES[TooLarge].exit_code


@pytest.mark.skipif(not OF_THIS.exists(), reason="Linux alone ranks processes for when memory is short")
@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("health --help", True),
        ("admin status --help", True),
        ("keeper health --help", True),
        ("keeper --help", False),
        ("server --help", False),
        ("client --help", False),
    ],
)
def test_who_looks_on_is_the_first_to_go(words: str, first: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words.split()],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == ("1000" if first else OF_THIS.read_text().strip())


def test_a_check_of_health_imports_little() -> None:
    """A container asks every few seconds, of the memory that its server has."""
    code = PROGRAM.replace(f'print(open("{OF_THIS}").read(), end="")', "print(*sys.modules, sep=chr(10))")
    words = [sys.executable, "-c", code, "health", "127.0.0.1:1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert "127.0.0.1:1 does not serve" in done.stderr
    imported = {name.partition(".")[0] for name in done.stdout.split()}
    assert {"grpc", "typer"} <= imported
    assert not imported & {"numpy", "google", "cattrs", "cryptography", "sqlalchemy", "torch"}
