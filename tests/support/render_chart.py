"""Lints and renders a chart by helm's own engine, in a process of its own.

Its argument is the chart's folder, its input the values as JSON. It prints a line of JSON: the errors of the
lint, and either the manifests by template or why there are none.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Do so."""
    from helm_python.chart import Chart, lint
    from helm_python.errors import HelmError

    chart, values = sys.argv[1], json.load(sys.stdin)
    found = {"errors": lint(chart, values, strict=True)["errors"], "manifests": {}, "failed": ""}
    try:
        found["manifests"] = Chart.load(chart).render(values, name="fed", namespace="somewhere")
    except HelmError as error:
        found["failed"] = str(error)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
