"""docs/results.md: runs side by side, in every kind of file; docs/simulator.md: a file that names many."""

import re

from pages import ROOT
from walking import Walk, Write, also, types

SMALL = """
[run]
workload = "synthetic"
updates_max = 12
[fleet]
clients = 4
examples_per_client = 40
"""
EQUAL = "when the run that came least far had ended"


def block(page: str, begins: str) -> str:
    """The block of settings of a page with this line in it."""
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    (found,) = (text for text in blocks if f"\n{begins}\n" in f"\n{text}")
    return str(found)


COMPARED = Walk(
    "runs side by side",
    page="docs/results.md",
    needs="figures",
    steps=(
        Write("run.toml", SMALL),
        *(
            also(
                f"anabranch simulate run.toml --strategy {rule}"
                f" --set run.seed={seed} --out runs/{rule}-{seed}"
            )
            for rule in ("fedbuff", "fedasync")
            for seed in (1, 2)
        ),
        types("anabranch compare", says=EQUAL),
        also("grep -q 'At equal time' compare.html"),
        also("grep -q toprule table.tex"),
        also("grep -q final_accuracy_std rows.csv"),
        also("grep -q '^<svg' curves.svg"),
        also("head -c 4 curves.png | grep -q PNG"),
    ),
)

SWEPT = Walk(
    "a file that names many runs",
    needs="base",
    steps=(
        Write("run.toml", SMALL + block("docs/simulator.md", "[sweep]")),
        also("anabranch simulate run.toml", says=EQUAL),
        also("test $(ls -d runs/*-sweep/*/ | wc -l) = 20"),
        also("anabranch simulate run.toml", says=EQUAL),
    ),
)

WALKS = (COMPARED, SWEPT)
