"""docs/tuning.md: a file with `[tune]`, what it leaves, the same command again, and one by options alone."""

import re

from pages import ROOT
from walking import Walk, Write, also, types


def settings() -> str:
    """The page's file, with a smaller budget."""
    (found,) = re.findall(r"```toml\n# run.toml\n(.*?)```", (ROOT / "docs/tuning.md").read_text(), re.DOTALL)
    smaller = {"updates_max = 120": "updates_max = 24", "trials = 8": "trials = 3\nextensions = 0\nseeds = 1"}
    for was, now in smaller.items():
        assert was in found
        found = found.replace(was, now)
    return str(found)


TUNED = Walk(
    "a run that is tuned",
    page="docs/tuning.md",
    copies=("examples",),
    steps=(
        Write("run.toml", settings()),
        types("anabranch tune run.toml", says="recommended: accuracy"),
        types("anabranch simulate runs/tuned/recommended.toml", says="accuracy"),
        also("anabranch tune run.toml --out runs/tuned --parallel 2", says="recommended: accuracy"),
        also("grep -q 'The front' runs/tuned/tune.html"),
        also("anabranch simulate run.toml --updates 4", says="accuracy"),
        types("anabranch tune examples/wine.toml --target 0.9", says="recommended: accuracy"),
        also("anabranch tune examples/wine.toml --updates 0 --set run.target_accuracy=0.0", ends=2),
    ),
)

WALKS = (TUNED,)
